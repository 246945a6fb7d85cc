"""What a run shows while it runs, drawn by the kernel: a panel in a notebook, a line in a terminal, lines in a log."""

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tpukit.essentials.display.bars import Bar, duration
from tpukit.essentials.display.curves import number
from tpukit.essentials.display.notebook import running_shell
from tpukit.essentials.display.panel import panel_html

_SECONDS_BETWEEN_DRAWINGS = 0.3
# A panel has some 10 KB: over hours, three a second would be gigabytes through a browser's connection.
_QUICK_SECONDS, _SECONDS_BETWEEN_LATER_DRAWINGS = 120.0, 1.0
_SECONDS_BETWEEN_TEXT_LINES = 10.0
_MOST_POINTS = 400  # of a curve, which is drawn about 350 pixels wide
# Programs that execute a notebook while nobody watches: lines of text say more there than a panel.
_UNATTENDED = ("nbconvert", "papermill", "nbclient", "jupyter-execute", "jupyter execute", "pytest")


class Screen:
    """What a run shows. This base class shows printed lines only; subclasses add bars and curves.

    `draw` may be called in every step: it redraws at most every 0.3 seconds.

    Attributes:
        bars: of the loops, by label, in the order in which they first began.
        curves: logged numbers by name, as (step, value); NaN where a value was not finite.
        doing: what the run does, where it stands still: what it compiles, or for whom it waits.
        cores: (core, what it does) where cores differ.
        outcome: None while it runs; then "done", "failed" or "interrupted".
    """

    def __init__(self) -> None:
        self.bars: dict[str, Bar] = {}
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self.doing = ""
        self.cores: Sequence[tuple[str, str]] = ()
        self.outcome: str | None = None
        self._rows = 0  # logged so far
        self._newest: dict[str, int] = {}  # the row that a value is from
        self._changed = False
        self._began = time.monotonic()
        self._next_drawing = 0.0

    def line(self, text: str) -> None:
        """Print one whole line."""
        sys.stdout.write(text + "\n")

    def show(self, data: dict, metadata: dict, **options: object) -> None:
        """Show in the notebook what IPython has made of an object elsewhere: its representations by MIME type."""
        from IPython.display import publish_display_data

        publish_display_data(data, metadata, **options)

    def bar(
        self,
        label: str,
        done: int,
        total: int | None,
        samples_per_step: int | None = 0,
        seconds: float | None = None,
        *,
        start: int = 0,
        unit: str | None = None,
        note: str = "",
        over: bool = False,
    ) -> None:
        """Record the progress of a loop; one that is behind what it was before has started again; see `Bar`.

        One that is `over` has ended, finished or not.
        """
        bar = self.bars.get(label)
        if bar is None or done < bar.done or (seconds or 0.0) < (bar.seconds or 0.0):
            bar = self.bars[label] = Bar(label, done, total, samples_per_step, rows_before=self._rows)
        bar.done, bar.total, bar.samples_per_step, bar.seconds = done, total, samples_per_step, seconds
        bar.start, bar.unit, bar.note, self._changed = start, unit, note, True
        bar.heard = time.monotonic()
        if bar.finished or over:
            bar.end()

    def end_bar(self, label: str) -> None:
        """Stop the clock of a loop, as far as it has come."""
        if label in self.bars:
            self.bars[label].end()
            self._changed = True

    def curve(self, rows: list[dict]) -> None:
        """Record logged numbers, to be drawn over their "step"."""
        for row in rows:
            self._rows += 1
            for name, value in row.items():
                if name != "step":
                    points = self.curves.setdefault(name, [])
                    points.append((row["step"], value if math.isfinite(value) else math.nan))
                    self._newest[name] = self._rows
                    if len(points) > _MOST_POINTS:
                        del points[1:-1:2]  # every second one: the curve keeps its shape and both ends
        self._changed = True

    def status(self, doing: str, cores: Sequence[tuple[str, str]] = ()) -> None:
        """Say what the run does where it seems to stand still, and for each core where they differ."""
        if (doing, cores) != (self.doing, self.cores):
            self.doing, self.cores, self._changed = doing, cores, True

    def draw(self, last: bool = False) -> None:
        """Update what is shown, at most every 0.3 seconds, and always if this is the `last` time."""
        now = time.monotonic()
        if self._is_new() and (last or now >= self._next_drawing):
            self._draw(last)
            self._changed, self._next_drawing = False, now + self._seconds_between()

    def close(self, outcome: str = "done") -> None:
        """Draw the final state: "done", "failed" or "interrupted", unless it is known already."""
        self.outcome = self.outcome or outcome
        self.doing, self.cores = "", ()
        for bar in self.bars.values():
            bar.end()
        self.draw(last=True)

    def _is_new(self) -> bool:
        return self._changed

    def _seconds_between(self) -> float:
        return _SECONDS_BETWEEN_DRAWINGS

    def _draw(self, last: bool) -> None:
        pass

    def _status(self) -> str:
        """Return in one line the running bars, or the one that ended last, and their newest values."""
        bars = list(self.bars.values())
        return self._line([bar for bar in bars if bar.running] or bars[-1:])

    def _line(self, bars: Sequence[Bar]) -> str:
        # What was logged before a loop began is not of this loop: the validation loss of an epoch ago, say.
        before = min((bar.rows_before for bar in bars), default=0)
        values = [
            f"{name} {number(points[-1][1])}" for name, points in self.curves.items() if self._newest[name] > before
        ]
        return "  ".join(part for part in (*(bar.text() for bar in bars), *values, self.doing) if part)


class Line(Screen):
    """A terminal: one status line, overwritten with every update."""

    def line(self, text: str) -> None:
        """Print one whole line above the status."""
        self._erase()
        super().line(text)
        self._changed = bool(self.bars)

    def _is_new(self) -> bool:
        return super()._is_new() or (self.outcome is not None and bool(self.bars))  # the line wants its end

    def _draw(self, last: bool) -> None:
        width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be erased
        text = self._status()[:width]
        self._erase()
        sys.stdout.write(text + ("\n" if last and text else ""))
        sys.stdout.flush()

    def _erase(self) -> None:
        sys.stdout.write("\r\x1b[K")


class Text(Screen):
    """A log, or a notebook that nobody watches: a line when a loop ends, and every 10 seconds while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_TEXT_LINES

    def bar(self, label: str, done: int, total: int | None, *others: object, **options: object) -> None:
        """Record the progress of a loop; its end is printed at once."""
        before = self.bars.get(label)
        super().bar(label, done, total, *others, **options)
        bar = self.bars[label]
        # The last position of a loop may be reported more than once; its line is printed once.
        if bar.ended and not (bar is before and bar.printed):
            bar.printed = True
            self._print(self._line([bar]))

    def _draw(self, last: bool) -> None:
        running = [bar for bar in self.bars.values() if bar.running]
        if not last and (running or self.doing) and time.monotonic() >= self._next_line:
            self._print(self._line(running))

    def _print(self, text: str) -> None:
        self.line(text)
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_TEXT_LINES


class Panel(Text):
    """A notebook: bars, a line of status and curves in one output, which stays in the saved file as the run left it.

    A notebook that cannot show it, or no longer, gets lines of text.
    """

    def __init__(self) -> None:
        super().__init__()
        self._handle: object = None
        self._error: Exception | None = None
        self._second = 0  # that the last drawing showed

    def _is_new(self) -> bool:
        if self._handle is None or self._error is not None:
            return super()._is_new()
        return super()._is_new() or self.outcome is not None or int(self._seconds()) != self._second

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _seconds_between(self) -> float:
        return super()._seconds_between() if self._seconds() < _QUICK_SECONDS else _SECONDS_BETWEEN_LATER_DRAWINGS

    def _draw(self, last: bool) -> None:
        if self._error is not None:
            return super()._draw(last)
        if self._handle is None and not (self.bars or self.curves or (self.doing and not last)):
            return None  # a run that is over at once, and has nothing to show
        self._second = int(self._seconds())
        try:
            self._show(self._html())
        except Exception as error:  # whatever a kernel's display raises, the run goes on
            self._error = error
            self.line(f"the panel is not drawn any more ({type(error).__name__}: {error}); lines of text follow")
        return None

    def _show(self, drawn: str) -> None:
        from IPython.display import display

        # Text for programs that show no HTML. Neither is escaped or executed by any of the notebooks.
        data = {"text/html": drawn, "text/plain": self._status()}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True) or False
        elif self._handle:
            self._handle.update(data, raw=True)

    def _html(self) -> str:
        seconds = duration(self._seconds())
        if self.outcome:
            words = {"done": f"done in {seconds}"}.get(self.outcome, f"{self.outcome} after {seconds}")
            state = self.outcome
        else:
            state, words = ("busy", self.doing) if self.doing else ("running", f"running for {seconds}")
        return panel_html([*self.bars.values()], self.curves, state, words, self.cores)

    def _print(self, text: str) -> None:
        if self._error is not None:
            super()._print(text)


def kind_of_screen() -> str:
    """Return the kind of screen this process has: "panel", "line" or "text"."""
    shell = running_shell()
    if shell is not None and hasattr(shell, "kernel"):
        with contextlib.suppress(OSError):  # no /proc: on macOS and Windows it counts as watched
            parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if any(name in parent for name in _UNATTENDED):
                return "text"
        return "panel"
    return "line" if sys.stdout.isatty() else "text"


@contextlib.contextmanager
def screen(kind: str | None = None) -> Iterator[Screen]:
    """Open the screen of a run: "panel", "line", "text", "off", or None to choose by where this process runs."""
    kinds = {"panel": Panel, "line": Line, "text": Text, "off": Screen}
    if kind not in (None, *kinds):
        raise ValueError(f"progress is one of {', '.join(map(repr, kinds))} or None, got {kind!r}")
    opened = kinds[kind or kind_of_screen()]()
    try:
        yield opened
    except KeyboardInterrupt:
        opened.close("interrupted")
        raise
    except BaseException:
        opened.close("failed")
        raise
    else:
        opened.close()
