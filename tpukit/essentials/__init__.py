"""The parts of tpukit that every launch needs. They work without the other subpackages.

The layers are, from the bottom: display, environment, backends, data, launcher. A layer imports
only from the layers below it. Other subpackages are imported in `with optional_subpackage(...)`.
"""
