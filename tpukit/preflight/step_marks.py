"""Mark the ends of a training's steps in the simulator's log, while the training runs.

A step ends at the end of the graph in which an optimizer has stepped. A loop without an optimizer
that writes to its parameters itself counts as well: their version numbers have changed.
"""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tpukit.preflight.cycles import PATIENCE, Mark, cycles, is_steady, read_log

_MOST_STEPS = 40  # of a training in which no step comes back
_MOST_SYNCS = 500  # of a function without an optimizer
_BY_HAND = 0  # the number of the optimizer that a loop without one does not have


class _Parameter(NamedTuple):
    reference: weakref.ref
    version: int  # torch increases it when the parameter is written in place


class StepMarks:
    """A mark in the log after each graph in which an optimizer has stepped.

    `after_step` is called after each mark. If torch_xla cuts the graphs without `core.step()`,
    everything between two steps counts as a single graph.
    """

    def __init__(self, backend, log: Path) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.all: list[Mark] = []
        self.after_step: Callable[[], None] = lambda: None
        self._backend = backend
        self._log = log
        self._stepped: set[int] = set()  # numbers of the optimizers, since the last mark
        self._optimizers: list = []  # kept alive, so that no other optimizer gets the same id
        self._parameters: dict[int, _Parameter] = {}  # that a loop may write to itself
        self._syncs = 0  # since the last mark
        register_optimizer_step_post_hook(lambda optimizer, *_: self._step(optimizer))
        self._forward_hook = register_module_forward_pre_hook(self._before_forward)

    def are_steady(self) -> bool:
        """Return whether the last step was a repetition, and every optimizer has stepped."""
        if not is_steady(cycles(read_log(self._log), self.all)):
            return False
        return len(self.all) > PATIENCE or not self._has_idle_optimizer()

    def are_enough(self) -> bool:
        """Return whether it is useless to wait longer for a step that repeats."""
        if self._syncs >= _MOST_SYNCS:
            return True
        return len(cycles(read_log(self._log), self.all)) >= _MOST_STEPS

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
        length = len(read_log(self._log))
        batches, sent = self._backend.take_notes()
        mark = Mark(length, frozenset(stepped), max(1, self._syncs), batches=batches, sent=sent)
        self.all.append(mark)
        self._syncs = 0
        self.after_step()

    def _step(self, optimizer) -> None:
        number = self._number(optimizer)
        if number in self._stepped:
            # No graph has ended since its last step: the loop calls torch_xla itself to cut them.
            self._mark(self._stepped)
            self._stepped = set()
        self._stepped.add(number)

    def _number(self, optimizer) -> int:
        """Return the number of an optimizer, from 1. Optimizers are compared by identity."""
        for number, known in enumerate(self._optimizers, start=1):
            if known is optimizer:
                return number
        self._optimizers.append(optimizer)
        self._forward_hook.remove()  # this loop does not write to its parameters itself
        return len(self._optimizers)

    def _before_forward(self, module, _inputs) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                found = _Parameter(weakref.ref(parameter), parameter._version)
                self._parameters.setdefault(id(parameter), found)

    def _written_by_hand(self) -> set[int]:
        if self._optimizers:
            return set()
        before = self._parameters
        self._parameters = {}
        is_written = False
        for number, known in before.items():
            parameter = known.reference()
            if parameter is not None:
                is_written |= parameter._version != known.version
                self._parameters[number] = _Parameter(known.reference, parameter._version)
        return {_BY_HAND} if is_written else set()

    def _has_idle_optimizer(self) -> bool:
        """Return whether an optimizer for this device exists that has not stepped."""
        from torch.optim import Optimizer

        known = set(map(id, self._optimizers))
        for thing in gc.get_objects():
            # type(), because isinstance asks objects for __class__, which may be computed.
            is_optimizer = issubclass(type(thing), Optimizer)
            if is_optimizer and id(thing) not in known and self._is_for_device(thing):
                return True
        return False

    def _is_for_device(self, optimizer) -> bool:
        first = [group["params"][0] for group in optimizer.param_groups if group["params"]]
        return any(parameter.device == self._backend.device for parameter in first)
