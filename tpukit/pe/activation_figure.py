"""Draw class activation maps over slices, with the edge of the embolus."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tpukit.essentials.display import InvalidValueError, figure_inputs
from tpukit.essentials.display import figure_style as look
from tpukit.metrics import as_array, check_probabilities
from tpukit.pe.activation import attention_in_mask, enlarge, mean_map

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STRONGEST = 0.75  # the opacity of a map at half of its maximum
_TITLE = 0.4  # inches above each image
_EDGE = "#7ddf8f"
_HEADING = {"loc": "left", "fontsize": look.SMALL + 1, "color": look.INK, "pad": 4}


def show_activation(
    images: Any,
    maps: Any,
    masks: Any = None,
    *,
    probabilities: Any = None,
    notes: Sequence[str] | None = None,
    others: Any = None,
    limit: int = 5,
) -> Figure:
    """Draw slices, and below each the same slice with its class activation map in orange.

    Each map is drawn from 0 to its own maximum, so a weak map looks like a strong one: compare the
    positions and not the brightness. The third row has the mean map of all images. If a map looks
    like the mean map, the network may answer by position. The edge of the mask is green. Two
    numbers are above each map: the share of the map's sum inside the mask, and "chance", which is
    the share of the image inside the mask.

    Args:
        images: (N, C, H, W) as for `show_batch`; `images[:, 1:2]` is the embolism window in grey.
        maps: (N, h, w), the maps of the same images, from `class_activation`.
        masks: (N, H', W'), true inside the embolus; None if it is unknown, as for patients.
        probabilities: (N,), the probabilities that the network predicts; None to omit them.
        notes: N short texts, one under each column; None for no texts.
        others: (M, h, w), the maps from which the mean map is computed, for example the maps of
            more images. The default is `maps`.
        limit: the most images to draw, 1 or more.

    Returns:
        The figure.

    Raises:
        TypeError: `images` is not an array, or its dtype cannot be drawn.
        ValueError: the shapes do not match one another, or a map has negative or infinite values.
    """
    figure_inputs.at_least_one(limit=limit)
    pixels, _ = figure_inputs.pixels(images, limit, "show_activation")
    _check_lengths(images, maps=maps, masks=masks, probabilities=probabilities, notes=notes)
    count = len(pixels)
    if probabilities is not None:
        check_probabilities(as_array(probabilities))
    others = maps if others is None else others
    large = enlarge(maps[:count], (count, *pixels.shape[1:3]))
    mean = enlarge(mean_map(others)[None], (1, *pixels.shape[1:3]))[0]
    edges = None
    inside = None
    if masks is not None:
        edges = as_array(masks)[:count] > 0.5
        inside = attention_in_mask(maps[:count], edges, others)
    # All lengths are in inches.
    side = min(2.6, (look.WIDTH - look.MARGIN) / count - look.MARGIN)
    below = 0.06 if notes is None else 0.22
    width = count * (side + look.MARGIN) + look.MARGIN
    height = 3 * (side + _TITLE) + below + 0.34
    with look.style():
        figure = look.new_figure(width, height)
        descriptions = []
        for index, image in enumerate(pixels):
            left = look.MARGIN + index * (side + look.MARGIN)
            upper, middle, lower = _draw_column(figure, image, left=left, side=side)
            _overlay(middle, large[index])
            _overlay(lower, mean)
            lower.set_title("mean of all maps" if index == 0 else "", **_HEADING)
            words = ""
            if probabilities is not None:
                words = f"probability {as_array(probabilities)[index]:.2f}"
            upper.set_title(words, **_HEADING)
            if inside is not None:
                _draw_edge((upper, middle, lower), edges[index])
                shares = _write_shares(middle, lower, inside.iloc[index])
                descriptions.append(f"{words} {shares}".strip())
            if notes is not None:
                small = {"fontsize": look.SMALL, "color": look.MUTED}
                lower.text(0, -0.03, notes[index], va="top", transform=lower.transAxes, **small)
        legend = "orange: what raised the output, each map to its own maximum"
        if masks is not None:
            legend += "    green: the edge of the embolus, as the phantom was drawn"
            if inside.in_mask.mean() <= inside.mean_map.mean():
                legend += "\nmaps no better than the mean map: the network may answer by position"
        look.note(figure, legend)
        text = "; ".join(descriptions)
        look.describe(figure, f"Class activation maps over {count} slices. {text}")
    return figure


def _check_lengths(images: Any, **others: Any) -> None:
    """Raise ValueError unless each argument is None or has one entry per image."""
    wrong = []
    for name, values in others.items():
        if values is not None and len(values) != len(images):
            wrong.append(f"{len(values)} {name}")
    if wrong:
        everything = "images[chosen], maps[chosen], masks[chosen]"
        raise InvalidValueError(
            f"there are {len(images)} images, and {', '.join(wrong)}",
            fix=f"select the same images from each, by their indices: {everything}",
        )


def _draw_column(figure: Figure, image: np.ndarray, *, left: float, side: float) -> list[Axes]:
    """Draw an image three times, one below the other; return the axes from top to bottom.

    Args:
        figure: the figure.
        image: the pixels.
        left: the distance of the column from the left edge in inches.
        side: width and height of each image in inches.
    """
    height = figure.get_figheight()
    column = []
    for row in (1, 2, 3):
        bottom = height - row * (_TITLE + side)
        place = {"left": left, "bottom": bottom, "width": side, "height": side}
        column.append(look.image_at(figure, image, **place))
    return column


def _overlay(axes: Axes, large: np.ndarray) -> None:
    """Draw a map over the image of the axes: transparent at 0, light orange at the maximum."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    orange = to_rgb(look.COLORS[1])
    steps = [(*orange, 0), (*orange, _STRONGEST), (1, 0.86, 0.5, 0.9)]
    colors = LinearSegmentedColormap.from_list("map", steps)
    highest = large.max() or 1
    axes.imshow(large, cmap=colors, vmin=0, vmax=highest, interpolation="bilinear")


def _draw_edge(both: Sequence[Axes], mask: np.ndarray) -> None:
    """Draw the edge of a mask over the image of each axes; the mask may have another size."""
    if not mask.any():
        return
    for axes in both:
        extent = axes.images[0].get_extent()
        style = {"colors": [_EDGE], "linewidths": 1.1}
        axes.contour(mask, levels=[0.5], origin="upper", extent=extent, **style)


def _write_shares(axes: Axes, lower: Axes, row: Any) -> str:
    """Write the shares of an image above its map and the mean map; return what is written."""
    inside = "no embolus"
    chance = ""
    mean = ""
    if not math.isnan(row.mask_area):
        inside = f"{100 * row.in_mask:.1f} % inside"
        chance = f"chance: {100 * row.mask_area:.1f} %"
        mean = f"mean map: {100 * row.mean_map:.1f} %"
    axes.set_title(inside, fontweight="bold", **_HEADING)
    axes.set_title(chance, loc="right", fontsize=look.SMALL, color=look.MUTED, pad=4)
    lower.set_title(mean, **_HEADING)
    return f"{inside} {chance} {mean}"
