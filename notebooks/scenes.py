"""Rooms with one object, drawn for notebook 10, and a network that finds the object's mask and the depth."""

import math

import numpy
import torch
from torch import nn
from torch.nn import functional
from torchvision import models

# Metres from the camera.
_NEAR = 1.0  # the lower edge of the image
_FAR = 6.0  # the wall


class Scenes:
    """A dataset of drawn scenes, equal for equal seeds; a scene is drawn when it is read, and not stored.

    A floor runs from the camera to a wall with an object on it (a ball, a box or a cone). The farther away it is, the
    smaller and the higher it is in the image. So a network can predict the depth from a single image.

    An item is `(image, {"mask": mask, "depth": depth})`: (3, size, size) uint8 in [0, 255]; (1, size, size) uint8, 1
    where the object is; (1, size, size) uint8, 0 at the camera's feet and 255 at the wall.

    Args:
        count: scenes; at least 1.
        size: pixels, a multiple of 32 for `ResNetUNet`.
        seed: scenes of another seed are others.

    Raises:
        ValueError: count or size is out of range.
    """

    def __init__(self, count: int, *, size: int = 96, seed: int = 0):
        if count < 1 or size < 32:
            raise ValueError(
                f"Scenes draws at least one scene of at least 32 pixels, got {count=} and {size=}\n"
                "  fix:   Scenes(1000, size=96)"
            )
        self.count = count
        self.size = size
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple:
        if not 0 <= index < self.count:
            raise IndexError(f"scene {index} of {self.count}")
        image, mask, depth = draw(numpy.random.default_rng((self.seed, int(index))), self.size)
        targets = {"mask": torch.from_numpy(mask[None]), "depth": torch.from_numpy(depth[None])}
        return torch.from_numpy(image), targets


def draw(random, size: int) -> tuple:
    """Return the image (3, size, size), the mask and the depth (size, size) of one scene, all uint8.

    Args:
        random: a numpy.random.Generator.
        size: pixels.
    """
    y, x = numpy.mgrid[0:size, 0:size].astype("float32") / size
    horizon = random.uniform(0.25, 0.45)  # where floor and wall meet
    # On a floor the depth falls as 1 / (height in the image): set so that it is _FAR at the wall and _NEAR below.
    vanishing = (_FAR * horizon - _NEAR) / (_FAR - _NEAR)
    floor = (horizon - vanishing) * _FAR / numpy.maximum(y - vanishing, 1e-6)
    depth = numpy.minimum(floor, _FAR)
    tiles = numpy.floor(4 * depth) + numpy.floor(4 * (x - 0.5) * depth)
    below = y > horizon
    pattern = numpy.where(below, tiles % 2, numpy.floor(x * random.integers(4, 12)) % 2)
    colours = random.uniform(60, 200, (3, 3)).astype("float32")  # floor, wall, object
    image = numpy.where(below, colours[0, :, None, None], colours[1, :, None, None]) + 18 * pattern

    far = random.uniform(1.2, 4.0)  # metres
    foot = vanishing + (horizon - vanishing) * _FAR / far
    height = random.uniform(0.5, 0.9) / far
    width = random.uniform(0.45, 0.8) / far
    middle = random.uniform(0.2, 0.8)
    across = (x - middle) / (width / 2)  # -1 to 1 over its width
    up = (foot - y) / height  # 0 at its foot, 1 at its top
    shadow = ((x - middle - 0.2 * width) / (0.7 * width)) ** 2 + ((y - foot) / (0.15 * height)) ** 2 < 1
    image = image * numpy.where(shadow & below, 0.55, 1.0)
    shape = random.integers(3)
    if shape == 0:
        inside = across**2 + (2 * up - 1) ** 2 < 1
    elif shape == 1:
        inside = (abs(across) < 0.9) & (up > 0) & (up < 1)
    else:
        inside = (abs(across) < 1 - up) & (up > 0)
    light = 1.15 - 0.45 * (across + 1) / 2 + 0.1 * numpy.sin(random.uniform(4, 20) * math.pi * up)
    image = numpy.where(inside, colours[2, :, None, None] * light, image)
    depth = numpy.where(inside, far, depth)

    noise = random.normal(0, 6, image.shape)
    nearness = 255 * (depth - _NEAR) / (_FAR - _NEAR)
    return tuple(numpy.clip(part, 0, 255).astype("uint8") for part in (image + noise, inside, nearness))


_WIDTHS = (512, 256, 128, 64, 64)  # of ResNet-34's stages from the last to the first, which are the decoder's too


class ResNetUNet(nn.Module):
    """Find one object's mask and the depth of every pixel: 31 million parameters, two decoders on one ResNet-34.

    Takes (N, 3, H, W) uint8, or float32 in [0, 255]; H and W are multiples of 32. Returns {"mask": logits,
    "depth": 0 to 1}, both (N, 1, H, W) float32. It starts from random weights.

    Args:
        join: how a decoder takes the encoder's features of its size: "add", or "concatenate" as the first U-Net, which
            needs more memory.

    Raises:
        ValueError: `join` is neither.
    """

    def __init__(self, join: str = "add"):
        super().__init__()
        if join not in ("add", "concatenate"):
            raise ValueError(f'join is "add" or "concatenate", got {join!r}\n  fix:   ResNetUNet(join="add")')
        encoder = models.resnet34(weights=None)
        self.first = nn.Sequential(encoder.conv1, encoder.bn1, encoder.relu)
        self.stages = nn.ModuleList(
            [nn.Sequential(encoder.maxpool, encoder.layer1), encoder.layer2, encoder.layer3, encoder.layer4]
        )
        self.mask = _Decoder(join)
        self.depth = _Decoder(join)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return {"mask": logits, "depth": 0 to 1}, (N, 1, H, W) each."""
        features = [self.first(images.float() / 127.5 - 1)]
        for stage in self.stages:
            features.append(stage(features[-1]))
        features.reverse()
        return {"mask": self.mask(features), "depth": self.depth(features).sigmoid()}


class _Decoder(nn.Module):
    """From the encoder's features, the smallest first, to one channel of the image's size."""

    def __init__(self, join: str):
        super().__init__()
        self.join = join
        self.bridge = _convolution(_WIDTHS[0], _WIDTHS[0])
        pairs = list(zip(_WIDTHS, _WIDTHS[1:], strict=False))
        more = 2 if join == "concatenate" else 1
        self.narrow = nn.ModuleList([_convolution(before, width) for before, width in pairs])
        self.mix = nn.ModuleList([_convolution(more * width, width) for _, width in pairs])
        self.last = nn.Sequential(_convolution(_WIDTHS[-1], 16), nn.Conv2d(16, 1, 1))

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        x = self.bridge(features[0])
        for narrow, mix, skipped in zip(self.narrow, self.mix, features[1:], strict=True):
            x = _twice_as_large(narrow(x))
            if self.join == "concatenate":
                x = mix(torch.cat([x, skipped], dim=1))
            else:
                x = mix(x + skipped)
        return self.last(_twice_as_large(x))


def _convolution(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
    )


def _twice_as_large(x: torch.Tensor) -> torch.Tensor:
    # Not functional.interpolate: torch_xla makes a custom call of it, ResizeNearest, which the simulator does not have.
    count, channels, height, width = x.shape
    copies = x[:, :, :, None, :, None].expand(count, channels, height, 2, width, 2)
    return copies.reshape(count, channels, 2 * height, 2 * width)


def mask_and_depth_loss(outputs: dict, targets: dict) -> torch.Tensor:
    """Return the sum of the mask's binary cross-entropy and the depth's mean absolute error, () float32.

    Args:
        outputs: of `ResNetUNet`.
        targets: of `Scenes`, in batches: "mask" (N, 1, H, W), 1 where the object is; "depth" (N, 1, H, W) in [0, 255].
    """
    mask = functional.binary_cross_entropy_with_logits(outputs["mask"], targets["mask"].float())
    return mask + functional.l1_loss(outputs["depth"], targets["depth"].float() / 255)


def mask_overlap(outputs: dict, targets: dict) -> torch.Tensor:
    """Return how far found and true masks agree, () float32: their intersection over their union, 0 to 1."""
    found = outputs["mask"] > 0  # logits: above 0 is a probability above one half
    true = targets["mask"] > 0
    return (found & true).sum().float() / (found | true).sum().clamp(min=1)


def depth_error(outputs: dict, targets: dict) -> torch.Tensor:
    """Return the mean absolute error of the depth, () float32: 1 is the way from the camera's feet to the wall."""
    return functional.l1_loss(outputs["depth"], targets["depth"].float() / 255)
