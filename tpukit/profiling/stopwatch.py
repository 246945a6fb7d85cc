"""Time the sections of a step; each ends when the device has finished its work."""

import contextlib
import statistics
import time
from collections.abc import Iterable, Iterator

from tpukit.essentials.display import InvalidValueError


class Stopwatch:
    """Time the sections of a step, each until the device is done with it.

    A device works while the program continues, and torch_xla begins only at the end of a step.
    Therefore every section ends with a wait, which takes time as well: the device is idle while the
    host prepares the next section, and on XLA one graph becomes several, which cannot be optimised
    together. The sum of the sections is larger than the step without them; `benchmarks/unet.py`
    measures both.

        watch = tpukit.profiling.Stopwatch(core)
        for images, targets in watch.each("load", batches):
            with watch.section("forward"):
                loss = criterion(model(images), targets)
            with watch.section("backward"):
                loss.backward()
            with watch.section("step"):
                core.optimizer_step(optimizer)
        return watch.medians(skip=2)

    Args:
        core: in the worker function.

    Attributes:
        seconds: the seconds of every pass, by section, in the order of their first pass.
    """

    def __init__(self, core):
        self._backend = core.backend
        self.seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time this block, and the work that it gives to the device."""
        began = time.perf_counter()
        yield
        self._backend.wait()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)

    def each(self, name: str, batches: Iterable) -> Iterator:
        """Yield the batches; time the wait for each, including its transfer to the device."""
        batches = iter(batches)
        end = object()
        while True:
            with self.section(name):
                batch = next(batches, end)
            if batch is end:
                self.seconds[name].pop()  # the wait for the end was not for a batch
                return
            yield batch

    def medians(self, *, skip: int = 0) -> dict[str, float]:
        """Return the median seconds of every section.

        Args:
            skip: number of first passes to leave out, because they may have compiled.

        Raises:
            ValueError: a section was not timed more often than `skip`.
        """
        short = [name for name, times in self.seconds.items() if len(times) <= skip]
        if short:
            passes = len(self.seconds[short[0]])
            fact = f"{', '.join(short)}: timed {passes} times, of which skip={skip} are left out"
            raise InvalidValueError(fact, fix="more steps, or a smaller skip")
        return {name: statistics.median(times[skip:]) for name, times in self.seconds.items()}
