"""The numbers that the host sends to the device in a step, by their sources.

torch_xla sends a number of Python as an input of the program and does not keep its origin. So a
number is recognised by its value. In each captured step the inputs are compared with the values
that all sources give:

    step 2    the input is 0.01     the learning rate is 0.01, the weight decay is 0.01
    step 3    the input is 0.009    the learning rate is 0.009, so it is the source

A replayed step sends the current value of the source. While several sources are possible
and their values differ, the step is captured, and shows the source.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from tpukit.accelerators import adam_numbers

_IN_THE_GRAPH = (0, 1, -1)  # torch_xla writes these into the graph and sends all others
_OF_ADAM = ("lr", "betas", "eps", "weight_decay")  # all that `adam_numbers` reads
_SMALL = 1000  # elements: a larger input is never copied to the host


class Source(NamedTuple):
    """A source of a number: `kind` is "constant", "setting", "counter" or "adam".

    Attributes:
        group: the number of the optimizer's group.
        name: the name of the setting.
        factor: the factor of a setting, 1 or -1.
        summand: the summand of the average's counter, 0 or -1, because it grows after its use.
        parameter: for "adam", the number within the group of a parameter with this
            count of steps.
    """

    kind: str
    group: int = 0
    name: str = ""
    factor: int = 1
    summand: int = 0
    parameter: int = 0


CONSTANT = Source("constant")


class StepNumbers:
    """The values of all sources in a step.

    Args:
        optimizer: an optimizer of torch.optim.
        average: an AveragedModel, or None.
        ahead: 0 for the step that ran last, 1 for the next step.

    Attributes:
        settings: the settings of the groups, by (group, name).
    """

    def __init__(self, optimizer, average=None, *, ahead: int):
        self._optimizer = optimizer
        self._count = getattr(average, "n_averaged", None)
        self._ahead = ahead
        self.settings = {}
        for place, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                # The number of parameters decides the program; the parameters themselves are state.
                self.settings[place, name] = len(value) if name == "params" else value

    def form(self) -> dict:
        """Return the settings that decide which operations a step has."""
        form = {}
        for (group, name), value in self.settings.items():
            if name == "params" or not _is_sent(value):
                form[group, name] = value
        return form

    def sources(self) -> list[Source]:
        """Return all possible sources of a number; of parameters with equal counts, the first."""
        found = []
        for (group, name), value in self.settings.items():
            if type(value) in (int, float):
                found.append(Source("setting", group, name))
                found.append(Source("setting", group, name, factor=-1))
        if getattr(self._count, "is_cpu", False):
            found += [Source("counter"), Source("counter", summand=-1)]
        for group, settings in enumerate(self._optimizer.param_groups):
            first_with = {}
            for number in range(len(settings["params"])):
                first_with.setdefault(self._steps(group, number), number)
            # Parameters that were never stepped have no count.
            first_with.pop(None, None)
            found += [Source("adam", group, parameter=number) for number in first_with.values()]
        return found

    def value(self, source: Source):
        """Return the tensor that a source gives in this step; None if it gives none."""
        import torch

        if source.kind == "setting":
            setting = self.settings[source.group, source.name]
            return torch.tensor(source.factor * setting, dtype=torch.float64)
        if source.kind == "counter":
            count = float(self._count) + self._ahead + source.summand
            return torch.tensor(count, dtype=torch.float64)
        group = self._optimizer.param_groups[source.group]
        step = self._steps(source.group, source.parameter) + self._ahead
        return adam_numbers(self._optimizer, group, step)

    def unfollowed(self, before: dict, sources: Collection[Source]) -> list[tuple]:
        """Return the keys of changed settings that are not among these sources."""
        followed = set()
        for source in sources:
            names = {"setting": (source.name,), "adam": _OF_ADAM}.get(source.kind, ())
            # A counter and a constant follow no setting.
            followed |= {(source.group, name) for name in names}
        keys = {*self.settings, *before} - followed
        return sorted(key for key in keys if self.settings.get(key, self) != before.get(key, self))

    def _steps(self, group: int, parameter: int) -> float | None:
        weight = self._optimizer.param_groups[group]["params"][parameter]
        steps = self._optimizer.state.get(weight, {}).get("step")
        return float(steps) if hasattr(steps, "device") else None


@dataclass(frozen=True)
class HostInput:
    """An input of a program that is neither state, batch nor seed.

    Attributes:
        id: the id of torch_xla; a tensor that is changed gets another.
        tensor: the input on the device.
        value: its value on the host; None for a large tensor, which is not copied.
        sources: the possible sources; none if the value cannot be explained.
    """

    id: int
    tensor: object
    value: object
    sources: frozenset[Source]

    def values(self, numbers: StepNumbers) -> list:
        """Return the values that the possible sources give in a step."""
        found = []
        for source in self.sources:
            if source == CONSTANT:
                found.append(self.value)
            else:
                found.append(numbers.value(source).to(self.value.dtype))
        return found

    def difference(self, before: "HostInput") -> str:
        """Return in words the difference from an earlier step that no source explains."""
        if self.value is None:
            return f"it reads another tensor of shape {tuple(self.tensor.shape)} than before"
        return f"a number of the host was {_short(before.value)} and is {_short(self.value)}"


def recognize(inputs: list[tuple], numbers: StepNumbers, before, to_cpu) -> list[HostInput]:
    """Return the inputs with the sources that explain this step and the steps before.

    Args:
        inputs: torch_xla's ids and tensors.
        numbers: the numbers of the step that ran last.
        before: the inputs as recognised in the last captured step; None if there is none.
        to_cpu: copies a list of tensors to the host.
    """
    small = [tensor for _, tensor in inputs if tensor.numel() <= _SMALL]
    values = iter(to_cpu(small))
    given = [(source, numbers.value(source)) for source in numbers.sources()]
    found = []
    for place, (number, tensor) in enumerate(inputs):
        was = before[place] if before else None
        possible = {CONSTANT}
        value = None
        if tensor.numel() <= _SMALL:
            value = next(values)
            possible |= {source for source, its_value in given if _is_equal(its_value, value)}
        if was:
            is_same = was.id == number if value is None else was.value.equal(value)
            possible &= was.sources
            if not is_same:
                possible -= {CONSTANT}
        found.append(HostInput(number, tensor, value, frozenset(possible)))
    return found


def changed_values(inputs: list[HostInput], numbers: StepNumbers) -> dict[int, object] | None:
    """Return by place the inputs' values in a step if they differ from the captured ones.

    Returns None if the possible sources of an input differ: then only a captured step shows which
    of them it is.
    """
    changed = {}
    for place, one in enumerate(inputs):
        if one.value is None:
            continue
        first, *others = one.values(numbers)
        if not all(other.equal(first) for other in others):
            return None
        if not first.equal(one.value):
            changed[place] = first
    return changed


def _is_sent(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_sent, value))
    return type(value) in (int, float) and value not in _IN_THE_GRAPH


def _is_equal(found, value) -> bool:
    if found is None or found.shape != value.shape:
        return False
    if value.is_floating_point():
        return found.to(value.dtype).equal(value)
    return found.double().equal(value.double())  # a rate of 0.01 is not the whole number 0


def _short(value) -> str:
    if value.numel() == 1:
        return f"{value.item():g}"
    return f"{tuple(value.shape)} of sum {value.sum().item():g}"
