"""Describe the state of a core as short values by name, so that cores can be compared.

    tensor_checksums(...)    {"weights": {"0.weight": 512391, ...}, "buffers": {...}}     checksums
    structure(model)     {"0": "1 Linear in_features=4, out_features=1, bias=True", ...}
    settings([sgd], None)        {"lr of SGD's group 0": "0.1", ...}
    called_text(loss)    "weighted_loss weights=(2,) 3a5f0c11"

Every function here works on this core alone; `agreement` does the comparison.
"""

import fnmatch
import functools
import re
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping

_EMPTY_CELL = types.CellType()  # the cell of a closure's variable that has no value yet
# Bytes that a core copies to host memory at a time (128 MiB). 8 cores that each copied a large
# model at once would fill the host's memory.
_PORTION_BYTES = 1 << 27
_CLOSURE_DEPTH = 3  # levels of functions within functions that are described
_Key = tuple[str, str]  # group, name


def tensor_checksums(
    core,
    modules: Mapping[str, object],
    optimizers: Iterable,
    *,
    averaged: bool,
    allow_different: Iterable[str],
) -> dict[str, dict[str, int]]:
    """Return checksums of weights and buffers: {"weights": {name: checksum}, "buffers": ...}.

    Args:
        core: the `Core`, which copies tensors to host memory.
        modules: {prefix: module}. The prefix stands before the names of the module's tensors.
        optimizers: optimizers. A parameter that belongs to none of `modules` counts as a weight.
        averaged: whether float buffers have been averaged over the cores. If not, they are left
            out.
        allow_different: patterns of the names of tensors that are left out.
    """
    tensors = {}
    for key, tensor in _named_tensors(modules, optimizers, averaged).items():
        _, name = key
        is_left_out = any(fnmatch.fnmatch(name, pattern) for pattern in allow_different)
        if _has_values(tensor) and not is_left_out:
            tensors[key] = tensor.detach()
    checksums: dict[str, dict[str, int]] = {"weights": {}, "buffers": {}}
    # Portions by their bytes, each in one transfer.
    for keys in _portions(tensors):
        on_host = core.to_host([tensors[key] for key in keys])
        for (group, name), tensor in zip(keys, on_host, strict=True):
            checksums[group][name] = checksum(tensor)
    return checksums


def _named_tensors(
    modules: Mapping[str, object],
    optimizers: Iterable,
    averaged: bool,
) -> dict[_Key, object]:
    tensors: dict[_Key, object] = {}
    known = set()
    for prefix, module in modules.items():
        for name, parameter in _named_parameters(module):
            tensors["weights", prefix + name] = parameter
            # The optimizer has the same parameters, and each must count once.
            known.add(id(parameter))
        for name, buffer in _named_buffers(module):
            if averaged or not _has_mean(buffer):
                tensors["buffers", prefix + name] = buffer
    for optimizer in optimizers:
        for number, parameter in enumerate(parameters_of(optimizer)):
            if id(parameter) not in known:
                name = f"parameter {number} of the {type(optimizer).__name__}"
                tensors["weights", name] = parameter
    return tensors


# The next three functions return nothing for a plain function, because a loss may be one.


def _named_layers(module: object) -> Iterable[tuple[str, object]]:
    # With duplicates: a layer that is used twice computes twice.
    return module.named_modules(remove_duplicate=False) if hasattr(module, "modules") else ()


def _named_parameters(module: object) -> Iterable[tuple[str, object]]:
    return module.named_parameters() if hasattr(module, "named_parameters") else ()


def _named_buffers(module: object) -> Iterable[tuple[str, object]]:
    return module.named_buffers() if hasattr(module, "named_buffers") else ()


def _has_values(tensor) -> bool:
    import torch

    return tensor.layout == torch.strided and not torch.nn.parameter.is_lazy(tensor)


def _has_mean(tensor) -> bool:
    """Return whether a buffer can be averaged over the cores; whole numbers cannot."""
    return tensor.is_floating_point() or tensor.is_complex()


def _portions(tensors: Mapping[_Key, object]) -> Iterator[list[_Key]]:
    """Yield lists of keys, so that the tensors of each list have about `_PORTION_BYTES`."""
    keys = []
    size = 0
    for key, tensor in tensors.items():
        keys.append(key)
        size += tensor.nbytes
        if size > _PORTION_BYTES:
            yield keys
            keys = []
            size = 0
    if keys:
        yield keys


def checksum(tensor) -> int:
    """Return a CRC-32 of the bytes of a tensor in host memory."""
    import torch

    # Two sparse tensors can be equal with their entries in another order.
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


# Optimizers


def parameters_of(optimizer) -> list:
    """Return the parameters of all groups of an optimizer."""
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def trains(optimizer, module) -> bool:
    """Return whether an optimizer has parameters of a module."""
    # By identity, because == compares the numbers of tensors.
    of_optimizer = set(map(id, parameters_of(optimizer)))
    of_module = set(map(id, module.parameters()))
    return not of_optimizer.isdisjoint(of_module)


def versions(optimizer) -> list[int]:
    """Return torch's count of writes to each parameter of an optimizer."""
    return [parameter._version for parameter in parameters_of(optimizer)]


def gradient_checksum(core, optimizer) -> int | None:
    """Return a checksum of all gradients of an optimizer; None if all are zero or missing."""
    gradients = [one.grad for one in parameters_of(optimizer) if one.grad is not None]
    gradients = core.to_host(gradients)
    if not any(map(_is_nonzero, gradients)):
        return None
    # One number for all, because the cores only ask whether they are equal.
    checksums = list(map(checksum, gradients))
    return zlib.crc32(repr(checksums).encode())


def _is_nonzero(tensor) -> bool:
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return bool(tensor.any())


def settings(optimizers: Iterable, schedule: object) -> dict[str, str]:
    """Return the numbers and texts in the settings of optimizers and of a schedule, by name."""
    values = {}
    for number, optimizer in enumerate(optimizers, start=1):
        kind = type(optimizer).__name__
        if number > 1:
            kind = f"{kind} {number}"
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    values[f"{key} of {kind}'s group {index}"] = value
    # A schedule changes learning rates later, so its own state counts, too.
    if schedule is not None:
        for key, value in schedule.state_dict().items():
            values[f"{key} of {type(schedule).__name__}"] = value
    texts = {}
    for name, value in values.items():
        # A learning rate may be a tensor or a number of numpy.
        plain = value.tolist() if hasattr(value, "tolist") else value
        if _is_plain(plain):
            texts[name] = repr(plain)
    return texts


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


# Modules


def lazy_parameters(module) -> list[str]:
    """Return the names of a module's parameters that get their shape from the first batch."""
    import torch

    is_lazy = torch.nn.parameter.is_lazy
    return [name for name, parameter in _named_parameters(module) if is_lazy(parameter)]


def structure(module: object, prefix: str = "") -> dict[str, str]:
    """Return the kind and the settings of each layer and tensor of a module, by name.

    The text of a layer begins with its position, because a Sequential computes in the order of its
    layers. The settings are those in the layer's `extra_repr`, or in its `__constants__` if it has
    no `extra_repr`. Other attributes, such as the last loss, may differ between the cores.
    """
    described: dict[str, str] = {}
    for number, (name, layer) in enumerate(_named_layers(module)):
        numbers = layer.extra_repr() or _constants(layer)
        text = f"{number} {type(layer).__qualname__} {numbers or ''} {_functions(layer) or ''}"
        # A repr such as <function gelu at 0x7f...> has another address in each process.
        without_addresses = re.sub(r" at 0x\w+", "", text)
        described[f"{prefix}{name or type(layer).__name__}"] = without_addresses.strip()
    described |= _tensor_texts(prefix, "parameters", _named_parameters(module))
    described |= _tensor_texts(prefix, "buffers", _named_buffers(module))
    return described


def _functions(layer: object) -> dict[str, str]:
    """Return the names of the functions that a layer has as attributes, such as activations."""
    functions = {}
    for key, value in vars(layer).items():
        is_function = callable(value) and not hasattr(value, "parameters")
        if is_function and not key.startswith("_"):
            functions[key] = getattr(value, "__qualname__", type(value).__qualname__)
    return functions


def _constants(layer: object) -> dict[str, object]:
    """Return the plain values among `__constants__`, such as a loss's `reduction`.

    The repr of torch's losses does not show them.
    """
    values = vars(layer)
    names = [name for name in getattr(layer, "__constants__", ()) if name in values]
    return {name: values[name] for name in names if _is_plain(values[name])}


def _tensor_texts(prefix: str, group: str, tensors: Iterable[tuple[str, object]]) -> dict[str, str]:
    texts = {}
    for name, tensor in tensors:
        if hasattr(tensor, "materialize"):  # of a lazy layer: it has no shape yet
            continue
        text = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
        texts[f"{prefix}{name} ({group})"] = text
    return texts


def averaged_buffers(*modules: object) -> Callable[[], list]:
    """Return a function that looks up the float buffers of modules, for averaging.

    A layer may replace a buffer, as `self.center = 0.9 * self.center + ...` does. The function
    therefore remembers modules and names, not tensors. A call takes 4 microseconds; a search
    through all modules of a ResNet-34 in each step would take 0.3 ms.
    """
    import torch

    layers = {}  # an ordered set
    for module in modules:
        if hasattr(module, "modules"):
            layers |= dict.fromkeys(module.modules())
    places = []
    for layer in layers:
        places += [(layer._buffers, name) for name in layer._buffers]

    def look_up() -> list:
        found = {}  # by identity, since two layers may have the same buffer
        for buffers, name in places:
            buffer = buffers.get(name)
            if buffer is None or not _has_mean(buffer):
                continue
            if buffer.is_complex():
                buffer = torch.view_as_real(buffer)  # no collective supports complex numbers
            found[id(buffers.get(name))] = buffer
        return list(found.values())

    return look_up


# Functions


def called_text(value: object, depth: int = _CLOSURE_DEPTH) -> str:
    """Return the name of a function, and the tensors and floats that are bound to it.

    A loss may have class weights or a factor bound to it, by a closure or functools.partial.
    Integers and strings are left out: they may contain the rank, and the text must be the same on
    every core.
    """
    texts = []
    if depth:
        for name, part in _brought_along(value).items():
            text = _part_text(part, depth)
            if text:
                texts.append(f"{name}={text}")
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{name} {', '.join(texts)}".strip()


def _brought_along(value: object) -> dict[str, object]:
    """Return the arguments of a functools.partial, or the variables of a closure, by name."""
    if isinstance(value, functools.partial):
        return {"of": value.func} | dict(enumerate(value.args)) | value.keywords
    if isinstance(value, types.FunctionType):
        # The names and the values of a closure's variables are kept apart.
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return {name: cell.cell_contents for name, cell in cells if cell != _EMPTY_CELL}
    return {}


def _part_text(part: object, depth: int) -> str:
    import torch

    if isinstance(part, torch.Tensor) and part.layout == torch.strided:
        return f"{tuple(part.shape)} {checksum(part.cpu()):08x}"
    if isinstance(part, float):
        return repr(part)
    if isinstance(part, functools.partial | types.FunctionType):
        return called_text(part, depth - 1)
    return ""
