"""Patch torch for other devices and for speed; docs/in_sync.md lists each patch.

shorten_adam
    changes     `torch.optim.adam._single_tensor_adam`, for float32 tensors on XLA devices
    because     torch_xla 2.8 and 2.9 record seven operations per parameter and step; see `adam.py`
    upstream    pytorch/xla issues 8755 and 7923
    until       torch_xla records Adam as fast as the patch; `benchmarks/recording.py` measures both

correct_running_statistics
    changes     `torch.batch_norm` and `torch.instance_norm`, for tensors on TorchTPU in training
    because     torch_tpu 0.2.0 normalises as PyTorch does, but never updates the running
                statistics, and raises no error. Without the patch, a network would be evaluated
                with the initial mean 0 and variance 1.
    upstream    no issue known
    until       `test_the_packages_own_running_statistics_still_need_the_correction` fails
"""

import functools

from tpukit.accelerators.adam import step_of_adam


@functools.cache
def shorten_adam() -> None:
    """Replace PyTorch's Adam step of single parameters by `step_of_adam`, in this process."""
    from torch.optim import adam

    adam._single_tensor_adam = functools.partial(step_of_adam, adam._single_tensor_adam)


@functools.cache
def correct_running_statistics(device_type: str = "tpu") -> None:
    """Make BatchNorm and InstanceNorm update their running statistics, in this process.

    Args:
        device_type: the type of the devices on which torch does not update them.
    """
    import torch

    torch.batch_norm = _updating(torch.batch_norm, device_type, first_axis=0)
    torch.instance_norm = _updating(torch.instance_norm, device_type, first_axis=2)


def _updating(whole, device_type: str, *, first_axis: int):
    """Return a normalisation that also updates the running statistics.

    Args:
        whole: torch's function.
        device_type: the type of the devices on which `whole` does not update them.
        first_axis: the first dimension of the input over which the statistics are computed: 0 with
            the images of a batch, 2 for each image.
    """

    # The functions of torch.nn.functional, and so all layers, call torch's two functions with
    # positional arguments.
    @functools.wraps(whole)
    def normalise(x, weight, bias, running_mean, running_var, training, momentum, *others):
        if not training or running_mean is None or x.device.type != device_type:
            return whole(x, weight, bias, running_mean, running_var, training, momentum, *others)
        # Pass None instead of the statistics: if a later TorchTPU updates them itself, they must
        # not be updated twice.
        outputs = whole(x, weight, bias, None, None, training, momentum, *others)
        _update(x, running_mean, running_var, momentum=momentum, first_axis=first_axis)
        return outputs

    return normalise


def _update(x, running_mean, running_var, *, momentum: float, first_axis: int) -> None:
    """Update running statistics by those of an input x, (N, C, ...).

    As in PyTorch, the variance is the unbiased one, divided by n - 1.
    """
    import torch

    with torch.no_grad():
        values = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        axes = [axis for axis in range(first_axis, x.ndim) if axis != 1]
        variance, mean = torch.var_mean(values, axes)
        for running, found in ((running_var, variance), (running_mean, mean)):
            # InstanceNorm has statistics for each image, so average them over the images.
            of_all = found.reshape(-1, x.shape[1]).mean(0)
            running.lerp_(of_all.to(running.dtype), momentum)
