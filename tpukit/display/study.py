"""A study with a slider: one slice large, an overview of all beside it.

The slices are encoded once, as JPEG, into HTML with a few lines of script. No kernel takes part when the slider moves:
it also moves while the kernel trains, in a notebook that was saved and opened again, and in a page of nbconvert. A
slider of ipywidgets would move in none of these. Where a page runs no scripts, the overview is what is left.
"""

from __future__ import annotations

import base64
import html
import io
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpukit.display import figure_inputs
from tpukit.display.house_style import COLORS

if TYPE_CHECKING:
    import numpy as np

_LARGE = 384  # pixels of the page that the large slice is wide
_LARGEST = 512  # pixels of a slice as it is stored; more would be seen by nobody
_QUALITY = 85  # of the JPEG: a grey slice of 256 x 256 takes about 12 KB

# Every study of the page with this identifier is set up once; JupyterLab can show one output in two places.
_SCRIPT = """
for (const study of document.querySelectorAll('[data-study="ID"]:not([data-ready])')) {
  study.dataset.ready = "yes";
  const part = (name) => study.querySelector(`[data-part="${name}"]`);
  const slices = [...part("overview").children], slider = part("slider"), large = part("slice");
  const show = (number) => {
    const image = slices[number].querySelector("img");
    [slider.value, large.src, large.alt, part("words").textContent] = [number, image.src, image.alt, image.alt];
    slices.forEach((slice, other) => slice.style.outline = other === number ? "3px solid COLOR" : "none");
  };
  slider.addEventListener("input", () => show(Number(slider.value)));
  slices.forEach((slice, number) => slice.addEventListener("click", () => show(number)));
  part("stage").style.display = "block";
  show(Number(slider.value));
}
"""


class Study:
    """The slices of a study as HTML with a slider, made by `show_study`."""

    def __init__(self, images: list[str], words: list[str], marked: list[int], mark: str, overview: int, caption: str):
        self._images, self._words, self._marked, self._mark = images, words, marked, mark
        self._overview, self._caption = overview, caption

    def __repr__(self) -> str:
        marks = f"; {self._mark} on {len(self._marked)} of them" if self._mark else ""
        return f"Study: {self._caption}{marks}"

    def _repr_html_(self) -> str:
        count = len(self._images)
        start = self._marked[len(self._marked) // 2] if self._marked else count // 2
        seen = {round(index * (count - 1) / max(self._overview - 1, 1)) for index in range(self._overview)}
        slices = "".join(self._slice(index, index in seen) for index in range(count))
        bar = "".join(
            f'<span style="flex:1;background:{COLORS[1] if index in self._marked else "rgba(128,128,128,.25)"}"></span>'
            for index in range(count)
        )
        says = f'<span style="color:{COLORS[1]}">&#9632;</span> {html.escape(self._mark)}' if self._mark else ""
        name = uuid.uuid4().hex
        stage = (
            f'<div data-part="stage" style="display:none;flex:none;width:{_LARGE}px">'
            f'<img data-part="slice" alt="" style="width:{_LARGE}px;max-width:100%;display:block">'
            f'<div style="display:flex;height:6px;margin:8px 7px 0">{bar}</div>'
            f'<input data-part="slider" type="range" min="0" max="{count - 1}" value="{start}" '
            'aria-label="slice" style="width:100%;margin:3px 0">'
            f'<div data-part="words"></div><div style="opacity:.75;font-size:12px">{says}</div></div>'
        )
        columns = "grid-template-columns:repeat(4,minmax(70px,120px));gap:8px"
        return (
            f'<div data-study="{name}" style="font-size:13px;line-height:1.35">'
            f'<div style="display:flex;flex-wrap:wrap;gap:20px;align-items:flex-start">{stage}'
            f'<div data-part="overview" style="display:grid;{columns}">{slices}</div></div>'
            f'<div style="font-size:12px;opacity:.75;padding-top:6px">{html.escape(self._caption)}</div></div>'
            f"<script>{_SCRIPT.replace('ID', name).replace('COLOR', COLORS[3])}</script>"
        )

    def _slice(self, index: int, seen: bool) -> str:
        words = html.escape(self._words[index])
        edge = COLORS[1] if index in self._marked else "transparent"
        return (
            f'<div style="display:{"block" if seen else "none"};cursor:pointer">'
            f'<img src="data:image/jpeg;base64,{self._images[index]}" alt="{words}" title="{words}" '
            f'style="width:100%;display:block;box-sizing:border-box;border-bottom:4px solid {edge}">'
            f'<div style="font-size:11px">{index + 1}</div></div>'
        )


def show_study(
    images: Any,
    labels: Any = None,
    *,
    names: Sequence[str] | Mapping[str, str] | None = None,
    channel: int | None = None,
    limit: int = 300,
    overview: int = 12,
) -> Study:
    """Show the slices of a study with a slider, and an overview of some of them beside it.

    The notebook keeps all slices that the slider reaches: about 12 KB for a grey one of 256 x 256 pixels.

    Args:
        images: `(N, C, H, W)` in the order of the body, as for `show_batch`.
        labels: `(N, L)` of zeros and ones, or `(N,)` class numbers. Slices with the first label are marked in orange.
        names: the words for each label, or a dict from label to words.
        channel: draws that channel alone, in grey.
        limit: slices that the slider reaches, at most; of more, every second, third, ... is taken.
        overview: slices that are shown beside it, and where a page runs no scripts.

    Raises:
        TypeError: `images` is not an array, or has a dtype that cannot be drawn.
        ValueError: `images` has another shape, is empty, or has a value that is nan or infinite; labels or names do
            not match the images; there is no such channel.
    """
    figure_inputs.at_least_one(limit=limit, overview=overview)
    count, step = _length(images), 1
    words, marked, mark = [""] * count, [], ""
    if labels is not None:
        words = [", ".join(of_one) or "none" for of_one in figure_inputs.titles(labels, names, count)]
        array = figure_inputs.label_array(labels, count)
        if array.ndim == 2:
            (mark, *_) = figure_inputs.label_names(names, array.shape[1])
            marked = array[:, 0].nonzero()[0].tolist()
    step = max(1, -(-count // limit))
    kept = range(0, count, step)
    pixels, caption = figure_inputs.pixels(images[::step], len(kept), "show_study", channel)
    words = [f"slice {index + 1} of {count}{': ' * bool(words[index])}{words[index]}" for index in kept]
    caption = f"{len(kept):,} of {count:,} slices{caption[caption.index(',') :]}"
    marked = [place for place, index in enumerate(kept) if index in set(marked)]
    return Study([_jpeg(image) for image in pixels], words, marked, mark, min(overview, len(kept)), caption)


def _length(images: Any) -> int:
    """Return how many images there are; 1 for what has no length, which `figure_inputs.pixels` refuses."""
    shape = getattr(images, "shape", ())
    return int(shape[0]) if len(shape) else 1


def _jpeg(pixels: np.ndarray) -> str:
    """Encode `(H, W)` or `(H, W, 3)`, uint8 or floats in [0, 1], as JPEG in base64."""
    import numpy as np
    from PIL import Image

    whole = pixels if pixels.dtype == "uint8" else np.round(pixels * 255).astype(np.uint8)
    image, buffer = Image.fromarray(whole), io.BytesIO()
    image.thumbnail((_LARGEST, _LARGEST))
    image.save(buffer, format="JPEG", quality=_QUALITY)
    return base64.b64encode(buffer.getvalue()).decode()
