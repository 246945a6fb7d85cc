"""Find the sources of the numbers that the host sends to the device in a step.

torch_xla sends a Python number, such as a learning rate, as an input of the program, and does not
record the number's source. So tpukit recognises the source by the value. In each captured step, it
compares the inputs with the current values of all possible sources:

    step 2    the input is 0.01     the learning rate is 0.01, the weight decay is 0.01
    step 3    the input is 0.009    the learning rate is 0.009, so it is the source

A replayed step sends the current value of the source. If several sources are possible and their
values differ, the step is captured instead, and its input shows the source.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from tpukit.accelerators import adam_numbers

_IN_THE_GRAPH = (0, 1, -1)  # torch_xla writes these into the graph and sends all others
_OF_ADAM = ("lr", "betas", "eps", "weight_decay")  # numbers that `adam_numbers` reads
_SMALL = 1000  # elements: a larger input is never copied to the host


class Source(NamedTuple):
    """A source of a number that the host sends to the device.

    Attributes:
        kind: "setting": a setting of the optimizer, such as its learning rate; "counter": the
            update counter of the averaged model; "adam": Adam's step-dependent numbers;
            "constant": the same number in every step.
        group: for "setting" and "adam", the number of the optimizer's parameter group.
        name: for "setting", its name.
        factor: for "setting", 1 or -1: the number is this factor times the setting.
        summand: for "counter", -1 if torch reads the counter before increasing it, otherwise 0.
        parameter: for "adam", the index in the group of the parameter whose step count is used.
    """

    kind: str
    group: int = 0
    name: str = ""
    factor: int = 1
    summand: int = 0
    parameter: int = 0


CONSTANT = Source("constant")


class StepNumbers:
    """Compute the numbers of a step that change: settings of the optimizer, and counters.

    Args:
        optimizer: an optimizer of torch.optim.
        average: an AveragedModel, or None.
        ahead: 0 for the values in the latest step, 1 for those in the next step.

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

    def graph_settings(self) -> dict:
        """Return the settings that are a part of the graph: another value gives another program."""
        found = {}
        for (group, name), value in self.settings.items():
            if name == "params" or not _is_sent(value):
                found[group, name] = value
        return found

    def sources(self) -> list[Source]:
        """Return all possible sources of a number, except `CONSTANT`.

        Of several parameters with the same step count, only the first is a source.
        """
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
        """Return the value of a source in this step as a tensor.

        The result is None if `adam_numbers` has no formula for this optimizer.
        """
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
        """Return the keys (group, name) of changed settings from which no source is computed.

        Args:
            before: the settings in an earlier step.
            sources: the possible sources of the program's inputs.
        """
        followed = set()
        for source in sources:
            # An "adam" input follows all settings from which `adam_numbers` computes it. A counter
            # and a constant follow no setting.
            names = {"setting": (source.name,), "adam": _OF_ADAM}.get(source.kind, ())
            followed |= {(source.group, name) for name in names}
        keys = {*self.settings, *before} - followed
        return sorted(key for key in keys if self.settings.get(key, self) != before.get(key, self))

    def _steps(self, group: int, parameter: int) -> float | None:
        weight = self._optimizer.param_groups[group]["params"][parameter]
        steps = self._optimizer.state.get(weight, {}).get("step")
        return float(steps) if hasattr(steps, "device") else None


@dataclass(frozen=True)
class HostInput:
    """An input of a program, other than the state, the batch and the random seed.

    Attributes:
        id: torch_xla's id of the tensor; a tensor gets a new id when its value changes.
        tensor: the input on the device.
        value: a copy of the input on the host; None if it has more than 1,000 elements.
        sources: the possible sources of the value; empty if no source explains it.
    """

    id: int
    tensor: object
    value: object
    sources: frozenset[Source]

    def values(self, numbers: StepNumbers) -> list:
        """Return the value that the input has in a step, according to each possible source."""
        found = []
        for source in self.sources:
            if source == CONSTANT:
                found.append(self.value)
            else:
                found.append(numbers.value(source).to(self.value.dtype))
        return found

    def difference(self, before: "HostInput") -> str:
        """Describe, for a message, how the input differs from the same input in an earlier step."""
        if self.value is None:
            return f"the step reads another tensor of shape {tuple(self.tensor.shape)} than before"
        return f"a number of the host was {_short(before.value)} and is {_short(self.value)}"


def recognize(inputs: list[tuple], numbers: StepNumbers, before, to_cpu) -> list[HostInput]:
    """Return the inputs, each with the sources that had the input's value in every step so far.

    Args:
        inputs: (id, tensor) of each input, as torch_xla gives them.
        numbers: the values of the sources in the latest step.
        before: the result for the last captured step of this program; None in the first.
        to_cpu: function that copies a list of tensors to the host.
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
        # A source stays possible only if it was possible in each step before.
        if was:
            is_same = was.id == number if value is None else was.value.equal(value)
            possible &= was.sources
            if not is_same:
                possible -= {CONSTANT}
        found.append(HostInput(number, tensor, value, frozenset(possible)))
    return found


def changed_values(inputs: list[HostInput], numbers: StepNumbers) -> dict[int, object] | None:
    """Return the inputs whose values change in a step, as {index of the input: new value}.

    The result is None if the possible sources of an input differ in their values. Only a captured
    step shows which source is right.
    """
    changed = {}
    for place, one in enumerate(inputs):
        if one.value is None:
            continue
        # If all possible sources have the same value, it does not matter which source is right.
        first, *others = one.values(numbers)
        if not all(other.equal(first) for other in others):
            return None
        if not first.equal(one.value):
            changed[place] = first
    return changed


def _is_sent(value: object) -> bool:
    """Return whether torch_xla sends a setting as an input, and not as a part of the graph."""
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
