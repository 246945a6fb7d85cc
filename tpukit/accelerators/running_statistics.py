"""Running statistics on TorchTPU: 0.2.0 normalises as PyTorch does and never updates them.

It raises no error. After any training, a network would be evaluated with its initial means and
variances, 0 and 1.
"""

import functools


@functools.cache
def correct_running_statistics(device_type: str = "tpu") -> None:
    """Let BatchNorm and InstanceNorm update running statistics, permanently in this process."""
    import torch

    torch.batch_norm = _updating(torch.batch_norm, device_type, first_axis=0)
    torch.instance_norm = _updating(torch.instance_norm, device_type, first_axis=2)


def _updating(whole, device_type: str, *, first_axis: int):
    # torch.nn.functional, and with it every layer, calls torch's two functions, with the arguments
    # by position.
    @functools.wraps(whole)
    def normalise(x, weight, bias, running_mean, running_var, training, momentum, *others):
        if not training or running_mean is None or x.device.type != device_type:
            return whole(x, weight, bias, running_mean, running_var, training, momentum, *others)
        # None in their place, so that a later TorchTPU that updates them does not do so twice.
        outputs = whole(x, weight, bias, None, None, training, momentum, *others)
        _update(x, running_mean, running_var, momentum=momentum, first_axis=first_axis)
        return outputs

    return normalise


def _update(x, running_mean, running_var, *, momentum: float, first_axis: int) -> None:
    """Move running statistics towards those of x, (N, C, ...).

    The variance is divided by n - 1, as in PyTorch.
    """
    import torch

    with torch.no_grad():
        values = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        axes = [axis for axis in range(first_axis, x.ndim) if axis != 1]
        variance, mean = torch.var_mean(values, axes)
        for running, found in ((running_var, variance), (running_mean, mean)):
            # InstanceNorm has them for each image; they are averaged over the images.
            of_all = found.reshape(-1, x.shape[1]).mean(0)
            running.lerp_(of_all.to(running.dtype), momentum)
