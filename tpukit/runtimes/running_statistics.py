"""Running statistics on TorchTPU: 0.2.0 normalises as PyTorch does and never updates them, in silence.

A network would be evaluated with the means and variances it was made with, 0 and 1, whatever it was trained on.
"""

import functools


@functools.cache
def correct_running_statistics(device_type: str = "tpu") -> None:
    """Have every BatchNorm and InstanceNorm that trains on such devices update them, in this process, for good."""
    import torch

    for name, first_axis in {"batch_norm": 0, "instance_norm": 2}.items():
        setattr(torch, name, _updating(getattr(torch, name), device_type, first_axis))


def _updating(whole, device_type: str, first_axis: int):
    # torch.nn.functional, and with it every layer, calls these two of torch, and gives the arguments by position.
    @functools.wraps(whole)
    def normalise(x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled):
        if not training or running_mean is None or x.device.type != device_type:
            return whole(x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
        # Without them, so that they are updated once also where a later TorchTPU does it.
        outputs = whole(x, weight, bias, None, None, training, momentum, eps, cudnn_enabled)
        _update(x, running_mean, running_var, momentum, first_axis)
        return outputs

    return normalise


def _update(x, running_mean, running_var, momentum: float, first_axis: int) -> None:
    """Move running statistics towards those of (N, C, ...), the variance of n - 1 samples as PyTorch has it."""
    import torch

    with torch.no_grad():
        values = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        axes = [axis for axis in range(first_axis, x.ndim) if axis != 1]
        for running, found in zip((running_var, running_mean), torch.var_mean(values, axes), strict=True):
            # Of an image each, they are averaged over the images.
            running.lerp_(found.reshape(-1, x.shape[1]).mean(0).to(running.dtype), momentum)
