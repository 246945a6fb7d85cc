"""Numbered samples, and the same training in plain PyTorch, in one process, without tpukit."""

import contextlib
import copy
from dataclasses import dataclass

BATCH = 4  # samples per core and batch
MOMENTUM = 0.9
# pixels: BatchNorm sees 4 x 36 numbers of a channel, so its variance by n and by n - 1 differ by
# 0.7 %
_SIDE = 6


class Numbers:
    """Images (6, 6, 3) uint8 that encode their number; labels (number, two targets).

    A source of whole batches, as `PackedImages` and a `CachedImages` are.
    """

    def __init__(self, count: int):
        import numpy

        numbers = numpy.arange(count)
        self.shape = (_SIDE, _SIDE, 3)
        self.images = numpy.random.default_rng(0).integers(
            0, 256, (count, *self.shape), numpy.uint8
        )
        self.images[:, 0, 0, 0] = numbers // 256
        self.images[:, 0, 0, 1] = numbers % 256
        self.labels = numpy.stack([numbers, numbers * 7 % 11 / 11, numbers * 3 % 5 / 5], 1).astype(
            numpy.float32
        )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices, out=None):
        """Return (n, 6, 6, 3) uint8 images."""
        import numpy

        return numpy.take(self.images, indices, axis=0, out=out)


class OneByOne:
    """The same samples, read one by one; a fourth number of the label is drawn at each read."""

    def __init__(self, numbers: Numbers):
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, sample: int) -> tuple:
        import torch

        label = torch.cat([torch.from_numpy(self.numbers.labels[sample]), torch.rand(1)])
        return torch.from_numpy(self.numbers.images[sample]).permute(2, 0, 1), label


def numbers_of(images):
    """Return the numbers that images (B, 3, 6, 6) spell, (B,) float32."""
    return 256 * images[:, 0, 0, 0].float() + images[:, 1, 0, 0].float()


def make_network():
    """Return a network with weights of one, two and four axes and BatchNorm; always the same."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(
                nn.Conv2d(3, 8, 3, padding=1, bias=False),
                nn.BatchNorm2d(8),
                nn.Tanh(),
                nn.Flatten(),
            ),
            *(nn.Linear(8 * _SIDE**2, 16), nn.Tanh(), nn.Linear(16, 2)),
        )


def prepare(images):
    """Return images as the network takes them."""
    return images.float() / 128 - 1


def loss(outputs, labels):
    """Return the mean square of what is not learned yet."""
    return (outputs - labels[:, 1:3]).square().mean()


@dataclass(frozen=True)
class Trained:
    """The loss of every step, and after it the network's state and its mean so far."""

    losses: list[float]
    states: list[dict]
    averages: list[dict]


def train(data: Numbers, steps: list, *, rates: list, clips: list, bf16: bool = False) -> Trained:
    """Train by SGD with momentum on the whole batch of each step.

    Args:
        data: the samples.
        steps: of each step, by core: the batches of sample numbers that this core had. BatchNorm
            sees one batch at a time, as it does on a core; its running statistics are the mean over
            the cores.
        rates: the learning rate of each step.
        clips: the largest norm of the gradient of each step, None for no limit.
        bf16: whether the forward pass is under autocast.
    """
    import torch

    model = make_network().train()
    trained = Trained([], [], [])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=MOMENTUM)
    average = torch.optim.swa_utils.AveragedModel(model)
    for cores, rate, clip in zip(steps, rates, clips, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        before = _buffers(model)
        after = []
        total = 0.0
        for batches in cores:
            model.load_state_dict(before, strict=False)
            for numbers in batches:
                images, labels = _samples(data, numbers)
                with _precision(bf16):
                    outputs = model(prepare(images))
                value = loss(outputs.float(), labels) / (len(cores) * len(batches))
                value.backward()
                total += value.item()
            after.append(_buffers(model))
        means = {
            name: torch.stack([one[name].double() for one in after]).mean(0) for name in before
        }
        model.load_state_dict(means, strict=False)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        trained.losses.append(total)
        trained.states.append(copy.deepcopy(model.state_dict()))
        trained.averages.append(copy.deepcopy(average.module.state_dict()))
    return trained


def evaluate(state: dict, data: Numbers, *, bf16: bool = False) -> float:
    """Return the loss of all samples in one batch, of a network in this state."""
    import torch

    model = make_network().eval()
    model.load_state_dict(state)
    images, labels = _samples(data, range(len(data)))
    with torch.no_grad(), _precision(bf16):
        outputs = model(prepare(images))
    return loss(outputs.float(), labels).item()


def apart(found: dict, expected: dict) -> tuple[float, str]:
    """Return the largest distance of a tensor from the other state, and its name.

    The distance is a share of the way from the start.
    """
    start = make_network().state_dict()
    shares = {}
    for name, value in expected.items():
        way = (value.double() - start[name].double()).norm()
        shares[name] = ((found[name].double() - value.double()).norm() / way).item()
        if name.endswith("running_var"):  # XLA divides by n what torch divides by n - 1
            shares[name] = max(0.0, shares[name] - 1 / (BATCH * _SIDE**2 - 1))
    return max((share, name) for name, share in shares.items())


def _samples(data: Numbers, numbers) -> tuple:
    import torch

    numbers = [int(number) for number in numbers]
    return torch.from_numpy(data.images[numbers]).permute(0, 3, 1, 2), torch.from_numpy(
        data.labels[numbers]
    )


def _buffers(model) -> dict:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _precision(bf16: bool) -> contextlib.AbstractContextManager:
    import torch

    return torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else contextlib.nullcontext()
