"""What measures and figures are given: one label, probabilities, groups."""

import functools

import numpy as np
import pandas
import pytest
import torch

from tpukit.metrics import (
    auroc_table,
    choose_predictions,
    hardest_mistakes,
    sensitivity_at,
    show_outcomes,
    show_predictions,
    show_roc,
)

RANDOM = np.random.default_rng(0)
LABELS = np.repeat([0, 1], 50)
CHANCES = (RANDOM.random(100) + 0.5 * LABELS) / 1.5
OF_TWO_CLASSES = np.stack([1 - CHANCES, CHANCES], axis=1)
LOGITS = torch.from_numpy(RANDOM.normal(size=100) + LABELS)
IMAGES = np.zeros((100, 3, 8, 8), np.uint8)

OF_ONE_LABEL = {
    "sensitivity_at": functools.partial(sensitivity_at, 0.9),
    "show_roc": show_roc,
    "choose_predictions": choose_predictions,
    "hardest_mistakes": hardest_mistakes,
    "show_outcomes": functools.partial(show_outcomes, IMAGES),
}
WITH_A_THRESHOLD = {name: OF_ONE_LABEL[name] for name in list(OF_ONE_LABEL)[2:]}


@pytest.mark.parametrize("name", OF_ONE_LABEL)
def test_two_columns_are_refused_for_one_label_and_the_fix_is_accepted(name):
    measure = OF_ONE_LABEL[name]
    with pytest.raises(ValueError, match=r"fix:   probabilities\[:, 1\]"):
        measure(LABELS, OF_TWO_CLASSES)
    measure(LABELS, OF_TWO_CLASSES[:, 1])
    both = np.stack([1 - LABELS, LABELS], axis=1)
    with pytest.raises(ValueError, match=r"fix:   labels\[:, 0\] and probabilities\[:, 0\]"):
        measure(both, OF_TWO_CLASSES)
    measure(both[:, 0], OF_TWO_CLASSES[:, 0])
    measure(LABELS[:, None], CHANCES[:, None])


@pytest.mark.parametrize("name", OF_ONE_LABEL)
def test_a_missing_label_is_refused_with_the_table_as_its_cause(name):
    table = pandas.DataFrame({"label": LABELS.astype(float)})
    table.loc[3, "label"] = None
    with pytest.raises(ValueError, match=r"found: 1 others, such as nan\n.*table\.isna\(\)\.sum"):
        OF_ONE_LABEL[name](table["label"], CHANCES)


def test_a_number_may_be_a_scalar_of_torch():
    found = sensitivity_at(torch.tensor(0.75), LABELS, CHANCES)
    assert found == sensitivity_at(0.75, LABELS, CHANCES)


@pytest.mark.parametrize("name", WITH_A_THRESHOLD)
def test_logits_are_refused_where_a_threshold_decides_and_the_fix_is_accepted(name):
    measure = WITH_A_THRESHOLD[name]
    with pytest.raises(ValueError, match=r"fix:   if they are logits, pass torch\.sigmoid"):
        measure(LABELS, LOGITS)
    measure(LABELS, torch.sigmoid(LOGITS))
    with pytest.raises(ValueError, match="a threshold must be a probability, 0 to 1, got 3"):
        measure(LABELS, CHANCES, threshold=3)
    measure(LABELS, CHANCES, threshold=0.2)


def test_logits_have_a_curve_because_only_their_order_counts():
    both = auroc_table(LABELS, LOGITS)["AUROC"], auroc_table(LABELS, torch.sigmoid(LOGITS))["AUROC"]
    assert both[0].tolist() == both[1].tolist()


def test_probabilities_that_are_nan_are_refused_by_each():
    broken = np.where(np.arange(100) == 7, np.nan, CHANCES)
    for measure in OF_ONE_LABEL.values():
        with pytest.raises(ValueError, match="found: 1 of 100 are nan"):
            measure(LABELS, broken)
    with pytest.raises(ValueError, match="found: 1 of 100 are nan"):
        show_predictions(IMAGES, LABELS[:, None], broken[:, None])


def test_a_threshold_decides_which_mistakes_are_the_hardest():
    labels = [1, 1, 0, 0]
    chances = [0.9, 0.3, 0.6, 0.1]
    assert hardest_mistakes(labels, chances).tolist() == [1, 2]
    assert hardest_mistakes(labels, chances, threshold=0.2).tolist() == [2]


def test_the_dotted_line_of_predictions_stands_at_the_threshold():
    images = np.zeros((1, 3, 8, 8), np.uint8)
    figure = show_predictions(images, [[0, 1]], [[0.3, 0.2]], threshold=0.25)
    lines = [line.get_xdata()[0] for axes in figure.axes for line in axes.lines]
    assert 0.25 in lines
    with pytest.raises(ValueError, match="a threshold must be a probability"):
        show_predictions(images, [[0, 1]], [[0.3, 0.2]], threshold=-0.1)


KNOWN = pandas.Series(np.arange(100.0))
WITHOUT_A_GROUP = {
    "nan": KNOWN.where(KNOWN >= 80),
    "None beside words": [None if number < 80 else f"p{number}" for number in range(100)],
    "blanks": ["  " if number < 80 else f"p{number}" for number in range(100)],
}


@pytest.mark.parametrize("case", WITHOUT_A_GROUP)
def test_samples_without_a_group_are_refused_and_not_taken_for_one_group(case):
    groups = WITHOUT_A_GROUP[case]
    for measure in (auroc_table, show_roc, hardest_mistakes, OF_ONE_LABEL["sensitivity_at"]):
        with pytest.raises(ValueError, match="80 of 100 samples have no group") as refused:
            measure(LABELS, CHANCES, groups=groups)
        assert "found: the first is sample 0" in str(refused.value)
        measure(LABELS[40:60], CHANCES[40:60], groups=np.arange(20) // 2)


def test_groups_are_one_per_sample_and_of_any_type():
    with pytest.raises(ValueError, match=r"groups must be one per sample, \(100,\), got \(3,\)"):
        auroc_table(LABELS, CHANCES, groups=[1, 2, 3])
    numbers = np.arange(100) // 4
    kinds = [numbers, torch.from_numpy(numbers), [f"p{number}" for number in numbers]]
    kinds += [pandas.Series(numbers).astype("category"), pandas.Series(numbers)]
    tables = [auroc_table(LABELS, CHANCES, groups=groups) for groups in kinds]
    assert all(table.equals(tables[0]) for table in tables)
    pairs = [("site", number) for number in numbers]
    assert auroc_table(LABELS, CHANCES, groups=pairs).equals(tables[0])
    large = torch.from_numpy(numbers) + 2**60
    assert auroc_table(LABELS, CHANCES, groups=large).equals(tables[0])
