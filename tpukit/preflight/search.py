"""Run several preflights: find the largest batch that fits, and show variants in a table.

The memory of a step grows nearly linearly with the batch. A straight line through two compiled
batch sizes therefore predicts a third one that is close to the limit. For example, with 16 GiB:

    batch size    128        680, in proportion to 128    1,032, by the line through both
    memory        2.9 GiB    10.6 GiB                     15.5 GiB, close enough to the limit
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tpukit.essentials.display import InvalidValueError, Table, counted, human_size
from tpukit.preflight.step_report import Preflight, preflight
from tpukit.profiling import Tpu, find_tpu

_AIM = 0.97  # share of the memory; the next batch should take this much, as the line is not exact
_ENOUGH = 0.95  # share of the memory; if a batch takes this much, the search ends
_CLOSE = 0.03  # share of the batch; no size is tried between two sizes that are closer than this
# The second size is at most this many times the first: a small batch says little about the growth.
_LARGEST_STEP = 64


@dataclass(frozen=True, repr=False)
class LargestBatch(Table):
    """The largest compiled batch that fits, and all sizes that were compiled to find it.

    Attributes:
        batch_size: the number of samples per core, or of the whole run with `shard`; 0 if none of
            the sizes in `tried` fits. A slightly larger size may fit, too.
        tried: the preflight of each batch size that was compiled.
    """

    batch_size: int
    tried: dict[int, Preflight] = field(repr=False)

    @property
    def title(self) -> str:
        """The result in one line."""
        first = next(iter(self.tried.values()))
        core = f"a {first.chip.generation} core"
        if not self.batch_size:
            sizes = counted(len(self.tried), "batch size")
            return f"none of {sizes} fits into {core}, not even {min(self.tried)} samples"
        outcome = f"{self.batch_size} samples {_unit(first)} fit into {core}"
        too_large = [size for size, found in self.tried.items() if not found.fits]
        if too_large:
            outcome += f"; {min(too_large)} does not"
        return f"{outcome} ({len(self.tried)} compiles)"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (state, batch, memory) of every size that was compiled."""
        rows = []
        for size, found in sorted(self.tried.items()):
            state = "ok" if found.fits else "failure"
            memory = f"{human_size(found.hbm_bytes)} of {human_size(found.chip.hbm)}"
            rows.append((state, f"{size} {_unit(found)}", memory))
        return rows


def _unit(found: Preflight) -> str:
    return "of the run" if found.shard else "per core"


def largest_batch(
    train: Callable,
    *args: object,
    chip: str | Tpu = "v5e-8",
    shard: str | None = None,
    start: int = 128,
    multiple: int = 8,
    compiles: int = 6,
    libtpu: str | None = None,
    progress: str | None = None,
) -> LargestBatch:
    """Find a batch per core that fits and nearly fills the memory, by compiling a few sizes.

    The search ends if a batch takes 95% of the memory, or if one that is 3% larger does not fit. So
    a slightly larger batch may fit, too.

    Args:
        train: the worker function, `train(core, batch_size, *args)`.
        *args: further arguments of `train`, after the batch size.
        chip, shard, libtpu, progress: as in `preflight`. With `shard`, all chips share the batch.
        start: the first batch size to compile, 1 or more, rounded down to a multiple of
            `multiple`.
        multiple: batch sizes are multiples of this, 1 or more; a TPU computes 8 rows at a time.
        compiles: the most batch sizes to compile, 2 or more.

    Returns:
        The largest compiled batch that fits, with all preflights.

    Raises:
        ValueError: a number is too small, or the chip does not exist.
        PreflightError, WorkerError: as in `preflight`.
    """
    if min(start, multiple) < 1 or compiles < 2:
        got = f"got {start}, {multiple}, {compiles}"
        raise InvalidValueError(
            f"start= and multiple= must be at least 1, and compiles= must be at least 2, {got}",
            fix="leave them out",
        )
    tpu = find_tpu(chip)
    options = {"chip": tpu, "shard": shard, "libtpu": libtpu, "progress": progress}
    tried: dict[int, Preflight] = {}
    size = max(1, start // multiple) * multiple
    # A compilation takes up to minutes, so each size is chosen by the results so far.
    while size is not None and size not in tried and len(tried) < compiles:
        tried[size] = preflight(train, size, *args, **options)
        size = _next_size(tried, tpu, multiple)
    fitting = [size for size, found in tried.items() if found.fits]
    return LargestBatch(max(fitting, default=0), tried)


class _Point(NamedTuple):
    size: int
    memory: int  # bytes


def _next_size(tried: dict[int, Preflight], chip: Tpu, multiple: int) -> int | None:
    """Return the batch size to compile next; None if the result is accurate enough.

    Args:
        tried: the preflight of each batch size so far.
        chip: the TPU.
        multiple: batch sizes are multiples of this.
    """
    fits = max((size for size, found in tried.items() if found.fits), default=0)
    fails = min((size for size, found in tried.items() if not found.fits), default=math.inf)
    is_full = fits and tried[fits].hbm_bytes >= _ENOUGH * chip.hbm
    if is_full or fails - fits <= max(multiple, _CLOSE * fits):
        return None
    size = int(_guess(tried, chip, fits, fails=fails)) // multiple * multiple
    if fits < size < fails:
        return size
    # The line predicts no new size, so double the size, or halve the interval.
    other = 2 * fits if fails == math.inf else (fits + fails) / 2
    size = int(other) // multiple * multiple
    return size if fits < size < fails else None


def _guess(tried: dict[int, Preflight], chip: Tpu, fits: int, *, fails: float) -> float:
    """Return the batch size that would fill the memory of a core, by a line through two sizes.

    If only one size is known, the guess is in proportion to it. Sizes that do not fit are known if
    the compiler has said how much memory they need.

    Args:
        tried: the preflight of each batch size so far.
        chip: the TPU.
        fits: the largest size that fits; 0 for none.
        fails: the smallest size that needs too much memory; infinity for none.
    """
    known = []
    for size, found in sorted(tried.items()):
        if not found.too_large or found.too_large.needed:
            known.append(_Point(size, found.hbm_bytes))
    aim = _AIM * chip.hbm
    if not known:
        return fails / 2
    if len(known) == 1:
        (point,) = known
        # The result is too small if much of the memory does not depend on the batch.
        in_proportion = point.size * aim / max(1, point.memory)
        return min(in_proportion, _LARGEST_STEP * point.size)
    # The two largest sizes if all fit, else the two smallest. A line through the sizes on both
    # sides of the limit is no better: if the memory curves upwards, its size is always too small.
    if known[-1].size <= fits or len(known) == 2:
        lower, upper = known[-2:]
    else:
        lower, upper = known[:2]
    per_sample = (upper.memory - lower.memory) / (upper.size - lower.size)
    if per_sample <= 0:
        return 2 * upper.size
    return lower.size + (aim - lower.memory) / per_sample


@dataclass(frozen=True, repr=False)
class Variants(Table):
    """A table of preflights, one per row, with the compiler's estimates.

    Only the column "this host" depends on the machine on which the preflights ran.
    """

    preflights: dict[str, Preflight]
    title: str = "preflights side by side; times are estimates, not compared with a chip"

    def rows(self) -> list[tuple[str, ...]]:
        """Return a heading, then a row for each variant."""
        heading = (
            "state",
            "variant",
            "chip",
            "per core",
            "memory",
            "step",
            "samples/s",
            "of peak",
            "$ per million",
            "this host",
        )
        return [heading, *(_row(name, found) for name, found in self.preflights.items())]


def _row(name: str, found: Preflight) -> tuple[str, ...]:
    memory = f"{found.hbm_bytes / 2**30:.2f} of {found.chip.hbm / 2**30:.0f} GiB"
    batch = str(found.batch_size or "unknown")
    if not found.compiled:
        return ("failure", name, found.chip.name, batch, memory, "", "", "", "", "")
    return (
        "ok" if found.fits else "failure",
        name,
        found.chip.name,
        batch,
        memory,
        f"{found.seconds * 1e3:.2f} ms",
        _known(found.samples_per_second, ",.0f"),
        f"{found.flops_share:.0%}",
        _known(found.dollars_per_million, ".3g"),
        _host_column(found),
    )


def _known(number: float, form: str) -> str:
    return "unknown" if math.isnan(number) else format(number, form)


def _host_column(found: Preflight) -> str:
    seconds = found.host_seconds
    if math.isnan(seconds):
        return "unknown"
    text = f"{seconds * 1e3:.1f} ms"
    if seconds > found.seconds:
        text += ", longer"  # longer than the step, so the chip would wait
    return text


def compare_preflights(variants: Sequence[Preflight] | dict[str, Preflight]) -> Variants:
    """Show preflights in a table, such as those of two dtypes, batch sizes or chips.

    Args:
        variants: results of `preflight`, as a dict by name; or as a sequence, and then their names
            are numbers from 1.

    Returns:
        The table, which a notebook displays.

    Raises:
        ValueError: `variants` is empty.
    """
    if not variants:
        fix = "compare_preflights({'float32': one, 'bfloat16': other})"
        raise InvalidValueError("there is nothing to compare", fix=fix)
    if not isinstance(variants, dict):
        variants = {f"{number}": found for number, found in enumerate(variants, start=1)}
    return Variants(dict(variants))
