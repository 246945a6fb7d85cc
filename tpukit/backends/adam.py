"""Adam's step, recorded as one operation for each parameter.

PyTorch's Adam is seven operations for each parameter, and torch_xla records every one of them in every step: for a
ResNet-34 more than half of what its step takes on the host (`benchmarks/recording.py`). Here the same arithmetic, in
the same order, is one computation, which torch_xla is given as a whole. The optimiser's state, its hooks and its
schedules stay PyTorch's. PyTorch's AdamW is an Adam, so it is both.

One computation for all parameters would be recorded no faster (a ResNet-34: 24 ms for 25), and libtpu makes more of
many small ones: 13.85 million cycles for that step, 14.11 with one computation, 13.99 with PyTorch's operations.
"""

import functools

_computations: dict[tuple, object] = {}


@functools.cache
def shorten_adam() -> None:
    """Do so in this process, for good, where an Adam of PyTorch's would take its parameters one by one."""
    from torch.optim import adam

    adam._single_tensor_adam = functools.partial(_step, adam._single_tensor_adam)


def _step(whole, params, grads, averages, squares, largest, steps, grad_scale, found_inf, **options) -> None:
    """Take a step as PyTorch's function of these arguments does; what is not the usual case is left to that."""
    if not _is_usual(params, grads, options):
        whole(params, grads, averages, squares, largest, steps, grad_scale, found_inf, **options)
        return
    import torch
    import torch_xla

    rates = {}  # by the number of the step: a layer that was frozen has had fewer
    lr, decay = options["lr"], options["weight_decay"]
    constants = options["beta1"], options["beta2"], options["eps"], decay, options["decoupled_weight_decay"]
    torch._foreach_add_(steps, 1)
    for param, grad, average, square, count in zip(params, grads, averages, squares, steps, strict=True):
        step = float(count)
        if step not in rates:
            changing = lr / (1 - options["beta1"] ** step), (1 - options["beta2"] ** step) ** 0.5, 1 - lr * decay
            rates[step] = [torch.tensor(rate, dtype=torch.float32).to(param.device) for rate in changing]
        tensors, key = [*rates[step], param, grad, average, square], (param.shape, constants)
        if key not in _computations:
            _computations[key] = _computation(tensors, *constants)
        results = torch_xla._XLAC._xla_user_computation("tpukit::adam", tensors, _computations[key])
        for old, new in zip((param, average, square), results, strict=True):
            old.copy_(new)  # in place, so that XLA takes the old's memory for the new


def _is_usual(params, grads, options) -> bool:
    import torch

    numbers = (options[name] for name in ("lr", "beta1", "beta2", "eps", "weight_decay"))
    return (
        all(isinstance(number, int | float) for number in numbers)
        and not any(options[name] for name in ("amsgrad", "maximize", "capturable", "differentiable"))
        and all(one.device.type == "xla" and one.dtype == torch.float32 for one in (*params, *grads))
    )


def _computation(tensors: list, beta1: float, beta2: float, eps: float, decay: float, is_decoupled: bool):
    """Return XLA's computation: what changes from step to step and four tensors in, three new ones out."""
    import torch_xla.core.xla_builder as xb

    def update(size, correction, shrinkage, param, grad, average, square):
        sizes = param.shape().sizes
        if decay and is_decoupled:
            param = param * shrinkage.broadcast(sizes)
        elif decay:
            grad = grad + param * param.scalar_like(decay)
        average = average + average.scalar_like(1 - beta1) * (grad - average)
        square = square * square.scalar_like(beta2) + square.scalar_like(1 - beta2) * (grad * grad)
        root = square.sqrt() / correction.broadcast(sizes) + square.scalar_like(eps)
        return xb.Op.tuple([param - size.broadcast(sizes) * (average / root), average, square])

    return xb.create_computation("tpukit.adam", update, xb.tensor_shape(tensors))
