"""BatchNorm's running statistics on TorchTPU: 0.2.0 normalises as PyTorch does and never updates them, in silence.

A network would be evaluated with the means and variances it was made with, 0 and 1, whatever it was trained on.
"""

import functools


@functools.cache
def correct_running_statistics(device_type: str = "tpu") -> None:
    """Have every BatchNorm that trains on such devices update its running statistics, in this process, for good."""
    import torch.nn.functional as F

    whole = F.batch_norm

    @functools.wraps(whole)
    def batch_norm(
        input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ):  # torch's own names, by which it is called
        if not training or running_mean is None or input.device.type != device_type:
            return whole(input, running_mean, running_var, weight, bias, training, momentum, eps)
        # Without them, so that they are updated once also where a later TorchTPU does it.
        outputs = whole(input, None, None, weight, bias, training, momentum, eps)
        _update(input, running_mean, running_var, momentum)
        return outputs

    F.batch_norm = batch_norm


def _update(x, running_mean, running_var, momentum: float) -> None:
    """Move running statistics towards those of a batch (N, C, ...), the variance of n - 1 samples as PyTorch has it."""
    import torch

    with torch.no_grad():
        variance, mean = torch.var_mean(x.detach().float(), [axis for axis in range(x.ndim) if axis != 1])
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_(variance.to(running_var.dtype), momentum)
