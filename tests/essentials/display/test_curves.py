import base64
import math
import re
import xml.etree.ElementTree

import pytest

from tpukit.essentials.display.curves import axes, charts_html, ticks

RISING = [(1, 0.1), (2, 0.9)]


def tree(curves):
    return xml.etree.ElementTree.fromstring(f"<div>{charts_html(curves)}</div>")


@pytest.mark.parametrize(
    ("curves", "expected"),
    [
        (
            ("train_loss", "lr", "valid_loss"),
            [("loss", "train_loss valid_loss"), ("learning rate", "lr")],
        ),
        (("loss",), [("loss", "loss")]),
        (
            ("train_loss", "valid_accuracy"),
            [("loss", "train_loss"), ("accuracy", "valid_accuracy")],
        ),
        (("train_loss", "nll"), [("loss", "train_loss nll")]),
        (("acc", "train_acc"), [("acc", "acc train_acc")]),
        (("valid_auroc", "valid_f1"), [("metrics", "valid_auroc valid_f1")]),
        (("lossless",), [("lossless", "lossless")]),
        (("encoder_lr", "learning_rate"), [("learning rate", "encoder_lr learning_rate")]),
        ((), []),
    ],
)
def test_what_has_one_scale_shares_an_axis_and_a_learning_rate_stands_apart(curves, expected):
    found = axes(dict.fromkeys(curves, RISING))
    assert [(axis.title, " ".join(axis.names)) for axis in found] == expected


def test_measures_of_other_scales_are_not_pressed_onto_one_axis():
    found = axes(
        {
            "loss": RISING,
            "mse": [(1, 500.0)],
            "accuracy": RISING,
            "grad_norm": [(1, 80.0)],
            "f1": RISING,
        }
    )
    assert [axis.names for axis in found] == [("loss",), ("mse", "grad_norm"), ("accuracy", "f1")]


@pytest.mark.parametrize(
    "curves",
    [
        {"loss": [(1, 0.5)]},
        {"loss": [(1, 0.5), (2, 0.5)]},
        {"loss": [(1, 0.0), (2, 0.0)]},
        {"loss": [(1, 0.9), (2, 0.1)], "<b>&": [(1, -1e9), (2, 1e9)]},
        {"loss": [(0, 1e300), (10**9, -1e300)]},
        {"loss": [(5, 1.0), (3, 2.0)]},
        {"loss": [(1, 1e-320), (2, 2e-320)]},
        {"loss": [(1, math.nan), (2, 1.0), (3, math.nan), (4, 2.0), (5, 3.0)]},
    ],
    ids=[
        "one point",
        "level",
        "zero",
        "a name that is no HTML",
        "huge",
        "steps that go back",
        "tiny",
        "gaps",
    ],
)
def test_any_curve_is_well_formed_svg_within_its_frame(curves):
    for drawing in tree(curves).iter("svg"):
        width, height = float(drawing.get("width")), float(drawing.get("height"))
        for path in drawing.iter("path"):
            assert "nan" not in path.get("d")
            assert "inf" not in path.get("d")
            for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.get("d")):
                assert 0 <= float(x) <= width
                assert 0 <= float(y) <= height
    assert len(list(tree(curves).iter("svg"))) == len(axes(curves))


def test_as_images_the_same_lines_are_drawn_in_colours_of_their_own_and_said_in_words():
    curves = {"train_loss": [(1, 0.9), (2, 0.25)], "valid_acc": RISING}
    page = charts_html(curves, as_images=True)
    assert "<svg" not in page
    images = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)" alt="([^"]+)"', page)
    assert [words for _, words in images] == [
        "loss over steps: train_loss from 0.9 to 0.25",
        "acc over steps: valid_acc from 0.1 to 0.9",
    ]
    for (source, _), inline in zip(images, tree(curves).iter("svg"), strict=True):
        text = base64.b64decode(source).decode()
        drawing = xml.etree.ElementTree.fromstring(text)
        assert drawing.tag == "{http://www.w3.org/2000/svg}svg", (
            "without its namespace no browser draws it"
        )
        paths = [path.get("d") for path in drawing.iter("{http://www.w3.org/2000/svg}path")]
        assert paths == [path.get("d") for path in inline.iter("path")]
        assert "currentColor" not in text
        assert "inherit" not in text


def test_a_value_that_is_not_finite_is_a_gap_and_is_told():
    drawn = tree({"loss": [(1, 1.0), (2, 0.9), (3, math.nan), (4, 0.8), (5, math.nan)]})
    (line,) = [path for path in drawn.iter("path") if path.get("stroke-linejoin")]
    assert line.get("d").count("M") == 2
    assert "nan" in "".join(drawn.itertext())


def test_a_curve_of_nothing_but_nan_is_told_and_not_drawn():
    drawn = tree({"loss": [(1, math.nan)]})
    assert not list(drawn.iter("svg"))
    assert "loss nan" in " ".join("".join(drawn.itertext()).replace("\u25cf", "").split())


def test_a_learning_rate_that_does_not_change_is_a_number_and_no_chart():
    assert len(list(tree({"loss": RISING, "lr": [(1, 0.1), (2, 0.1)]}).iter("svg"))) == 1
    assert len(list(tree({"loss": RISING, "lr": [(1, 0.1), (2, 0.2)]}).iter("svg"))) == 2


def test_train_and_valid_have_the_same_colours_in_every_chart():
    drawn = charts_html({"train_loss": RISING, "valid_loss": RISING, "valid_acc": RISING})
    strokes = re.findall(r"stroke='(#\w+)'", drawn)
    assert len(strokes) == 3
    assert strokes[1] == strokes[2] != strokes[0]


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (0.1, 0.7), (-3, 3), (1, 1e6), (1e-9, 3e-9), (0, 0), (299, 300), (-1e300, 1e300)],
)
def test_ticks_are_few_round_numbers_inside(low, high):
    found = ticks(low, high, 4)
    assert 1 <= len(found) <= 6
    assert all(low - 1e-9 * abs(low) <= tick <= high + 1e-9 * abs(high) for tick in found)
