"""Check optimizers, schedulers and averages of other packages by the methods that `fit` calls.

`fit` calls                                a package has                    tpukit
optimizer.step()                           SAM: first_step, second_step     raises; shows a loop
scheduler.step()                           timm: step(epoch)                raises
averaged_model.update_parameters(model)    timm: update(model)              calls update(model)
"""

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator

from tpukit.essentials.display import InvalidTypeError, TpukitError

# The closure averages the gradients, so each evaluation of the loss uses those of all cores.
_LOOP_WITH_A_CLOSURE = """a loop of your own, whose closure averages the gradients:
for inputs, targets in batches:
    def closure():
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        core.average_gradients(optimizer)
        return core.mean(value)
    closure()
    optimizer.step(closure)"""
_AVERAGED_MODEL = (
    "torch.optim.swa_utils.AveragedModel(model, "
    "multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))"
)


def check_optimizer(optimizer) -> None:
    """Raise a TypeError for an optimizer that computes the loss several times in each step."""
    # LBFGS has a required closure. SAM and similar packages have two half steps.
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is closure.empty
    has_two_steps = hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step")
    if needs_closure or has_two_steps:
        raise _needs_closure(optimizer)


@contextlib.contextmanager
def naming_closures(optimizer) -> Iterator[None]:
    """Replace an optimizer's error about a missing closure by an error with a fix.

    `check_optimizer` does not find every optimizer that needs a closure. Many have
    `step(closure=None)`, and raise an error in `step` if the closure is None.
    """
    try:
        yield
    except TpukitError:  # has a fix already
        raise
    except Exception as error:
        words = f"{type(error).__name__} {error}".lower()
        if "closure" not in words or not _was_raised_by_step(optimizer, error):
            raise
        raise _needs_closure(optimizer) from error


def _was_raised_by_step(optimizer, error: Exception) -> bool:
    """Return whether an error was raised within the method `step` of this optimizer."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "step" and frame.f_locals.get("self") is optimizer:
            return True
    return False


def _needs_closure(optimizer) -> InvalidTypeError:
    name = type(optimizer).__name__
    return InvalidTypeError(
        f"fit computes the gradients once per step, and {name} evaluates the loss several times",
        found=f"{name}.step needs a closure",
        fix=f"Adam or SGD; or {_LOOP_WITH_A_CLOSURE}",
    )


def check_step_of_scheduler(scheduler) -> None:
    """Raise a TypeError for a scheduler whose `step` needs arguments, as timm's do."""
    name = type(scheduler).__name__
    needed = ["a method step"]
    found = f"{name} has no method step"
    if hasattr(scheduler, "step"):
        parameters = inspect.signature(scheduler.step).parameters.values()
        # *args and **kwargs have no default, but need no argument.
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [
            one.name for one in parameters if one.default is one.empty and one.kind not in kinds
        ]
        found = f"{name}.step needs {', '.join(needed)}"
    if needed:
        raise InvalidTypeError(
            "fit calls scheduler.step() without arguments, as torch's schedulers allow; got a "
            f"{name}",
            found=found,
            fix="torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps), or another "
            "class of torch.optim.lr_scheduler; or "
            "tpukit.training.schedules.cosine(optimizer, steps)",
        )


def average_update(averaged_model) -> Callable | None:
    """Return the method that updates an averaged model; None if there is no averaged model.

    Raises:
        InvalidTypeError: the averaged model has no such method, or no attribute `module`.
    """
    if averaged_model is None:
        return None
    # torch names the method `update_parameters`, timm names it `update`.
    update = getattr(averaged_model, "update_parameters", None)
    if update is None:
        update = getattr(averaged_model, "update", None)
    if update is None or not hasattr(averaged_model, "module"):
        raise InvalidTypeError(
            "averaged_model needs `module`, and a method `update_parameters` or, like timm's, "
            "`update`",
            found=f"a {type(averaged_model).__name__}",
            fix=_AVERAGED_MODEL,
        )
    return update
