"""Live curves as SVG: what has one scale on one axis, all over the same steps, in the notebook's own text colour."""

import base64
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tpukit.essentials.display.measures import better

_HEIGHT = 150  # pixels of a chart
_WIDE, _NARROW = 370, 190  # of the losses, and of any other
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 8, 24  # around the curves, for the labels of the axes
_MOST_DOTS = 24  # a curve of more points has a dot at its end only
_SAME_SCALE = 10.0  # the largest values of measures on one axis differ by no more than this
# Each has a contrast of 3:1 or more on white and on #111 (WCAG 2.1, 1.4.11).
_COLORS = ("#3b78c2", "#d1782b", "#4b9b62", "#a05bb5", "#8a7f2c", "#c2577a")
_SETS = {"train": _COLORS[0], "valid": _COLORS[1], "val": _COLORS[1], "test": _COLORS[2]}
# An image knows nothing of the page it is on: a grey that has 4.2:1 on white and on #111.
_INK_OF_IMAGE = "#767676"
_RATES = {"lr", "learning_rate"}

Points = Sequence[tuple[float, float]]  # (step, value); a value that is not finite is a gap


@dataclass(frozen=True)
class Axis:
    """Curves that are drawn in one chart."""

    title: str  # what they measure
    names: tuple[str, ...]
    wide: bool = False  # the chart that is looked at first


def charts_html(curves: dict[str, Points], *, as_images: bool = False) -> str:
    """Draw `{name: [(step, value), ...]}` as charts side by side, each with its newest values above it.

    As images they survive where a page takes SVG elements out: JupyterLab does so in a notebook that was written
    elsewhere, until its reader trusts it.
    """
    finite = {name: _finite(points) for name, points in curves.items()}
    steps = [step for points in curves.values() for step, _ in points]
    drawn, told = [], []
    for axis in axes(curves):
        heading = _heading(axis, curves)
        is_level = axis.title == "learning rate" and len({value for _, value in _all(axis, finite)}) == 1
        if is_level or not _all(axis, finite):
            told.append(heading)
            continue
        width = _WIDE if axis.wide else _NARROW
        chart = _chart(axis, curves, (min(steps), max(steps)), width)
        chart = _as_image(chart, width, _in_words(axis, curves)) if as_images else chart
        drawn.append(f'<div style="max-width:100%">{heading}{chart}</div>')
    lines = "".join(f'<div style="margin-top:4px">{heading}</div>' for heading in told)
    charts = f'<div style="display:flex;flex-wrap:wrap;gap:6px 22px">{"".join(drawn)}</div>' if drawn else ""
    return charts + lines


def axes(curves: dict[str, Points]) -> list[Axis]:
    """Say which curves share a chart: the losses, then other measures by their scale, then the learning rate."""
    largest = {name: max((abs(value) for _, value in _finite(points)), default=0.0) for name, points in curves.items()}
    rates = [name for name in curves if name in _RATES or name.endswith("_lr")]
    losses = [name for name in curves if name.lower().replace("_", " ").split()[-1:] == ["loss"]]
    scale = max((largest[name] for name in losses), default=0.0)
    groups: list[list[str]] = []
    for name in curves:
        if name in rates or name in losses:
            continue
        if losses and better(name) == "low" and _same_scale(largest[name], scale):
            losses.append(name)
            continue
        near = (group for group in groups if all(_same_scale(largest[name], largest[other]) for other in group))
        group = next(near, None)
        if group is None:
            groups.append(group := [])
        group.append(name)
    found = [Axis("loss", tuple(losses), wide=True)] if losses else []
    found += [Axis(_title(group), tuple(group), wide=not losses and not index) for index, group in enumerate(groups)]
    return found + ([Axis("learning rate", tuple(rates))] if rates else [])


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about so many round numbers from `low` to `high`."""
    span = (high - low) / count
    if not span > 0 or not math.isfinite(span):
        return [low]
    power = 10.0 ** math.floor(math.log10(span))
    each = next((power * factor for factor in (1, 2, 5, 10) if power * factor >= span), power * 10)
    first = math.ceil(low / each - 1e-9)
    return [float(f"{number * each:.12g}") for number in range(first, math.floor(high / each + 1e-9) + 1)]


def number(value: float) -> str:
    """Write a value with four digits that count."""
    return f"{value:.4g}"


def _tick(value: float) -> str:
    """Write a round number in the five characters that stand beside an axis."""
    if value and not 0.001 <= abs(value) < 10_000:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def _same_scale(one: float, other: float) -> bool:
    return max(one, other) <= _SAME_SCALE * min(one, other) or one == other


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(step, value) for step, value in points if math.isfinite(value)]


def _all(axis: Axis, finite: dict[str, list]) -> list[tuple[float, float]]:
    return [point for name in axis.names for point in finite[name]]


def _split(name: str) -> tuple[str, str]:
    """Return which set a measure is of, and what it measures."""
    first, _, rest = name.partition("_")
    return (first, rest) if first in _SETS and rest else ("", name)


def _title(names: Sequence[str]) -> str:
    stems = {_split(name)[1] for name in names}
    return stems.pop().replace("_", " ") if len(stems) == 1 else "metrics"


def _colors(names: Sequence[str]) -> dict[str, str]:
    """Give each curve of a chart a colour of its own, the training set's blue and the validation set's orange."""
    colors: dict[str, str] = {}
    for name in names:
        if (own := _SETS.get(_split(name)[0])) and own not in colors.values():
            colors[name] = own
    for index, name in enumerate(names):
        free = [color for color in _COLORS if color not in colors.values()] or [_COLORS[index % len(_COLORS)]]
        colors.setdefault(name, free[0])
    return colors


def _heading(axis: Axis, curves: dict[str, Points]) -> str:
    """Return what a chart measures, and the newest value of each of its curves."""
    one_stem = len({_split(name)[1] for name in axis.names}) == 1
    colors, parts = _colors(axis.names), []
    for name in axis.names:
        of_set, stem = _split(name)
        shown = of_set if one_stem else name
        if axis.title == "learning rate" and len(axis.names) == 1:
            shown = ""
        value = curves[name][-1][1]
        text = number(value) if math.isfinite(value) else f'<span style="color:#dc4c4c">{value}</span>'
        label = f'<span style="opacity:.7">{html.escape(shown)}</span> ' if shown else ""
        parts.append(
            f'<span style="white-space:nowrap"><span style="color:{colors[name]}">&#9679;</span> {label}'
            f'<span style="font-variant-numeric:tabular-nums">{text}</span></span>'
        )
    title = f'<span style="font-weight:600">{html.escape(axis.title)}</span>'
    return f'<div style="display:flex;flex-wrap:wrap;gap:0 12px">{title}{"".join(parts)}</div>'


def _chart(axis: Axis, curves: dict[str, Points], steps: tuple[float, float], width: int) -> str:
    finite = [point for name in axis.names for point in _finite(curves[name])]
    values = [value for _, value in finite]
    low, high = min(values), max(values)
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # a level line runs through the middle
        low, high = low - (abs(low) / 2 or 1.0), high + (abs(high) / 2 or 1.0)
    (left, right), across, down = steps, width - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(step: float) -> float:
        return _LEFT + (step - left) / (right - left or 1) * across

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * down

    grid, labels, bottom = [], [], _HEIGHT - _BOTTOM
    for tick in ticks(low, high, 4):
        grid.append(f"M{_LEFT} {y(tick):.1f}H{width - _RIGHT}")
        labels.append(f"<text x='{_LEFT - 6}' y='{y(tick) + 3.5:.1f}' text-anchor='end'>{_tick(tick)}</text>")
    labels.append(f"<text x='{_LEFT}' y='{bottom + 16}'>step</text>")
    for tick in ticks(left, right, max(2, across // 65)):
        if x(tick) > _LEFT + 40:  # where the word stands
            anchor = "middle" if x(tick) < width - 24 else "end"
            labels.append(f"<text x='{x(tick):.1f}' y='{bottom + 16}' text-anchor='{anchor}'>{tick:,.12g}</text>")
    colors = _colors(axis.names)
    lines = "".join(_line(curves[name], x, y, colors[name]) for name in axis.names)
    return (
        f"<svg width='{width}' height='{_HEIGHT}' viewBox='0 0 {width} {_HEIGHT}' role='img' "
        f"aria-label='{html.escape(axis.title, quote=True)} over steps' font-size='11' fill='currentColor' "
        f"style='display:block;max-width:100%;font-family:inherit'>"
        f"<path d='{''.join(grid)}' stroke='currentColor' stroke-opacity='.13' fill='none'/>"
        f"<path d='M{_LEFT} {bottom}H{width - _RIGHT}' stroke='currentColor' stroke-opacity='.4' fill='none'/>"
        f"<g opacity='.65'>{''.join(labels)}</g>{lines}</svg>"
    )


def _as_image(chart: str, width: int, alt: str) -> str:
    """Make an image of a chart, in colours of its own."""
    alone = chart.replace("<svg ", "<svg xmlns='http://www.w3.org/2000/svg' ", 1)
    alone = alone.replace("currentColor", _INK_OF_IMAGE).replace("font-family:inherit", "font-family:sans-serif")
    alone = alone.replace("<g opacity='.65'>", "<g>")
    source = f"data:image/svg+xml;base64,{base64.b64encode(alone.encode()).decode()}"
    return f'<img src="{source}" alt="{html.escape(alt)}" width="{width}" height="{_HEIGHT}" style="max-width:100%">'


def _in_words(axis: Axis, curves: dict[str, Points]) -> str:
    """Say what a chart shows."""
    drawn = [(name, points) for name in axis.names if (points := _finite(curves[name]))]
    said = [f"{name} from {number(points[0][1])} to {number(points[-1][1])}" for name, points in drawn]
    return f"{axis.title} over steps: {', '.join(said)}"


def _line(points: Points, x, y, color: str) -> str:
    path, dots, open_ = [], [], False
    for step, value in points:
        if not math.isfinite(value):
            open_ = False
            continue
        path.append(f"{'L' if open_ else 'M'}{x(step):.1f} {y(value):.1f}")
        if not open_:
            path.append("h0")  # a round dot, where no line follows
        dots.append((x(step), y(value)))
        open_ = True
    shown = dots if len(dots) <= _MOST_DOTS else dots[-1:]
    circles = "".join(f"<circle cx='{cx:.1f}' cy='{cy:.1f}' r='2.4'/>" for cx, cy in shown)
    return (
        f"<path d='{''.join(path)}' fill='none' stroke='{color}' stroke-width='1.7' stroke-linejoin='round' "
        f"stroke-linecap='round'/><g fill='{color}'>{circles}</g>"
    )
