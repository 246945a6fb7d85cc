"""The numbers of a training: a row per log interval and a row per epoch."""

import html
import itertools
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
    """The numbers of a training, the same on every core.

        history = fit(core, model, optimizer, loss, batches, epochs=3)
        pandas.DataFrame(history.epochs)

    Attributes:
        intervals: a row every `log_every` steps: step; epoch; train_loss, the mean over the cores
            and the interval; lr, of the last step; samples_per_second, of all cores together;
            seconds, of training, without evaluations and saves; data_wait, the share of these
            seconds in which the loop waited for batches; compiles, the number of graphs so far;
            memory, the peak of the process in bytes.
        epochs: a row per epoch: epoch; step; train_loss; valid_loss; the metrics; lr, of its last
            step; samples_per_second, of this epoch, computed as that of the run; seconds, with
            the evaluation.
        best: the row of the best epoch; None before there is one.
        stopped: the reason if the training ended before its last epoch; otherwise None.
        resumed: the checkpoint that it continued from; None if it began at the start.
        cores: the number of cores that trained.
        of: "images" or "samples", the unit of the rates.
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
        """Samples of all cores together per second of training, the rate of a run.

        It contains no evaluations and no saves. Log intervals in which a graph was compiled are
        left out, unless there are no others.
        """
        return samples_per_second(self.intervals)

    @property
    def rows(self) -> list[dict]:
        """The rows of intervals and epochs, in the order of steps.

        A row of an epoch does not repeat the columns of its intervals.
        """
        of_intervals = set()
        for row in self.intervals:
            of_intervals |= row.keys()
        epochs = [_without(row, of_intervals - {"step"}) for row in self.epochs]
        intervals = [_without(row, {"seconds"}) for row in self.intervals]
        return sorted([*intervals, *epochs], key=lambda row: row["step"])

    def state_dict(self) -> dict:
        """Return what a checkpoint keeps."""
        return {"intervals": self.intervals, "epochs": self.epochs, "best": self.best}

    def load_state_dict(self, state: dict) -> None:
        """Continue where a state was saved."""
        self.intervals = state["intervals"]
        self.epochs = state["epochs"]
        self.best = state["best"]

    def __repr__(self) -> str:
        lines = [self._table("to_string"), *self._notes()]
        return "\n".join(lines).strip() or "History: no steps yet"

    def _repr_html_(self) -> str:
        headings = {"lr": "learning rate", "samples_per_second": f"{self.of}/s"}

        def heading(name: str) -> str:
            return headings.get(name, name.replace("_", " "))

        table = self._table("to_html", heading, border=0) or "History: no epoch is finished"
        style = 'style="opacity:.85"'
        notes = [f"<div {style}>{html.escape(note)}</div>" for note in self._notes()]
        return "\n".join([table, *notes])

    def _table(self, method: str, heading: Callable[[str], str] = str, **options: object) -> str:
        """Return the epochs as a table, as a method of pandas' DataFrame writes it.

        A cell is empty if an epoch has no such number.
        """
        import pandas

        if not self.epochs:
            return ""
        table = pandas.DataFrame(self.epochs).rename(columns=heading)
        return getattr(table, method)(
            index=False,
            na_rep="",
            float_format="{:.4f}".format,
            formatters={heading(name): written for name, written in _FORMATS.items()},
            **options,
        )

    def _notes(self) -> list[str]:
        notes = []
        if self.best:
            notes.append(f"best: epoch {self.best['epoch']}, by {self.best['by']}")
        if self.intervals:
            notes.append(self._throughput())
        if self.resumed:
            notes.append(f"resumed from {self.resumed}")
        if self.stopped:
            notes.append(f"stopped: {self.stopped}")
        return notes

    def _throughput(self) -> str:
        seconds = sum(row["seconds"] for row in self.intervals)
        waited = sum(row["data_wait"] * row["seconds"] for row in self.intervals)
        share = waited / (seconds or 1)
        rate = f"{self.samples_per_second:,.0f} {self.of}/s on {counted(self.cores, 'core')}"
        graphs = counted(self.intervals[-1]["compiles"], "graph")
        return f"{rate}, {share:.0%} of the time waiting for batches, {graphs} compiled"


def _without(row: dict, names: set[str]) -> dict:
    return {name: value for name, value in row.items() if name not in names}


def samples_per_second(intervals: list[dict]) -> float:
    """Return the rate of these log intervals together; NaN if there are none."""
    compiles = [0, *(row["compiles"] for row in intervals)]
    steady = [
        row
        for row, (before, after) in zip(intervals, itertools.pairwise(compiles), strict=True)
        if before == after
    ]
    used = steady or intervals
    seconds = sum(row["seconds"] for row in used)
    if not seconds:
        return math.nan
    return sum(row["samples_per_second"] * row["seconds"] for row in used) / seconds
