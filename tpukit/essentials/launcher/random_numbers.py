"""The random numbers of a worker: the same on all cores outside of steps, different within.

                     core 0      core 1
    worker function  0.49        0.49      a split of the data is the same on every core
    core.step()      0.13        0.77      dropout and augmentation are not
    worker function  0.08        0.08      and continue as if no step had drawn

If a worker function calls `core.seed`, this ends: from then on the function's own seeds count.
"""

import contextlib
import zlib
from collections.abc import Iterator

from tpukit.essentials.data import host_numbers, numbers_kept, put_back, seed_in_turn


class RandomNumbers:
    """The random numbers of a core, of the host and of its device.

    Attributes:
        seeded: number of times that the worker function has seeded them.
        fits: number of calls of `fit` in this launch, so that a second call draws other numbers.
    """

    def __init__(self, core):
        self._core = core
        # If cores are threads of a process, they share the host's numbers.
        self._can_put_back = not core.backend.shares_process
        self.seeded = 0
        self.fits = 0
        self._forget()

    def _forget(self) -> None:
        # Whether all cores draw the same outside of steps; False once the function seeds.
        self._shared = self._core.world_size > 1 and self._can_put_back
        self._own: tuple | None = None  # the state of this core's own, between two steps

    def start(self, *words: int) -> None:
        """Begin with the same random numbers on every core, on the host and on the device.

        Args:
            *words: numbers besides the seed, if a session begins anew.
        """
        self._forget()
        self._core.backend.seed(seed_in_turn((self._core.internal.seed_of_launch, *words)))

    def checksum(self) -> int | None:
        """Return a checksum of the numbers that all cores share outside of steps; None for none."""
        if not self._shared:
            return None
        of_python, of_numpy, of_torch = host_numbers()
        name, array, *rest = of_numpy
        checksum = zlib.crc32(repr((of_python, name, rest)).encode())
        for numbers in (array, of_torch.numpy()):
            checksum = zlib.crc32(numbers.tobytes(), checksum)
        return checksum

    def seed(self, *words: int, own: bool = True) -> None:
        """Seed by these numbers, within steps as well.

        Args:
            *words: any numbers.
            own: seed the numbers of this core alone, on the device as well; otherwise seed the
                host's numbers, the same on all cores.
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
        """Draw this core's own numbers in the block, and the host's shared numbers after it.

        The device's generator stays this core's own after the first time, because reading its
        state would cut a graph on a TPU.
        """
        if not self._shared:
            yield
            return
        shared = host_numbers()
        seeded = self.seeded
        self._shared = False
        if self._own is None:
            self._core.backend.seed(
                seed_in_turn((self._core.internal.seed_of_launch, self._core.rank))
            )
        else:
            put_back(self._own)
        try:
            yield
        finally:
            if self.seeded == seeded:  # otherwise the new seed holds from there on
                self._own = host_numbers()
                self._shared = True
                put_back(shared)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the host's random numbers after the block."""
        shared = self._shared
        keeping = numbers_kept() if self._can_put_back else contextlib.nullcontext()
        with keeping:
            yield
        self._shared = shared
