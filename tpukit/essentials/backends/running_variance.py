"""The running variance of BatchNorm and InstanceNorm on XLA, with n - 1 as PyTorch has it.

torch_xla 2.8 and 2.9 divide by n. A model that trained with 8 values per channel, as images of one pixel have them in
the last layers of a network, would be evaluated with a variance that is an eighth too small.
"""

import functools


@functools.cache
def correct_running_variance() -> None:
    """Divide by n - 1 on XLA devices, in this process, for good."""
    import torch

    # All layers end in these two, those with a forward of their own as well (timm's BatchNormAct2d).
    for name, channel_has in {"batch_norm": _per_channel, "instance_norm": _per_channel_of_an_image}.items():
        setattr(torch, name, _corrected(getattr(torch, name), channel_has))


def _per_channel(x) -> int:
    return x.numel() // x.shape[1] if x.ndim > 1 and x.shape[1] else 0


def _per_channel_of_an_image(x) -> int:
    return x.shape[2:].numel()


def _corrected(whole, channel_has):
    # torch.nn.functional gives the arguments by position.
    @functools.wraps(whole)
    def normalize(x, weight, bias, running_mean, running_var, training, *options):
        is_tracked = training and running_var is not None and x.device.type == "xla"
        n = channel_has(x) if is_tracked else 0
        if n < 2:
            return whole(x, weight, bias, running_mean, running_var, training, *options)
        # (1 - m) * old + m * variance, of n: both are scaled, so that the old part is the same afterwards.
        # Of `data`: backward is handed the tensor itself, and only uses it in evaluation.
        running_var.data.mul_((n - 1) / n)
        outputs = whole(x, weight, bias, running_mean, running_var, training, *options)
        running_var.data.mul_(n / (n - 1))
        return outputs

    return normalize
