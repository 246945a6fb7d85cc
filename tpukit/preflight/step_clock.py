"""Measure how long the host takes to record a training step.

This is the time of Python, PyTorch and torch_xla, without the time of the device. The device
computes a step while the host records the next, so it waits if the host takes longer.
"""

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_STEPS = 9  # whose median is taken
_FEWEST_STEPS = 3  # if a step takes long
_SECONDS = 5.0  # after which the fewest steps are enough
_MOST_SECONDS = 15.0  # after which no step is waited for


@dataclass(frozen=True)
class _Step:
    seconds: float
    optimizers: frozenset[int]  # the ids of the optimizers that stepped


class StepClock:
    """The processor time that a thread uses between two steps of its optimizers.

    Args:
        before: called once, before the first step that counts.

    Attributes:
        ended: set when there are enough steps, or no more will come.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped.add(id(optimizer)))
        self._before = before
        self._sees_graphs = False
        self._began: float | None = None  # when steps began to count
        self._last: float | None = None  # when the last of them ended, by the clock of the thread
        self._stepped: set[int] = set()  # ids of the optimizers that stepped since then
        self._steps: list[_Step] = []
        self.ended = threading.Event()

    @property
    def is_started(self) -> bool:
        """Whether the measurement has started."""
        return self._began is not None

    def start(self) -> None:
        """Start the measurement."""
        self._began = time.monotonic()

    def wait(self) -> None:
        """Wait until there are enough steps, for a limited time.

        If the function cuts its graphs without `core.step()`, no end of a step will be seen.
        """
        self.ended.wait(_MOST_SECONDS if self._sees_graphs else 0)

    @property
    def seconds(self) -> float | None:
        """The median time of a step.

        None if too few were seen, or if steps of several optimizers alternate, as with a GAN.
        """
        if len(self._steps) < _FEWEST_STEPS:
            return None
        if len({step.optimizers for step in self._steps}) > 1:
            return None
        return statistics.median(step.seconds for step in self._steps)

    def after_sync(self) -> None:
        """Note the end of a graph, which ends a step if an optimizer has stepped since the last."""
        self._sees_graphs = True
        now = time.thread_time()
        if not self._stepped:
            return
        optimizers = frozenset(self._stepped)
        self._stepped = set()
        if self._last is not None:
            self._steps.append(_Step(now - self._last, optimizers))
            self._last = now
            self._end_if_enough()
        elif self._began is not None:
            self._before()
            self._last = time.thread_time()

    def _end_if_enough(self) -> None:
        is_late = time.monotonic() - self._began > _SECONDS
        wanted = _FEWEST_STEPS if is_late else _STEPS
        if len(self._steps) >= wanted:
            self.ended.set()
