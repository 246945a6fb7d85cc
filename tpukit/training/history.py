"""The numbers of a training: a row per log interval and a row per epoch."""

import html
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from tpukit.essentials.display import counted
from tpukit.training.epoch_time import time_advice, total_time

CHIP_RATES = ("tflops_per_second", "mfu")  # columns that a history may lack
_FORMATS = {
    "step": "{:,}".format,
    "lr": "{:.3g}".format,
    "seconds": "{:.1f}".format,
    "samples_per_second": "{:,.1f}".format,
    "tflops_per_second": "{:,.3g}".format,
    "mfu": "{:.1%}".format,
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
            memory, the peak of the process in bytes; tflops_per_second, per chip, of the forward
            and backward passes; mfu, the share of the chip's peak that this is, 0 to 1. A row has
            no mfu if the peak is not known, as in a dry run, and neither of the two if an
            operation could not be counted. docs/speed.md defines both.
        epochs: a row per epoch: epoch; step; train_loss; valid_loss; the metrics; lr, of its last
            step; samples_per_second, tflops_per_second and mfu, of this epoch, computed as those
            of the run; seconds, with the evaluation.
        times: a row per epoch: the seconds of core 0 by part: device, host, input (waiting for
            batches), compile, evaluation, checkpoints, other. `tpukit.training.show_time` draws
            them.
        best: the row of the best epoch; None before there is one.
        stopped: the reason if the training ended before its last epoch; otherwise None.
        resumed: the checkpoint that it continued from; None if it began at the start.
        cores: the number of cores that trained.
        of: "images" or "samples", the unit of the rates.
    """

    intervals: list[dict] = field(default_factory=list)
    epochs: list[dict] = field(default_factory=list)
    times: list[dict] = field(default_factory=list)
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
        return steady_mean(self.intervals, "samples_per_second")

    @property
    def tflops_per_second(self) -> float:
        """TFLOP/s per chip of the same log intervals; NaN if they are not known."""
        return steady_mean(self.intervals, "tflops_per_second")

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation of the same log intervals, 0 to 1; NaN if it is not known."""
        return steady_mean(self.intervals, "mfu")

    @property
    def rows(self) -> list[dict]:
        """The rows of intervals and epochs, in the order of steps.

        A row of an epoch does not repeat the columns of its intervals. TFLOP/s are left out,
        because their curve is that of the samples per second.
        """
        of_intervals = set()
        for row in self.intervals:
            of_intervals |= row.keys()
        epochs = [_without(row, of_intervals - {"step"}) for row in self.epochs]
        unused = {"seconds", "tflops_per_second"}
        intervals = [_without(row, unused) for row in self.intervals]
        return sorted([*intervals, *epochs], key=lambda row: row["step"])

    def state_dict(self) -> dict:
        """Return what a checkpoint keeps."""
        return {
            "intervals": self.intervals,
            "epochs": self.epochs,
            "times": self.times,
            "best": self.best,
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue where a state was saved."""
        self.intervals = state["intervals"]
        self.epochs = state["epochs"]
        self.times = state.get("times", [])  # checkpoints of early versions have none
        self.best = state["best"]

    def __repr__(self) -> str:
        lines = [self._table("to_string"), *self._notes()]
        return "\n".join(lines).strip() or "History: no steps yet"

    def _repr_html_(self) -> str:
        headings = {"lr": "learning rate", "samples_per_second": f"{self.of}/s"}

        def heading(name: str) -> str:
            return headings.get(name, name.replace("_", " "))

        # Without a border: notebooks draw tables by their own style.
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
        if self.times:
            notes.append(time_advice(total_time(self.times)))
        if self.resumed:
            notes.append(f"resumed from {self.resumed}")
        if self.stopped:
            notes.append(f"stopped: {self.stopped}")
        return notes

    def _throughput(self) -> str:
        seconds = sum(row["seconds"] for row in self.intervals)
        waited = sum(row["data_wait"] * row["seconds"] for row in self.intervals)
        # A clock may not have moved between two very short log points.
        share = waited / (seconds or 1)
        rate = f"{self.samples_per_second:,.0f} {self.of}/s on {counted(self.cores, 'core')}"
        graphs = counted(self.intervals[-1]["compiles"], "graph")
        line = f"{rate}, {share:.0%} of the time waiting for batches, {graphs} compiled"
        if not math.isnan(self.tflops_per_second):
            line += f", {self.tflops_per_second:.3g} TFLOP/s per chip"
        if not math.isnan(self.mfu):
            line += f", MFU {self.mfu:.1%}"
        return line


def _without(row: dict, names: set[str]) -> dict:
    return {name: value for name, value in row.items() if name not in names}


def steady_mean(intervals: list[dict], name: str) -> float:
    """Return the mean of a rate over the time of log intervals; NaN if none has it.

    Intervals in which a graph was compiled are left out, unless there are no others.
    """
    # The first interval has the compilation of the first step, so it counts as unsteady.
    compiles = [0, *(row["compiles"] for row in intervals)]
    steady = [
        row
        for row, (before, after) in zip(intervals, itertools.pairwise(compiles), strict=True)
        if before == after
    ]
    used = [row for row in steady or intervals if name in row]
    seconds = sum(row["seconds"] for row in used)
    if not seconds:
        return math.nan
    # Weighted by time: a plain mean would count a short interval as much as a long one.
    return sum(row[name] * row["seconds"] for row in used) / seconds
