"""Record Adam's step as a single operation for each parameter.

    PyTorch     param, grad, two averages, seven numbers    7 operations for each parameter
    tpukit      the same                                    1 operation for each parameter

torch_xla records each operation in each step. For a ResNet-34, recording Adam takes half of the
host's time (`benchmarks/recording.py`). Here, the same arithmetic in the same order is one XLA
computation, which torch_xla records as one operation. The optimizer's state, hooks and schedules
are still PyTorch's. PyTorch's AdamW is a subclass of Adam, so it is recorded in the same way.

Every worker on torch_xla uses it, because weights and state have the same bits as with PyTorch:
`tests/accelerators/test_adam.py` compares all combinations of settings on XLA:CPU. On a TPU, they
have not been compared.

A single computation for all parameters would not be recorded faster, and libtpu optimises many
small computations better; `benchmarks/preflight.py` measures the cycles.
"""

import functools

_computations: dict[tuple, object] = {}  # by shape of the parameter and kind of weight decay


def step_of_adam(
    whole, params, grads, averages, squares, largest, steps, *scaling, **options
) -> None:
    """Run Adam's step, with the arguments of PyTorch's `_single_tensor_adam`.

    Args:
        whole: PyTorch's own function. It is called if the tensors are not all float32 on XLA
            devices, or if a setting is unusual, such as `amsgrad`.
        params, grads, averages, squares, largest, steps: lists with an entry per parameter.
        scaling: further positional arguments of PyTorch's function.
        options: the settings of the optimizer's group.
    """
    if not _is_usual((*params, *grads, *averages, *squares), options):
        whole(params, grads, averages, squares, largest, steps, *scaling, **options)
        return
    import torch_xla

    decay = _decay(**options)

    # All parameters with the same step count share one tensor: it is sent only once per step.
    @functools.cache
    def numbers_on_device(step: float):
        return _numbers(step, **options).to(params[0].device)

    by_parameter = zip(params, grads, averages, squares, steps, strict=True)
    for param, grad, average, square, step in by_parameter:
        step += 1
        tensors = [numbers_on_device(float(step)), param, grad, average, square]
        known = param.shape, decay
        if known not in _computations:
            _computations[known] = _computation(tensors, decay)
        adam = _computations[known]
        results = torch_xla._XLAC._xla_user_computation("tpukit::adam", tensors, adam)
        for old, new in zip((param, average, square), results, strict=True):
            old.copy_(new)  # in place, so that XLA reuses the memory


def _is_usual(tensors, options) -> bool:
    """Return whether `_computation` supports these tensors and settings."""
    import torch

    numbers = [options[name] for name in ("lr", "beta1", "beta2", "eps", "weight_decay")]
    if not all(isinstance(number, int | float) for number in numbers):
        return False
    # With eps=0, torch_xla writes the 0 into the graph. XLA removes it and divides in another
    # order, so the bits of the two ways would differ.
    if options["eps"] <= 0:
        return False
    if any(options[name] for name in ("amsgrad", "maximize", "capturable", "differentiable")):
        return False
    return all(one.device.type == "xla" and one.dtype == torch.float32 for one in tensors)


def _decay(*, weight_decay: float, decoupled_weight_decay: bool, **_) -> str | None:
    """Return the kind of weight decay: of AdamW, of Adam, or None without decay."""
    if not weight_decay:
        return None
    return "of the weights" if decoupled_weight_decay else "in the gradients"


def _numbers(step, *, lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, **_):
    """Return the numbers of a step that are the same for all elements, (7,) float32.

    They are one tensor and not seven scalars, so that no value of a schedule causes another graph:
    torch_xla writes a scalar of 0, 1 or -1 into the graph. It also sends two equal scalars as one
    input. With PyTorch's defaults, the rate and 1 - beta2 are equal after the first 160 steps.
    """
    import torch

    size = lr / (1 - beta1**step)
    correction = (1 - beta2**step) ** 0.5
    decay = weight_decay
    if decoupled_weight_decay:
        decay = 1 - lr * weight_decay
    numbers = [size, correction, decay, 1 - beta1, beta2, 1 - beta2, eps]
    return torch.tensor(numbers, dtype=torch.float32)


def adam_numbers(optimizer, group: dict, step: float):
    """Return the numbers that `step_of_adam` sends to the device in a step, (7,) float32.

    The result is None if the optimizer is not an Adam, or if one of its settings is not a number.
    With `amsgrad`, `step_of_adam` sends none of these numbers, but the result is not None.

    Args:
        optimizer: any optimizer.
        group: one of its `param_groups`.
        step: the number of the step, from 1.
    """
    from torch.optim import Adam

    names = ("lr", "eps", "weight_decay")
    has_numbers = all(isinstance(group.get(name), int | float) for name in names)
    if not isinstance(optimizer, Adam) or not has_numbers:
        return None
    beta1, beta2 = group["betas"]
    return _numbers(
        step,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
    )


def _computation(tensors: list, decay: str | None):
    """Return the XLA computation of Adam's step for one parameter.

    Its inputs are the seven numbers, the parameter, its gradient and the two averages. Its results
    are the new parameter and the two new averages.
    """
    import torch_xla.core.xla_builder as xb

    def update(numbers, param, grad, average, square):
        # The order of the operations is that of torch's _single_tensor_adam, so that the bits are
        # the same.
        each = []
        for place in range(7):
            number = numbers.slice_in_dim(place, place + 1, 0).reshape([])
            each.append(number.broadcast(param.shape().sizes))
        size, correction, decayed, to_gradient, keep, to_square, eps = each
        if decay == "of the weights":
            param = param * decayed
        elif decay == "in the gradients":
            grad = grad + param * decayed
        average = average + to_gradient * (grad - average)
        square = square * keep + to_square * (grad * grad)
        param = param - size * (average / (square.sqrt() / correction + eps))
        return xb.Op.tuple([param, average, square])

    return xb.create_computation("tpukit.adam", update, xb.tensor_shape(tensors))
