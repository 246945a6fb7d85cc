"""The progress of a loop, in numbers and in words: `train  120/640  19%  1,034 samples/s`."""

import time
from dataclasses import dataclass, field

_SHORTEST = 1e-9  # seconds; a rate never divides by zero


@dataclass
class Bar:
    """The progress of a loop.

    Attributes:
        label: the loop's name.
        done: number of items done so far.
        total: number of items to expect; None if that is unknown.
        samples_per_step: samples per item. 0 shows the rate in items, None shows no rate.
        seconds: seconds since the loop began, measured by the process that runs the loop; None to
            measure them here, from `began` to `ended`.
        start: number of items that were done before the loop began, as in a resumed epoch. The rate
            leaves them out.
        unit: the unit of the rate. None means "samples" if `samples_per_step` is above 0. Otherwise
            None means the label if the label ends with "s", such as "epochs", or else "steps".
        note: text after the numbers; "" for none.
        rows_before: number of logged rows that had arrived when the loop began.
        printed: whether the end of the loop has been printed.
        heard: `time.monotonic()` when `seconds` arrived; None before.
        began: `time.monotonic()` of the beginning.
        ended: `time.monotonic()` of the end; None while the loop runs.
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
        """True until all items are done or `end` is called."""
        return self.ended is None and not self.finished

    def end(self) -> None:
        """Stop the clock, whether or not all items are done."""
        self.ended = self.ended or time.monotonic()

    def elapsed(self) -> float:
        """Return the seconds since the loop began, up to its end."""
        if self.seconds is not None:
            return self.seconds
        return (self.ended or time.monotonic()) - self.began

    def share(self) -> float | None:
        """Return the part of the items that is done, from 0 to 1; None if it is unknown."""
        if self.finished:
            return 1.0
        if self.total:
            return min(1.0, self.done / self.total)
        return None

    def count(self) -> str:
        """Return the items done and in total: `120/640`."""
        if self.total:
            return f"{self.done}/{self.total}"
        return f"{self.done}"

    def percent(self) -> str:
        """Return the finished share, such as `19%`, while the loop runs; otherwise ""."""
        if self.running and self.total:
            return f"{self.share():.0%}"
        return ""

    def rate(self) -> str:
        """Return the rate, such as `1,034 samples/s`; for slow loops the time per item."""
        done = self.done - self.start
        if done <= 0 or self.samples_per_step is None:
            return ""
        steps_per_second = done / max(self.elapsed(), _SHORTEST)
        samples = steps_per_second * self.samples_per_step
        if samples >= 1:
            return f"{samples:,.0f} {self.unit or 'samples'}/s"
        if steps_per_second < 1:  # "0.0 epochs/s" would say nothing
            return f"{duration(1 / steps_per_second, exact=True)} each"
        name = self.label if self.label.endswith("s") else "steps"
        digits = 0 if steps_per_second >= 100 else 1
        return f"{steps_per_second:,.{digits}f} {self.unit or name}/s"

    def time(self) -> str:
        """Return the time that the loop took, or an estimate of the remaining time."""
        done = self.done - self.start
        if self.finished:
            return f"in {duration(self.elapsed(), exact=True)}"
        if self.ended is not None:
            return f"stopped after {duration(self.elapsed() + self._since_heard())}"
        if self.total and done > 0:
            # From the rate of this loop's own items: items before `start` took no time here.
            left = self.elapsed() / done * max(0, self.total - self.done)
            return f"{duration(max(0.0, left - self._since_heard()))} left"
        return ""

    def _since_heard(self) -> float:
        # `seconds` is as old as the worker's last message.
        if self.seconds is None or self.heard is None:
            return 0.0
        return max(0.0, (self.ended or time.monotonic()) - self.heard)

    def text(self) -> str:
        """Return the progress in a line: `train  120/640  19%  1,034 samples/s  2 s left`."""
        parts = [self.label, self.count(), self.percent(), self.rate(), self.time(), self.note]
        return "  ".join(filter(None, parts))


def duration(seconds: float, *, exact: bool = False) -> str:
    """Return seconds as text: `12 s`, `3 min 05 s` or `2 h 05 min`.

    Args:
        seconds: the number of seconds.
        exact: write fewer than ten seconds with a decimal, `1.2 s`.
    """
    # From 9.95 on, the text would be "10.0 s".
    if exact and seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"
