"""Several preflights: the largest batch that fits, and variants side by side."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tpukit.essentials.show import Table, WrongValue, human_size
from tpukit.measure import Tpu, find_tpu
from tpukit.preflight.step_report import Preflight, preflight

_AIM = 0.97  # of the memory: the next guess is a straight line through two sizes, which is not exact
_ENOUGH = 0.95  # of the memory: a batch that takes this much is not tried to be made larger


@dataclass(frozen=True, repr=False)
class LargestBatch(Table):
    """The largest batch that fits, and what was compiled to find it.

    Attributes:
        batch_size: samples a core, with `shard` of the run; 0 if not even the smallest fits.
        tried: the preflights, by batch size.
    """

    batch_size: int
    tried: dict[int, Preflight] = field(repr=False)

    @property
    def title(self) -> str:
        """The outcome in one line."""
        chip = next(iter(self.tried.values())).chip
        too_large = [size for size, found in self.tried.items() if not found.fits]
        above = f"; {min(too_large)} does not" if too_large else ""
        if not self.batch_size:
            return f"no batch fits into a {chip.generation} core, not even {min(self.tried)} samples"
        of = "of the run" if next(iter(self.tried.values())).shard else "a core"
        return f"{self.batch_size} samples {of} fit into a {chip.generation} core{above} ({len(self.tried)} compiles)"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (state, batch, memory) of every size that was compiled."""
        rows = []
        for size, found in sorted(self.tried.items()):
            memory = f"{human_size(found.hbm_bytes)} of {human_size(found.chip.hbm)}"
            of = "of the run" if found.shard else "a core"
            rows.append(("ok" if found.fits else "failure", f"{size} {of}", memory))
        return rows


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
    """Find the largest batch a core that fits, by compiling a few sizes.

    Memory grows nearly in proportion to the batch, so two sizes tell a third that is close to the limit.

    Args:
        train: `train(core, batch_size, *args)`: the worker function, which gets the batch size first.
        *args: passed on after the batch size.
        chip, shard, libtpu, progress: as in `preflight`; with `shard` the batch is that of the run.
        start: the batch to begin with.
        multiple: batches are multiples of this; a TPU computes 8 rows at a time.
        compiles: at most so many sizes are compiled.

    Raises:
        ValueError: a number is not above 0, or there is no such chip.
        NoPreflight, WorkerFailed: as in `preflight`.
    """
    if min(start, multiple) < 1 or compiles < 2:
        raise WrongValue(
            f"start and multiple are at least 1 and compiles at least 2, got {start}, {multiple}, {compiles}",
            fix="leave them out",
        )
    place, tried = find_tpu(chip), {}
    size = max(1, start // multiple) * multiple
    while len(tried) < compiles:
        tried[size] = preflight(train, size, *args, chip=place, shard=shard, libtpu=libtpu, progress=progress)
        following = _next(tried, place, multiple)
        if following is None or following in tried:
            break
        size = following
    fitting = [size for size, found in tried.items() if found.fits]
    return LargestBatch(max(fitting, default=0), tried)


def _next(tried: dict[int, Preflight], chip: Tpu, multiple: int) -> int | None:
    """Return the size to compile next, or None where the answer is known well enough."""
    fits = max((size for size, found in tried.items() if found.fits), default=0)
    fails = min((size for size, found in tried.items() if not found.fits), default=math.inf)
    is_full = fits and tried[fits].hbm_bytes >= _ENOUGH * chip.hbm
    if is_full or fails - fits <= max(multiple, 0.03 * fits):
        return None
    known = sorted((size, one.hbm_bytes) for size, one in tried.items() if not one.too_large or one.too_large.needed)
    if len(known) == 1:
        guess = known[0][0] * _AIM * chip.hbm / max(1, known[0][1])  # too small where much does not grow with the batch
        guess = min(guess, 64 * known[0][0])
    elif known:
        (a, of_a), (b, of_b) = known[-2:] if known[-1][0] <= fits or len(known) == 2 else known[:2]
        each = (of_b - of_a) / (b - a)
        guess = a + (_AIM * chip.hbm - of_a) / each if each > 0 else 2 * b
    else:
        guess = fails / 2
    size = int(guess) // multiple * multiple
    if not fits < size < fails:  # the line leads nowhere new: half-way, or twice
        size = int((fits + fails) / 2 if fails < math.inf else 2 * fits) // multiple * multiple
    return size if fits < size < fails else None


@dataclass(frozen=True, repr=False)
class Variants(Table):
    """Preflights side by side, by the chip's own estimate: what the host took beside it is this machine's doing."""

    preflights: dict[str, Preflight]
    title: str = "preflights side by side; times are estimates, not compared with a chip"

    def rows(self) -> list[tuple[str, ...]]:
        """Return a heading, then for each (state, name, chip, batch, memory, step, samples/s, peak, cost, host)."""
        heading = (
            "state",
            "variant",
            "chip",
            "a core",
            "memory",
            "step",
            "samples/s",
            "of peak",
            "$ a million",
            "this host",
        )
        return [heading, *(_row(name, found) for name, found in self.preflights.items())]


def _row(name: str, found: Preflight) -> tuple[str, ...]:
    memory = f"{found.hbm_bytes / 2**30:.2f} of {found.chip.hbm / 2**30:.0f} GiB"
    batch = str(found.batch_size or "unknown")
    if not found.compiled:
        return ("failure", name, found.chip.name, batch, memory, "", "", "", "", "")
    rate, cost, host = found.samples_per_second, found.dollars_per_million, found.host_seconds
    return (
        "ok" if found.fits else "failure",
        name,
        found.chip.name,
        batch,
        memory,
        f"{found.seconds * 1e3:.2f} ms",
        "unknown" if math.isnan(rate) else f"{rate:,.0f}",
        f"{found.flops_share:.0%}",
        "unknown" if math.isnan(cost) else f"{cost:.3g}",
        "unknown" if math.isnan(host) else f"{host * 1e3:.1f} ms" + ", longer" * (host > found.seconds),
    )


def compare_preflights(variants: Sequence[Preflight] | dict[str, Preflight]) -> Variants:
    """Show preflights side by side, by the chip's estimate: float32 and bfloat16, batch sizes, v2-8 to v6e-8.

    Args:
        variants: from `preflight`; a dict names them.

    Raises:
        ValueError: there are none.
    """
    if not variants:
        raise WrongValue("there is nothing to compare", fix="compare_preflights({'float32': one, 'bfloat16': other})")
    if not isinstance(variants, dict):
        variants = {f"{number}": one for number, one in enumerate(variants, start=1)}
    return Variants(dict(variants))
