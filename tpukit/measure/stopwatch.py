"""Where the seconds of a step go, section by section; each ends when the device has done its work."""

import contextlib
import statistics
import time
from collections.abc import Iterable, Iterator

from tpukit.essentials.show import WrongValue


class Stopwatch:
    """Time the sections of a step, each up to the moment when the device is done with it.

    A device works on while the program goes on, and torch_xla does not even begin before the end of a step. So the end
    of every section is a wait here. That costs time itself: the device stands idle while the host prepares the next
    section, and on XLA one graph becomes several, which cannot be optimised together. The sum of the sections is larger
    than the step without them; `benchmarks/unet.py` measures both.

        watch = tpukit.measure.Stopwatch(core)
        for images, targets in watch.each("load", batches):
            with watch.section("forward"):
                loss = criterion(model(images), targets)
            with watch.section("backward"):
                loss.backward()
            with watch.section("step"):
                core.optimizer_step(optimizer)
        return watch.medians(skip=2)

    Attributes:
        seconds: by section, in the order in which they first came, the seconds of each time.
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
        """Yield the batches; time how long each is waited for, its way to the device included."""
        batches = iter(batches)
        while True:
            with self.section(name):
                batch = next(batches, self)
            if batch is self:
                self.seconds[name].pop()  # the end of the batches is none of them
                return
            yield batch

    def medians(self, *, skip: int = 0) -> dict[str, float]:
        """Return the median seconds of every section, without its first `skip` times, which may have compiled.

        Raises:
            ValueError: a section was timed no more often than `skip`.
        """
        short = [name for name, times in self.seconds.items() if len(times) <= skip]
        if short:
            raise WrongValue(
                f"{', '.join(short)}: timed {len(self.seconds[short[0]])} times, of which skip={skip} are left out",
                fix="more steps, or a smaller skip",
            )
        return {name: statistics.median(times[skip:]) for name, times in self.seconds.items()}
