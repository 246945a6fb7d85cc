"""The look of every figure: colours, type, 150 dots per inch, and the text that stands for it where it is not seen.

A figure is made inside `style()`, which leaves the reader's own matplotlib settings as they are, by `new_figure`:

    with style():
        figure = new_figure(7, 4, layout="constrained")
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=COLORS[0])
        describe(figure, "A straight line from the origin to one.")
    return figure

It is returned, not shown: as the last line of a cell it appears once, and pyplot does not know of it.
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

# An opaque background, slightly darker than white so that it does not glare in a dark notebook. Not transparent: the
# grey that has a contrast of 4.5:1 on white has only 2.6:1 on Colab's dark page.
PAPER, INK, MUTED, RULE, GRID = "#fbfaf8", "#2b2b2b", "#716f6b", "#d9d7d2", "#eeece7"
# Blue, orange, green, light blue, then two for what has more: as lines 2.4:1 or more on the paper, apart in grey too.
COLORS = ("#3b78c2", "#d1782b", "#4b9b62", "#7aa6d6", "#a05bb5", "#8a8782")
WIDTH, MARGIN = 10.0, 0.18  # inches
SMALL, BODY = 8.0, 10.0  # points
DPI = 150  # in the file
_SHOWN = 100  # pixels that an inch takes in a notebook: the others are for screens with finer dots


@contextmanager
def style() -> Iterator[None]:
    """Give a figure the look of all figures while it is made; the reader's settings are restored afterwards."""
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
        "font.family": "DejaVu Sans",  # comes with matplotlib, so widths are the same on every machine
    }
    with matplotlib.rc_context():  # seaborn's set_theme would change the colours "b", "r", ... for the whole session
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**seaborn.axes_style("whitegrid"), **seaborn.plotting_context("paper"), **look})
        yield


def new_figure(width: float, height: float, *, layout: str | None = None) -> Figure:
    """Return an empty figure that a notebook can draw although pyplot does not know it; sizes in inches."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure((width, height), dpi=DPI, layout=layout)
    _let_notebooks_draw(figure)
    # Notebooks crop a figure to what is drawn; this rectangle reaches the edge, so the margins stay.
    figure.add_artist(Rectangle((0, 0), 1, 1, transform=figure.transFigure, facecolor=PAPER, linewidth=0, zorder=-1))
    return figure


def describe(figure: Figure, text: str) -> None:
    """Say what a figure shows, for those who do not see it: one or two sentences, with the numbers that matter.

    In a notebook the text is the `alt` of an HTML image, which JupyterLab and nbconvert prefer to the PNG beside it.
    Metadata of the PNG would be simpler, but JupyterLab 4.6 and the pages of nbconvert 7.17 leave them out
    (jupyter/enhancement-proposals 120); they are set all the same, for what reads them.
    """
    figure.alt = " ".join(text.split())


def style_figure(figure: Figure, alt: str) -> Figure:
    """Give a figure of your own the look of all others, say in words what it shows, and return it, to be shown once.

    As the last line of a cell: `tpukit.style_figure(figure, f"Bars: {waits}")`. pyplot forgets the figure.

    Args:
        figure: of `plt.subplots()`, or any other.
        alt: for those who do not see it: one or two sentences, with the numbers that matter.

    Raises:
        ValueError: `alt` is empty.
    """
    import sys

    if not alt.strip():
        raise InvalidValueError(
            'a figure says in words what it shows, got ""', fix='style_figure(figure, "Bars of ...")'
        )
    figure.set_facecolor(PAPER)
    for axes in figure.axes:
        axes.set_facecolor(PAPER)
        axes.spines[:].set_color(RULE)
        axes.spines[:].set_visible(not axes.images)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(color=RULE, labelcolor=MUTED)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set_color(MUTED)
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close(figure)
    _let_notebooks_draw(figure)
    describe(figure, alt)
    return figure


def axes_at(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Add axes at a position given in inches."""
    across, up = figure.get_size_inches()
    return figure.add_axes((left / across, bottom / up, width / across, height / up))


def image_at(figure: Figure, pixels: np.ndarray, left: float, bottom: float, width: float, height: float) -> Axes:
    """Draw an image, (H, W) in grey or (H, W, 3), uint8 or floats in [0, 1], at a position given in inches."""
    axes = axes_at(figure, left, bottom, width, height)
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255 if pixels.dtype == "uint8" else 1)
    axes.set_axis_off()
    axes.set_anchor("N")
    return axes


def note(figure: Figure, text: str) -> None:
    """Write a line of small type in the lower left corner."""
    across, up = figure.get_size_inches()
    figure.text(MARGIN / across, 0.08 / up, text, fontsize=SMALL - 1, color=MUTED, va="bottom")


def letters(inches: float) -> int:
    """Return how many small letters fit into a width: in DejaVu Sans, a letter of a label name is 0.59 em wide."""
    return max(8, int(inches * 72 / (SMALL * 0.59)))


def _let_notebooks_draw(figure: Figure) -> None:
    """Let a notebook draw a figure, with its text: IPython can once pyplot is loaded; before, it asks the object."""
    figure._repr_png_ = functools.partial(_png, figure)
    figure._repr_mimebundle_ = functools.partial(_beside_the_png, figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor=PAPER)
    return buffer.getvalue()


def _beside_the_png(figure: Figure, include=None, exclude=None) -> tuple[dict, dict]:
    """Return what IPython shows beside the PNG, which it asks for itself: HTML with the description, and plain text."""
    alt = getattr(figure, "alt", "")
    # Without a width every dot would be a pixel of the page. Without a height, so that no page distorts the image.
    width = round(figure.get_figwidth() * _SHOWN)
    if not alt:
        return {}, {"image/png": {"width": width}}
    buffer = io.BytesIO()
    # Seen like the PNG, at a fifth to a quarter of its size.
    figure.savefig(buffer, format="webp", facecolor=PAPER, pil_kwargs={"quality": 90})
    source = f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    image = f'<img src="{source}" alt="{html.escape(alt)}" width="{width}" style="max-width:100%;height:auto">'
    return {"text/html": image, "text/plain": alt}, {"image/png": {"width": width, "alt": alt}}


def lines(texts: Iterable[str]) -> float:
    """Return the height in inches that the longest of these texts needs below an image."""
    count = max((text.count("\n") + 1 for text in texts), default=0)
    return count * SMALL * 1.25 / 72 + 0.08 if count else 0.0


def aspect(pixels: np.ndarray) -> float:
    """Return height divided by width, limited so that an image and its neighbours stay legible."""
    return min(max(pixels.shape[1] / pixels.shape[2], 0.2), 2.0)
