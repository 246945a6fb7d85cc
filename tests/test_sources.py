import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from tpukit.data.sources import as_batch_source


class Pixels:
    """A source: image `i` is `i` in every pixel."""

    shape = (2, 2, 3)
    encoding = "jpeg"

    def __init__(self, count):
        self.labels = np.arange(count, dtype=np.float32)[:, None]
        self.announced = []

    def __len__(self):
        return len(self.labels)

    def take(self, indices, out=None):
        images = np.broadcast_to(np.asarray(indices, np.uint8)[:, None, None, None], (len(indices), *self.shape))
        if out is None:
            return images.copy()
        out[:] = images
        return out

    def read_ahead(self, indices):
        self.announced.append(np.asarray(indices).tolist())


class Bare(Pixels):
    """A source with nothing that is optional."""

    encoding = property()
    read_ahead = property()


def test_a_source_is_itself():
    source = Pixels(3)
    assert as_batch_source(source) is source


@pytest.mark.parametrize(
    "dataset",
    [[1, 2, 3], torch.zeros(5, 3), TensorDataset(torch.zeros(5, 3)), Subset(TensorDataset(torch.zeros(5)), [1])],
    ids=["list", "tensor", "dataset", "its subset"],
)
def test_any_other_dataset_is_not_a_source(dataset):
    assert as_batch_source(dataset) is None


def test_a_subset_of_a_subset_of_a_source_takes_the_right_images_and_labels():
    source = Pixels(50)
    subset = as_batch_source(Subset(Subset(source, [40, 41, 42, 7]), [3, 0, 1]))
    assert len(subset) == 3
    assert subset.labels[:, 0].tolist() == [7, 40, 41]
    assert (subset.shape, subset.encoding) == (source.shape, "jpeg")
    out = np.empty((2, 2, 2, 3), np.uint8)
    assert subset.take(np.array([2, 0]), out) is out
    assert out[:, 0, 0, 0].tolist() == [41, 7]
    subset.read_ahead(np.array([1]))
    assert source.announced == [[40]]


def test_a_subset_of_a_source_without_the_optional_attributes_works():
    subset = as_batch_source(Subset(Bare(5), [4, 2]))
    assert subset.encoding is None
    subset.read_ahead([0])
    assert subset.take(np.array([1]))[0, 0, 0, 0] == 2
