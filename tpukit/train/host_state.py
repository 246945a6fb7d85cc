"""What Python holds that a training step may look at: the numbers and texts that its functions and layers can reach."""

import functools
import os
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

_MOST = 20_000  # values that are looked at; of a list its first thousand
_LIBRARY = (os.path.dirname(os.__file__), str(Path(__file__).parents[1]))  # Python's own files, and this kit's
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_SKIPPED = (types.ModuleType, types.BuiltinFunctionType, types.CodeType)


def host_state(roots: Mapping[str, object], *, without: set[int]) -> dict[str, object]:
    """Return what can be reached from some objects and is no tensor of the device, by the way to it.

    Followed are attributes, the contents of lists and dicts, and of functions of the user's own what they close over
    and which globals they name. An iterator cannot be looked into, so it is never the same twice.

    Args:
        roots: objects by name.
        without: ids of objects that are not looked at.
    """
    import torch

    found, seen, todo = {}, set(without), list(roots.items())
    while todo and len(found) < _MOST:
        name, one = todo.pop()
        if isinstance(one, _PLAIN):
            found[name] = one
        elif id(one) not in seen and not isinstance(one, _SKIPPED):
            seen.add(id(one))
            if isinstance(one, torch.Tensor):
                kind = "trained" if one.requires_grad else "not trained"
                found[name] = f"{kind}, {tuple(one.shape)}" + f", {one._version}" * (one.device.type == "cpu")
            elif hasattr(one, "__next__"):
                found[name] = object()
            elif hasattr(one, "tobytes") and getattr(one, "nbytes", _MOST) < _MOST:  # numpy's
                found[name] = one.tobytes()
            else:
                parts = list(_parts(one))
                found[name] = f"a {type(one).__name__}" + f" of {len(parts)}" * isinstance(one, Collection)
                todo += ((name + step, part) for step, part in parts[:1000])
    return found


def _parts(one: object) -> Iterator[tuple[str, object]]:
    if isinstance(one, Mapping):
        yield from ((f"[{key!r}]" if isinstance(key, _PLAIN) else "[...]", part) for key, part in one.items())
    elif isinstance(one, list | tuple | set | frozenset) or type(one).__name__ == "deque":
        yield from ((f"[{place}]", part) for place, part in enumerate(one))
    elif isinstance(one, _FUNCTIONS):
        yield from _parts_of_function(one)
    elif isinstance(one, type):
        yield from ((f".{name}", part) for name, part in vars(one).items() if not name.startswith("__"))
    else:
        yield from ((f".{name}", part) for name, part in getattr(one, "__dict__", {}).items())
        yield from ((f".{kind.__name__}", kind) for kind in type(one).__mro__ if _is_own(_file_of(kind)))


def _parts_of_function(one) -> Iterator[tuple[str, object]]:
    if isinstance(one, functools.partial):
        yield from ((".func", one.func), (".args", one.args), (".keywords", one.keywords))
        return
    if isinstance(one, types.MethodType):
        yield (".__self__", one.__self__)
        one = one.__func__
    code, names = one.__code__, one.__globals__
    if not isinstance(one, types.FunctionType) or not _is_own(code.co_filename):
        return
    cells = zip(code.co_freevars, one.__closure__ or (), strict=True)
    yield from ((f".{name}", cell.cell_contents) for name, cell in cells if cell != types.CellType())
    yield (".__defaults__", (one.__defaults__, one.__kwdefaults__))
    yield from ((f":{name}", names[name]) for name in dict.fromkeys(_names(code)) if name in names)


def _names(code: types.CodeType) -> Iterator[str]:
    """Return the names that a function and those within it look up."""
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _names(part)


def _file_of(kind: type) -> str:
    methods = (part for part in vars(kind).values() if isinstance(part, types.FunctionType))
    return next((method.__code__.co_filename for method in methods), _LIBRARY[0])


def _is_own(file: str) -> bool:
    """Say whether a file is the user's: a notebook's cell, a module of theirs, no installed package."""
    return "-packages" not in file and not file.startswith(_LIBRARY)


def first_change(before: dict[str, object], now: dict[str, object], *, new: bool) -> str | None:
    """Return what differs between two such states, in words; None if nothing does. What is new counts with `new`."""
    names = [name for name in now if new or name in before] + [name for name in before if name not in now]
    pairs = ((name, before.get(name), now.get(name)) for name in names)
    name = next((name for name, was, is_now in pairs if was is not is_now and was != is_now), None)
    if name is None:
        return None
    was, now = (repr(one.get(name, "not there"))[:40] for one in (before, now))
    name = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", name)
    return f"{name} was {was} and is {now}"


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
