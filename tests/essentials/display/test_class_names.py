"""Names mean the same in every form, and a form whose order is not known is refused."""

import re

import matplotlib
import numpy as np
import pandas
import pytest
import torch

from tpukit.datasets import pack
from tpukit.essentials.display import names_in_order, show_batch
from tpukit.metrics import auroc_table, show_predictions

matplotlib.use("Agg")
NAMES = ["cat", "dog", "bird"]
FORMS = {
    "a list": NAMES,
    "an array": np.array(NAMES),
    "bytes": [name.encode() for name in NAMES],
    "an index": pandas.Index(NAMES),
    "a series": pandas.Series(NAMES),
    "number to name": {2: "bird", 0: "cat", 1: "dog"},
    "numbers of numpy": dict(zip(np.array([2, 0, 1]), ["bird", "cat", "dog"], strict=True)),
    "whole numbers as floats": {2.0: "bird", 0.0: "cat", 1.0: "dog"},
    "numbers as text": {"2": "bird", "0": "cat", "1": "dog"},
    "name to number": {"bird": 2, "cat": 0, "dog": 1},
    "name to number as text": {"bird": "2", "cat": "0", "dog": "1"},
}


@pytest.mark.parametrize("names", FORMS.values(), ids=FORMS)
def test_every_function_reads_the_same_names(names, tmp_path):
    images = torch.zeros(3, 3, 16, 16, dtype=torch.uint8)
    labels = torch.tensor([0, 1, 2])
    assert names_in_order(names, "names") == NAMES
    shown = show_batch(images, labels, names=names)
    assert [axes.get_title(loc="left") for axes in shown.axes] == NAMES
    axes = show_predictions(images, labels, torch.eye(3), names=names).axes
    bars = [text.get_text() for one in axes for text in one.get_yticklabels()]
    assert [text.split()[0] for text in bars if "●" in text] == NAMES
    assert auroc_table(np.eye(3), np.eye(3), names=names).index.tolist() == NAMES
    items = [(np.zeros((8, 8, 3), np.uint8), number) for number in range(3)]
    assert pack(items, tmp_path / "pack", classes=names, progress="off").classes == NAMES


def test_names_of_folders_that_are_numbers_keep_their_numbers():
    # torchvision sorts folders as text: "10" is class 1.
    class_to_idx = {"0": 0, "10": 1, "1": 2}
    assert names_in_order(class_to_idx, "names") == ["0", "10", "1"]


def test_words_for_labels_are_in_the_order_of_the_labels():
    words = {"rv_lv": "RV/LV ratio", "acute": "acute embolus"}
    assert names_in_order(words, "names") == ["RV/LV ratio", "acute embolus"]
    with pytest.raises(ValueError, match="whose numbers are not 0 to 1"):
        names_in_order(words, "classes", words=False)


def test_synonyms_are_one_name():
    assert names_in_order([("tench", "Tinca tinca")], "names") == ["tench, Tinca tinca"]


UNCLEAR = {
    "from 1": ({1: "cat", 2: "dog"}, r"numbers are not 0 to 1\n  found: \{1: 'cat', 2: 'dog'\}"),
    "weights of classes": ({"cat": 0.5, "dog": 2.5}, "numbers are not 0 to 1"),
    "a gap": ({0: "cat", 2: "dog"}, "numbers are not 0 to 1"),
    "two of one number": ({"cat": 0, "kitten": 0}, "numbers are not 0 to 1"),
    "a set": ({"cat", "dog"}, "in their order"),
    "one word": ("cat", "in their order, got 'cat'"),
    "a number": (2, "in their order, got 2"),
    "a filtered series": (pandas.Series(["cat", "dog"], index=[0, 2]), "index is not 0, 1, 2"),
    "a sorted series": (pandas.Series(["cat", "dog"], index=[1, 0]), "index is not 0, 1, 2"),
    "a table": (pandas.DataFrame({"id": [0], "name": ["cat"]}), "got a table"),
    "records": (
        [{"id": 0, "name": "cat"}, {"id": 1, "name": "dog"}],
        "one text for each class number",
    ),
    "a missing name": (["cat", None], "one text for each class number"),
    "a missing name of pandas": (["cat", pandas.NA], "one text for each class number"),
}


@pytest.mark.parametrize(("names", "message"), UNCLEAR.values(), ids=UNCLEAR)
def test_names_whose_order_is_not_known_are_refused(names, message):
    with pytest.raises(ValueError, match=message) as error:
        names_in_order(names, "names")
    assert "fix:" in str(error.value)


FIXES = {
    "from 1": ({1: "cat", 2: "dog"}, r"names=(\[.*\])"),
    "from 1, of names": ({"cat": 1, "dog": 2}, r"names=(\[.*\])"),
    "weights of classes": ({"cat": 0.5, "dog": 2.5}, r"names=(\[.*\])"),
    "a set": ({"cat", "dog"}, r"names=(.*)"),
    "a number": (2, "names=(.*)"),
    "a number of numpy": (np.int64(2), "names=(.*)"),
    "the numbers of a series": (pandas.Series(["dog", "cat"], index=[1, 0]), r"names=(.*?\))"),
    "the order of a series": (pandas.Series(["cat", "dog"], index=[1, 0]), r".*names=(.*?\))"),
    "records": ([{"id": 1, "name": "dog"}, {"id": 0, "name": "cat"}], r"names=(.*?\})"),
    "a table": (pandas.DataFrame({"number": [1, 0], "name": ["dog", "cat"]}), r"names=(.*?\)\))"),
}


@pytest.mark.parametrize(("names", "pattern"), FIXES.values(), ids=FIXES)
def test_the_fix_gives_names_in_their_order(names, pattern):
    with pytest.raises(ValueError, match="fix:") as error:
        names_in_order(names, "names")
    fix = str(error.value).partition("fix:")[2]
    fixed = eval(re.search(pattern, fix)[1], {"series": names, "records": names, "table": names})
    assert len(names_in_order(fixed, "names")) == 2
    if not isinstance(names, int | np.integer):
        assert names_in_order(fixed, "names") == ["cat", "dog"]
