"""The style of every figure: colours, type, 150 dots per inch, and a description in words.

Make a figure with `new_figure` inside `style()`, which restores the reader's matplotlib settings:

    with style():
        figure = new_figure(7, 4, layout="constrained")
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=COLORS[0])
        describe(figure, "A straight line from the origin to one.")
    return figure

Return the figure; do not show it. As the last line of a cell it appears once, and pyplot does not
know it.
"""

from __future__ import annotations

import base64
import functools
import html
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tpukit.essentials.display.errors import InvalidValueError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The background is opaque, and slightly darker than white so that it does not glare in a dark
# notebook. On a transparent one, a grey with a contrast of 4.5:1 on white would have only 2.6:1 on
# Colab's dark page.
PAPER = "#fbfaf8"
INK = "#2b2b2b"
MUTED = "#716f6b"
RULE = "#d9d7d2"
GRID = "#eeece7"
# Blue, orange, green, light blue, violet, grey. As lines they have a contrast of 2.4:1 or more on
# the background.
COLORS = ("#3b78c2", "#d1782b", "#4b9b62", "#7aa6d6", "#a05bb5", "#8a8782")
WIDTH = 10.0  # inches
MARGIN = 0.18  # inches
SMALL = 8.0  # points
BODY = 10.0  # points
DPI = 150  # dots per inch of the image file
# Width of a figure in a notebook: fewer than DPI, so that high-resolution screens show all dots.
_PIXELS_PER_INCH = 100
_POINTS_PER_INCH = 72
_LINE_HEIGHT = SMALL * 1.25 / _POINTS_PER_INCH  # inches
_LETTER_WIDTH = 0.59  # average width of a letter in DejaVu Sans, in em


@contextmanager
def style() -> Iterator[None]:
    """Draw figures of the block in tpukit's style; restore the user's settings afterwards."""
    import matplotlib
    import seaborn

    look = {
        "figure.facecolor": PAPER,
        "axes.facecolor": PAPER,
        "axes.edgecolor": RULE,
        "axes.labelcolor": MUTED,
        "axes.labelsize": SMALL,
        "axes.titlesize": BODY,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid.axis": "y",
        "axes.prop_cycle": matplotlib.cycler(color=COLORS),
        "grid.color": GRID,
        "text.color": INK,
        "text.parse_math": False,  # a name may contain a dollar sign
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelsize": SMALL,
        "ytick.labelsize": SMALL,
        "legend.frameon": False,
        "legend.fontsize": SMALL,
        # matplotlib brings this font, so the widths of texts are the same on every machine.
        "font.family": "DejaVu Sans",
    }
    # Not seaborn's set_theme, which would change the colours "b", "r", ... for the whole session.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(seaborn.axes_style("whitegrid"))
        matplotlib.rcParams.update(seaborn.plotting_context("paper"))
        matplotlib.rcParams.update(look)
        yield


def new_figure(width: float, height: float, *, layout: str | None = None) -> Figure:
    """Return an empty figure, made without pyplot, which a notebook can draw.

    Args:
        width, height: the size in inches.
        layout: a layout of matplotlib, such as "constrained"; None for none.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure((width, height), dpi=DPI, layout=layout)
    _let_notebooks_draw(figure)
    # Notebooks crop a figure to its content. This rectangle fills the figure, so margins remain.
    options = {"facecolor": PAPER, "linewidth": 0, "zorder": -1}
    figure.add_artist(Rectangle((0, 0), width=1, height=1, transform=figure.transFigure, **options))
    return figure


def describe(figure: Figure, text: str) -> None:
    """Set the description of a figure, for readers who cannot see the figure.

    In a notebook the description becomes the `alt` text of an HTML image.

    Args:
        figure: a figure from `new_figure`.
        text: one or two sentences, with the important numbers.
    """
    # JupyterLab and nbconvert prefer the HTML to the PNG in the same output. Metadata of the PNG
    # would be simpler, but JupyterLab 4.6 and the HTML of nbconvert 7.17 ignore it
    # (jupyter/enhancement-proposals 120). The PNG has it anyway, for programs that read it.
    figure.alt = " ".join(text.split())


def style_figure(figure: Figure, alt: str) -> Figure:
    """Apply tpukit's style and a description to a figure of your own, and return it.

    Call it in the last line of a cell: `tpukit.style_figure(figure, f"Bars: {waits}")`. This
    function closes the figure in pyplot, because pyplot would draw it a second time.

    Args:
        figure: a matplotlib figure, for example of `plt.subplots()`.
        alt: a description of the figure for readers who cannot see it: one or two sentences with
            the important numbers.

    Returns:
        The same figure.

    Raises:
        InvalidValueError: `alt` is empty.
    """
    import sys

    if not alt.strip():
        raise InvalidValueError(
            f"alt must be a description of the figure in words, got {alt!r}",
            fix='style_figure(figure, "Bars of the accuracy of three models: 0.91, 0.93, 0.95")',
        )
    figure.set_facecolor(PAPER)
    for axes in figure.axes:
        axes.set_facecolor(PAPER)
        axes.spines[:].set_color(RULE)
        # A plot has lines on the left and below it, an image has none.
        axes.spines[:].set_visible(not axes.images)
        for side in {"top", "right"}.intersection(axes.spines):  # polar axes have no sides
            axes.spines[side].set_visible(False)
        axes.tick_params(color=RULE, labelcolor=MUTED)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set_color(MUTED)
    # An open figure of pyplot would be drawn a second time at the end of the cell.
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close(figure)
    _let_notebooks_draw(figure)
    describe(figure, alt)
    return figure


def axes_at(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Add axes at a position given in inches."""
    across, up = figure.get_size_inches()
    return figure.add_axes((left / across, bottom / up, width / across, height / up))


def image_at(
    figure: Figure, pixels: np.ndarray, left: float, bottom: float, width: float, height: float
) -> Axes:
    """Draw an image into a rectangle given in inches, at the top of the rectangle.

    Args:
        pixels: (H, W) in grey or (H, W, 3), uint8 or floats in [0, 1].
    """
    axes = axes_at(figure, left, bottom=bottom, width=width, height=height)
    white = 255 if pixels.dtype == "uint8" else 1
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=white)
    axes.set_axis_off()
    axes.set_anchor("N")
    return axes


def note(figure: Figure, text: str) -> None:
    """Write a line of small type in the lower left corner."""
    across, up = figure.get_size_inches()
    figure.text(MARGIN / across, 0.08 / up, text, fontsize=SMALL - 1, color=MUTED, va="bottom")


def letters(inches: float) -> int:
    """Return how many letters of a label fit into a width in inches; at least 8."""
    return max(8, int(inches * _POINTS_PER_INCH / (SMALL * _LETTER_WIDTH)))


def _let_notebooks_draw(figure: Figure) -> None:
    """Let a notebook draw a figure, with its description.

    Once pyplot is loaded, IPython has a formatter for figures. Before that, IPython calls the
    methods `_repr_png_` and `_repr_mimebundle_` of the figure.
    """
    figure._repr_png_ = functools.partial(_png, figure)
    figure._repr_mimebundle_ = functools.partial(_html_and_text, figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=PAPER)
    return buffer.getvalue()


def _html_and_text(figure: Figure, include=None, exclude=None) -> tuple[dict, dict]:
    """Return HTML with the description, and plain text; IPython asks for the PNG separately."""
    alt = getattr(figure, "alt", "")
    # Without a width, each dot of the file would be a pixel of the page. The height is left out, so
    # that no page distorts the image.
    width = round(figure.get_figwidth() * _PIXELS_PER_INCH)
    if not alt:
        return {}, {"image/png": {"width": width}}
    buffer = io.BytesIO()
    # WebP at quality 90 looks like the PNG, at a fifth to a quarter of its size.
    figure.savefig(buffer, format="webp", facecolor=PAPER, pil_kwargs={"quality": 90})
    source = f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    style = "max-width:100%;height:auto"
    image = f'<img src="{source}" alt="{html.escape(alt)}" width="{width}" style="{style}">'
    return {"text/html": image, "text/plain": alt}, {"image/png": {"width": width, "alt": alt}}


def text_height(texts: Iterable[str]) -> float:
    """Return the height in inches of the tallest text, to leave this space below each image."""
    count = max((text.count("\n") + 1 for text in texts), default=0)
    if not count:
        return 0.0
    return count * _LINE_HEIGHT + 0.08


def aspect(pixels: np.ndarray) -> float:
    """Return height divided by width of images (n, H, W, ...), limited to 0.2 to 2.0.

    Beyond these limits an image would be too small in one direction to be legible.
    """
    return min(max(pixels.shape[1] / pixels.shape[2], 0.2), 2.0)
