"""The thin helper that notebooks need. It runs without the other subpackages.

Its layers, from the bottom: display, environment, backends, data, launcher. A layer imports only
from those before it. It imports other subpackages only inside `with optional_subpackage(...)`.
"""
