"""The graphs of a worker function's step, recorded as one core of a TPU would send them to its compiler."""

import contextlib
import functools
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from tpukit.essentials.machine import Host, Tpu
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
from tpukit.preflight.scopes import name_operations
from tpukit.preflight.step_clock import StepClock
from tpukit.preflight.write_guard import guard_files
from tpukit.standin import Imagined, why_not

_LOOK_SECONDS = 0.02


class NoPreflight(Explained, RuntimeError):
    """A step cannot be recorded or compiled on this machine."""


@dataclass(frozen=True)
class Graph:
    """A graph as torch_xla sends it to the compiler.

    Attributes:
        module: HloModuleProto, serialised.
        options: CompileOptionsProto, serialised: the number of replicas and their devices.
    """

    module: bytes = field(repr=False)
    options: bytes = field(repr=False)


@dataclass(frozen=True)
class Recording:
    """The step of a worker function.

    Attributes:
        chip: the machine it was recorded for.
        graphs: what one step runs, in order; one, unless something in the step cuts it.
        is_steady: whether the step came back unchanged; otherwise the run ended before, and `graphs` is its last.
        places: the calls that scopes in the graphs name, as (module, line of Python, direction); see `scopes`.
        counters: torch_xla's counters as of the recording's end, by name; "aten::" are fallbacks to the host.
        batches: of the step, each (shape, dtype) of a tensor sent to the device, if the loop used `core.batches`.
        flags: what libtpu gets as LIBTPU_INIT_ARGS in a launch on that machine.
        seconds: that the recording took.
        host_seconds: of one of this machine's processors, that Python and torch_xla take for a step; None if not known.
    """

    chip: Tpu
    graphs: tuple[Graph, ...]
    is_steady: bool
    places: tuple[tuple[str, str, str], ...] = field(repr=False, default=())
    counters: dict[str, float] = field(repr=False, default_factory=dict)
    batches: tuple = field(repr=False, default=())
    flags: str = ""
    seconds: float = 0.0
    host_seconds: float | None = None


def record(
    fn: Callable,
    *args: object,
    chip: Tpu,
    timeout: float | None = 900.0,
    progress: str | None = None,
    host: Host | None = None,
) -> Recording:
    """Run `fn(core, *args)` as core 0 of a chip that is not there, until its step comes back, and return the graphs.

    In a process of its own, as a launch, and with the same data; but no large graph is run: losses and all else that
    comes back from the device are zeros. `core.save` and `fit` write nothing meanwhile; what the function itself writes
    to files in its first dozen steps is written; those after the third are for `host_seconds`.

    Args:
        fn: the worker function; `*args`, `timeout` and `progress` as in `preflight`.
        chip: the TPU to play.
        host: the `Host` to ask, if not this one.

    Raises:
        NoPreflight: this machine cannot play a TPU, or the function ended without a graph.
        WorkerFailed: the function raised.
        RuntimeInUse: this process has started the XLA runtime, or is a worker.
    """
    _refuse_without_stand_in(host or Host.read())
    refuse_if_in_use(host or Host.read())
    with tempfile.TemporaryDirectory(prefix="tpukit-preflight-") as folder, sigterm_ends_the_run():
        topology = Imagined(
            "xla:recording",
            f"TPU {chip.generation} core",
            cores=1,
            processes=1,
            rehearsal=True,
            generation=chip.generation,
            world_size=chip.cores,
            accelerator=chip.accelerator_type,
            folder=Path(folder),
        )
        began = time.monotonic()
        facts = _run(topology, Task(functools.partial(_watched, fn, Path(folder)), args, seed=0), timeout, progress)
        found = _read(Path(folder), chip, facts)
    return replace(found, seconds=time.monotonic() - began)


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
    places, end_naming = name_operations(core.backend)
    clock = StepClock(before=end_naming)  # names and lines take longer than the step
    batches = ()

    def after_sync() -> None:
        nonlocal batches
        if clock.after_sync():
            batches = core.backend.sent
        if clock.has_ended:
            threading.Event().wait()  # the kernel gets the facts, and ends this process

    core.backend.after_sync = after_sync

    def facts() -> dict:
        counters = {name: total for name, (total, _) in core.backend.metrics().items()}
        sent = batches or core.backend.sent  # what is sent between steps may be for an evaluation
        return {"places": tuple(places), "counters": counters, "batches": sent, "host_seconds": None}

    def look() -> None:
        while not _is_steady(_log(folder)):
            time.sleep(_LOOK_SECONDS)
        found = facts()  # of the step that came back, whatever the function does next
        clock.start()
        (folder / "go").touch()
        clock.wait()
        core._send(("result", core.rank, found | {"host_seconds": clock.seconds}))

    threading.Thread(target=look, daemon=True).start()
    try:
        fn(core, *args)
        core.backend.sync()
        core.backend.wait()
    except BaseException:
        if not clock.is_started:  # else the step is known, and a loss of zero may be what ended the function
            raise
    if clock.is_started:
        clock.end()
        after_sync()
    return facts()


def _log(folder: Path) -> list[tuple[str, int]]:
    """Return what was compiled and run so far, in order."""
    with contextlib.suppress(FileNotFoundError):
        lines = (folder / "log").read_text().splitlines()
        return [(word, int(number)) for word, number in map(str.split, lines)]
    return []


def _is_steady(log: list[tuple[str, int]]) -> bool:
    return bool(log) and log[-1][0] == "steady"


def _read(folder: Path, chip: Tpu, facts: dict) -> Recording:
    log = _log(folder)
    runs = [number for word, number in log if word in ("run", "steady")]
    if not runs:
        raise NoPreflight(
            "the worker function ended before it ran anything on the device",
            found="no graph was compiled",
            fix="it has to run a step: in a loop over core.batches, with core.step(), or fit",
        )
    steady = _is_steady(log)
    step = _last_cycle(runs) if steady else [_largest(folder, runs)]
    graphs = tuple(
        Graph((folder / f"{number}.hlo").read_bytes(), (folder / f"{number}.options").read_bytes()) for number in step
    )
    flags = (folder / "flags").read_text()
    return Recording(chip, graphs, steady, flags=flags, **facts)


def _last_cycle(runs: list[int]) -> list[int]:
    """Return what ran from the last but one run of the last program up to that, without that."""
    last = runs[-1]
    start = max(place for place, number in enumerate(runs[:-1]) if number == last)
    return runs[start:-1]


def _largest(folder: Path, runs: list[int]) -> int:
    return max(dict.fromkeys(reversed(runs)), key=lambda number: (folder / f"{number}.hlo").stat().st_size)
