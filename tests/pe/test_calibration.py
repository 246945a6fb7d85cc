"""Temperatures, calibration and the ladder, on exams whose answers are made too sure by a known factor."""

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit
from sklearn.metrics import log_loss

from tpukit import pe
from tpukit.pe.labels import EXAM_LABELS, LABELS


def exams(count=400, seed=0, sure=1.0, slices=4):
    """Return labels, and probabilities whose logits are `sure` times those that the labels were drawn from."""
    random = np.random.default_rng(seed)
    logits = random.normal(-0.5, 1.5, (count, 9))
    truth = (random.random((count, 9)) < expit(logits)).astype(float)
    rows = np.repeat(np.arange(count), slices)
    ids = {
        "StudyInstanceUID": [f"{seed}-{row}" for row in rows],
        "SOPInstanceUID": np.arange(len(rows)).astype(str),
    }
    of_image = random.normal(0, 1.5, len(rows))
    labels = pd.DataFrame(
        ids | {LABELS[0]: (random.random(len(rows)) < expit(of_image)).astype(float)}
    )
    said = pd.DataFrame(ids | {LABELS[0]: expit(sure * of_image)})
    for column, name in enumerate(EXAM_LABELS):
        labels[name], said[name] = truth[rows, column], expit(sure * logits[rows, column])
    return labels, said


def test_the_temperature_is_how_much_too_sure_the_answers_were():
    found = pe.fit_temperatures(*exams(4000, sure=2.0))
    assert list(found.values) == list(LABELS)
    assert all(value == pytest.approx(2.0, rel=0.1) for value in found.values.values()), found
    timid = pe.fit_temperatures(*exams(4000, sure=0.5))
    assert all(value == pytest.approx(0.5, rel=0.1) for value in timid.values.values()), timid


def test_on_another_fold_calibrated_answers_lose_less_and_the_table_says_how_much():
    temperatures = pe.fit_temperatures(*exams(seed=1, sure=3.0))
    labels, said = exams(seed=2, sure=3.0)
    after = temperatures.apply(said)
    assert pe.challenge_loss(labels, after) < 0.95 * pe.challenge_loss(labels, said)
    table = pe.calibration_table(labels, said, after)
    one = labels.groupby("StudyInstanceUID", sort=False).first()
    for column, answers in (("log loss", said), ("calibrated", after)):
        slow = log_loss(
            one.central_pe, answers.groupby("StudyInstanceUID", sort=False).central_pe.first()
        )
        assert table.loc["central pe", column] == pytest.approx(slow)
    assert (table["calibrated"] < table["log loss"]).all()
    share = one.central_pe.mean()
    alone = -(share * np.log(share) + (1 - share) * np.log(1 - share))
    assert table.loc["central pe", "frequency alone"] == pytest.approx(alone)


def test_no_answer_crosses_a_half_so_consistent_answers_stay_so():
    labels, said = exams(60, seed=3)
    consistent = pe.make_consistent(said)
    assert pe.check_consistency(said).size
    for sure in (0.3, 3.0):
        temperatures = pe.fit_temperatures(*exams(seed=4, sure=sure))
        assert pe.check_consistency(temperatures.apply(consistent)).empty


def test_the_exams_that_are_judged_are_not_those_that_were_fitted_on():
    labels, said = exams(30)
    temperatures = pe.fit_temperatures(labels, said)
    with pytest.raises(
        ValueError,
        match="fitted on 30 of the studies in this table\n.*\n  fix:   fit the temperatures on another fold",
    ):
        temperatures.apply(said)


def test_a_label_that_four_exams_have_keeps_its_answers_and_says_why():
    labels, said = exams(50, seed=5, sure=3.0)
    rare = labels.StudyInstanceUID.isin([f"5-{number}" for number in range(4)])
    labels["chronic_pe"] = rare.astype(float)
    temperatures = pe.fit_temperatures(labels, said)
    assert temperatures.values["chronic_pe"] == 1.0
    assert temperatures.notes["chronic_pe"] == "only 4 exams with it: too few to tell"
    assert (
        pe.calibration_table(labels, said).loc["chronic pe", "note"]
        == "only 4 exams with it: too few to tell"
    )


@pytest.mark.parametrize("count", [2, 8])
def test_that_exams_are_too_few_is_said_beside_the_line_and_not_on_it(count):
    figure = pe.show_calibration(*exams(count, seed=3))
    figure.canvas.draw()
    for axes in figure.axes:
        (words,) = (text for text in axes.texts if "too few" in text.get_text())
        box = words.get_window_extent().transformed(axes.transData.inverted())
        assert box.x1 < box.y0, "above the diagonal"
        assert box.y1 < 1, "below the marks of the exams"


def test_a_label_is_missing_or_a_row_is():
    labels, said = exams(20)
    with pytest.raises(ValueError, match="no column chronic_pe"):
        pe.fit_temperatures(labels, said.drop(columns="chronic_pe"))
    with pytest.raises(ValueError, match="1 images without a prediction"):
        pe.fit_temperatures(labels, said[1:])
    labels.loc[3, "central_pe"] = np.nan
    with pytest.raises(ValueError, match="not probabilities\n  found: central_pe = nan"):
        pe.fit_temperatures(labels, said)


def test_a_point_of_the_curve_is_the_share_of_the_exams_that_have_it(tmp_path):
    labels, said = exams(100, seed=6, sure=2.0)
    after = pe.fit_temperatures(*exams(seed=7, sure=2.0)).apply(said)
    figure = pe.show_calibration(labels, said, after)
    axes = [axes for axes in figure.axes if axes.get_title(loc="left") == "central embolus"][0]
    of_exam = labels.groupby("StudyInstanceUID", sort=False).central_pe.first().to_numpy()
    chance = said.groupby("StudyInstanceUID", sort=False).central_pe.first().to_numpy()
    lowest = np.argsort(chance)[:13]
    curve = next(line for line in axes.lines if len(line.get_xdata()) == 8)
    assert curve.get_xdata()[0] == pytest.approx(chance[lowest].mean())
    assert curve.get_ydata()[0] == pytest.approx(of_exam[lowest].mean())
    assert f"central embolus: {of_exam.sum():.0f} of 100 exams" in figure.alt
    figure.savefig(tmp_path / "figure.png")


def test_the_ladder_says_that_phantoms_do_not_stand_on_it(tmp_path):
    figure = pe.show_ladder({"exams": 0.2, "images": 0.204, "prior": 0.31})
    words = [text.get_text() for text in figure.axes[0].texts]
    assert "on phantoms: not on this ladder" in words
    assert {"0.200", "0.204", "0.310", "0.157"} <= set(words)
    heights = sorted(
        text.get_position()[1]
        for text in figure.axes[0].texts
        if text.get_text() in ("0.200", "0.204")
    )
    assert heights[1] / heights[0] > 1.05, "their words do not stand on each other"
    figure.savefig(tmp_path / "figure.png")
    with pytest.raises(ValueError, match="numbers above 0, got {'exams': nan}"):
        pe.show_ladder({"exams": float("nan")})


def test_answers_of_exactly_0_and_1_are_calibrated_as_they_were_fitted():
    truth, sure = exams(200, seed=3, sure=40.0)
    fitted = pe.fit_temperatures(truth, sure)
    others, answers = exams(200, seed=4, sure=40.0)
    others["StudyInstanceUID"] = answers["StudyInstanceUID"] = "b" + others["StudyInstanceUID"]
    rounded = answers.copy()
    for name in pe.LABELS:
        rounded[name] = answers[name].astype("float32").astype("float64")
    tables = [pe.calibration_table(others, said, fitted.apply(said)) for said in (answers, rounded)]
    calibrated = [table.loc["central pe", "calibrated"] for table in tables]
    assert calibrated[1] < 1.5 * calibrated[0]
