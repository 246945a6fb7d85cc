"""Adam's step, recorded as one operation for each parameter.

PyTorch's Adam is seven operations for each parameter, and torch_xla records every one of them in every step: for a
ResNet-34 half of what its step takes on the host (`benchmarks/recording.py`). Here the same arithmetic, in the same
order, is one computation, which torch_xla is given as a whole. The optimiser's state, its hooks and its schedules stay
PyTorch's. PyTorch's AdamW is an Adam, so it is both.

It is on by default, because weights and state are the same to the last bit: `tests/runtimes/test_adam.py` compares all
combinations of settings on XLA:CPU. On a TPU the two have not been compared.

One computation for all parameters would be recorded no faster, and libtpu makes more of many small ones; the cycles are
in `benchmarks/preflight.py`.
"""

import functools

_computations: dict[tuple, object] = {}


@functools.cache
def shorten_adam() -> None:
    """Do so in this process, for good, where an Adam of PyTorch's would take its parameters one by one."""
    from torch.optim import adam

    adam._single_tensor_adam = functools.partial(_step, adam._single_tensor_adam)


def _step(whole, params, grads, averages, squares, largest, steps, *scaling, **options) -> None:
    """Take a step as PyTorch's function of these arguments does; what is not the usual case is left to that."""
    if not _is_usual((*params, *grads, *averages, *squares), options):
        whole(params, grads, averages, squares, largest, steps, *scaling, **options)
        return
    import torch_xla

    kind = _decay(**options)
    numbers = functools.cache(lambda step: _numbers(step, **options).to(params[0].device))
    for param, grad, average, square, step in zip(params, grads, averages, squares, steps, strict=True):
        step += 1
        tensors = [numbers(float(step)), param, grad, average, square]
        if (param.shape, kind) not in _computations:
            _computations[param.shape, kind] = _computation(tensors, kind)
        results = torch_xla._XLAC._xla_user_computation("tpukit::adam", tensors, _computations[param.shape, kind])
        for old, new in zip((param, average, square), results, strict=True):
            old.copy_(new)  # in place, so that XLA takes the old's memory for the new


def _is_usual(tensors, options) -> bool:
    import torch

    numbers = (options[name] for name in ("lr", "beta1", "beta2", "eps", "weight_decay"))
    return (
        all(isinstance(number, int | float) for number in numbers)
        and options["eps"] > 0  # torch_xla writes a 0 into the graph, where XLA removes it, and divides otherwise
        and not any(options[name] for name in ("amsgrad", "maximize", "capturable", "differentiable"))
        and all(one.device.type == "xla" and one.dtype == torch.float32 for one in tensors)
    )


def _decay(*, weight_decay: float, decoupled_weight_decay: bool, **_) -> str | None:
    return None if not weight_decay else "of the weights" if decoupled_weight_decay else "in the gradients"


def _numbers(step, *, lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, **_):
    """Return what is the same for all elements, (7,) float32.

    One tensor, so that no schedule makes another graph: torch_xla writes a scalar of 0, 1 or -1 into the graph, and
    sends two that are equal as one, as the rate and 1 - beta2 are after the first 160 steps with PyTorch's defaults.
    """
    import torch

    size, correction = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    decay = 1 - lr * weight_decay if decoupled_weight_decay else weight_decay
    return torch.tensor([size, correction, decay, 1 - beta1, beta2, 1 - beta2, eps], dtype=torch.float32)


def adam_numbers(optimizer, group: dict, step: float):
    """Return what such an optimiser's `step`-th step would send to the device for a group; None if nothing."""
    from torch.optim import Adam

    names = ("lr", "eps", "weight_decay")
    if not isinstance(optimizer, Adam) or not all(isinstance(group[name], int | float) for name in names):
        return None
    beta1, beta2 = group["betas"]
    options = {name: group[name] for name in names} | {"beta1": beta1, "beta2": beta2}
    return _numbers(step, **options, decoupled_weight_decay=group["decoupled_weight_decay"])


def _computation(tensors: list, kind: str | None):
    """Return XLA's computation: the numbers and four tensors in, three new ones out."""
    import torch_xla.core.xla_builder as xb

    def update(numbers, param, grad, average, square):
        each = [numbers.slice_in_dim(place, place + 1, 0).reshape([]) for place in range(7)]
        size, correction, decay, to_gradient, keep, to_square, eps = (
            number.broadcast(param.shape().sizes) for number in each
        )
        if kind == "of the weights":
            param = param * decay
        elif kind == "in the gradients":
            grad = grad + param * decay
        average = average + to_gradient * (grad - average)
        square = square * keep + to_square * (grad * grad)
        param = param - size * (average / (square.sqrt() / correction + eps))
        return xb.Op.tuple([param, average, square])

    return xb.create_computation("tpukit.adam", update, xb.tensor_shape(tensors))
