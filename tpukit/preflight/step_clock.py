"""How long the host takes for a step: Python, PyTorch and torch_xla, whatever the device does meanwhile."""

import statistics
import threading
import time
from collections.abc import Callable

_STEPS, _FEWEST = 9, 3
_SECONDS, _AT_MOST = 5.0, 15.0  # after which the fewest are enough, and after which none are waited for


class StepClock:
    """The seconds of a processor that a thread uses from the end of one optimiser's step to that of the next.

    A device that computes while the host records the next step waits for the host where this is the longer of the two.

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
        self._stepped: set[int] = set()  # optimisers, since then
        self._steps: list[tuple[float, set[int]]] = []
        self.ended = threading.Event()

    @property
    def is_started(self) -> bool:
        """Whether steps count."""
        return self._began is not None

    def start(self) -> None:
        """Let steps count."""
        self._began = time.monotonic()

    def wait(self) -> None:
        """Wait until there are enough of them; not long, and not at all where a function cuts its graphs unseen."""
        self.ended.wait(_AT_MOST if self._sees_graphs else 0)

    @property
    def seconds(self) -> float | None:
        """The median; None where too few were seen, or where steps of several optimisers alternate, as in a GAN."""
        if len(self._steps) < _FEWEST or any(stepped != self._steps[0][1] for _, stepped in self._steps):
            return None
        return statistics.median(seconds for seconds, _ in self._steps)

    def after_sync(self) -> None:
        """Note the end of a graph, which ends a step if an optimiser has stepped since the last."""
        self._sees_graphs = True
        stepped, now = self._stepped, time.thread_time()
        if not stepped:
            return
        self._stepped = set()
        if self._last is not None:
            self._steps.append((now - self._last, stepped))
            self._last = now
            is_late = time.monotonic() - self._began > _SECONDS
            if len(self._steps) == _STEPS or (is_late and len(self._steps) >= _FEWEST):
                self.ended.set()
        elif self._began is not None:
            self._before()
            self._last = time.thread_time()
