"""Mark the ends of training steps in the simulator's log, while the training runs.

A step ends at the end of the graph in which an optimizer has stepped. In a loop without an
optimizer, it ends at the end of a graph in which the loop itself has written to parameters, which
changes their version numbers.
"""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tpukit.preflight.cycles import PATIENCE, Mark, cycles, is_steady, read_log

_MOST_STEPS = 40  # the search ends after this many steps if no step repeats
_MOST_SYNCS = 500  # the search ends after this many graphs without an optimizer step
_BY_HAND = 0  # stands for the number of the optimizer in a loop without an optimizer


class _Parameter(NamedTuple):
    reference: weakref.ref  # weak, so that parameters can be freed
    version: int  # `_version`, which torch increases at each write in place


class StepMarks:
    """Collect marks in `all`: one after each graph that has a step of an optimizer.

    The function in `after_step` is called after each mark, and after 500 graphs without a mark. If
    the loop ends its graphs without `core.step()`, everything between two steps of an optimizer
    counts as a single graph.

    Args:
        backend: the backend of the core.
        log: the path of the simulator's log.
    """

    def __init__(self, backend, log: Path) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self.all: list[Mark] = []
        self.after_step: Callable[[], None] = lambda: None
        self._backend = backend
        self._log = log
        self._stepped: set[int] = set()  # numbers of the optimizers that stepped since a mark
        self._optimizers: list = []  # kept alive, so that no other optimizer gets the same id
        self._parameters: dict[int, _Parameter] = {}  # by id, for a loop without an optimizer
        self._syncs = 0  # the number of graphs since the last mark
        register_optimizer_step_post_hook(lambda optimizer, *_: self._step(optimizer))
        self._forward_hook = register_module_forward_pre_hook(self._before_forward)

    def are_steady(self) -> bool:
        """Return whether the same step has run several times, and every optimizer has stepped.

        After more than `PATIENCE` marks, optimizers that have never stepped are ignored.
        """
        if not is_steady(cycles(read_log(self._log), self.all)):
            return False
        return len(self.all) > PATIENCE or not self._has_idle_optimizer()

    def are_enough(self) -> bool:
        """Return whether the recording has reached its limit of steps or graphs."""
        if self._syncs >= _MOST_SYNCS:
            return True
        return len(cycles(read_log(self._log), self.all)) >= _MOST_STEPS

    def after_sync(self) -> None:
        """Add a mark if the graph that has just ended changed weights; count the graph."""
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
            # The optimizer has stepped twice without the end of a graph in between, so the loop
            # cuts its graphs by torch_xla itself. Then each optimizer step gets a mark.
            self._mark(self._stepped)
            self._stepped = set()
        self._stepped.add(number)

    def _number(self, optimizer) -> int:
        """Return the number of an optimizer, from 1; a new optimizer gets the next number."""
        for number, known in enumerate(self._optimizers, start=1):
            if known is optimizer:
                return number
        self._optimizers.append(optimizer)
        self._forward_hook.remove()  # a loop with an optimizer needs no watch on parameters
        return len(self._optimizers)

    def _before_forward(self, module, _inputs) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                found = _Parameter(weakref.ref(parameter), parameter._version)
                self._parameters.setdefault(id(parameter), found)

    def _written_by_hand(self) -> set[int]:
        """Return {_BY_HAND} if a loop without an optimizer wrote to a parameter; else no number."""
        if self._optimizers:
            return set()
        before = self._parameters
        self._parameters = {}
        is_written = False
        for key, known in before.items():
            parameter = known.reference()
            if parameter is not None:
                is_written |= parameter._version != known.version
                self._parameters[key] = _Parameter(known.reference, parameter._version)
        return {_BY_HAND} if is_written else set()

    def _has_idle_optimizer(self) -> bool:
        """Return whether an optimizer for this device exists but has not stepped yet."""
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
