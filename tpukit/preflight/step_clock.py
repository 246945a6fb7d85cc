"""How long the host takes for a step: Python, PyTorch and torch_xla, whatever the device does meanwhile."""

import statistics
import time
from collections.abc import Callable

_STEPS, _FEWEST, _LIMIT_SECONDS = 9, 3, 5.0


class StepClock:
    """The seconds of a processor that this thread uses from the end of one optimiser's step to that of the next.

    A device that computes while the host records the next step waits for the host where this is the longer of the two.

    Args:
        before: called once, before the first step that counts.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        self._began: float | None = None  # when the steps began to count, by the monotonic clock
        self._last: float | None = None
        self._has_stepped = False
        self._seconds: list[float] = []

    def start(self) -> None:
        """Let steps count from the end of this one; another thread may call it."""
        self._began = time.monotonic()

    @property
    def is_done(self) -> bool:
        """Whether enough steps were seen, or none can be waited for any longer."""
        return self._began is not None and (
            len(self._seconds) >= _STEPS or time.monotonic() - self._began > _LIMIT_SECONDS
        )

    @property
    def seconds(self) -> float | None:
        """The median; None where too few steps were seen."""
        return statistics.median(self._seconds) if len(self._seconds) >= _FEWEST else None

    def after_sync(self) -> None:
        """Note the end of a graph, if an optimiser has stepped in it."""
        if self._began is None:
            return
        if self._last is None:
            from torch.optim.optimizer import register_optimizer_step_post_hook

            self._before()
            register_optimizer_step_post_hook(self._step)
            self._last = time.thread_time()
        elif self._has_stepped:
            now = time.thread_time()
            self._seconds.append(now - self._last)
            self._last, self._has_stepped = now, False

    def _step(self, *_) -> None:
        self._has_stepped = True
