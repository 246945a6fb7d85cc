"""What a TPU will do with a step: memory, time, cost, and what is in the way, from the TPU's own compiler."""

import contextlib
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tpukit.essentials.machine import PRICES_OF
from tpukit.essentials.run import WorkerFailed
from tpukit.essentials.show import Finding, Findings, WrongValue, as_html, as_text, human_size
from tpukit.measure import Tpu, find_tpu
from tpukit.preflight.compiler import Compiled, DoesNotFit, compile_graph
from tpukit.preflight.cycles import group_bytes
from tpukit.preflight.cycles import samples as samples_of
from tpukit.preflight.hazards import find_hazards, padding
from tpukit.preflight.hlo import Operation, Program, read_program
from tpukit.preflight.recording import Graph, NoPreflight, Recording, record
from tpukit.standin import open_kept

_MOST_OPERATIONS = 10
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BASIS = "an estimate, not compared with a chip: the sum of the compiler's cycles, without launches, waits and links"


@dataclass(frozen=True)
class Cost:
    """An operation of the compiled step and what it costs.

    Attributes:
        operation: as the compiler wrote it.
        cycles: the compiler's estimate.
        share: of the cycles of the step.
        module: the module of the model that it came from, or the optimiser; "" if unknown.
        line: "file:line" of Python; "" if unknown.
        direction: "forward", "backward" or "optimizer"; "" if unknown.
    """

    operation: Operation
    cycles: int
    share: float
    module: str
    line: str
    direction: str


@dataclass(frozen=True, repr=False)
class Preflight(Findings):
    """What a TPU will do with a step, as far as its compiler knows: shows itself as a table; `figure()` draws it.

    Bytes are of HBM, a core. Numbers of time are estimates that were not compared with a chip.

    Attributes:
        chip: the TPU.
        recording: the step.
        compiled: what libtpu made of each of its graphs; empty where one does not fit.
        shapes: the same for batches of each other shape that the recording has.
        too_large: why it does not fit, else None.
        samples: of an epoch, if known.
        pipeline: samples a second that the input was measured to give, for all cores; None if not known.
        dollars: an hour, of the whole TPU.
        shard: as in `launch`.
        cut: of a model that does not fit one chip, the same with `shard="fsdp"`, if that could be compiled.
    """

    chip: Tpu
    recording: Recording
    compiled: tuple[Compiled, ...]
    too_large: DoesNotFit | None = None
    samples: int | None = None
    pipeline: float | None = None
    dollars: float = 0.0
    shapes: tuple[tuple[Compiled, ...], ...] = ()
    shard: str | None = None
    cut: "Preflight | None" = None

    @property
    def subject(self) -> str:
        """What was examined."""
        batch = f", {self.batch_size} samples a core" if self.batch_size else ""
        compiler = f", libtpu {self.compiled[0].libtpu}" if self.compiled else ""
        return f"preflight for {self.chip.name}{', one model over its chips' * bool(self.shard)}{batch}{compiler}"

    @property
    def fits(self) -> bool:
        """Whether a core has the memory for the step."""
        return self.too_large is None and self.hbm_bytes <= self.chip.hbm

    @property
    def batch_size(self) -> int | None:
        """Samples a core and step, of all batches that it takes from the host; None if it takes none."""
        return samples_of(self.recording.batches)

    @property
    def hbm_bytes(self) -> int:
        """The most that is in use: a graph's arguments and temporaries, all else that is alive, the code of all graphs.

        Where a graph alone does not fit, what the compiler says it would take.
        """
        if self.too_large is not None:
            return self.too_large.needed or self.chip.hbm + 1
        compiled, beside = self._largest
        return compiled.hbm_bytes + beside

    @property
    def _largest(self) -> tuple[Compiled, int]:
        """The graph that runs when most is in use, and the bytes beside it: what is alive, and other graphs' code."""
        graphs = [*self.recording.graphs, *(graph for one in self.recording.shapes for graph in one.graphs)]
        compiled = [*self.compiled, *(made for one in self.shapes for made in one)]
        code = sum({id(one): one.code_bytes for one in compiled}.values())
        beside = [graph.beside + code - one.code_bytes for graph, one in zip(graphs, compiled, strict=False)]
        return max(zip(compiled, beside, strict=False), key=lambda both: both[0].hbm_bytes + both[1])

    @property
    def cycles(self) -> int:
        """The compiler's estimate for the step; collectives are not in it."""
        return sum(one.cycles for one in self.compiled)

    @property
    def seconds(self) -> float:
        """The same in seconds, by the clock of the chip; NaN where the step does not fit."""
        return self.cycles / self.chip.clock if self.compiled else math.nan

    @property
    def samples_per_second(self) -> float:
        """Samples of all cores; NaN where the batch is not known."""
        return self.batch_size * self.chip.cores / self.seconds if self.batch_size and self.seconds else math.nan

    @property
    def host_seconds(self) -> float:
        """Seconds of one of this machine's processors that the host takes for a step; NaN where that is not known.

        The cores of a v2 or v3 chip are threads of one process, which takes that long for each of them in turn.
        """
        seconds = self.recording.host_seconds
        return math.nan if seconds is None else seconds * self.chip.cores / self.chip.chips

    @property
    def host_samples_per_second(self) -> float:
        """Samples of all cores, if the steps were as fast as the host can record them; NaN where that is not known."""
        return self.batch_size * self.chip.cores / self.host_seconds if self.batch_size else math.nan

    @property
    def rate(self) -> float:
        """Samples a second of all cores, at what is slower: the cores or the host; NaN where the batch is not known."""
        return _least(self.samples_per_second, self.host_samples_per_second)

    @property
    def flops_share(self) -> float:
        """The share of the chip's peak in bfloat16 that the step would reach."""
        return sum(one.flops for one in self.compiled) / (self.seconds * self.chip.flops) if self.compiled else math.nan

    @property
    def bandwidth_share(self) -> float:
        """The share of the memory's bandwidth that the step would use, by the compiler's count of bytes."""
        used = sum(one.bytes_accessed for one in self.compiled)
        return used / (self.seconds * self.chip.bandwidth) if self.compiled else math.nan

    @property
    def dollars_per_million(self) -> float:
        """What a million samples cost by the chip's own estimate, if the cores wait for nothing."""
        return 1e6 / self.samples_per_second / 3600 * self.dollars

    @cached_property
    def operations(self) -> tuple[Cost, ...]:
        """The most expensive operations, ten at most, with the line of Python that each came from."""
        places = self.recording.places
        costs = []
        for compiled in self.compiled:
            for one in compiled.program.operations:
                module, line, direction = _place(one, compiled.program, places)
                share = (one.cycles or 0) / max(1, self.cycles)
                costs.append(Cost(one, one.cycles or 0, share, module, line, direction))
        return tuple(sorted(costs, key=lambda cost: -cost.cycles)[:_MOST_OPERATIONS])

    @property
    def collective_bytes(self) -> int:
        """What a core sends through collectives in a step; the time that takes is not in any estimate here."""
        sent = (one for compiled in self.compiled for one in _collectives(compiled.program))
        return sum(array.bytes for one in sent for array in one.arrays)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Everything that was found, in order."""
        if self.too_large is not None:
            return (self._memory(), *find_hazards(self.recording))
        return (
            self._memory(),
            Finding("step", "ok", self._time()),
            *self._shapes(),
            Finding("use of the chip", "ok", self._use()),
            *self._host(),
            *self._padding(),
            *self._input(),
            Finding("cost", "ok", self._cost()),
            *find_hazards(self.recording),
        )

    def __str__(self) -> str:
        return "\n\n".join(part for part in (super().__str__(), as_text(self._operation_rows())) if part)

    def _repr_html_(self) -> str:
        rows = self._operation_rows()
        title = "The most expensive operations"
        return super()._repr_html_() + (f"<br>{as_html(rows, title=title)}" if rows else "")

    def figure(self):
        """Return a matplotlib figure of where memory and time go."""
        from tpukit.preflight.cost_figures import preflight_figure

        return preflight_figure(self)

    def _operation_rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (
                f"{cost.share:.1%}",
                f"{cost.cycles:,} cycles",
                f"{cost.module or cost.operation.op_type or 'no module'} {cost.direction}".strip(),
                f"{_described(cost.operation)}\n{_short(cost.line)}".strip(),
            )
            for cost in self.operations
            if cost.cycles
        ]

    def _memory(self) -> Finding:
        has = f"a {self.chip.generation} core has {human_size(self.chip.hbm)}"
        fix = f"{self._smaller_batch()}, bfloat16, or a chip with more memory"
        if self.cut and self.cut.fits:
            has = f"one chip has {human_size(self.chip.hbm)}"
            fix = f'it fits with shard="fsdp": {human_size(self.cut.hbm_bytes)} a chip, with this batch_size of the run'
        if self.too_large is not None:
            wanted, limit = self.too_large.needed, self.too_large.limit
            fact = f"does not fit: the step needs {human_size(wanted)}, {has}" if wanted else f"does not fit: {has}"
            if wanted and limit:
                fact += f", of which a program gets {human_size(limit)}: {human_size(wanted - limit)} too much"
            return Finding("memory", "failure", f"{fact}\n{self.too_large.words.splitlines()[0][:300]}", fix)
        one, beside = self._largest
        parts = f"arguments {human_size(one.argument_bytes)}, temporaries {human_size(one.temporary_bytes)}, "
        parts += f"code {human_size(one.code_bytes)}"
        if beside:
            parts += f", alive beside that {human_size(beside)}"
        fact = f"{parts}: {human_size(self.hbm_bytes)} a core; {has}"
        if not self.fits:
            return Finding("memory", "failure", f"does not fit: {fact}", fix)
        return Finding("memory", "ok", f"fits: {fact}")

    def _smaller_batch(self) -> str:
        """Say which batch would fit, by proportion: a little too small, as the weights do not shrink with it."""
        limit = self.too_large.limit if self.too_large and self.too_large.limit else self.chip.hbm
        samples = (self.batch_size or 0) * (self.chip.cores if self.shard else 1)
        about, of = int(samples * limit / self.hbm_bytes) // 8 * 8, "of the run" if self.shard else "a core"
        size = f"about {about:,} samples {of}" if about else "a smaller batch"
        return f"{size} (`tpukit.preflight.largest_batch` finds it exactly)"

    def _time(self) -> str:
        rate = "" if math.isnan(self.samples_per_second) else f", {self.samples_per_second:,.0f} samples/s on all cores"
        fact = f"{self.cycles:,} cycles, {self.seconds * 1e3:.2f} ms at {self.chip.clock / 1e9:g} GHz{rate}\n{BASIS}"
        if self.collective_bytes:
            sent = human_size(self.collective_bytes)
            fact += f"; a core sends {sent} through collectives, for which it gives no cycles"
        return fact

    def _shapes(self) -> list[Finding]:
        """One row for each shape of batches, as with buckets: what is said elsewhere is of the largest."""
        if not self.shapes:
            return []
        steps = [(self.recording.batches, self.compiled)]
        steps += [(one.batches, made) for one, made in zip(self.recording.shapes, self.shapes, strict=True)]
        rows = []
        for batches, compiled in sorted(steps, key=lambda step: -sum(map(group_bytes, step[0]))):
            seconds = sum(one.cycles for one in compiled) / self.chip.clock
            size = human_size(max(one.hbm_bytes for one in compiled))
            rate = samples_of(batches) * self.chip.cores / seconds
            fact = f"{_written(batches)}: {seconds * 1e3:.2f} ms, {rate:,.0f} samples/s, {size} a core"
            rows.append(Finding("shape", "ok", fact))
        return rows

    def _use(self) -> str:
        flops, used = (sum(getattr(one, name) for one in self.compiled) for name in ("flops", "bytes_accessed"))
        peak = f"{self.flops_share:.0%} of the {self.chip.flops / 1e12:g} TFLOP/s in bfloat16"
        traffic = f"{self.bandwidth_share:.0%} of {self.chip.bandwidth / 1e9:g} GB/s"
        if self.bandwidth_share > 1:
            traffic += "; more than all, since the compiler counts what stays in fast memory, too"
        return f"{_digits(flops / 1e9)} GFLOP and {_digits(used / 1e9)} GB of memory traffic a step: {peak}, {traffic}"

    def _host(self) -> list[Finding]:
        if math.isnan(self.host_seconds):
            return []
        fact = f"a processor of this machine records a step in {self.host_seconds * 1e3:.1f} ms, "
        if self.host_seconds <= self.seconds:
            return [Finding("host", "ok", f"{fact}while the core computes the one before")]
        fact += f"and the core waits for that: {1 - self.seconds / self.host_seconds:.0%} of the time"
        if self.batch_size:
            fact += f", at {self.host_samples_per_second:,.0f} samples/s on all cores"
        return [Finding("host", "warning", fact, "a larger batch, or larger images: they take no longer to record")]

    def _padding(self) -> list[Finding]:
        wasted = [found for compiled in self.compiled for found in padding(compiled.program)]
        needed, taken = sum(one.bytes for one in wasted), sum(one.padded_bytes for one in wasted)
        if not taken:
            return []
        share = 1 - needed / taken
        worst = max(wasted, key=lambda one: one.padded_bytes - one.bytes)
        fact = f"{share:.0%} of the memory that results take is padding to full tiles"
        if share < 0.2 or worst.padded_bytes - worst.bytes < 2**20:
            return [Finding("padding", "ok", fact)]
        fact += f"; most in {worst}: {human_size(worst.bytes)} take {human_size(worst.padded_bytes)}"
        return [Finding("padding", "warning", fact, "batch and channels that are multiples of 8 and 128")]

    def _input(self) -> list[Finding]:
        rate, size = self.rate, sum(map(group_bytes, self.recording.batches))
        if math.isnan(rate) or not size:
            return []
        each = size / self.batch_size
        fact = f"the cores would take {rate:,.0f} samples/s, {rate * each / 1e6:,.0f} MB/s from the host"
        if self.pipeline is None:
            return [Finding("input", "ok", f"{fact}; `pipeline=` compares that with what yours was measured to give")]
        if self.pipeline >= rate:
            return [Finding("input", "ok", f"{fact}; the input gives {self.pipeline:,.0f}")]
        waits = f"the cores would wait {1 - self.pipeline / rate:.0%} of the time"
        fact += f"; the input gives {self.pipeline:,.0f}: {waits}"
        return [Finding("input", "warning", fact, "notebook 05: a cache of decoded pixels, threads, workers")]

    def _cost(self) -> str:
        price = f"${self.dollars:.2f} an hour ({PRICES_OF})"
        if math.isnan(self.samples_per_second):
            return price
        rate = _least(self.rate, self.pipeline or math.nan)
        text = f"{price}: ${_digits(1e6 / rate / 3600 * self.dollars)} for a million samples"
        if self.samples:
            hours = self.samples / rate / 3600
            text += f", ${hours * self.dollars:,.2f} for an epoch of {self.samples:,} ({hours * 3600:,.0f} s)"
        if rate == self.samples_per_second:
            return f"{text}, if nothing is waited for"
        return f"{text}, as fast as the {'input' if rate == self.pipeline else 'host'}"


def preflight(
    train: Callable,
    *args: object,
    chip: str | Tpu = "v5e-8",
    shard: str | None = None,
    libtpu: str | None = None,
    samples: int | None = None,
    pipeline: float | None = None,
    prices: Mapping[str, float] | None = None,
    keep: str | os.PathLike | None = None,
    progress: str | None = None,
    timeout: float | None = None,
) -> Preflight:
    """Say what a TPU will do with a worker function's step, on a machine without one.

    The function is run as core 0 of that TPU until its step comes back, without computing anything large, see
    `tpukit.preflight.recording.record`; the step is then compiled by libtpu, the TPU's own compiler, in a process of
    its own. That takes seconds to minutes, once for each graph: results are kept in the user's cache folder.

    No file is changed by it: `core.save` and `fit` write nothing meanwhile, and where the function itself would write
    outside of a temporary folder, as with `torch.save`, it is refused with the line that tried.

    Args:
        train: the worker function, as for `launch`; `train(core, *args)`.
        *args: passed on.
        chip: such as "v5e-8" (Kaggle), "v5e-1" (Colab), "v6e-1", "v3-8".
        shard: as in `launch`: "fsdp" for all chips as one core. Large arrays have a shape and no memory meanwhile.
        libtpu: the compiler's version, "0.0.17" for Kaggle, "0.0.21.1" for Colab; None for that of this machine's
            torch. `tpukit.preflight.fetch_libtpu` brings it.
        samples: of an epoch, for what that costs.
        pipeline: samples a second that your input was measured to give, for all cores.
        prices: dollars an hour by chip, as {"v5e-8": 9.6}, in place of the list's; names as for `chip`.
        keep: a folder that gets the compiled step as `launch(..., keep_compiles=folder)` keeps it, to be taken to a
            machine with such a TPU. Whether a chip loads it was not yet seen: see docs/keep_what_was_compiled.md.
        progress: as in `launch`.
        timeout: seconds for the compiler; None for no limit.

    Raises:
        ValueError: there is no such chip, a price is of none, or others can write to the folder `keep`.
        NoPreflight: the step cannot be recorded here; its kinds: NoLibtpu, CompileFailed.
        WorkerFailed: the worker function raised, or would have changed a file.
    """
    place = find_tpu(chip)
    if shard not in (None, "fsdp"):
        raise WrongValue(f'shard is "fsdp" or None, got {shard!r}', fix='preflight(..., shard="fsdp")')
    shard = shard if place.cores > 1 else None  # as in launch: one chip has nothing to cut
    own_prices = {find_tpu(name).name: price for name, price in (prices or {}).items()}  # before it takes minutes
    kept = open_kept([Path(keep).absolute()], print) if keep is not None else None
    recording = record(train, *args, chip=place, shard=shard, timeout=timeout or 900.0, progress=progress)
    options = {"libtpu": libtpu, "flags": recording.flags, "kept": kept, "progress": progress, "timeout": timeout}
    steps = (recording.graphs, *(one.graphs for one in recording.shapes))
    made, compiled, too_large = {}, [], None
    try:
        for number, graphs in enumerate(steps, start=1):
            label = "the step" if len(steps) == 1 else f"the step of shape {number} of {len(steps)}"
            compiled.append(_compiled(graphs, place, made, label=label, **options))
    except DoesNotFit as error:
        compiled, too_large = [()], error
    cut = None
    if too_large and not shard and place.cores > 1 and _taken(recording.graphs) > place.hbm / 2:
        with contextlib.suppress(WorkerFailed, NoPreflight):  # a batch that the chips do not divide, say
            cut = preflight(train, *args, chip=place, shard="fsdp", libtpu=libtpu, progress=progress, timeout=timeout)
    return Preflight(
        place,
        recording,
        compiled[0],
        too_large,
        samples,
        pipeline,
        dollars=own_prices.get(place.name, place.dollars),
        shapes=tuple(compiled[1:]),
        shard=shard,
        cut=cut,
    )


def _taken(graphs: tuple[Graph, ...]) -> int:
    """Return the bytes that the largest graph takes: weights and the optimiser's state above all."""
    programs = [read_program(graph.module).operations for graph in graphs]
    parameters = [[one for one in operations if one.opcode == "parameter"] for operations in programs]
    return max(sum(array.bytes for one in them for array in one.arrays) for them in parameters)


def _compiled(graphs: tuple[Graph, ...], chip: Tpu, made: dict, *, label: str, **options) -> tuple[Compiled, ...]:
    """Compile each graph once, however often it is in a step: one of added-up gradients has the same many times."""
    for graph in graphs:
        if graph.module not in made:
            several = f"graph {len(made) + 1} of {label}" if len({one.module for one in graphs}) > 1 else label
            made[graph.module] = compile_graph(graph, chip, label=several, **options)
    return tuple(made[graph.module] for graph in graphs)


def _written(batches: tuple) -> str:
    return ", ".join(f"{shape} {dtype}" for group in dict.fromkeys(batches) for shape, dtype in group)


def _place(one: Operation, program: Program, places: tuple) -> tuple[str, str, str]:
    """Return the call that an operation came from; of a fusion without one, that of most of its parts."""
    scope = one.scope
    if not scope:
        inner = Counter(part.scope for number in one.called for part in program.computations.get(number, ()))
        del inner[""]
        scope = inner.most_common(1)[0][0] if inner else ""
    number = scope.removeprefix("call")
    if number.isdigit() and int(number) < len(places):
        return places[int(number)]
    return "", one.source, ""


def _collectives(program: Program) -> Iterator[Operation]:
    """Yield each collective once: one that goes on beside other work is in all fusions that begin, carry or end it."""
    for one in program.operations:
        carries = one.name.startswith("async-collective-done") or any(str(array) == "u32[]" for array in one.arrays)
        is_part = carries and not one.name.startswith("async-collective-start")
        inside = [] if is_part else [part for number in one.called for part in program.computations.get(number, ())]
        yield from (part for part in (one, *inside) if part.opcode.removesuffix("-start") in _COLLECTIVES)


def _described(one: Operation) -> str:
    return f"{one.opcode} {', '.join(map(str, one.arrays[:2]))}"


def _short(line: str) -> str:
    """Return "file:line" with the last two folders of the file, or the line of a notebook's cell."""
    if cell := re.search(r"/ipykernel_\d+/\d+\.py:(\d+)$", line):
        return f"line {cell[1]} of a cell"
    return "/".join(Path(line).parts[-3:]) if line else ""


def _least(*rates: float) -> float:
    """Return the smallest of those that are known."""
    return min((rate for rate in rates if not math.isnan(rate)), default=math.nan)


def _digits(number: float) -> str:
    """Write a number with three digits, or with all before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
