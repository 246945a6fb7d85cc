"""The numbers that the host tells the device in a step, by what they come from: rates, Adam's seven, counters.

torch_xla sends a number of Python as an input of the program and does not say where it is from. So it is recognised by
its value: what the optimiser's settings and the counters would give is compared with what was sent, in every step that
is recorded. Which of several equal sources it was shows in the step in which they differ.
"""

from tpukit.runtimes import adam_numbers

CONSTANT = ("constant",)


class Told:
    """What the settings of an optimiser, and counters, give in a step.

    Args:
        optimizer: any of torch's.
        counters: numbers and tensors of the host that grow by one in each step.

    Attributes:
        settings: of the optimiser's groups, by (group, name).
    """

    def __init__(self, optimizer, counters: list):
        self._optimizer, self._counters = optimizer, counters
        self.settings = {
            (at, name): len(value) if name == "params" else value
            for at, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
        }

    def sources(self) -> list[tuple]:
        """Return what a number may come from; of counters and of parameters that have gone as far, the first."""
        numbers = [key for key, value in self.settings.items() if type(value) in (int, float)]
        found = [("setting", *key, sign) for key in numbers for sign in (1, -1)]
        first = {float(value): place for place, value in reversed(list(enumerate(self._counters)))}
        found += [("counter", place, offset) for place in first.values() for offset in (0, -1)]
        for at, group in enumerate(self._optimizer.param_groups):
            steps = {self._step(at, number): number for number in reversed(range(len(group["params"])))}
            found += [("adam", at, number) for step, number in steps.items() if step is not None]
        return found

    def value(self, source: tuple, ahead: int = 0):
        """Return the tensor that a source gives, `ahead` steps after what optimiser and counters hold; or None."""
        import torch

        kind, first, second, *sign = source
        if kind == "setting":
            return torch.tensor(sign[0] * self.settings[first, second], dtype=torch.float64)
        if kind == "counter":
            return torch.as_tensor(self._counters[first] + ahead + second)
        step = self._step(first, second) + ahead
        return adam_numbers(self._optimizer, self._optimizer.param_groups[first], step)

    def understood(self, sources: set[tuple]) -> set[tuple]:
        """Return the settings that change nothing but the numbers from these sources."""
        plain = {(first, second) for kind, first, second, *_ in sources - {CONSTANT} if kind == "setting"}
        groups = {first for kind, first, *_ in sources - {CONSTANT} if kind == "adam"}
        return plain | {(group, name) for group in groups for name in ("lr", "betas", "eps")}

    def _step(self, group: int, number: int) -> float | None:
        parameter = self._optimizer.param_groups[group]["params"][number]
        step = self._optimizer.state.get(parameter, {}).get("step")
        return None if step is None or getattr(step, "device", None) is None else float(step)
