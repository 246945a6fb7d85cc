"""Samples that cannot be one batch are named, with what they are, whichever process has read them."""

import resource

import pandas
import pytest
import torch

from tpukit.essentials.data import Batches
from tpukit.training import StreamBatches


class Given(torch.utils.data.Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


FIRST = (torch.zeros(3, 4), 0)
ODD = {
    "None": (None, "NoneType"),
    "another shape": ((torch.zeros(3, 5), 0), r"\(Tensor \(3, 5\) torch.float32, int\)"),
    "a part more": ((torch.zeros(3, 4), 0, 1), r"\(Tensor \(3, 4\) torch.float32, int, int\)"),
    "a table, which has a shape and no one dtype": (
        pandas.DataFrame({"a": [1, 2]}),
        r"DataFrame \(2, 1\)",
    ),
    "a part of no tensor": ((torch.zeros(3, 4), {1}), r"\(Tensor \(3, 4\) torch.float32, set\)"),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("sample", "form"), ODD.values(), ids=ODD)
def test_the_odd_sample_is_named(sample, form, workers):
    batches = Batches(Given([FIRST, FIRST, FIRST, sample]), batch_size=2, workers=workers)
    first = r"\(Tensor \(3, 4\) torch.float32, int\)"
    with pytest.raises(ValueError, match=rf"sample 2: {first}; sample 3: {form}(.|\n)*fix:"):
        list(batches)


def test_the_odd_sample_of_a_stream_is_named():
    batches = StreamBatches(lambda share, shares: [FIRST, None], steps=1, batch_size=2)
    with pytest.raises(ValueError, match="sample 1: NoneType"):
        list(batches)


class FullMemory(Given):
    """A dataset whose loader process gets no shared memory, as where /dev/shm is full."""

    def __getitem__(self, index):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        return super().__getitem__(index)


def test_full_shared_memory_is_not_called_a_fault_of_the_samples():
    batches = Batches(FullMemory([torch.zeros(1_000)] * 4), batch_size=2, workers=1)
    with pytest.raises(RuntimeError, match="unable to (write|resize|allocate)") as raised:
        list(batches)
    assert "cannot be stacked" not in str(raised.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_key_that_one_sample_lacks_is_named(workers):
    batches = Batches(Given([{"x": 1, "mask": 2}, {"x": 1}]), batch_size=2, workers=workers)
    with pytest.raises(
        ValueError, match=r"sample 0: \{'x': int, 'mask': int\}; sample 1: \{'x': int\}(.|\n)*fix:"
    ):
        list(batches)
