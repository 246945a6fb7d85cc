"""What in a step is slow or wrong on a TPU, as it shows in the graph that torch_xla sends to the compiler."""

from collections import Counter
from collections.abc import Iterator

from tpukit.essentials.show import Finding
from tpukit.preflight.hlo import Array, Operation, Program, read_program
from tpukit.preflight.recording import Recording

_LARGE = 1024  # elements: a scalar of 64 bits, as a step counter or a random seed, costs nothing


def find_hazards(recording: Recording) -> list[Finding]:
    """Return what is slow or wrong in a step, and one line where nothing is."""
    programs = [read_program(graph.module) for graph in recording.graphs]
    found = [
        *_cut(recording),
        *_fallbacks(recording),
        *_wide(programs, "f64", "float64", "a TPU has no float64 of its own and emulates it", "float32", recording),
        *_wide(programs, "s64", "int64", "a TPU counts in 32 bits and takes two operations for 64", "int32", recording),
        *_dynamic(programs),
    ]
    if recording.recompiled:
        found.insert(0, _compiled_again(recording))
    if not recording.has_optimizer:
        fact = "no optimizer stepped in what was run, so this is no training step but the largest graph there was"
        found.insert(0, Finding("optimizer", "warning", fact, "a loop with core.optimizer_step(optimizer), or fit"))
    elif not recording.is_steady and not recording.recompiled:
        fact = "the function ended before its step came back unchanged; this is the last that it ran"
        found.insert(0, Finding("steady step", "warning", fact, "more data or epochs: at least five steps"))
    clean = "no fallbacks to the host, no float64, no large int64, no dynamic shapes; nothing compiled again"
    worth_saying = [one for one in found if one.state != "ok"]
    return found if worth_saying else [*found, Finding("hazards", "ok", clean)]


def padding(program: Program) -> Iterator[Array]:
    """Yield the arrays in HBM that the operations of a program write."""
    for one in program.operations:
        if one.opcode not in ("parameter", "get-tuple-element", "tuple", "bitcast"):
            yield from (array for array in one.arrays if array.in_hbm and array.dimensions)


def _compiled_again(recording: Recording) -> Finding:
    """Name the worst that can happen on a TPU: seconds to minutes of compiling, again and again."""
    graphs, steps, (reason, fix) = recording.recompiled, recording.steps, recording.reason
    fact = f"{graphs} graphs were compiled again after the second of {steps} steps, each for seconds to minutes"
    return Finding("recompiles", "warning", f"{fact}\n{reason}".rstrip(), fix or "the same shapes in every step")


def _cut(recording: Recording) -> list[Finding]:
    graphs, syncs = len(recording.graphs), recording.syncs
    if graphs == 1:
        return []
    if graphs <= syncs:
        fact = f"{graphs} graphs, each of a core.step(), from one step of the optimizers to the next"
        return [Finding("graphs a step", "ok", fact)]
    several = f" in {syncs} core.step()" if syncs > 1 else ""
    fact = f"one step runs {graphs} graphs{several}: something reads a tensor in it, and the chip waits for the host"
    return [Finding("graphs a step", "warning", fact, "no .item(), print or if on a tensor inside of core.step()")]


def _fallbacks(recording: Recording) -> list[Finding]:
    names = sorted(name.removeprefix("aten::") for name in recording.counters if name.startswith("aten::"))
    names = [name for name in names if name != "_local_scalar_dense"]  # .item(), which cuts the graph
    if not names:
        return []
    fact = f"computed on the host, for torch_xla has no such operation: {', '.join(names)}"
    return [Finding("fallbacks", "warning", fact, "another operation, or the same before the batch is sent")]


def _wide(programs: list[Program], kind: str, name: str, why: str, instead: str, recording: Recording) -> list[Finding]:
    wide = [one for program in programs for one in program.everywhere() if _has(one, kind)]
    if not wide:
        return []
    where = Counter(_place(one, recording) for one in wide)
    first = ", ".join(place for place, _ in where.most_common(2))
    fact = f"{name} in {len(wide)} operations, the largest {max(wide, key=_size).arrays[0]}, in {first}: {why}"
    return [Finding(name, "warning", fact, f"{instead} where its range is enough")]


def _has(one: Operation, kind: str) -> bool:
    return any(array.type == kind and array.bytes >= _LARGE * array.width for array in one.arrays)


def _size(one: Operation) -> int:
    return sum(array.bytes for array in one.arrays)


def _place(one: Operation, recording: Recording) -> str:
    number = one.scope.removeprefix("call")
    if number.isdigit() and int(number) < len(recording.places):
        module, _, direction = recording.places[int(number)]
        return f"{module} ({direction})"
    return one.op_type or one.opcode


def _dynamic(programs: list[Program]) -> list[Finding]:
    dynamic = [
        one for program in programs for one in program.everywhere() if any(array.is_dynamic for array in one.arrays)
    ]
    if not dynamic:
        return []
    names = ", ".join(dict.fromkeys(one.op_type or one.opcode for one in dynamic[:3]))
    fact = f"shapes that depend on values: {names}; each bound is computed in full, and reading one cuts the graph"
    return [Finding("dynamic shapes", "warning", fact, "torch.where and masks in place of nonzero and x[mask]")]
