"""Images, and beside each what a network says of it: the probability of every label, true ones filled."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpukit.essentials.show import WrongValue, figure_inputs
from tpukit.essentials.show import house_style as look

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def show_predictions(
    images: Any,
    labels: Any,
    probabilities: Any,
    *,
    names: Sequence[str] | Mapping[str, str] | None = None,
    limit: int = 8,
    top: int = 10,
    channel: int | None = None,
) -> Figure:
    """Draw images, and beside each its predicted probabilities as bars, filled where the label is true.

    `images`, `names` and `channel` as for `show_batch`; `labels` `(N, L)` of zeros and ones, or `(N,)` class numbers;
    `probabilities` `(N, L)` in [0, 1], not logits. Where there are more than `top` labels, each image shows `top` of
    them: its true labels first, then the most probable.

    Raises:
        TypeError: `images` is not an array, or has a dtype that cannot be drawn.
        ValueError: the shapes do not match one another, or a probability is outside [0, 1].
    """
    import numpy as np

    figure_inputs.at_least_one(limit=limit, top=top)
    pixels, caption = figure_inputs.pixels(images, limit, "show_predictions", channel)
    truth, chances = _predictions(labels, probabilities, len(images))
    words = figure_inputs.label_names(names, chances.shape[1])

    shown, columns = min(top, len(words)), min(2, len(pixels))
    rows = -(-len(pixels) // columns)
    block = (look.WIDTH - look.MARGIN) / 2 - look.MARGIN  # an image, the names beside it and their bars
    side = 1.8
    longest = min(max(map(len, words)), look.letters(block - side - 1.4))
    words = [textwrap.shorten(name, longest, placeholder="…") for name in words]
    text = longest * look.SMALL * 0.59 / 72 + 0.35
    height = max(side * look.aspect(pixels), 0.19 * shown)

    with look.style():
        up = 2 * look.MARGIN + rows * (height + 1.6 * look.MARGIN) + look.lines([caption])
        figure = look.new_figure(columns * (block + look.MARGIN) + look.MARGIN, up)
        for index, image in enumerate(pixels):
            row, column = divmod(index, columns)
            left = look.MARGIN + column * (block + look.MARGIN)
            bottom = up - look.MARGIN - (row + 1) * height - row * 1.6 * look.MARGIN
            look.image_at(figure, image, left, bottom, side, height)
            chosen = np.lexsort((-chances[index], ~truth[index]))[:shown]  # the true ones, then the most probable
            chosen.sort()  # in the order of the labels, so that images can be compared
            high = min(height, 0.21 * shown)
            axes = look.axes_at(figure, left + side + text, bottom + height - high, block - side - text - 0.3, high)
            _bars(axes, [words[label] for label in chosen], chances[index, chosen], truth[index, chosen])
        look.note(figure, f"● filled: the label is true    ○ hollow: it is not    dotted: 0.5    {caption}")
        said = _in_words(words, truth, chances, len(pixels))
        look.describe(figure, f"{caption}, with their predicted probabilities. {said}")
    return figure


def _predictions(labels: Any, probabilities: Any, images: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which labels are true as `(N, L)` bool, and the probabilities as `(N, L)` in [0, 1]."""
    import numpy as np

    chances = figure_inputs.as_array(probabilities)
    if chances.ndim != 2 or len(chances) != images or not chances.shape[1]:
        fact = f"probabilities are (N, L), one row for each of {images} images, got {chances.shape}"
        raise WrongValue(fact, fix="pass them for the same images; for one label, probabilities[:, None]")
    if not ((chances >= 0) & (chances <= 1)).all():
        fact = f"probabilities lie in [0, 1], got [{chances.min():.4g}, {chances.max():.4g}]"
        raise WrongValue(fact, fix="if they are logits, pass torch.sigmoid(logits); if nan, look at the loss first")
    truth, count = figure_inputs.label_array(labels, images), chances.shape[1]
    if truth.ndim == 1 and truth.max() < count:
        truth = np.eye(count)[truth]
    if truth.shape != chances.shape:
        found = f"{truth.shape[1]} columns" if truth.ndim == 2 else f"class {truth.max()}"
        fact = f"probabilities are of {count} labels, labels have {found}"
        raise WrongValue(fact, fix="pass the same labels to both, in the same order")
    return truth.astype(bool), chances


def _in_words(words: list[str], truth: np.ndarray, chances: np.ndarray, count: int) -> str:
    """Say which labels are true and which are predicted, for the first `count` images."""

    def some(labels: Iterable[int], index: int) -> str:
        return ", ".join(f"{words[label]} {chances[index, label]:.2f}" for label in labels) or "none"

    parts = []
    for index in range(count):
        wrong = [label for label in (chances[index] > 0.5).nonzero()[0] if not truth[index, label]]
        false = f"; above 0.5 and not true: {some(wrong, index)}" if wrong else ""
        parts.append(f"{index + 1}: true are {some(truth[index].nonzero()[0], index)}{false}")
    return ". ".join(parts)


def _bars(axes: Axes, names: list[str], chances: np.ndarray, truth: np.ndarray) -> None:
    places = range(len(names))
    axes.barh(places, 1, height=0.62, color=look.GRID, linewidth=0)
    fill = [look.COLORS[0] if true else look.PAPER for true in truth]
    axes.barh(places, chances, height=0.62, color=fill, edgecolor=look.COLORS[0], linewidth=1)
    axes.axvline(0.5, color=look.MUTED, linewidth=0.7, linestyle=(0, (1, 2)))
    axes.set(xlim=(0, 1), ylim=(len(names) - 0.5, -0.5), xticks=[])
    axes.set_yticks(places, [f"{name} {'●' if true else '○'}" for name, true in zip(names, truth, strict=True)])
    axes.tick_params(length=0, pad=3)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    for label, place, chance, true in zip(axes.get_yticklabels(), places, chances, truth, strict=True):
        label.set_color(look.INK if true else look.MUTED)
        axes.text(1.03, place, f"{chance:.2f}", va="center", fontsize=look.SMALL - 0.5, color=label.get_color())
