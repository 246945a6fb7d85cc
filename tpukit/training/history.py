"""The numbers of a training: a row per log interval and a row per epoch."""

import html
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from tpukit.essentials.display import counted

_FORMATS = {
    "step": "{:,}".format,
    "lr": "{:.3g}".format,
    "seconds": "{:.1f}".format,
    "samples_per_second": "{:,.1f}".format,
}


@dataclass(repr=False)
class History:
    """The numbers of a training, the same on every core; as a table, `pandas.DataFrame(history.epochs)`.

    Attributes:
        intervals: a row every `log_every` steps: step, epoch, train_loss (mean over the cores and the interval), lr (of
            the last step), samples_per_second (of all cores together), seconds (of training: no evaluation, no saving),
            data_wait (part of these that the loop waited for batches), compiles (graphs so far), memory (peak of the
            process, bytes).
        epochs: a row per epoch: epoch, step, train_loss, valid_loss, the metrics, lr (of its last step),
            samples_per_second (as that of the run, of this epoch), seconds (of everything, the evaluation included).
        best: the row of the best epoch, None before there is one.
        stopped: why the training ended before its last epoch; None if it did not.
        resumed: the checkpoint that it continued from; None if it began at the start.
        cores: that trained, together.
        of: what the samples are, "images" or "samples": the unit of the rates.
    """

    intervals: list[dict] = field(default_factory=list)
    epochs: list[dict] = field(default_factory=list)
    best: dict | None = None
    stopped: str | None = None
    resumed: str | None = None
    cores: int = 1
    of: str = "samples"

    @property
    def samples_per_second(self) -> float:
        """Samples of all cores together for each second of training: the one rate of a run.

        Evaluations and saves are not in it, nor are the log intervals in which a graph was compiled, unless there are
        no others.
        """
        return samples_per_second(self.intervals)

    @property
    def rows(self) -> list[dict]:
        """Both kinds of rows, in the order of steps; an epoch's without the columns that its intervals have."""
        left_out = {name for row in self.intervals for name in row if name != "step"}
        epochs = [{name: value for name, value in row.items() if name not in left_out} for row in self.epochs]
        intervals = [{name: value for name, value in row.items() if name != "seconds"} for row in self.intervals]
        return sorted([*intervals, *epochs], key=lambda row: row["step"])

    def state_dict(self) -> dict:
        """Return what a checkpoint keeps."""
        return {"intervals": self.intervals, "epochs": self.epochs, "best": self.best}

    def load_state_dict(self, state: dict) -> None:
        """Continue where a state was saved."""
        self.intervals, self.epochs, self.best = state["intervals"], state["epochs"], state["best"]

    def __repr__(self) -> str:
        return "\n".join([self._table("to_string"), *self._notes()]).strip() or "History: no steps yet"

    def _repr_html_(self) -> str:
        headings = {"lr": "learning rate", "samples_per_second": f"{self.of}/s"}
        table = self._table("to_html", lambda name: headings.get(name, name.replace("_", " ")), border=0)
        notes = [f'<div style="opacity:.85">{html.escape(note)}</div>' for note in self._notes()]
        return "\n".join([table or "History: no epoch is finished", *notes])

    def _table(self, write: str, heading: Callable[[str], str] = str, **options: object) -> str:
        """Write the epochs by that method of a table, under these headings; nothing where an epoch lacks a value."""
        import pandas

        if not self.epochs:
            return ""
        table = pandas.DataFrame(self.epochs).rename(columns=heading)
        formats = {heading(name): written for name, written in _FORMATS.items()}
        options |= {"index": False, "na_rep": "", "float_format": "{:.4f}".format, "formatters": formats}
        return getattr(table, write)(**options)

    def _notes(self) -> list[str]:
        notes = []
        if self.best:
            notes.append(f"best: epoch {self.best['epoch']}, by {self.best['by']}")
        if self.intervals:
            last, cores = self.intervals[-1], counted(self.cores, "core")
            seconds = sum(row["seconds"] for row in self.intervals)
            waited = sum(row["data_wait"] * row["seconds"] for row in self.intervals) / (seconds or 1)
            notes.append(
                f"{self.samples_per_second:,.0f} {self.of}/s on {cores}, {waited:.0%} of the time waiting "
                f"for batches, {counted(last['compiles'], 'graph')} compiled"
            )
        notes += [f"resumed from {self.resumed}"] if self.resumed else []
        notes += [f"stopped: {self.stopped}"] if self.stopped else []
        return notes


def samples_per_second(intervals: list[dict]) -> float:
    """Return the rate of these log intervals together; nan where there are none."""
    before = [0, *(row["compiles"] for row in intervals)]
    steady = [row for row, compiles in zip(intervals, before, strict=False) if row["compiles"] == compiles]
    counted = steady or intervals
    seconds = sum(row["seconds"] for row in counted)
    return sum(row["samples_per_second"] * row["seconds"] for row in counted) / seconds if seconds else math.nan
