import contextlib
import math
import re
import time
import xml.etree.ElementTree

import pytest

from tpukit import TpukitError, WorkerError, launch
from tpukit.essentials.display.bars import Bar, duration
from tpukit.essentials.display.panel import panel_html
from tpukit.essentials.display.progress import Line, Panel, Screen, Text, screen


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
    assert (
        2 <= shown.drawn <= 3 * (time.monotonic() - began) + 3
    )  # three a second, the first and the last


def test_nothing_new_is_not_drawn_again():
    shown = Counting()
    shown.bar("train", 1, 10)
    shown.draw()
    shown.close()
    assert shown.drawn == 1


@pytest.mark.parametrize(
    ("bar", "text"),
    [
        (Bar("train", 3, 12, 0, seconds=0.5), r"train  3/12  25%  6.0 steps/s  2 s left"),
        (Bar("train", 12, 12, 64, seconds=2.0), r"train  12/12  384 samples/s  in 2.* s"),
        (Bar("train", 0, 12, 64), r"train  0/12  0%"),
        (Bar("read", 7, None, 0, seconds=0.5), r"read  7  14.0 steps/s"),
        (Bar("empty", 0, 0, 0), r"empty  0  in .* s"),
        (Bar("jobs", 1, 3, None, seconds=2.0), r"jobs  1/3  33%  4 s left"),
        (
            Bar("train", 3, 12, 64, seconds=2.0, unit="images"),
            r"train  3/12  25%  96 images/s  6 s left",
        ),
        (
            Bar("draw", 30, 120, 0, seconds=2.0, unit="studies"),
            r"draw  30/120  25%  15.0 studies/s  6 s left",
        ),
        (Bar("epochs", 3, 12, 0, seconds=36.0), r"epochs  3/12  25%  12 s each  1 min 48 s left"),
        (Bar("train", 3, 12, 1, seconds=6.0), r"train  3/12  25%  2.0 s each  18 s left"),
        (Bar("epochs", 5, 6, 0, seconds=20.0, start=3), r"epochs  5/6  83%  10 s each  10 s left"),
        (Bar("train", 4, 8, 64, seconds=0.0, start=4), r"train  4/8  50%"),
        (Bar("train", 3, 12, 64, seconds=2.0, note="slow"), r"train  3/12 .*  6 s left  slow"),
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
    assert before[1] == "train  8/8  32 samples/s  in 4.0 s"


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
    lines = visible(out)
    assert lines[0] == "a line from core 0"
    assert lines[1].startswith("train  1/10")
    assert "train" in out.split("a line")[0]  # it was there before, too


def visible(out):
    """Return the lines of a terminal after `out`."""
    return [part.split("\r\x1b[K")[-1] for part in out.split("\n")]


def test_a_terminal_shows_the_status_again_below_a_printed_line_also_without_a_loop(capsys):
    shown = Line()
    shown.status("compiling")
    shown.draw()
    shown.line("a line from core 0")
    shown.draw(last=True)
    assert visible(capsys.readouterr().out)[:2] == ["a line from core 0", "compiling"]


def test_a_status_that_was_not_drawn_yet_is_not_lost_by_a_printed_line(capsys):
    shown = Line()
    shown.status("compiling")
    shown.line("a line from core 0")
    shown.draw()
    assert visible(capsys.readouterr().out) == ["a line from core 0", "compiling"]


def test_a_run_without_a_loop_leaves_no_half_line_in_a_terminal(capsys):
    shown = Line()
    shown.status("compiling")
    shown.draw()
    shown.close()
    assert visible(capsys.readouterr().out) == [""]
    shown = Line()
    shown.curve([{"step": 1, "loss": 0.5}])
    shown.draw()
    shown.close()
    assert visible(capsys.readouterr().out) == ["loss 0.5", ""]


def test_a_terminal_ends_its_line_once(capsys):
    shown = Line()
    shown.bar("train", 10, 10)
    shown.draw()
    shown.close()
    shown.close("failed")
    assert len(visible(capsys.readouterr().out)) == 2


def test_a_curve_keeps_its_ends_and_never_more_points_than_it_can_show():
    shown = Screen()
    shown.curve([{"step": step, "loss": 1 / (step + 1)} for step in range(10_000)])
    points = shown.curves["loss"]
    assert len(points) <= 400
    assert points[0] == (0, 1.0)
    assert points[-1] == (9_999, 1 / 10_000)
    assert points == sorted(points)


def test_an_unknown_screen_is_refused():
    with (
        pytest.raises(
            TpukitError,
            match="progress must be one of 'panel', 'line', 'text', 'off' or None, got 'bar'",
        ) as error,
        screen("bar"),
    ):
        pass
    assert isinstance(error.value, ValueError)
    assert error.value.fix


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (7500, "2 h 05 min")],
)
def test_a_duration_is_told_in_the_units_that_a_person_uses(seconds, text):
    assert duration(seconds) == text


def test_a_loop_that_was_given_up_says_so_and_keeps_its_time():
    shown = Screen()
    shown.bar("train", 3, 10)
    shown.close("interrupted")
    before = shown.bars["train"].text()
    time.sleep(0.6)
    assert shown.bars["train"].text() == before
    assert before.endswith("stopped after 0 s")


def test_time_goes_on_between_two_reports_of_a_slow_loop_and_stops_with_it():
    shown = Screen()
    shown.bar("epochs", 1, 3, 0, 10.0)
    shown.bars["epochs"].heard -= 5.0
    assert shown.bars["epochs"].text() == "epochs  1/3  33%  10 s each  15 s left"
    shown.close("interrupted")
    assert shown.bars["epochs"].text() == "epochs  1/3  10 s each  stopped after 15 s"


class Notebook(Panel):
    """Keeps what it would have shown, in place of a notebook."""

    def __init__(self):
        super().__init__()
        self.pages, self._handle = [], True

    def _show(self, drawn):
        self.pages.append(drawn)


def words(page):
    """Return the text of a page, which has to be well formed, since some notebooks show no other."""
    tree = xml.etree.ElementTree.fromstring(page.replace("&nbsp;", " "))
    return " ".join(" ".join(tree.itertext()).split())


def test_the_panel_has_a_row_a_loop_in_the_order_of_nesting_and_curves_below():
    shown = Notebook()
    shown.bar("epochs", 1, 12)
    for epoch in range(3):
        for done in (0, 5, 10):
            shown.bar("train", done, 10, 64, 1.0 + done)
        shown.bar("valid", 4, 4, 64, 1.0)
        shown.curve([{"step": epoch, "train_loss": 0.5, "lr": 1e-3}])
    shown.draw(last=True)
    page = shown.pages[-1]
    assert page.count("<tr") == 3
    assert page.index("epochs") < page.index("train") < page.index("valid") < page.index("<svg")
    assert "train 10 / 10 58 samples/s · in 11 s" in words(page)
    assert "train 0.5" in words(page)


def test_ninety_loops_of_their_own_names_are_no_wall_and_what_runs_is_always_there():
    bars = [Bar(f"epoch {number}", 5, 5) for number in range(89)]
    bars.insert(3, Bar("outer", 3, 90))
    page = panel_html([*bars, Bar("epoch 89", 2, 5)], {}, "running", "running")
    assert page.count("<tr") <= 9
    assert "84 more loops are over" in words(page)
    assert "outer 3 / 90" in words(page)
    assert "epoch 89 2 / 5" in words(page)


def test_names_that_are_no_html_are_shown_as_they_are():
    page = panel_html(
        [Bar("<b>&", 1, 2)],
        {"<i>&'\"": [(1, 0.5)]},
        "busy",
        "<script>alert(1)</script>",
        [("<u>", "&amp;")],
    )
    assert "<b>& 1 / 2" in words(page)
    assert "<script" not in page
    assert "<i" not in page
    assert "<i>&'\" ● 0.5" in words(page)


def test_the_curves_of_a_run_that_is_over_are_images_which_a_notebook_keeps_that_is_not_trusted():
    bars, curves = [Bar("train", 1, 2)], {"loss": [(1, 0.5), (2, 0.4)]}
    for state in ("done", "interrupted", "failed"):
        page = panel_html(bars, curves, state, state)
        assert "<svg" not in page
        assert "data:image/svg+xml;base64," in page
    for state in ("running", "busy"):
        assert "<svg" in panel_html(bars, curves, state, state)


def test_the_panel_has_neither_script_nor_style_of_its_own_nor_black_or_white():
    page = panel_html([Bar("train", 1, 2)], {"loss": [(1, 0.5), (2, 0.4)]}, "running", "running")
    assert not re.findall(
        r"<(script|style|link|img|iframe)|\bon\w+=|class=|id=|#fff|#000|black|white\b(?!-)", page
    )
    assert "currentColor" in page


def test_the_panel_is_drawn_at_most_three_times_a_second_and_its_clock_goes_on():
    shown, began = Notebook(), time.monotonic()
    shown.status("compiling graph 1 for 3 s")
    while time.monotonic() - began < 2.2:
        shown.draw()
        time.sleep(0.01)
    assert 2 <= len(shown.pages) <= time.monotonic() - began + 2  # the first, and one a second
    assert "compiling graph 1 for 3 s" in words(shown.pages[-1])


@pytest.mark.parametrize(
    ("outcome", "text"),
    [("done", "done in 0 s"), ("failed", "failed after 0 s"), ("interrupted", "interrupted after")],
)
def test_the_last_panel_says_how_the_run_ended_and_no_longer_what_it_does(outcome, text):
    shown = Notebook()
    shown.status("compiling graph 1 for 3 s", [("core 1", "behind")])
    shown.draw()
    shown.close(outcome)
    shown.close()  # what the run's context does once more
    assert text in words(shown.pages[-1])
    assert "compiling" not in shown.pages[-1]
    assert "core 1" not in shown.pages[-1]


def test_a_run_that_shows_nothing_leaves_no_empty_panel(monkeypatch):
    shown = Panel()
    monkeypatch.setattr(shown, "_show", lambda page: pytest.fail("drawn"))
    shown.line("a line")
    shown.draw()
    shown.close()


def test_a_notebook_whose_display_fails_gets_text_and_the_run_goes_on(monkeypatch, capsys):
    import IPython.display

    def fail(*_, **__):
        raise RuntimeError("no comm")

    monkeypatch.setattr(IPython.display, "display", fail)
    shown = Panel()
    shown.bar("train", 1, 10)
    shown.draw()
    shown.bar("train", 10, 10)
    shown.curve([{"step": 1, "loss": 0.5}])
    shown.close()
    out = capsys.readouterr().out
    assert out.startswith(
        "the panel is not drawn any more (RuntimeError: no comm); lines of text follow\n"
    )
    assert "train  10/10" in out


def test_a_panel_is_one_output_that_changes_and_carries_text_for_those_that_show_no_html(
    monkeypatch,
):
    import IPython.display

    shown, calls = Panel(), []

    class Handle:
        def update(self, data, raw):
            calls.append(("update", data, raw))

    def display(data, raw, display_id):
        calls.append(("display", data, raw and display_id))
        return Handle()

    monkeypatch.setattr(IPython.display, "display", display)
    shown.bar("train", 1, 10)
    shown.draw()
    shown.bar("train", 10, 10)
    shown.close()
    assert [(what, flag) for what, _, flag in calls] == [("display", True), ("update", True)]
    assert calls[-1][1]["text/plain"].startswith("train  10/10")
    assert "done in" in calls[-1][1]["text/html"]


def test_values_beside_a_loop_that_is_over_are_the_newest_of_that_loop(capsys):
    def work(core):
        import torch

        for epoch in core.progress(range(2), "epochs"):
            for step in core.progress(range(50), "train"):
                core.log(train_loss=torch.tensor(float(100 * epoch + step)))
                time.sleep(0.001)
            for _ in core.progress(range(3), "valid"):
                pass
            core.log(valid_loss=float(epoch))
            for step in core.progress(range(50), "left early"):
                core.log(other=float(step))
                if step == 30:
                    break

    launch(work, cores=1, progress="text")
    lines = [
        re.sub(r"  [\d.,]+ (steps|epochs)/s|  in [\d.]+ s", "", line)
        for line in capsys.readouterr().out.splitlines()
    ]
    assert lines[1:] == [
        "train  50/50  train_loss 49",
        "valid  3/3",
        "left early  31/50  stopped after 0 s  other 30",
        "train  50/50  train_loss 149",
        "valid  3/3",
        "left early  31/50  stopped after 0 s  other 30",
        "epochs  2/2  train_loss 149  valid_loss 1  other 30",
    ]


def test_a_loop_left_by_an_error_does_not_fetch_what_it_logged_before_the_error_is_told():
    from tpukit.essentials.launcher.messages import Activity
    from tpukit.essentials.launcher.notebook_output import NotebookOutput

    class Device:  # a tensor whose copy waits for a core that is gone
        def item(self):
            raise AssertionError("fetched")

    sent = []
    output = NotebookOutput(0, sent.append, Activity(), to_host=lambda rows: rows)
    output._next_send = time.monotonic() + 60
    steps = output.progress(range(10), "train", None, start=0, unit=None)
    next(steps)
    output._rows.append({"step": 1, "loss": Device()})
    steps.close()
    assert [type(message).__name__ for message in sent] == ["Progress"]
    output._rows.clear()
    output.flush()
    assert sent[-1][:3] == ("train", 1, 10)


def test_a_resumed_loop_begins_where_it_was_and_a_loop_without_a_label_shows_nothing(capsys):
    def work(core):
        list(core.progress(range(6), "train", start=4, unit="files"))
        list(core.progress(range(6), None))

    launch(work, cores=1, progress="text")
    out = capsys.readouterr().out.splitlines()[1:]
    assert len(out) == 1
    assert re.match(r"train  10/10  [\d,]+ files/s", out[0])


def test_progress_and_logging_cost_the_worker_next_to_nothing():
    def work(core):
        def loop(steps):
            began = time.process_time()
            for step in steps:
                core.log(step, loss=0.5)
            return time.process_time() - began

        return min(loop(core.progress(range(4_000), "train")) for _ in range(5)) / 4_000

    (seconds,) = launch(work, cores=1, progress="off").results
    assert seconds < 200e-6  # of processor time, 20 on a quiet machine; a TPU step takes 10 ms


@pytest.mark.parametrize("how", ["break", "error", "error of the loader"])
def test_a_loop_left_early_is_over_and_not_finished(how, capsys):
    def items():
        yield from range(5)
        raise OSError("a broken file")

    def work(core):
        loop = items() if how == "error of the loader" else range(5 + core.world_size)
        for item in core.progress(loop, "train", total=7):
            if item == 4 and how == "break":
                break
            if item == 4 and how == "error":
                raise KeyError("a column")

    with contextlib.suppress(WorkerError):
        launch(work, cores=2, progress="text")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train")]
    assert re.match(r"train  5/7  .*stopped after 0 s", line)


def test_fit_has_one_bar_for_epochs_one_for_steps_and_does_not_show_its_trial(capsys):
    import torch

    from tpukit import fit

    def work(core):
        data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        model = core.model(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = core.batches(data, batch_size=8, shuffle=True, drop_last=True)
        valid = core.batches(data, batch_size=8)
        fit(core, model, optimizer, torch.nn.functional.mse_loss, train, valid, epochs=3)

    launch(work, cores=2, progress="text")
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    bars = [line[:2] for line in lines if len(line) > 1]
    assert bars == [["train", "4/4"], ["valid", "4/4"]] * 3 + [["epochs", "3/3"]]
    for line in lines:
        assert ("train_loss" in " ".join(line)) == (line[0][:5] in ("train", "epoch"))
        assert line[0] != "train" or "valid_loss" not in " ".join(
            line
        )  # it would be that of an epoch ago


def test_an_infinite_value_is_shown_as_infinite(capsys):
    with screen("text") as display:
        display.bar("train", 1, 2)
        display.curve([{"step": 1, "loss": math.inf, "scale": -math.inf, "gap": math.nan}])
        display.bar("train", 2, 2)
    assert capsys.readouterr().out.endswith("  loss inf  scale -inf  gap nan\n")
    assert "inf</span>" in panel_html([], display.curves, state="done", status="done in 1 s")
