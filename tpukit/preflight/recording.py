"""Record the graphs of a training step, as a single core of a TPU would send them to its compiler.

`record` starts one worker process on the simulator. For torch_xla, the simulator is core 0 of a
TPU, so it makes the same graphs as on a TPU. The simulator writes each new graph to a folder and
each run to a log, but does not compute large graphs. The worker process has three stages:

1. `StepMarks` follows the steps until the same programs have run three times, at most 40 steps.
2. `StepClock` measures, for about ten steps, how long the host takes to record a step.
3. The process sends its facts to the kernel, and the kernel ends the process.

Then `_read` finds the step in the log, see `cycles`, and reads its graphs from the folder.
"""

import functools
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.essentials.display import TpukitError, screen
from tpukit.essentials.environment import MachineInfo
from tpukit.essentials.launcher import (
    Core,
    Limits,
    Task,
    WorkerGroup,
    collect,
    interrupted,
    messages,
    refuse_if_in_use,
    sigterm_ends_the_run,
    worker_failed,
)
from tpukit.preflight.cycles import (
    SETTLED,
    Cycle,
    Ran,
    Shape,
    Transfer,
    batches_of,
    came_back,
    cycles,
    main_cycle,
    other_shapes,
    read_log,
    recompiled,
)
from tpukit.preflight.scopes import Call, name_operations
from tpukit.preflight.step_clock import StepClock
from tpukit.preflight.step_marks import StepMarks
from tpukit.preflight.torch_patches import leave_large_tensors_empty
from tpukit.preflight.write_guard import guard_files
from tpukit.profiling import Tpu, what_differs
from tpukit.simulator import Imagined, why_not


class PreflightError(TpukitError, RuntimeError):
    """This machine cannot record or compile a step."""


@dataclass(frozen=True)
class Graph:
    """A graph as torch_xla sends it to the compiler.

    Attributes:
        module: a serialised HloModuleProto.
        options: a serialised CompileOptionsProto, with the number of replicas and their devices.
        beside: bytes of all tensors on the device that the graph does not use, without padding.
    """

    module: bytes = field(repr=False)
    options: bytes = field(repr=False)
    beside: int = 0


@dataclass(frozen=True)
class OtherShape:
    """The step for batches of another shape."""

    graphs: tuple[Graph, ...]  # the graphs of the step, in order
    batches: tuple[Transfer, ...]  # (shape, dtype) of each tensor of a batch


@dataclass(frozen=True)
class Recording:
    """The step of a worker function: everything that a core runs between two optimizer steps.

    Attributes:
        graphs: the graphs of one step, in order. They include all networks of a GAN, and all
            batches whose gradients are accumulated.
        is_steady: True if a step was repeated without a new graph before the run ended.
        has_optimizer: True if an optimizer made a step, or the loop itself wrote to parameters. If
            not, `graphs` is the largest graph that ran.
        steps: the number of recorded steps.
        syncs: the number of `core.step()` blocks per step. If `graphs` has more entries, other
            code ends graphs too, such as `.item()`.
        shapes: with `buckets`, the step of each batch shape except the largest; `graphs` has the
            step of the largest shape. () if all batches have one shape.
        recompiled: the number of graphs that were compiled after the second step, without those for
            other batch shapes.
        reason: (the difference that caused the first recompilation, its fix); ("", "") if
            `recompiled` is 0.
        places: the Python calls to which scopes in the graphs refer; see `scopes`.
        counters: torch_xla's counters after the recorded steps, by name. Names that begin with
            "aten::" are operations that torch_xla ran on the host.
        batches: for each batch of a step, (shape, dtype) of each tensor.
        is_from_loop: True if `batches` came from `core.batches`. If not, they are the largest
            tensors from the host.
        flags: the LIBTPU_INIT_ARGS of a launch on a machine with this TPU.
        host_seconds: the processor time of Python and torch_xla per step on this machine, in
            seconds; None if unknown.
    """

    graphs: tuple[Graph, ...]
    is_steady: bool
    has_optimizer: bool = True
    steps: int = 0
    syncs: int = 1
    shapes: tuple[OtherShape, ...] = ()
    recompiled: int = 0
    reason: tuple[str, str] = ("", "")
    places: tuple[Call, ...] = field(repr=False, default=())
    counters: dict[str, float] = field(repr=False, default_factory=dict)
    batches: tuple[Transfer, ...] = ()
    is_from_loop: bool = False
    flags: str = ""
    host_seconds: float | None = None


def record(
    fn: Callable,
    *args: object,
    chip: Tpu,
    shard: str | None = None,
    timeout: float | None = 900.0,
    progress: str | None = None,
) -> Recording:
    """Run `fn(core, *args)` as core 0 of a simulated chip until a step repeats.

    The function runs in a process of its own, with the same data as in a launch. The simulator does
    not compute large graphs: losses and all other values from the device are zeros.
    `core.save` and `fit` write nothing. If the function itself writes to a file, an error is
    raised; see `guard_files`.

    Args:
        fn: the worker function; `*args`, `shard`, `timeout` and `progress` as in `preflight`.
        chip: the TPU to simulate.

    Raises:
        PreflightError: this machine cannot simulate a TPU, or the function ended before it ran a
            graph.
        WorkerError: the function raised an error.
        RuntimeInUseError: this process has started the XLA runtime, or is a worker process.
    """
    host = MachineInfo.read()
    _check_simulator(host)
    refuse_if_in_use(host)
    with tempfile.TemporaryDirectory(prefix="tpukit-preflight-") as name, sigterm_ends_the_run():
        folder = Path(name)
        topology = Imagined(
            "xla:recording",
            f"TPU {chip.generation} core",
            cores=1,
            processes=1,
            is_dry_run=True,
            generation=chip.generation,
            # With `shard`, all chips are one core of a run; otherwise each core is a replica.
            world_size=1 if shard else chip.cores,
            chips=chip.cores if shard else 1,
            accelerator=chip.accelerator_type,
            folder=folder,
        )
        task = Task(functools.partial(_watched, fn, folder), args, seed=0, timeout=timeout)
        facts = _run(topology, task, progress=progress)
        return _read(folder, facts)


def _check_simulator(host: MachineInfo) -> None:
    missing = why_not()
    if missing is None and host.versions.get("torch_xla") is None:
        missing = "torch_xla is not installed: pip install torch_xla==2.9.0 with torch 2.9.0"
    if missing:
        found, _, fix = missing.partition(": ")  # as `why_not` joins them
        fact = "this machine cannot simulate a TPU, so no step can be recorded"
        raise PreflightError(fact, found=found, fix=fix)


def _run(topology: Imagined, task: Task, *, progress: str | None) -> dict:
    limits = Limits(stall=None)
    with screen(progress) as display, WorkerGroup(topology, task, limits, display) as group:
        try:
            failure = group.watch()
        except KeyboardInterrupt:
            display.close("interrupted")
            group.end()
            raise interrupted(collect(group)) from None
        if failure is not None:
            display.close("failed")
            raise worker_failed(failure, group, "during a preflight, ")
        return group.results[0]


def _watched(fn: Callable, folder: Path, core: Core, *args: object) -> dict:
    """Run the worker function in the worker process, and return the facts about its step."""
    guard_files(folder)
    leave_large_tensors_empty()
    return _Watcher(core, folder).run(fn, *args)


class _Watcher:
    """Watch a worker function, and send the facts when its step has repeated and was timed.

    The kernel ends this process as soon as it receives the facts.
    """

    def __init__(self, core: Core, folder: Path) -> None:
        self._core = core
        self._backend = core.backend
        self._folder = folder
        self._log = folder / "log"
        self._places, end_naming = name_operations()
        # To name operations takes longer than to record them, so naming ends before the clock
        # starts.
        self._clock = StepClock(before=end_naming)
        self._marks = StepMarks(core.backend, self._log)
        self._facts_of_step: dict = {}

    def run(self, fn: Callable, *args: object) -> dict:
        """Run the function; return the facts if the function ends before its step repeats."""
        self._backend.after_sync = self._after_sync
        self._marks.after_step = self._after_step
        try:
            fn(self._core, *args)
            self._backend.sync()
            self._backend.wait()
        except BaseException:
            # If the step is already known, the error does not matter: a loss of zero may cause it.
            if not self._clock.is_started:
                raise
        if self._clock.is_started:
            self._clock.ended.set()
            self._after_sync()
        return self._facts() | self._facts_at_end() | {"host_seconds": None}

    def _after_sync(self) -> None:
        self._clock.after_sync()
        self._marks.after_sync()
        if self._clock.ended.is_set():
            threading.Event().wait()  # until the kernel has the facts and ends this process

    def _after_step(self) -> None:
        if self._clock.is_started:
            return
        if self._marks.are_steady() or self._marks.are_enough():
            self._facts_of_step = self._facts()  # now, because the function may change them later
            self._clock.start()
            # In a thread, because the function must continue: the clock measures its next steps.
            threading.Thread(target=self._send, daemon=True).start()

    def _send(self) -> None:
        self._clock.wait()
        facts = self._facts_of_step | self._facts_at_end()
        facts["host_seconds"] = self._clock.seconds
        self._core.internal.send(messages.Result(self._core.rank, facts))

    def _facts(self) -> dict:
        counters = {name: total for name, (total, _) in self._backend.metrics().items()}
        return {"places": tuple(self._places), "counters": counters}

    def _facts_at_end(self) -> dict:
        found = cycles(read_log(self._log), self._marks.all)
        return {
            "marks": self._marks.all,
            "reason": _reason(self._backend, self._folder, found),
        }


_ONE_SHAPE = "batches of one shape: core.batches with drop_last=True; for several lengths, buckets="


def _reason(backend, folder: Path, found: Sequence[Cycle]) -> tuple[str, str]:
    """Return the difference that caused the first recompilation, and the fix; two "" for none.

    Later recompilations are not explained, because only the first steps are recorded with their
    lines of Python.
    """
    unexpected = recompiled(found)
    if not unexpected:
        return "", ""
    before, after = unexpected[0]
    if before.inputs != after.inputs:
        return f"a step {_other_inputs(before.taken, after.taken)}", _ONE_SHAPE
    for old, new in zip(before.programs, after.programs, strict=False):
        if old != new and new in after.compiled:
            old_text = backend.text_of(folder / f"{old}.hlo")
            new_text = backend.text_of(folder / f"{new}.hlo")
            return what_differs(old_text, new_text)
    counts = f"{len(after.programs)} graphs, but the previous step ran {len(before.programs)}"
    return f"a step runs {counts}", "no .item(), print or if on a tensor inside of core.step()"


def _other_inputs(before: Iterable[Shape], after: Iterable[Shape]) -> str:
    gone = _listed(Counter(before) - Counter(after))
    come = _listed(Counter(after) - Counter(before))
    if not gone:
        return f"takes {come} too, unlike the previous step"
    if not come:
        return f"does not take {gone}, unlike the previous step"
    return f"takes {come}, but the previous step took {gone}"


def _listed(shapes: Iterable[Shape]) -> str:
    return ", ".join(f"{size} {dtype}" for size, dtype in sorted(shapes))


def _read(folder: Path, facts: dict) -> Recording:
    """Find the step in the simulator's log, and read its graphs."""
    log = read_log(folder / "log")
    runs = [entry for entry in log if isinstance(entry, Ran)]
    if not runs:
        raise PreflightError(
            "the worker function ended before it ran anything on the device",
            found="no graph was compiled",
            fix="train in the function: with core.step() in a loop over core.batches, or with fit",
        )
    # Without an optimizer there are no cycles, and the largest program is taken for the step.
    found = cycles(log, facts.pop("marks"))
    step = main_cycle(found) or _largest(runs, folder)
    beside = _bytes_beside(found[SETTLED:] or [step])

    def graphs(cycle: Cycle) -> tuple[Graph, ...]:
        return tuple(_graph(folder, program, beside.get(program, 0)) for program in cycle.programs)

    shapes = [OtherShape(graphs(each), batches_of(each)) for each in other_shapes(found)]
    return Recording(
        graphs(step),
        is_steady=came_back(found),
        has_optimizer=bool(found),
        steps=len(found),
        syncs=step.syncs,
        shapes=tuple(shapes),
        recompiled=sum(len(after.compiled) for _, after in recompiled(found)),
        batches=batches_of(step),
        is_from_loop=bool(step.batches),
        flags=(folder / "flags").read_text(),
        **facts,
    )


def _largest(runs: Sequence[Ran], folder: Path) -> Cycle:
    """Return the run of the largest graph as a step; of equal graphs, the last run."""

    def size(run: Ran) -> int:
        return (folder / f"{run.program}.hlo").stat().st_size

    return Cycle((max(reversed(runs), key=size),))


def _bytes_beside(found: Iterable[Cycle]) -> dict[int, int]:
    """Return, for each program, the most bytes of tensors on the device that it does not use."""
    most: dict[int, int] = {}
    for cycle in found:
        for run in cycle.runs:
            most[run.program] = max(most.get(run.program, 0), run.beside)
    return most


def _graph(folder: Path, program: int, beside: int) -> Graph:
    module = (folder / f"{program}.hlo").read_bytes()
    options = (folder / f"{program}.options").read_bytes()
    return Graph(module, options, beside)
