"""How a checkpoint recognises its dataset: by contents and settings, not by the machine."""

import ntpath
import os
import types
from pathlib import Path

import numpy
import pandas
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from tpukit.essentials.data import different_parts, identity

TEN = list(range(10))


class Holding:
    """A dataset of ten samples that holds something."""

    def __init__(self, **held):
        vars(self).update(held)

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index


class Describing(Holding):
    def checkpoint_identity(self):
        return {"fold": self.fold}


class Polars(Holding):
    """What a table of Polars has in common with one of Arrow."""

    columns = ("label",)

    def slice(self, offset, length):
        return self


def files(folder, names="abcdefghij"):
    return [f"{folder}/{name}.jpg" for name in names]


def large(value):
    return torch.full((10, 3, 64, 64), value)


DIFFERENT = {
    "a fold": (Holding(fold=0), Holding(fold=1)),
    "a size": (Holding(shape=(64, 64, 3)), Holding(shape=(128, 128, 3))),
    "a window": (Holding(window="lung"), Holding(window="bone")),
    "options": (Holding(options={"fold": 0}), Holding(options={"fold": 1})),
    "files": (Holding(files=files("/a")), Holding(files=files("/a", "abcdefghik"))),
    "files of two folds": (
        Holding(files=[*files("/a/0", "abcde"), *files("/a/1", "abcde")]),
        Holding(files=[*files("/a/0", "abcde"), *files("/a/2", "abcde")]),
    ),
    "a subset": (Subset(Holding(), TEN[:5]), Subset(Holding(), TEN[5:])),
    "numpy's subset": (
        Subset(Holding(), numpy.arange(5)),
        Subset(Holding(), numpy.arange(5) + 5),
    ),
    "a subset of numpy's numbers": (
        Subset(Holding(), list(numpy.arange(5))),
        Subset(Holding(), list(numpy.arange(5) + 5)),
    ),
    "a fold that is numpy's number": (Holding(fold=numpy.int64(0)), Holding(fold=numpy.int64(1))),
    "the dataset of a subset": (
        Subset(Holding(fold=0), TEN[:5]),
        Subset(Holding(fold=1), TEN[:5]),
    ),
    "large tensors": (TensorDataset(large(0.0)), TensorDataset(large(1.0))),
    "one of two datasets": (
        ConcatDataset([Holding(), Holding(fold=0)]),
        ConcatDataset([Holding(), Holding(fold=1)]),
    ),
    "features of other objects": (
        Holding(features=numpy.zeros((50, 2000))),
        Holding(features=numpy.ones((50, 2000))),
    ),
    "a table": (
        Holding(table=pandas.DataFrame({"path": files("/a"), "label": TEN})),
        Holding(table=pandas.DataFrame({"path": files("/a"), "label": TEN[::-1]})),
    ),
    "records with texts": tuple(
        Holding(records=pandas.DataFrame({"name": list(names)}).to_records(index=False))
        for names in ("abcdefghij", "jihgfedcba")
    ),
    "described by itself": (Describing(fold=0), Describing(fold=1)),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_another_dataset_of_the_same_length_is_recognised(kind):
    first, second = map(identity, DIFFERENT[kind])
    assert different_parts(first, second)
    assert different_parts(second, first)


SAME = {
    "a folder that moved": (Holding(files=files("/content/a")), Holding(files=files("/kaggle/b"))),
    "its root": (Holding(root="/content/a"), Holding(root=Path("/kaggle/b"))),
    "samples of ImageFolder": (
        Holding(samples=[(path, 1) for path in files("/content/a")]),
        Holding(samples=[(path, 1) for path in files("/b")]),
    ),
    "a table of files": (
        Holding(table=pandas.DataFrame({"path": files("/a"), "label": TEN})),
        Holding(table=pandas.DataFrame({"path": files("/b/c"), "label": TEN})),
    ),
    "numpy's numbers and Python's": (
        Holding(fold=0, labels=TEN),
        Holding(fold=numpy.int64(0), labels=list(numpy.array(TEN))),
    ),
    "a table of a library that is not known": (Holding(table=Polars()), Holding(table=Polars())),
    "processes": (Holding(num_workers=2, rank=0), Holding(num_workers=8, rank=1)),
    "images read so far": (Holding(cache=large(0.0)), Holding(cache=large(1.0))),
    "counted while it is read": (Describing(fold=0, reads=1), Describing(fold=0, reads=2)),
}


@pytest.mark.parametrize("kind", SAME)
def test_the_same_dataset_is_recognised_on_another_machine(kind):
    first, second = map(identity, SAME[kind])
    assert not different_parts(first, second)


def test_a_setting_that_differs_is_shown_with_both_values():
    (difference,) = different_parts(identity(Holding(fold=0)), identity(Holding(fold=1)))
    assert difference == "dataset.fold 0, here 1"


def test_files_on_two_drives_of_windows_are_recognised(monkeypatch):
    windows = types.SimpleNamespace(path=ntpath, fspath=os.fspath)
    monkeypatch.setattr("tpukit.essentials.data.identities.os", windows)
    first, other = (
        identity(Holding(files=[f"{drive}:/{name}.jpg" for name in "abcdefghij"] + ["D:/a.jpg"]))
        for drive in "CE"
    )
    assert different_parts(first, other) == ["dataset.files"]
