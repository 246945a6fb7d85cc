"""What `tpukit.show` draws, pixel by pixel where it can be, and what it refuses."""

import base64
import html
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import matplotlib
import nbconvert
import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from nbclient import NotebookClient

from tpukit import launch, show_history
from tpukit.essentials.display.figure_inputs import _IMAGENET_MEAN, _IMAGENET_STD
from tpukit.essentials.display.figure_style import COLORS, PAPER, style_figure
from tpukit.essentials.display.figures import show_batch
from tpukit.metrics.predictions_figure import show_predictions

ROOT = Path(__file__).parents[3]
LOSSES = {"train_loss": [0.5, 0.4, 0.3], "valid_loss": [0.6, 0.45, 0.5]}
NAMES = ["pe_present_on_image", "rv_lv_ratio_gte_1", "leftsided_pe"]
BYTES = np.random.default_rng(0).integers(0, 256, (3, 3, 6, 5), dtype=np.uint8)
BYTES[:, :, 0, 0], BYTES[:, :, 0, 1] = 0, 255  # every channel spans the whole range
UNIT = BYTES.astype(np.float32) / 255
MEAN, STD = (np.float32(values).reshape(3, 1, 1) for values in (_IMAGENET_MEAN, _IMAGENET_STD))


def drawn(figure):
    """Return what is in the picture of each axes, as (n, H, W) or (n, H, W, 3)."""
    return np.stack([axes.images[0].get_array().data for axes in figure.axes if axes.images])


def titles(figure):
    return [
        axes.get_title(loc="left").replace("\N{NO-BREAK SPACE}", " ").replace("\n", " ")
        for axes in figure.axes
    ]


def caption(figure):
    return figure.texts[-1].get_text()


def visible_texts(figure):
    """Return the texts that are drawn: matplotlib keeps tick labels beyond the limits, and does not draw them."""
    beyond = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            beyond |= {
                tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high
            }
    texts = figure.findobj(matplotlib.text.Text)
    return [
        text
        for text in texts
        if text.get_visible() and text.get_text().strip() and text not in beyond
    ]


AS_THEY_ARE = {
    "uint8 array": (BYTES, BYTES),
    "uint8 tensor": (torch.from_numpy(BYTES), BYTES),
    "int64 tensor, what torch.tensor(list) gives": (torch.from_numpy(BYTES).long(), BYTES),
    "float32 in [0, 1]": (UNIT, UNIT),
    "float64 array": (UNIT.astype(np.float64), UNIT),
    "float16, exact for quarters": (
        np.round(UNIT * 4).astype(np.float16) / 4,
        np.round(UNIT * 4) / 4,
    ),
    "bfloat16 tensor": (
        torch.from_numpy(UNIT).bfloat16(),
        torch.from_numpy(UNIT).bfloat16().float().numpy(),
    ),
    "float8, what a quantised loader gives": (
        torch.ones(3, 3, 6, 5).to(torch.float8_e4m3fn),
        np.ones((3, 3, 6, 5)),
    ),
    "a tensor that wants a gradient": (torch.from_numpy(UNIT).requires_grad_(), UNIT),
    "not contiguous: channels last": (
        torch.from_numpy(BYTES).contiguous(memory_format=torch.channels_last),
        BYTES,
    ),
    "bool: a mask": (BYTES > 127, (BYTES > 127).astype(np.float32)),
    "all black": (np.zeros_like(UNIT), np.zeros_like(UNIT)),
}


@pytest.mark.parametrize("case", AS_THEY_ARE)
def test_values_that_can_be_drawn_arrive_unchanged(case):
    images, expected = AS_THEY_ARE[case]
    figure = show_batch(images)
    assert np.array_equal(drawn(figure), expected.transpose(0, 2, 3, 1))
    assert not {"undone", "stretched"} & set(caption(figure).replace(",", "").split())


def test_a_grey_image_is_drawn_from_black_to_white_and_not_to_its_own_maximum():
    picture = show_batch(BYTES[:, :1] // 4).axes[0].images[0]
    assert np.array_equal(picture.get_array(), BYTES[0, 0] // 4)
    assert (picture.norm.vmin, picture.norm.vmax, picture.cmap.name) == (0, 255, "gray")


RESCALED = {
    "ImageNet's normalisation": ((UNIT - MEAN) / STD, UNIT, "ImageNet"),
    "the same in bfloat16, whose rounding leaves [0, 1]": (
        torch.from_numpy((UNIT - MEAN) / STD).bfloat16(),
        UNIT,
        "ImageNet",
    ),
    "(x - 0.5) / 0.5 is not taken for ImageNet's": (UNIT * 2 - 1, UNIT, "-1 is black, 1 is white"),
    "floats in [0, 255]": (BYTES.astype(np.float32), UNIT, "0 is black, 255 is white"),
    "standardised otherwise, beyond ImageNet's range": (
        (UNIT - 0.5) * 9,
        UNIT,
        "-4.5 is black, 4.5 is white",
    ),
    "a grey image has no three means": (((UNIT - MEAN) / STD)[:, :1], UNIT[:, :1], "stretched"),
    "one value everywhere, no division by zero": (
        np.full_like(UNIT, 7),
        np.zeros_like(UNIT),
        "7 is black",
    ),
}


@pytest.mark.parametrize("case", RESCALED)
def test_normalised_values_are_brought_back_and_the_caption_says_how(case):
    images, expected, said = RESCALED[case]
    figure = show_batch(images)
    picture = drawn(figure)
    assert np.allclose(
        picture if picture.ndim == 4 else picture[..., None],
        expected.transpose(0, 2, 3, 1),
        atol=0.005,
    )
    assert said in caption(figure)


MULTI_HOT = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]])
BY_NAME = ["pe present on image · leftsided pe", "none", "rv lv ratio gte 1"]
LABELLED = {
    "zeros and ones": (MULTI_HOT, NAMES, BY_NAME),
    "floats, what BCE wants": (torch.tensor(MULTI_HOT, dtype=torch.float32), NAMES, BY_NAME),
    "bfloat16": (torch.tensor(MULTI_HOT, dtype=torch.bfloat16), NAMES, BY_NAME),
    "bool": (torch.tensor(MULTI_HOT, dtype=torch.bool), NAMES, BY_NAME),
    "a plain list": (MULTI_HOT.tolist(), NAMES, BY_NAME),
    "a table": (pd.DataFrame(MULTI_HOT), pd.Index(NAMES), BY_NAME),
    "no names: numbers": (MULTI_HOT, None, ["0 · 2", "none", "1"]),
    "class numbers": (
        torch.tensor([2, 0, 1]),
        NAMES,
        ["leftsided pe", "pe present on image", "rv lv ratio gte 1"],
    ),
    "class numbers without names": ([7, 0, 1], None, ["7", "0", "1"]),
    "one label in a column": ([[1], [0], [1]], ["pe"], ["pe", "none", "pe"]),
    "a dollar sign is a dollar sign": ([0, 0, 0], ["$x$ and $y$"], ["$x$ and $y$"] * 3),
}


@pytest.mark.parametrize("case", LABELLED)
def test_labels_are_written_by_name(case):
    labels, names, expected = LABELLED[case]
    assert titles(show_batch(BYTES, labels, names=names)) == expected


def test_a_dict_from_label_to_words_gives_the_words():
    words = {
        "pe_present_on_image": "embolus on this image",
        "rv_lv_ratio_gte_1": "RV/LV ratio 1 or above",
        "l": "left",
    }
    figure = show_batch(BYTES, MULTI_HOT, names=words)
    assert titles(figure) == ["embolus on this image · left", "none", "RV/LV ratio 1 or above"]
    bars = show_predictions(BYTES, MULTI_HOT, MULTI_HOT * 0.9, names=words).axes[1]
    assert bars.get_yticklabels()[0].get_text() == "embolus on this image ●"


@pytest.mark.parametrize(
    "images", [BYTES, UNIT, (UNIT - MEAN) / STD], ids=["bytes", "floats", "normalised"]
)
@pytest.mark.parametrize("channel", [0, 1, 2])
def test_one_channel_is_drawn_in_grey_as_it_is_in_the_whole_image(images, channel):
    figure = show_batch(images, channel=channel)
    whole = drawn(show_batch(images))
    assert np.allclose(drawn(figure), whole[..., channel])
    assert figure.axes[0].images[0].cmap.name == "gray"
    assert f"channel {channel} alone" in caption(figure)


@pytest.mark.parametrize(
    ("images", "channel"),
    [(BYTES, 3), (BYTES, -1), (BYTES[:, :1], 1), (BYTES, "green"), (BYTES, True)],
)
def test_a_channel_that_is_not_there_is_refused(images, channel):
    with pytest.raises(ValueError, match=r"channel must be 0 to [02] for images of [13] channels"):
        show_batch(images, channel=channel)


def test_an_arrow_points_at_a_place_and_none_where_there_is_none():
    points = [[0.25, 0.5], [np.nan, np.nan], [0.9, 0.1]]
    figure = show_batch(BYTES, points=np.array(points))
    tips = [[text.xy for text in axes.texts if hasattr(text, "xy")] for axes in figure.axes]
    assert tips == [[(0.25, 0.5)], [], [(0.9, 0.9)]]


@pytest.mark.parametrize(
    "points", [np.zeros((2, 2)), np.zeros((3, 3)), np.full((3, 2), 64.0), np.full((3, 2), -0.1)]
)
def test_points_that_are_no_shares_of_these_images_are_refused(points):
    with pytest.raises(
        ValueError,
        match=r"points must be \(N, 2\) floats, x and y in \[0, 1\] for each of 3 images",
    ):
        show_batch(BYTES, points=points)


def test_only_the_drawn_images_are_copied_and_labels_stay_with_them():
    figure = show_batch(np.repeat(BYTES, 20, axis=0), np.arange(60), limit=4)
    assert titles(figure) == ["0", "1", "2", "3"]
    assert "4 of 60 images, 3 × 6 × 5 uint8" in caption(figure)


def test_no_text_leaves_the_figure_or_touches_another():
    names = [
        *NAMES,
        "a_label_with_a_name_so_long_that_no_line_holds_it_whole",
        "acute_and_chronic_pe",
        "x" * 60,
    ]
    images = np.zeros((8, 3, 32, 32), np.uint8)
    figures = [
        show_batch(images, np.ones((8, 6)), names=names),
        show_batch(images[:1], np.ones((1, 6)), names=names),
        show_predictions(images, np.ones((8, 6)), np.full((8, 6), 0.5), names=names),
        show_history(
            {
                "train_loss": [3, 2, 1],
                "valid_loss": [3, 2, 1],
                "valid_auroc": [0.1, 0.2, 0.3],
                "lr": [1e-5] * 3,
            }
        ),
    ]
    for figure in figures:
        figure.draw_without_rendering()
        boxes = [(text.get_text(), text.get_window_extent()) for text in visible_texts(figure)]
        pictures = [("image", axes.get_window_extent()) for axes in figure.axes if axes.images]
        for text, box in boxes:
            assert figure.bbox.contains(box.x0, box.y0), text
            assert figure.bbox.contains(box.x1, box.y1), text
            for other, place in boxes + pictures:
                # a title may share a pixel's edge with the image above it
                meets = box is not place and box.padded(-1).overlaps(place.padded(-1))
                assert not meets, f"{text!r} meets {other!r}"


def test_eight_images_are_two_rows_of_four_about_ten_inches_wide():
    figure = show_batch(np.zeros((8, 3, 32, 32), np.uint8))
    assert len({round(axes.get_position().y0, 3) for axes in figure.axes}) == 2
    assert 9.5 <= figure.get_figwidth() <= 10.5


NO_BATCH = {
    "(N, H, W, C)": (
        np.zeros((5, 8, 8, 3)),
        r"got \(5, 8, 8, 3\)\n  fix:   .*images.transpose\(0, 3, 1, 2\)",
    ),
    "the same in torch's words": (torch.zeros(5, 8, 8, 3), r"images.permute\(0, 3, 1, 2\)"),
    "(C, H, W)": (np.zeros((3, 8, 8)), r"one image \(C, H, W\), pass images\[None\]"),
    "(H, W, C)": (np.zeros((8, 8, 3)), r"images.transpose\(2, 0, 1\)\[None\]"),
    "(N, H, W)": (np.zeros((9, 8, 8)), r"images\[:, None\]"),
    "(H, W)": (np.zeros((8, 8)), r"images\[None, None\]"),
    "five channels": (np.zeros((2, 5, 8, 8)), r"got \(2, 5, 8, 8\)\n  fix:   .*images\[:, :3\]"),
    "video": (np.zeros((2, 3, 4, 8, 8)), r"reshape"),
    "no image": (np.zeros((0, 3, 8, 8)), r"this batch is empty"),
    "no pixel": (np.zeros((2, 3, 0, 8)), r"this batch is empty"),
    "one nan": (
        np.where(np.arange(96).reshape(2, 3, 4, 4) == 60, np.nan, 0.5),
        r"found: 1 of 96 values.* in image 1",
    ),
    "infinity": (np.full((2, 3, 4, 4), np.inf), r"got nan or infinity"),
    "integers that are no bytes": (np.full((2, 3, 4, 4), 300), r"got int64 in \[300, 300\]"),
}


@pytest.mark.parametrize("case", NO_BATCH)
def test_another_shape_or_value_is_refused_with_its_fix(case):
    images, message = NO_BATCH[case]
    with pytest.raises(ValueError, match=message) as caught:
        show_batch(images)
    assert "  fix:   " in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 4


def test_the_fix_for_channels_last_works():
    images = BYTES.transpose(0, 2, 3, 1)
    with pytest.raises(ValueError, match=r"pass images\.transpose\(0, 3, 1, 2\)"):
        show_batch(images)
    assert np.array_equal(drawn(show_batch(images.transpose(0, 3, 1, 2))), images)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([BYTES[0], BYTES[1], BYTES[2]], "got list\n.*torch.stack"),
        ((BYTES, MULTI_HOT), "images, labels = batch"),
        ("slice.jpg", "got str"),
        (None, "got NoneType"),
        (np.zeros((1, 3, 4, 4), complex), "got complex128"),
        (np.full((1, 3, 4, 4), "a"), "got <U1"),
    ],
    ids=["a list of images", "a loader's batch", "a path", "nothing", "complex", "text"],
)
def test_what_is_no_array_of_numbers_is_refused(images, message):
    with pytest.raises(TypeError, match=message):
        show_batch(images)


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        (MULTI_HOT[:2], NAMES, r"for 3 images; got \(2, 3\)"),
        (MULTI_HOT, NAMES[:2], "there are 3 labels and 2 names"),
        (MULTI_HOT, [*NAMES, "one_more"], "there are 3 labels and 4 names"),
        (MULTI_HOT * 2, NAMES, "must be 0 or 1, got 2\n  found: row 0"),
        (MULTI_HOT * 0.7, NAMES, "labels > 0.5"),
        (MULTI_HOT * np.nan, NAMES, "must be 0 or 1, got nan"),
        (
            [[0], [5], [1]],
            ["cat", "dog"],
            r"must be 0 or 1, got 5\n  found: row 1\n  fix:   if .* pass labels\[:, 0\]",
        ),
        ([0, 3, 1], NAMES, "class 3 has no name: there are 3"),
        ([0, 10**12, 1], NAMES, "class 1000000000000 has no name: there are 3"),
        (
            [0, np.nan, 1],
            NAMES,
            r"class numbers from 0, got nan\n  found: row 1\n  fix:   look for missing labels",
        ),
        (
            [0, np.inf, 1],
            NAMES,
            r"class numbers from 0, got inf\n  found: row 1\n  fix:   look for missing labels",
        ),
        ([0, -1, 1], NAMES, "class numbers from 0, got -1"),
        ([0.2, 0.9, 1.0], NAMES, "class numbers from 0, got 0.2"),
        (np.zeros((3, 2, 2)), NAMES, r"got \(3, 2, 2\)"),
        (7, NAMES, r"got \(\)"),
        (["a", "b", "c"], NAMES, "found: dtype"),
    ],
    ids=["too few", "a name short", "a name over", "a two", "probabilities", "nan"]
    + [
        "a folder's, in a column",
        "no such class",
        "a huge class",
        "a class that is nan",
        "infinite",
        "minus one",
    ]
    + ["fractions", "three axes", "a number", "words"],
)
def test_labels_and_names_that_do_not_fit_are_refused(labels, names, message):
    with pytest.raises(ValueError, match=message):
        show_batch(BYTES, labels, names=names)


def test_huge_class_numbers_cost_nothing():
    began = (
        time.process_time()
    )  # a list as long as that would take minutes, if there were memory for it
    assert titles(show_batch(BYTES, torch.full((3,), 10**15))) == ["1000000000000000"] * 3
    assert time.process_time() - began < 60


def test_many_columns_are_drawn_or_refused():
    many = np.repeat(BYTES, 40, axis=0)
    assert len(show_batch(many, range(120), columns=20, limit=40).axes) == 40
    assert len(show_batch(BYTES, columns=100).axes) == 3
    with pytest.raises(
        ValueError, match=r"columns must be at most 20, got 100\n  fix:   columns=20"
    ):
        show_batch(many, columns=100, limit=100)


@pytest.mark.parametrize("count", [{"limit": 0}, {"columns": 0}, {"columns": -2}])
def test_a_count_that_leaves_nothing_to_draw_is_refused(count):
    with pytest.raises(ValueError, match=r"must be 1 or more, got"):
        show_batch(BYTES, **count)


# Predictions

CHANCES = np.array([[0.9, 0.1, 0.4], [0.0, 1.0, 0.5], [0.2, 0.3, 0.1]])


def bars(axes):
    """Return {name: (probability, filled)} of the bars beside one image."""
    names = [text.get_text() for text in axes.get_yticklabels()]
    shown = axes.patches[len(names) :]  # the first half is the track behind them
    filled = [bar.get_facecolor() == bar.get_edgecolor() for bar in shown]
    assert [name.endswith("●") for name in names] == filled
    return {
        name[:-2]: (bar.get_width(), fill)
        for name, bar, fill in zip(names, shown, filled, strict=True)
    }


@pytest.mark.parametrize(
    "kind", [np.asarray, torch.tensor, lambda values: torch.tensor(values).bfloat16()]
)
def test_a_bar_is_the_probability_and_filled_where_the_label_is_true(kind):
    figure = show_predictions(BYTES, kind(MULTI_HOT), kind(CHANCES), names=NAMES)
    assert np.array_equal(drawn(figure), BYTES.transpose(0, 2, 3, 1))
    beside = [axes for axes in figure.axes if not axes.images]
    for axes, truth, chances in zip(beside, MULTI_HOT, CHANCES, strict=True):
        for name, (width, filled) in bars(axes).items():
            label = NAMES.index(name.replace(" ", "_"))
            assert width == pytest.approx(chances[label], abs=0.004)
            assert filled == truth[label]


def test_of_many_labels_the_true_ones_and_the_most_probable_are_shown():
    chances = np.linspace(0, 1, 100)[None]
    truth = np.zeros((1, 100))
    truth[0, 3] = 1
    shown = bars(show_predictions(BYTES[:1], truth, chances, top=4).axes[1])
    assert list(shown) == ["3", "97", "98", "99"]
    assert shown["3"][1]


def test_a_name_of_one_long_word_is_cut_within_the_word_and_described_whole():
    names = ["pneumonoultramicroscopic_silicosis", "leftsided_pulmonary_embolism", "pe"]
    figure = show_predictions(BYTES[:1], [[1, 1, 1]], CHANCES[:1], names=names)
    shown = list(bars(figure.axes[1]))
    assert shown == ["pneumonoultramicroscop…", "leftsided pulmonary…", "pe"]
    assert "pneumonoultramicroscopic silicosis 0.90" in figure._repr_mimebundle_()[0]["text/html"]


def test_a_probability_equal_to_the_threshold_is_a_prediction_in_words_too():
    figure = show_predictions(BYTES[:1], [[0, 1]], [[0.5, 0.49]], names=["a", "b"])
    assert "true are b 0.49; at least 0.5 and not true: a 0.50" in str(figure._repr_mimebundle_())


def test_class_numbers_mark_one_label():
    shown = bars(show_predictions(BYTES[:1], [2], CHANCES[:1], names=NAMES).axes[1])
    assert [filled for _, filled in shown.values()] == [False, False, True]


@pytest.mark.parametrize(
    ("labels", "chances", "names", "message"),
    [
        (MULTI_HOT, CHANCES * 8 - 4, NAMES, r"got \[-4, 4\]\n  fix:   .*torch\.sigmoid\(logits\)"),
        (MULTI_HOT, CHANCES * np.nan, NAMES, "nan"),
        (MULTI_HOT, CHANCES[:2], NAMES, r"a row for each of 3 images, got \(2, 3\)"),
        (MULTI_HOT, CHANCES[:, 0], NAMES, r"got \(3,\)\n  fix:   .*probabilities\[:, None\]"),
        (MULTI_HOT[:, :2], CHANCES, NAMES, "of 3 labels, labels have 2 columns"),
        ([0, 1, 5], CHANCES, NAMES, "of 3 labels, labels have class 5"),
        ([0, 0, 0], CHANCES[:, :1], NAMES[:1], r"fix:   pass labels\[:, None\]"),
        ([0, 1, 0], CHANCES[:, :1], NAMES[:1], r"fix:   pass labels\[:, None\]"),
        (MULTI_HOT, CHANCES, NAMES[:1], "there are 3 labels and 1 names"),
    ],
    ids=[
        *("logits", "nan", "too few", "one axis", "other labels", "no such class"),
        *("one label, all false", "one label", "other names"),
    ],
)
def test_predictions_that_do_not_fit_are_refused(labels, chances, names, message):
    with pytest.raises(ValueError, match=message):
        show_predictions(BYTES, labels, chances, names=names)


# Manners


def test_drawing_leaves_the_readers_settings_and_pyplot_alone():
    import matplotlib.colors
    from matplotlib import pyplot

    with matplotlib.rc_context():
        pyplot.style.use("dark_background")
        matplotlib.rcParams["lines.linewidth"] = 7.5
        before, codes = dict(matplotlib.rcParams), dict(matplotlib.colors.colorConverter.colors)
        figures = [
            show_batch(BYTES, MULTI_HOT),
            show_history(LOSSES),
            show_predictions(BYTES, MULTI_HOT, CHANCES),
        ]
        assert dict(matplotlib.rcParams) == before
        assert dict(matplotlib.colors.colorConverter.colors) == codes
        assert pyplot.get_fignums() == []
    for figure in figures:  # and the reader's settings leave ours alone
        assert matplotlib.colors.to_hex(figure.get_facecolor()) == "#fbfaf8"


def test_an_error_in_the_middle_leaves_the_readers_settings_alone():
    before = dict(matplotlib.rcParams)
    with pytest.raises(ValueError, match="1 or more"):
        show_batch(BYTES, limit=-1)
    assert dict(matplotlib.rcParams) == before


def test_arrays_are_drawn_without_torch():
    code = (
        "import sys, numpy as np, tpukit as show\n"
        "figure = show.show_batch(np.zeros((2, 3, 8, 8), np.uint8), [[1], [0]], names=['pe'])\n"
        "figure = show.show_history({'loss': [1, 2]})\n"
        "print('torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True)
    assert process.stdout == "False\n", process.stderr


@pytest.mark.xla
def test_a_tensor_on_an_xla_device_is_drawn():
    def work(core):
        images = torch.arange(96, dtype=torch.uint8).reshape(2, 3, 4, 4).to(core.device)
        labels = torch.eye(2, dtype=torch.bfloat16, device=core.device)
        figure = show_batch(images, labels, names=["left", "right"])
        show_predictions(images / 255, labels, labels * 0.5)
        return drawn(figure)[1], titles(figure)[1]

    ((pixels, title),) = launch(work, cores=1, backend="xla:cpu", progress="off").results
    assert np.array_equal(pixels, np.arange(48, 96).reshape(3, 4, 4).transpose(1, 2, 0))
    assert title == "right"


def test_in_a_notebook_a_figure_appears_once_and_only_when_asked():
    cells = {
        "import numpy as np; from tpukit import show_batch; x = np.zeros((2, 3, 8, 8), np.uint8)": 0,
        "show_batch(x)": 1,
        "figure = show_batch(x)": 0,
        "figure": 1,
        "display(figure)": 1,
        "%matplotlib inline\nimport matplotlib.pyplot as plt": 0,
        "figure = show_batch(x) ": 0,
        "show_batch(x) ": 1,
        "display(figure) ": 1,
        "plt.plot([1, 2]); figure": 2,
        "from tpukit import style_figure; own = style_figure(plt.subplots()[0], 'nothing')": 0,
        "style_figure(own, 'still nothing')": 1,
    }
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in cells]
    )
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
    counts = {
        cell.source: sum("image/png" in out.get("data", {}) for out in cell.outputs)
        for cell in notebook.cells
    }
    assert counts == cells


MASKS = torch.tensor([0, 1, 255]).repeat(3, 6, 2)[..., :5]


@pytest.mark.parametrize("images", [BYTES, UNIT, BYTES[:, :1], torch.from_numpy(UNIT[:, :1])])
def test_masks_are_drawn_over_their_images_and_class_0_shows_the_image(images):
    figure = show_batch(images, MASKS)
    shown, bare = drawn(figure), drawn(show_batch(images))
    bare = bare / (255 if bare.dtype == "uint8" else 1)
    bare = bare if bare.ndim == 4 else bare[..., None].repeat(3, axis=3)
    assert shown.shape == (3, 6, 5, 3)
    assert np.allclose(shown[..., 0, :], bare[..., 0, :], atol=1e-6)
    assert np.abs(shown[..., 1, :] - bare[..., 1, :]).mean() > 0.1
    assert np.allclose(
        2 * shown[0, 0, 1] - bare[0, 0, 1], matplotlib.colors.to_rgb(COLORS[0]), atol=1e-5
    )
    assert caption(figure).endswith("masks of classes 0, 1, 255")


def test_a_figure_has_150_dots_per_inch_and_is_shown_at_100():
    figure = show_batch(BYTES)
    _, metadata = figure._repr_mimebundle_()
    width, height = figure.get_size_inches()
    drawn_at = struct.unpack(">II", figure._repr_png_()[16:24])
    assert drawn_at == pytest.approx((150 * width, 150 * height), abs=1)
    assert metadata["image/png"]["width"] == round(100 * width)


def own_figure():
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    axes.bar(["a", "b"], [1, 3])
    return style_figure(figure, "Bars: a 1,\n  b 3.")


def test_a_figure_of_ones_own_gets_the_background_of_all_and_is_forgotten_by_pyplot():
    import matplotlib.pyplot as plt

    before, figure = plt.get_fignums(), own_figure()
    assert plt.get_fignums() == before
    colours = {matplotlib.colors.to_hex(part.get_facecolor()) for part in (figure, *figure.axes)}
    assert colours == {matplotlib.colors.to_hex(show_batch(BYTES).get_facecolor())}
    assert [side for side, spine in figure.axes[0].spines.items() if spine.get_visible()] == [
        "left",
        "bottom",
    ]
    with pytest.raises(ValueError, match="must be a description of the figure in words"):
        style_figure(figure, " ")


def test_a_figure_of_ones_own_may_have_polar_axes():
    figure = matplotlib.figure.Figure()
    axes = figure.add_subplot(projection="polar")
    assert style_figure(figure, "a circle") is figure
    assert matplotlib.colors.to_hex(axes.get_facecolor()) == PAPER


DESCRIBED = {
    "a figure of one's own": (own_figure, ["Bars: a 1, b 3."]),
    "a batch": (
        lambda: show_batch(BYTES, MULTI_HOT, names=NAMES),
        ["3 of 3 images", "1: pe present on image, lefts"],
    ),
    "curves": (lambda: show_history(LOSSES), ["epoch 1 to 3", "valid loss from 0.6 to 0.5"]),
    "predictions": (
        lambda: show_predictions(BYTES, MULTI_HOT, 1 - MULTI_HOT * 0.75, names=NAMES),
        [
            "1: true are pe present on image 0.25, leftsided pe 0.25; at least 0.5 and not true: rv lv ratio gte 1 1.00"
        ],
    ),
}


@pytest.mark.parametrize("case", DESCRIBED)
def test_nbconvert_writes_what_a_figure_shows_as_the_alt_of_its_image(case):
    draw, said = DESCRIBED[case]
    data, metadata = DisplayFormatter().format(draw())
    data["image/png"] = base64.b64encode(data["image/png"]).decode()
    output = nbformat.v4.new_output("display_data", data=data, metadata=metadata)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[output])])
    page, _ = nbconvert.HTMLExporter().from_notebook_node(
        notebook
    )  # its template prefers HTML, as JupyterLab does
    assert metadata["image/png"]["alt"] == data["text/plain"]
    (alt,) = re.findall(r'<img[^>]*alt="([^"]*)"', page)
    for part in said:
        assert part in html.unescape(alt)
        assert part in data["text/plain"]


def test_masks_and_labels_of_a_dict_are_both_drawn():
    figure = show_batch(BYTES, {"labels": np.eye(3), "masks": MASKS}, names=NAMES, limit=2)
    assert titles(figure)[:2] == [name.replace("_", " ") for name in NAMES[:2]]
    assert len(drawn(figure)) == 2
    assert "masks of classes 0, 1, 255" in caption(figure)


@pytest.mark.parametrize("masks", [MASKS[:2], MASKS[:, :4], MASKS.float()])
def test_what_is_no_mask_of_these_images_is_refused(masks):
    with pytest.raises(
        ValueError, match=r"masks must be class numbers of shape \(N, H, W\) = \(3, 6, 5\), got"
    ):
        show_batch(BYTES, masks)
