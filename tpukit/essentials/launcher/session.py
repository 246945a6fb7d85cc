"""Cores that stay alive between the cells of a notebook: `Session`.

    session = tpukit.Session()        fork the workers, which open the chips
    session.run(train, 1)             send the function, watch the run as `launch` does
    session.run(train, 1)             the same processes: nothing is compiled again
    session.close()

The workers run `session_worker.serve`, which waits for functions to run. The point at which a core
waits for the next function is its prompt. After an exception or an interrupt the session brings
every core back to its prompt (`_Recovery`); if that fails, the session ends.
"""

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from tpukit.essentials.backends import runtimes
from tpukit.essentials.display import (
    InvalidValueError,
    NotInstalledError,
    TpukitError,
    counted,
    duration,
    parse_duration,
    screen,
)
from tpukit.essentials.environment import Folders, MachineInfo, SessionRecord, open_sessions
from tpukit.essentials.launcher import worker
from tpukit.essentials.launcher.calls import refuse_call
from tpukit.essentials.launcher.launcher import (
    LaunchInterrupted,
    LaunchOptions,
    Logger,
    Run,
    log_writers,
    outcome,
    plan,
    started,
    watch,
    worker_failed,
)
from tpukit.essentials.launcher.signals import (
    SAVE_SECONDS,
    STEP_SECONDS,
    sigterm_ends_the_run,
    without_interrupts,
)
from tpukit.essentials.launcher.topology import RuntimeInUseError
from tpukit.essentials.launcher.watchdog import Limits, refuse_seconds
from tpukit.essentials.launcher.worker_group import WorkerGroup, session_groups

_PROMPT_SECONDS = 3.0  # for all cores to come back after an exception or an interrupt
# If no core moves for so long, all get the exception where they are (in `fit`, whose steps may be
# slow, only after `STEP_SECONDS`). At the latest they get it so long before the end of their time.
_RAISE_SECONDS = 1.0
_ASK_SECONDS = 0.02  # between two commands LIMIT, which also ask for the cores' positions
_LOOK_SECONDS = 0.002  # between two reads of the workers' messages
_NEW = "run the cell that makes the session again: session = tpukit.Session(...)"
_open: list["Session"] = []


class SessionEndedError(TpukitError, RuntimeError):
    """The session was closed, has ended after a failure, or is busy with another run."""


class Session(contextlib.AbstractContextManager):
    """Worker processes that stay alive between the cells of a notebook.

    The chips are opened once. A run starts within a tenth of a second, and a program that an
    earlier run has compiled is used again. What a worker function stores in `core.state` stays on
    the device for the next run, such as the model, the optimizer and the data.

        session = tpukit.Session()
        session.run(prepare, "packed")
        session.run(train, 1)
        session.close()

    `with tpukit.Session() as session:` closes it as well. A kernel has one session per backend and
    `device`: a new one closes the old one, so the cell can be run again.

    Unlike the workers of `launch`, the workers of a session are not new forks of the notebook.
    Functions, classes and values are sent with `cloudpickle` at each call. Environment variables
    and settings of torch stay as they were when the session began; tpukit prints the names of
    variables and modules that have changed. The working directory and `sys.path` are exceptions:
    each run uses those of the notebook.

    Args:
        cores, device, backend: as `launch`.
        seed: seed of all random numbers, by default 0; None for `torch.initial_seed()` of the
            notebook. The random sequence continues from run to run. Exception: with several cores,
            a call of `core.seed` or `core.same_seed` starts a new sequence for the next run.
        limits: as `launch`.
        progress: the display of the session's start, as `launch`.
        matmul_precision, compile_cache, shard: as `launch`.
        idle: time without a run after which the session closes itself and gives its chips back,
            such as "30m"; None for no limit.

    Raises:
        NotInstalledError: cloudpickle is missing.
        InvalidValueError: as `launch`; or the system cannot fork.
        RuntimeInUseError: as `launch`; or this is not the main thread. Linux would end the workers
            when this thread ends.
        WorkerError: a device did not start.
        DeviceBusyError, LaunchInterrupted: as `launch`.
    """

    def __init__(
        self,
        cores: int | None = None,
        backend: str | None = None,
        seed: int | None = 0,
        *,
        device: int | None = None,
        limits: Limits = Limits(),
        progress: str | None = None,
        matmul_precision: str | None = None,
        compile_cache: Folders | bool | None = None,
        shard: str | None = None,
        idle: str | float | None = "30m",
    ):
        _refuse_other_threads()
        with _cloudpickle_is_there():
            from tpukit.essentials.launcher import serialization
            from tpukit.essentials.launcher.session_worker import serve
        self._idle = None if idle is None else parse_duration(idle, "idle")
        self._limits = limits
        # A run acquires it, and so does the thread that closes an idle session. It is reentrant,
        # because a run that fails closes the session itself.
        self._lock = threading.RLock()
        self._ended = ""  # the reason why the session has ended; "" while it is open
        self._closed = threading.Event()
        self._is_running = False
        self._was_left = False  # whether a core left the last run before its function returned
        self._calls = serialization.CallFile()
        self._serialize_call = serialization.serialize_call
        options = LaunchOptions(
            cores=cores,
            device=device,
            backend=backend,
            seed=seed,
            limits=limits,
            matmul_precision=matmul_precision,
            compile_cache=compile_cache,
            shard=shard,
        )
        # All checks come before the earlier session ends, so that a wrong argument leaves it open.
        task, topology = plan(serve, (self._calls,), options, MachineInfo.read())
        _refuse_without_forks(topology)
        _close_earlier(topology)
        with (
            sigterm_ends_the_run(),
            screen(progress) as display,
            contextlib.ExitStack() as resources,
        ):
            self._group = resources.enter_context(started(task, topology, options, display))
            failure = watch(self._group, display)
            if failure is None:
                self._surroundings = serialization.Surroundings()
                self._last_use = time.monotonic()
                # After an interrupt between two of these lines, nobody could end the workers.
                with without_interrupts():
                    self._resources = resources.pop_all()  # the workers stay
                    self._register()
        if failure is not None:
            raise worker_failed(failure, self._group)

    def _register(self) -> None:
        self._record = _record(self._group)
        open_sessions.append(self._record)  # for `check`, which names the programs on the chips
        session_groups.append(self._group)  # later forks close their copies of these workers' pipes
        _open.append(self)
        # Otherwise multiprocessing would wait for the workers when the program ends.
        atexit.register(self.close)
        if self._idle is not None:
            threading.Thread(target=self._close_when_idle, daemon=True).start()

    def __repr__(self) -> str:
        topology = self._group.topology
        cores = f"{topology.cores} x {topology.device}"
        if self._ended:
            return f"Session: {cores}, closed: {self._ended}"
        return f"Session: {cores}, open; {counted(self._group.run, 'run')}"

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        fn: Callable,
        *args: object,
        timeout: float | None = None,
        progress: str | None = None,
        loggers: Logger | Sequence[Logger] | None = None,
    ) -> Run:
        """Run `fn(core, *args)` on every core of the session, and return the results.

        The function, and the notebook's functions, classes and values that it uses, are sent as
        they are now. Keep large data in `core.state`, because a call can send at most 64 MB.

        After an exception or an interrupt, tpukit waits until all cores have left the function:
        at most 3 seconds, or 8 if the function has called `fit`. Then the session continues, with
        `core.state` as the cores left it. tpukit clears the gradients of the unfinished step and
        seeds the random numbers again. If a core has not left the function, the session ends. One
        cause is a core that waits inside a compiled step for a core that raised. Another cause, on
        v2 and v3 only, is a long call of native code, such as `time.sleep`. The error reports
        whether the session continues, and the reason.

        Args:
            fn: the worker function; its first argument is a `Core`.
            *args: further arguments of `fn`.
            timeout: seconds after which the run is stopped. None for no limit.
            progress, loggers: as `launch`.

        Returns:
            A `Run`, as `launch` returns it.

        Raises:
            SessionEndedError: the session was closed, has ended, or already runs a function.
            InvalidValueError: the call is larger than 64 MB; or `timeout` is not a number above 0.
            SerializationError: a part of the call cannot be pickled.
            InvalidTypeError, WorkerError, LaunchInterrupted: as `launch`.
        """
        refuse_call(fn, args, "session.run")
        if timeout is not None:
            refuse_seconds("timeout", timeout, fix="timeout=3600, or None for no limit")
        with self._lock:
            self._refuse_if_not_ready()
            call = self._serialize_call(fn, args)
            self._is_running = True
            try:
                return self._run(call, timeout, progress=progress, loggers=loggers)
            finally:
                self._is_running = False
                self._last_use = time.monotonic()

    def close(self) -> None:
        """End the workers, which gives the chips back. A second call does nothing.

        Raises:
            SessionEndedError: a logger calls `close` during a run of the session.
        """
        with self._lock:
            self._refuse_in_a_run("session.close()")
            self._end("it was closed")

    def _run(self, call, timeout: float | None, *, progress: str | None, loggers) -> Run:
        group = self._group
        # Random numbers of the cores must be equal outside of steps, as at the start of a launch.
        seeds_again = self._was_left or self._drew_unequally()
        with sigterm_ends_the_run(), screen(progress) as display:
            for line in self._surroundings.changes():
                display.line(line)
            if seeds_again and not self._was_left:
                display.line(
                    "the cores drew unequal amounts of random numbers outside of steps in the last "
                    "run; all begin anew from the seed and the number of the run"
                )
            writers = log_writers(loggers, display)
            group.begin_run(display, self._limits, timeout=timeout, writers=writers)
            self._calls.write(call, was_left=self._was_left, seeds_again=seeds_again)
            try:
                with without_interrupts():  # else some cores would begin the run and others not
                    self._was_left = False
                    group.send(worker.RUN, group.run)
                failure = watch(group, display, self._recover)
                if failure is None:
                    self._wait_for_prompts()
                    return outcome(group)
                text = self._recover("a core was ended by SIGTERM" if failure.is_sigterm else "")
            except BaseException as error:
                is_handled = isinstance(error, TpukitError | LaunchInterrupted)
                if isinstance(error, KeyboardInterrupt) and not is_handled:
                    self._recover()  # the interrupt came before or after `watch`
                elif not is_handled:  # for example `Terminated`, after SIGTERM
                    self._end(f"{type(error).__name__} in the kernel")
                raise
        others = "ended" if self._ended else "stopped"
        raise worker_failed(failure, group, others=others, text=text)

    def _refuse_if_not_ready(self) -> None:
        if self._ended:
            raise SessionEndedError("the session has ended", found=self._ended, fix=_NEW)
        self._refuse_in_a_run("session.run(...)")

    def _refuse_in_a_run(self, call: str) -> None:
        if self._is_running:
            raise SessionEndedError(
                "the session is busy: it runs one function at a time",
                fix=f"call {call} after the run; a function in loggers= may not call it",
            )

    def _drew_unequally(self) -> bool:
        """Return whether the cores' shared random numbers differed at the end of the last run."""
        drawn = {place.numbers for place in self._group.places.values()}
        return len(drawn - {None}) > 1

    def _wait_for_prompts(self) -> None:
        """Wait until the cores that have returned are ready for the next run."""
        why_it_ends = _Recovery(self._group).wait_for_prompts()
        if why_it_ends:
            self._end(why_it_ends)

    def _recover(self, why_it_ends: str = "") -> str:
        """Bring every core back to its prompt, or end the session; return the outcome as text."""
        try:
            why_it_ends = why_it_ends or _Recovery(self._group).bring_back()
        except KeyboardInterrupt:
            why_it_ends = "it was interrupted again before all cores were back"
        if why_it_ends:
            self._end(why_it_ends)
            return f"the session has ended, and core.state is lost: {why_it_ends}; {_NEW}"
        self._was_left = True
        return (
            "the session goes on with core.state as it is; gradients are cleared, random numbers "
            "begin anew"
        )

    def _end(self, why: str) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = why
            self._closed.set()
            _open.remove(self)
            open_sessions.remove(self._record)
            session_groups.remove(self._group)
            atexit.unregister(self.close)
            self._calls.close()
            self._resources.close()  # last, because it takes seconds and may be interrupted

    def _close_when_idle(self) -> None:
        while not self._closed.wait(self._idle_seconds_left()):
            with self._lock:
                # A run may have used or ended the session while this thread waited for the lock.
                if self._ended or self._idle_seconds_left() > 0:
                    continue
                why = f"there was no run for {duration(self._idle)}"
                self._end(why)
                print(f"the session was closed, because {why}; its chips are free", flush=True)

    def _idle_seconds_left(self) -> float:
        return max(0.0, self._last_use + self._idle - time.monotonic())


class _Recovery:
    """Stops the run on all cores, if possible between the same two steps.

    A boundary is the beginning of a step, or of a collective outside of steps. At its prompt, a
    core waits for the next function.

    1. Each core waits before its next boundary, and reports how many it has passed.
    2. The largest number reported is the limit: the other cores run on to it, so that every
       collective that has begun completes.
    3. When all cores wait at the limit, an exception unwinds the worker functions. `fit` first runs
       one more step and saves.

    If no core passes a boundary for a second (five in `fit`) and not all wait at the limit, all get
    the exception at their present lines. This comes later if cores have passed different numbers
    of boundaries, because one may wait for another within a compiled step, and would wait forever
    after the exception. If a core has already left the run, all others get the exception at once,
    because their next collective would never end.
    """

    def __init__(self, group: WorkerGroup):
        self._group = group
        self._began = time.monotonic()
        self._limit = 0  # number of boundaries that every core may pass
        self._reported: list[int] = []  # numbers of boundaries passed
        self._moved = self._began  # when these numbers last changed

    def bring_back(self) -> str:
        """Return why the session must end; "" if all cores are at their prompts and in step."""
        next_request = 0.0
        end_command = None  # the last one sent
        while self._away() and self._seconds() < self._limit_seconds():
            time.sleep(_LOOK_SECONDS)
            self._group.read()
            if any(process.is_gone() for process in self._group.workers):
                return "a worker process is gone"
            self._take_reports()
            command = end_command or self._end_command()
            if self._seconds() > self._limit_seconds() - _RAISE_SECONDS:
                command = worker.RAISE  # also after END: `fit` did not end its step in time
            if command != end_command:
                end_command = command
                self._group.send(command, ranks=self._away())
            elif command is None and time.monotonic() > next_request:
                next_request = time.monotonic() + _ASK_SECONDS
                self._group.send(worker.LIMIT, self._limit)
        places = self._group.places.values()
        are_level = len({place.passed for place in places}) == 1
        if not self._away() and not (are_level or all(place.is_clean for place in places)):
            return "the cores stopped at different steps, so a collective may be half done"
        return self._why_not(self._limit_seconds())

    def _take_reports(self) -> None:
        reported = [place.passed for place in self._group.places.values()]
        if reported != self._reported:
            self._reported = reported
            self._moved = time.monotonic()
            self._limit = max([self._limit, *reported])

    def _end_command(self) -> bytes | None:
        """Return the command that ends the worker functions; None while it is too early."""
        group = self._group
        if len(group.places) < len(group.ranks):
            return None  # some cores have not reported yet
        if len(self._away()) < len(group.ranks):
            return worker.RAISE
        places = group.places.values()
        # Only at the limit is a report certain: below it, a core may have run on since.
        are_at_limit = all(place.passed == self._limit for place in places)
        if are_at_limit and all(place.place == "paused" for place in places):
            return worker.END
        may_leave_here = are_at_limit or all(place.is_clean for place in places)
        patience = STEP_SECONDS if group.core_0_may_save else _RAISE_SECONDS
        is_late = time.monotonic() - self._moved > patience
        return worker.RAISE if is_late and may_leave_here else None

    def wait_for_prompts(self) -> str:
        """Wait for cores that have returned; return why the session must end, or ""."""
        while self._away() and self._seconds() < _PROMPT_SECONDS:
            time.sleep(_LOOK_SECONDS)
            self._group.read()
        return self._why_not(_PROMPT_SECONDS)

    def _why_not(self, seconds: float) -> str:
        away = self._away()
        if not away:
            return ""
        return f"core {min(away)} did not come back within {seconds:g} seconds"

    def _away(self) -> set[int]:
        """Return the cores that are not at their prompts."""
        return {rank for rank in self._group.ranks if not self._group.is_at(rank, "prompt")}

    def _limit_seconds(self) -> float:
        return SAVE_SECONDS if self._group.core_0_may_save else _PROMPT_SECONDS

    def _seconds(self) -> float:
        return time.monotonic() - self._began


def _record(group: WorkerGroup) -> SessionRecord:
    topology = group.topology
    is_tpu = runtimes()[topology.backend].hardware == "TPU"
    return SessionRecord(
        f"{topology.cores} x {topology.device}",
        holds_chips=is_tpu and not topology.is_dry_run,
        device=topology.device_number,
        processes=tuple(process.process.pid for process in group.workers),
    )


# Source: prctl(2), PR_SET_PDEATHSIG. A worker gets its signal when the thread that forked it ends,
# which may be long before the process ends.
def _refuse_other_threads() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeInUseError(
            "a session must be made in the main thread: Linux ends the workers when the thread "
            "that forked them ends",
            found=f"this thread is {threading.current_thread().name}",
            fix="session = tpukit.Session(...) in a separate cell; session.run may be called in "
            "a thread",
        )


@contextlib.contextmanager
def _cloudpickle_is_there():
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "cloudpickle":
            raise
        raise NotInstalledError(
            "a session sends the notebook's functions with cloudpickle, which is not installed",
            fix="pip install cloudpickle, then run this cell again",
        ) from None


def _refuse_without_forks(topology) -> None:
    if topology.processes == 0:
        raise InvalidValueError(
            "a session needs worker processes, and this system cannot fork",
            fix="tpukit.launch(train), which runs one core in the notebook's own process; or use "
            "Linux, or WSL on Windows",
        )


def _close_earlier(topology) -> None:
    """Close the session that has the same devices, because its cell was run again."""
    for session in list(_open):
        # Sessions on other backends or chips can stay open.
        other = session._group.topology
        if (other.backend, other.device_number) == (topology.backend, topology.device_number):
            session._end("a new session took its place")
            print("the earlier session was closed, and its core.state is gone", flush=True)
