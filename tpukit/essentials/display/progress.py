"""The display of a run: a panel in a notebook, a line in a terminal, lines of text in a log.

The kernel draws it from the messages of the workers, because a forked worker cannot draw in a
notebook. All displays have the same methods, and each subclass of `Screen` draws in another way:

    screen.bar("train", 20, 100, ...)                progress of a loop
    screen.curve([{"step": 20, "loss": 0.5}])        logged numbers
    screen.draw()                                    at most every 0.3 seconds
"""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tpukit.essentials.display.bars import Bar, duration
from tpukit.essentials.display.curves import number
from tpukit.essentials.display.errors import InvalidValueError
from tpukit.essentials.display.panel import panel_html

_SECONDS_BETWEEN_DRAWINGS = 0.3
# A panel has about 10 KB of HTML. Three per second would be 100 MB per hour through a browser's
# connection, so it is drawn once per second after two minutes.
_QUICK_SECONDS = 120.0
_SECONDS_BETWEEN_LATER_DRAWINGS = 1.0
_SECONDS_BETWEEN_TEXT_LINES = 10.0
_MOST_POINTS = 400  # of a curve, which is drawn about 350 pixels wide
# Programs that execute a notebook without a reader. There lines of text are more useful than a
# panel, whose last state would be all that remains.
_UNATTENDED = (
    *("nbconvert", "papermill", "nbclient"),
    *("jupyter-execute", "jupyter execute", "pytest"),
)


def running_shell():
    """Return IPython's shell without an import of IPython; None outside of IPython."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return None
    return ipython.get_ipython()


def current_cell() -> int | None:
    """Return the number of the notebook cell that runs now; None outside of IPython."""
    shell = running_shell()
    if shell is None:
        return None
    return shell.execution_count


class Screen:
    """The display of a run. This base class prints lines; subclasses add bars.

    You can call `draw` in every step, because it redraws at most every 0.3 seconds.

    Attributes:
        bars: the loops by label, in the order in which they first began.
        curves: logged numbers by name, as [(step, value), ...].
        doing: the activity of a run while it makes no steps, such as the graph that it compiles or
            the core that it waits for; "" otherwise.
        cores: (core, activity) of each core if their activities differ; otherwise empty.
        outcome: None during the run; then "done", "failed" or "interrupted".
    """

    def __init__(self) -> None:
        self.bars: dict[str, Bar] = {}
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self.doing = ""
        self.cores: Sequence[tuple[str, str]] = ()
        self.outcome: str | None = None
        self._rows = 0  # number of rows logged so far
        self._newest: dict[str, int] = {}  # per name, the number of the row with its last value
        self._changed = False
        self._began = time.monotonic()
        self._next_drawing = 0.0

    def line(self, text: str) -> None:
        """Print a whole line."""
        sys.stdout.write(text + "\n")

    def show(self, data: dict, metadata: dict, **options: object) -> None:
        """Display an object of a worker in the notebook, in its best representation.

        Args:
            data: the representations by MIME type, as IPython made them in the worker.
            metadata: the metadata of the representations.
            options: the options of IPython's `publish_display_data`.
        """
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
        """Record the progress of a loop.

        A `done` or `seconds` below its previous value means that the loop has started again.

        Args:
            label, done, total, samples_per_step, seconds, start, unit, note: see `Bar`.
            over: True if the loop has ended, also by `break` or an exception.
        """
        bar = self.bars.get(label)
        # A new `Bar` for a loop that has started again, because its clock starts again, too.
        if bar is None or done < bar.done or (seconds or 0.0) < (bar.seconds or 0.0):
            bar = Bar(label, done, total=total, rows_before=self._rows)
            self.bars[label] = bar
        bar.done = done
        bar.total = total
        bar.samples_per_step = samples_per_step
        bar.seconds = seconds
        bar.start = start
        bar.unit = unit
        bar.note = note
        bar.heard = time.monotonic()
        if bar.finished or over:
            bar.end()
        self._changed = True

    def end_bar(self, label: str) -> None:
        """Stop the clock of a loop, whether or not all its items are done."""
        if label in self.bars:
            self.bars[label].end()
            self._changed = True

    def curve(self, rows: list[dict]) -> None:
        """Record logged numbers by name. Each row also has the key "step", for the x axis."""
        for row in rows:
            self._rows += 1
            for name, value in row.items():
                if name != "step":
                    self._add_point(name, row["step"], value=value)
        self._changed = True

    def _add_point(self, name: str, step: float, *, value: float) -> None:
        points = self.curves.setdefault(name, [])
        points.append((step, value))
        self._newest[name] = self._rows
        if len(points) > _MOST_POINTS:
            del points[1:-1:2]  # every second point, so the shape and both ends remain

    def status(self, doing: str, cores: Sequence[tuple[str, str]] = ()) -> None:
        """Record the attributes `doing` and `cores`, which `Screen` documents."""
        if (doing, cores) != (self.doing, self.cores):
            self.doing = doing
            self.cores = cores
            self._changed = True

    def draw(self, last: bool = False) -> None:
        """Update the display if it has changed and the last update is at least 0.3 s old.

        After two minutes, a panel is drawn at most once per second. A log gets a line every 10 s.

        Args:
            last: True for the final state, which is drawn without a wait.
        """
        now = time.monotonic()
        is_due = last or now >= self._next_drawing
        if is_due and self._is_new():
            self._draw(last)
            self._changed = False
            self._next_drawing = now + self._seconds_between()

    def close(self, outcome: str = "done") -> None:
        """Draw the final state of the run.

        Args:
            outcome: "done", "failed" or "interrupted"; ignored after an earlier call of `close`.
        """
        self.outcome = self.outcome or outcome
        self.doing = ""
        self.cores = ()
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
        """Return a line with the running bars, else the last bar, and the newest logged values."""
        bars = list(self.bars.values())
        running = [bar for bar in bars if bar.running]
        return self._text_of(running or bars[-1:])

    def _text_of(self, bars: Sequence[Bar]) -> str:
        """Return a line with these bars, the values logged since they began, and `doing`."""
        # Numbers that were logged before a loop began belong to another loop, such as the
        # validation loss of the epoch before.
        before = min((bar.rows_before for bar in bars), default=0)
        parts = [bar.text() for bar in bars]
        for name, points in self.curves.items():
            if self._newest[name] > before:
                parts.append(f"{name} {number(points[-1][1])}")
        parts.append(self.doing)
        return "  ".join(filter(None, parts))


class Line(Screen):
    """The display in a terminal: a line of status, which every update overwrites."""

    def __init__(self) -> None:
        super().__init__()
        # Whether the terminal's last line is a status without a line break.
        self._is_on_screen = False

    def line(self, text: str) -> None:
        """Print a whole line above the status."""
        self._erase()
        super().line(text)
        if self._status():  # it was erased
            self._changed = True

    def _is_new(self) -> bool:
        needs_line_break = self.outcome is not None and self._is_on_screen
        return super()._is_new() or needs_line_break

    def _draw(self, last: bool) -> None:
        width = shutil.get_terminal_size().columns - 1  # "\r" cannot erase a line that wraps
        text = self._status()[:width]
        self._erase()
        sys.stdout.write(text)
        if last and text:
            sys.stdout.write("\n")
        sys.stdout.flush()
        self._is_on_screen = bool(text) and not last

    def _erase(self) -> None:
        sys.stdout.write("\r\x1b[K")
        self._is_on_screen = False


class Text(Screen):
    """The display in a log: a line every 10 seconds, and a line when a loop ends.

    If a program such as nbconvert executes a notebook, the notebook has this display, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_TEXT_LINES

    def bar(
        self, label: str, done: int, total: int | None, *others: object, **options: object
    ) -> None:
        """Record the progress of a loop; print a line at once if the loop has ended."""
        before = self.bars.get(label)
        super().bar(label, done, total, *others, **options)
        bar = self.bars[label]
        # The end of a loop may be reported more than once, but must be printed once.
        was_printed = bar is before and bar.printed
        if bar.ended and not was_printed:
            bar.printed = True
            self._print(self._text_of([bar]))

    def _draw(self, last: bool) -> None:
        running = [bar for bar in self.bars.values() if bar.running]
        is_busy = bool(running or self.doing)
        if is_busy and not last and time.monotonic() >= self._next_line:
            self._print(self._text_of(running))

    def _print(self, text: str) -> None:
        self.line(text)
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_TEXT_LINES


class Panel(Text):
    """The display in a notebook: an output with bars, a line of status and curves.

    The saved file contains the last state of the output. If drawing raises an error, the panel
    changes into lines of text.
    """

    def __init__(self) -> None:
        super().__init__()
        # The handle of the output: None before the first drawing, False if IPython returned none.
        self._handle: object = None
        self._error: Exception | None = None  # the error that ended the drawing of the panel
        self._second = 0  # seconds since the run began, at the last drawing

    def _is_new(self) -> bool:
        if super()._is_new():
            return True
        # The panel shows the seconds of the run, so it also changes once per second.
        if self._handle is None or self._error is not None:
            return False
        return self.outcome is not None or int(self._seconds()) != self._second

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _seconds_between(self) -> float:
        if self._seconds() < _QUICK_SECONDS:
            return super()._seconds_between()
        return _SECONDS_BETWEEN_LATER_DRAWINGS

    def _draw(self, last: bool) -> None:
        if self._error is not None:
            super()._draw(last)
            return
        is_busy = bool(self.doing) and not last
        has_content = bool(self.bars or self.curves or is_busy)
        if self._handle is None and not has_content:
            return  # no panel for a run that ends before it shows anything
        self._second = int(self._seconds())
        try:
            self._show(self._html())
        except Exception as error:  # an error of the display must not end the run
            self._error = error
            reason = f"{type(error).__name__}: {error}"
            self.line(f"the panel is not drawn any more ({reason}); lines of text follow")

    def _show(self, drawn: str) -> None:
        from IPython.display import display

        # The text is for programs that show no HTML.
        data = {"text/html": drawn, "text/plain": self._status()}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True) or False
        elif self._handle:
            self._handle.update(data, raw=True)

    def _html(self) -> str:
        seconds = duration(self._seconds())
        if self.outcome == "done":
            state = "done"
            words = f"done in {seconds}"
        elif self.outcome:
            state = self.outcome
            words = f"{self.outcome} after {seconds}"
        elif self.doing:
            state = "busy"
            words = self.doing
        else:
            state = "running"
            words = f"running for {seconds}"
        bars = list(self.bars.values())
        return panel_html(bars, self.curves, state=state, status=words, cores=self.cores)

    def _print(self, text: str) -> None:
        if self._error is not None:
            super()._print(text)


def kind_of_screen() -> str:
    """Return the kind of display for this process: "panel", "line" or "text"."""
    shell = running_shell()
    if shell is not None and hasattr(shell, "kernel"):
        if _is_unattended():
            return "text"
        return "panel"
    if sys.stdout.isatty():
        return "line"
    return "text"


def _is_unattended() -> bool:
    # The program that executes the notebook has started this kernel, so it is the parent process.
    try:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:  # no /proc: on macOS and Windows a notebook counts as attended
        return False
    command = parent.replace(b"\0", b" ").decode(errors="replace")
    return any(name in command for name in _UNATTENDED)


@contextlib.contextmanager
def screen(kind: str | None = None) -> Iterator[Screen]:
    """Open the display of a run, yield it, and draw its final state after the block.

    Args:
        kind: "panel", "line", "text" or "off"; None for `kind_of_screen()`.

    Raises:
        InvalidValueError: `kind` is none of these.
    """
    kinds = {"panel": Panel, "line": Line, "text": Text, "off": Screen}
    if kind not in (None, *kinds):
        raise InvalidValueError(
            f"progress must be one of {', '.join(map(repr, kinds))} or None, got {kind!r}",
            fix="leave progress out, and tpukit chooses the display for this notebook or terminal",
        )
    opened = kinds[kind or kind_of_screen()]()
    # The display shows the outcome before IPython prints the traceback.
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
