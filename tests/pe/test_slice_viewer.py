"""The slider through a study: what the HTML holds, with a browser that runs its script and without one."""

import base64
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from tpukit import pe
from tpukit.pe import show_slices

SLICES = np.zeros((24, 3, 16, 16), np.uint8)
SLICES[:, 1] = 10 * np.arange(24)[:, None, None]  # each slice is known by its grey
LABELS = np.zeros((24, 10))
LABELS[6:12, 0] = LABELS[:, 2] = 1


def page(*arguments, **options):
    return show_slices(*arguments, **options)._repr_html_()


def greys(text):
    """Return the grey of every slice of the page, decoded."""
    images = re.findall(r"base64,([^\"]+)\"", text)
    return [
        int(np.array(Image.open(io.BytesIO(base64.b64decode(image)))).mean()) for image in images
    ]


def test_every_slice_is_in_the_page_once_and_in_its_order():
    assert greys(page(SLICES, LABELS, channel=1)) == pytest.approx(SLICES[:, 1, 0, 0], abs=1)


def test_without_a_script_twelve_slices_are_shown_and_no_slider():
    text = page(SLICES)
    overview = text[text.index('data-part="overview"') :]
    assert overview.count("display:block;cursor") == 12
    assert overview.count("display:none;cursor") == 12
    assert 'data-part="stage" style="display:none' in text, "the script turns it on"
    numbers = re.findall(r"display:block;cursor.*?<div[^>]*>(\d+)</div>", overview)
    assert [int(number) for number in numbers] == [*range(1, 24, 2)], (
        "from the first to the last, evenly"
    )


def test_slices_with_the_first_label_are_marked_and_the_slider_starts_in_their_middle():
    study = show_slices(torch.from_numpy(SLICES), torch.from_numpy(LABELS), names=pe.WORDS)
    text = study._repr_html_()
    assert 'value="9.5"' in text, "the middle of the tenth"
    assert text.count("flex:1;background:#d1782b") == 6
    assert 'alt="slice 7 of 24: embolus on this image, RV/LV ratio 1 or above"' in text
    assert "embolus on this image on 6 of them" in repr(study)


def test_of_more_slices_than_the_limit_every_second_is_taken_with_its_own_labels():
    text = page(SLICES, LABELS, channel=1, limit=12)
    assert greys(text) == pytest.approx(SLICES[::2, 1, 0, 0], abs=1)
    assert "12 of 24 slices" in text
    assert 'alt="slice 7 of 24: 0, 2"' in text
    assert text.count("flex:2;background:#d1782b") == 3, "each takes the room of the one left out"


def test_what_is_left_out_is_never_the_slice_with_the_first_label():
    small = np.zeros((24, 2))
    small[13, 0] = 1
    study = show_slices(SLICES, small, channel=1, limit=6, overview=3)
    assert len(study.images) == 6
    assert [study.numbers[place] for place in study.marked] == [14]
    assert set(study.marked) < set(study.overview)
    assert len(show_slices(SLICES, limit=23).images) == 23, (
        "one more than the limit costs one, not every second"
    )


def test_names_cannot_break_the_page():
    text = page(SLICES[:2], [[1], [0]], names=["<script>\"&'"])
    assert text.count("<script>") == 1
    assert "&lt;script&gt;" in text


def test_two_studies_of_a_page_do_not_move_each_other():
    first, second = (re.search(r'data-study="(\w{32})"', page(SLICES)).group(1) for _ in range(2))
    assert first != second


@pytest.mark.parametrize("labels", [None, np.arange(24)], ids=["no labels", "class numbers"])
def test_without_a_label_of_zeros_and_ones_nothing_is_marked(labels):
    text = page(SLICES, labels)
    assert "#d1782b" not in text
    assert "slice 24 of 24" in text


@pytest.mark.parametrize(
    ("images", "options", "message"),
    [
        (SLICES[0], {}, r"show_slices draws \(N, C, H, W\)"),
        ([1, 2], {}, "show_slices draws a tensor"),
        (SLICES, {"labels": LABELS[:3]}, "for 24 images"),
        (SLICES, {"channel": 3}, "channel must be 0 to 2"),
        (SLICES, {"limit": 0}, "limit must be 1 or more"),
        (SLICES[:0], {}, r"show_slices draws \(N, C, H, W\)(.|\n)*this batch is empty"),
    ],
)
def test_what_is_no_study_is_refused(images, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        show_slices(images, **options)
