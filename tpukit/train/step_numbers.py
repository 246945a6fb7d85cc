"""The numbers that the host sends to the device in a step, by their sources: settings, Adam's seven, counters.

torch_xla sends a number of Python as an input of the program and does not keep where it came from. So a number is
recognised by its value: the values that settings and counters give are compared with the inputs, in every captured
step. If several sources give the same value, the step in which they differ shows which of them it is.
"""

from collections.abc import Collection
from typing import NamedTuple

from tpukit.runtimes import adam_numbers

_IN_THE_GRAPH = (0, 1, -1)  # torch_xla writes these into the graph and sends all others
_OF_ADAM = ("lr", "betas", "eps", "weight_decay")  # all that `adam_numbers` reads


class Source(NamedTuple):
    """A source of a number: `kind` is "constant", "setting", "counter" or "adam".

    Attributes:
        place: the group of the optimizer; of a counter its place.
        name: of a setting.
        change: the factor of a setting, 1 or -1; the summand of a counter, 0 or -1.
        parameter: of "adam" the place in its group of a parameter with this count of steps.
    """

    kind: str
    place: int = 0
    name: str = ""
    change: int = 0
    parameter: int = 0


CONSTANT = Source("constant")


class StepNumbers:
    """The values of all sources in a step.

    Args:
        optimizer: of torch.optim.
        counters: the count of an AveragedModel after the last captured step, if there is one.
        steps: for each group of the optimizer the steps that each of its parameters has taken by then, or None.

    Attributes:
        settings: of the groups, by (group, name).
    """

    def __init__(self, optimizer, counters: list[float], steps: list[list[float | None]]):
        self._optimizer, self._counters, self._steps = optimizer, counters, steps
        self.settings = {}
        for place, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                self.settings[place, name] = len(value) if name == "params" else value

    def form(self) -> dict:
        """Return the part of the settings that decides which operations a step has."""
        return {key: value for key, value in self.settings.items() if key[1] == "params" or not _is_sent(value)}

    def sources(self) -> list[Source]:
        """Return all sources that a number may have; of a group's equal steps only the first."""
        numbers = [key for key, value in self.settings.items() if type(value) in (int, float)]
        found = [Source("setting", place, name, sign) for place, name in numbers for sign in (1, -1)]
        for place in range(len(self._counters)):
            found += [Source("counter", place), Source("counter", place, "", -1)]
        for place, steps in enumerate(self._steps):
            taken = {step: number for number, step in reversed(list(enumerate(steps))) if step is not None}
            found += [Source("adam", place, parameter=number) for number in taken.values()]
        return found

    def value(self, source: Source, ahead: int = 0):
        """Return the tensor that a source gives, `ahead` steps after the last captured one; None if it gives none."""
        import torch

        if source.kind == "setting":
            return torch.tensor(source.change * self.settings[source.place, source.name], dtype=torch.float64)
        if source.kind == "counter":
            return torch.tensor(self._counters[source.place] + ahead + source.change, dtype=torch.float64)
        group = self._optimizer.param_groups[source.place]
        return adam_numbers(self._optimizer, group, self._steps[source.place][source.parameter] + ahead)

    def changed(self, before: dict) -> set[tuple]:
        """Return the keys of the settings that have changed."""
        keys = {*self.settings, *before}
        return {key for key in keys if self.settings.get(key, self) != before.get(key, self)}


def followed(sources: Collection[Source]) -> set[tuple]:
    """Return the keys of the settings that change nothing but the numbers from these sources."""
    found = set()
    for source in sources:
        if source.kind == "setting":
            found.add((source.place, source.name))
        elif source.kind == "adam":
            found |= {(source.place, name) for name in _OF_ADAM}
    return found


def _is_sent(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_sent, value))
    return type(value) in (int, float) and value not in _IN_THE_GRAPH
