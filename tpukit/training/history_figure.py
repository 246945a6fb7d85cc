"""Draw the curves of a run in a figure.

{"train_loss": [0.9, 0.5], "valid_loss": [1.0, 0.6], "lr": [0.1, 0.1], "base_rate_loss": 0.8}

_read           finds the axis, the series and the single numbers, and notes all other entries
_what_varies    "lr" stays the same, so it becomes a text below the panels
_kind           train_loss and valid_loss are both "loss", so they share a panel
_draw_panel     draws curves, rings and dotted lines; base_rate_loss is a dotted line in "loss"
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tpukit.essentials.display import InvalidTypeError, InvalidValueError, better, figure_inputs
from tpukit.essentials.display import figure_style as look

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES = ("step", "epoch")  # columns for the horizontal axis; "step" is preferred
# Words in the names of columns, as in `valid_loss` or `test_auroc`.
_VALIDATION = ("valid", "val", "validation", "test", "eval", "dev")
_SPLITS = ("train", "training", *_VALIDATION)
_NOISY = 50  # points; longer series are drawn pale, with their moving mean on top
_MOST_MARKED = 12  # points; a longer series has no marks
_DOTTED = (0, (1, 2))


class _Measure(NamedTuple):
    """The name and unit with which the figure shows a measure of `fit`."""

    words: str
    unit: str
    factor: float  # the value in this unit is the value in the history times this factor


_MEASURES = {
    "lr": _Measure("learning rate", "", 1.0),
    "memory": _Measure("peak memory", "GiB", 2.0**-30),
    "data wait": _Measure("waiting for batches", "% of the time", 100.0),
    "samples per second": _Measure("speed", "samples/s", 1.0),
    "images per second": _Measure("speed", "images/s", 1.0),
    "seconds": _Measure("time", "seconds", 1.0),
    "mfu": _Measure("MFU", "% of the peak", 100.0),
    "compiles": _Measure("compiled so far", "graphs", 1.0),
}


class _Points(NamedTuple):
    """A series: positions on the horizontal axis and values, (N,) float64 each."""

    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class _History:
    """The numbers of a history that can be drawn.

    Attributes:
        axis: name of the horizontal axis.
        series: the curves by name.
        levels: single numbers by name.
        notes: for each entry that cannot be drawn, its name and the reason.
    """

    axis: str
    series: dict[str, _Points]
    levels: dict[str, float]
    notes: list[str]


def show_history(history: Any) -> Figure:
    """Draw the curves of a run: the loss in a large panel, other measures in small panels.

    Series share a panel if their names differ only in the split, such as train, valid or test. So
    `train_loss` and `valid_loss` share a panel, and `lr` has its own panel. The horizontal axis is
    "step", or "epoch" if there is no "step"; a row without this column is left out. If a series and
    the axis differ in length, the points are spread evenly, and the last point is at the end. For
    example, five validation losses of a run of 1,000 steps are drawn at 200, 400, ... 1,000.

    - A single number is drawn as a dotted line. `base_rate_loss` is drawn in the panel of `loss`,
      because its name ends with "loss".
    - A series of 50 points or more is pale, under a moving mean over a twentieth of its length.
    - A ring marks the best validation point, if tpukit knows that low values (loss, error, ...) or
      high values (auroc, accuracy, f1, ...) of the measure are better.
    - A value that stays the same, such as a constant learning rate, is written below the panels. A
      loss or a score is always a curve. The text also names the entries that cannot be drawn.

    Args:
        history: the `History` of `fit`; a dict of series, `{"train_loss": [...], "valid_loss":
            [...]}`; a list of rows, `[{"epoch": 1, "train_loss": 0.4}, ...]`; a DataFrame; or any
            object with a list of rows as its attribute `rows`.

    Returns:
        a figure of matplotlib.

    Raises:
        TypeError: `history` has another type.
        ValueError: `history` contains no series of numbers.
    """
    read = _read(history)
    speed = _Measure("speed", f"{getattr(history, 'of', 'samples')}/s", 1.0)
    measures = _MEASURES | {"samples per second": speed}
    series, constant = _what_varies(read.series, measures)
    # Panels by measure, each with its series by name.
    panels: dict[str, dict[str, _Points]] = {}
    for name, points in series.items():
        panels.setdefault(_kind(name), {})[name] = points
    # Losses first, then other scores, then speed and the like; within each, as in the history.
    kinds = sorted(panels, key=lambda kind: (kind.split()[-1] != "loss", better(kind) is None))
    # All panels have the same horizontal axis, from the first to the last point of all series.
    ends = []
    for x, _ in series.values():
        ends += [x[0], x[-1]]
    levels = dict(read.levels)

    with look.style():
        columns = math.ceil((len(kinds) - 1) / 2)  # of small panels, two in each
        figure = look.new_figure(min(look.WIDTH, 7 + 3 * columns), 3.9, layout="constrained")
        places = _grid(figure, len(kinds), columns)
        for kind, place in zip(kinds, places, strict=True):
            axes = figure.add_subplot(place)
            axes.set_xlim(_limits(ends))
            measure = kind.split()[-1:]
            # A single number belongs to the first panel with the same last word, such as "loss".
            known = [name for name in levels if _kind(name).split()[-1:] == measure]
            own_levels = {name: levels.pop(name) for name in known}
            panel = _Panel(kind, panels[kind], own_levels, measures)
            _draw_panel(axes, panel, read.axis)
        notes = list(read.notes)
        notes += [f"{name} is one number: {value:.4g}" for name, value in levels.items()]
        below = []
        if constant:
            below.append(f"throughout: {', '.join(constant)}")
        if notes:
            below.append(f"not drawn: {'; '.join(notes)}")
        if below:
            text = textwrap.fill("    ".join(below), look.letters(figure.get_figwidth()))
            figure.supxlabel(text, x=0.01, ha="left", fontsize=look.SMALL - 1, color=look.MUTED)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        # The alternative text of the figure, for screen readers.
        across = f"{read.axis} {min(ends):.4g} to {max(ends):.4g}"
        spans = []
        for name, (_, y) in series.items():
            spans.append(f"{name.replace('_', ' ')} from {y[0]:.4g} to {y[-1]:.4g}")
        look.describe(figure, f"Curves, {across}. {'; '.join([*spans, *below])}")
    return figure


def _limits(ends: list[float]) -> tuple[float, float]:
    """Return the limits of the horizontal axis, with a margin of 3 % on both sides."""
    span = max(ends) - min(ends)
    if not span:
        return ends[0] - 0.5, ends[0] + 0.5
    return min(ends) - 0.03 * span, max(ends) + 0.03 * span


def _grid(figure: Figure, count: int, columns: int) -> list:
    """Return the grid cell of each panel: a large panel, then columns of two small panels."""
    rows = max(1, min(2, count - 1))
    large = 2.2 if columns < 2 else 1.7  # times the width of a small panel
    grid = figure.add_gridspec(rows, 1 + columns, width_ratios=[large] + [1] * columns)
    places = [grid[:, 0]]
    for small in range(count - 1):
        column = 1 + small // 2
        # A last small panel without a partner gets the whole column.
        is_alone = small % 2 == 0 and small == count - 2
        places.append(grid[:, column] if is_alone else grid[small % 2, column])
    return places


def _what_varies(
    series: dict[str, _Points], measures: dict[str, _Measure]
) -> tuple[dict[str, _Points], list[str]]:
    """Return the series that vary, in the units of the figure, and a text for each other series."""
    import numpy as np

    moving: dict[str, _Points] = {}
    constant: list[str] = []
    for name, (x, y) in series.items():
        plain = _Measure(name.replace("_", " "), "", 1.0)
        words, unit, factor = measures.get(_kind(name), plain)
        y = y * factor
        known = y[np.isfinite(y)]
        # A loss that stays the same is news, so it is drawn.
        if better(name) is None and (known == known[0]).all():
            constant.append(f"{words} {known[0]:.4g} {unit}".strip())
        else:
            moving[name] = _Points(x, y)
    if not moving:
        return series, []
    return moving, constant


@dataclass(frozen=True)
class _Panel:
    """The contents of a panel.

    Attributes:
        kind: the measure, such as "loss".
        series: the curves by name.
        levels: the dotted lines by name.
        measures: names and units by measure.
    """

    kind: str
    series: dict[str, _Points]
    levels: dict[str, float]
    measures: dict[str, _Measure]


def _draw_panel(axes: Axes, panel: _Panel, axis: str) -> None:
    is_alone = len(panel.series) == 1
    below = axis
    # The first two colours are those of training and validation.
    other_colors = iter(look.COLORS[2:] * len(panel.series))
    for name, points in panel.series.items():
        split = _split(name)
        # Training has the first colour and validation the second in every panel.
        if split in ("train", "valid", "val") or is_alone:
            color = look.COLORS[split in _VALIDATION]
        else:
            color = next(other_colors)
        label = None if is_alone else split or name
        _draw_curve(axes, points, color=color, label=label)
        if split in _VALIDATION and better(panel.kind):
            best = _ring(axes, points, better(panel.kind), color)
            below = f"{axis}    {best}"
    for name, value in panel.levels.items():
        # "base_rate_loss" in the panel of "loss" is labelled "base rate".
        words = name.replace("_", " ").removesuffix(panel.kind).strip() or name
        label = f"{words} {value:.4g}"
        axes.axhline(value, color=look.MUTED, linewidth=1, linestyle=_DOTTED, label=label)
    words = panel.kind
    if is_alone:
        words = next(iter(panel.series)).replace("_", " ")
    words, unit, _ = panel.measures.get(panel.kind, _Measure(words, "", 1.0))
    axes.set_title(words, loc="left", fontweight="bold")
    axes.set_xlabel(below)
    axes.set_ylabel(unit)
    axes.margins(y=0.12)  # room for the ring at the top
    axes.xaxis.get_major_locator().set_params(integer=True)  # steps and epochs are whole numbers
    axes.yaxis.set_major_formatter("{x:.4g}")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best", handlelength=1.2)


def _draw_curve(axes: Axes, points: _Points, *, color: str, label: str | None) -> None:
    """Draw a series; a long series is drawn pale, with its moving mean on top."""
    x, y = points
    line = y
    if len(y) >= _NOISY:
        axes.plot(x, y, color=color, alpha=0.28, linewidth=0.7)
        # The pale line below shows the noise.
        line = _moving_mean(y)
    marks = {}
    if len(y) <= _MOST_MARKED:
        marks = {"marker": "o", "markersize": 4}
    axes.plot(x, line, color=color, linewidth=1.6, label=label, **marks)


def _ring(axes: Axes, points: _Points, direction: str, color: str) -> str:
    """Mark the best point with a ring; return a text with its value and position."""
    import numpy as np

    find_best = {"low": np.nanargmin, "high": np.nanargmax}[direction]
    best = int(find_best(points.y))
    x = points.x[best]
    y = points.y[best]
    axes.plot(x, y, "o", markersize=10, markerfacecolor="none", markeredgecolor=color)
    return f"○ best {y:.4g} at {x:.4g}"


def _moving_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over a centred window of a twentieth of the series; nan is left out."""
    import numpy as np

    window = np.ones(2 * (len(values) // 40) + 1)  # an odd length, so that it has a centre
    known = np.isfinite(values)
    total = np.convolve(np.where(known, values, 0), window, "same")
    count = np.convolve(known, window, "same")  # smaller at the ends and near nan
    return np.where(known, total / np.maximum(count, 1), np.nan)


def _split(name: str) -> str:
    """Return the split in the name of a column: "valid" for valid_loss; "" if there is none."""
    return next((word for word in name.lower().split("_") if word in _SPLITS), "")


def _kind(name: str) -> str:
    """Return the measure in the name of a column: "loss" for train_loss and for loss_valid."""
    return " ".join(word for word in name.lower().split("_") if word not in _SPLITS) or name


def _read(history: Any) -> _History:
    """Return the series and the single numbers of a history."""
    import numpy as np

    columns = _columns(history)
    curves, levels, notes = _by_kind(columns)
    axis = next((name for name in _AXES if name in curves), None)
    places = curves.get(axis)
    curves = {name: y for name, y in curves.items() if name not in _AXES}
    if not curves:
        raise _nothing_to_draw(columns, levels, notes)
    if places is None:
        # No column "step" or "epoch": number the points of the longest series.
        longest = max(map(len, curves.values()))
        places = np.arange(1.0, 1 + longest)
        axis = "epoch" if longest < 50 else "step"  # few runs have 50 epochs
    series = {}
    for name, y in curves.items():
        x = places
        if len(y) != len(places):
            x = _spread(places, len(y))
        known = np.isfinite(y)
        if isinstance(columns[name], _Column):
            # A row without this measure is not a gap in the curve. A row without a step has no
            # place on the axis.
            known &= np.isfinite(x)
            x = x[known]
            y = y[known]
        elif not known.all():
            notes.append(f"{name}: {(~known).sum()} of {len(y)} values are nan or infinite")
        if len(y):
            series[name] = _Points(x, y)
        else:
            notes.append(f"{name} has no value in a row with a {axis}")
    if not series:
        raise _nothing_to_draw(columns, levels, notes)
    return _History(axis, series, levels, notes)


def _by_kind(columns: Mapping) -> tuple[dict[str, np.ndarray], dict[str, float], list[str]]:
    """Return the series of a history, its single numbers, and a note for each other column.

    A column without any finite value gets a note, too.
    """
    import numpy as np

    curves = {}
    levels = {}
    notes = []
    for name, values in columns.items():
        y = _numbers(values)
        # A single number, such as the loss of a baseline, becomes a dotted line.
        if getattr(values, "ndim", None) == 0:  # a scalar of numpy or torch
            values = values.item()
        if isinstance(values, (int, float)):
            levels[name] = float(values)
        elif y is None:
            notes.append(f"{name} is not a series")
        elif not np.isfinite(y).any():
            notes.append(f"{name} has no finite value")
        else:
            curves[name] = y
    return curves, levels, notes


def _nothing_to_draw(columns: Mapping, levels: dict, notes: list[str]) -> InvalidValueError:
    fix = 'pass {"train_loss": [0.41, 0.36], "valid_loss": [0.44, 0.40]}'
    # A dict of histories, such as {"fold 0": {...}}: recommend to draw one of them.
    inside = [name for name, value in columns.items() if _is_history(value)]
    if inside:
        fix = f"pass history[{inside[0]!r}]"
    found = "; ".join(notes + [f"{name} is one number" for name in levels])
    return InvalidValueError(
        "the history holds no series of numbers to draw",
        found=found or "nothing in it",
        fix=fix,
    )


class _Column(list):
    """A column collected from all rows; its value is None if a row does not have it."""


def _columns(history: Any) -> Mapping[str, Any]:
    """Return the columns of a history of any supported type, by name."""
    history = getattr(history, "rows", history)
    # A DataFrame, of pandas or with the same interface.
    if hasattr(history, "columns") and hasattr(history, "to_dict"):
        return {str(name): _Column(values) for name, values in history.to_dict("list").items()}
    if isinstance(history, Mapping):
        return {str(name): values for name, values in history.items()}
    if not _is_history(history):
        fix = 'pass {"train_loss": [...]} or [{"epoch": 1, "train_loss": ...}, ...]'
        if hasattr(history, "results"):
            fix = "pass what rank 0 returned: run.results[0]"
        is_empty_list = isinstance(history, list) and not history
        given = "an empty list" if is_empty_list else type(history).__name__
        fact = f"show_history draws a dict of series or a list of rows, got {given}"
        raise InvalidTypeError(fact, fix=fix)
    keys: dict[Any, None] = {}  # in the order in which they first appear
    for row in history:
        # A row has numbers. An entry with a whole series means that this is a list of histories.
        if any(_numbers(value) is not None for value in row.values()):
            raise InvalidTypeError(
                f"show_history draws one history, got a list of {len(history)}",
                fix="pass one history of the list; for run = launch(...), pass run.results[0]",
            )
        keys |= dict.fromkeys(row)
    return {str(key): _Column(row.get(key) for row in history) for key in keys}


def _is_history(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(row, Mapping) for row in value)
    return isinstance(value, Mapping)


def _numbers(values: Any) -> np.ndarray | None:
    """Return a series as an array (N,) of floats, with nan for None; None if it is no series."""
    import numpy as np

    if hasattr(values, "dtype"):
        array = figure_inputs.as_array(values)
        is_series = array.ndim == 1 and len(array) > 0 and array.dtype.kind in "biuf"
        return array.astype(float) if is_series else None
    if not isinstance(values, (list, tuple)) or not values:
        return None
    try:
        return np.array([np.nan if value is None else float(value) for value in values])
    # float() of a tensor of several values raises RuntimeError.
    except (TypeError, ValueError, RuntimeError):
        return None


def _spread(places: np.ndarray, count: int) -> np.ndarray:
    """Return `count` positions that are spread evenly over the axis.

    The last position is the end of the axis, because the measure of an epoch belongs to its end.
    """
    import numpy as np

    # The axis begins one gap before its first point: after the first of five epochs of 10 steps
    # each, at step 10, a fifth of the run is done.
    gap = places[1] - places[0] if len(places) > 1 else 1
    from_start = [places[0] - gap, *places]
    shares = np.arange(1, count + 1) / count
    return np.interp(shares, np.arange(len(places) + 1) / len(places), from_start)
