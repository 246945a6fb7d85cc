"""Compare the settings of optimizer and scheduler with those that a resumed run began with.

torch's `load_state_dict` replaces the arguments of a scheduler by those in the state, without a
message. So a checkpoint contains the values that optimizer and scheduler had when the run's first
`fit` was called:

    {"optimizer": [{"lr": 0.1, "momentum": 0.9}], "scheduler": {"T_max": 20, "eta_min": 0.0}}

A resumed run compares them with the values of its new optimizer and scheduler. Values that only
change during the training, such as the momentum of a cycle, therefore do not differ.
"""

from collections import Counter
from collections.abc import Mapping

from tpukit.essentials.display import InvalidValueError, first_few

# Entries of a scheduler's state that are not arguments: positions and results, which differ if the
# scheduler was stepped before `fit`; and `base_lrs`, which `_groups` compares as the optimizer's.
_POSITIONS = {
    "T_cur",
    "T_i",
    "_get_lr_called_within_step",
    "_is_initial",
    "_last_lr",
    "_step_count",
    "base_lrs",
    "best",
    "cooldown_counter",
    "last_epoch",
    "num_bad_epochs",
    "verbose",
}
_SHOWN = 3  # differences in an error


def values_as_built(optimizer, scheduler) -> dict[str, object]:
    """Return, for a checkpoint, the values that optimizer and scheduler were made with."""
    values = {}
    if scheduler is not None:
        values = _plain(scheduler.state_dict())
    return {"optimizer": _groups(optimizer), "scheduler": values}


def changed_settings(saved: list[dict], given: list[dict]) -> str:
    """Return the optimizer's settings that differ, as `lr 0.1 is used, not 0.01`; or "".

    In this example, 0.1 is the value in the checkpoint, and 0.01 that of this run.

    Args:
        saved: the settings of each parameter group, from the checkpoint.
        given: the settings of the same groups in this run.
    """
    differences = []
    for before, now in zip(saved, given, strict=True):
        for name, value in now.items():
            if name in before and before[name] != value:
                differences.append(f"{name} {before[name]} is used, not {value}")
    return "; ".join(dict.fromkeys(differences))


def check_scheduler(saved: Mapping, given: Mapping, *, kind: str, path) -> None:
    """Raise if a scheduler was built with other values than the scheduler in a checkpoint.

    Args:
        saved: the entry "scheduler" of `values_as_built`, from the checkpoint.
        given: the same entry for the scheduler of this run.
        kind: the name of the scheduler's class, for the message.
        path: the path of the checkpoint.

    Raises:
        ValueError: a value differs. The message has both values and the line to write.
    """
    before = _by_path(saved)
    now = _by_path(given)
    different = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not different:
        return
    # Show private entries only if no public one differs: they usually follow from an argument, as
    # OneCycleLR's phases follow from total_steps.
    public = [name for name in different if not name.rpartition(".")[2].startswith("_")]
    shown = public or different
    found = [f"{name}={before.get(name)}, here {name}={now.get(name)}" for name in shown]
    arguments = ", ".join(f"{name}={before.get(name)!r}" for name in shown[:_SHOWN])
    line = f"{kind}(optimizer, {arguments})"
    if any("." in name for name in shown):  # a scheduler within another: no single line makes it
        line = f"a {kind} with {arguments}"
    raise InvalidValueError(
        f"{path} was saved by a run whose {kind} had other values",
        found=first_few(found, _SHOWN),
        fix=(
            f"to continue that run, use {line}; to keep the values of this run, give it another "
            "folder, and load best.pt into the model"
        ),
    )


def follow_own_function(scheduler) -> None:
    """Recompute the learning rate of a LambdaLR after a checkpoint was loaded into it.

    The loaded rate comes from the functions of the earlier run, which the checkpoint does not
    contain. This run continues with its own functions, such as a cosine over more steps.
    """
    import torch

    if type(scheduler) is not torch.optim.lr_scheduler.LambdaLR:
        return
    groups = scheduler.optimizer.param_groups
    for group, rate, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = rate * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in groups]


def check_length(scheduler, steps: int) -> None:
    """Raise an error if a scheduler ends before the run does.

    Args:
        scheduler: any scheduler. Only schedulers with `total_steps`, such as torch's OneCycleLR,
            have an end; in the step after it they raise an error.
        steps: number of calls of `scheduler.step()` that are left in this run.

    Raises:
        InvalidValueError: the scheduler, or a scheduler inside it, ends earlier.
    """
    for part, needed in _steps_of_parts(scheduler, steps):
        if needed > part.total_steps:
            raise InvalidValueError(
                f"the {type(part).__name__} ends after {part.total_steps} steps, but the run needs "
                f"{needed} steps of it",
                fix=f"total_steps={needed}, or fewer epochs",
            )


def _steps_of_parts(scheduler, steps: int) -> list[tuple]:
    """Return each scheduler with `total_steps`, and its number of steps at the end of the run.

    A SequentialLR with the milestones 5 and 9 calls `step` of its three parts 4, 3 and `end - 9`
    times, because the start of a part at a milestone is not a step of this part.
    """
    end = _steps_done(scheduler) + steps
    if getattr(scheduler, "total_steps", None) is not None:
        return [(scheduler, end)]
    parts = getattr(scheduler, "_schedulers", None) or []
    milestones = getattr(scheduler, "_milestones", None)
    found = []
    if not milestones:  # as in a ChainedScheduler, which steps all parts
        for part in parts:
            found += _steps_of_parts(part, steps)
        return found
    # Part i runs from starts[i] to stops[i], in steps of the whole scheduler.
    starts = [0, *milestones]
    stops = [milestone - 1 for milestone in milestones] + [end]
    for part, start, stop in zip(parts, starts, stops, strict=True):
        stepped = min(stop, end) - start
        left = max(0, stepped - _steps_done(part))
        found += _steps_of_parts(part, left)
    return found


def _steps_done(scheduler) -> int:
    # `last_epoch` is -1 until a SequentialLR reaches the part, and missing in a ChainedScheduler.
    return max(0, getattr(scheduler, "last_epoch", 0))


def _groups(optimizer) -> list[dict]:
    """Return the settings of each parameter group that are plain values.

    If a scheduler changes the learning rate, the setting is the rate before the first change. A
    OneCycleLR or CyclicLR replaces the optimizer's learning rate and momentum, so these are left
    out.
    """
    groups = []
    for group in optimizer.param_groups:
        # A scheduler of torch stores the first learning rate as "initial_lr". OneCycleLR and
        # CyclicLR also store "max_lr" and "max_momentum".
        values = {**group, "lr": group.get("initial_lr", group["lr"])}
        left_out = {"initial_lr"}
        if "max_lr" in group:
            left_out |= {"lr", "min_lr"}
        if "max_momentum" in group:
            left_out |= {"momentum", "betas"}
        plain = {}
        for name, value in values.items():
            if isinstance(value, bool | int | float | tuple) and name not in left_out:
                plain[name] = value
        groups.append(plain)
    return groups


def _plain(value: object) -> object:
    """Return the numbers and texts of a scheduler's state that do not change during a run.

    Any other value, such as a function, becomes None.
    """
    if isinstance(value, Counter):  # the milestones of a MultiStepLR
        return sorted(value.elements())
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items() if name not in _POSITIONS}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, bool | int | float | str):
        return value
    return None


def _by_path(value: object, path: str = "") -> dict[str, object]:
    """Return nested values as a flat dict from path to value: {"_schedulers.0.T_max": 20}."""
    items = None
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        # A list of numbers, such as milestones, is one value. A list of states is not.
        has_parts = any(isinstance(part, Mapping) for part in value)
        if has_parts:
            items = enumerate(value)
    if items is None:
        return {path: value}
    leaves = {}
    for name, part in items:
        leaves |= _by_path(part, f"{path}.{name}".strip("."))
    return leaves
