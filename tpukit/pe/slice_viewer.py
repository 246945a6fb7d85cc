"""Show an exam with a slider: one large slice, and an overview of other slices.

The slices are encoded once, as JPEG, into HTML with a few lines of JavaScript. The slider needs no
kernel: it moves while the kernel trains, in a saved notebook, and in a page made by nbconvert. A
slider of ipywidgets would work in none of these. A page without scripts shows only the overview.

On the slider, each slice has the width 1. The width of slices that are left out is divided between
their two neighbours. With slices 1, 3 and 4 of an exam:

    numbers   1          3        4
    edges     0    1.5   3   4      (in slices, from the beginning of the first slice)

By these edges the script finds the slice for a position of the slider.
"""

from __future__ import annotations

import base64
import html
import io
import itertools
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpukit.essentials.display import figure_inputs
from tpukit.essentials.display import figure_style as look

if TYPE_CHECKING:
    import numpy as np

_LARGE = 384  # CSS pixels; the width of the large slice
_VIEW = 256  # CSS pixels; the width of each view, if several are side by side
_LARGEST = 512  # pixels; a larger slice is reduced before it is stored
_QUALITY = 85  # of the JPEG; a grey slice of 256 x 256 pixels takes about 12 KB
_STRIP = 56  # CSS pixels; the height of the curves above the slider

# JupyterLab can show an output twice, so the script sets up each element with this identifier once.
# It stops the propagation of the keys that it handles, because JupyterLab uses an arrow key in any
# output to go to another cell.
_SCRIPT = """
for (const exam of document.querySelectorAll('[data-study="ID"]:not([data-ready])')) {
  exam.dataset.ready = "yes";
  const part = (name) => exam.querySelector(`[data-part="${name}"]`);
  const slices = [...part("overview").children], slider = part("slider"), large = part("slice");
  const edges = exam.dataset.edges.split(" ").map(Number), length = edges[slices.length];
  const cursor = part("cursor"), jump = part("jump");
  const at = (place) => edges.filter((edge) => edge <= place).length - 1;
  let now;
  const show = (number) => {
    now = Math.min(Math.max(number, 0), slices.length - 1);
    const image = slices[now].querySelector("img"), middle = (edges[now] + edges[now + 1]) / 2;
    slider.value = middle;
    large.src = image.src;
    large.alt = image.alt;
    part("words").textContent = image.alt;
    slices.forEach((slice, other) => {
      slice.style.outline = other === now ? "3px solid COLOR" : "none";
    });
    if (cursor) cursor.style.left = `${100 * middle / length}%`;
  };
  const steps = {
    ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10,
    Home: -slices.length, End: slices.length,
  };
  const goTo = (number) => {
    show(number);
    slider.focus();
  };
  exam.addEventListener("keydown", (event) => {
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    show(now + steps[event.key]);
  });
  slider.addEventListener("input", () => show(at(Number(slider.value))));
  large.addEventListener("click", () => slider.focus());
  slices.forEach((slice, number) => slice.addEventListener("click", () => goTo(number)));
  part("track").addEventListener("click", (event) => {
    const box = part("track").getBoundingClientRect();
    goTo(at((event.clientX - box.left) / box.width * length));
  });
  if (jump) jump.addEventListener("click", () => goTo(Number(jump.dataset.slice)));
  part("stage").style.display = "block";
  show(at(Number(slider.value)));
}
"""


@dataclass(frozen=True)
class Curve:
    """A curve of one number per slice, drawn above the slider."""

    name: str  # for the legend
    values: Sequence[float]  # one per slice, 0 to 1; nan leaves a gap
    color: str = look.COLORS[0]
    filled: bool = False  # True for a filled area below the values, without a line
    dashed: bool = False  # True for a thin dashed line


@dataclass(repr=False, eq=False)
class Study:
    """The slices of an exam as HTML with a slider, made by `show_slices`.

    Attributes:
        images: JPEGs in base64, one per slice. A JPEG may have several views of a slice, side by
            side.
        words: a description of each slice.
        marked: the indices in `images` of the slices that are marked in orange.
        mark: the meaning of the mark; "" if no slice can be marked.
        overview: the indices in `images` of the small slices beside the slice that the slider
            selects; a page without scripts shows only the small slices.
        caption: the text at the bottom.
        numbers: the number of each slice in its series, from 1.
        views: the titles of the views in each image; empty for a single view.
        view_notes: a short text for each view, such as its window; empty for no texts.
        has_sides: True if R and L beside the titles mark the patient's right and left.
        scale: the length of the scale bar, `SCALE_BAR` mm, as a share of a view's width; 0 for no
            scale bar.
        curves: the curves above the slider.
        jump: the index of the slice to which a button goes; None for no button.
        above, below: HTML to insert above the slices and below the slider.
    """

    images: list[str]
    words: list[str]
    marked: list[int]
    mark: str
    overview: Sequence[int]
    caption: str
    numbers: Sequence[int]
    views: Sequence[str] = ()
    view_notes: Sequence[str] = ()
    has_sides: bool = False
    scale: float = 0.0
    curves: Sequence[Curve] = ()
    jump: int | None = None
    above: str = ""
    below: str = ""

    def __repr__(self) -> str:
        marks = ""
        if self.mark:
            marks = f"; {self.mark} on {len(self.marked)} of them"
        return f"Study: {self.caption}{marks}"

    def _repr_html_(self) -> str:
        name = uuid.uuid4().hex
        edges = " ".join(f"{edge:g}" for edge in self._edges())
        slices = "".join(self._slice(index) for index in range(len(self.images)))
        if self.views:
            display = "block"  # the large slice is wide, so the overview is below it
            columns = 6
        else:
            display = "flex"
            columns = 4
        row = f"display:{display};flex-wrap:wrap;gap:20px;align-items:flex-start"
        cells = f"repeat({columns},minmax(70px,120px))"
        grid = f"display:grid;grid-template-columns:{cells};gap:8px"
        caption = "font-size:12px;opacity:.75;padding-top:6px"
        script = _SCRIPT.replace("ID", name).replace("COLOR", look.COLORS[3])
        return (
            f'<div data-study="{name}" data-edges="{edges}" tabindex="0" '
            'style="font-size:13px;line-height:1.35">'
            f"{self.above}"
            f'<div style="{row}">{self._stage()}'
            f'<div data-part="overview" style="{grid}">{slices}</div></div>'
            f'<div style="{caption}">{html.escape(self.caption)}</div></div>'
            f"<script>{script}</script>"
        )

    def _edges(self) -> list[float]:
        """Return where each slice begins on the slider, and where the last one ends.

        The unit is the distance of two slices. Two slices beside a gap extend to its middle.
        """
        first = self.numbers[0] - 0.5
        last = self.numbers[-1] + 0.5
        between = [(below + above) / 2 for below, above in itertools.pairwise(self.numbers)]
        return [edge - first for edge in (first, *between, last)]

    def _stage(self) -> str:
        """Return HTML for the large slice and its slider, hidden until the script runs."""
        edges = self._edges()
        start = self._first_shown()
        middle = (edges[start] + edges[start + 1]) / 2
        width = _VIEW * len(self.views) or _LARGE
        outer = f"display:none;flex:none;max-width:100%;width:{width}px;margin-bottom:12px"
        titles = [self._view_title(index) for index in range(len(self.views))]
        return (
            f'<div data-part="stage" style="{outer}">'
            f'<div style="display:flex;font-size:12px;opacity:.75">{"".join(titles)}</div>'
            '<img data-part="slice" alt="" '
            f'style="width:{width}px;max-width:100%;display:block">'
            f"{self._scale_bar()}{self._track()}"
            f'<input data-part="slider" type="range" min="0" max="{edges[-1]:g}" step="any" '
            f'value="{middle:g}" data-lm-suppress-shortcuts="true" aria-label="slice" '
            'style="width:100%;margin:3px 0">'
            f'{self._button()}<div data-part="words"></div>'
            f'<div style="opacity:.75;font-size:12px">{self._legend()}</div>{self.below}</div>'
        )

    def _view_title(self, index: int) -> str:
        """Return HTML for the title and the note of a view, between the letters R and L."""
        note = self.view_notes[index] if self.view_notes else ""
        right, left = ("R", "L") if self.has_sides else ("", "")
        parts = [right, html.escape(self.views[index]), html.escape(note), left]
        spans = "".join(f"<span>{part}</span>" for part in parts)
        style = "flex:1;display:flex;gap:4px;justify-content:space-between;margin:0 2px"
        return f'<span style="{style}">{spans}</span>'

    def _scale_bar(self) -> str:
        if not self.scale:
            return ""
        share = 100 * self.scale / max(1, len(self.views))
        style = f"width:{share:.2f}%;border-top:2px solid currentColor;font-size:11px"
        return f'<div style="{style};white-space:nowrap">{SCALE_BAR} mm</div>'

    def _first_shown(self) -> int:
        """Return the index of the slice at which the slider starts."""
        if self.jump is not None:
            return self.jump
        if self.marked:
            return sorted(self.marked)[len(self.marked) // 2]
        return len(self.images) // 2

    def _button(self) -> str:
        """Return HTML for a button that goes to the slice `jump`; "" if `jump` is None."""
        if self.jump is None:
            return ""
        return (
            f'<button data-part="jump" data-slice="{self.jump}" '
            'style="float:right;font:inherit;cursor:pointer">to the highest</button>'
        )

    def _legend(self) -> str:
        """Return HTML for the legend: the color and the meaning of the mark and of each curve."""
        meanings = [(curve.color, curve.name) for curve in self.curves]
        if self.mark:
            meanings.insert(0, (look.COLORS[1], self.mark))
        entries = []
        for color, name in meanings:
            square = f'<span style="color:{color}">&#9632;</span>'
            label = f"{square} {html.escape(name)}"
            entries.append(f'<span style="white-space:nowrap">{label}</span>')
        return "&emsp;".join(entries)

    def _track(self) -> str:
        """Return HTML for the strip above the slider: a bar with the marks, and the curves."""
        edges = self._edges()
        pieces = []
        for index, (start, end) in enumerate(itertools.pairwise(edges)):
            color = look.COLORS[1] if index in self.marked else "rgba(128,128,128,.25)"
            pieces.append(f'<span style="flex:{end - start:g};background:{color}"></span>')
        bar = f'<div style="display:flex;height:6px">{"".join(pieces)}</div>'
        if not self.curves:
            return f'<div data-part="track" style="margin:8px 7px 0">{bar}</div>'
        # SVG draws in this order, so plain lines come last to be on top.
        in_order = sorted(self.curves, key=lambda curve: not (curve.filled or curve.dashed))
        lines = "".join(_draw_curve(curve, edges) for curve in in_order)
        dashes = "stroke='currentColor' stroke-opacity='.4' stroke-dasharray='2 3'"
        half = f"<path d='M0 .5H{edges[-1]:g}' {dashes} {_THIN}/>"
        return (
            '<div data-part="track" style="margin:8px 7px 0;position:relative;cursor:pointer">'
            f"<svg viewBox='0 0 {edges[-1]:g} 1' preserveAspectRatio='none' "
            f"style='display:block;width:100%;height:{_STRIP}px;overflow:visible'>"
            f"{half}{lines}</svg>{bar}"
            '<div data-part="cursor" style="position:absolute;top:0;bottom:0;width:0;'
            'border-left:1.5px solid currentColor;pointer-events:none"></div></div>'
        )

    def _slice(self, index: int) -> str:
        """Return HTML for a slice of the overview.

        Other slices are here too, but hidden; the script reads the images of all slices from here.
        """
        words = html.escape(self.words[index])
        edge = look.COLORS[1] if index in self.marked else "transparent"
        display = "block" if index in self.overview else "none"
        # Of several views, the overview shows only the middle one. JupyterLab's sanitizer allows
        # these CSS properties.
        views = max(1, len(self.views))
        shift = 100 * (views // 2)
        place = f"width:{100 * views}%;max-width:none;margin-left:-{shift}%;display:block"
        return (
            f'<div style="display:{display};cursor:pointer">'
            '<div style="overflow:hidden">'
            f'<img src="data:image/jpeg;base64,{self.images[index]}" alt="{words}" '
            f'title="{words}" style="{place}"></div>'
            f'<div style="height:4px;background:{edge}"></div>'
            f'<div style="font-size:11px">{self.numbers[index]}</div></div>'
        )


SCALE_BAR = 50  # mm
_THIN = "fill='none' vector-effect='non-scaling-stroke'"


def _draw_curve(curve: Curve, edges: Sequence[float]) -> str:
    """Return a curve as an SVG path: x in slices by `edges`, y from 0, the bottom, to 1."""
    steps = []
    is_drawing = False
    for (start, end), value in zip(itertools.pairwise(edges), curve.values, strict=True):
        if math.isnan(value):
            is_drawing = False
            continue
        height = f"{1 - value:.3f}"  # y in SVG grows downwards
        middle = f"{(start + end) / 2:g}"
        if curve.filled:
            steps.append(f"M{start:g} 1V{height}H{end:g}V1Z")
        elif is_drawing:
            steps.append(f"L{middle} {height}")
        else:
            # The line of length 0 shows a value between two gaps as a dot.
            steps.append(f"M{middle} {height}h0")
        is_drawing = True
    return f"<path d='{''.join(steps)}' {_paint(curve)}/>"


def _paint(curve: Curve) -> str:
    """Return the SVG attributes for the fill or the line of a curve."""
    if curve.filled:
        return f"fill='{curve.color}' fill-opacity='.35'"
    width = "stroke-width='2' stroke-linecap='round'"
    if curve.dashed:
        width = "stroke-width='1.5' stroke-dasharray='4 3'"
    return f"stroke='{curve.color}' {width} {_THIN}"


def show_slices(
    images: Any,
    labels: Any = None,
    *,
    names: Sequence[str] | Mapping | None = None,
    channel: int | None = None,
    limit: int = 300,
    overview: int = 12,
) -> Study:
    """Show the slices of an exam with a slider, and an overview of some of them.

    After a click on the viewer, the arrow keys move the slider. The notebook stores all slices of
    the slider, about 12 KB per grey slice of 256 x 256 pixels. If the slider or the overview leaves
    slices out, it prefers to keep slices with the first label.

    Args:
        images: `(N, C, H, W)` in the order of the body, as for `show_batch`.
        labels: `(N, L)` zeros and ones, or `(N,)` class numbers; None for no labels. With `(N, L)`,
            slices with the first label are marked in orange.
        names: the names of the labels, as for `show_batch`.
        channel: the only channel to draw, in grey; None for all channels.
        limit: the most slices on the slider, 1 or more. A longer exam is divided into this many
            stretches, and the slider has one slice of each.
        overview: the number of small slices beside the slice that the slider selects, 1 or more; a
            page without scripts shows only the small slices.

    Returns:
        The viewer, which a notebook displays.

    Raises:
        TypeError: `images` is not an array, or its dtype cannot be drawn.
        ValueError: `images` has another shape, is empty, or contains nan or infinity; labels or
            names do not match the images; the channel does not exist.
    """
    figure_inputs.at_least_one(limit=limit, overview=overview)
    # `figure_inputs.pixels` raises later if the images have no length.
    count = len(images) if getattr(images, "shape", ()) else 1
    titles = [""] * count
    marked = set()
    mark = ""
    if labels is not None:
        names_of_each = figure_inputs.titles(labels, names, count)
        titles = [", ".join(present) or "none" for present in names_of_each]
        array = figure_inputs.label_array(labels, count)
        if array.ndim == 2:
            mark = figure_inputs.label_names(names, array.shape[1])[0]
            marked = set(array[:, 0].nonzero()[0].tolist())
    kept = highest([index in marked for index in range(count)], limit)
    some = images if len(kept) == count else images[kept]
    pixels, caption = figure_inputs.pixels(some, len(kept), "show_slices", channel)
    is_marked = [index in marked for index in kept]
    # Without the number of images, which counts only the kept ones.
    form = caption[caption.index(",") :]
    return Study(
        images=[as_jpeg(image) for image in pixels],
        words=[_describe(index, count, titles[index]) for index in kept],
        marked=[place for place, yes in enumerate(is_marked) if yes],
        mark=mark,
        overview=highest(is_marked, overview),
        caption=f"{len(kept):,} of {count:,} slices{form}",
        numbers=[index + 1 for index in kept],
    )


def _describe(index: int, count: int, title: str) -> str:
    words = f"slice {index + 1} of {count}"
    return f"{words}: {title}" if title else words


def highest(values, stretches: int) -> list[int]:
    """Divide values into stretches of equal length; return the index of each stretch's maximum.

    Of equal values, the one nearest to the middle of the stretch counts.

    Args:
        values: (N,) numbers.
        stretches: the number of stretches; a number above N means N.
    """
    import numpy as np

    values = np.asarray(values, float)
    chosen = []
    if not len(values):
        return chosen
    for part in np.array_split(np.arange(len(values)), min(stretches, len(values))):
        from_middle = np.abs(part - part.mean())
        best = np.lexsort((from_middle, -values[part]))[0]  # by value, then by distance
        chosen.append(int(part[best]))
    return chosen


def as_jpeg(pixels: np.ndarray, largest: tuple[int, int] = (_LARGEST, _LARGEST)) -> str:
    """Encode an image as JPEG in base64, reduced to at most `largest`.

    Args:
        pixels: `(H, W)` or `(H, W, 3)`, uint8 or floats in [0, 1].
        largest: the largest width and height in pixels; smaller images are not resized.
    """
    import numpy as np
    from PIL import Image

    if pixels.dtype != "uint8":
        pixels = np.round(pixels * 255).astype(np.uint8)
    image = Image.fromarray(pixels)
    image.thumbnail(largest)
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=_QUALITY)
    return base64.b64encode(buffer.getvalue()).decode()
