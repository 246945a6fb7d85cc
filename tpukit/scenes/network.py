"""A ResNet-34 with a U-Net's decoders for mask and depth; importing this file loads torch."""

import torch
from torch import nn
from torch.nn import functional
from torchvision import models

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
        self.mask, self.depth = _Decoder(join), _Decoder(join)

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
            x = mix(torch.cat([x, skipped], dim=1) if self.join == "concatenate" else x + skipped)
        return self.last(_twice_as_large(x))


def _convolution(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
    )


def _twice_as_large(x: torch.Tensor) -> torch.Tensor:
    # Not functional.interpolate: torch_xla makes a custom call of it, ResizeNearest, that rehearsals do not have.
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
    found, true = outputs["mask"] > 0, targets["mask"] > 0
    return (found & true).sum().float() / (found | true).sum().clamp(min=1)


def depth_error(outputs: dict, targets: dict) -> torch.Tensor:
    """Return the mean absolute error of the depth, () float32: 1 is the way from the camera's feet to the wall."""
    return functional.l1_loss(outputs["depth"], targets["depth"].float() / 255)
