"""The state that a step changes: tensors on the device, and counters on the host.

A module holds its tensors in dicts, an optimizer holds a dict per parameter. A place is an entry
of such a dict. A captured step changes the tensor in a place, and a replayed step puts the result
of the program into it.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Places:
    """Entries of dicts, in an order; equal to other places if they are the same entries."""

    def __init__(self, entries: Iterable[tuple[dict, str]] = ()):
        self._entries = list(entries)
        # The dicts themselves: their contents change with every step. An id is safe, because
        # `_entries` keeps the dict alive.
        self.keys = [(id(table), name) for table, name in self._entries]

    def __eq__(self, other: "Places") -> bool:
        return self.keys == other.keys

    __hash__ = None

    def values(self) -> list:
        """Return the values of all entries, in order."""
        return [table[name] for table, name in self._entries]

    def add(self, number: int) -> None:
        """Add a number to the values of all entries, which are tensors on the host or numbers."""
        for table, name in self._entries:
            table[name] += number


class HostNumbers(NamedTuple):
    """The numbers that the host holds before or after a step."""

    entries: list[tuple[dict, str]]
    values: list


class ReplayState:
    """Finds the state of the parts of a step.

    Args:
        parts: the model, the loss and so on; those that are modules have a state.
        optimizer: an optimizer of torch.optim.
        average: an AveragedModel, or None.
    """

    def __init__(self, parts: Iterable[object], optimizer, average=None):
        self._roots = [part for part in parts if hasattr(part, "modules")]
        self._optimizer = optimizer
        self._average = average

    def on_device(self) -> Places:
        """Return the places of all tensors on the device, each tensor once."""
        found = {}
        for table, name, value in self._entries():
            if getattr(value, "is_xla", False):
                found[id(value)] = (table, name)
        return Places(found.values())

    def on_host(self) -> HostNumbers:
        """Return copies of the numbers and tensors on the host."""
        entries = []
        values = []
        for table, name, value in self._entries():
            if getattr(value, "is_cpu", False):
                value = value.clone()
            # Not isinstance: True is an int, and a switch is no counter.
            elif type(value) not in (int, float):
                continue
            entries.append((table, name))
            values.append(value)
        return HostNumbers(entries, values)

    def count_tensors(self) -> list:
        """Return the optimizer's and the average's counts that are tensors on the host."""
        counts = [state.get("step") for state in self._states()]
        counts.append(getattr(self._average, "n_averaged", None))
        return [count for count in counts if getattr(count, "is_cpu", False)]

    def counters(self, before: HostNumbers) -> tuple[Places, str | None]:
        """Return the counters that a step has increased by one, and a name of another change."""
        import torch

        may_grow = {(id(state), "step") for state in self._states()}
        may_grow.add((id(getattr(self._average, "_buffers", None)), "n_averaged"))
        grown = []
        other = None
        for (table, name), was in zip(before.entries, before.values, strict=True):
            # A tensor of several counts, as one per layer, is a counter only if all of them grew by
            # 1.
            changes = set(torch.as_tensor(table[name] - was).flatten().tolist())
            if changes == {1} and (id(table), name) in may_grow:
                grown.append((table, name))
            elif changes - {0}:
                other = other or name
        return Places(grown), other

    def _entries(self) -> Iterator[tuple[dict, str, object]]:
        for table in self._tables():
            for name, value in table.items():
                yield table, name, value

    def _tables(self) -> list[dict]:
        modules = {}  # in place of a set, for a fixed order
        for root in self._roots:
            modules |= dict.fromkeys(root.modules())
        tables = []
        for module in modules:
            tables += [module._parameters, module._buffers]
        return [*tables, *self._states()]

    def _states(self) -> list[dict]:
        return [state for state in self._optimizer.state.values() if isinstance(state, dict)]
