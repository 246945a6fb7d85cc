"""What a run's processes will hold in host memory: what can be known before they are forked, and no guess beyond."""

import sys
from collections.abc import Callable, Iterator, Mapping

from tpukit.essentials.backends import Topology
from tpukit.essentials.data import seen_by
from tpukit.essentials.machine import available_memory
from tpukit.essentials.show import explain, human_size


def memory_warning(fn: Callable, args: tuple, topology: Topology, available: int | None = None) -> str | None:
    """Return a line if the models that a worker function sees are too large to be copied on every core, else None.

    What the notebook holds is shared by the fork, and counts for no core; so a dataset in arrays is free. Copied is
    what `core.model` is given: its weights, and in a rehearsal, whose device is the host, as much again for gradients.
    Batches, activations and the optimiser come on top, and are not known here.
    """
    models = _models(fn, args)
    weights = sum(_size(model) for model in models)
    each = weights * (2 if topology.rehearsal else 1)
    available = available_memory() if available is None else available
    if available is None or each * topology.cores <= available:
        return None
    names = ", ".join(dict.fromkeys(type(model).__name__ for model in models))
    gradients = " and as much for its gradients; Adam would take both again" if topology.rehearsal else ""
    return explain(
        f"{topology.cores} cores will need {human_size(each * topology.cores)} of host memory at least, and "
        f"{human_size(available)} are available",
        found=f"a copy of {names} on each core, {human_size(weights)}{gradients}",
        fix=f"cores={max(1, available // each)}, a smaller model, or a machine with more memory",
    )


def _models(fn: Callable, args: tuple) -> list:
    """Return the modules among the arguments of a function, what it encloses, and the globals that it names."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found = {id(model): model for value in [*args, *seen_by(fn)] for model in _inside(value, torch.nn.Module)}
    parts = {id(part) for model in found.values() for part in list(model.modules())[1:]}  # they are counted with it
    return [model for number, model in found.items() if number not in parts]


def _inside(value: object, kind: type) -> Iterator[object]:
    """Yield what is of a kind: the value, or a part of a plain container or of a configuration."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, Mapping | list | tuple) and len(value) <= 1000:  # not a dataset
        parts = value.values() if isinstance(value, Mapping) else value
        yield from (part for part in parts if isinstance(part, kind))
    elif hasattr(value, "__dataclass_fields__") or type(value).__name__ == "SimpleNamespace":
        yield from (part for part in vars(value).values() if isinstance(part, kind))


def _size(model) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))  # each once, as torch counts
