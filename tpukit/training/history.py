"""Store the numbers of a training: a row per log interval and a row per epoch."""

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
    """The numbers of a training. Losses and metrics are the same on every core; times are not.

        history = fit(core, model, optimizer, loss, batches, epochs=3)
        pandas.DataFrame(history.epochs)

    Attributes:
        intervals: a row every `log_every` steps, and at the end of an epoch. Its columns are

            - step and epoch, at the end of the interval;
            - train_loss, the mean over the cores and the steps of the interval;
            - lr, the learning rate of the last step;
            - samples_per_second, of all cores together;
            - seconds of training, without evaluations and saves;
            - data_wait, the share of these seconds in which the loop waited for batches, 0 to 1;
            - compiles, the number of graphs compiled so far, with those before a resume;
            - memory, the peak memory of the process in bytes;
            - tflops_per_second, TFLOP/s per chip of the forward and backward passes. It is missing
              if an operation could not be counted;
            - mfu, tflops_per_second divided by the chip's peak, 0 to 1. It is also missing if the
              peak is not known, as in a dry run. docs/speed.md defines mfu and tflops_per_second.
        epochs: a row per epoch. Its columns are epoch; step; train_loss; valid_loss; the metrics,
            as valid_<name>; lr, of the last step; samples_per_second, tflops_per_second and mfu,
            without intervals in which a graph was compiled; seconds, with the evaluation. After a
            resume within an epoch, these are the seconds since the resume.
        times: a row per epoch, with the seconds of this core in each part: device, host, input
            (waiting for batches), compile, evaluation, checkpoints, other. After a resume within an
            epoch, seconds before the resume are missing. `tpukit.training.show_time` draws them.
        best: the row of the best epoch, with the name of the deciding column in "by"; None as long
            as no epoch has a number in this column.
        stopped: the reason if the training ended before its last epoch; otherwise None.
        resumed: the name of the checkpoint that this call of `fit` has continued from; otherwise
            None.
        cores: the number of cores that made the last step.
        of: "images" or "samples": the unit of samples_per_second.
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
        """The throughput of the run: samples of all cores together per second of training.

        Evaluations and saves are not included. Log intervals in which a graph was compiled are left
        out, unless there are no others.
        """
        return steady_mean(self.intervals, "samples_per_second")

    @property
    def tflops_per_second(self) -> float:
        """TFLOP/s per chip, averaged like `samples_per_second`; NaN if unknown."""
        return steady_mean(self.intervals, "tflops_per_second")

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, 0 to 1, averaged like `samples_per_second`; NaN if unknown."""
        return steady_mean(self.intervals, "mfu")

    @property
    def rows(self) -> list[dict]:
        """The rows of intervals and epochs, in the order of steps.

        A row of an epoch has only the columns that its intervals lack, and "step". Seconds are left
        out, and so are TFLOP/s, whose curve has the same form as that of samples_per_second.
        """
        # The columns of intervals are drawn from the intervals, which have more points.
        of_intervals = set()
        for row in self.intervals:
            of_intervals |= row.keys()
        epochs = [_without(row, of_intervals - {"step"}) for row in self.epochs]
        unused = {"seconds", "tflops_per_second"}
        intervals = [_without(row, unused) for row in self.intervals]
        return sorted([*intervals, *epochs], key=lambda row: row["step"])

    def state_dict(self) -> dict:
        """Return the rows for a checkpoint."""
        return {
            "intervals": self.intervals,
            "epochs": self.epochs,
            "times": self.times,
            "best": self.best,
            "cores": self.cores,
            "of": self.of,
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue where a state was saved."""
        self.intervals = state["intervals"]
        self.epochs = state["epochs"]
        self.best = state["best"]
        # Checkpoints of early versions have none of these.
        self.times = state.get("times", [])
        self.cores = state.get("cores", self.cores)
        self.of = state.get("of", self.of)

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
        """Return the epochs as a table in text or HTML; "" before the end of the first epoch.

        A cell is empty if an epoch has no such number.

        Args:
            method: the method of pandas' DataFrame that writes the table.
            heading: function from a column's name to its heading.
            **options: further arguments of this method.
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
        # Between two very close log points, the clock may show the same time: avoid 0 / 0.
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


def steady_mean(intervals: list[dict], name: str, *, epoch: int | None = None) -> float:
    """Return the mean of a rate, weighted by the time of log intervals; NaN if no row has it.

    Intervals in which a graph was compiled are left out, unless there are no others.

    Args:
        intervals: `History.intervals`.
        name: the column of the rate.
        epoch: the epoch whose intervals are used; None for all.
    """
    # Start at 0, so that the first interval, in which the first step is compiled, is left out.
    compiles = [0, *(row["compiles"] for row in intervals)]
    all_rows = []
    steady = []
    for row, (before, after) in zip(intervals, itertools.pairwise(compiles), strict=True):
        if epoch not in (None, row.get("epoch")):
            continue
        all_rows.append(row)
        if before == after:
            steady.append(row)
    # A short run may compile in every interval: then all of them count.
    used = [row for row in steady or all_rows if name in row]
    seconds = sum(row["seconds"] for row in used)
    if not seconds:
        return math.nan
    # Weighted by time: a plain mean would count a short interval as much as a long one.
    return sum(row[name] * row["seconds"] for row in used) / seconds
