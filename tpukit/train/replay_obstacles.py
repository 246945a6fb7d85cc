"""Facts about optimizer and average that make `fit` capture every step: they may count in their own way."""


def obstacle(optimizer, average=None) -> str | None:
    """Return the first such fact in words, None if there is none; `average` is that of `fit`."""
    import torch
    from torch.optim import swa_utils

    from tpukit.train.lars import LARS

    kind = type(optimizer)
    if not any(kind is own for own in (LARS, *vars(torch.optim).values())):
        return f"{kind.__module__}.{kind.__qualname__} is not one of torch.optim's own optimizers"
    if not _has_own_step(optimizer):
        return f"the step of {kind.__name__} is replaced"
    if _has_hook(optimizer):
        return f"{kind.__name__} has a hook"
    if any(isinstance(one, torch.Tensor) for group in optimizer.param_groups for one in group.values()):
        return f"a setting of {kind.__name__} is a tensor"
    if average is None:
        return None
    functions = [getattr(average, name, None) for name in ("avg_fn", "multi_avg_fn")]
    parts = [type(average), *(one for one in functions if one is not None)]
    is_own = all(getattr(one, "__module__", None) == swa_utils.__name__ for one in parts)
    return None if is_own else "the average or its function is not torch's own, and it gets a count"


def _has_own_step(optimizer) -> bool:
    """Return whether `step` is the method of its class, perhaps in the wrapper by which a schedule counts calls."""
    step = vars(optimizer).get("step")
    if step is None:
        return True
    return hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is type(optimizer).step


def _has_hook(optimizer) -> bool:
    from torch.optim import optimizer as base

    everywhere = [*base._global_optimizer_pre_hooks.values(), *base._global_optimizer_post_hooks.values()]
    if any(not hook.__module__.startswith("tpukit.") for hook in everywhere):
        return True
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
