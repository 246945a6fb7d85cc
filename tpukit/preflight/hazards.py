"""Find operations of a training step that are slow on a TPU.

These are operations that run on the host, 64-bit dtypes, shapes that depend on values, and graphs
that are cut or compiled again. They are found in the graphs that torch_xla sends to the compiler,
and in torch_xla's counters.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tpukit.essentials.display import Finding, counted
from tpukit.preflight.hlo import Array, Operation, Program, read_program
from tpukit.preflight.recording import Recording

# Elements. Smaller 64-bit arrays, such as a step counter or a random seed, cost nothing.
_LARGE = 1024
_MOST_NAMES = 3  # a finding names at most this many operations
_NOT_RESULTS = ("parameter", "get-tuple-element", "tuple", "bitcast")  # these write no new array


@dataclass(frozen=True)
class _WideType:
    """A 64-bit dtype, with which a TPU computes slowly."""

    type: str  # the name in HLO
    name: str  # the name in torch
    reason: str  # why a TPU is slow
    fix: str


_WIDE_TYPES = (
    _WideType(
        "f64",
        name="float64",
        reason="a TPU has no float64 of its own and emulates it",
        fix="float32, if its precision is enough",
    ),
    _WideType(
        "s64",
        name="int64",
        reason="a TPU counts in 32 bits and takes two operations for 64",
        fix="int32, if its range is enough",
    ),
)


def find_hazards(recording: Recording) -> list[Finding]:
    """Return a finding for each problem of a step, or one with the state "ok" if all is well."""
    programs = [read_program(graph.module) for graph in recording.graphs]
    found = [*_optimizer(recording), *_recompiles(recording)]
    found += [*_cut(recording), *_fallbacks(recording)]
    for wide in _WIDE_TYPES:
        found += _wide(wide, programs, recording)
    found += _dynamic(programs)
    if all(finding.state == "ok" for finding in found):
        fact = "no fallbacks to the host, no large float64 or int64, no dynamic shapes"
        found.append(Finding("hazards", "ok", f"{fact}; nothing compiled again"))
    return found


def written_arrays(program: Program) -> Iterator[Array]:
    """Yield the arrays that the operations of a program write to HBM, without scalars."""
    for operation in program.operations:
        if operation.opcode not in _NOT_RESULTS:
            for array in operation.arrays:
                if array.in_hbm and array.dimensions:
                    yield array


def _optimizer(recording: Recording) -> list[Finding]:
    """Warn if the graphs may not be those of a training step."""
    if not recording.has_optimizer:
        fact = "no optimizer stepped in the run"
        meaning = "so this is not a training step but the largest graph of the run"
        fix = "train in a loop with core.optimizer_step(optimizer), or by fit"
        return [Finding("optimizer", "warning", f"{fact}, {meaning}", fix=fix)]
    if not recording.is_steady and not recording.recompiled:
        fact = "the function ended before a step ran three times, so this may be an unusual step"
        fix = "train on more data or epochs: at least five steps"
        return [Finding("steady step", "warning", fact, fix=fix)]
    return []


def _recompiles(recording: Recording) -> list[Finding]:
    """Warn of graphs that are compiled again, the worst hazard: each takes seconds to minutes."""
    if not recording.recompiled:
        return []
    reason, fix = recording.reason
    graphs = (
        "1 more graph was"
        if recording.recompiled == 1
        else f"{recording.recompiled} more graphs were"
    )
    when = f"after the second of {recording.steps} steps"
    fact = f"{graphs} compiled {when}; each takes seconds to minutes"
    fix = fix or "use the same shapes in every step"
    return [Finding("recompiles", "warning", f"{fact}\n{reason}".rstrip(), fix=fix)]


def _cut(recording: Recording) -> list[Finding]:
    """Report several graphs per step, which is expected only with several `core.step()`."""
    graphs = len(recording.graphs)
    syncs = recording.syncs
    if graphs == 1:
        return []
    if graphs <= syncs:
        # Accumulated gradients and the networks of a GAN need several core.step() per step.
        fact = f"{graphs} graphs per step of the optimizers, one for each core.step()"
        return [Finding("graphs a step", "ok", fact)]
    run = f"one step runs {graphs} graphs"
    if syncs > 1:
        run += f" in {syncs} core.step()"
    fact = f"{run}: it reads a tensor or computes on the host, and the chip waits for the host"
    fix = "no .item(), print or if on a tensor, and no fallback, inside of core.step()"
    return [Finding("graphs a step", "warning", fact, fix=fix)]


def _fallbacks(recording: Recording) -> list[Finding]:
    counters = {name for name in recording.counters if name.startswith("aten::")}
    counters.discard("aten::_local_scalar_dense")  # .item(), which cuts the graph: see `_cut`
    if not counters:
        return []
    names = ", ".join(sorted(name.removeprefix("aten::") for name in counters))
    fact = f"computed on the host, because torch_xla does not support these operations: {names}"
    fix = "use another operation, or apply it on the host before the batch is sent"
    return [Finding("fallbacks", "warning", fact, fix=fix)]


def _wide(wide: _WideType, programs: Sequence[Program], recording: Recording) -> list[Finding]:
    """Warn of large arrays of a 64-bit dtype, with the two modules that have most of them."""
    operations = [each for each in _everywhere(programs) if _large_arrays(each, wide.type)]
    if not operations:
        return []
    modules = Counter(_module(each, recording) for each in operations)
    most = ", ".join(module for module, _ in modules.most_common(2))
    arrays = itertools.chain.from_iterable(_large_arrays(each, wide.type) for each in operations)
    largest = max(arrays, key=lambda array: array.bytes)
    count = counted(len(operations), "operation")
    fact = f"{wide.name} in {count}, the largest {largest}, in {most}: {wide.reason}"
    return [Finding(wide.name, "warning", fact, fix=wide.fix)]


def _large_arrays(operation: Operation, kind: str) -> list[Array]:
    arrays = [array for array in operation.arrays if array.type == kind]
    return [array for array in arrays if array.bytes >= _LARGE * array.width]


def _module(operation: Operation, recording: Recording) -> str:
    number = operation.scope.removeprefix("call")
    if number.isdigit() and int(number) < len(recording.places):
        call = recording.places[int(number)]
        return f"{call.module} ({call.direction})"
    return operation.op_type or operation.opcode


def _dynamic(programs: Sequence[Program]) -> list[Finding]:
    dynamic = []
    for operation in _everywhere(programs):
        if any(array.is_dynamic for array in operation.arrays):
            dynamic.append(operation.op_type or operation.opcode)
    if not dynamic:
        return []
    names = ", ".join(list(dict.fromkeys(dynamic))[:_MOST_NAMES])
    cost = "the largest possible size is computed, and reading the true size cuts the graph"
    fact = f"shapes that depend on values: {names}; {cost}"
    fix = "torch.where and masks in place of nonzero and x[mask]"
    return [Finding("dynamic shapes", "warning", fact, fix=fix)]


def _everywhere(programs: Iterable[Program]) -> Iterator[Operation]:
    for program in programs:
        yield from program.everywhere()
