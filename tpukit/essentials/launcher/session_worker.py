"""The worker function of a session: run one function after the other, in a process that stays.

    command    command thread                    thread of the core
    RUN 3      puts 3 into a queue               runs function 3, sends its result
    LIMIT 45   sets the limit, reports           waits at boundary 46, reports "paused"
               "running", 41 passed
    RAISE      interrupts the function           RunStopped unwinds the function
                                                 cleans up, reports "prompt"
    END        as RAISE; but in `fit` it only    `fit` runs a step, saves, and raises
               sets `end_requested`              `Terminated`; then as after RAISE

A boundary is the beginning of a step, or of a collective outside of steps. All cores pass the same
boundaries in the same order, so the number of boundaries passed is a common clock. With it the
kernel stops all cores between the same two steps.

On TPU v2 and v3 two cores are threads of a process. A command reaches both, and each of them
runs, pauses and stops by itself. The exception of RAISE cannot end a call of native code there.
"""

import gc
import linecache
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable

from tpukit.essentials.data import remember
from tpukit.essentials.environment import OwnMemory, reset_peak_memory
from tpukit.essentials.launcher import channel, messages, serialization, signals, worker
from tpukit.essentials.launcher.core import Core

_POLL_SECONDS = 0.002  # between two looks of a core that waits for a command or another core

_cores: list["_SessionCore"] = []  # of this process
# One core of a process at a time unpickles its call (the cores get the same classes, but values of
# their own), or collects garbage: beside another collection `gc.collect` returns at once, and
# `abandon` refers to all objects, also to the garbage of the other core.
_turn = threading.Lock()


class RunStopped(BaseException):
    """The kernel has stopped the run; this unwinds the worker function.

    It is not an `Exception`, so `except Exception` does not catch it.
    """


class StoppingPoint:
    """Makes a core wait at a boundary, until the kernel moves the limit or stops the run.

    Attributes:
        passed: number of boundaries that the core has passed in this run.
        arrived: `passed`, plus 1 while the core is in `cross`.
        limit: number of boundaries that the core may pass; the command thread sets this number.
        is_paused: whether the core waits at a boundary.
    """

    def __init__(self, report: Callable[[], None]):
        self._report = report
        self.begin_run()

    def begin_run(self) -> None:
        """Count from 0 again, without a limit."""
        self.passed = 0
        self.arrived = 0
        self.limit = math.inf
        self.is_paused = False

    def cross(self) -> None:
        """Pass a boundary of the run; first wait while `passed` is as large as `limit`."""
        # No lock, because every step comes here, and because an exception that the command thread
        # raises in this one could leave it locked. Instead the core changes `arrived` and then
        # reads the limit, and the command thread sets the limit and then reads `arrived`. So
        # a report never hides that the core is past a boundary.
        self.arrived = self.passed + 1
        if self.arrived > self.limit:
            try:
                self.is_paused = True
                self._report()
                while self.arrived > self.limit:
                    time.sleep(_POLL_SECONDS)
            finally:
                self.is_paused = False
        self.passed = self.arrived


class _SessionCore:
    """A core of a session: its runs, its position in the current run, and the commands to it."""

    def __init__(self, core: Core, calls: serialization.CallFile):
        self._core = core
        self._calls = calls
        self._worker = worker.this_worker()
        self._thread = threading.get_ident()
        # In a process with two cores both run in other threads, which get no signals.
        self._is_main_thread = threading.current_thread() is threading.main_thread()
        self._runs: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._reporting = threading.Lock()
        self._run = 0  # the last that this core was ready to begin
        self._is_at_prompt = False
        self._is_in_function = False
        self._is_stopped = False
        self._shared_numbers: int | None = None
        self._point = StoppingPoint(self._report)
        core.internal.at_boundary = self._point.cross
        # Each run begins with these again, because an earlier run may have changed them: Lightning
        # sets a handler, asyncio the signal pipe, user code the streams.
        self._streams = sys.stdout, sys.stderr
        self._torch_settings = _torch_settings()
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        self._signal_pipe = -1
        if self._is_main_thread:
            self._signal_pipe = signal.set_wakeup_fd(-1)
            self._set_signals()

    def serve(self) -> None:
        """Run the functions of the session, until the process ends."""
        _cores.append(self)
        channel.pickle_with(serialization.Pickler)
        self._worker.on_command.append(self._obey)
        self._core.internal.send(messages.Result(self._core.rank, None))  # of run 0, the start
        self._wait_at_prompt()
        (memory,) = (each.memory for each in self._worker.cores if each.core is self._core)
        while True:
            self._begin_run(self._runs.get(), memory)
            has_returned = worker.run_function(self._core, memory, self._call)
            if not has_returned:
                self._clean_up()
            self._wait_at_prompt()

    def _wait_at_prompt(self) -> None:
        internal = self._core.internal
        internal.agreement.end_run()
        internal.numbers.end_run(self._run)
        self._shared_numbers = internal.numbers.checksum()
        self._is_at_prompt = True
        if all(core._is_at_prompt for core in _cores):
            self._worker.finished.set()
        self._report()

    def _begin_run(self, run: int, memory: OwnMemory) -> None:
        """Reset the state of a run, and wait until every core of this process has done so."""
        self._is_at_prompt = False
        self._is_stopped = False
        self._worker.finished.clear()
        self._point.begin_run()
        self._core.internal.begin_run()
        sys.stdout, sys.stderr = self._streams
        for set_value, value in self._torch_settings:
            set_value(value)
        if self._is_main_thread:
            self._set_signals()
        reset_peak_memory()
        memory.begin()
        self._run = run
        # Streams and most settings belong to the process: the other core's function may change
        # them as soon as it runs.
        while any(core._run != run for core in _cores):
            time.sleep(_POLL_SECONDS)

    def _set_signals(self) -> None:
        signal.signal(signal.SIGTERM, self._on_sigterm)
        # SIGINT stops a run, because `channel` postpones it while a message is sent.
        signal.signal(signal.SIGINT, self._stop)
        signal.set_wakeup_fd(self._signal_pipe, warn_on_full_buffer=False)

    def _call(self, core: Core) -> object:
        """Run the function that the kernel has sent."""
        try:
            self._is_in_function = True
            if self._is_stopped:  # RAISE came before this call, so its SIGINT had no effect
                raise RunStopped
            call = self._calls.read()
            self._prepare(next(call))
            with _turn:
                fn, args = next(call)
            remember(fn, args)
            for line in serialization.of_earlier_classes(core.state, fn):
                core.print(line)
            result = fn(core, *args)
            if core.backend.in_graph:
                core.backend.wait()  # Python may return while the device still waits for a core
            return result
        finally:
            with self._worker.sender.lock:  # `_interrupt` holds it
                self._is_in_function = False
                signals.raise_in_thread(self._thread, None)

    def _prepare(self, circumstances: serialization.Circumstances) -> None:
        internal = self._core.internal
        os.chdir(circumstances.folder)
        sys.path[:] = circumstances.path
        linecache.cache.update(circumstances.sources)
        if circumstances.was_left:
            # On all cores, also on those that returned: the cores must forget the same gradients.
            internal.abandon()
            self._core.backend.reopen(self._run)
        if circumstances.seeds_again:
            internal.numbers.start(self._run)

    def _clean_up(self) -> None:
        """Finish the device's work after an exception, before the core goes to its prompt."""
        with _turn:
            self._core.internal.abandon()
            gc.collect()  # the frames of the traceback hold tensors
        backend = self._core.backend
        if backend.traced:
            # `sync` first, which completes the recorded step: `wait` alone would compute half of
            # it, and the memory of the old weights is already released. If the device waits for a
            # core that has left the run, these calls do not return, and the session ends.
            try:
                backend.sync()
                backend.wait()
            except RuntimeError as error:
                print(f"the operations of the unfinished step cannot run: {error}", flush=True)

    def _stop(self, *_: object) -> None:
        """Handle SIGINT: after RAISE, leave the worker function, once per run."""
        if self._is_in_function and self._is_stopped:
            self._is_in_function = False  # a second SIGINT must not interrupt the unwinding
            raise RunStopped

    def _obey(self, command: bytes, number: int) -> None:
        """Obey a command of the kernel; called in the thread that reads commands."""
        match command:
            case worker.RUN:
                self._runs.put(number)
            case worker.LIMIT:
                self._point.limit = number
                self._report()
            case worker.END if self._core.internal.ends_between_steps:
                self._core.internal.stops_together = True
                self._core.internal.end_requested = True
                self._point.limit = math.inf
            case worker.END | worker.RAISE:
                self._is_stopped = True
                self._interrupt()

    def _interrupt(self) -> None:
        if self._is_main_thread:
            # This is the command thread, and Python handles signals in the main thread. The signal
            # also ends a system call in which that thread sleeps.
            signal.pthread_kill(self._thread, signal.SIGINT)
            return
        # The exception must not come after the function, or while a message is sent.
        with self._worker.sender.lock:
            if self._is_in_function:
                self._is_in_function = False
                signals.raise_in_thread(self._thread, RunStopped)

    def _report(self) -> None:
        import torch

        core = self._core
        is_clean = core.backend.can_reopen and not torch.distributed.is_initialized()
        numbers = self._shared_numbers
        with self._reporting:  # both threads report, and an older report must not arrive last
            place, passed = "running", self._point.arrived
            if self._point.is_paused or self._is_at_prompt:
                place = "prompt" if self._is_at_prompt else "paused"
                passed = self._point.passed
            at = messages.At(core.rank, self._run, place, passed, is_clean, numbers)
            core.internal.send(at)


def _torch_settings() -> list[tuple[Callable, object]]:
    """Return torch settings that cells often change, as (setter, current value)."""
    import torch

    return [
        (torch.set_grad_enabled, torch.is_grad_enabled()),
        (torch.set_default_dtype, torch.get_default_dtype()),
        (_set_default_device, torch.empty(0).device),
        (torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode()),
    ]


def _set_default_device(device) -> None:
    import torch

    # Only if it differs, because any default that was set, even "cpu", slows down all torch calls.
    if torch.empty(0).device != device:
        torch.set_default_device(device)


def serve(core: Core, calls: serialization.CallFile) -> None:
    """Run the functions of a session on a core; `Session` starts its workers with it.

    Args:
        core: the core.
        calls: the file into which the kernel writes each call.
    """
    _SessionCore(core, calls).serve()
