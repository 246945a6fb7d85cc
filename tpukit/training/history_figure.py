"""The curves of a run, in one figure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tpukit.essentials.display import InvalidTypeError, InvalidValueError, better, figure_inputs
from tpukit.essentials.display import figure_style as look

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES = (
    "step",
    "epoch",
)  # candidates for the horizontal axis of a history; the first that it has is taken
_VALIDATION = ("valid", "val", "validation", "test", "eval", "dev")
_SPLITS = ("train", "training", *_VALIDATION)
_NOISY = 50  # points; longer series are drawn pale, with their moving mean on top
# What the measures of fit are called on a figure: words, unit, and how many of it one is.
_MEASURES = {
    "lr": ("learning rate", "", 1.0),
    "memory": ("peak memory", "GiB", 2.0**-30),
    "data wait": ("waiting for batches", "% of the time", 100.0),
    "samples per second": ("speed", "samples/s", 1.0),
    "images per second": ("speed", "images/s", 1.0),
    "seconds": ("time", "seconds", 1.0),
    "compiles": ("compiled so far", "graphs", 1.0),
}


def show_history(history: Any) -> Figure:
    """Draw what varied in a run: the loss in a large panel, every other measure in a small one.

    `history` is a dict of series (`{"train_loss": [...], "valid_loss": [...]}`), a list of rows (`[{"epoch": 1,
    "train_loss": 0.4}, ...]`), a DataFrame, or anything with `.rows`. The horizontal axis is "step", or "epoch" where
    there is no "step". A series shorter than the axis is spread over it evenly, with its last point at the end: five
    validation losses of a run of 1000 steps are drawn at 200, 400, ... 1000.

    Series share a panel when their names differ only in train / valid / val / test / eval: `train_loss` and
    `valid_loss` do, `lr` has its own. A single number is a dotted line across the panel whose name its own name ends
    with (`base_rate_loss` in `loss`). A series of 50 points or more is drawn pale, under a moving mean over a twentieth
    of its length. A ring marks the best validation point, for measures known to be better when low (loss, error, ...)
    or high (auroc, accuracy, f1, ...). What stayed the same, such as a constant learning rate, is a line of text under
    the figure, and what cannot be drawn is named there; only a loss or a score is drawn though it does not move.

    Raises:
        TypeError: `history` is none of these.
        ValueError: `history` contains no series of numbers.
    """
    axis, series, levels, notes = _series(history)
    measures = _MEASURES | {
        "samples per second": ("speed", f"{getattr(history, 'of', 'samples')}/s", 1.0)
    }
    series, constant = _what_varies(series, measures)
    panels: dict[str, dict] = {}
    for name, points in series.items():
        panels.setdefault(_kind(name), {})[name] = points
    # Losses first, then other measures of quality, then speed and the like, each as they came.
    kinds = sorted(panels, key=lambda kind: (kind.split()[-1] != "loss", better(kind) is None))
    stack = min(2, len(kinds) - 1)  # small panels, at most two in a column
    beside = -(-(len(kinds) - 1) // 2)
    ends = [end for x, _ in series.values() for end in (x[0], x[-1])]
    span = max(ends) - min(ends)
    limits = (
        (min(ends) - 0.03 * span, max(ends) + 0.03 * span)
        if span
        else (ends[0] - 0.5, ends[0] + 0.5)
    )

    with look.style():
        figure = look.new_figure(min(look.WIDTH, 7 + 3 * beside), 3.9, layout="constrained")
        grid = figure.add_gridspec(
            stack or 1, 1 + beside, width_ratios=[2.2 if beside < 2 else 1.7] + [1] * beside
        )
        for index, kind in enumerate(kinds):
            column, row = (0, slice(None)) if index == 0 else ((index + 1) // 2, (index - 1) % 2)
            if index == len(kinds) - 1 and index % 2 == 1:
                row = slice(None)  # the last of an odd number has its column to itself
            axes = figure.add_subplot(grid[row, column])
            axes.set_xlim(limits)
            known = {
                name: levels.pop(name)
                for name in list(levels)
                if _kind(name).split()[-1:] == kind.split()[-1:]
            }
            _curves(axes, kind, panels[kind], known, axis, measures)
        notes += [f"{name} is one number: {value:.4g}" for name, value in levels.items()]
        below = [f"throughout: {', '.join(constant)}"] * bool(constant)
        below += [f"not drawn: {'; '.join(notes)}"] * bool(notes)
        if below:
            text = textwrap.fill("    ".join(below), look.letters(figure.get_figwidth()))
            figure.supxlabel(text, x=0.01, ha="left", fontsize=look.SMALL - 1, color=look.MUTED)
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        spans = [
            f"{name.replace('_', ' ')} from {y[0]:.4g} to {y[-1]:.4g}"
            for name, (_, y) in series.items()
        ]
        across = f"{axis} {min(ends):.4g} to {max(ends):.4g}"
        look.describe(figure, f"Curves, {across}. {'; '.join([*spans, *below])}")
    return figure


def _what_varies(series: dict[str, tuple], measures: dict) -> tuple[dict[str, tuple], list[str]]:
    """Return the series that are worth a curve, in the units of the figure, and in words those that stay the same."""
    import numpy as np

    moving, constant = {}, []
    for name, (x, y) in series.items():
        words, unit, factor = measures.get(_kind(name), (name.replace("_", " "), "", 1.0))
        y = y * factor
        known = y[np.isfinite(y)]
        if better(name) is None and (known == known[0]).all():  # a loss that stays the same is news
            constant.append(f"{words} {known[0]:.4g} {unit}".strip())
        else:
            moving[name] = x, y
    return (moving, constant) if moving else (series, [])


def _curves(
    axes: Axes,
    kind: str,
    series: dict[str, tuple],
    levels: dict[str, float],
    axis: str,
    measures: dict,
):
    import numpy as np

    find_best = {"low": np.nanargmin, "high": np.nanargmax}.get(better(kind))
    alone, below = len(series) == 1, axis
    rest = iter(look.COLORS[2:] * len(series))
    for name, (x, y) in series.items():
        split = _split(name)
        color = (
            look.COLORS[split in _VALIDATION]
            if split in ("train", "valid", "val") or alone
            else next(rest)
        )
        label = "" if alone else split or name
        noisy = len(y) >= _NOISY
        if noisy:
            axes.plot(x, y, color=color, alpha=0.28, linewidth=0.7)
        if find_best and split in _VALIDATION:
            at = int(find_best(y))
            axes.plot(
                x[at], y[at], "o", markersize=10, markerfacecolor="none", markeredgecolor=color
            )
            below = f"{axis}    ○ best {y[at]:.4g} at {x[at]:.4g}"
        marks = {"marker": "o", "markersize": 4} if len(y) <= 12 else {}
        axes.plot(
            x,
            _moving_mean(y) if noisy else y,
            color=color,
            linewidth=1.6,
            label=label or None,
            **marks,
        )
    for name, value in levels.items():
        label = f"{name.replace('_', ' ').removesuffix(kind).strip() or name} {value:.4g}"
        axes.axhline(value, color=look.MUTED, linewidth=1, linestyle=(0, (1, 2)), label=label)
    words, unit, _ = measures.get(
        kind, (next(iter(series)).replace("_", " ") if alone else kind, "", 1.0)
    )
    axes.set_title(words, loc="left", fontweight="bold")
    axes.set_xlabel(below)
    axes.set_ylabel(unit)
    axes.margins(y=0.12)  # room for the ring at the top
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter("{x:.4g}")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best", handlelength=1.2)


def _moving_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean over a centred window, a twentieth of the series long; nan and what lies outside do not count."""
    import numpy as np

    window = np.ones(2 * (len(values) // 40) + 1)
    known = np.isfinite(values)
    total = np.convolve(np.where(known, values, 0), window, "same")
    return np.where(known, total / np.maximum(np.convolve(known, window, "same"), 1), np.nan)


def _split(name: str) -> str:
    return next((word for word in name.lower().split("_") if word in _SPLITS), "")


def _kind(name: str) -> str:
    """Return the kind of measure, a name without its split: train_loss and loss_valid are both loss."""
    return " ".join(word for word in name.lower().split("_") if word not in _SPLITS) or name


def _series(
    history: Any,
) -> tuple[str, dict[str, tuple[np.ndarray, np.ndarray]], dict[str, float], list[str]]:
    """Return the name of the axis, the series as `{name: (x, y)}`, single numbers, and notes on the rest."""
    import numpy as np

    columns = _columns(history)
    numbers = {name: _numbers(values) for name, values in columns.items()}
    notes = [
        f"{name} has no finite value"
        for name, y in numbers.items()
        if y is not None and not np.isfinite(y).any()
    ]
    curves = {name: y for name, y in numbers.items() if y is not None and np.isfinite(y).any()}
    levels = {
        name: float(value) for name, value in columns.items() if isinstance(value, (int, float))
    }
    notes += [
        f"{name} is not a series" for name, y in numbers.items() if y is None and name not in levels
    ]
    axis = next((name for name in _AXES if name in curves), None)
    places = curves.get(axis)
    curves = {name: y for name, y in curves.items() if name not in _AXES}
    if not curves:
        inside = next((name for name, value in columns.items() if _is_history(value)), None)
        fix = (
            f"pass history[{inside!r}]"
            if inside
            else 'pass {"train_loss": [0.41, 0.36], "valid_loss": [0.44, 0.40]}'
        )
        found = "; ".join(notes + [f"{name} is one number" for name in levels]) or "nothing in it"
        raise InvalidValueError(
            "the history holds no series of numbers to draw", found=found, fix=fix
        )
    if places is None:
        places = np.arange(1.0, 1 + max(map(len, curves.values())))

    drawn = {}
    for name, y in curves.items():
        x, known = places if len(y) == len(places) else _spread(places, len(y)), np.isfinite(y)
        if isinstance(
            columns[name], _Column
        ):  # a row that lacks this measure is not a gap in the curve
            x, y = x[known], y[known]
        elif not known.all():
            notes.append(f"{name}: {(~known).sum()} of {len(y)} values are nan or infinite")
        drawn[name] = x, y
    return axis or ("epoch" if len(places) < 50 else "step"), drawn, levels, notes


class _Column(list):
    """One measure collected from all rows; None where a row does not have it."""


def _columns(history: Any) -> Mapping[str, Any]:
    history = getattr(history, "rows", history)
    if hasattr(history, "columns") and hasattr(history, "to_dict"):
        return {str(name): _Column(values) for name, values in history.to_dict("list").items()}
    if isinstance(history, Mapping):
        return {str(name): values for name, values in history.items()}
    if not _is_history(history):
        fix = 'pass {"train_loss": [...]} or [{"epoch": 1, "train_loss": ...}, ...]'
        if hasattr(history, "results"):
            fix = "pass what rank 0 returned: run.results[0]"
        fact = (
            f"show_history draws a dict of series or a list of rows, got {type(history).__name__}"
        )
        raise InvalidTypeError(fact, fix=fix)
    if any(_numbers(value) is not None for row in history for value in row.values()):
        fact = f"show_history draws one history, got a list of {len(history)}"
        raise InvalidTypeError(
            fact, fix="if they are the results of the ranks, pass run.results[0]"
        )
    keys = dict.fromkeys(key for row in history for key in row)
    return {str(key): _Column(row.get(key) for row in history) for key in keys}


def _is_history(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(row, Mapping) for row in value)
    return isinstance(value, Mapping)


def _numbers(values: Any) -> np.ndarray | None:
    """Return a series as floats, with nan for None; return None where `values` is not a one-dimensional series."""
    import numpy as np

    if hasattr(values, "dtype"):
        array = figure_inputs.as_array(values)
        return (
            array.astype(float)
            if array.ndim == 1 and len(array) and array.dtype.kind in "biuf"
            else None
        )
    if not isinstance(values, (list, tuple)) or not values:
        return None
    try:
        return np.array([np.nan if value is None else float(value) for value in values])
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ):  # RuntimeError: float() of a tensor of several values
        return None


def _spread(places: np.ndarray, count: int) -> np.ndarray:
    """Spread `count` places evenly over the axis, the last one at its end: a measure of an epoch belongs to its end."""
    import numpy as np

    before = places[0] - (places[1] - places[0] if len(places) > 1 else 1)
    return np.interp(
        np.arange(1, count + 1) / count, np.arange(len(places) + 1) / len(places), [before, *places]
    )
