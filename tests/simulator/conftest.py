import importlib.util

import pytest

from tpukit.simulator import build


@pytest.fixture(scope="session")
def library():
    """The compiled simulator; where it cannot be had, the test is skipped with the words a user would read."""
    reason = build.why_not()
    if reason:
        pytest.skip(reason)
    if (
        importlib.util.find_spec("torch_xla") is None
    ):  # not imported here: that would choose a device for this process
        pytest.skip("torch_xla is not installed")
    return build.library()
