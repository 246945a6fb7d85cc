"""Scenes with one object, drawn here: the images, and a network that finds the object's mask and the depth."""
