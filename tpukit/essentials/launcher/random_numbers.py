"""Whose the random numbers of a worker are: all cores' outside of steps, this core's own within."""

import contextlib
from collections.abc import Iterator

from tpukit.essentials.data import host_numbers, numbers_kept, put_back, seed_in_turn


class RandomNumbers:
    """The random numbers of one core, of the host and of its device.

    Attributes:
        seeded: how often the worker function has seeded them.
    """

    def __init__(self, core):
        self._core = core
        # Where cores are threads of a process the host's are another core's as well, and cannot be put back.
        self._can_put_back = not core.backend.shares_process
        self._shared = core.world_size > 1 and self._can_put_back  # until somebody seeds
        self._own: tuple | None = None  # where this core's stand, between two steps
        self.seeded = 0

    def start(self) -> None:
        """Begin as every core of the run does, with the same random numbers on the host and on the device."""
        self._core.backend.seed(seed_in_turn((self._core.seed_of_launch,)))

    def seed(self, *words: int, own: bool = True) -> None:
        """Have them depend on these numbers: this core's own, or the host's alike on all cores, in steps as well."""
        self._shared, self.seeded = False, self.seeded + 1
        if own:
            self._core.backend.seed(seed_in_turn((self._core.seed_of_launch, *words, self._core.rank)))
        else:
            seed_in_turn((self._core.seed_of_launch, *words))

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Within, draw this core's own; afterwards the host's are again what all cores share.

        The device's own generator stays this core's from the first time on: on a TPU to read it would cut a graph.
        """
        if not self._shared:
            yield
            return
        shared, seeded, self._shared = host_numbers(), self.seeded, False
        if self._own is None:
            self._core.backend.seed(seed_in_turn((self._core.seed_of_launch, self._core.rank)))
        else:
            put_back(self._own)
        try:
            yield
        finally:
            if self.seeded == seeded:  # else what was seeded within says what is drawn from there on
                self._own, self._shared = host_numbers(), True
                put_back(shared)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Have the host's afterwards as they were before, whatever is drawn or seeded within."""
        shared = self._shared
        with numbers_kept() if self._can_put_back else contextlib.nullcontext():
            yield
        self._shared = shared
