"""Adam's step, recorded as a single operation for each parameter.

    PyTorch     param, grad, two averages, seven numbers    7 operations for each parameter
    tpukit      the same                                    1 operation for each parameter

torch_xla records each operation in each step: for a ResNet-34 Adam is half of the host's time
(`benchmarks/recording.py`). Here the same arithmetic, in the same order, is one computation, which
torch_xla gets as a whole. The optimizer's state, its hooks and its schedules stay PyTorch's.
PyTorch's AdamW is a subclass of Adam, so this holds for both.

It is on by default, because weights and state are the same to the last bit:
`tests/accelerators/test_adam.py` compares all combinations of settings on XLA:CPU. On a TPU the two
have not been compared.

One computation for all parameters would not be recorded faster, and libtpu optimises many small
computations better; `benchmarks/preflight.py` has the cycles.
"""

import functools

_computations: dict[tuple, object] = {}


def step_of_adam(
    whole, params, grads, averages, squares, largest, steps, *scaling, **options
) -> None:
    """Take a step with the arguments of PyTorch's function, `whole`; it gets the unusual cases."""
    if not _is_usual((*params, *grads, *averages, *squares), options):
        whole(params, grads, averages, squares, largest, steps, *scaling, **options)
        return
    import torch_xla

    decay = _decay(**options)

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
    import torch

    numbers = [options[name] for name in ("lr", "beta1", "beta2", "eps", "weight_decay")]
    if not all(isinstance(number, int | float) for number in numbers):
        return False
    # torch_xla writes a 0 into the graph, in which XLA removes it, and divides in another order.
    if options["eps"] <= 0:
        return False
    if any(options[name] for name in ("amsgrad", "maximize", "capturable", "differentiable")):
        return False
    return all(one.device.type == "xla" and one.dtype == torch.float32 for one in tensors)


def _decay(*, weight_decay: float, decoupled_weight_decay: bool, **_) -> str | None:
    if not weight_decay:
        return None
    return "of the weights" if decoupled_weight_decay else "in the gradients"


def _numbers(step, *, lr, beta1, beta2, eps, weight_decay, decoupled_weight_decay, **_):
    """Return the numbers that are the same for all elements, (7,) float32.

    They are one tensor, so that no schedule makes another graph. torch_xla writes a scalar of 0,
    1 or -1 into the graph. It sends two equal scalars as one, and with PyTorch's defaults the rate
    and 1 - beta2 are equal after the first 160 steps.
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
    """Return the numbers that Adam sends to the device in a step, (7,) float32.

    Args:
        optimizer: any; the result is None if it is not an Adam with plain numbers as settings.
        group: one of its `param_groups`.
        step: the count of steps, from 1.
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
    """Return XLA's computation: the numbers and four tensors in, three new tensors out."""
    import torch_xla.core.xla_builder as xb

    def update(numbers, param, grad, average, square):
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
