"""BatchNorm's running variance on XLA, of n - 1 samples as PyTorch's is: torch_xla's own layer divides by n.

A model that trained with 8 samples a core would be evaluated with a variance that is an eighth too small.
"""

# Of so many values a channel the two differ by less than 0.2 %, and a ResNet's layers are left alone: to multiply the
# statistics of each would make the recording of its step 2 % longer.
_MANY = 512


def correct_running_variance(module) -> None:
    """Have the BatchNorm layers of a module divide by n - 1, where `sync_batchnorm` has not made them do so."""
    from torch.nn.modules.batchnorm import _BatchNorm

    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and layer.track_running_stats:
            layer.register_forward_pre_hook(_before)
            layer.register_forward_hook(_after)


# Of `data`: backward was handed the tensor itself, and only uses it in evaluation.
def _before(layer, inputs) -> None:
    if n := _count(layer, inputs[0]):
        layer.running_var.data.mul_((n - 1) / n)  # so that what it holds already is the same afterwards


def _after(layer, inputs, output) -> None:
    if n := _count(layer, inputs[0]):
        layer.running_var.data.mul_(n / (n - 1))


def _count(layer, x) -> int:
    """Return the values a channel, where torch_xla computes their variance, and there are few; else 0."""
    from torch.nn.modules.batchnorm import _BatchNorm

    if not layer.training or layer.running_var is None or x.device.type != "xla":
        return 0
    plain = type(layer).forward is _BatchNorm.forward or getattr(layer, "is_alone", False)
    values = x.numel() // x.shape[1]
    return values if plain and 1 < values < _MANY else 0
