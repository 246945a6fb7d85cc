"""Synthetic chest CTs in the competition's layout: drawn, so that everything runs without its data."""
