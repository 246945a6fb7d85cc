"""Live curves as SVG, in the notebook's own text colour.

Curves with values of similar size share a chart, and all charts have the same x axis of steps:

    loss                    auroc         learning rate
    train_loss, valid_loss  valid_auroc   lr
"""

import base64
import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpukit.essentials.display.measures import better

_HEIGHT = 150  # pixels of a chart
_WIDE = 370  # pixels of the chart of losses
_NARROW = 190  # pixels of any other chart
# Pixels around the curves, for the labels of the axes.
_LEFT = 44
_RIGHT = 12
_TOP = 8
_BOTTOM = 24
_MOST_DOTS = 24  # a curve with more points has a dot only at its end
_SAME_SCALE = 10.0  # the largest values of the curves in a chart differ by at most this factor
_LEVEL = 1e-12  # a curve that varies less than this, relative to its size, is drawn as level
_ROUNDING = 1e-9  # tolerance for a tick exactly at the end of an axis
# Each has a contrast of 3:1 or more on white and on #111 (WCAG 2.1, 1.4.11).
_COLORS = ("#3b78c2", "#d1782b", "#4b9b62", "#a05bb5", "#8a7f2c", "#c2577a")
_SETS = {"train": _COLORS[0], "valid": _COLORS[1], "val": _COLORS[1], "test": _COLORS[2]}
_ERROR_COLOR = "#dc4c4c"
# An image cannot use the text colour of the page. This grey has a contrast of 4.1:1 or more on
# white and on #111.
_INK_OF_IMAGE = "#767676"
_RATES = {"lr", "learning_rate"}
_LEARNING_RATE = "learning rate"

Points = Sequence[tuple[float, float]]  # (step, value); a value that is not finite is a gap


@dataclass(frozen=True)
class Axis:
    """The curves of a chart.

    Attributes:
        title: the measure, such as "loss".
        names: the names of the curves.
        wide: whether this is the main chart, which is drawn wider.
    """

    title: str
    names: tuple[str, ...]
    wide: bool = False


class _Frame(NamedTuple):
    """The ranges of a chart's axes, and the conversion of steps and values to pixels."""

    steps: tuple[float, float]  # the smallest and the largest
    values: tuple[float, float]
    width: int

    @property
    def bottom(self) -> int:
        return _HEIGHT - _BOTTOM

    def x(self, step: float) -> float:
        """Return the x position of a step in pixels."""
        first, last = self.steps
        across = self.width - _LEFT - _RIGHT
        return _LEFT + (step - first) / (last - first or 1) * across

    def y(self, value: float) -> float:
        """Return the y position of a value in pixels from the top."""
        low, high = self.values
        return _TOP + (high - value) / (high - low) * (self.bottom - _TOP)


def charts_html(curves: dict[str, Points], *, as_images: bool = False) -> str:
    """Return charts side by side, each with the newest values of its curves above it.

    A constant learning rate, and curves without a finite value, get only the line of values.

    Args:
        curves: `{name: [(step, value), ...]}`.
        as_images: draw `<img>` elements in place of `<svg>` elements. JupyterLab does not show
            `<svg>` elements of a notebook that the reader has not trusted.
    """
    finite = {name: _finite(points) for name, points in curves.items()}
    # The steps of all curves, so that all charts have the same x axis.
    steps = [step for step, _ in _joined(curves.values())]
    charts = []
    headings_only = []
    for axis in axes(curves):
        heading = _heading(axis, curves)
        points = _joined(finite[name] for name in axis.names)
        levels = {value for _, value in points}
        is_level_rate = axis.title == _LEARNING_RATE and len(levels) == 1
        if is_level_rate or not points:
            headings_only.append(f'<div style="margin-top:4px">{heading}</div>')
            continue
        width = _WIDE if axis.wide else _NARROW
        chart = _chart(axis, curves, steps=(min(steps), max(steps)), width=width)
        if as_images:
            chart = _as_image(chart, width, alt=_in_words(axis, curves))
        charts.append(f'<div style="max-width:100%">{heading}{chart}</div>')
    row = ""
    if charts:
        row = f'<div style="display:flex;flex-wrap:wrap;gap:6px 22px">{"".join(charts)}</div>'
    return row + "".join(headings_only)


def axes(curves: dict[str, Points]) -> list[Axis]:
    """Return the charts: losses, other measures grouped by scale, learning rates."""
    largest = {name: _largest(points) for name, points in curves.items()}
    rates = [name for name in curves if name in _RATES or name.endswith("_lr")]
    losses = _losses(largest, rates)
    others = [name for name in curves if name not in (*rates, *losses)]
    found = []
    if losses:
        found.append(Axis("loss", tuple(losses), wide=True))
    for group in _groups_by_scale(others, largest):
        found.append(Axis(_title(group), tuple(group), wide=not found))
    if rates:
        found.append(Axis(_LEARNING_RATE, tuple(rates)))
    return found


def _losses(largest: dict[str, float], rates: list[str]) -> list[str]:
    """Return the losses, then the error measures of similar size, which share their chart."""
    losses = [name for name in largest if _is_loss(name)]
    scale = max((largest[name] for name in losses), default=0.0)
    errors = []
    for name in [name for name in largest if name not in (*rates, *losses)]:
        if losses and better(name) == "low" and _same_scale(largest[name], scale):
            errors.append(name)
    return losses + errors


def _is_loss(name: str) -> bool:
    """Return whether the last word is "loss": `valid_loss`, but not `loss_scale`."""
    words = name.lower().replace("_", " ").split()
    return words[-1:] == ["loss"]


def _largest(points: Points) -> float:
    return max((abs(value) for _, value in _finite(points)), default=0.0)


def _groups_by_scale(names: Iterable[str], largest: dict[str, float]) -> list[list[str]]:
    """Return the measures in groups of similar size; else small ones would be flat lines."""
    groups: list[list[str]] = []
    for name in names:
        near = [group for group in groups if _is_near(name, group, largest)]
        if near:
            near[0].append(name)
        else:
            groups.append([name])
    return groups


def _is_near(name: str, group: Iterable[str], largest: dict[str, float]) -> bool:
    return all(_same_scale(largest[name], largest[other]) for other in group)


def _same_scale(first: float, second: float) -> bool:
    is_within = max(first, second) <= _SAME_SCALE * min(first, second)
    return is_within or first == second


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from `low` to `high`."""
    span = (high - low) / count
    if not span > 0 or not math.isfinite(span):
        return [low]
    # The distance of two ticks is 1, 2 or 5 times a power of ten, the first that is large enough.
    power = 10.0 ** math.floor(math.log10(span))
    round_numbers = [power * factor for factor in (1, 2, 5, 10)]
    each = next((number for number in round_numbers if number >= span), round_numbers[-1])
    first = math.ceil(low / each - _ROUNDING)
    last = math.floor(high / each + _ROUNDING)
    return [float(f"{number * each:.12g}") for number in range(first, last + 1)]


def number(value: float) -> str:
    """Return a value with four significant digits."""
    return f"{value:.4g}"


def _tick(value: float) -> str:
    """Return a round number as text that fits next to an axis, about five characters."""
    if value and not 0.001 <= abs(value) < 10_000:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(step, value) for step, value in points if math.isfinite(value)]


def _joined(parts: Iterable[Points]) -> list[tuple[float, float]]:
    joined = []
    for points in parts:
        joined += points
    return joined


def _split(name: str) -> tuple[str, str]:
    """Return the data set and the measure in a name: ("valid", "loss") for "valid_loss"."""
    first, _, rest = name.partition("_")
    if first in _SETS and rest:
        return (first, rest)
    return ("", name)


def _stems(names: Iterable[str]) -> set[str]:
    return {_split(name)[1] for name in names}


def _title(names: Sequence[str]) -> str:
    stems = _stems(names)
    if len(stems) == 1:
        return stems.pop().replace("_", " ")
    return "metrics"


def _colors(names: Sequence[str]) -> dict[str, str]:
    """Return a colour per curve: blue for training, orange for validation, green for test."""
    colors: dict[str, str] = {}
    # First the fixed colours of training, validation and test, then free colours for the rest.
    for name in names:
        of_set = _SETS.get(_split(name)[0])
        if of_set and of_set not in colors.values():
            colors[name] = of_set
    for index, name in enumerate(names):
        free = [color for color in _COLORS if color not in colors.values()]
        color = free[0] if free else _COLORS[index % len(_COLORS)]
        colors.setdefault(name, color)
    return colors


def _heading(axis: Axis, curves: dict[str, Points]) -> str:
    """Return the title of a chart, and the newest value of each of its curves."""
    colors = _colors(axis.names)
    is_single_rate = axis.title == _LEARNING_RATE and len(axis.names) == 1
    # If all curves have the same measure, the title names it, and a label only the data set.
    has_one_stem = len(_stems(axis.names)) == 1
    parts = []
    for name in axis.names:
        label = name
        if has_one_stem:
            label = _split(name)[0]
        if is_single_rate or not label:
            label_html = ""
        else:
            label_html = f'<span style="opacity:.7">{html.escape(label)}</span> '
        value = curves[name][-1][1]
        text = number(value)
        if not math.isfinite(value):
            text = f'<span style="color:{_ERROR_COLOR}">{value}</span>'
        parts.append(
            f'<span style="white-space:nowrap">'
            f'<span style="color:{colors[name]}">&#9679;</span> {label_html}'
            f'<span style="font-variant-numeric:tabular-nums">{text}</span></span>'
        )
    title = f'<span style="font-weight:600">{html.escape(axis.title)}</span>'
    style = "display:flex;flex-wrap:wrap;gap:0 12px"
    return f'<div style="{style}">{title}{"".join(parts)}</div>'


def _value_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest value that a chart shows."""
    low = min(values)
    high = max(values)
    is_level = high - low <= _LEVEL * max(abs(low), abs(high))
    if not is_level:
        return low, high
    # The range of a level curve, so that it runs through the middle of the chart.
    return low - (abs(low) / 2 or 1.0), high + (abs(high) / 2 or 1.0)


def _chart(axis: Axis, curves: dict[str, Points], *, steps: tuple[float, float], width: int) -> str:
    finite = _joined(_finite(curves[name]) for name in axis.names)
    frame = _Frame(steps, values=_value_range([value for _, value in finite]), width=width)
    grid = []
    labels = []
    for tick in ticks(*frame.values, count=4):  # a line and a label per round value
        y = frame.y(tick)
        grid.append(f"M{_LEFT} {y:.1f}H{width - _RIGHT}")
        # 3.5 is about half the height of a digit, so the label is centred on its line.
        place = f"x='{_LEFT - 6}' y='{y + 3.5:.1f}' text-anchor='end'"
        labels.append(f"<text {place}>{_tick(tick)}</text>")
    labels += _step_labels(frame)
    colors = _colors(axis.names)
    lines = "".join(_line(curves[name], frame, color=colors[name]) for name in axis.names)
    size = f"width='{width}' height='{_HEIGHT}' viewBox='0 0 {width} {_HEIGHT}'"
    described = f"role='img' aria-label='{html.escape(axis.title, quote=True)} over steps'"
    style = "display:block;max-width:100%;font-family:inherit"
    base = f"M{_LEFT} {frame.bottom}H{width - _RIGHT}"
    return (
        f"<svg {size} {described} font-size='11' fill='currentColor' style='{style}'>"
        f"<path d='{''.join(grid)}' stroke='currentColor' stroke-opacity='.13' fill='none'/>"
        f"<path d='{base}' stroke='currentColor' stroke-opacity='.4' fill='none'/>"
        f"<g opacity='.65'>{''.join(labels)}</g>{lines}</svg>"
    )


def _step_labels(frame: _Frame) -> list[str]:
    y = frame.bottom + 16
    labels = [f"<text x='{_LEFT}' y='{y}'>step</text>"]
    across = frame.width - _LEFT - _RIGHT
    for tick in ticks(*frame.steps, count=max(2, across // 65)):  # 65 pixels for "1,000,000"
        x = frame.x(tick)
        if x > _LEFT + 40:  # the word "step" is to the left of this position
            anchor = "middle" if x < frame.width - 24 else "end"
            labels.append(f"<text x='{x:.1f}' y='{y}' text-anchor='{anchor}'>{tick:,.12g}</text>")
    return labels


def _as_image(chart: str, width: int, *, alt: str) -> str:
    """Return a chart as an image, with its own text colour."""
    # An image is a document of its own: it needs a namespace, and inherits no colour or font.
    alone = chart.replace("<svg ", "<svg xmlns='http://www.w3.org/2000/svg' ", 1)
    alone = alone.replace("currentColor", _INK_OF_IMAGE)
    alone = alone.replace("font-family:inherit", "font-family:sans-serif")
    alone = alone.replace("<g opacity='.65'>", "<g>")
    source = f"data:image/svg+xml;base64,{base64.b64encode(alone.encode()).decode()}"
    size = f'width="{width}" height="{_HEIGHT}" style="max-width:100%"'
    return f'<img src="{source}" alt="{html.escape(alt)}" {size}>'


def _in_words(axis: Axis, curves: dict[str, Points]) -> str:
    """Return a sentence that describes a chart."""
    parts = []
    for name in axis.names:
        points = _finite(curves[name])
        if points:
            first = points[0][1]
            last = points[-1][1]
            parts.append(f"{name} from {number(first)} to {number(last)}")
    return f"{axis.title} over steps: {', '.join(parts)}"


def _line(points: Points, frame: _Frame, *, color: str) -> str:
    path = []
    dots = []
    is_open = False  # whether the last point was finite, so that a line leads to the next
    for step, value in points:
        if not math.isfinite(value):
            is_open = False
            continue
        place = (frame.x(step), frame.y(value))
        command = "L" if is_open else "M"
        path.append(f"{command}{place[0]:.1f} {place[1]:.1f}")
        if not is_open:
            path.append("h0")  # a round dot, if no line follows
        dots.append(place)
        is_open = True
    shown = dots if len(dots) <= _MOST_DOTS else dots[-1:]
    circles = "".join(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.4'/>" for x, y in shown)
    style = "stroke-width='1.7' stroke-linejoin='round' stroke-linecap='round'"
    return (
        f"<path d='{''.join(path)}' fill='none' stroke='{color}' {style}/>"
        f"<g fill='{color}'>{circles}</g>"
    )
