"""The running variance of BatchNorm and InstanceNorm on XLA, with n - 1 as in PyTorch.

torch_xla 2.8 and 2.9 divide the squared deviations by n, PyTorch divides by n - 1. With 8 values
per channel, as images of one pixel have them in the last layers of a network, the variance of an
evaluation would be an eighth too small.

The correction scales the running variance before and after the update, with momentum m:

    torch_xla     running = (1 - m) * running + m * variance(n)
    wanted        running = (1 - m) * running + m * variance(n) * n / (n - 1)
    here          running *= (n - 1) / n; update by torch_xla; running *= n / (n - 1)
"""

import functools
from collections.abc import Callable


@functools.cache
def correct_running_variance() -> None:
    """Let running variances be divided by n - 1 on XLA devices, permanently in this process."""
    import torch

    # All layers end in these two functions, also those with a forward of their own, such as timm's
    # BatchNormAct2d.
    torch.batch_norm = _corrected(torch.batch_norm, _values_per_channel)
    torch.instance_norm = _corrected(torch.instance_norm, _values_per_channel_of_an_image)


def _values_per_channel(x) -> int:
    if x.ndim < 2 or not x.shape[1]:
        return 0
    return x.numel() // x.shape[1]


def _values_per_channel_of_an_image(x) -> int:
    return x.shape[2:].numel()


def _corrected(original: Callable, count_values: Callable):
    # torch.nn.functional passes the arguments by position.
    @functools.wraps(original)
    def normalize(x, weight, bias, running_mean, running_var, training, *options):
        arguments = (x, weight, bias, running_mean, running_var, training, *options)
        is_tracked = training and running_var is not None and x.device.type == "xla"
        n = count_values(x) if is_tracked else 0
        if n < 2:
            return original(*arguments)
        # `data`, because backward gets the tensor itself, and uses it only in evaluation.
        running_var.data.mul_((n - 1) / n)
        outputs = original(*arguments)
        running_var.data.mul_(n / (n - 1))
        return outputs

    return normalize
