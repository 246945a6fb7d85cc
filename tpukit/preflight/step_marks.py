"""Where a training's steps end, seen while it runs: its optimisers step, or its loop writes to parameters itself."""

import weakref
from collections.abc import Callable
from pathlib import Path

from tpukit.preflight.cycles import PATIENCE, Mark, cycles, is_steady, read_log

_MOST_STEPS = 40  # of a training in which each is another
_MOST_SYNCS = 500  # of a function that has no optimiser
_BY_HAND = 0  # in place of an optimiser, for a loop that has none


class StepMarks:
    """Notes after each graph how much the stand-in has written, if an optimiser has stepped in it.

    `after_step` is called after each; what torch_xla cuts without `core.step()` counts as one graph from step to step.
    """

    def __init__(self, backend, log: Path) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.all: list[Mark] = []
        self.after_step: Callable[[], None] = lambda: None
        self._backend, self._log = backend, log
        self._stepped: set[int] = set()
        self._optimizers: list = []  # kept, so that none gets another's number
        self._versions: dict[int, tuple[weakref.ref, int]] = {}  # of parameters that a loop may write to by itself
        self._syncs = 0  # since the last mark
        register_optimizer_step_post_hook(lambda optimizer, *_: self._step(optimizer))
        self._forward_hook = register_module_forward_pre_hook(lambda module, _: self._look_at(module))

    def are_steady(self) -> bool:
        """Return whether the last cycle has come back, and no optimiser is there that has yet to begin."""
        found = cycles(read_log(self._log), self.all)
        return is_steady(found) and (len(self.all) > PATIENCE or not self._waits_for_others())

    def are_enough(self) -> bool:
        """Return whether there is no use in waiting for a step that comes back."""
        return len(cycles(read_log(self._log), self.all)) >= _MOST_STEPS or self._syncs >= _MOST_SYNCS

    def after_sync(self) -> None:
        """Note the end of a graph."""
        stepped = self._stepped or self._written_by_hand()
        self._syncs += 1
        self._stepped = set()
        if stepped:
            self._mark(stepped)
        elif self._syncs >= _MOST_SYNCS:
            self.after_step()

    def _mark(self, stepped: set[int]) -> None:
        self._backend.wait_for_launches()
        self.all.append(Mark(len(read_log(self._log)), frozenset(stepped), max(1, self._syncs)))
        self._syncs = 0
        self.after_step()

    def _step(self, optimizer) -> None:
        if not any(one is optimizer for one in self._optimizers):
            self._optimizers.append(optimizer)
            self._forward_hook.remove()
        number = 1 + next(place for place, one in enumerate(self._optimizers) if one is optimizer)
        if number in self._stepped:  # and no graph has ended: torch_xla's own calls cut this loop
            self._mark(self._stepped)
            self._stepped = set()
        self._stepped.add(number)

    def _look_at(self, module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                self._versions.setdefault(id(parameter), (weakref.ref(parameter), parameter._version))

    def _written_by_hand(self) -> set[int]:
        if self._optimizers:
            return set()
        now = {number: (one, one()._version) for number, (one, _) in self._versions.items() if one() is not None}
        written = any(version != self._versions[number][1] for number, (_, version) in now.items())
        self._versions = now
        return {_BY_HAND} if written else set()

    def _waits_for_others(self) -> bool:
        import gc

        from torch.optim import Optimizer

        known = set(map(id, self._optimizers))
        others = (one for one in gc.get_objects() if issubclass(type(one), Optimizer) and id(one) not in known)
        parameters = (one for other in others for group in other.param_groups for one in group["params"][:1])
        return any(one.device == self._backend.device for one in parameters)
