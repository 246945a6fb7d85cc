"""Patches of torch for other devices and for speed; each is listed in docs/in_sync.md.

shorten_adam
    changes     `torch.optim.adam._single_tensor_adam`, for float32 tensors on XLA devices
    because     torch_xla 2.8 and 2.9 record seven operations per parameter and step; see `adam.py`
    upstream    pytorch/xla issues 8755 and 7923
    until       torch_xla records Adam as fast; `benchmarks/recording.py` has both

correct_running_statistics
    changes     `torch.batch_norm` and `torch.instance_norm`, for tensors on TorchTPU in training
    because     torch_tpu 0.2.0 normalises as PyTorch does and never updates the statistics. It
                raises nothing. A network would be evaluated with the means and variances that it
                was made with, 0 and 1.
    upstream    no issue known
    until       `test_the_packages_own_running_statistics_still_need_the_correction` fails
"""

import functools

from tpukit.accelerators.adam import step_of_adam


@functools.cache
def shorten_adam() -> None:
    """Replace PyTorch's Adam for single parameters, in this process, permanently."""
    from torch.optim import adam

    adam._single_tensor_adam = functools.partial(step_of_adam, adam._single_tensor_adam)


@functools.cache
def correct_running_statistics(device_type: str = "tpu") -> None:
    """Have BatchNorm and InstanceNorm update them on such devices, in this process, permanently."""
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
