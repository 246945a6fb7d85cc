"""Report the memory, time, cost and hazards of a training step on a TPU.

    worker function --record()--> graphs --compile_graph()--> programs --Preflight--> a table

`preflight` runs the worker function on a simulated TPU, which records the graphs of one training
step. libtpu, the TPU's own compiler, compiles each graph to a program, and estimates its memory and
the cycles of each operation. `Preflight` adds these numbers up and judges them:

    ok       memory  fits: arguments ... MiB, temporaries ... MiB, code ... MiB: ... GiB per core
    ok       step    ... cycles, ... ms at 1.5 GHz, ... samples/s on all cores
    warning  host    a processor of this machine records a step in ... ms, and the core waits ...
"""

import contextlib
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tpukit.essentials.display import (
    Finding,
    Findings,
    InvalidValueError,
    as_html,
    as_text,
    human_size,
)
from tpukit.essentials.environment import PRICES_OF
from tpukit.essentials.launcher import WorkerError
from tpukit.preflight.compiler import Compiled, OutOfMemoryError, compile_graph
from tpukit.preflight.cycles import Transfer, group_bytes
from tpukit.preflight.cycles import samples as samples_of
from tpukit.preflight.hazards import find_hazards, written_arrays
from tpukit.preflight.hlo import Operation, Program, read_program
from tpukit.preflight.recording import Graph, PreflightError, Recording, record
from tpukit.preflight.roofline import limit, roofline_figure
from tpukit.preflight.scaling import all_reduce_seconds
from tpukit.preflight.scopes import Call
from tpukit.profiling import Tpu, find_tpu
from tpukit.simulator import open_compile_cache

_MOST_OPERATIONS = 10  # the most operations in a table
# HLO operations that wait for other chips.
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
_BATCH_MULTIPLE = 8  # suggested batch sizes are multiples of this: a TPU computes 8 rows at a time
# The report warns of padding if it is at least this share of the memory of results, and if at least
# one array has this many bytes of padding.
_WASTED_SHARE = 0.2
_WASTED_BYTES = 2**20
_RECORDING_SECONDS = 900.0  # the limit for the recording if `timeout` is None
# libtpu estimates only the operations, not their launches.
BASIS = "an estimate, not compared with a chip: the compiler's cycles, without launches and waits"


@dataclass(frozen=True)
class Cost:
    """An operation of the compiled step, and its cost.

    Attributes:
        operation: the operation in the compiled program.
        cycles: the compiler's estimate for one run of the operation.
        share: the share of the cycles of the step, 0 to 1.
        module: the module of the model, or the optimizer, that made the operation; "" if unknown.
        line: "file:line" of the Python code that made the operation; "" if unknown.
        direction: "forward", "backward" or "optimizer"; "" if unknown.
        flops: the FLOPs of the convolutions and dots in the operation.
        hbm_bytes: the bytes of the operands and results that are in HBM.
    """

    operation: Operation
    cycles: int
    share: float
    module: str
    line: str
    direction: str
    flops: int = 0
    hbm_bytes: int = 0


class _Peak(NamedTuple):
    """The moment at which a core uses the most memory."""

    program: Compiled  # the program that runs at this moment
    others: int  # bytes of tensors that the program does not use, and of other programs' code

    @property
    def bytes(self) -> int:
        """The bytes of HBM in use."""
        return self.program.hbm_bytes + self.others


@dataclass(frozen=True, repr=False)
class Preflight(Findings):
    """The compiler's facts about a training step on a TPU, as a table; `figure()` draws them.

    Bytes are those of HBM per core. Times are estimates that were not compared with a chip.

    Attributes:
        chip: the TPU.
        recording: the recorded step.
        compiled: libtpu's program of each graph; empty if a graph needs too much memory.
        too_large: the compiler's error if the step needs too much memory; else None.
        samples: the number of samples per epoch; None if unknown.
        pipeline: measured samples per second of the input pipeline, for all cores; None if unknown.
        dollars: the price of the whole TPU per hour.
        shapes: for each batch shape other than the largest, the programs of its step.
        shard: as in `launch`.
        cut: the same step with `shard="fsdp"`, if the memory of one core is too small for the
            model; None if the memory is large enough, or if that step could not be compiled.
    """

    chip: Tpu
    recording: Recording
    compiled: tuple[Compiled, ...]
    too_large: OutOfMemoryError | None = None
    samples: int | None = None
    pipeline: float | None = None
    dollars: float = 0.0
    shapes: tuple[tuple[Compiled, ...], ...] = ()
    shard: str | None = None
    cut: "Preflight | None" = None

    @property
    def subject(self) -> str:
        """The title of the table, with the TPU, the batch and the compiler."""
        parts = [f"preflight for {self.chip.name}"]
        if self.shard:
            parts.append("one model over its chips")
        if self.batch_size:
            parts.append(f"{self.batch_size} samples per core")
        if self.compiled:
            parts.append(f"libtpu {self.compiled[0].libtpu}")
        return ", ".join(parts)

    @property
    def fits(self) -> bool:
        """True if a core has enough memory for the step."""
        return self.too_large is None and self.hbm_bytes <= self.chip.hbm

    @property
    def batch_size(self) -> int | None:
        """Samples per core and step, the sum over the step's batches; None without a batch."""
        return samples_of(self.recording.batches)

    @property
    def hbm_bytes(self) -> int:
        """The largest number of bytes of HBM in use at any time.

        HBM holds the arguments, results and temporaries of the running graph, all other tensors on
        the device, and the code of all graphs. If a graph does not fit, the result is the number in
        the compiler's message; if the message has none, one byte more than the HBM of a core.
        """
        if self.too_large is not None:
            return self.too_large.needed or self.chip.hbm + 1
        return self._peak.bytes

    @property
    def _peak(self) -> _Peak:
        graphs = list(self.recording.graphs)
        programs = list(self.compiled)
        for shape in self.recording.shapes:
            graphs += shape.graphs
        for compiled in self.shapes:
            programs += compiled
        # By `id`, because a graph that runs several times per step has a single program.
        code = sum({id(program): program.code_bytes for program in programs}.values())
        peaks = [
            _Peak(program, others=graph.beside + code - program.code_bytes)
            for graph, program in zip(graphs, programs, strict=True)
        ]
        return max(peaks, key=lambda peak: peak.bytes)

    @property
    def cycles(self) -> int:
        """The compiler's estimate of the step's cycles, without collectives."""
        return sum(program.cycles for program in self.compiled)

    @property
    def seconds(self) -> float:
        """The estimated seconds of a step at the chip's clock; NaN without a program."""
        if not self.compiled:
            return math.nan
        return self.cycles / self.chip.clock

    @property
    def samples_per_second(self) -> float:
        """Samples per second of all cores; NaN if the batch or the time of a step is unknown."""
        if not self.batch_size or not self.seconds:
            return math.nan
        return self.batch_size * self.chip.cores / self.seconds

    @property
    def host_seconds(self) -> float:
        """Seconds of Python and torch_xla per step, on a CPU of this machine; NaN if unknown.

        On a v2 or v3 chip, this is the time for both cores, because one process captures the steps
        of both, one after the other.
        """
        seconds = self.recording.host_seconds
        if seconds is None:
            return math.nan
        return seconds * self.chip.cores / self.chip.chips

    @property
    def host_samples_per_second(self) -> float:
        """Samples per second of all cores if only the host limits them; NaN if unknown."""
        if not self.batch_size:
            return math.nan
        return self.batch_size * self.chip.cores / self.host_seconds

    @property
    def rate(self) -> float:
        """Samples per second of all cores, limited by the cores or the host; NaN if unknown."""
        return _least(self.samples_per_second, self.host_samples_per_second)

    @property
    def flops_share(self) -> float:
        """The share of the chip's bfloat16 peak that the step would reach, 0 to 1."""
        return self._share(self.flops, self.chip.flops)

    @property
    def bandwidth_share(self) -> float:
        """The share of the memory's bandwidth that the step would use, by the compiler's count."""
        return self._share(self.bytes_accessed, self.chip.bandwidth)

    def _share(self, amount: float, per_second: float) -> float:
        """Return an amount as a share of what `seconds` allow; 0 if the step takes no cycles."""
        return amount / (self.seconds * per_second) if self.seconds else 0.0

    @property
    def flops(self) -> float:
        """FLOPs of a core and step, by the compiler's count."""
        return sum(program.flops for program in self.compiled)

    @property
    def bytes_accessed(self) -> float:
        """Bytes of memory traffic of a core and step, by the compiler's count."""
        return sum(program.bytes_accessed for program in self.compiled)

    @property
    def dollars_per_million(self) -> float:
        """Dollars per million samples, from the estimated time of a step without waiting."""
        return _dollars_per_million(self.samples_per_second, self.dollars)

    @property
    def operations(self) -> tuple[Cost, ...]:
        """The most expensive operations, at most ten, each with its line of Python."""
        return self._costs[:_MOST_OPERATIONS]

    @property
    def products(self) -> tuple[Cost, ...]:
        """The most expensive operations with a convolution or a dot, at most ten."""
        return tuple(cost for cost in self._costs if cost.flops)[:_MOST_OPERATIONS]

    @cached_property
    def _costs(self) -> tuple[Cost, ...]:
        costs = []
        for compiled in self.compiled:
            for operation in compiled.program.operations:
                call = _call_of(operation, compiled.program, self.recording.places)
                cycles = operation.cycles or 0
                cost = Cost(
                    operation,
                    cycles=cycles,
                    share=cycles / max(1, self.cycles),
                    module=call.module,
                    line=call.line,
                    direction=call.direction,
                    flops=compiled.program.flops(operation),
                    hbm_bytes=compiled.program.hbm_bytes(operation),
                )
                costs.append(cost)
        costs.sort(key=lambda cost: cost.cycles, reverse=True)
        return tuple(costs)

    @property
    def collective_bytes(self) -> int:
        """Bytes of the tensors in collectives, per core and step."""
        total = 0
        for compiled in self.compiled:
            for operation in _collectives(compiled.program):
                total += sum(array.bytes for array in operation.arrays)
        return total

    @cached_property
    def hbm_traffic(self) -> int:
        """Bytes that the operations of a step read and write in HBM, not in on-chip memory."""
        return sum(cost.hbm_bytes for cost in self._costs)

    @property
    def link_seconds(self) -> float:
        """Seconds per step of the collectives on the links between chips; 0 on one chip.

        This is the time of an all-reduce of `collective_bytes` in a ring, if no computation
        overlaps with it; see `tpukit.preflight.scaling`.
        """
        return all_reduce_seconds(self.collective_bytes, self.chip.generation, self.chip.chips)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, in the order of the table."""
        if self.too_large is not None:
            # Without a program there is no estimate of time.
            return (self._memory(), *find_hazards(self.recording))
        return (
            self._memory(),
            Finding("step", "ok", self._time()),
            *self._shapes(),
            Finding("use of the chip", "ok", self._use()),
            *self._host(),
            *self._padding(),
            *self._input(),
            Finding("limit", "ok", limit(self)[1]),
            Finding("cost", "ok", self._cost()),
            *find_hazards(self.recording),
        )

    def __str__(self) -> str:
        parts = [super().__str__(), as_text(self._operation_rows())]
        return "\n\n".join(filter(None, parts))

    def _repr_html_(self) -> str:
        html = super()._repr_html_()
        rows = self._operation_rows()
        if rows:
            html += f"<br>{as_html(rows, title='The most expensive operations')}"
        return html

    def figure(self):
        """Return a matplotlib figure of the memory of a core and the time of a step."""
        from tpukit.preflight.cost_figures import preflight_figure

        return preflight_figure(self)

    def roofline(self, *, step_seconds: float | None = None):
        """Return a matplotlib figure: the step and its `products` under the roofline.

        Args:
            step_seconds: the measured time of the same step on the chip, such as the `step_seconds`
                of `tpukit.profiling.report`. With it, the figure also shows the measured step.

        Raises:
            InvalidValueError: the step needs too much memory, so there is no program; or
                `step_seconds` is not positive.
        """
        return roofline_figure(self, step_seconds=step_seconds)

    def _operation_rows(self) -> list[tuple[str, str, str, str]]:
        rows = []
        for cost in self.operations:
            if cost.cycles:
                module = cost.module or cost.operation.op_type or "no module"
                row = (
                    f"{cost.share:.1%}",
                    f"{cost.cycles:,} cycles",
                    f"{module} {cost.direction}".strip(),
                    f"{_described(cost.operation)}\n{_short(cost.line)}".strip(),
                )
                rows.append(row)
        return rows

    def _memory(self) -> Finding:
        if self.too_large is not None:
            return Finding("memory", "failure", self._compiler_refusal(), fix=self._memory_fix())
        peak = self._peak
        parts = [
            f"arguments {human_size(peak.program.argument_bytes)}",
            f"temporaries {human_size(peak.program.temporary_bytes)}",
            f"code {human_size(peak.program.code_bytes)}",
        ]
        if peak.others:
            parts.append(f"other tensors and programs {human_size(peak.others)}")
        total = f"{human_size(self.hbm_bytes)} per core"
        fact = f"{', '.join(parts)}: {total}; {self._available_memory()}"
        if self.fits:
            return Finding("memory", "ok", f"fits: {fact}")
        return Finding("memory", "failure", f"does not fit: {fact}", fix=self._memory_fix())

    def _compiler_refusal(self) -> str:
        """Return the needed and the available memory, and the compiler's first line."""
        needed = self.too_large.needed
        limit = self.too_large.limit
        fact = "does not fit: "
        if needed:
            fact += f"the step needs {human_size(needed)}, "
        fact += self._available_memory()
        if needed and limit:
            too_much = human_size(needed - limit)
            fact += f", of which a program gets {human_size(limit)}: {too_much} too much"
        first_line = self.too_large.words.splitlines()[0]
        return f"{fact}\n{first_line[:300]}"

    def _available_memory(self) -> str:
        size = human_size(self.chip.hbm)
        if self._fits_sharded():
            return f"one chip has {size}"
        return f"a {self.chip.generation} core has {size}"

    def _memory_fix(self) -> str:
        if self._fits_sharded():
            size = human_size(self.cut.hbm_bytes)
            return f'it fits with shard="fsdp": {size} per chip, if batch_size counts the whole run'
        return f"{self._smaller_batch()}, bfloat16, or a chip with more memory"

    def _fits_sharded(self) -> bool:
        return self.cut is not None and self.cut.fits

    def _smaller_batch(self) -> str:
        """Return a fix with an upper bound of the batch size.

        The bound is too large, because it assumes that all memory grows with the batch. The memory
        of the weights does not.
        """
        limit = self.chip.hbm
        if self.too_large and self.too_large.limit:
            limit = self.too_large.limit
        samples = self.batch_size or 0
        unit = "per core"
        if self.shard:
            samples *= self.chip.cores
            unit = "of the run"
        fitting = int(samples * limit / self.hbm_bytes) // _BATCH_MULTIPLE * _BATCH_MULTIPLE
        size = f"fewer than {fitting:,} samples {unit}" if fitting else "a smaller batch"
        return f"{size} (`tpukit.preflight.largest_batch` searches for one)"

    def _time(self) -> str:
        milliseconds = self.seconds * 1e3
        gigahertz = self.chip.clock / 1e9
        fact = f"{self.cycles:,} cycles, {milliseconds:.2f} ms at {gigahertz:g} GHz"
        if not math.isnan(self.samples_per_second):
            fact += f", {self.samples_per_second:,.0f} samples/s on all cores"
            fact += f"\n{self._batch()}"
        fact += f"\n{BASIS}"
        if self.collective_bytes:
            size = human_size(self.collective_bytes)
            fact += (
                f"; a core sends {size} through collectives, for which the compiler gives no cycles"
            )
        return fact

    def _batch(self) -> str:
        """Return a text on the tensor whose dimension 0 is the number of samples."""
        source = "of core.batches"
        if not self.recording.is_from_loop:
            source = "the largest tensors from the host, because no core.batches made them"
        first, *_ = self.recording.batches[0]
        size, dtype = first
        count = len(self.recording.batches)
        times = f"{count} batches per step, each " if count > 1 else ""
        return f"samples: {times}dimension 0 of {size} {dtype}, {source}"

    def _shapes(self) -> list[Finding]:
        """Return a row per batch shape, if there are several, the largest shape first.

        All other rows of the table are about the largest shape.
        """
        if not self.shapes:
            return []
        steps = [(self.recording.batches, self.compiled)]
        for shape, compiled in zip(self.recording.shapes, self.shapes, strict=True):
            steps.append((shape.batches, compiled))
        steps.sort(key=lambda step: _bytes_sent(step[0]), reverse=True)
        return [self._shape(batches, compiled) for batches, compiled in steps]

    def _shape(self, batches: tuple[Transfer, ...], compiled: tuple[Compiled, ...]) -> Finding:
        seconds = sum(program.cycles for program in compiled) / self.chip.clock
        rate = samples_of(batches) * self.chip.cores / seconds
        size = human_size(max(program.hbm_bytes for program in compiled))
        shapes = _written(batches)
        numbers = f"{seconds * 1e3:.2f} ms, {rate:,.0f} samples/s, {size} per core"
        return Finding("shape", "ok", f"{shapes}: {numbers}")

    def _use(self) -> str:
        gigaflop = self.flops / 1e9
        gigabytes = self.bytes_accessed / 1e9
        work = f"{_digits(gigaflop)} GFLOP and {_digits(gigabytes)} GB of memory traffic per step"
        teraflops = f"{self.chip.flops / 1e12:g} TFLOP/s"
        peak = f"{self.flops_share:.0%} of the {teraflops} in bfloat16"
        traffic = f"{self.bandwidth_share:.0%} of {self.chip.bandwidth / 1e9:g} GB/s"
        if self.bandwidth_share > 1:
            traffic += "; above 100%, because the compiler also counts data in fast memory"
        return f"{work}: {peak}, {traffic}"

    def _host(self) -> list[Finding]:
        if math.isnan(self.host_seconds):
            return []
        fact = f"a processor of this machine records a step in {self.host_seconds * 1e3:.1f} ms, "
        # torch_xla records the next step while the device computes, so only the slower one counts.
        if self.host_seconds <= self.seconds:
            return [Finding("host", "ok", f"{fact}while the core computes the previous step")]
        waiting = 1 - self.seconds / self.host_seconds
        fact += f"and the core waits for that: {waiting:.0%} of the time"
        if self.batch_size:
            fact += f", at {self.host_samples_per_second:,.0f} samples/s on all cores"
        fix = "a larger batch, or larger images: they take no longer to record"
        return [Finding("host", "warning", fact, fix=fix)]

    def _padding(self) -> list[Finding]:
        arrays = []
        for compiled in self.compiled:
            arrays += written_arrays(compiled.program)
        in_memory = sum(array.padded_bytes for array in arrays)
        if not in_memory:
            return []
        share = 1 - sum(array.bytes for array in arrays) / in_memory
        # The array that wastes most is the one to change first.
        worst = max(arrays, key=lambda array: array.padded_bytes - array.bytes)
        fact = f"{share:.0%} of the memory that results take is padding to full tiles"
        if share < _WASTED_SHARE or worst.padded_bytes - worst.bytes < _WASTED_BYTES:
            return [Finding("padding", "ok", fact)]
        needs = human_size(worst.bytes)
        takes = human_size(worst.padded_bytes)
        fact += f"; most in {worst}: {needs} take {takes}"
        fix = "batch and channels that are multiples of 8 and 128"
        return [Finding("padding", "warning", fact, fix=fix)]

    def _input(self) -> list[Finding]:
        size = _bytes_sent(self.recording.batches)
        if math.isnan(self.rate) or not size:
            return []
        megabytes = self.rate * size / self.batch_size / 1e6
        taken = f"{self.rate:,.0f} samples/s, {megabytes:,.0f} MB/s from the host"
        fact = f"the cores would take {taken}"
        if self.pipeline is None:
            hint = "`pipeline=` compares that with your measured samples/s"
            return [Finding("input", "ok", f"{fact}; {hint}")]
        fact += f"; the input gives {self.pipeline:,.0f}"
        if self.pipeline >= self.rate:
            return [Finding("input", "ok", fact)]
        fact += f": the cores would wait {1 - self.pipeline / self.rate:.0%} of the time"
        fix = "notebook 09: a cache of decoded pixels, threads, workers"
        return [Finding("input", "warning", fact, fix=fix)]

    def _cost(self) -> str:
        price = f"${self.dollars:.2f} per hour ({PRICES_OF})"
        if math.isnan(self.samples_per_second):
            return price
        # The price per hour is the same while a chip waits for the host or the input.
        rate = _least(self.rate, self.pipeline or math.nan)
        per_million = _dollars_per_million(rate, self.dollars)
        text = f"{price}: ${_digits(per_million)} for a million samples"
        if self.samples:
            seconds = self.samples / rate
            dollars = seconds / 3600 * self.dollars
            text += f", ${dollars:,.2f} for an epoch of {self.samples:,} ({seconds:,.0f} s)"
        if rate == self.samples_per_second:
            return f"{text}, if the cores never wait"
        slowest = "input" if rate == self.pipeline else "host"
        return f"{text}, as fast as the {slowest}"


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
    """Compile a worker function's training step for a TPU, on a machine without one.

    The function runs in a simulation of core 0 of that TPU, until a training step repeats. The
    simulation does not compute large graphs: see `tpukit.preflight.recording.record`. Then libtpu,
    the TPU's own compiler, compiles the step in a separate process. That takes seconds to minutes,
    but only once per graph, because results are cached in the user's cache folder.

    Your files do not change: `core.save` and `fit` write nothing. If the function itself writes to
    a file outside of a temporary folder, for example with `torch.save`, `preflight` raises an
    error that quotes this line of the function.

    Args:
        train: the worker function, as for `launch`: `train(core, *args)`.
        *args: further arguments of `train`.
        chip: the name of the TPU, such as "v5e-8" (Kaggle), "v5e-1" (Colab), "v6e-1", "v3-8".
        shard: as in `launch`: "fsdp" to use all chips as a single core; None for data parallelism.
            With "fsdp", large arrays have a shape but no values, so they need no memory here.
        libtpu: the version of the compiler: "0.0.17" for Kaggle, "0.0.21.1" for Colab; None for
            the version that belongs to this machine's torch. `tpukit.preflight.fetch_libtpu`
            downloads it.
        samples: the number of samples per epoch, for the cost of an epoch; None to omit that.
        pipeline: measured samples per second of your input pipeline, for all cores; None if
            unknown.
        prices: dollars per hour by the name of the chip, such as {"v5e-8": 9.6}, to replace list
            prices; None for the list prices.
        keep: a folder in which the compiled step is saved; None for no folder. You can copy the
            folder to a machine with such a TPU, and pass it to `launch(compile_cache=folder)`. Not
            tested on hardware: see docs/compilation_cache.md.
        progress: as in `launch`.
        timeout: the limit in seconds for the simulation, and for the compilation of each graph.
            None for 900 s for the simulation, and no limit for the compilations.

    Returns:
        The `Preflight`, a table that a notebook displays.

    Raises:
        ValueError: the chip, or a chip in `prices`, does not exist; or other users can write to
            `keep`.
        PreflightError: the step cannot be recorded or compiled here. Subclasses are
            LibtpuNotFoundError and CompileError.
        WorkerError: the worker function raised an error, or would have changed a file.
    """
    tpu = find_tpu(chip)
    if shard not in (None, "fsdp"):
        fix = 'preflight(..., shard="fsdp")'
        raise InvalidValueError(f'shard must be "fsdp" or None, got {shard!r}', fix=fix)
    if tpu.cores == 1:
        shard = None  # as in `launch`, because a single core cannot be sharded
    # Check these arguments first, because the rest takes minutes.
    own_prices = {find_tpu(name).name: price for name, price in (prices or {}).items()}
    kept = open_compile_cache([Path(keep).absolute()], print) if keep is not None else None
    seconds = timeout or _RECORDING_SECONDS
    recording = record(train, *args, chip=tpu, shard=shard, timeout=seconds, progress=progress)
    shared = {"libtpu": libtpu, "progress": progress, "timeout": timeout}
    too_large = cut = None
    try:
        steps = _compile_steps(recording, tpu, kept=kept, **shared)
    except OutOfMemoryError as error:
        steps = [()]  # one step, without programs
        too_large = error
    if too_large and not shard and _could_fit_sharded(recording, tpu):
        # An error is no failure here: for example, the batch may not be divisible by the chips.
        with contextlib.suppress(WorkerError, PreflightError):
            cut = preflight(train, *args, chip=tpu, shard="fsdp", **shared)
    return Preflight(
        tpu,
        recording,
        compiled=steps[0],
        too_large=too_large,
        samples=samples,
        pipeline=pipeline,
        dollars=own_prices.get(tpu.name, tpu.dollars),
        shapes=tuple(steps[1:]),
        shard=shard,
        cut=cut,
    )


def _compile_steps(recording: Recording, chip: Tpu, **given) -> list[tuple[Compiled, ...]]:
    """Compile the step, then the steps of the other batch shapes; return each step's programs.

    Each graph is compiled only once. For example, with accumulated gradients a step runs the same
    graph many times.
    """
    steps = [recording.graphs, *(shape.graphs for shape in recording.shapes)]
    options = {"flags": recording.flags, **given}
    program_of: dict[bytes, Compiled] = {}
    compiled = []
    for number, graphs in enumerate(steps, start=1):
        step = "the step"
        if len(steps) > 1:
            step = f"the step of shape {number} of {len(steps)}"
        has_several = len({graph.module for graph in graphs}) > 1
        for graph in graphs:
            if graph.module not in program_of:
                label = f"graph {len(program_of) + 1} of {step}" if has_several else step
                program_of[graph.module] = compile_graph(graph, chip, label=label, **options)
        compiled.append(tuple(program_of[graph.module] for graph in graphs))
    return compiled


def _could_fit_sharded(recording: Recording, chip: Tpu) -> bool:
    """Return whether a graph's arguments take more than half of a core's memory.

    These are mostly the weights and the optimizer's state. If they take less, the batch is too
    large, and it would not help to shard the weights.
    """
    return chip.cores > 1 and max(map(_parameter_bytes, recording.graphs)) > chip.hbm / 2


def _parameter_bytes(graph: Graph) -> int:
    """Return the bytes of the arguments of a graph."""
    total = 0
    for operation in read_program(graph.module).operations:
        if operation.opcode == "parameter":
            total += sum(array.bytes for array in operation.arrays)
    return total


def _call_of(operation: Operation, program: Program, places: tuple[Call, ...]) -> Call:
    """Return the Python call that made an operation.

    A fusion without a scope gets the scope that most of its parts have.
    """
    scope = operation.scope
    if not scope:
        parts: Counter[str] = Counter()
        for number in operation.called:
            parts.update(part.scope for part in program.computations.get(number, ()))
        del parts[""]  # operations without a scope
        scope = max(parts, key=parts.get, default="")
    number = scope.removeprefix("call")
    if number.isdigit() and int(number) < len(places):
        return Call(*places[int(number)])
    return Call(module="", line=operation.source, direction="")


def _collectives(program: Program) -> Iterator[Operation]:
    """Yield each collective once.

    An asynchronous collective occurs in every fusion that starts, continues or ends it. Only the
    fusion that starts it counts.
    """
    for operation in program.operations:
        parts = [operation]
        if not _continues_collective(operation):
            for number in operation.called:
                parts += program.computations.get(number, ())
        for part in parts:
            if part.opcode.removesuffix("-start") in _COLLECTIVES:
                yield part


def _continues_collective(operation: Operation) -> bool:
    """Return whether a fusion continues or ends a collective that another fusion has started."""
    if operation.name.startswith("async-collective-done"):
        return True
    # The compiler passes a flag, a scalar u32, from the start of a collective to its end.
    has_flag = any(str(array) == "u32[]" for array in operation.arrays)
    return has_flag and not operation.name.startswith("async-collective-start")


def _bytes_sent(batches: Iterable[Transfer]) -> int:
    return sum(map(group_bytes, batches))


def _written(batches: tuple[Transfer, ...]) -> str:
    """Return the tensors of each different batch: "(4, 64) int32, (4, 1) float32"."""
    tensors: list[str] = []
    for group in dict.fromkeys(batches):
        tensors += [f"{shape} {dtype}" for shape, dtype in group]
    return ", ".join(tensors)


def _described(operation: Operation) -> str:
    arrays = ", ".join(map(str, operation.arrays[:2]))
    return f"{operation.opcode} {arrays}"


def _short(line: str) -> str:
    """Return "file:line" with the last two folders of the file, or "line 3 of a cell"."""
    if cell := re.search(r"/ipykernel_\d+/\d+\.py:(\d+)$", line):
        return f"line {cell[1]} of a cell"
    return "/".join(Path(line).parts[-3:])


def _dollars_per_million(samples_per_second: float, dollars_per_hour: float) -> float:
    hours = 1e6 / samples_per_second / 3600
    return hours * dollars_per_hour


def _least(*rates: float) -> float:
    """Return the smallest of the known rates; NaN if none is known."""
    return min((rate for rate in rates if not math.isnan(rate)), default=math.nan)


def _digits(number: float) -> str:
    """Write a number with three digits, or with all digits before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
