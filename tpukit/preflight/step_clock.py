"""Measure how long the host takes to record a training step.

This is the time of Python, PyTorch and torch_xla, without the time of the device. The device
computes a step while the host records the next one, so the device waits if the host takes longer.
"""

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_STEPS = 9  # the number of steps for the median
_FEWEST_STEPS = 3  # the number of steps that is enough after `_SECONDS`
_SECONDS = 5.0
_MOST_SECONDS = 15.0  # after this time, the clock waits for no further step


@dataclass(frozen=True)
class _Step:
    seconds: float  # the processor time of the step
    optimizers: frozenset[int]  # the ids of the optimizers that stepped


class StepClock:
    """Measure the processor time that a thread uses between two optimizer steps.

    Args:
        before: a function that is called once, before the first step that counts.

    Attributes:
        ended: an event, set when enough steps are measured or the worker function has ended.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped.add(id(optimizer)))
        self._before = before
        self._sees_graphs = False
        self._began: float | None = None  # the time of `start`
        self._last: float | None = None  # the thread's processor time at the end of the last step
        self._stepped: set[int] = set()  # ids of the optimizers that stepped since the last graph
        self._steps: list[_Step] = []
        self.ended = threading.Event()

    @property
    def is_started(self) -> bool:
        """True if the measurement has started."""
        return self._began is not None

    def start(self) -> None:
        """Start the measurement."""
        self._began = time.monotonic()

    def wait(self) -> None:
        """Wait until enough steps are measured, at most 15 s.

        If the worker function does not use `core.step()`, no step is measured, and `wait` returns
        at once.
        """
        self.ended.wait(_MOST_SECONDS if self._sees_graphs else 0)

    @property
    def seconds(self) -> float | None:
        """The median processor time of a step in seconds.

        None if too few steps were measured, or if the steps of several optimizers alternate, as in
        a GAN.
        """
        if len(self._steps) < _FEWEST_STEPS:
            return None
        if len({step.optimizers for step in self._steps}) > 1:
            return None
        return statistics.median(step.seconds for step in self._steps)

    def after_sync(self) -> None:
        """At the end of a graph: measure the time of a step if the graph updates weights."""
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
