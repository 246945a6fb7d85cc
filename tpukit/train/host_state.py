"""What Python holds that a training step may look at: the numbers and texts that its functions and layers can reach."""

import random
import re
import sys
import types
from collections.abc import Iterable, Mapping

from tpukit.train.host_parts import PLAIN, Early, Unseen, bytes_of, code_of, names_in, value_and_parts

_MOST = 200_000  # values that are looked at, ten microseconds each
_MOST_BYTES = 64_000_000  # of arrays on the host, all together: 60 ms


def host_state(roots: Mapping[str, object], *, without: Iterable[object] = ()) -> dict[str, object]:
    """Return what can be reached from objects with names and is no tensor of the device, by the way to it.

    Followed are attributes and slots, the contents of lists and dicts, of functions of the user's own what they close
    over and which globals they name, and of the modules that are met the attributes that such functions name. What only
    C knows is looked at as it would be pickled; what cannot be, a generator or an open file, is `Unseen`.
    The objects of `without` are not looked at.
    """
    found, todo, left = {"torch's settings": _settings()}, list(roots.items()), _MOST_BYTES
    modules, names, asked = {}, set(), set()
    # The objects, too, so that no id becomes another's.
    seen = {id(one): (one, None) for one in (*without, *_host_generators(), sys.modules)}
    while todo:
        if len(found) > _MOST:
            return found | {"it": Unseen(f"can reach more than {_MOST:,} values")}
        name, one = todo.pop()
        if isinstance(one, PLAIN):
            found[name] = one
        elif id(one) in seen:
            first = seen[id(one)][1]
            found |= {name: Early(f"the same as {first}")} if first else {}
        else:
            seen[id(one)] = one, name
            left -= (size := bytes_of(one))
            found[name], parts = value_and_parts(one, fits=left >= 0)
            left += size * (left < 0)
            todo += ((name + step, part) for step, part in parts)
            kinds = (kind for kind in type(one).__mro__ if id(kind) not in seen)
            todo += ((f"{kind.__module__}.{kind.__qualname__}", kind) for kind in kinds)
            if isinstance(one, types.ModuleType):
                modules[one.__name__] = vars(one)
            elif code := code_of(one):
                names |= {*names_in(code)}
        if not todo:
            named = {(where, name) for where, held in modules.items() for name in names & held.keys()} - asked
            asked |= named
            todo += ((f"{where}.{name}", modules[where][name]) for where, name in sorted(named))
    return found


def _settings() -> tuple:
    import torch

    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _host_generators() -> tuple:
    """Return the generators that every step of `fit` seeds anew, and of which it sees whether they were drawn from."""
    import numpy
    import torch

    return random.seed.__self__, numpy.random.get_state.__self__, torch.default_generator


def first_change(before: dict[str, object], now: dict[str, object], *, new: bool) -> str | None:
    """Return what differs between two such states, in words; None if nothing does. What is new counts with `new`."""
    names = [*now, *(name for name in before if name not in now)]
    if not new:
        names = [name for name in now if name in before and Early not in (type(before[name]), type(now[name]))]
    pairs = ((name, before.get(name, "not there"), now.get(name, "not there")) for name in names)
    changed = ((name, was, is_now) for name, was, is_now in pairs if was is not is_now and not _equal(was, is_now))
    name, was, is_now = next(changed, (None, None, None))
    if name is None:
        return None
    name = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", name)
    return (
        f"{name} {is_now.words}" if isinstance(is_now, Unseen) else f"{name} was {_shown(was)} and is {_shown(is_now)}"
    )


def _equal(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


def _shown(value: object) -> str:
    name = getattr(value, "__qualname__", None) or getattr(value, "co_qualname", None)
    return name or repr(value)[:40]


def obstacle(called: Iterable, optimizer) -> str | None:
    """Return what is there that only recording a step can do; None for nothing."""
    import torch

    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for part in (part for one in called if hasattr(one, "modules") for part in one.modules()):
        of_tensors = ("_backward_hooks", "_post_accumulate_grad_hooks")
        if any(getattr(part, kind) for kind in kinds):
            return f"{type(part).__name__} has a hook"
        if any(getattr(one, kind, None) for one in part.parameters(recurse=False) for kind in of_tensors):
            return f"a parameter of {type(part).__name__} has a hook"
    if torch.nn.modules.module._has_any_global_hook():
        return "all layers have a hook"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{type(optimizer).__name__} has a hook"
    if any(isinstance(value, torch.Tensor) for group in optimizer.param_groups for value in group.values()):
        return f"a setting of {type(optimizer).__name__} is a tensor"
    return None
