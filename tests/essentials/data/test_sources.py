import numpy as np
import pytest
import torch
from helpers.sources import Pixels
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from tpukit.essentials.data.batches import Batches
from tpukit.essentials.data.sources import as_batch_source
from tpukit.essentials.display import InvalidTypeError
from tpukit.training.streams import StreamBatches


class Bare(Pixels):
    """A source with nothing that is optional."""

    read_ahead = property()


def test_a_source_is_itself():
    source = Pixels(3)
    assert as_batch_source(source) is source


@pytest.mark.parametrize(
    "dataset",
    [
        [1, 2, 3],
        torch.zeros(5, 3),
        TensorDataset(torch.zeros(5, 3)),
        Subset(TensorDataset(torch.zeros(5)), [1]),
    ],
    ids=["list", "tensor", "dataset", "its subset"],
)
def test_any_other_dataset_is_not_a_source(dataset):
    assert as_batch_source(dataset) is None


def test_a_subset_of_a_subset_of_a_source_takes_the_right_images_and_labels():
    source = Pixels(50)
    source.encoding = "jpeg"
    subset = as_batch_source(Subset(Subset(source, [40, 41, 42, 7]), [3, 0, 1]))
    assert len(subset) == 3
    assert subset.labels[:, 0].tolist() == [7, 40, 41]
    assert (subset.shape, subset.encoding) == (source.shape, "jpeg")
    out = np.empty((2, 2, 2, 3), np.uint8)
    assert subset.take(np.array([2, 0]), out) is out
    assert out[:, 0, 0, 0].tolist() == [41, 7]
    subset.read_ahead(np.array([1]))
    assert source.asked == [[40]]


def test_a_subset_of_a_source_without_the_optional_attributes_works():
    subset = as_batch_source(Subset(Bare(5), [4, 2]))
    assert subset.encoding is None
    subset.read_ahead([0])
    assert subset.take(np.array([1]))[0, 0, 0, 0] == 2


def test_joined_sources_are_a_source_that_asks_each_for_its_images_of_a_batch():
    parts = [Pixels(10), Subset(Pixels(50), [40, 41, 42]), Bare(5)]
    joined = as_batch_source(ConcatDataset(parts))
    assert (len(joined), joined.shape) == (18, parts[0].shape)
    assert joined.labels[[0, 9, 10, 12, 13, 17], 0].tolist() == [0, 9, 40, 42, 0, 4]
    out = np.empty((5, 2, 2, 3), np.uint8)
    assert joined.take(np.array([17, 0, 12, 10, 3]), out) is out
    assert out[:, 0, 0, 0].tolist() == [4, 0, 42, 40, 3]
    assert joined.take([11])[0, 0, 0, 0] == 41
    joined.read_ahead(np.array([2, 11, 14]))
    assert parts[0].asked == [[2]]
    assert parts[1].dataset.asked == [[41]]
    subset = as_batch_source(Subset(ConcatDataset(parts), [12, 1]))
    assert subset.take(np.array([0, 1]))[:, 0, 0, 0].tolist() == [42, 1]


def test_joined_sources_whose_images_or_classes_differ_are_no_source():
    larger = Pixels(4)
    larger.shape = (4, 4, 3)
    for part in (larger, TensorDataset(torch.zeros(5))):
        assert as_batch_source(ConcatDataset([Pixels(3), part])) is None
    one, other = Pixels(3), Pixels(3)
    one.names, other.names = ["cat", "dog"], ["dog", "cat"]
    with pytest.raises(ValueError, match="classes or labels differently\n  found: cat, dog; and"):
        as_batch_source(ConcatDataset([one, other]))


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_joined_sources_are_those_of_the_samples(workers):
    joined = ConcatDataset([ByItem(7), Subset(ByItem(30), [20, 21, 22])])
    batches = Batches(joined, batch_size=5, workers=workers)
    images, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    samples = [joined[index] for index in range(10)]
    assert torch.equal(images, torch.stack([image for image, _ in samples]))
    assert torch.equal(labels, torch.stack([label for _, label in samples]))


class ByItem(Pixels):
    """A source that gives single samples, too."""

    take = Pixels.take

    def __getitem__(self, index):
        return torch.full((3, 2, 2), index, dtype=torch.uint8), torch.from_numpy(
            self.labels[index].copy()
        )


def changed(sample):
    image, label = sample
    return 255 - image, label * 100


class OtherItems(ByItem):
    def __getitem__(self, index):
        return changed(super().__getitem__(index))


class OtherSubset(Subset):
    def __getitem__(self, index):
        return changed(super().__getitem__(index))


class OtherBatches(Subset):
    def __getitems__(self, indices):
        return [changed(super(OtherBatches, self).__getitem__(index)) for index in indices]


class OtherConcat(ConcatDataset):
    def __getitem__(self, index):
        return changed(super().__getitem__(index))


class LikeASubset:
    def __init__(self, dataset, indices):
        self.dataset, self.indices = dataset, indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        return changed(self.dataset[self.indices[index]])


OVERRIDDEN = {
    "a source's": lambda: OtherItems(20),
    "a source's, in a Subset": lambda: Subset(OtherItems(30), range(20)),
    "a Subset's": lambda: OtherSubset(ByItem(30), range(20)),
    "a Subset's, in a Subset": lambda: Subset(OtherSubset(ByItem(30), range(25)), range(20)),
    "a Subset's of a dataset": lambda: OtherSubset([ByItem(20)[i] for i in range(20)], range(20)),
    "a Subset's for many": lambda: OtherBatches(ByItem(30), range(20)),
    "a ConcatDataset's": lambda: OtherConcat([ByItem(20)]),
    "something like a Subset's": lambda: LikeASubset(ByItem(30), list(range(20))),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("whose", OVERRIDDEN)
def test_an_item_that_a_class_changes_arrives_changed(whose, workers):
    batches = Batches(OVERRIDDEN[whose](), batch_size=5, workers=workers)
    images, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    assert images[:, 0, 0, 0].tolist() == [255 - i for i in range(20)]
    assert labels[:, 0].tolist() == [100 * i for i in range(20)]


def test_a_class_with_its_own_take_is_a_source_again():
    class Both(OtherItems):
        def take(self, indices, out=None):
            return 255 - super().take(indices)

    assert as_batch_source(both := Both(3)) is both
    assert as_batch_source(Subset(ByItem(9), [4])) is not None


def test_a_subset_of_nothing_is_still_a_source():
    assert len(as_batch_source(Subset(Pixels(5), []))) == 0


class Numbers(IterableDataset):
    """A dataset that is read in order."""

    def __iter__(self):
        return iter(range(100))


class Ours(DataLoader):
    """A loader of a class of one's own."""


@pytest.mark.parametrize(
    "loader", [DataLoader(range(40), batch_size=8), Ours(Numbers(), batch_size=8)]
)
@pytest.mark.parametrize("as_stream", [False, True])
def test_a_loader_is_refused_with_the_call_that_takes_its_dataset(loader, as_stream):
    with pytest.raises(InvalidTypeError, match="makes batches already") as error:
        StreamBatches(loader, steps=3, batch_size=4) if as_stream else Batches(loader, batch_size=4)
    assert error.value.fix.startswith("core.batches(loader.dataset, batch_size=8), ")


def test_a_loader_without_batches_has_the_batch_size_that_was_asked_for():
    with pytest.raises(InvalidTypeError, match="batch_size=4"):
        Batches(DataLoader(range(40), batch_size=None), batch_size=4)
