"""The numbers of a training: a row per log interval and a row per epoch."""

import html
from dataclasses import dataclass, field

_FORMATS = {"lr": "{:.3g}".format, "seconds": "{:.1f}".format}


@dataclass(repr=False)
class History:
    """The numbers of a training, the same on every core; as a table, `pandas.DataFrame(history.epochs)`.

    Attributes:
        intervals: a row every `log_every` steps: step, epoch, train_loss (mean over the cores and the interval), lr,
            samples_per_second (of one core), data_wait (part of the time that the loop waited for batches), compiles
            (graphs so far), memory (peak of the process, bytes).
        epochs: a row per epoch: epoch, step, train_loss, valid_loss, the metrics, lr, seconds.
        best: the row of the best epoch, None before there is one.
        stopped: why the training ended before its last epoch; None if it did not.
        resumed: the checkpoint that it continued from; None if it began at the start.
    """

    intervals: list[dict] = field(default_factory=list)
    epochs: list[dict] = field(default_factory=list)
    best: dict | None = None
    stopped: str | None = None
    resumed: str | None = None

    @property
    def rows(self) -> list[dict]:
        """Both kinds of rows, in the order of steps; an epoch's without the columns that its intervals have."""
        left_out = {name for row in self.intervals for name in row if name != "step"} | {"seconds"}
        epochs = [{name: value for name, value in row.items() if name not in left_out} for row in self.epochs]
        return sorted([*self.intervals, *epochs], key=lambda row: row["step"])

    def state_dict(self) -> dict:
        """Return what a checkpoint keeps."""
        return {"intervals": self.intervals, "epochs": self.epochs, "best": self.best}

    def load_state_dict(self, state: dict) -> None:
        """Continue where a state was saved."""
        self.intervals, self.epochs, self.best = state["intervals"], state["epochs"], state["best"]

    def __repr__(self) -> str:
        return "\n".join([self._table("to_string"), *self._notes()]).strip() or "History: no steps yet"

    def _repr_html_(self) -> str:
        return "<br>".join([self._table("to_html", border=0), *map(html.escape, self._notes())])

    def _table(self, how: str, **options) -> str:
        import pandas

        if not self.epochs:
            return ""
        write = getattr(pandas.DataFrame(self.epochs), how)
        return write(index=False, na_rep="", float_format="{:.4f}".format, formatters=_FORMATS, **options)

    def _notes(self) -> list[str]:
        notes = []
        if self.best:
            notes.append(f"best: epoch {self.best['epoch']}, by {self.best['by']}")
        if self.intervals:
            last = self.intervals[-1]
            notes.append(
                f"{last['samples_per_second']:,.0f} samples/s per core, {last['data_wait']:.0%} of the time waiting "
                f"for batches, {last['compiles']} graphs compiled"
            )
        notes += [f"resumed from {self.resumed}"] if self.resumed else []
        notes += [f"stopped: {self.stopped}"] if self.stopped else []
        return notes
