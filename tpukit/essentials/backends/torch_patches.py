"""Patches of torch in the worker processes of torch_xla; each is listed in docs/in_sync.md.

correct_running_variance
    changes     `torch.batch_norm` and `torch.instance_norm`, for tensors on XLA devices in training
    because     torch_xla 2.8 and 2.9 compute a running variance with division by n, torch by n - 1
    upstream    no issue known; torch's rule is documented after pytorch/pytorch issue 77427
    until       `test_torch_xla_itself_still_divides_the_running_variance_by_n` fails

complete_torch
    changes     adds the module `torch.xla`, if torch has none
    because     torch 2.8 and 2.9 have none, and `torch.utils.checkpoint` needs it: "module 'torch'
                has no attribute 'xla'"
    upstream    pytorch/xla issue 5766; aws-neuron/aws-neuron-sdk issue 1317
    until       torch has a module of that name; then the patch does nothing
"""

import contextlib
import functools
from collections.abc import Callable


@functools.cache
def correct_running_variance() -> None:
    """Patch normalisation layers, so that running variances on XLA devices divide by n - 1.

    The patch applies to this process until it ends. Without it, the running variance of a channel
    with 8 values would be an eighth too small. A channel has 8 values if a core has 8 images, and
    each image has shrunk to one pixel, as in a network's last layers. The correction scales the
    running variance before and after the update, with momentum m:

        torch_xla     running = (1 - m) * running + m * variance(n)
        wanted        running = (1 - m) * running + m * variance(n) * n / (n - 1)
        here          scaled = running * (n - 1) / n; torch_xla updates it; times n / (n - 1)

    The code does not use `mul_`, because torch checks the shapes of in-place operations in Python.
    Recording a step of ResNet-34 takes 0.97 of the time that it takes with `mul_` (measured, 14
    pairs of steps).
    """
    import torch

    # All normalisation layers call one of these two functions, also layers with a `forward` of
    # their own, such as timm's BatchNormAct2d.
    torch.batch_norm = _corrected(torch.batch_norm, _values_per_channel)
    torch.instance_norm = _corrected(torch.instance_norm, _values_per_channel_of_an_image)


def _values_per_channel(x) -> int:
    if x.ndim < 2 or not x.shape[1]:
        return 0
    return x.numel() // x.shape[1]


def _values_per_channel_of_an_image(x) -> int:
    return x.shape[2:].numel()


def _corrected(original: Callable, count_values: Callable):
    # torch.nn.functional passes all arguments by position, and the flag for training comes next.
    @functools.wraps(original)
    def normalize(x, weight, bias, running_mean, running_var, *options, **named):
        flags = options[:1] or (named.get("training"), named.get("use_input_stats"))
        is_tracked = any(flags) and running_var is not None and x.device.type == "xla"
        n = count_values(x) if is_tracked else 0
        if n < 2:  # not tracked, or n - 1 is 0
            return original(x, weight, bias, running_mean, running_var, *options, **named)
        scaled = running_var.data * ((n - 1) / n)
        outputs = original(x, weight, bias, running_mean, scaled, *options, **named)
        # `data`, because an earlier forward pass in evaluation mode may have saved the tensor for
        # backward, and autograd would count this write as a modification.
        running_var.data.copy_(scaled * (n / (n - 1)))
        return outputs

    return normalize


def complete_torch() -> None:
    """Add the module `torch.xla`, so that torch.utils.checkpoint finds the random state there.

    With this module, a recomputed activation equals the first one, dropout included. But XLA may
    merge the recomputation with the first computation, so that checkpointing saves no memory.
    A barrier in `torch_xla.utils.checkpoint` prevents this merge.
    """
    import types

    import torch
    import torch_xla.core.xla_model as xm

    if hasattr(torch, "xla"):
        return
    module = types.ModuleType("torch.xla")
    # torch.utils.checkpoint saves random states only of devices that are initialized.
    module._initialized = True
    module.device = contextlib.nullcontext
    module.device_count = lambda: 1
    module.get_rng_state = lambda device=None: xm.get_rng_state()
    module.set_rng_state = lambda state, device=None: xm.set_rng_state(state)
    torch._register_device_module("xla", module)
