"""Facts about model and optimizer that make `fit` capture every step."""

from collections.abc import Mapping

from tpukit.train.lars import LARS

_LAYER_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def obstacle(called: Mapping[str, object], optimizer) -> str | None:
    """Return the first fact that makes every step be captured, in words; None if there is none.

    Args:
        called: the parts of a step, by name.
        optimizer: of the steps.
    """
    return _of_optimizer(optimizer) or _of_average(called.get("average")) or _of_layers(called)


def _of_optimizer(optimizer) -> str | None:
    import torch
    from torch.optim import optimizer as base

    kind = type(optimizer)
    if kind is not LARS and not any(kind is one for one in vars(torch.optim).values()):
        return f"{kind.__module__}.{kind.__qualname__} is not one of torch.optim's own optimizers"
    if not _has_own_step(optimizer):
        return f"the step of {kind.__name__} is replaced"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{kind.__name__} has a hook"
    hooks = [*base._global_optimizer_pre_hooks.values(), *base._global_optimizer_post_hooks.values()]
    if any(not hook.__module__.startswith("tpukit.") for hook in hooks):
        return "all optimizers have a hook"
    if any(isinstance(value, torch.Tensor) for group in optimizer.param_groups for value in group.values()):
        return f"a setting of {kind.__name__} is a tensor"
    return None


def _has_own_step(optimizer) -> bool:
    """Return whether `step` is the method of its class, perhaps in the wrapper by which a schedule counts calls."""
    step = vars(optimizer).get("step")
    if step is None:
        return True
    if not hasattr(step, "_wrapped_by_lr_sched"):
        return False
    return step.__wrapped__ is type(optimizer).step


def _of_average(average) -> str | None:
    from torch.optim import swa_utils

    if average is None:
        return None
    kind = type(average)
    if kind is not swa_utils.AveragedModel:
        return f"{kind.__module__}.{kind.__qualname__} is not torch's own AveragedModel"
    functions = (average.avg_fn, average.multi_avg_fn)
    if any(one is not None and one.__module__ != swa_utils.__name__ for one in functions):
        return "the AveragedModel has a function of its own, which gets the number of steps"
    return None


def _of_layers(called: Mapping[str, object]) -> str | None:
    import torch

    if torch.nn.modules.module._has_any_global_hook():
        return "all layers have a hook"
    roots = [one for one in called.values() if hasattr(one, "modules")]
    for layer in (layer for one in roots for layer in one.modules()):
        if any(getattr(layer, kind) for kind in _LAYER_HOOKS):
            return f"{type(layer).__name__} has a hook"
        parameters = layer.parameters(recurse=False)
        if any(getattr(one, kind, None) for one in parameters for kind in _TENSOR_HOOKS):
            return f"a parameter of {type(layer).__name__} has a hook"
    return None
