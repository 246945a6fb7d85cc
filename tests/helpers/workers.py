"""Worker functions, models and data that several tests run on forked cores."""

import torch
from torch import nn


class Pairs:
    """A map-style dataset of 64 images (3, 8, 8) with two targets each, the same in every process."""

    def __init__(self, count: int = 64):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(count, 3, 8, 8, generator=generator)
        self.targets = torch.randn(count, 2, generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


def small_net(norm: bool) -> nn.Module:
    torch.manual_seed(1)
    middle = nn.BatchNorm2d(4) if norm else nn.Identity()
    return nn.Sequential(nn.Conv2d(3, 4, 3), middle, nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))


class Tied(nn.Module):
    """A small language model: one weight and one buffer under two names, and one module under two."""

    def __init__(self, tied=True):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.first = self.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.register_buffer("scale", torch.ones(6))
        self.head.register_buffer("scale", self.scale)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words):
        return self.head(self.second(self.first(self.embed(words) * self.scale)))


class Branches(nn.Module):
    """Three layers of which a batch may use any; the last is used by none."""

    def __init__(self, width=3):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(3, 2), nn.Linear(width, 2)
        self.unused, self.frozen = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False)


def weights(model: nn.Module) -> dict:
    return {name: weight.detach() for name, weight in model.named_parameters()}


def train(core, norm: bool, batch_size: int, steps: int = 10) -> dict:
    """Train for some steps of `batch_size` a core; return weights, buffers and the losses seen by this core."""
    model = core.model(small_net(norm))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = core.batches(Pairs(), batch_size=batch_size, shuffle=True, drop_last=True)
    losses = []
    while len(losses) < steps:
        for images, targets in batches:
            with core.step():
                loss = nn.functional.mse_loss(model(images), targets)
                loss.backward()
                core.optimizer_step(optimizer)
            losses.append(core.mean(loss))
            if len(losses) == steps:
                break
    return {"weights": weights(model), "buffers": dict(model.named_buffers()), "losses": losses}


def train_in_shares(norm: bool, batch_size: int, world_size: int, steps: int = 10) -> dict:
    """Do in one process what `train` does on `world_size` cores: every share of a batch is normalised by itself."""
    from tpukit.essentials.data.batches import Batches

    model = small_net(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shares = [
        Batches(
            Pairs(),
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            shuffle=True,
            drop_last=True,
        )
        for rank in range(world_size)
    ]
    done = 0
    while done < steps:
        for parts in zip(*shares, strict=True):
            loss = (
                sum(nn.functional.mse_loss(model(images), targets) for images, targets in parts)
                / world_size
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == steps:
                break
    return {"weights": weights(model)}
