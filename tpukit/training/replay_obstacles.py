"""Find facts about the optimizer and the averaged model that make `fit` capture every step.

tpukit knows how the optimizers of torch.optim count their steps. Another class, a hook or a
replaced `step` may count differently and do something only in every k-th step, as Lookahead does.
"""

import itertools


def obstacle(optimizer, average=None) -> str | None:
    """Return a reason, for a message, why every step must be captured; None if there is none.

    Args:
        optimizer: the optimizer of the run.
        average: an AveragedModel, or None.
    """
    import torch

    from tpukit.training.lars import LARS

    kind = type(optimizer)
    if kind is not LARS and kind not in vars(torch.optim).values():
        return f"{kind.__module__}.{kind.__qualname__} is not one of torch.optim's own optimizers"
    if not _has_own_step(optimizer):
        return f"the step of {kind.__name__} is replaced"
    if _has_hook(optimizer):
        return f"{kind.__name__} has a hook"
    # A scheduler changes such a tensor in place, and replay follows only settings that are numbers.
    settings = itertools.chain.from_iterable(group.values() for group in optimizer.param_groups)
    if any(isinstance(setting, torch.Tensor) for setting in settings):
        return f"a setting of {kind.__name__} is a tensor"
    if average is not None and not _is_torchs(average):
        return "the averaged model or its averaging function is not torch's own"
    return None


def _is_torchs(average) -> bool:
    """Return whether an averaged model has torch's own class and averaging functions."""
    from torch.optim import swa_utils

    functions = [getattr(average, "avg_fn", None), getattr(average, "multi_avg_fn", None)]
    parts = [type(average), *filter(None, functions)]
    modules = {getattr(part, "__module__", None) for part in parts}
    return modules == {swa_utils.__name__}


def _has_own_step(optimizer) -> bool:
    """Return whether `optimizer.step` is the method of its class.

    A scheduler of torch may have wrapped this method, to count its calls.
    """
    step = vars(optimizer).get("step")
    if step is None:
        return True
    return hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is type(optimizer).step


def _has_hook(optimizer) -> bool:
    """Return whether a hook runs in the optimizer's step; tpukit's global hooks do not count."""
    from torch.optim import optimizer as base

    everywhere = [
        *base._global_optimizer_pre_hooks.values(),
        *base._global_optimizer_post_hooks.values(),
    ]
    packages = {hook.__module__.partition(".")[0] for hook in everywhere}
    own = [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
    return bool(own) or not packages <= {"tpukit"}
