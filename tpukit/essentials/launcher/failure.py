"""Every word about a core that failed: what happened, where, what it was waiting for, and what to do."""

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

from tpukit.essentials.backends import Topology
from tpukit.essentials.display import kind_of
from tpukit.essentials.launcher.channel import SerializationError, deserialize, serialize
from tpukit.essentials.launcher.signals import FAILURE_IN_A_COLLECTIVE_SECONDS, FAILURE_SECONDS, Terminated

# All of tpukit, so that errors blame the line of its caller; not a folder beside it, such as
# "tpukit-experiments".
_KIT = f"{Path(__file__).parents[2]}{os.sep}"
_LONGEST_FACT, _LONGEST_TRACE = 2_000, 20_000  # characters of a message; `WorkerError.traceback` is whole
_LONGEST_CAUSE = 100_000  # characters of an exception that becomes `__cause__`, which a notebook prints whole
_LAST_READ_SECONDS = 0.1  # for the last rows of a log, once every core has returned or failed


@dataclass(frozen=True)
class Failure:
    """How one core failed: said by the core itself or, if it could not, by the kernel.

    Attributes:
        rank: of the core.
        when: `time.monotonic()`, one clock for all processes of a machine; 0 where it caused all others.
        what: "raised KeyError: 'a'", "was killed by SIGKILL".
        waiting: the collective it was in, so the failure is probably another core's.
        where: (file, line, function) of the innermost line that is not a library's.
        trace: the traceback, or whatever else shows what happened, as text.
        title: what `trace` is.
        error: the exception itself where it survives pickling.
        fix: what to do, where that is known.
        advice: the lines "found:" and "fix:" that the exception itself brings; they take the place of `fix`.
    """

    rank: int
    when: float
    what: str
    waiting: str | None = None
    where: tuple[str, int, str] | None = None
    trace: str = ""
    title: str = "its traceback"
    error: BaseException | None = None
    fix: str = "correct that line and run the cell again; the kernel need not be restarted"
    advice: str = ""


class Failures:
    """The failures of a run so far, and how long to wait for one that happened first but is still on its way."""

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
        """Note a failure."""
        self._failures.append(failure)
        in_collectives = all(failure.waiting for failure in self._failures)
        self._wait_at_most(FAILURE_IN_A_COLLECTIVE_SECONDS if in_collectives else FAILURE_SECONDS)

    def are_settled(self, every_core_is_known: bool) -> bool:
        """Say whether no earlier failure can still be on its way; sooner if every core has returned or failed."""
        if self and every_core_is_known:
            self._wait_at_most(_LAST_READ_SECONDS)
        return time.monotonic() > self._deadline

    def first(self) -> Failure | None:
        """Return the one that made the others fail: the earliest outside of a collective, if there is one."""
        return min(self._failures, key=lambda failure: (bool(failure.waiting), failure.when), default=None)

    def _wait_at_most(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)


def device_not_started(rank: int, error: BaseException) -> Failure:
    """Describe the exception that kept a device from starting: no line of the user's is to blame."""
    trace = "".join(traceback.format_exception(error))
    fact, advice = _fact_and_advice(error)
    what = f"could not start its device: {kind_of(error)}: {_in_a_line(error, fact)}"
    fix, sent = _fix_of_a_start(trace), _sendable(error)
    return Failure(rank, time.monotonic(), what, trace=trace, error=sent, fix=fix, advice=advice)


def exception_raised(rank: int, error: BaseException) -> Failure:
    """Describe the exception that ended a worker function."""
    when = time.monotonic()
    if isinstance(error, SerializationError):
        fix = "return tensors, arrays, numbers and containers of them"
        return Failure(rank, when, f"returned something that cannot leave its process: {error}", fix=fix)
    steps = error.__traceback__
    while steps and steps.tb_frame.f_code.co_filename.startswith(_KIT) and steps.tb_next:
        steps = steps.tb_next  # the reader wants their own function first
    trace = "".join(traceback.format_exception(type(error), error, steps))
    fact, advice = _fact_and_advice(error)
    if isinstance(error, SystemExit):
        what = f"called sys.exit({error.code!r}) before it returned a result"
    elif isinstance(error, Terminated):
        what = _TERMINATED
    else:
        what = f"raised {kind_of(error)}: {_in_a_line(error, fact)}".removesuffix(": ")
    waiting = next((one.waiting for one in _chain(error) if hasattr(one, "waiting")), None)  # as Core marks it
    fix = _fix_of_a_dead_loader() if "DataLoader worker (pid" in what else Failure.fix
    if any(words in what for words in _NO_CUDA):
        fix = "core.model(model) in place of model.cuda(), and .to(core.device) of .cuda(); batches are there already"
    where, sent = _where(error), _sendable(error)
    return Failure(rank, when, what, waiting, where=where, trace=trace, error=sent, fix=fix, advice=advice)


# What torch says of .cuda() and .to("cuda") where there is no GPU: the last, after is_available() in the notebook.
_NO_CUDA = (
    "not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "Cannot re-initialize CUDA in forked subprocess",
)
_TERMINATED = "was told to end by SIGTERM"


def sigterm_received(rank: int, frame: object) -> Failure:
    """Describe a core that gets SIGTERM, with the stack where it stood."""
    return Failure(rank, time.monotonic(), _TERMINATED, trace=stack_text(frame), title="where it stood")


def process_ended(rank: int, exitcode: int, *, started: bool, memory: int | None, last_output: str) -> Failure:
    """Describe a process that ended with neither a result nor a word.

    Args:
        rank: of its first core.
        exitcode: as `multiprocessing.Process.exitcode`.
        started: whether its device was up.
        memory: the peak in bytes that it last reported.
        last_output: what it printed last.
    """
    when = time.monotonic()
    if exitcode == -signal.SIGKILL:
        when = 0.0  # no core's failure kills another: it was the first, even if a busy kernel sees it last
        seen = f"; at its last word it had used {memory / 2**20:,.0f} MiB" if memory else ""
        what = f"was killed by SIGKILL, which is what happens where host memory runs out{seen}"
        fix = (
            "a smaller batch_size, fewer cores= or DataLoader workers, or a dataset that is read from disk, "
            "not held in memory"
        )
    elif exitcode < 0:
        what = f"was killed by {_signal_name(-exitcode)}" + " before its device was up" * (not started)
        fix = "a native library ended it; see what it printed last" if started else _fix_of_a_start(last_output)
    else:
        what = f"ended with exit status {exitcode} before it returned"
        fix = "leave the worker function with return, not os._exit"
    return Failure(rank, when, what, fix=fix, trace=last_output, title="the last it printed")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # Python has no names for most real-time signals
        return f"signal {number}"


def result_unreadable(rank: int, error: Exception) -> Failure:
    """Describe a result that left its process and cannot be unpickled in the kernel."""
    what = f"returned something the kernel cannot unpickle: {type(error).__name__}: {error}"
    return Failure(rank, time.monotonic(), what, error=error)


def run_hangs(rank: int, what: str, fix: str, *, stacks: dict[int, str | None]) -> Failure:
    """Describe a run that hangs, blaming core `rank`; `stacks` by rank, None for a core that did not answer."""
    hung = "does not answer: native code holds its interpreter\n"
    blamed_first = sorted(stacks, key=lambda one: one != rank)
    trace = "".join(f"core {one}:\n{hung if stacks[one] is None else stacks[one]}" for one in blamed_first)
    return Failure(rank, time.monotonic(), what, fix=fix, trace=trace, title="where the cores stand")


def message(failure: Failure, topology: Topology) -> str:
    """Write what the user reads: fact, evidence, fix, then the traceback of the core that failed first."""
    cores = topology.cores
    others = ("", " (the other was ended)", f" (the other {cores - 1} were ended)")[min(cores, 3) - 1]
    lines = [f"core {failure.rank} of {topology.world_size} {_shortened(failure.what, _LONGEST_FACT)}{others}"]
    if failure.waiting:
        lines.append(f"  found: it was waiting for the other cores in {failure.waiting}()")
    if failure.where:
        lines.append(f"  where: {_place(*failure.where)}")
    lines.append(failure.advice or f"  fix:   {failure.fix}")
    if failure.trace:
        lines.append(f"\n{failure.title}:\n{_shortened(failure.trace, _LONGEST_TRACE)}")
    return "\n".join(lines)


def _shortened(text: str, most: int) -> str:
    """Leave out the middle of a text of more than so many characters: an exception may hold a whole tensor's print."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    return f"{text[: most // 2]} [... {left_out:,} characters are left out here ...] {text[-(most // 2) :]}"


def stack_text(frame: object) -> str:
    """Return where a core stands, from the worker function on."""
    steps = traceback.extract_stack(frame)
    above = [index for index, step in enumerate(steps) if step.filename == _WORKER]
    return "".join(traceback.format_list(steps[max(above, default=-1) + 1 :]))


_WORKER = str(Path(__file__).with_name("worker.py"))  # which calls the worker function


def _place(file: str, line: int, function: str) -> str:
    """Say where in the reader's words: `train(), cell 12, line 9`."""
    cell = _notebook_cell(file)
    return f"{function}(), " + (f"cell {cell}" if cell else file) + f", line {line}"


def _notebook_cell(file: str) -> int | None:
    """Return the number of the notebook cell that Python knows as a file."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None:
        return None
    names = getattr(shell.compile, "_filename_map", None)
    if names is None:  # IPython 7, Colab's
        cells = shell.history_manager.input_hist_raw
        ends = ("", "\n")  # the history has lost it
        numbered = [(number, source + end) for number, source in enumerate(cells) for end in ends]
        names = {shell.compile.get_code_name(source, source, number): number for number, source in numbered}
    return names.get(file)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, and those that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _fix_of_a_start(text: str) -> str:
    """Say what helps a device that did not start, given what torch_xla said of it."""
    if "worker addresses" in text:
        return "tpukit.setup() removes TPU_PROCESS_ADDRESSES, which all workers would share; then run this cell again"
    return (
        "chips stay busy for some seconds after a worker was killed: wait half a minute and run the cell again;\n"
        "         if that does not help, tpukit.check() names who holds them, and a restart of the session frees them"
    )


def _fix_of_a_dead_loader() -> str:
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    return (
        f"a DataLoader process was killed: host memory, or /dev/shm, which has {free / 2**20:,.0f} MiB free;\n"
        "         workers=0, a smaller batch_size, or a container with more shared memory"
    )


def _fact_and_advice(error: BaseException) -> tuple[str, str]:
    """Split the text of an exception into its fact and the lines in which it says what was found and what to do."""
    fact, *lines = _text(error).splitlines() or [""]
    advises = any(line.startswith("  fix:") for line in lines)
    if advises and all(line.startswith("  ") for line in lines):  # not within a traceback, as a DataLoader sends
        return fact, "\n".join(lines)
    return _text(error), ""


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:  # its class may do anything in __str__
        return f"(its text cannot be made: {type(another).__name__})"


def _in_a_line(error: BaseException, text: str | None = None) -> str:
    """Return an exception's text and notes in one line; of many lines, as a DataLoader's process sends, three."""
    lines = [line for line in (_text(error) if text is None else text).splitlines() if line.strip()]
    if len(lines) > 3:
        lines = [lines[0], "...", "; ".join(lines[-2:])]
    return " ".join([*lines, *(f"({note})" for note in getattr(error, "__notes__", []))])


def _where(error: BaseException) -> tuple[str, int, str] | None:
    """Return file, line and function of the innermost line that is neither a library's nor the kit's own."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    own = [frame for frame in own if not frame.filename.startswith(_KIT)]
    own = [frame for frame in own if not frame.filename.startswith((sysconfig.get_path("stdlib"), "<frozen"))]
    return (own[-1].filename, own[-1].lineno or 0, own[-1].name) if own else None


def _sendable(error: BaseException) -> BaseException | None:
    """Return the exception if the kernel will be able to unpickle it: many cannot be built from their `args`."""
    try:
        if len(str(error)) > _LONGEST_CAUSE:
            return None
        again = deserialize([bytearray(part) for part in serialize(error)])
    except Exception:  # an exception class may do anything in __reduce__ and __init__
        return None
    return error if type(again) is type(error) else None
