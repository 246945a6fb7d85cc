"""Samplers: as many of each class, and a core's part of another sampler."""

import torch


class BalanceClassSampler(torch.utils.data.Sampler):
    """As many of each class as the smallest has."""

    def __init__(self, labels, mode="downsampling"):
        self.of = {label: [at for at, one in enumerate(labels) if one == label] for label in set(labels)}
        self.each = min(map(len, self.of.values()))

    def __iter__(self):
        return iter([at for places in self.of.values() for at in places[: self.each]])

    def __len__(self):
        return self.each * len(self.of)


class DistributedSamplerWrapper(torch.utils.data.DistributedSampler):
    """A core's part of what a sampler gives."""

    def __init__(self, sampler, num_replicas, rank, shuffle=True):
        super().__init__(list(sampler), num_replicas, rank, shuffle)

    def __iter__(self):
        return iter([self.dataset[at] for at in super().__iter__()])
