"""A ResNet's stem with the pooling moved before its BatchNorm, which then works on a quarter of the values.

BatchNorm and ReLU keep the order of a channel's values, or reverse it where the channel's weight is negative. So the
largest value of a window is the same one before them as after them, once the channels with a negative weight have
changed their sign, which the convolution's weights do at no cost:

    maxpool(relu(batchnorm(conv(x)))) = relu(normalize(maxpool(conv'(x))))

Mean and variance are still those of all values. It is the same function, with the same gradients; rounding differs.
(Where a weight is exactly zero all values of a window end as the same number, so that pooling has no one gradient: here
the weight gets the largest value's, and not the first one's.)
"""

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def pooling_first(model) -> Iterator[int]:
    """Have torchvision's ResNets in a model pool before they normalise, in training, within; yield how many do.

    Three layers change their class, and get it back. Names, weights, buffers and evaluation stay as they are. Nothing
    happens where the order of the layers is not known to be torchvision's, or where somebody would see the difference:
    another class, a forward of its own, hooks on these layers.
    """
    found = [part for part in model.modules() if _is_known(part)]
    for part in found:
        for layer, kind in _layers(part).items():
            layer.__class__ = kind
            # Not as an attribute, which would make them layers of this layer, too.
            vars(layer)["partners"] = (part.bn1, part.maxpool)
    try:
        yield len(found)
    finally:
        for part in found:
            for layer, kind in _layers(part).items():
                layer.__class__ = kind.__base__
                del vars(layer)["partners"]


def _layers(part) -> dict:
    return {part.conv1: Convolution, part.bn1: Norm, part.maxpool: Pool}


def _is_known(part) -> bool:
    resnet = getattr(sys.modules.get("torchvision.models.resnet"), "ResNet", None)
    if resnet is None or not isinstance(part, resnet):
        return False
    forwards = ("forward", "_forward_impl")
    if any(getattr(type(part), name) is not getattr(resnet, name) or name in vars(part) for name in forwards):
        return False
    layers = (part.conv1, part.bn1, part.relu, part.maxpool)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return (
        [type(layer) for layer in layers] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d]
        and not any(getattr(layer, name) for layer in layers for name in hooks)
        and not any("forward" in vars(layer) for layer in layers)
        and part.conv1.bias is None
        and part.bn1.affine
        and part.bn1.track_running_stats
        and part.bn1.momentum is not None
        and not part.maxpool.return_indices
    )


class Convolution(nn.Conv2d):
    """The stem's convolution; where the BatchNorm's weight is negative, with its output's sign changed."""

    def forward(self, x):
        """Return (N, C, H, W)."""
        norm, _ = self.partners
        weight = self.weight * norm.signs().view(-1, 1, 1, 1) if norm.training else self.weight
        return self._conv_forward(x, weight, None)


class Norm(nn.BatchNorm2d):
    """Statistics of all values, of which the largest of each window are normalised."""

    def signs(self):
        """Return what the convolution's output is multiplied by, (C,): 1 or -1."""
        return torch.where(self.weight.detach() < 0, -1.0, 1.0).to(self.weight.dtype)

    def forward(self, x):
        """Return (N, C, h, w): in training normalised and pooled."""
        if not self.training:
            return super().forward(x)
        _, pool = self.partners
        signs, count = self.signs(), x.numel() // x.shape[1]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # autocast hands over bfloat16
        mean = wide.mean((0, 2, 3))
        # Of two sums, as XLA does it for every BatchNorm: one pass, which it puts into the convolution.
        variance = ((wide * wide).mean((0, 2, 3)) - mean * mean).clamp(min=0)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean * signs, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        scale = self.weight * signs * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        largest = nn.MaxPool2d.forward(pool, x)
        return (largest * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)).to(x.dtype)


class Pool(nn.MaxPool2d):
    """Nothing is left to do in training."""

    def forward(self, x):
        """Return what came, in training."""
        norm, _ = self.partners
        return x if norm.training else super().forward(x)
