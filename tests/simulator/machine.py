"""Run a function on every core of a machine that the simulator provides, through torch_xla's own start-up."""

import contextlib
import ctypes
import dataclasses
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from unittest import mock

import pytest
from helpers.machines import on_machine

import tpukit
from tpukit.simulator import build, shapes

# What is tested with everything else; other machines take minutes, and only `make simulator` runs them.
IN_CI = ("two cores", "colab v5e-1", "kaggle v5e-8")

HANGS = 600.0  # seconds


def machines(names, *, only_soak=()) -> list:
    """Return the names of machines as parameters of a test, those that are not run every time marked so."""
    marks = {name: pytest.mark.every_machine for name in names if name not in IN_CI}
    marks |= dict.fromkeys(only_soak, pytest.mark.only_soak)
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


@dataclass
class Ended:
    """How one process ended: its exit status (negative: the signal), what each rank returned, or why it failed."""

    status: int
    returned: dict
    error: str
    printed: str
    seconds: float

    @property
    def said(self):
        """What went wrong: torch_xla 2.9 raises it, 2.8 ends the process with it."""
        return self.error + self.printed


@contextlib.contextmanager
def played(shape, **environ):
    """Make this process one on such a machine: its variables, after `setup`, and the machine to launch on."""
    host = dataclasses.replace(
        tpukit.machine_info(),
        platform="TPU VM",
        chips=shape.chips,
        generation=shape.generation,
        cpus=os.cpu_count(),
    )
    plugin = build.find_plugin().library
    with shapes.meeting_place() as path, mock.patch.dict(os.environ):
        os.environ |= (
            shapes.environment(shape, library=build.library(), plugin=plugin, memory=path) | environ
        )
        with on_machine(host):
            tpukit.setup()
            yield


def run(shape, body, *, library, environ=None, after_the_first=HANGS) -> list[Ended]:
    """Fork one process a chip, call `body()` once on each core, and return how each process ended.

    `environ` is what each process has besides the machine's own variables; None as a value removes one. What still
    runs so many seconds after the first has ended is killed.
    """
    with shapes.meeting_place() as path:
        plugin = build.find_plugin().library
        variables = shapes.environment(shape, library=library, plugin=plugin, memory=path)
        # What a launcher does for Kaggle: torch_xla keeps the image's address, with which processes cannot meet.
        variables["TPU_PROCESS_ADDRESSES"] = None
        _import_torch_xla()
        started = [
            _fork(number, shape, body, variables | (environ or {})) for number in range(shape.chips)
        ]
        return _wait(started, after_the_first)


def results(ended: list[Ended]) -> dict:
    """Return what each rank returned; raise what a process printed if one failed."""
    for number, process in enumerate(ended):
        if process.status or process.error:
            raise AssertionError(
                f"process {number} ended with {process.status}: {process.error}\n{process.printed[-1500:]}"
            )
    return {rank: value for process in ended for rank, value in process.returned.items()}


def on_every_core(shape, body, **others) -> dict:
    return results(run(shape, body, **others))


def _import_torch_xla():
    if "torch_xla" not in sys.modules:
        os.environ["PJRT_DEVICE"] = "TPU"  # or the import would choose one and say so in a warning
        import torch._dynamo  # noqa: F401  a process's first optimizer imports it: once, here, not in every fork
        import torch_xla  # noqa: F401

        del os.environ["PJRT_DEVICE"]


def _fork(number, shape, body, variables) -> tuple:
    read, write = os.pipe()
    printed = tempfile.TemporaryFile()  # noqa: SIM115  closed by _wait, when the child has ended
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks beside threads
        child = os.fork()
    if child:
        os.close(write)
        return child, read, printed
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        for name, value in variables.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)
        try:
            told = _start(number, shape, body), ""
        except BaseException as error:
            traceback.print_exc()
            told = {}, f"{type(error).__name__}: {error}"
        sys.stdout.flush()
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(told, pipe)
    finally:
        os._exit(0)


def _start(number, shape, body) -> dict:
    import torch
    import torch_xla._internal.pjrt as pjrt
    import torch_xla.runtime as xr

    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", "Use torch_xla", DeprecationWarning
    )  # torch_xla calls its own deprecated names

    def on_this_core():
        with torch.autograd.set_multithreading_enabled(
            False
        ):  # the fork has none of the engine's threads
            return xr.global_ordinal(), body()

    if shape.chips == 1:
        rank, returned = pjrt._run_singleprocess(on_this_core)
        return {rank: returned}
    by_thread = pjrt._run_thread_per_device(
        number, shape.chips, on_this_core, pjrt.initialize_multiprocess
    )
    return dict(by_thread.values())


def _wait(started, after_the_first) -> list[Ended]:
    start = time.monotonic()
    told = {read: b"" for _, read, _ in started}
    at = dict.fromkeys(told, HANGS)
    opened = set(told)
    while opened and time.monotonic() - start < min(HANGS, min(at.values()) + after_the_first):
        for read in select.select(list(opened), [], [], 0.2)[0]:
            some = os.read(read, 1 << 16)
            told[read] += some
            if not some:
                opened.remove(read)
                at[read] = time.monotonic() - start
    ended = []
    for child, read, printed in started:
        if read in opened:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(read)
        printed.seek(0)
        text = printed.read().decode(errors="replace")
        printed.close()
        returned, error = pickle.loads(told[read]) if told[read] else ({}, "")
        if read in opened:
            error = f"still running after {time.monotonic() - start:.1f} s"
        ended.append(Ended(status, returned, error, text, at[read]))
    return ended
