"""What a training brought: a row an interval, a row an epoch, to print, to draw and to keep as CSV."""

import csv
import os
from dataclasses import dataclass, field

from tpukit.display import tables


@dataclass
class History:
    """The numbers of a training, the same on every core.

    Attributes:
        intervals: a row every `log_every` steps: step, epoch, train_loss (mean over the cores and the interval), lr,
            samples_per_second (of one core), data_wait (share of the time the loop waited for batches), compiles
            (graphs so far), memory (peak of the process, bytes).
        epochs: a row an epoch: epoch, step, train_loss, valid_loss, the metrics, lr, seconds.
        best: the row of the best epoch, None before there is one.
        stopped: why the training ended before its last epoch; None if it did not.
        resumed: the checkpoint it went on from; None if it began anew.
    """

    intervals: list[dict] = field(default_factory=list)
    epochs: list[dict] = field(default_factory=list)
    best: dict | None = None
    stopped: str | None = None
    resumed: str | None = None

    @property
    def rows(self) -> list[dict]:
        """Both kinds of rows, in the order of steps; an epoch's without what its intervals say."""
        told = {name for row in self.intervals for name in row}
        epochs = [{"step": row["step"], **{n: v for n, v in row.items() if n not in told}} for row in self.epochs]
        for row in epochs:
            row.pop("seconds", None)
        return sorted([*self.intervals, *epochs], key=lambda row: row["step"])

    def save_csv(self, path: str | os.PathLike) -> None:
        """Write one line a row; "kind" says whether it is an interval or an epoch."""
        rows = [
            *({"kind": "interval", **row} for row in self.intervals),
            *({"kind": "epoch", **row} for row in self.epochs),
        ]
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)) or ["kind"])
            writer.writeheader()
            writer.writerows(rows)

    def __repr__(self) -> str:
        return "\n".join(filter(None, [self._table(), *self._words()]))

    def _table(self) -> str:
        if not self.epochs:
            return ""
        names = list(dict.fromkeys(name for row in self.epochs for name in row))
        best = self.best and self.best["epoch"]
        cells = [
            [_shown(name, row.get(name)) + (" *" if name == "epoch" and row["epoch"] == best else "") for name in names]
            for row in self.epochs
        ]
        return tables.as_text([names, *cells])

    def _words(self) -> list[str]:
        last = self.intervals[-1] if self.intervals else {}
        words = [f"* the best by {self.best['by']}" if self.best else ""]
        if last:
            words.append(
                f"{last['samples_per_second']:,.0f} samples/s a core, {last['data_wait']:.0%} of the time waiting for "
                f"batches, {last['compiles']} graphs compiled"
            )
        words.append(f"resumed from {self.resumed}" if self.resumed else "")
        words.append(f"stopped: {self.stopped}" if self.stopped else "")
        return words


def _shown(name: str, value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if name == "lr" else f"{value:.1f}" if name == "seconds" else f"{value:.4f}"
    return "" if value is None else str(value)
