"""The random numbers of a worker: the same on all cores outside of steps, different in steps.

                     core 0      core 1
    worker function  0.49        0.49      a split of the data is the same on every core
    core.step()      0.13        0.77      dropout and augmentation differ between the cores
    worker function  0.08        0.08      the same again, as if no step had drawn numbers

After the worker function's first call of `core.seed` or `core.same_seed`, tpukit no longer switches
between the two sequences: the numbers follow from that seed, in steps and outside.
"""

import contextlib
import zlib
from collections.abc import Iterator

from tpukit.essentials.data import (
    random_states,
    random_states_restored,
    restore_random_states,
    seed_in_turn,
)


class RandomNumbers:
    """The random number generators of a core: those of the host and that of its device.

    Attributes:
        words: the words of the last `start`.
        seeded: number of calls of `seed` since then.
        fits: number of calls of `fit` in this launch or session, so that a second call draws new
            numbers.
    """

    def __init__(self, core):
        self._core = core
        # If cores are threads of a process, they share the host's generators, so this core must
        # not restore an earlier state.
        self._can_restore = not core.backend.shares_process
        self.fits = 0
        self._begin(())

    def _begin(self, words: tuple[int, ...]) -> None:
        self.words = words
        self.seeded = 0
        # Whether the cores draw the same numbers outside of steps; False after `seed`.
        self._shared = self._core.world_size > 1 and self._can_restore
        # The state of the sequence in steps, saved between two steps; None before the first step.
        self._own: tuple | None = None

    def start(self, *words: int) -> None:
        """Begin with the same random numbers on every core, on the host and on the device.

        Args:
            *words: numbers that are mixed into the run's seed, such as the number of the run if a
                session seeds again.
        """
        self._begin(words)
        self._core.backend.seed(seed_in_turn((self._core.internal.seed_of_launch, *words)))

    def end_run(self, run: int) -> None:
        """Seed all cores alike after a run of a session, if the run has called `seed`."""
        if self._core.world_size > 1 and self._can_restore and not self._shared:
            self.start(run + 1)

    def checksum(self) -> int | None:
        """Return a checksum of the host's generators, to compare it between the cores.

        Outside of steps all cores must have the same checksum. The result is None if there is
        nothing to compare: after `seed`, on one core, or if cores are threads of a process.
        """
        if not self._shared:
            return None
        of_python, of_numpy, of_torch = random_states()
        name, array, *rest = of_numpy
        checksum = zlib.crc32(repr((of_python, name, rest)).encode())
        for numbers in (array, of_torch.numpy()):
            checksum = zlib.crc32(numbers.tobytes(), checksum)
        return checksum

    def seed(self, *words: int, own: bool = True) -> None:
        """Seed the generators from the run's seed and `words`, inside and outside of steps.

        Args:
            *words: any whole numbers.
            own: True to seed the generators of host and device, differently on each core; False
                to seed only the host's generators, with the same seed on all cores.
        """
        seed = self._core.internal.seed_of_launch
        self._shared = False
        self.seeded += 1
        if own:
            self._core.backend.seed(seed_in_turn((seed, *words, self._core.rank)))
        else:
            seed_in_turn((seed, *words))

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """In the block, draw random numbers that differ between the cores.

        After the block, the host's generators again draw the same numbers on every core. The
        generator of a TPU or GPU is not restored, because on a TPU, reading its state would cut the
        graph in two. From the first block on, this generator draws different numbers on each core.
        After a call of `seed`, the block has no effect.
        """
        if not self._shared:
            yield
            return
        shared = random_states()
        seeded = self.seeded
        self._shared = False  # nested blocks draw from the same numbers
        if self._own is None:
            seed = self._core.internal.seed_of_launch
            self._core.backend.seed(seed_in_turn((seed, *self.words, self._core.rank)))
        else:
            restore_random_states(self._own)
        try:
            yield
        finally:
            if self.seeded == seeded:  # a seed that was set in the block remains in effect
                self._own = random_states()
                self._shared = True
                restore_random_states(shared)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the host's random state after the block, unless cores share a process."""
        shared = self._shared
        keeping = random_states_restored() if self._can_restore else contextlib.nullcontext()
        with keeping:
            yield
        self._shared = shared
