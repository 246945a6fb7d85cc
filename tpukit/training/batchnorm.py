"""Let BatchNorm use the statistics of the global batch: of all cores' local batches together."""

from tpukit.essentials.display import InvalidTypeError


def sync_batchnorm(core, module):
    """Make every BatchNorm of a module use the statistics of the global batch, in place.

        model = core.model(sync_batchnorm(core, network))

    Use it for local batches of fewer than about 16 samples, whose own mean and variance are too
    noisy. It costs four small collectives per layer and step, two forward and two backward, so it
    is not worthwhile for larger batches. In training, all cores must call the module together, with
    local batches of the same size, as `core.batches` makes them. Samples that are repeated to fill
    the last step are included, as in plain BatchNorm. In evaluation, and on one core, the layers
    work as plain BatchNorm.

    The keys of the state dict stay the same, so a plain model and a changed one can load each
    other's weights. A layer is still an instance of its old class. `torch.nn.SyncBatchNorm`, which
    runs on CUDA only, is accepted as well.

    Args:
        core: this core.
        module: a module with BatchNorm layers, before or after `core.model`.

    Returns:
        the same module.

    Raises:
        TypeError: the class of a BatchNorm layer overrides `forward`, or a layer is lazy.
    """
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm

    average = _differentiable_mean(core)
    layers = []
    for name, layer in module.named_modules():
        if not isinstance(layer, _BatchNorm):
            continue
        # If the user runs the cell again, the layer's class is a `Synced...` class already.
        kind = getattr(type(layer), "unsynced", type(layer))
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
            raise _refused(
                name,
                f"{kind.__name__}, a lazy layer, whose class changes in its first forward",
                fix="call the module on one batch first",
            )
        if kind.forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            raise _refused(
                name,
                f"{kind.__name__}, whose class overrides forward",
                fix="use a plain BatchNorm there",
            )
        layers.append((layer, kind))
    for layer, kind in layers:  # after the checks, so that an error leaves the module as it was
        # Change the layer's class, and do not replace the layer: references to the layer and
        # `isinstance` then stay valid.
        layer.__class__ = _synced(kind, core, average)
    return module


def unsynced_layers(module) -> list:
    """Return the BatchNorm layers of a module that `sync_batchnorm` has not changed yet."""
    from torch.nn.modules.batchnorm import _BatchNorm

    layers = []
    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and not hasattr(type(layer), "unsynced"):
            layers.append(layer)
    return layers


def unsync_batchnorm(layers) -> None:
    """Undo `sync_batchnorm` for these layers, in place."""
    for layer in layers:
        layer.__class__ = getattr(type(layer), "unsynced", type(layer))


def _refused(name: str, found: str, *, fix: str) -> InvalidTypeError:
    return InvalidTypeError(
        "sync_batchnorm replaces the forward of torch's BatchNorm1d, 2d and 3d",
        found=f"{name or 'the module'} is {found}",
        fix=fix,
    )


def _synced(kind: type, core, average) -> type:
    """Return a subclass of a BatchNorm class that normalises with global statistics in training."""
    import torch
    from torch.nn.modules.batchnorm import _BatchNorm

    def forward(self, x):
        if not self.training or core.world_size == 1:
            return _BatchNorm.forward(self, x)
        self._check_input_dim(x)
        axes = [0, *range(2, x.ndim)]
        shape = [1, -1] + [1] * (x.ndim - 2)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # under autocast, x is bfloat16
        # Compute the mean first, then the mean of squared differences from it. This needs one
        # collective more than mean(x^2) - mean^2. But in float32 that formula is wrong by 1 % if
        # the mean is 400 standard deviations, and its result can be negative.
        mean = average(wide.mean(axes))
        centred = wide - mean.view(shape)
        variance = average(centred.square().mean(axes))
        if self.running_mean is not None:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                part = self.momentum
                # As in torch, momentum=None means the plain average over all batches.
                if part is None:
                    part = 1.0 / self.num_batches_tracked
                # As in torch, running_var is the unbiased variance, but a batch is normalised with
                # the biased variance.
                count = core.world_size * x.numel() / x.shape[1]
                unbiased = variance * (count / (count - 1))
                self.running_mean.add_(part * (mean - self.running_mean))
                self.running_var.add_(part * (unbiased - self.running_var))
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        out = centred * scale.view(shape)
        if self.bias is not None:
            out = out + self.bias.view(shape)
        return out.to(x.dtype)

    return type(f"Synced{kind.__name__}", (kind,), {"forward": forward, "unsynced": kind})


def _differentiable_mean(core):
    """Return a differentiable function: the mean of a tensor over the cores."""
    import torch

    class Mean(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return core.all_reduce(tensor, "mean")

        @staticmethod
        def backward(ctx, gradient):
            # Each output contains 1 / world_size of every core's input. So the gradient is a
            # mean over the cores again.
            return Mean.apply(gradient)

    return Mean.apply
