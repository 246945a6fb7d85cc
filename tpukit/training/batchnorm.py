"""BatchNorm over the global batch: statistics of the local batches of all cores together."""

from tpukit.essentials.display import InvalidTypeError


def sync_batchnorm(core, module):
    """Make every BatchNorm of a module use the statistics of the global batch, in place; return the module.

    Meant for local batches that are too small to be normalised alone, below 16 samples or so. For larger ones it is not
    worth its price: four small collectives per layer and step, two forward and two backward. In training all cores must
    call the module together, with local batches of one size, as `core.batches` makes them; samples that are repeated
    to fill the last step count, as they do in plain BatchNorm. Evaluation is plain BatchNorm, and so is everything on
    one core.

    The names in the state dict stay the same, weights load in both directions, and a layer is still an instance of its
    old class. `torch.nn.SyncBatchNorm`, which runs on CUDA only, is accepted as well.

    Call it before or after `core.model`.

    Raises:
        TypeError: a layer is another kind of BatchNorm, whose own forward would be lost, or a lazy one.
    """
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm

    average = _differentiable_mean(core)
    for name, layer in module.named_modules():
        if not isinstance(layer, _BatchNorm):
            continue
        kind = getattr(type(layer), "unsynced", type(layer))
        lazy = isinstance(layer, nn.modules.lazy.LazyModuleMixin)
        if lazy or kind.forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            why = "a lazy layer, whose class changes in its first forward" if lazy else "with a forward of its own"
            raise InvalidTypeError(
                "sync_batchnorm replaces the forward of torch's BatchNorm1d, 2d and 3d",
                found=f"{name or 'the module'} is {kind.__name__}, {why}",
                fix="call the module on one batch first" if lazy else "a plain BatchNorm there",
            )
        # Another class and not another layer: references to the layer stay valid, and so does `isinstance`.
        layer.__class__ = _synced(kind, core, average)
    return module


def _synced(kind: type, core, average) -> type:
    import torch
    from torch.nn.modules.batchnorm import _BatchNorm

    def forward(self, x):
        if not self.training or core.world_size == 1:
            return _BatchNorm.forward(self, x)
        self._check_input_dim(x)
        axes = [0, *range(2, x.ndim)]
        shape = [1, -1] + [1] * (x.ndim - 2)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # autocast hands over bfloat16
        # The mean first, then the squares of the differences from it, although that takes one collective more than
        # mean(x^2) - mean^2: in float32 the latter is wrong by 1 % where the mean is 400 standard deviations, and it
        # can be negative.
        mean = average(wide.mean(axes))
        centred = wide - mean.view(shape)
        variance = average(centred.square().mean(axes))
        if self.running_mean is not None:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                part = 1.0 / self.num_batches_tracked if self.momentum is None else self.momentum
                # Running statistics keep the unbiased variance, as torch's do; normalising uses the biased one.
                count = core.world_size * x.numel() / x.shape[1]
                self.running_mean.add_(part * (mean - self.running_mean))
                self.running_var.add_(part * (variance * (count / (count - 1)) - self.running_var))
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        out = centred * scale.view(shape)
        return (out if self.bias is None else out + self.bias.view(shape)).to(x.dtype)

    return type(f"Synced{kind.__name__}", (kind,), {"forward": forward, "unsynced": kind})


def _differentiable_mean(core):
    """Return a function that takes the mean of a tensor over the cores, in the backward pass too."""
    import torch

    class Mean(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return core.all_reduce(tensor, "mean")

        @staticmethod
        def backward(ctx, gradient):
            # Each output is 1 / world_size of every core's input, so the gradient is a mean over the cores again.
            return Mean.apply(gradient)

    return Mean.apply
