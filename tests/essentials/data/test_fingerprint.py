"""What of a dataset is compared between cores: what it has one of for each sample, and nothing that reading changes."""

import itertools
from pathlib import Path

import numpy
import pandas
import pytest
import torch

from tpukit.essentials.data.fingerprint import fingerprint

HALF, TABLE = list(range(10)), pandas.DataFrame({"path": list("abcdefghij"), "label": range(10)})


class Holding:
    """A dataset of ten samples that holds something."""

    def __init__(self, **held):
        vars(self).update(held)

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return index


def turned(rows):
    return rows[::-1]


DIFFER = {
    "a tensor": lambda turn: Holding(labels=torch.tensor(turn(HALF))),
    "half precision": lambda turn: Holding(labels=torch.tensor(turn(HALF), dtype=torch.bfloat16)),
    "a column in half precision": lambda turn: Holding(
        labels=torch.tensor([turn(HALF), turn(HALF)], dtype=torch.bfloat16).T[:, 0]
    ),
    "an array": lambda turn: Holding(y=numpy.array(turn(HALF))),
    "numbers of eight bits": lambda turn: Holding(
        labels=torch.tensor(turn(HALF)).to(torch.float8_e4m3fn)
    ),
    "a list of numpy's numbers": lambda turn: Holding(labels=list(numpy.array(turn(HALF)))),
    "a list of torch's numbers": lambda turn: Holding(labels=list(torch.tensor(turn(HALF)))),
    "pairs with numpy's numbers": lambda turn: Holding(
        samples=[(str(one), numpy.int64(one)) for one in turn(HALF)]
    ),
    "sixteen tensors": lambda turn: Holding(tensors=[torch.tensor(turn(HALF))] * 16),
    "a list of files": lambda turn: Holding(files=[Path(str(one)) for one in turn(HALF)]),
    "a list of pairs": lambda turn: Holding(samples=[(str(one), one) for one in turn(HALF)]),
    "a list of rows": lambda turn: Holding(
        rows=[{"text": str(one), "label": one} for one in turn(HALF)]
    ),
    "a table": lambda turn: Holding(table=turn(TABLE)),
    "records with texts": lambda turn: Holding(records=turn(TABLE.to_records(index=False))),
    "columns": lambda turn: Holding(
        columns={"text": [str(one) for one in turn(HALF)], "label": HALF}
    ),
    "labels by name": lambda turn: Holding(label_of={str(one): one for one in turn(HALF)}),
    "names of classes": lambda turn: Holding(classes=turn(["cat", "dog"])),
    "numbers of classes": lambda turn: Holding(
        number_of=dict(zip(["cat", "dog"], turn([0, 1]), strict=True))
    ),
    "a subset": lambda turn: torch.utils.data.Subset(Holding(), turn(HALF)[:5]),
    "within a subset": lambda turn: torch.utils.data.Subset(Holding(y=turn(HALF)), range(5)),
    "a list": lambda turn: turn(HALF),
    "Hugging Face's": lambda turn: (
        __import__("datasets").Dataset.from_dict({"label": HALF}).select(turn(HALF))
    ),
}


@pytest.mark.parametrize("name", DIFFER)
def test_samples_in_another_order_are_another_dataset(name):
    one, again, other = (fingerprint(DIFFER[name](turn)) for turn in (list_of, list_of, turned))
    assert one == again != other


def list_of(rows):
    return rows


class Polars(Holding):
    """What a table of Polars has in common with one of Arrow."""

    def __init__(self, number):
        self.columns = ["label"]
        self.slice = (abs, len)[number]


MAY_DIFFER = {
    "pixels that are read when they are asked for": lambda number: Holding(
        pixels=numpy.full((10, 64, 64), number)
    ),
    "a cache that fills": lambda number: Holding(
        cache=[None] * number + [torch.zeros(3)] * (10 - number)
    ),
    "functions": lambda number: Holding(transform=(abs, len)[number]),
    "a dtype that numpy does not have": lambda number: Holding(
        weights=torch.quantize_per_tensor(torch.full((10,), float(number)), 1.0, 0, torch.qint8)
    ),
    "numbers": lambda number: Holding(epoch=number),
    "a table of Polars, whose columns are names": lambda number: Holding(table=Polars(number)),
    "a length that is none": lambda number: (itertools.count, zip)[0](),
}


@pytest.mark.parametrize("name", MAY_DIFFER)
def test_what_may_differ_between_cores_is_not_looked_at(name):
    assert fingerprint(MAY_DIFFER[name](0)) == fingerprint(MAY_DIFFER[name](1))
