"""Synthetic chest CTs in the competition's layout, so that everything runs without its data."""
