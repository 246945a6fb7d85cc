"""Describe a core that failed: the event, the line, the collective it waited in, and the fix.

    core 1: raise KeyError("image")      Failure(rank=1, what="raised KeyError: 'image'", ...)
    core 0: barrier() fails without it   Failure(rank=0, what="raised ...", waiting="barrier", ...)
    Failures.first()                     the one of core 1, because core 1 was in no collective
    report(failure, topology)            fact, found, fix and traceback, for `WorkerError`

The core itself describes an exception, and SIGTERM. The kernel describes the other failures: a
process that has ended, a result that it cannot unpickle, and a run that hangs.
"""

import contextlib
import os
import shutil
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tpukit.essentials.backends import Topology
from tpukit.essentials.display import ErrorParts, kind_of, parts_of
from tpukit.essentials.environment import is_installed_file
from tpukit.essentials.launcher.channel import SerializationError, deserialize, serialize
from tpukit.essentials.launcher.signals import (
    FAILURE_IN_A_COLLECTIVE_SECONDS,
    FAILURE_SECONDS,
    Terminated,
)

# The folder of tpukit. An error names the innermost line outside of it, which is the user's. It
# ends with a separator, because a folder such as "tpukit-experiments" is the user's, too.
_TPUKIT = f"{Path(__file__).parents[2]}{os.sep}"
# The last frame in one of these files calls the worker function.
_WORKERS = [str(Path(__file__).with_name(name)) for name in ("worker.py", "session_worker.py")]
_LONGEST_FACT = 2_000  # characters in a message
_LONGEST_TRACE = 20_000  # characters in a message; `WorkerError.traceback` is whole
_LONGEST_CAUSE = 100_000  # characters of a `__cause__`, of which a notebook prints every one
_LAST_READ_SECONDS = 0.1  # for the last log rows to arrive, when every core has returned or failed
_MIB = 2**20

# Texts of torch for .cuda() and .to("cuda") on a machine without a GPU. The last text appears if
# the notebook has called torch.cuda.is_available() before the fork.
_NO_CUDA = (
    "not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "Cannot re-initialize CUDA in forked subprocess",
)
# Texts of torch_xla for a tensor that is still in host memory.
_NOT_ON_XLA = ("Expected XLA tensor", "not an XLA tensor")
# Texts of torch for targets of classes that are floats.
_NOT_CLASSES = ("expected scalar type Long but found",)
# Text of a module that torch.export made (2.9), for a batch of another shape.
_NOT_AS_EXPORTED = "AssertionError: Guard failed:"
_TERMINATED = "was ended by SIGTERM"
_FIX_OF_SIGTERM = (
    "use fit(checkpoints=tpukit.Checkpoints(folder, backup_dir=...)): then the same cell continues "
    "from the last checkpoint;\nthe platform sends SIGTERM if it takes back a spot machine or the "
    "session's time is up, and `kill` sends it, too"
)


class Place(NamedTuple):
    """A line of Python code."""

    file: str
    line: int
    function: str


class Report(NamedTuple):
    """The parts of a `WorkerError`."""

    fact: str
    found: str
    fix: str
    details: str


@dataclass(frozen=True)
class Failure:
    """The failure of a core.

    Attributes:
        rank: the core.
        when: `time.monotonic()`, a clock that all processes of a machine share; 0 if this failure
            certainly came before all others.
        what: the event, such as "raised KeyError: 'a'" or "was killed by SIGKILL".
        waiting: the collective in which the core failed, probably because of another core; None if
            it was in none.
        place: the innermost line of the user's code; None if it is not known.
        trace: the traceback, the last output or the stacks.
        title: the heading of `trace` in the message.
        error: the exception, if it can be pickled and the kernel can unpickle it.
        found: the evidence in the exception's own message.
        fix: the action that the message advises.
    """

    rank: int
    when: float
    what: str
    waiting: str | None = None
    place: Place | None = None
    trace: str = ""
    title: str = "its traceback"
    error: BaseException | None = None
    found: str = ""
    fix: str = "correct that line and run the cell again; the kernel need not be restarted"

    # The exception is pickled apart: the report must arrive even if only the worker can import the
    # exception's module.
    def __getstate__(self) -> dict:
        return vars(self) | {"error": [bytearray(part) for part in serialize(self.error)]}

    def __setstate__(self, state: dict) -> None:
        error = None
        with contextlib.suppress(Exception):
            error = deserialize(state["error"])
        vars(self).update(state, error=error)

    @property
    def is_sigterm(self) -> bool:
        """Whether SIGTERM ended the core."""
        return self.what == _TERMINATED


class Failures:
    """The failures of a run so far.

    The report of the first failure may arrive later than others, so the kernel waits for 0.5 s. If
    all failed cores were in collectives, another core is the cause: the kernel waits for 2 s.
    """

    def __init__(self) -> None:
        self._failures: list[Failure] = []
        self._deadline = float("inf")

    def __bool__(self) -> bool:
        return bool(self._failures)

    @property
    def ranks(self) -> set[int]:
        """The cores that failed."""
        return {failure.rank for failure in self._failures}

    def add(self, failure: Failure) -> None:
        """Add a failure."""
        self._failures.append(failure)
        if all(failure.waiting for failure in self._failures):
            self._wait_at_most(FAILURE_IN_A_COLLECTIVE_SECONDS)
        else:
            self._wait_at_most(FAILURE_SECONDS)

    def are_settled(self, every_core_is_known: bool) -> bool:
        """Return whether the kernel has waited long enough for reports of other failures.

        Args:
            every_core_is_known: True if every core has returned or failed. The wait then lasts at
                most 0.1 s more.
        """
        if self and every_core_is_known:
            self._wait_at_most(_LAST_READ_SECONDS)
        return time.monotonic() > self._deadline

    def first(self) -> Failure | None:
        """Return the failure that caused the others.

        That is the earliest failure outside of a collective. If all failures were in collectives,
        it is the earliest of these.
        """

        def order(failure: Failure) -> tuple[bool, float]:
            return bool(failure.waiting), failure.when

        return min(self._failures, key=order, default=None)

    def _wait_at_most(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)


# Failures that a worker describes


def exception_raised(rank: int, error: BaseException) -> Failure:
    """Describe the exception that ended a worker function."""
    when = time.monotonic()
    parts = _parts(error)
    # The result cannot be pickled. The error names its part, and a traceback would show only the
    # code of tpukit.
    if isinstance(error, SerializationError):
        what = f"returned something that cannot leave its process: {parts.fact}"
        return Failure(rank, when, what, fix=parts.fix)
    what = _what_happened(error, parts)
    return Failure(
        rank,
        when,
        what,
        waiting=_waiting(error),
        place=_place(error),
        trace=_own_traceback(error),
        error=_sendable(error),
        found=parts.found,
        fix=parts.fix or _fix_of_an_exception(what),
    )


def device_not_started(rank: int, error: BaseException) -> Failure:
    """Describe the exception of a device that did not start, before any code of the user ran."""
    trace = "".join(traceback.format_exception(error))
    parts = _parts(error)
    return Failure(
        rank,
        time.monotonic(),
        f"could not start its device: {kind_of(error)}: {_in_a_line(error, parts.fact)}",
        trace=trace,
        error=_sendable(error),
        found=parts.found,
        fix=parts.fix or _fix_of_a_start(trace),
    )


def sigterm_received(rank: int, frame: object) -> Failure:
    """Describe a core that gets SIGTERM, with the stack that it had at that moment."""
    return Failure(
        rank,
        time.monotonic(),
        _TERMINATED,
        trace=stack_text(frame),
        title="its stack when SIGTERM arrived",
        fix=_FIX_OF_SIGTERM,
    )


def stack_text(frame: object) -> str:
    """Return the stack of a core as text, without the frames that call the worker function."""
    steps = traceback.extract_stack(frame)
    begin = 0
    for index, step in enumerate(steps):
        if step.filename in _WORKERS:
            begin = index + 1
    return "".join(traceback.format_list(steps[begin:]))


# Failures that the kernel describes


def process_ended(
    rank: int,
    exitcode: int,
    *,
    started: bool,
    memory: int | None,
    last_output: str,
) -> Failure:
    """Describe a process that ended without a result and without a report of a failure.

    Args:
        rank: the rank of its first core.
        exitcode: as `multiprocessing.Process.exitcode`, so negative for a signal.
        started: whether its device had started.
        memory: the peak host memory in its last report, in bytes; None without a report.
        last_output: the last lines that it printed.
    """
    when = time.monotonic()
    if exitcode == -signal.SIGKILL:
        # No core kills another, so this failure was the first, even if a busy kernel sees it last.
        when = 0.0
        used = ""
        if memory:
            used = f"; at its last report it had used {memory / _MIB:,.0f} MiB"
        what = f"was killed by SIGKILL, which happens when host memory runs out{used}"
        fix = (
            "a smaller batch_size, fewer cores= or DataLoader workers, or a dataset that is read "
            "from disk instead of one in memory"
        )
    elif exitcode < 0:  # another signal, such as SIGSEGV or SIGABRT of native code
        what = f"was killed by {_signal_name(-exitcode)}"
        fix = "a native library ended it; see what it printed last"
        if not started:
            what += " before its device had started"
            fix = _fix_of_a_start(last_output)
    else:
        what = f"ended with exit status {exitcode} before it returned"
        fix = "leave the worker function with return, not os._exit"
    return Failure(rank, when, what, trace=last_output, title="its last output", fix=fix)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # Python has no names for most real-time signals
        return f"signal {number}"


def result_unreadable(rank: int, error: Exception) -> Failure:
    """Describe a result that left its process and cannot be unpickled in the kernel."""
    what = f"returned something the kernel cannot unpickle: {type(error).__name__}: {error}"
    fix = "return tensors, arrays, numbers and containers of them"
    return Failure(rank, time.monotonic(), what, error=error, fix=fix)


def run_hangs(rank: int, what: str, fix: str, *, stacks: dict[int, str | None]) -> Failure:
    """Describe a run that hangs.

    Args:
        rank: the core to blame; its stack comes first.
        what: the event.
        fix: the action to advise.
        stacks: the stack of each core as text, by rank; None for a core that did not answer.
    """
    texts = []
    # The core to blame first; `sorted` leaves the order of the others.
    for core in sorted(stacks, key=lambda core: core != rank):
        stack = stacks[core]
        if stack is None:
            stack = "does not answer: native code blocks its Python interpreter\n"
        texts.append(f"core {core}:\n{stack}")
    return Failure(
        rank,
        time.monotonic(),
        what,
        trace="".join(texts),
        title="the stacks of the cores",
        fix=fix,
    )


# The message


def report(failure: Failure, topology: Topology, others: str = "ended") -> Report:
    """Return the fact, the evidence, the fix and the traceback of the error that a user reads.

    Args:
        failure: the failure that caused all others.
        topology: the layout of the run.
        others: what happened to the other cores: "ended"; or "stopped" if a session keeps their
            processes for its next run.
    """
    what = _shortened(failure.what, _LONGEST_FACT)
    fact = f"core {failure.rank} of {topology.world_size} {what}{_others(topology.cores, others)}"
    # The exception's own evidence first, then the circumstances.
    found = []
    if failure.found:
        found.append(failure.found)
    if failure.waiting:
        found.append(f"it was waiting for the other cores in {failure.waiting}()")
    if failure.place:
        found.append(_in_words(failure.place))
    details = ""
    if failure.trace:
        details = f"{failure.title}:\n{_shortened(failure.trace, _LONGEST_TRACE)}"
    return Report(fact, "\n".join(found), failure.fix, details)


def _others(cores: int, what: str) -> str:
    if cores == 1:
        return ""
    if cores == 2:
        return f" (the other was {what})"
    return f" (the other {cores - 1} were {what})"


def _shortened(text: str, most: int) -> str:
    """Leave out the middle of a long text; an exception's text may contain a whole tensor."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    half = most // 2  # errors often have their reason at the beginning or at the end
    return f"{text[:half]} [... {left_out:,} characters are left out here ...] {text[-half:]}"


def _in_words(place: Place) -> str:
    """Return a place in the words of a notebook: `train(), cell 12, line 9`."""
    cell = _notebook_cell(place.file)
    file = place.file if cell is None else f"cell {cell}"
    return f"{place.function}(), {file}, line {place.line}"


def _notebook_cell(file: str) -> int | None:
    """Return the number of the notebook cell with this file name; None for a real file."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None:
        return None
    numbers = getattr(shell.compile, "_filename_map", None)  # {file name: cell}, from IPython 8 on
    if numbers is None:  # IPython 7, on Colab, makes the name from the source
        numbers = {}
        for number, source in enumerate(shell.history_manager.input_hist_raw):
            for end in ("", "\n"):  # the history stores cells without their last line end
                text = source + end
                numbers[shell.compile.get_code_name(text, text, number)] = number
    return numbers.get(file)


# Reading an exception


def _parts(error: BaseException) -> ErrorParts:
    try:
        return parts_of(error)
    except Exception as another:  # the class of an exception may do anything in __str__
        return ErrorParts(f"(its text cannot be made: {type(another).__name__})", "", "")


def _what_happened(error: BaseException, parts: ErrorParts) -> str:
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r}) before it returned a result"
    if isinstance(error, Terminated):
        return _TERMINATED
    return f"raised {kind_of(error)}: {_in_a_line(error, parts.fact)}".removesuffix(": ")


def _in_a_line(error: BaseException, text: str) -> str:
    """Return an exception's text and its notes in one line.

    If the text has many lines, as from a process of a DataLoader, it keeps the first line and the
    last two lines.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 3:
        lines = [lines[0], "...", "; ".join(lines[-2:])]
    notes = [f"({note})" for note in getattr(error, "__notes__", [])]
    return " ".join([*lines, *notes])


def _own_traceback(error: BaseException) -> str:
    """Return the traceback as text, from the user's own function on."""
    steps = error.__traceback__
    while steps and steps.tb_next and steps.tb_frame.f_code.co_filename.startswith(_TPUKIT):
        steps = steps.tb_next
    return "".join(traceback.format_exception(type(error), error, steps))


def _waiting(error: BaseException) -> str | None:
    """Return the collective in which an exception was raised, from the exception's attribute.

    `CoreInternal.together` sets this attribute.
    """
    for link in _chain(error):
        if hasattr(link, "waiting"):
            return link.waiting
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, and then each exception that was its cause or context."""
    seen = set()  # by identity, because `raise error from error` makes an error its own cause
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _place(error: BaseException) -> Place | None:
    """Return the innermost line of the user's own code; None if the traceback has none."""
    libraries = (_TPUKIT, sysconfig.get_path("stdlib"), "<frozen")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):  # from the innermost outwards
        file = frame.filename
        if not is_installed_file(file) and not file.startswith(libraries):
            return Place(file, frame.lineno or 0, frame.name)
    return None


def _sendable(error: BaseException) -> BaseException | None:
    """Return the exception if the kernel can unpickle it, otherwise None.

    Pickle calls the class with `error.args`, which many exception classes do not support.
    """
    try:
        if len(str(error)) > _LONGEST_CAUSE:
            return None
        again = deserialize([bytearray(part) for part in serialize(error)])
    except Exception:  # an exception class may do anything in __reduce__ and __init__
        return None
    return error if type(again) is type(error) else None


# Fixes


def _fix_of_an_exception(what: str) -> str:
    # Texts of torch and torch_xla that users of GPUs meet first on a TPU.
    if any(words in what for words in _NO_CUDA):
        return (
            "core.model(model) in place of model.cuda(), and tensor.to(core.device) in place of "
            "tensor.cuda(); batches of core.batches are on the device already"
        )
    if "DataLoader worker (pid" in what:
        return _fix_of_a_dead_loader()
    if _TERMINATED in what:
        return _FIX_OF_SIGTERM
    if any(words in what for words in _NOT_ON_XLA):
        return (
            "model = core.model(model) before the optimizer is made, and .to(core.device) for "
            "tensors that the function makes itself; batches of core.batches are on the device "
            "already"
        )
    if any(words in what for words in _NOT_CLASSES):
        return "targets of classes are int64: targets.long(), in the dataset or before the loss"
    if _NOT_AS_EXPORTED in what:
        return (
            "core.model(model) with the original model; a module of torch.export supports only the "
            "batch shape of its export,\nunless an axis is dynamic: torch.export.export(model, "
            "(inputs,), dynamic_shapes=({0: torch.export.Dim.AUTO},))"
        )
    return Failure.fix


def _fix_of_a_dead_loader() -> str:
    free = 0
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
    return (
        f"a DataLoader process was killed, probably for lack of host memory or of /dev/shm (now "
        f"{free / _MIB:,.0f} MiB free);\nworkers=0, a smaller batch_size, or a container with more "
        "shared memory"
    )


def _fix_of_a_start(text: str) -> str:
    """Return the fix for a device that did not start, given the text of torch_xla about it."""
    if "worker addresses" in text:
        return (
            "tpukit.setup() removes TPU_PROCESS_ADDRESSES, which all workers would share; "
            "then run this cell again"
        )
    return (
        "wait half a minute and run the cell again, because chips stay busy for some seconds after "
        "a worker was killed;\nif that does not help, tpukit.check() names the process that uses "
        "the chips, and a restart of the session frees them"
    )
