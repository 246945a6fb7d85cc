"""Samples that cannot be one batch are named, with what they are, whichever process has read them."""

import pytest
import torch

from tpukit.essentials.data import Batches
from tpukit.train import StreamBatches


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
    "another shape": ((torch.zeros(3, 5), 0), r"\(Tensor \(3, 5\), int\)"),
    "a part more": ((torch.zeros(3, 4), 0, 1), r"\(Tensor \(3, 4\), int, int\)"),
    "a part of no tensor": ((torch.zeros(3, 4), {1}), r"\(Tensor \(3, 4\), set\)"),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("sample", "form"), ODD.values(), ids=ODD)
def test_the_odd_sample_is_named(sample, form, workers):
    batches = Batches(Given([FIRST, FIRST, FIRST, sample]), batch_size=2, workers=workers)
    with pytest.raises(ValueError, match=rf"sample 2: \(Tensor \(3, 4\), int\); sample 3: {form}(.|\n)*fix:"):
        list(batches)


def test_the_odd_sample_of_a_stream_is_named():
    batches = StreamBatches(lambda share, shares: [FIRST, None], steps=1, batch_size=2)
    with pytest.raises(ValueError, match="sample 1: NoneType"):
        list(batches)
