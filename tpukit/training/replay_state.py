"""Find the state that a step changes: tensors on the device, and counters on the host.

A module stores its tensors in dicts, and an optimizer stores a dict for each parameter. A place is
an entry of such a dict. A captured step changes the tensor in a place. A replayed step replaces the
tensor's data by a result of the program.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Places:
    """A list of dict entries. Two lists are equal if they refer to the same entries in order."""

    def __init__(self, entries: Iterable[tuple[dict, str]] = ()):
        self._entries = list(entries)
        # Compare dicts by identity, because their contents change with every step. No other dict
        # gets the same id, because `_entries` keeps these dicts alive.
        self.keys = [(id(table), name) for table, name in self._entries]

    def __eq__(self, other: "Places") -> bool:
        return self.keys == other.keys

    __hash__ = None

    def values(self) -> list:
        """Return the values of all entries, in order."""
        return [table[name] for table, name in self._entries]

    def add(self, number: int) -> None:
        """Add a number to each value; the values are tensors on the host or Python numbers."""
        for table, name in self._entries:
            table[name] += number


class HostNumbers(NamedTuple):
    """Copies of numbers on the host at one moment."""

    entries: list[tuple[dict, str]]  # the dict of each number, and the number's key
    values: list


class ReplayState:
    """Finds the state of a step's model, loss, functions and optimizer.

    Args:
        parts: the model, the loss and so on; only modules among them have a state.
        optimizer: an optimizer of torch.optim.
        average: an AveragedModel, or None.
    """

    def __init__(self, parts: Iterable[object], optimizer, average=None):
        self._roots = [part for part in parts if hasattr(part, "modules")]
        self._optimizer = optimizer
        self._average = average

    def on_device(self) -> Places:
        """Return the places of all tensors on the device; a shared tensor has one place."""
        found = {}
        for table, name, value in self._entries():
            if getattr(value, "is_xla", False):
                found[id(value)] = (table, name)
        return Places(found.values())

    def on_host(self) -> HostNumbers:
        """Return copies of the state's numbers and tensors on the host."""
        entries = []
        values = []
        for table, name, value in self._entries():
            if getattr(value, "is_cpu", False):
                value = value.clone()
            # Not isinstance, because True and False are ints but not counters.
            elif type(value) not in (int, float):
                continue
            entries.append((table, name))
            values.append(value)
        return HostNumbers(entries, values)

    def count_tensors(self) -> list:
        """Return the CPU tensors with the step counts of the optimizer and the averaged model."""
        counts = [state.get("step") for state in self._states()]
        counts.append(getattr(self._average, "n_averaged", None))
        return [count for count in counts if getattr(count, "is_cpu", False)]

    def counters(self, before: HostNumbers) -> tuple[Places, str | None]:
        """Find how the numbers on the host have changed in a step.

        Args:
            before: the numbers before the step.

        Returns:
            the step counters that have grown by one, and the name of a number that has changed in
            another way; None if there is no such number.
        """
        import torch

        # Only the step counts of torch.optim and of AveragedModel are known to grow in every step.
        may_grow = {(id(state), "step") for state in self._states()}
        may_grow.add((id(getattr(self._average, "_buffers", None)), "n_averaged"))
        grown = []
        other = None
        for (table, name), was in zip(before.entries, before.values, strict=True):
            now = torch.as_tensor(table[name])
            was = torch.as_tensor(was)
            if _are_equal(now, was):
                continue
            # A tensor with several counts is a counter only if all of them have grown by 1.
            if (id(table), name) in may_grow and bool((now - was == 1).all()):
                grown.append((table, name))
            else:
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


def _are_equal(now, was) -> bool:
    """Return whether two tensors have the same shape and values; NaN is equal to NaN."""
    if now.shape != was.shape:
        return False
    return bool(((now == was) | ((now != now) & (was != was))).all())
