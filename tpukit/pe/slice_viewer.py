"""A study with a slider: one slice large, an overview of all beside it.

The slices are encoded once, as JPEG, into HTML with a few lines of script. No kernel takes part when the slider moves:
it also moves while the kernel trains, in a notebook that was saved and opened again, and in a page of nbconvert. A
slider of ipywidgets would move in none of these. Where a page runs no scripts, the overview is what is left.
"""

from __future__ import annotations

import base64
import html
import io
import itertools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpukit.essentials.show import figure_inputs
from tpukit.essentials.show import house_style as look

if TYPE_CHECKING:
    import numpy as np

_LARGE = 384  # pixels of the page that the large slice is wide; a view of several is 256
_LARGEST = 512  # pixels of a slice as it is stored; more would be seen by nobody
_QUALITY = 85  # of the JPEG: a grey slice of 256 x 256 takes about 12 KB
_STRIP = 56  # pixels that the curve along the body is high

# Every study of the page with this identifier is set up once; JupyterLab can show one output in two places. Keys are
# taken here, and go no further: JupyterLab reads arrows as "the next cell" wherever in an output they are pressed.
_SCRIPT = """
for (const study of document.querySelectorAll('[data-study="ID"]:not([data-ready])')) {
  study.dataset.ready = "yes";
  const part = (name) => study.querySelector(`[data-part="${name}"]`);
  const slices = [...part("overview").children], slider = part("slider"), large = part("slice");
  const edges = study.dataset.edges.split(" ").map(Number), length = edges[slices.length];
  const cursor = part("cursor"), jump = part("jump");
  const at = (place) => edges.filter((edge) => edge <= place).length - 1;
  let now;
  const show = (number) => {
    now = Math.min(Math.max(number, 0), slices.length - 1);
    const image = slices[now].querySelector("img"), middle = (edges[now] + edges[now + 1]) / 2;
    [slider.value, large.src, large.alt, part("words").textContent] = [middle, image.src, image.alt, image.alt];
    slices.forEach((slice, other) => slice.style.outline = other === now ? "3px solid COLOR" : "none");
    if (cursor) cursor.style.left = `${100 * middle / length}%`;
  };
  const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10,
                  Home: -slices.length, End: slices.length };
  study.addEventListener("keydown", (event) => {
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    show(now + steps[event.key]);
  });
  slider.addEventListener("input", () => show(at(Number(slider.value))));
  large.addEventListener("click", () => slider.focus());
  slices.forEach((slice, number) => slice.addEventListener("click", () => { show(number); slider.focus(); }));
  part("track").addEventListener("click", (event) => {
    const box = part("track").getBoundingClientRect();
    show(at((event.clientX - box.left) / box.width * length));
    slider.focus();
  });
  if (jump) jump.addEventListener("click", () => { show(Number(jump.dataset.slice)); slider.focus(); });
  part("stage").style.display = "block";
  show(at(Number(slider.value)));
}
"""


@dataclass(frozen=True)
class Curve:
    """Numbers along the body, drawn above the slider."""

    name: str
    values: Sequence[float]  # one for each slice, 0 to 1; nan where there is none
    color: str = look.COLORS[0]
    filled: bool = False  # what is below the line, instead of the line
    dashed: bool = False  # and thin


@dataclass(repr=False, eq=False)
class Study:
    """The slices of a study as HTML with a slider, made by `show_slices`.

    Attributes:
        images: JPEGs in base64, of one slice each, or of one slice through several windows beside each other.
        words: about each slice.
        marked: numbers of the slices that are marked in orange.
        mark: what the mark means; empty for none.
        overview: which slices are shown beside the large one, and where a page runs no scripts.
        caption: below everything.
        views: what stands beside each other in an image; empty where it is one picture.
        curves: drawn above the slider.
        jump: the slice that a button goes to, None for no button.
        above, below: HTML of the caller's, above the slices and below the slider.
        numbers: of the slices in their series, from 1.
    """

    images: list[str]
    words: list[str]
    marked: list[int]
    mark: str
    overview: Sequence[int]
    caption: str
    numbers: Sequence[int]
    views: Sequence[str] = ()
    curves: Sequence[Curve] = ()
    jump: int | None = None
    above: str = ""
    below: str = ""

    def __repr__(self) -> str:
        marks = f"; {self.mark} on {len(self.marked)} of them" if self.mark else ""
        return f"Study: {self.caption}{marks}"

    def _repr_html_(self) -> str:
        count, name, edges = len(self.images), uuid.uuid4().hex, " ".join(f"{edge:g}" for edge in self._edges())
        slices = "".join(self._slice(index, index in self.overview) for index in range(count))
        columns, beside = (4, "flex") if not self.views else (6, "block")
        grid = f"grid-template-columns:repeat({columns},minmax(70px,120px));gap:8px"
        return (
            f'<div data-study="{name}" data-edges="{edges}" tabindex="0" style="font-size:13px;line-height:1.35">'
            f"{self.above}"
            f'<div style="display:{beside};flex-wrap:wrap;gap:20px;align-items:flex-start">{self._stage()}'
            f'<div data-part="overview" style="display:grid;{grid}">{slices}</div></div>'
            f'<div style="font-size:12px;opacity:.75;padding-top:6px">{html.escape(self.caption)}</div></div>'
            f"<script>{_SCRIPT.replace('ID', name).replace('COLOR', look.COLORS[3])}</script>"
        )

    def _edges(self) -> list[float]:
        """Return where along the body each slice begins, and the last one ends; it has the room of those left out."""
        first, last = self.numbers[0] - 0.5, self.numbers[-1] + 0.5
        between = [(below + above) / 2 for below, above in itertools.pairwise(self.numbers)]
        return [edge - first for edge in (first, *between, last)]

    def _stage(self) -> str:
        """Return the large slice with its slider and what belongs to it, all hidden until the script shows it."""
        count, views, edges = len(self.images), len(self.views), self._edges()
        marks = sorted(self.marked)
        start = self.jump if self.jump is not None else marks[len(marks) // 2] if marks else count // 2
        width = 256 * views if views else _LARGE
        titles = "".join(f'<span style="flex:1">{html.escape(view)}</span>' for view in self.views)
        drawn = [(look.COLORS[1], self.mark)] * bool(self.mark) + [(curve.color, curve.name) for curve in self.curves]
        says = [
            f'<span style="white-space:nowrap"><span style="color:{color}">&#9632;</span> {html.escape(what)}</span>'
            for color, what in drawn
        ]
        jump = ""
        if self.jump is not None:
            jump = (
                f'<button data-part="jump" data-slice="{self.jump}" style="float:right;font:inherit;'
                'cursor:pointer">to the highest</button>'
            )
        return (
            f'<div data-part="stage" style="display:none;flex:none;max-width:100%;width:{width}px;margin-bottom:12px">'
            f'<div style="display:flex;font-size:12px;opacity:.75">{titles}</div>'
            f'<img data-part="slice" alt="" style="width:{width}px;max-width:100%;display:block">'
            f"{self._track()}"
            f'<input data-part="slider" type="range" min="0" max="{edges[-1]:g}" step="any" '
            f'value="{(edges[start] + edges[start + 1]) / 2:g}" '
            'data-lm-suppress-shortcuts="true" aria-label="slice" style="width:100%;margin:3px 0">'
            f'{jump}<div data-part="words"></div>'
            f'<div style="opacity:.75;font-size:12px">{"&emsp;".join(says)}</div>{self.below}</div>'
        )

    def _track(self) -> str:
        """Return what runs along the body above the slider: marks, and curves where there are any."""
        edges = self._edges()
        color = [look.COLORS[1] if index in self.marked else "rgba(128,128,128,.25)" for index in range(len(edges) - 1)]
        wide = [end - start for start, end in itertools.pairwise(edges)]
        bar = "".join(
            f'<span style="flex:{room:g};background:{one}"></span>' for room, one in zip(wide, color, strict=True)
        )
        bar = f'<div style="display:flex;height:6px">{bar}</div>'
        if not self.curves:
            return f'<div data-part="track" style="margin:8px 7px 0">{bar}</div>'
        below_first = sorted(self.curves, key=lambda curve: not (curve.filled or curve.dashed))
        lines = "".join(_line(curve, edges) for curve in below_first)
        half = (
            f"<path d='M0 .5H{edges[-1]:g}' stroke='currentColor' stroke-opacity='.4' stroke-dasharray='2 3' {_THIN}/>"
        )
        return (
            '<div data-part="track" style="margin:8px 7px 0;position:relative;cursor:pointer">'
            f"<svg viewBox='0 0 {edges[-1]:g} 1' preserveAspectRatio='none' "
            f"style='display:block;width:100%;height:{_STRIP}px;overflow:visible'>{half}{lines}</svg>{bar}"
            '<div data-part="cursor" style="position:absolute;top:0;bottom:0;width:0;border-left:1.5px solid '
            'currentColor;pointer-events:none"></div></div>'
        )

    def _slice(self, index: int, seen: bool) -> str:
        words = html.escape(self.words[index])
        edge = look.COLORS[1] if index in self.marked else "transparent"
        # Of several windows beside each other the middle one is shown, by properties that JupyterLab's sanitizer keeps.
        views = max(1, len(self.views))
        place = f"width:{100 * views}%;max-width:none;margin-left:-{100 * (views // 2)}%;display:block"
        return (
            f'<div style="display:{"block" if seen else "none"};cursor:pointer">'
            f'<div style="overflow:hidden"><img src="data:image/jpeg;base64,{self.images[index]}" alt="{words}" '
            f'title="{words}" style="{place}"></div><div style="height:4px;background:{edge}"></div>'
            f'<div style="font-size:11px">{self.numbers[index]}</div></div>'
        )


_THIN = "fill='none' vector-effect='non-scaling-stroke'"


def _line(curve: Curve, edges: Sequence[float]) -> str:
    """Draw a curve over slices that begin and end there, from 0 below to 1 above; a gap where there is no number."""
    rooms = [*zip(itertools.pairwise(edges), curve.values, strict=True)]
    if curve.filled:
        bars = "".join(f"M{start:g} 1V{1 - value:.3f}H{end:g}V1Z" for (start, end), value in rooms if value == value)
        return f"<path d='{bars}' fill='{curve.color}' fill-opacity='.35'/>"
    path, open_ = [], False
    for (start, end), value in rooms:
        if value == value:
            path.append(f"{'L' if open_ else 'M'}{(start + end) / 2:g} {1 - value:.3f}{'' if open_ else 'h0'}")
        open_ = value == value
    stroke = "stroke-width='1.5' stroke-dasharray='4 3'" if curve.dashed else "stroke-width='2' stroke-linecap='round'"
    return f"<path d='{''.join(path)}' stroke='{curve.color}' {stroke} {_THIN}/>"


def show_slices(
    images: Any,
    labels: Any = None,
    *,
    names: Sequence[str] | Mapping[str, str] | None = None,
    channel: int | None = None,
    limit: int = 300,
    overview: int = 12,
) -> Study:
    """Show the slices of a study with a slider, and an overview of some of them beside it.

    The arrow keys move it once it was clicked. The notebook keeps all slices that the slider reaches: about 12 KB for a
    grey one of 256 x 256 pixels. Where some are left out, of the slider or the overview, those with the first label
    stay before others.

    Args:
        images: `(N, C, H, W)` in the order of the body, as for `show_batch`.
        labels: `(N, L)` of zeros and ones, or `(N,)` class numbers. Slices with the first label are marked in orange.
        names: the words for each label, or a dict from label to words.
        channel: draws that channel alone, in grey.
        limit: stretches that a longer study is divided into; the slider reaches one slice of each.
        overview: slices that are shown beside it, and where a page runs no scripts.

    Raises:
        TypeError: `images` is not an array, or has a dtype that cannot be drawn.
        ValueError: `images` has another shape, is empty, or has a value that is nan or infinite; labels or names do
            not match the images; there is no such channel.
    """
    figure_inputs.at_least_one(limit=limit, overview=overview)
    count = len(images) if getattr(images, "shape", ()) else 1  # what has no length `figure_inputs.pixels` refuses
    words, marked, mark = [""] * count, [], ""
    if labels is not None:
        words = [", ".join(of_one) or "none" for of_one in figure_inputs.titles(labels, names, count)]
        array = figure_inputs.label_array(labels, count)
        if array.ndim == 2:
            (mark, *_) = figure_inputs.label_names(names, array.shape[1])
            marked = array[:, 0].nonzero()[0].tolist()
    kept = highest([index in marked for index in range(count)], limit)
    some = images if len(kept) == count else images[kept]
    pixels, caption = figure_inputs.pixels(some, len(kept), "show_slices", channel)
    words = [f"slice {index + 1} of {count}{': ' * bool(words[index])}{words[index]}" for index in kept]
    caption = f"{len(kept):,} of {count:,} slices{caption[caption.index(',') :]}"
    marked = [place for place, index in enumerate(kept) if index in set(marked)]
    beside = highest([place in marked for place in range(len(kept))], overview)
    numbers = [index + 1 for index in kept]
    return Study([as_jpeg(image) for image in pixels], words, marked, mark, beside, caption, numbers)


def highest(values, stretches: int) -> list[int]:
    """Return which of (N,) values is the highest in each of so many stretches; the middle one of equal ones."""
    import numpy as np

    parts = np.array_split(np.arange(len(values)), min(stretches, len(values)))
    return [int(part[np.lexsort((np.abs(part - part.mean()), -np.asarray(values, float)[part]))[0]]) for part in parts]


def as_jpeg(pixels: np.ndarray, largest: tuple[int, int] = (_LARGEST, _LARGEST)) -> str:
    """Encode `(H, W)` or `(H, W, 3)`, uint8 or floats in [0, 1], as JPEG in base64, so wide and so high at most."""
    import numpy as np
    from PIL import Image

    whole = pixels if pixels.dtype == "uint8" else np.round(pixels * 255).astype(np.uint8)
    image, buffer = Image.fromarray(whole), io.BytesIO()
    image.thumbnail(largest)
    image.save(buffer, format="JPEG", quality=_QUALITY)
    return base64.b64encode(buffer.getvalue()).decode()
