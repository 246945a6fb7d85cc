"""A figure of where a network looked, beside where the embolus is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tpukit.essentials.show import WrongValue, figure_inputs
from tpukit.essentials.show import house_style as look
from tpukit.pe.activation import attention_in_mask, enlarge
from tpukit.scores import as_array

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STRONGEST = 0.75  # opacity of the map at its highest place
_TITLE = 0.4  # inches


def show_activation(
    images: Any,
    maps: Any,
    masks: Any = None,
    *,
    probabilities: Any = None,
    notes: Sequence[str] | None = None,
    limit: int = 5,
) -> Figure:
    """Draw slices, and below each the same slice under its class activation map, in orange; the mask's edge is green.

    Each map is drawn from nothing to its own highest place, so a faint one looks like a strong one: compare where it
    lies, not how bright it is. Above the lower row stands the share of the map's mass that lies inside the mask, and
    what share of the image the mask is: more than by chance is more than that.

    Args:
        images: (N, C, H, W) as for `show_batch`; `images[:, 1:2]` is the embolism window in grey.
        maps: (N, h, w) of the same images, from `class_activation`.
        masks: (N, H', W') true inside the embolus; None where nobody knows, as on patients.
        probabilities: (N,) what the network said.
        notes: N short texts, one under each column.
        limit: the most images to draw.

    Raises:
        TypeError: `images` is not an array, or has a dtype that cannot be drawn.
        ValueError: the shapes do not match one another.
    """
    figure_inputs.at_least_one(limit=limit)
    pixels, _ = figure_inputs.pixels(images, limit, "show_activation")
    given = {"maps": maps, "masks": masks, "probabilities": probabilities, "notes": notes}
    wrong = {name: len(what) for name, what in given.items() if what is not None and len(what) != len(images)}
    if wrong:
        raise WrongValue(
            f"there are {len(images)} images, and {', '.join(f'{count} {name}' for name, count in wrong.items())}",
            fix="index all of them with the same numbers: images[chosen], maps[chosen], masks[chosen]",
        )
    count, edges = len(pixels), None if masks is None else as_array(masks)[: len(pixels)] > 0.5
    large = enlarge(maps[:count], (count, *pixels.shape[1:3]))
    inside = None if edges is None else attention_in_mask(maps[:count], edges)
    side = min(2.6, (look.WIDTH - look.MARGIN) / count - look.MARGIN)
    below = 0.22 if notes is not None else 0.06

    with look.style():
        across, up = count * (side + look.MARGIN) + look.MARGIN, 2 * (side + _TITLE) + below + 0.34
        figure, said = look.new_figure(across, up), []
        for index, image in enumerate(pixels):
            left = look.MARGIN + index * (side + look.MARGIN)
            first = look.image_at(figure, image, left, up - _TITLE - side, side, side)
            second = look.image_at(figure, image, left, up - 2 * (_TITLE + side), side, side)
            _overlay(second, large[index])
            words = "" if probabilities is None else f"says {as_array(probabilities)[index]:.2f}"
            first.set_title(words, loc="left", fontsize=look.SMALL + 1, color=look.INK, pad=4)
            if inside is not None:
                for axes in (first, second) if edges[index].any() else ():
                    # The mask may be of another size.
                    place = {"origin": "upper", "extent": axes.images[0].get_extent()}
                    axes.contour(edges[index], levels=[0.5], colors=["#7ddf8f"], linewidths=1.1, **place)
                share, area = inside.in_mask[index], inside.mask_area[index]
                text = "no embolus" if area != area else f"{100 * share:.1f} % inside"
                second.set_title(text, loc="left", fontsize=look.SMALL + 1, fontweight="bold", color=look.INK, pad=4)
                chance = "" if area != area else f"chance: {100 * area:.1f} %"
                second.set_title(chance, loc="right", fontsize=look.SMALL, color=look.MUTED, pad=4)
                said.append(f"{words} {text} {chance}".strip())
            if notes is not None:
                small = {"fontsize": look.SMALL, "color": look.MUTED, "transform": second.transAxes}
                second.text(0, -0.03, notes[index], va="top", **small)
        about = "orange: what raised the output, each map to its own maximum"
        about += "    green: the edge of the embolus, as the phantom was drawn" * (masks is not None)
        look.note(figure, about)
        look.describe(figure, f"Class activation maps over {count} slices. {'; '.join(said)}")
    return figure


def _overlay(axes: Axes, large: np.ndarray) -> None:
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    orange = to_rgb(look.COLORS[1])
    colors = LinearSegmentedColormap.from_list("map", [(*orange, 0), (*orange, _STRONGEST), (1, 0.86, 0.5, 0.9)])
    axes.imshow(large, cmap=colors, vmin=0, vmax=large.max() or 1, interpolation="bilinear")
