"""BatchNorm's running variance on XLA, of n - 1 samples as PyTorch's is: torch_xla's own layer divides by n.

A model that trained with 8 samples a core would be evaluated with a variance that is an eighth too small.
"""

import functools

# Of so many values a channel the two differ by less than 0.2 %. Layers of images have more of them, and are left alone:
# to multiply the statistics of each would make the recording of a ResNet-34's step a fifth longer.
_MANY = 512


@functools.cache
def correct_running_variance() -> None:
    """Have the BatchNorm of tables and sequences divide by n - 1 on XLA, in this process, for good."""
    from torch.nn.modules.batchnorm import _BatchNorm

    whole = _BatchNorm.forward

    @functools.wraps(whole)
    def forward(layer, x):
        return _forward(whole, layer, x)

    _BatchNorm.forward = forward


def _forward(whole, layer, x):
    tracked = layer.training and layer.running_var is not None and x.device.type == "xla" and 1 < x.ndim < 4
    n = x.numel() // x.shape[1] if tracked else 0
    if not 1 < n < _MANY:
        return whole(layer, x)
    # Of `data`: backward is handed the tensor itself, and only uses it in evaluation.
    layer.running_var.data.mul_((n - 1) / n)  # so that what it holds already is the same afterwards
    outputs = whole(layer, x)
    layer.running_var.data.mul_(n / (n - 1))
    return outputs
