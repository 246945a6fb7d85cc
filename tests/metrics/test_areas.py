import functools
import math

import numpy as np
import pandas
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

import tpukit
from tpukit.metrics.areas import _curve, score
from tpukit.metrics.samples import as_array


def exams(count=60, slices=12, seed=0, strength=2.5):
    """Return labels, probabilities and studies of images, where those of a study are nearly the same."""
    random = np.random.default_rng(seed)
    study = np.repeat(np.arange(count), slices)
    truth = np.repeat(random.random(count) < 0.4, slices).astype(float)
    of_study = np.repeat(random.normal(0, 1.5, count), slices)
    chances = 1 / (
        1 + np.exp(-(strength * truth - 1.2 + of_study + random.normal(0, 0.2, count * slices)))
    )
    return truth, chances, study


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.uint8, torch.bool])
def test_tensors_of_any_type_are_arrays_of_float64(kind):
    array = as_array(torch.ones(2, dtype=kind))
    assert (array.dtype, array.tolist()) == (float, [1, 1])


def test_areas_are_scikit_learns_with_weights_and_ties():
    random = np.random.default_rng(0)
    for _ in range(5):
        truth, chances = (random.random(200) < 0.3).astype(float), random.integers(0, 9, 200) / 8
        weights = random.integers(0, 4, 200).astype(float)
        area, average, *_ = _curve(truth, np.unique(chances, return_inverse=True)[1], weights)
        assert area == pytest.approx(roc_auc_score(truth, chances, sample_weight=weights))
        assert average == pytest.approx(
            average_precision_score(truth, chances, sample_weight=weights)
        )


def test_an_interval_holds_the_area_and_is_wider_where_images_of_a_study_are_alike():
    truth, chances, study = exams()
    alone, together = score(truth, chances), score(truth, chances, study)
    assert alone.auroc == together.auroc == pytest.approx(roc_auc_score(truth, chances))
    widths = []
    for found in (alone, together):
        low, high = found.auroc_interval
        assert low < found.auroc < high
        widths.append(high - low)
        assert (found.recall_band[0] <= found.recall_band[1]).all()
        assert (found.precision_band[0] <= found.precision_band[1]).all()
    assert widths[1] > 2 * widths[0]


def test_an_interval_of_whole_studies_holds_the_truth_about_as_often_as_it_says():
    truth, chances, _ = exams(4000, 1, seed=99)
    true_area = roc_auc_score(truth, chances)
    inside = 0
    for seed in range(40):
        low, high = score(*exams(60, 4, seed=seed), resamples=200).auroc_interval
        inside += low <= true_area <= high
    assert inside >= 34  # of 40 at 95 %: fewer has a chance below 1 in 1,000


def test_a_table_counts_studies_and_says_where_they_are_too_few():
    truth, chances, study = exams()
    rare = (study == 3).astype(float)
    labels = torch.from_numpy(np.stack([truth, rare, 0 * rare, 0 * rare + 1], 1))
    names = ["pe_present_on_image", "chronic_pe", "none_has_it", "all_have_it"]
    table = tpukit.metrics.auroc_table(
        labels, np.stack([chances] * 4, 1), names=names, groups=study, group="study"
    )
    assert list(table.index) == ["pe present on image", "chronic pe", "none has it", "all have it"]
    assert table.loc["pe present on image", "positive studies"] == len(np.unique(study[truth == 1]))
    assert table.loc["pe present on image", "note"] == ""
    one = table.loc["chronic pe"]
    assert (one["positives"], one["positive studies"]) == (12, 1)
    assert one["note"] == "only 1 positive study: too few to tell"
    assert not math.isnan(one["AUROC"])
    assert math.isnan(one["from"])
    assert math.isnan(one["to"])
    assert list(table["note"][2:]) == ["in no sample", "in every sample"]
    assert table["AUROC"][2:].isna().all()
    assert "positive groups" not in tpukit.metrics.auroc_table(truth, chances)


@pytest.mark.parametrize(
    ("labels", "probabilities", "message"),
    [
        (np.ones(5), np.ones(5), "5 of 5 have it"),
        (np.zeros(5), np.ones(5), "0 of 5 have it"),
        (np.array([0, 1, 2]), np.ones(3), "labels must be 0 or 1"),
        (np.array([0, 1]), np.array([0.5, math.nan]), "1 of 2 are nan"),
        (np.array([0, 1]), np.ones(3), r"got \(2,\) and \(3,\)"),
    ],
)
def test_what_has_no_curve_is_refused_with_the_fix(labels, probabilities, message):
    with pytest.raises(ValueError, match=message) as refused:
        tpukit.metrics.show_roc(labels, probabilities)
    assert "fix:" in str(refused.value)


def test_only_the_order_of_scores_counts_also_of_infinite_ones(tmp_path):
    truth = np.tile([0, 1, 1], 20)
    scores = np.linspace(0, 1, 60) + 0.2 * truth
    infinite = np.where(scores > 1, np.inf, scores)
    expected = tpukit.metrics.auroc_table(truth, infinite.clip(max=1), resamples=20)
    assert tpukit.metrics.auroc_table(truth, infinite, resamples=20).equals(expected)
    tpukit.metrics.show_roc(truth, infinite, resamples=20).savefig(tmp_path / "roc.png")


def test_a_bootstrap_has_a_draw_or_more():
    truth = np.tile([0, 1], 20)
    for measure in (
        tpukit.metrics.auroc_table,
        functools.partial(tpukit.metrics.sensitivity_at, 0.9),
    ):
        with pytest.raises(ValueError, match="resamples must be 1 or more, got 0\n  fix:"):
            measure(truth, truth, resamples=0)


def test_a_table_of_other_shapes_is_refused():
    with pytest.raises(ValueError, match=r"got \(4, 2\), \(4, 1\) and 2 names"):
        tpukit.metrics.auroc_table(np.zeros((4, 2)), np.zeros(4), names=["a", "b"])


def test_a_figure_says_how_many_are_positive_and_its_text_says_what_it_shows(tmp_path):
    truth, chances, study = exams()
    figure = tpukit.metrics.show_roc(
        truth, torch.from_numpy(chances), name="pe_present_on_image", groups=study, group="study"
    )
    found = score(truth, chances, study)
    counts = f"{found.positives} of 720 images positive, in {found.positive_groups} of 60 studies"
    assert figure._suptitle.get_text() == f"pe present on image: {counts}"
    assert f"AUROC {found.auroc:.3f}, 95 % interval {found.auroc_interval[0]:.3f} to" in figure.alt
    assert len(figure.axes[0].collections) == 1  # the band
    figure.savefig(tmp_path / "roc.png")


def test_a_figure_of_one_positive_study_says_so_and_draws_no_interval():
    _, chances, study = exams()
    figure = tpukit.metrics.show_roc(
        (study == 3).astype(float), chances, groups=study, group="study"
    )
    assert "only 1 positive study: too few to tell" in figure._suptitle.get_text()
    assert "only 1 positive study" in figure.alt
    assert "to" not in figure.axes[0].get_title(loc="left").split()
    assert "nan" not in figure.alt


def test_the_table_is_one_of_pandas():
    truth, chances, _ = exams()
    assert isinstance(tpukit.metrics.auroc_table(truth, chances), pandas.DataFrame)


def slow_sensitivity(specificity, truth, chances):
    """Try every threshold."""
    best = 0.0
    for threshold in np.unique(chances):
        said = chances >= threshold
        if (~said[truth == 0]).mean() >= specificity - 1e-12:
            best = max(best, said[truth == 1].mean())
    return best


@pytest.mark.parametrize("specificity", [0.0, 0.5, 0.9, 1.0])
def test_sensitivity_at_a_specificity_is_that_of_the_best_threshold(specificity):
    random = np.random.default_rng(1)
    for digits in (1, 6):  # with ties and without
        truth, chances, study = exams(80, 3, seed=2)
        chances = chances.round(digits)
        point = tpukit.metrics.sensitivity_at(
            specificity, truth, chances, groups=study, resamples=50
        )
        assert point.sensitivity == pytest.approx(slow_sensitivity(specificity, truth, chances))
        said = chances >= point.threshold
        assert said[truth == 1].mean() == pytest.approx(point.sensitivity)
        assert (~said[truth == 0]).mean() == pytest.approx(point.specificity)
        assert point.specificity >= specificity - 1e-9
        low, high = point.interval
        assert 0 <= low <= high <= 1
        order = random.permutation(len(truth))
        again = tpukit.metrics.sensitivity_at(
            specificity, truth[order], chances[order], groups=study[order], resamples=50
        )
        assert (again.sensitivity, again.threshold) == (point.sensitivity, point.threshold)


def test_the_interval_of_a_sensitivity_draws_whole_studies_and_needs_five_of_each():
    truth, chances, study = exams(60, 12)
    alone, together = (
        tpukit.metrics.sensitivity_at(0.9, truth, chances, groups=groups)
        for groups in (None, study)
    )
    widths = [point.interval[1] - point.interval[0] for point in (alone, together)]
    assert widths[1] > 1.5 * widths[0]
    few = tpukit.metrics.sensitivity_at(0.9, [1, 1, 0, 0, 0, 0], [0.9, 0.2, 0.3, 0.1, 0.1, 0.1])
    assert (few.sensitivity, few.specificity, few.interval) == (0.5, 1.0, None)
    assert str(few) == "sensitivity 0.50 at specificity 1.00 (asked: 0.90)"


def test_no_threshold_is_specific_enough_where_the_surest_is_wrong():
    point = tpukit.metrics.sensitivity_at(0.9, [0, 1, 0, 1], [0.9, 0.8, 0.1, 0.2])
    assert (point.sensitivity, point.threshold) == (0.0, math.inf)
    # A threshold of 0.9 is specific enough, but finds no positive sample either.
    of_eleven = tpukit.metrics.sensitivity_at(0.9, [0, 1] + [0] * 10, [0.9, 0.8] + [0.8] * 10)
    assert (of_eleven.specificity, of_eleven.threshold) == (1.0, math.inf)
    with pytest.raises(ValueError, match="got 90\n  fix:   0.9"):
        tpukit.metrics.sensitivity_at(90, [0, 1], [0.1, 0.2])


def test_a_ring_marks_it_on_the_curve():
    truth, chances, study = exams()
    figure = tpukit.metrics.show_roc(
        truth, chances, groups=study, group="study", sample="exam", specificity=0.9
    )
    point = tpukit.metrics.sensitivity_at(0.9, truth, chances, groups=study)
    assert [1 - point.specificity, point.sensitivity] in [
        [*line.get_xydata()[0]] for line in figure.axes[0].lines
    ]
    assert f"; {point}." in figure.alt
    assert "exams positive" in figure.alt


def test_groups_that_nearly_all_have_both_classes_have_an_interval():
    random = np.random.default_rng(0)
    patient = np.repeat(np.arange(40), 20)
    truth = (random.random(800) < 0.3).astype(int)
    chances = truth + random.normal(0, 1, 800)
    found = score(truth, chances, patient, resamples=50)
    assert (found.groups, found.positive_groups, found.negative_groups) == (40, 39, 40)
    assert found.auroc_interval[0] < found.auroc < found.auroc_interval[1]
    assert found.too_few() == ""


def test_a_probability_that_is_nan_is_refused_also_for_a_label_that_no_sample_has():
    with pytest.raises(ValueError, match="must not be nan"):
        tpukit.metrics.auroc_table(np.zeros((3, 1)), np.full((3, 1), math.nan))
