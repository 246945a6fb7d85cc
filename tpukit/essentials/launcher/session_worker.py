"""The worker function of a session: run one function after the other, in a process that stays.

               command thread                    main thread
    RUN 3      passes it on                      runs function 3, sends its result
    WHERE      reports "running", 41 passed      passes boundary 42
    LIMIT 45   sets the limit                    waits at boundary 46, reports "paused"
    RAISE      sends SIGINT                      RunStopped unwinds the function
                                                 cleans up, reports "prompt"

A boundary is the begin of a step, or of a collective outside of steps. All cores pass the same
boundaries in the same order, so the number passed is one clock for all of them. That lets the
kernel stop all cores between the same two steps.
"""

import gc
import linecache
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable

from tpukit.essentials.data import remember
from tpukit.essentials.environment import OwnMemory, reset_peak_memory
from tpukit.essentials.launcher import channel, messages, serialization, worker
from tpukit.essentials.launcher.core import Core

_POLL_SECONDS = 0.2  # between two looks of a paused core, so that it hears signals


class RunStopped(BaseException):
    """The kernel has stopped the run; unwinds the worker function. It is no `Exception`."""


class StoppingPoint:
    """Makes a core wait at a boundary, until the kernel moves the limit or stops the run.

    Attributes:
        passed: boundaries that the core has passed in this run.
        is_paused: whether it waits.
    """

    def __init__(self, report: Callable[[], None]):
        self._report = report
        self._turn = threading.Condition()
        self.begin_run()

    def begin_run(self) -> None:
        """Count from 0 again, without a limit."""
        self.passed = 0
        self.is_paused = False
        self._limit: int | None = None

    def limit(self, passed: int | None) -> None:
        """Let the core pass so many boundaries, and no more; None for any number."""
        with self._turn:
            self._limit = passed
            self._turn.notify_all()

    def cross(self) -> None:
        """Pass a boundary; wait while the limit is reached."""
        # First without the lock, because each step passes here. A limit that is set in this moment
        # stops the core at its next boundary.
        if self._limit is not None:
            with self._turn:
                try:
                    while self._limit is not None and self.passed >= self._limit:
                        if not self.is_paused:
                            self.is_paused = True
                            self._report()
                        self._turn.wait(_POLL_SECONDS)
                finally:
                    self.is_paused = False
        self.passed += 1


class _SessionCore:
    """A core of a session, and its place in the current run."""

    def __init__(self, core: Core, calls: serialization.CallFile):
        self._core = core
        self._calls = calls
        self._worker = worker.this_worker()
        self._runs: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._reporting = threading.Lock()
        self._run = 0
        self._is_at_prompt = False
        self._is_in_function = False
        self._is_stopped = False
        self._shared_numbers: int | None = None
        self._point = StoppingPoint(self._report)
        core.internal.at_boundary = self._point.cross
        # A run may change these: Lightning the handler, asyncio the pipe, a user the streams.
        self._streams = sys.stdout, sys.stderr
        self._torch_settings = _torch_settings()
        self._on_sigterm = signal.getsignal(signal.SIGTERM)
        self._signal_pipe = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(self._signal_pipe, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Run the functions of the session; it ends with the process."""
        channel.pickle_with(serialization.Pickler)
        self._worker.on_command = self._obey
        # SIGINT, because `channel` postpones it while a message is sent.
        signal.signal(signal.SIGINT, self._stop)
        self._core.internal.send(messages.Result(self._core.rank, None))  # of run 0, the start
        self._wait_at_prompt()
        while True:
            self._run = self._runs.get()
            self._is_at_prompt = False
            self._worker.finished.clear()
            memory = self._begin_run()
            has_returned = worker.run_function(self._core, memory, self._call)
            if not has_returned:
                self._clean_up()
            self._wait_at_prompt()

    def _wait_at_prompt(self) -> None:
        internal = self._core.internal
        internal.agreement.end_run()
        self._shared_numbers = internal.numbers.checksum()
        self._worker.finished.set()
        self._is_at_prompt = True
        self._report()

    def _begin_run(self) -> OwnMemory:
        """Reset everything that belongs to one run."""
        self._point.begin_run()
        self._is_stopped = False
        self._core.internal.begin_run()
        sys.stdout, sys.stderr = self._streams
        for set_value, value in self._torch_settings:
            set_value(value)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, self._stop)
        signal.set_wakeup_fd(self._signal_pipe, warn_on_full_buffer=False)
        reset_peak_memory()
        memory = OwnMemory()
        started = worker.StartedCore(self._core, threading.get_ident(), memory)
        self._worker.cores[:] = [started]
        return memory

    def _call(self, core: Core) -> object:
        """Run the function that the kernel has sent."""
        try:
            self._is_in_function = True
            if self._is_stopped:  # before the function began, so SIGINT had nothing to leave
                raise RunStopped
            call = self._calls.read()
            self._prepare(call.circumstances)
            fn, args = call.deserialize()
            remember(fn, args)
            for line in serialization.of_earlier_classes(core.state, fn):
                core.print(line)
            result = fn(core, *args)
            if core.backend.in_graph:
                core.backend.wait()  # Python may return while the device still waits for a core
            return result
        finally:
            self._is_in_function = False

    def _prepare(self, circumstances: serialization.Circumstances) -> None:
        internal = self._core.internal
        os.chdir(circumstances.folder)
        sys.path[:] = circumstances.path
        linecache.cache.update(circumstances.sources)
        if circumstances.was_left:
            internal.abandon()  # on all cores, because each may know something else
            self._core.backend.reopen(self._run)
        if circumstances.seeds_again:
            internal.numbers.start(self._run)

    def _clean_up(self) -> None:
        """Bring the device to rest after an exception; only then is the core at its prompt."""
        self._core.internal.abandon()
        gc.collect()  # the frames of the traceback hold tensors
        backend = self._core.backend
        if backend.traced:
            # First the end of a step: `wait` alone would compute half a step, and its weights' old
            # memory is gone. A device that waits for a core that has left does not come back.
            try:
                backend.sync()
                backend.wait()
            except RuntimeError as error:
                print(f"the operations of the step that was left cannot run: {error}", flush=True)

    def _stop(self, *_: object) -> None:
        """Handle SIGINT: leave the function, once per run, if the kernel has asked for that."""
        if self._is_in_function and self._is_stopped:
            self._is_in_function = False  # a second SIGINT must not interrupt the unwinding
            raise RunStopped

    def _obey(self, command: bytes, number: int) -> None:
        """Obey a command; runs in the thread that reads them."""
        match command:
            case worker.RUN:
                self._runs.put(number)
            case worker.LIMIT:
                self._point.limit(number)
                self._report()
            case worker.WHERE:
                self._report()
            case worker.RAISE:
                self._end_run()

    def _end_run(self) -> None:
        """Let a `fit` that waits at a boundary save and end; else interrupt the function."""
        internal = self._core.internal
        if internal.ends_between_steps and self._point.is_paused and not internal.stops_together:
            internal.stops_together = True
            internal.end_requested = True
            self._point.limit(None)
            return
        self._is_stopped = True
        # This is the command thread, and Python handles signals in the main thread. The signal also
        # ends a system call in which that thread sleeps.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    def _report(self) -> None:
        import torch

        core = self._core
        with self._reporting:  # else an older place could arrive after a newer one
            place = "paused" if self._point.is_paused else "running"
            if self._is_at_prompt:
                place = "prompt"
            has_default_group = torch.distributed.is_initialized()
            core.internal.send(
                messages.At(
                    core.rank,
                    self._run,
                    place,
                    passed=self._point.passed,
                    is_clean=core.backend.can_reopen and not has_default_group,
                    numbers=self._shared_numbers,
                )
            )


def _torch_settings() -> list[tuple[Callable, object]]:
    """Return the settings of torch that a cell often changes: the setter, and the value now."""
    import torch

    return [
        (torch.set_grad_enabled, torch.is_grad_enabled()),
        (torch.set_default_dtype, torch.get_default_dtype()),
        (_set_default_device, torch.empty(0).device),
        (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()),
    ]


def _set_default_device(device) -> None:
    import torch

    # Only if it differs, because a default that was set slows down every call of torch, also "cpu".
    if torch.empty(0).device != device:
        torch.set_default_device(device)


def serve(core: Core, calls: serialization.CallFile) -> None:
    """Run the functions of a session on a core; the worker function of the session's workers.

    Args:
        core: the core.
        calls: the file in which the kernel writes each call.
    """
    _SessionCore(core, calls).serve()
