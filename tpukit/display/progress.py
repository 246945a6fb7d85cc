"""Progress bars and a live curve, drawn by the kernel: widgets in a forked worker would show nothing."""

import contextlib
import html
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.display.notebook import running_shell

_SECONDS_BETWEEN_DRAWINGS = 0.3
_SECONDS_BETWEEN_TEXT_LINES = 10.0
_MOST_POINTS = 400  # of a curve, which is drawn about 450 pixels wide
_COLORS = ("#3b78c2", "#d1782b", "#4b9b62", "#a05bb5")  # legible on white and on dark grey
# Programs that execute a notebook while nobody watches: lines of text say more there than a widget.
_UNATTENDED = ("nbconvert", "papermill", "nbclient", "jupyter-execute", "jupyter execute", "pytest")


@dataclass
class Bar:
    """The progress of one loop.

    Attributes:
        label: the loop's name.
        done: items so far.
        total: items to expect, None if that is not known.
        samples_per_step: in an item; 0 for items that are steps, None for items that no rate is told of.
        seconds: since the loop began, by the clock of whoever runs it; None counts them here, until it is finished.
    """

    label: str
    done: int
    total: int | None
    samples_per_step: int | None
    seconds: float | None = None
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def finished(self) -> bool:
        """True once the last item is done."""
        return self.done == self.total

    def elapsed(self) -> float:
        """Return the seconds since the loop began, up to its end."""
        return self.seconds if self.seconds is not None else (self.ended or time.monotonic()) - self.began

    def text(self) -> str:
        """Describe the progress in one line: `train  120/640  19%  1,034 samples/s  2 s left`."""
        seconds = max(self.elapsed(), 1e-9)
        parts = [self.label, f"{self.done}/{self.total}" if self.total else f"{self.done}"]
        if self.total and not self.finished:
            parts.append(f"{self.done / self.total:.0%}")
        if self.done and self.samples_per_step:
            parts.append(f"{self.done * self.samples_per_step / seconds:,.0f} samples/s")
        elif self.done and self.samples_per_step is not None:
            parts.append(f"{self.done / seconds:,.1f} steps/s")
        if self.finished:
            parts.append(f"in {seconds:.0f} s")
        elif self.total and self.done:
            parts.append(f"{seconds / self.done * (self.total - self.done):.0f} s left")
        return "  ".join(parts)


class Screen:
    """What a run shows. This base class shows printed lines only; subclasses add bars and curves.

    `draw` may be called in every step: it redraws at most every 0.3 seconds.
    """

    def __init__(self) -> None:
        self.bars: dict[str, Bar] = {}
        self.curves: dict[str, list[tuple[float, float]]] = {}
        self._changed = False
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
    ) -> None:
        """Record the progress of a loop; fewer items done than before mean that it has started again; see `Bar`."""
        bar = self.bars.get(label)
        if bar is None or done < bar.done:  # the next epoch: the clock starts again
            bar = self.bars[label] = Bar(label, done, total, samples_per_step)
        bar.done, bar.total, bar.seconds, self._changed = done, total, seconds, True
        if bar.finished and bar.ended is None:
            bar.ended = time.monotonic()

    def curve(self, rows: list[dict]) -> None:
        """Record logged numbers, to be drawn over their "step"."""
        for row in rows:
            for name, value in row.items():
                if name != "step" and value == value:  # NaN cannot be drawn
                    points = self.curves.setdefault(name, [])
                    points.append((row["step"], value))
                    if len(points) > _MOST_POINTS:
                        del points[1:-1:2]  # every second one: the curve keeps its shape and both ends
        self._changed = True

    def draw(self, last: bool = False) -> None:
        """Update what is shown, at most every 0.3 seconds, and always if this is the `last` time."""
        now = time.monotonic()
        if self._changed and (last or now >= self._next_drawing):
            self._draw(last)
            self._changed, self._next_drawing = False, now + _SECONDS_BETWEEN_DRAWINGS

    def close(self) -> None:
        """Draw the final state."""
        self.draw(last=True)

    def _draw(self, last: bool) -> None:
        pass

    def _status(self) -> str:
        """Return in one line the running bars, or the one that ended last, and the newest values."""
        bars = list(self.bars.values())
        shown = [bar for bar in bars if not bar.finished] or bars[-1:]
        return "  ".join([*(bar.text() for bar in shown), *self._values()])

    def _values(self) -> list[str]:
        return [f"{name} {points[-1][1]:.4g}" for name, points in self.curves.items()]


class Line(Screen):
    """A terminal: one status line, overwritten with every update."""

    def line(self, text: str) -> None:
        """Print one whole line above the status."""
        self._erase()
        super().line(text)
        self._changed = bool(self.bars)

    def _draw(self, last: bool) -> None:
        width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be erased
        self._erase()
        sys.stdout.write(self._status()[:width] + ("\n" if last else ""))
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
        # The last position of a loop may be reported more than once; its line is printed once.
        printed = before is not None and before.finished and done == before.done
        super().bar(label, done, total, *others, **options)
        if self.bars[label].finished and not printed:
            self._print(self.bars[label].text())

    def _draw(self, last: bool) -> None:
        running = [bar.text() for bar in self.bars.values() if not bar.finished]
        if running and time.monotonic() >= self._next_line:
            self._print(*running)

    def _print(self, *parts: str) -> None:
        self.line("  ".join([*parts, *self._values()]))
        self._next_line = time.monotonic() + _SECONDS_BETWEEN_TEXT_LINES


class Widgets(Screen):
    """A notebook: one bar for each loop, and a curve, in one ipywidgets box."""

    def __init__(self) -> None:
        super().__init__()
        import ipywidgets
        from IPython.display import display

        self._widgets = ipywidgets
        self._rows: dict[str, tuple] = {}
        self._curve = ipywidgets.HTML()
        self._box = ipywidgets.VBox([])
        display(self._box)

    def _draw(self, last: bool) -> None:
        for bar in self.bars.values():
            drawn, text = self._rows.get(bar.label) or self._add(bar.label)
            drawn.max, drawn.value = bar.total or max(bar.done, 1), bar.done
            drawn.bar_style = "success" if bar.finished else ""
            text.value = f"<code style='background:none;color:inherit'>{html.escape(bar.text())}</code>"
        if self.curves:
            self._curve.value = curve_svg(self.curves)
            if self._curve not in self._box.children:
                self._box.children = (*self._box.children, self._curve)

    def _add(self, label: str) -> tuple:
        drawn = self._widgets.FloatProgress(layout=self._widgets.Layout(width="240px"))
        text = self._widgets.HTML()
        self._rows[label] = drawn, text
        rows = [child for child in self._box.children if child is not self._curve]
        curve = [self._curve] if self.curves else []
        self._box.children = (*rows, self._widgets.HBox([drawn, text]), *curve)
        return drawn, text


def kind_of_screen() -> str:
    """Return the kind of screen this process has: "widgets", "line" or "text"."""
    shell = running_shell()
    if shell is not None and hasattr(shell, "kernel"):
        with contextlib.suppress(OSError):  # no /proc: on macOS and Windows it counts as watched
            parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if any(name in parent for name in _UNATTENDED):
                return "text"
        return "widgets"
    return "line" if sys.stdout.isatty() else "text"


@contextlib.contextmanager
def screen(kind: str | None = None) -> Iterator[Screen]:
    """Open the screen of a run: "widgets", "line", "text", "off", or None to choose by where this process runs.

    Raises:
        ValueError: for any other kind.
    """
    kinds = {"widgets": Widgets, "line": Line, "text": Text, "off": Screen}
    if kind not in (None, *kinds):
        raise ValueError(f"progress is one of {', '.join(map(repr, kinds))} or None, got {kind!r}")
    opened = kinds[kind or kind_of_screen()]()
    try:
        yield opened
    finally:
        opened.close()


def curve_svg(curves: dict[str, list[tuple[float, float]]], width: int = 520, height: int = 130) -> str:
    """Draw `{name: [(step, value), ...]}` as SVG, without a background and in the notebook's own text colour."""
    points = [point for curve in curves.values() for point in curve]
    (left, right), (low, high) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))

    def place(step: float, value: float) -> str:
        x = 60 + (step - left) / (right - left or 1) * (width - 70)
        y = 10 + (high - value) / (high - low or 1) * (height - 40)
        return f"{x:.1f},{y:.1f}"

    lines, names = [], []
    for index, (name, curve) in enumerate(curves.items()):
        color = _COLORS[index % len(_COLORS)]
        lines.append(
            f"<polyline fill='none' stroke='{color}' stroke-width='1.8' points='{' '.join(place(*p) for p in curve)}'/>"
        )
        names.append(f"<tspan fill='{color}'>{html.escape(name)} {curve[-1][1]:.4g}</tspan>")
    return (
        f"<svg width='{width}' height='{height}' font-family='sans-serif' font-size='11' fill='currentColor'>"
        f"<g stroke='currentColor' opacity='.3'><path fill='none' d='M60 10V{height - 30}H{width - 10}'/></g>"
        f"<text x='55' y='14' text-anchor='end'>{high:.3g}</text>"
        f"<text x='55' y='{height - 28}' text-anchor='end'>{low:.3g}</text>"
        f"<text x='60' y='{height - 14}'>{left:g}</text>"
        f"<text x='{width - 10}' y='{height - 14}' text-anchor='end'>step {right:g}</text>"
        f"{''.join(lines)}<text x='{width - 10}' y='20' text-anchor='end'>{' &#160; '.join(names)}</text></svg>"
    )
