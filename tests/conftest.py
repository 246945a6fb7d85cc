import importlib.util
import multiprocessing
import signal

import pytest


def pytest_configure(config):
    """Let tests that interrupt themselves do so: a shell's `&` leaves SIGINT ignored for all that it starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _processes_meet_where_pytest_cleans_up(tmp_path_factory):
    """A DataLoader's processes that are ended by a signal leave the folder in which they hand tensors over."""
    multiprocessing.current_process()._config["tempdir"] = str(tmp_path_factory.mktemp("processes"))


def pytest_collection_modifyitems(config, items):
    """Leave out what only `make standin` runs; skip what needs torch_xla where it has no wheel."""
    if "every_machine" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("every_machine")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    if importlib.util.find_spec("torch_xla") is None:
        for item in items:
            if item.get_closest_marker("xla"):
                item.add_marker(pytest.mark.skip(reason="torch_xla has wheels for Linux on x86-64 only"))
