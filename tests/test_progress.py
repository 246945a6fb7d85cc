import re
import time
import xml.etree.ElementTree

import pytest

from tpukit import launch
from tpukit.display.progress import Bar, Line, Screen, Text, Widgets, curve_svg, screen


class Counting(Screen):
    """Counts what it would have drawn."""

    def __init__(self):
        super().__init__()
        self.drawn = 0

    def _draw(self, last):
        self.drawn += 1


def test_many_updates_are_few_drawings():
    shown = Counting()
    began = time.monotonic()
    while time.monotonic() - began < 1.0:
        shown.bar("train", 1, 10)
        shown.draw()
    shown.close()
    assert 3 <= shown.drawn <= 6  # three a second, and the last


def test_nothing_new_is_not_drawn_again():
    shown = Counting()
    shown.bar("train", 1, 10)
    shown.draw()
    shown.close()
    assert shown.drawn == 1


@pytest.mark.parametrize(
    ("bar", "text"),
    [
        (Bar("train", 3, 12, 0), r"train  3/12  25%  .* steps/s  .* s left"),
        (Bar("train", 3, 12, 64), r"train  3/12  25%  .* samples/s  .* s left"),
        (Bar("train", 12, 12, 64), r"train  12/12  .* samples/s  in \d+ s"),
        (Bar("train", 0, 12, 64), r"train  0/12  0%"),
        (Bar("read", 7, None, 0), r"read  7  .* steps/s"),
        (Bar("empty", 0, 0, 0), r"empty  0  in \d+ s"),
        (Bar("jobs", 1, 3, None, seconds=2.0), r"jobs  1/3  33%  4 s left"),
        (Bar("train", 3, 12, 64, seconds=2.0), r"train  3/12  25%  96 samples/s  6 s left"),
    ],
)
def test_a_bar_says_in_a_line_how_far_it_has_come(bar, text):
    assert re.fullmatch(text, bar.text())


def test_a_loop_that_is_over_keeps_its_time_and_its_rate():
    shown = Screen()
    shown.bar("read", 0, 8)
    time.sleep(0.05)
    shown.bar("read", 8, 8)
    shown.bar("train", 8, 8, 16, 4.0)
    before = [bar.text() for bar in shown.bars.values()]
    time.sleep(0.2)
    shown.bar("read", 8, 8)
    assert [bar.text() for bar in shown.bars.values()] == before
    assert before[1] == "train  8/8  32 samples/s  in 4 s"


def test_text_says_a_whole_line_when_a_loop_ends_and_not_for_every_step(capsys):
    shown = Text()
    for done in range(1, 101):
        shown.bar("train", done, 100)
        shown.draw()
    shown.bar("valid", 5, 5)
    shown.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [["train", "100/100"], ["valid", "5/5"]]


def test_a_second_epoch_is_a_new_bar(capsys):
    shown = Text()
    for _ in range(2):
        for done in (0, 50, 100):
            shown.bar("train", done, 100)
        shown.draw(last=True)
    assert capsys.readouterr().out.count("train  100/100") == 2


def test_a_terminal_has_one_line_that_a_printed_line_does_not_tear(capsys):
    shown = Line()
    shown.bar("train", 1, 10)
    shown.draw()
    shown.line("a line from core 0")
    shown.close()
    out = capsys.readouterr().out
    visible = [part.split("\r\x1b[K")[-1] for part in out.split("\n")]
    assert visible[0] == "a line from core 0"
    assert visible[1].startswith("train  1/10")
    assert "train" in out.split("a line")[0]  # it was there before, too


def test_a_curve_keeps_its_ends_and_never_more_points_than_it_can_show():
    shown = Screen()
    shown.curve([{"step": step, "loss": 1 / (step + 1)} for step in range(10_000)])
    points = shown.curves["loss"]
    assert len(points) <= 400
    assert points[0] == (0, 1.0)
    assert points[-1] == (9_999, 1 / 10_000)
    assert points == sorted(points)


@pytest.mark.parametrize(
    "curves",
    [
        {"loss": [(1, 0.5)]},
        {"loss": [(1, 0.5), (2, 0.5)]},
        {"loss": [(1, 0.9), (2, 0.1)], "<b>&": [(1, -1e9), (2, 1e9)]},
    ],
    ids=["one point", "flat", "a name that is not HTML"],
)
def test_a_curve_is_well_formed_svg(curves):
    drawing = xml.etree.ElementTree.fromstring(curve_svg(curves))
    assert len(drawing.findall("polyline")) == len(curves)
    assert "nan" not in curve_svg(curves)


def test_nan_and_the_step_itself_are_not_drawn():
    shown = Screen()
    shown.curve([{"step": 1, "loss": float("nan")}, {"step": 2, "loss": 0.5}])
    assert shown.curves == {"loss": [(2, 0.5)]}


def test_an_unknown_screen_is_refused():
    with (
        pytest.raises(ValueError, match="progress is one of 'widgets', 'line', 'text', 'off' or None, got 'bar'"),
        screen("bar"),
    ):
        pass


def test_widgets_hold_a_bar_a_loop_and_the_curve():
    shown = Widgets()
    shown.bar("train", 3, 10)
    shown.curve([{"step": 1, "loss": 0.5}])
    shown.draw(last=True)
    shown.bar("valid", 1, 2)
    shown.draw(last=True)
    first, second, curve = shown._box.children
    assert (first.children[0].value, first.children[0].max) == (3, 10)
    assert "valid  1/2" in second.children[1].value
    assert curve.value.startswith("<svg")


def test_progress_and_logging_cost_the_worker_next_to_nothing():
    def work(core):
        def loop(steps):
            began = time.process_time()
            for step in steps:
                core.log(step, loss=0.5)
            return time.process_time() - began

        return loop(core.progress(range(20_000), "train")) / 20_000

    (seconds,) = launch(work, cores=1, progress="off").results
    assert seconds < 50e-6  # a TPU step takes 10 ms: half a percent, on a busy machine


def test_a_loop_left_early_is_over(capsys):
    def work(core):
        for item in core.progress(range(100), "train"):
            if item == 4:
                break

    launch(work, cores=2, progress="text")
    assert "train  5/5" in capsys.readouterr().out
