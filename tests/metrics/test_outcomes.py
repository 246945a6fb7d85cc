import numpy as np
import pandas
import pytest
import torch

import tpukit
from tpukit.metrics.outcomes import outcomes

TRUTH = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 1])
CHANCES = np.array([0.9, 0.6, 0.99, 0.2, 0.1, 0.7, 0.01, 0.4, 0.5, 0.05])


def test_outcomes_have_their_names():
    words = outcomes(TRUTH, torch.from_numpy(CHANCES))
    assert list(words[:6]) == ["hit", "hit", "hit", "miss", "true negative", "false alarm"]
    assert words[8] == "false alarm"  # at the threshold
    assert list(outcomes(TRUTH, CHANCES, threshold=0.65)[:3]) == ["hit", "miss", "hit"]


def test_typical_ones_are_chosen_and_fewer_where_there_are_not_so_many():
    chosen = tpukit.metrics.choose_predictions(
        TRUTH, CHANCES, hits=1, misses=5, false_alarms=1, true_negatives=2
    )
    assert list(chosen) == [0, 9, 3, 5, 6, 7]
    assert len(tpukit.metrics.choose_predictions(TRUTH[:3], CHANCES[:3])) == 2


@pytest.mark.parametrize("shapes", [((-1,), (-1, 1)), ((-1, 1), (-1,)), ((-1, 1), (-1, 1))])
def test_the_hardest_mistakes_are_the_same_if_a_model_returns_a_column(shapes):
    of_labels, of_chances = shapes
    found = tpukit.metrics.hardest_mistakes(TRUTH.reshape(of_labels), CHANCES.reshape(of_chances))
    assert list(found) == [9, 3, 5, 8]


def test_the_hardest_mistakes_come_worst_first_and_one_of_each_study():
    assert list(tpukit.metrics.hardest_mistakes(TRUTH, CHANCES)) == [9, 3, 5, 8]
    study = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 1])
    assert list(tpukit.metrics.hardest_mistakes(TRUTH, CHANCES, groups=study)) == [9, 5]
    assert len(tpukit.metrics.hardest_mistakes(TRUTH[:3], CHANCES[:3])) == 0


def test_each_image_stands_under_the_name_of_its_outcome(tmp_path):
    images = torch.randint(0, 256, (10, 1, 16, 16), dtype=torch.uint8)
    figure = tpukit.metrics.show_outcomes(
        images, TRUTH, CHANCES, notes=[f"study {number}" for number in range(10)]
    )
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == list(outcomes(TRUTH, CHANCES))
    assert [axes.get_title(loc="right") for axes in figure.axes][:2] == ["0.90", "0.60"]
    assert figure.alt.startswith(
        "10 images by the outcome of their prediction, with its probability: hit 0.90, "
    )
    assert len(tpukit.metrics.show_outcomes(images, TRUTH, CHANCES, limit=3).axes) == 3
    figure.savefig(tmp_path / "outcomes.png")


def test_notes_of_a_sorted_table_stand_under_their_images():
    images = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    notes = pandas.Series(["a", "b", "c"], index=[2, 0, 1])
    figure = tpukit.metrics.show_outcomes(images, TRUTH[:3], CHANCES[:3], notes=notes)
    assert [text.get_text() for axes in figure.axes for text in axes.texts] == ["a", "b", "c"]


def test_what_does_not_belong_together_is_refused_with_the_fix():
    images = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="got 3 images and 10 labels\n  fix:"):
        tpukit.metrics.show_outcomes(images, TRUTH, CHANCES)
    with pytest.raises(
        ValueError, match=f"{len(TRUTH)} images and {len(TRUTH)} labels, with 1 notes"
    ):
        tpukit.metrics.show_outcomes(
            torch.zeros(len(TRUTH), 1, 4, 4), TRUTH, CHANCES, notes=["one"]
        )
    with pytest.raises(ValueError, match=r"got \(10, 2\) and \(10,\)\n  fix:"):
        tpukit.metrics.choose_predictions(np.zeros((10, 2)), CHANCES)
