import contextlib
import importlib.util
import multiprocessing
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Minutes each, so they come first: what is left at the end is short, and no stream waits for another. Of these the one
# with a test that is `alone` begins beside faults, which are short, too: all wait until each stream has ended a test.
LONGEST = (
    "test_faults.py",
    "test_browser.py",
    "test_notebooks.py",
    "test_dicom_packing.py",
    "test_job.py",
    "test_pages.py",
    "test_kit.py",
    "test_trainer.py",
)
# The other tests that are `alone`, when hardly anything is left that would wait for them.
LAST = ("test_device_report.py", "test_orphans.py", "test_busy_time.py")
# Rooms whose files take seconds each, so that streams end together.
SHORT = {"pe", "metrics"}
# Files of which one stream need not run all: the part of a test's name that says what it shares with others.
APART = {
    "test_browser.py": r"\[(lab|notebook)",
    "test_faults.py": r"\[(\S+): ",
    "test_notebooks.py": r"\[([^\]]+)\]",
}


def pytest_configure(config):
    """Let tests interrupt and hang up: a shell's `&` leaves SIGINT ignored for all that it starts, nohup SIGHUP."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Without bytecode each of the hundreds of Pythons that are started here compiles all that it imports.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # XLA:CPU compiles in a third of the time then, also in kernels and programs; these graphs run a few times only.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    # A thread of torch's that waits for another spins, and with more threads than processors that is most of the work:
    # 25 steps of a small network took 4.8 s of processor time, and take 0.6.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Kernels neither read the user's own profile nor write into a home, which may be read-only.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
        os.environ["IPYTHONDIR"] = folder.name


@pytest.fixture(autouse=True, scope="session")
def _processes_meet_where_pytest_cleans_up(tmp_path_factory):
    """A DataLoader's processes that are ended by a signal leave the folder in which they hand tensors over."""
    multiprocessing.current_process()._config["tempdir"] = str(tmp_path_factory.mktemp("processes"))


@pytest.fixture(autouse=True, scope="session")
def _packs_are_made_by_forks():
    """A pack of ten images takes two processes, each of which would import for half a second."""
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(os, "fork") and (HERE / "helpers" / "forks.py").exists():
            from helpers import forks

            patch.setattr("tpukit.datasets.processes.subprocess", forks.in_place_of_subprocess)
        yield


@pytest.fixture(autouse=True)
def _the_notebook_has_a_seed():
    """A launch takes its seed from torch's generator, which differs from process to process where nobody seeds it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def how_often():
    """Return how often to repeat what chance decides: a few times, or as often as `make soak` asks for."""
    return lambda few, many: many if os.environ.get("TPUKIT_SOAK") else few


def pytest_collection_modifyitems(config, items):
    """Leave out what only another command than `make test` runs; skip what needs torch_xla where it has no wheel."""
    asked = set(re.findall(r"\w+", config.option.markexpr))
    left_out = {
        item
        for mark in ("every_machine", "judges", "only_soak")
        if mark not in asked
        for item in marked(items, mark)
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    order = {name: place for place, name in enumerate((*LONGEST, "other", "short", *LAST))}
    items.sort(
        key=lambda item: order.get(
            item.path.name, order["short" if SHORT & {*item.path.parts} else "other"]
        )
    )
    if importlib.util.find_spec("torch_xla") is None:
        for item in items:
            if item.get_closest_marker("xla"):
                item.add_marker(
                    pytest.mark.skip(reason="torch_xla has wheels for Linux on x86-64 only")
                )


def marked(items, mark):
    return [item for item in items if item.get_closest_marker(mark)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give a stream one file after the other, of those in APART a part: the faults of a backend, a notebook."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class InParts(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            part = re.search(APART.get(Path(file).name, "$^"), nodeid)
            return f"{file} {part[1]}" if part else file

    return InParts(config, log)


class Streams:
    """What keeps the streams of `pytest -n 4` apart where a test needs the machine to itself.

    Every test holds `room`, one that is marked `alone` as its only holder. It waits with `gate` in its hand, through
    which every test has to go, so that none begins meanwhile. Tests marked `alone` one after the other go in together.
    """

    def __init__(self):
        self.gate, self.room = (os.open(place, os.O_RDONLY) for place in (__file__, HERE))
        self.alone = False

    @contextlib.contextmanager
    def place(self, *, alone, next_alone):
        import fcntl

        if not self.alone:
            fcntl.flock(self.gate, fcntl.LOCK_EX)
            fcntl.flock(self.room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(self.gate, fcntl.LOCK_UN)
        yield
        self.alone = alone and next_alone
        if not self.alone:
            fcntl.flock(self.room, fcntl.LOCK_UN)


several = os.environ.get("PYTEST_XDIST_WORKER") and importlib.util.find_spec(
    "fcntl"
)  # Windows has none
streams = Streams() if several else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    if streams is None:
        return (yield)
    alone, next_alone = (bool(one and one.get_closest_marker("alone")) for one in (item, nextitem))
    with streams.place(alone=alone, next_alone=next_alone):
        return (yield)
