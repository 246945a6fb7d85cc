"""Measure the times of a step's sections, each with the work that it gives to the device."""

import contextlib
import statistics
import time
from collections.abc import Iterable, Iterator

from tpukit.essentials.display import InvalidValueError


class Stopwatch:
    """Measure the time of each section of a step, with the device's work for the section.

    A device works while the program continues, and torch_xla starts the device only at the end of a
    step. Therefore every section ends with a wait for the device. These waits make the step slower:
    the device is idle while the host prepares the next section. On XLA, the step's graph is also
    cut into several graphs, which cannot be optimised together. So the sum of the sections is
    larger than the time of the step without a stopwatch; `benchmarks/unet.py` measures both.

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
        core: this core; use the stopwatch in the worker function.

    Attributes:
        seconds: for each section, a list with the seconds of each of its runs. The sections are in
            the order of their first runs.
    """

    def __init__(self, core):
        self._backend = core.backend
        self.seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Measure the time of the block, with the work that it gives to the device."""
        began = time.perf_counter()
        yield
        # On XLA, this also runs the operations that the block has recorded.
        self._backend.wait()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)

    def each(self, name: str, batches: Iterable) -> Iterator:
        """Yield the batches; measure the wait for each, with its transfer to the device."""
        batches = iter(batches)
        end = object()
        while True:
            with self.section(name):
                batch = next(batches, end)
            if batch is end:
                self.seconds[name].pop()  # the last wait has returned no batch
                return
            yield batch

    def medians(self, *, skip: int = 0) -> dict[str, float]:
        """Return the median seconds of every section.

        Args:
            skip: number of runs to leave out at the beginning of each section, because the first
                steps compile.

        Raises:
            ValueError: a section has run only `skip` times or fewer.
        """
        short = [name for name, times in self.seconds.items() if len(times) <= skip]
        if short:
            passes = len(self.seconds[short[0]])
            fact = f"{', '.join(short)}: timed {passes} times, of which skip={skip} are left out"
            raise InvalidValueError(fact, fix="more steps, or a smaller skip")
        return {name: statistics.median(times[skip:]) for name, times in self.seconds.items()}
