"""The graphs of a worker function's step, recorded as one core of a TPU would send them to its compiler."""

import functools
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.essentials.machine import Host
from tpukit.essentials.run import (
    Core,
    Interrupted,
    Limits,
    Task,
    WorkerGroup,
    collect,
    refuse_if_in_use,
    sigterm_ends_the_run,
    worker_failed,
)
from tpukit.essentials.show import Explained, screen
from tpukit.measure import Tpu, what_differs
from tpukit.preflight.cycles import (
    SETTLED,
    Cycle,
    Ran,
    Shape,
    came_back,
    cycles,
    grouped,
    main_cycle,
    other_shapes,
    read_log,
    recompiled,
)
from tpukit.preflight.scopes import name_operations
from tpukit.preflight.step_clock import StepClock
from tpukit.preflight.step_marks import StepMarks
from tpukit.preflight.write_guard import guard_files
from tpukit.standin import Imagined, why_not

_LARGE = 2**24  # numbers


class NoPreflight(Explained, RuntimeError):
    """A step cannot be recorded or compiled on this machine."""


@dataclass(frozen=True)
class Graph:
    """A graph as torch_xla sends it to the compiler.

    Attributes:
        module: HloModuleProto, serialised.
        options: CompileOptionsProto, serialised: the number of replicas and their devices.
        beside: bytes that were on the device while it ran and are none of its arguments, without padding.
    """

    module: bytes = field(repr=False)
    options: bytes = field(repr=False)
    beside: int = 0


@dataclass(frozen=True)
class Recording:
    """The step of a worker function: what its core runs from one step of the optimisers to the next.

    Attributes:
        graphs: what one step runs, in order: of a GAN for all networks, of added-up gradients for all batches.
        is_steady: whether the step came back unchanged; otherwise the run ended before.
        has_optimizer: whether an optimiser stepped; otherwise `graphs` is the largest graph that ran.
        steps: how many were seen.
        syncs: how often the loop hands its work over in one, with core.step(); more graphs than that are cut.
        shapes: of batches of several shapes, as with `buckets`, the steps of the others; `graphs` is of the largest.
        recompiled: graphs compiled after the second step that no such shape explains.
        reason: what was different in the first of these, and the fix.
        places: the calls that scopes in the graphs name, as (module, line of Python, direction); see `scopes`.
        counters: torch_xla's counters as of the recording's end, by name; "aten::" are fallbacks to the host.
        batches: what a step takes from the host, by transfer: (shape, dtype) of each of its tensors.
        flags: what libtpu gets as LIBTPU_INIT_ARGS in a launch on that machine.
        host_seconds: of one of this machine's processors, that Python and torch_xla take for a step; None if not known.
    """

    graphs: tuple[Graph, ...]
    is_steady: bool
    has_optimizer: bool = True
    steps: int = 0
    syncs: int = 1
    shapes: tuple["OtherShape", ...] = ()
    recompiled: int = 0
    reason: tuple[str, str] = ("", "")
    places: tuple[tuple[str, str, str], ...] = field(repr=False, default=())
    counters: dict[str, float] = field(repr=False, default_factory=dict)
    batches: tuple[tuple[Shape, ...], ...] = ()
    flags: str = ""
    host_seconds: float | None = None


@dataclass(frozen=True)
class OtherShape:
    """The step of batches of another shape: its graphs, and what it takes from the host."""

    graphs: tuple[Graph, ...]
    batches: tuple[tuple[Shape, ...], ...]


def record(
    fn: Callable,
    *args: object,
    chip: Tpu,
    shard: str | None = None,
    timeout: float | None = 900.0,
    progress: str | None = None,
) -> Recording:
    """Run `fn(core, *args)` as core 0 of a chip that is not there, until its step comes back, and return the graphs.

    In a process of its own, as a launch, and with the same data; but no large graph is run: losses and all else that
    comes back from the device are zeros. `core.save` and `fit` write nothing meanwhile, and what the function itself
    would write is refused, see `guard_files`. The dozen steps after the third are for `host_seconds`.

    Args:
        fn: the worker function; `*args`, `shard`, `timeout` and `progress` as in `preflight`.
        chip: the TPU to play.

    Raises:
        NoPreflight: this machine cannot play a TPU, or the function ended without a graph.
        WorkerFailed: the function raised.
        RuntimeInUse: this process has started the XLA runtime, or is a worker.
    """
    host = Host.read()
    _refuse_without_stand_in(host)
    refuse_if_in_use(host)
    with tempfile.TemporaryDirectory(prefix="tpukit-preflight-") as folder, sigterm_ends_the_run():
        topology = Imagined(
            "xla:recording",
            f"TPU {chip.generation} core",
            cores=1,
            processes=1,
            rehearsal=True,
            generation=chip.generation,
            world_size=1 if shard else chip.cores,
            chips=chip.cores if shard else 1,
            accelerator=chip.accelerator_type,
            folder=Path(folder),
        )
        facts = _run(topology, Task(functools.partial(_watched, fn, Path(folder)), args, seed=0), timeout, progress)
        return _read(Path(folder), facts)


def _refuse_without_stand_in(host: Host) -> None:
    missing = why_not()
    if missing is None and host.versions.get("torch_xla") is None:
        missing = "torch_xla is not installed: pip install torch_xla==2.9.0, beside torch 2.9.0"
    if missing:
        found, _, fix = missing.partition(": ")
        raise NoPreflight("this machine cannot play a TPU, so no step can be recorded", found=found, fix=fix)


def _run(topology: Imagined, task: Task, timeout: float | None, progress: str | None) -> dict:
    with screen(progress) as display, WorkerGroup(topology, task, Limits(timeout, None), display) as group:
        try:
            failure = group.watch()
        except KeyboardInterrupt:
            display.close("interrupted")
            group.end()
            raise Interrupted(collect(group)) from None
        if failure is not None:
            display.close("failed")
            raise worker_failed(failure, group, "preflight recorded the step, and ")
        return group.results[0]


def _watched(fn: Callable, folder: Path, core: Core, *args: object) -> dict:
    """Run the function; once its step came back and was timed, say so to the kernel, which then ends this process."""
    guard_files(folder)
    _leave_large_tensors_empty()
    places, end_naming = name_operations()
    clock = StepClock(before=end_naming)  # names and lines take longer than the step
    marks = StepMarks(core.backend, folder / "log")
    known = {}

    def facts() -> dict:
        counters = {name: total for name, (total, _) in core.backend.metrics().items()}
        return {"places": tuple(places), "counters": counters}

    def finish() -> dict:
        reason = _reason(core.backend, folder, cycles(read_log(folder / "log"), marks.all))
        return {"marks": marks.all, "sent": tuple(core.backend.sent), "reason": reason}

    def send() -> None:
        clock.wait()
        core._send(("result", core.rank, known | finish() | {"host_seconds": clock.seconds}))

    def after_sync() -> None:
        clock.after_sync()
        marks.after_sync()
        if clock.ended.is_set():
            threading.Event().wait()  # the kernel gets the facts, and ends this process

    def after_step() -> None:
        if not clock.is_started and (marks.are_steady() or marks.are_enough()):
            known.update(facts())  # of the step that came back, whatever the function does next
            clock.start()
            threading.Thread(target=send, daemon=True).start()

    core.backend.after_sync, marks.after_step = after_sync, after_step
    try:
        fn(core, *args)
        core.backend.sync()
        core.backend.wait()
    except BaseException:
        if not clock.is_started:  # else the step is known, and a loss of zero may be what ended the function
            raise
    if clock.is_started:
        clock.ended.set()
        after_sync()
    return facts() | finish() | {"host_seconds": None}


def _leave_large_tensors_empty() -> None:
    """Have nobody fill a large tensor with random numbers in this process: so the host has no memory for it either.

    Nothing that comes back from the device is a result, and the weights of a large model would take minutes.
    """
    import torch

    def unless_large(fill: Callable) -> Callable:
        return lambda tensor, *args, **options: tensor if tensor.numel() >= _LARGE else fill(tensor, *args, **options)

    for name in ("normal_", "uniform_"):
        setattr(torch.Tensor, name, unless_large(getattr(torch.Tensor, name)))


def _reason(backend, folder: Path, found: list[Cycle]) -> tuple[str, str]:
    """Return what is different in a step that was compiled again, and the fix; of the first, whose lines are known."""
    for before, after in recompiled(found):
        if sorted(before.taken) != sorted(after.taken):
            was, now = (_listed(set(one.taken) - set(other.taken)) for one, other in ((before, after), (after, before)))
            return f"a step takes {now}, the one before {was}", _ONE_SHAPE
        pairs = zip(before.programs, after.programs, strict=False)
        pair = next(((one, other) for one, other in pairs if one != other and other in after.compiled), None)
        if pair:
            return what_differs(*(backend.text_of(folder / f"{number}.hlo") for number in pair))
    return "", ""


_ONE_SHAPE = "batches of one shape: core.batches makes them, with drop_last=True; of several lengths, buckets="


def _listed(shapes: Iterable[Shape]) -> str:
    return ", ".join(f"{size} {dtype}" for size, dtype in sorted(shapes)) or "as before"


def _read(folder: Path, facts: dict) -> Recording:
    log = read_log(folder / "log")
    ran = [one for one in log if isinstance(one, Ran)]
    if not ran:
        raise NoPreflight(
            "the worker function ended before it ran anything on the device",
            found="no graph was compiled",
            fix="it has to run a step: in a loop over core.batches, with core.step(), or fit",
        )
    marks, sent = facts.pop("marks"), facts.pop("sent")
    found = cycles(log, marks)
    step, others, again = main_cycle(found), other_shapes(found), recompiled(found)
    if step is None:  # the largest graph, of equal ones the last
        step = Cycle((max(reversed(ran), key=lambda one: (folder / f"{one.program}.hlo").stat().st_size),))
    beside: dict[int, int] = {}
    for one in (one for cycle in found[SETTLED:] or [step] for one in cycle.runs):
        beside[one.program] = max(beside.get(one.program, 0), one.beside)

    def graphs(cycle: Cycle) -> tuple[Graph, ...]:
        return tuple(
            Graph(*((folder / f"{number}.{kind}").read_bytes() for kind in ("hlo", "options")), beside.get(number, 0))
            for number in cycle.programs
        )

    return Recording(
        graphs(step),
        came_back(found),
        has_optimizer=bool(found),
        steps=len(found),
        syncs=step.syncs,
        shapes=tuple(OtherShape(graphs(one), grouped(one.taken, sent)) for one in others),
        recompiled=sum(len(after.compiled) for _, after in again),
        batches=grouped(step.taken, sent),
        flags=(folder / "flags").read_text(),
        **facts,
    )
