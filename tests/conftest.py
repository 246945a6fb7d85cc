import importlib.util

import pytest


def pytest_collection_modifyitems(items):
    """Skip what needs torch_xla where it has no wheel, with the reason a user would read."""
    if importlib.util.find_spec("torch_xla") is None:
        for item in items:
            if item.get_closest_marker("xla"):
                item.add_marker(pytest.mark.skip(reason="torch_xla has wheels for Linux on x86-64 only"))
