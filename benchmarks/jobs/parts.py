"""The parts that are the same in all jobs: images, network, and a loss with a clock."""

import os
import time
from pathlib import Path

import torch
from torch import nn

IMAGES = 512
BAD = 77  # the sample that raises if the variable BAD_SAMPLE is set


class Images(torch.utils.data.Dataset):
    """Random images, (3, 32, 32), and whether they are bright."""

    def __init__(self):
        self.pixels = torch.rand(IMAGES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        means = self.pixels.mean((1, 2, 3))
        self.labels = (means > means.median()).float()[:, None]

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple:
        if index == BAD and "BAD_SAMPLE" in os.environ:
            raise ValueError("a bad sample")
        return self.pixels[index], self.labels[index]


def network() -> nn.Module:
    """Return three convolutions."""
    layers = []
    for before, width in ((3, 8), (8, 16), (16, 32)):
        layers += [nn.Conv2d(before, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1))


def loss_fn(outputs, targets):
    """Return the binary cross-entropy; its second call notes that the first step is done."""
    loss_fn.calls += 1
    if loss_fn.calls == 2:
        Path(os.environ["CLOCK"]).write_text(str(time.time()))
    return nn.functional.binary_cross_entropy_with_logits(outputs, targets)


loss_fn.calls = 0
