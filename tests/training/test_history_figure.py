"""The curves of a run: every form of a history, what shares a panel, and what is refused."""

import numpy as np
import pandas as pd
import pytest
import torch

from tpukit.training import History
from tpukit.training.history_figure import show_history


def lines(figure):
    """Return {panel: {line's label: (x, y)}} of the lines that a legend or a title names."""
    found = {}
    for axes in figure.axes:
        named = {
            line.get_label(): line.get_data() for line in axes.lines if line.get_label()[0] != "_"
        }
        smooth = [
            line.get_data()
            for line in axes.lines
            if line.get_marker() == "None" or line.get_markersize() < 10
        ]
        found[axes.get_title(loc="left")] = named or {"": smooth[-1]}
    return found


LOSSES = {"train_loss": [0.5, 0.4, 0.3], "valid_loss": [0.6, 0.45, 0.5]}
ROWS = [
    {"epoch": i + 1, "train_loss": t, "valid_loss": v}
    for i, (t, v) in enumerate(zip(*LOSSES.values(), strict=True))
]
HISTORIES = {
    "a dict of lists": LOSSES,
    "of arrays": {name: np.array(values) for name, values in LOSSES.items()},
    "of tensors": {
        name: torch.tensor(values, dtype=torch.float64) for name, values in LOSSES.items()
    },
    "of lists of tensors, what .append(loss) gives": {
        name: [torch.tensor(v) for v in y] for name, y in LOSSES.items()
    },
    "rows": ROWS,
    "rows in an object": type("History", (), {"rows": ROWS})(),
    "a table": pd.DataFrame(ROWS),
    "with what is no curve beside it": LOSSES
    | {"weights": "runs/weights.pt", "probabilities": np.zeros((3, 4))},
}


@pytest.mark.parametrize("case", HISTORIES)
def test_one_history_in_any_form_draws_the_same_curves(case):
    (panel,) = lines(show_history(HISTORIES[case])).values()
    for name, values in (("train", LOSSES["train_loss"]), ("valid", LOSSES["valid_loss"])):
        x, y = panel[name]
        assert list(x) == [1, 2, 3]
        assert y == pytest.approx(values)


def test_measures_of_another_kind_have_their_own_panel_and_losses_come_first():
    history = {
        "lr": [1e-4, 5e-5],
        "images_per_second": [70, 71],
        "valid_auroc": [0.7, 0.8],
        "train_auroc": [0.8, 0.9],
    }
    panels = lines(show_history(history | {"train_loss": [0.5, 0.4]}))
    assert list(panels) == ["train loss", "auroc", "learning rate", "speed"]
    assert set(panels["auroc"]) == {"train", "valid"}


def test_what_stays_the_same_is_told_in_words_and_only_a_measure_of_quality_is_drawn_all_the_same():
    history = {
        "train_loss": [0.5, 0.5],
        "lr": [2e-4, 2e-4],
        "memory": [2**31, 2**31],
        "data_wait": [0.1, 0.25],
    }
    figure = show_history(history)
    assert list(lines(figure)) == ["train loss", "waiting for batches"]
    assert "throughout: learning rate 0.0002, peak memory 2 GiB" in figure._supxlabel.get_text()
    assert list(lines(show_history({"lr": [2e-4, 2e-4]}))) == ["learning rate"], (
        "there is nothing else to draw"
    )


def test_axes_have_the_units_of_what_fit_records():
    history = {
        "samples_per_second": [70, 71],
        "data_wait": [0.1, 0.25],
        "memory": [2**30, 2**31],
        "seconds": [1, 2],
    }
    axes = show_history(history).axes
    assert {one.get_title(loc="left"): one.get_ylabel() for one in axes} == {
        "speed": "samples/s",
        "waiting for batches": "% of the time",
        "peak memory": "GiB",
        "time": "seconds",
    }
    assert list(axes[2].lines[0].get_ydata()) == [1, 2], "bytes became GiB"


def test_a_shorter_series_is_spread_over_the_steps_and_ends_with_them():
    history = {"step": [10, 20, 30, 40], "train_loss": [4, 3, 2, 1], "valid_loss": [3, 2]}
    panel = lines(show_history(history))["loss"]
    assert list(panel["train"][0]) == [10, 20, 30, 40]
    assert list(panel["valid"][0]) == [20, 40]


def test_rows_that_lack_a_measure_leave_no_gap_in_it():
    rows = [
        {"step": 1, "train_loss": 3.0},
        {"step": 2, "train_loss": 2.0},
        {"step": 2, "valid_loss": 2.5},
    ]
    panel = lines(show_history(rows))["loss"]
    assert [list(values) for values in panel["train"]] == [[1, 2], [3, 2]]
    assert [list(values) for values in panel["valid"]] == [[2], [2.5]]


def test_a_noisy_series_is_drawn_light_under_its_moving_mean():
    noise = 1 + np.random.default_rng(0).standard_normal(1000)
    light, mean = show_history({"train_loss": noise}).axes[0].lines
    assert np.array_equal(light.get_ydata(), noise)
    assert light.get_alpha() < 0.5
    assert np.std(mean.get_ydata()) < 0.3
    assert mean.get_ydata()[500] == pytest.approx(noise[475:526].mean())


@pytest.mark.parametrize(
    ("name", "values", "best"),
    [
        ("valid_loss", [0.6, 0.45, 0.5], "best 0.45 at 2"),
        ("val_auroc", [0.6, 0.9, 0.8], "best 0.9 at 2"),
        ("valid_loss", [np.nan, 0.5, 0.6], "best 0.5 at 2"),
        ("valid_images_per_second", [1, 3, 2], None),
        ("train_loss", [0.6, 0.45, 0.5], None),
    ],
    ids=["low", "high", "nan is not best", "speed is no quality", "training has no best"],
)
def test_the_best_validation_point_is_marked(name, values, best):
    axes = show_history({name: values}).axes[0]
    rings = [line for line in axes.lines if line.get_markersize() == 10]
    assert len(rings) == (best is not None)
    assert (best or "epoch") in axes.get_xlabel()


def test_one_number_of_a_panels_kind_is_a_line_across_it():
    figure = show_history(LOSSES | {"base_rate_loss": 0.41, "cores": 2})
    assert set(lines(figure)["loss"]) == {"train", "valid", "base rate 0.41"}
    assert "cores is one number: 2" in figure._supxlabel.get_text()


@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5)]
)
def test_a_number_of_numpy_or_torch_is_one_number(number):
    assert "base rate 0.5" in lines(show_history(LOSSES | {"base_rate_loss": number}))["loss"]


def test_a_loss_that_became_nan_is_said():
    figure = show_history({"train_loss": [0.5, np.nan, np.inf], "valid_loss": [0.5, None, 0.4]})
    assert "train_loss: 2 of 3 values are nan or infinite" in figure._supxlabel.get_text()


@pytest.mark.parametrize(
    ("history", "kind", "message"),
    [
        ({}, ValueError, "found: nothing in it"),
        ([], TypeError, "got an empty list"),
        (History(), TypeError, "got an empty list"),
        ({"train_loss": []}, ValueError, "train_loss is not a series"),
        ({"train_loss": [np.nan, np.nan]}, ValueError, "train_loss has no finite value"),
        ({"train_loss": ["a", "b"]}, ValueError, "train_loss is not a series"),
        ({"train_loss": 0.4}, ValueError, "train_loss is one number"),
        ({"step": [1, 2, 3]}, ValueError, "no series of numbers"),
        ({"history": LOSSES, "rank": 0}, ValueError, r"pass history\['history'\]"),
        ({"history": ROWS}, ValueError, r"pass history\['history'\]"),
        ([LOSSES, LOSSES], TypeError, r"pass run\.results\[0\]"),
        (
            type("Run", (), {"results": [LOSSES]})(),
            TypeError,
            r"got Run\n  fix:   .*run\.results\[0\]",
        ),
        ([0.5, 0.4], TypeError, "got list"),
        ("history.json", TypeError, "got str"),
        (None, TypeError, "got NoneType"),
    ],
    ids=[
        "empty",
        "no rows",
        "no steps yet",
        "no points",
        "only nan",
        "words",
        "a number",
        "only steps",
        "one level in",
        "rows one level in",
    ]
    + ["every rank's", "a run", "bare numbers", "a path", "nothing"],
)
def test_what_is_no_history_is_refused_with_its_fix(history, kind, message):
    with pytest.raises(kind, match=message):
        show_history(history)


def test_a_row_without_a_step_is_left_out():
    rows = [{"train_loss": 0.9}, {"step": 1, "train_loss": 0.5}, {"step": 2, "train_loss": 0.4}]
    only_without_step = [*rows, {"auroc": 0.7}]
    for given in (rows, rows[::-1], only_without_step):
        axes, *others = show_history(given).axes
        (curve,) = axes.lines
        assert sorted(curve.get_xdata()) == [1, 2]
        assert not others


def test_rows_of_which_none_with_a_step_has_a_number_are_refused():
    with pytest.raises(ValueError, match="train_loss has no value in a row with a step"):
        show_history([{"train_loss": 0.9}, {"step": 1}])
