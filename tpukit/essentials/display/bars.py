"""The progress of one loop, in numbers and in words."""

import time
from dataclasses import dataclass, field


@dataclass
class Bar:
    """The progress of one loop.

    Attributes:
        label: the loop's name.
        done: items so far.
        total: items to expect, None if that is not known.
        samples_per_step: in an item; 0 for items that are steps, None for items that no rate is told of.
        seconds: since the loop began, by the clock of whoever runs it; None counts them here, until it is finished.
        start: items that were done before the loop began, as in an epoch that is resumed; no rate counts them.
        unit: what a rate counts; None for samples, or steps.
        heard: `time.monotonic()` when `seconds` was told; None where it is not to be counted on from there.
        note: more words on it.
        rows_before: logged rows that had arrived when it began.
        printed: its end has been printed.
    """

    label: str
    done: int
    total: int | None
    samples_per_step: int | None = 0
    seconds: float | None = None
    start: int = 0
    unit: str | None = None
    note: str = ""
    rows_before: int = 0
    printed: bool = False
    heard: float | None = None
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def finished(self) -> bool:
        """True once the last item is done."""
        return self.done == self.total

    @property
    def running(self) -> bool:
        """True until it is finished, or was given up."""
        return self.ended is None and not self.finished

    def end(self) -> None:
        """Stop its clock, whether or not all is done."""
        self.ended = self.ended or time.monotonic()

    def elapsed(self) -> float:
        """Return the seconds since the loop began, up to its end."""
        return self.seconds if self.seconds is not None else (self.ended or time.monotonic()) - self.began

    def share(self) -> float | None:
        """Return how much of it is done, from 0 to 1; None if that is not known."""
        if self.finished:
            return 1.0
        return min(1.0, self.done / self.total) if self.total else None

    def count(self) -> str:
        """Return how many are done, and of how many: `120/640`."""
        return f"{self.done}/{self.total}" if self.total else f"{self.done}"

    def percent(self) -> str:
        """Return the share in words, where it is known and still grows."""
        return f"{self.share():.0%}" if self.running and self.total else ""

    def rate(self) -> str:
        """Return what is done in a second, `1,034 samples/s`, or how long each takes."""
        done, seconds = self.done - self.start, max(self.elapsed(), 1e-9)
        if done <= 0 or self.samples_per_step is None:
            return ""
        per_second = done * (self.samples_per_step or 1) / seconds
        if self.samples_per_step:
            return f"{per_second:,.0f} {self.unit or 'samples'}/s"
        if per_second < 1:
            return f"{duration(1 / per_second, exact=True)} each"
        unit = self.unit or (self.label if self.label.endswith("s") else "steps")
        return f"{per_second:,.{0 if per_second >= 100 else 1}f} {unit}/s"

    def time(self) -> str:
        """Return how long it took, or will take."""
        done = self.done - self.start
        if self.finished:
            return f"in {duration(self.elapsed(), exact=True)}"
        if self.ended is not None:
            return f"stopped after {duration(self.elapsed() + self._since_heard())}"
        if self.total and done > 0:
            left = self.elapsed() / done * max(0, self.total - self.done)
            return f"{duration(max(0.0, left - self._since_heard()))} left"
        return ""

    def _since_heard(self) -> float:
        if self.seconds is None or self.heard is None:
            return 0.0
        return max(0.0, (self.ended or time.monotonic()) - self.heard)

    def text(self) -> str:
        """Describe the progress in one line: `train  120/640  19%  1,034 samples/s  2 s left`."""
        parts = [self.label, self.count(), self.percent(), self.rate(), self.time(), self.note]
        return "  ".join(part for part in parts if part)


def duration(seconds: float, *, exact: bool = False) -> str:
    """Write seconds as `12 s`, `3 min 05 s` or `2 h 05 min`; if `exact`, `1.2 s` below ten."""
    if exact and seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
