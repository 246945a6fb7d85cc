"""What a core holds that has to be the same on all: short values by name, made without a word to another core."""

import fnmatch
import functools
import re
import types
import zlib
from collections.abc import Callable, Iterable, Mapping

_EMPTY = types.CellType()  # of a variable that has no value yet
_MOST_BYTES = 1 << 27  # brought into host memory at a time: cores that copied a large model at once would fill it


def held_tensors(
    core, modules: Mapping[str, object], optimizers: Iterable, *, averaged: bool, allow_different: Iterable[str]
) -> dict[str, dict[str, int]]:
    """Return checksums of the modules' "weights" and "buffers" by name, and of what else the optimizers hold.

    Args:
        modules: by what their names begin with.
        averaged: whether float buffers have been averaged, so are the same; they are left out otherwise.
        allow_different: patterns of names that are left out.
    """
    import torch

    found: dict[tuple[str, str], object] = {}
    for key, module in modules.items():
        for group, kind in (("weights", "named_parameters"), ("buffers", "named_buffers")):
            for name, one in getattr(module, kind, list)():
                if group == "weights" or averaged or not _has_mean(one):
                    found[group, key + name] = one
    seen = {id(one) for module in modules.values() for one in getattr(module, "parameters", list)()}
    for optimizer in optimizers:
        for number, one in enumerate(parameters_of(optimizer)):
            if id(one) not in seen:
                found["weights", f"parameter {number} of the {type(optimizer).__name__}"] = one
    wanted = {
        key: one.detach()
        for key, one in found.items()
        if one.layout == torch.strided
        and not torch.nn.parameter.is_lazy(one)
        and not any(fnmatch.fnmatch(key[1], pattern) for pattern in allow_different)
    }
    sums: dict[str, dict[str, int]] = {"weights": {}, "buffers": {}}
    for keys in _portions(wanted):
        for (group, name), tensor in zip(keys, core.to_host([wanted[key] for key in keys]), strict=True):
            sums[group][name] = checksum(tensor)
    return sums


def _portions(tensors: dict) -> Iterable[list]:
    keys, size = [], 0
    for key, tensor in tensors.items():
        keys.append(key)
        size += tensor.nbytes
        if size > _MOST_BYTES:
            yield keys
            keys, size = [], 0
    if keys:
        yield keys


def checksum(tensor) -> int:
    """Return a checksum of a tensor in host memory, of its bits."""
    import torch

    if tensor.layout != torch.strided:  # a sparse gradient: what it adds up to
        tensor = tensor.to_dense()
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def gradient_checksum(core, optimizer) -> int | None:
    """Return a checksum of the gradients that an optimizer is about to step with; None where all are zero."""
    held = core.to_host([one.grad for one in parameters_of(optimizer) if one.grad is not None])
    return zlib.crc32(repr([checksum(one) for one in held]).encode()) if any(map(_holds_something, held)) else None


def _holds_something(tensor) -> bool:
    return bool((tensor.to_dense() if tensor.is_sparse else tensor).any())


def versions(optimizer) -> list[int]:
    """Return how often torch has written to each parameter of an optimizer, which it counts anyway."""
    return [one._version for one in parameters_of(optimizer)]


def trains(optimizer, module) -> bool:
    """Say whether an optimizer holds parameters of a module."""
    held = {id(one) for one in parameters_of(optimizer)}
    return any(id(one) in held for one in module.parameters())


def lazy_parameters(module) -> list[str]:
    """Return the names of parameters that get their shape from the first batch."""
    import torch

    named = getattr(module, "named_parameters", list)()
    return [name for name, one in named if torch.nn.parameter.is_lazy(one)]


def parameters_of(optimizer) -> list:
    """Return the parameters of an optimizer, of all its groups."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def structure(module: object, prefix: str = "") -> dict[str, str]:
    """Return what a module computes, as far as it can be told: kind and settings of each layer and tensor, by name.

    In their order, which decides what a Sequential does. Numbers count only where the layer shows them, since many a
    module notes its rank or its last loss.
    """
    found: dict[str, str] = {}
    parts = module.named_modules(remove_duplicate=False) if hasattr(module, "named_modules") else ()
    for number, (name, part) in enumerate(parts):
        functions = {
            key: getattr(value, "__qualname__", type(value).__qualname__)
            for key, value in vars(part).items()
            if callable(value) and not key.startswith("_") and not hasattr(value, "parameters")
        }
        # Of torch's own layers; a loss shows none of them.
        numbers = {key: vars(part)[key] for key in getattr(part, "__constants__", ()) if _is_plain(vars(part).get(key))}
        shown = f"{number} {type(part).__qualname__} {part.extra_repr() or numbers or ''} {functions or ''}"
        found[f"{prefix}{name or type(part).__name__}"] = re.sub(r" at 0x\w+", "", shown).strip()
    for kind in ("parameters", "buffers"):
        for name, one in getattr(module, f"named_{kind}", list)():
            if not hasattr(one, "materialize"):  # of a lazy layer
                found[f"{prefix}{name} ({kind})"] = f"{tuple(one.shape)} {one.dtype} {one.requires_grad}"
    return found


def settings(optimizers: Iterable, schedule: object) -> dict[str, str]:
    """Return the numbers of optimizers and of a schedule, by name."""
    found = {}
    for number, optimizer in enumerate(optimizers):
        of = type(optimizer).__name__ + (f" {number + 1}" if number else "")
        for at, group in enumerate(optimizer.param_groups):
            found |= {f"{key} of {of}'s group {at}": value for key, value in group.items() if key != "params"}
    state = schedule.state_dict() if schedule is not None else {}
    found |= {f"{key} of {type(schedule).__name__}": value for key, value in state.items()}
    values = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in found.items()}
    return {name: repr(value) for name, value in values.items() if _is_plain(value)}


def called_text(value: object, depth: int = 3) -> str:
    """Return what a function is called, and the tensors and fractions that it takes along: weights of classes, a share.

    Whole numbers and texts do not count, since many a function takes the rank along to print something.
    """
    import torch

    kept: dict[str, object] = {}
    if isinstance(value, functools.partial):
        kept = {"of": value.func} | dict(enumerate(value.args)) | value.keywords
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        kept = {name: cell.cell_contents for name, cell in cells if cell != _EMPTY}
    texts = []
    for name, one in kept.items() if depth else ():
        if isinstance(one, torch.Tensor) and one.layout == torch.strided:
            texts.append(f"{name}={tuple(one.shape)} {checksum(one.cpu()):08x}")
        elif isinstance(one, float):
            texts.append(f"{name}={one!r}")
        elif isinstance(one, functools.partial | types.FunctionType):
            texts.append(f"{name}={called_text(one, depth - 1)}")
    return f"{getattr(value, '__qualname__', type(value).__qualname__)} {', '.join(texts)}".strip()


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def averaged_places(*modules: object) -> Callable[[], list]:
    """Return a function that looks up the buffers of modules that can be averaged, as they are at that moment.

    A layer may put a new tensor in the place of the old, as `self.center = 0.9 * self.center + ...` does. The places
    are found once: to walk through a ResNet-34 in every step would take 0.3 ms, this 4 microseconds.
    """
    import torch

    parts = dict.fromkeys(part for one in modules if hasattr(one, "modules") for part in one.modules())
    places = [(part._buffers, name) for part in parts for name in part._buffers]

    def look_up() -> list:
        held = [place.get(name) for place, name in places]
        found = {id(one): one for one in held if one is not None and _has_mean(one)}
        return [one if one.is_floating_point() else torch.view_as_real(one) for one in found.values()]

    return look_up


def _has_mean(tensor) -> bool:
    """Say whether the mean over the cores stands for a buffer: not for whole numbers."""
    return tensor.is_floating_point() or tensor.is_complex()
