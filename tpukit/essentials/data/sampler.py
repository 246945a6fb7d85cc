"""The samples that each core sees in an epoch, batch by batch: arithmetic, the same everywhere.

With 10 samples, batches of 2 and 2 cores, an epoch has 3 steps. The last step is padded:

               step 0   step 1   step 2
    in order   core 0   0 1      2 3      4 5
               core 1   6 7      8 9      9 9
    shuffled   core 0   p0 p1    p4 p5    p8 p9      p is a permutation of the samples
               core 1   p2 p3    p6 p7    p0 p1
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ShardedSampler:
    """Divide an epoch among the cores; all cores have the same number of batches.

    Shuffled: in step `i`, all cores together see the samples from `i * n` to `(i + 1) * n` of a
    permutation, where n is `samples_per_step`. The permutation depends only on seed and epoch. So
    two cores with batch size B see in a step the same samples as a single core with 2 B, and an
    epoch can be resumed on another number of cores.

    In order: core 0 has the first part of the samples, core 1 the next, and the padding is at the
    very end. So `gather(outputs)[:count]` is every sample once, in order.

    Attributes:
        count: samples of the dataset.
        batch_size: samples per core and step.
        rank: the number of this core.
        world_size: the number of cores.
        shuffle: whether the order is a permutation.
        drop_last: leave out the last samples if they do not fill a step, instead of padding.
        limit: the most steps of an epoch; None for no limit.
    """

    count: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    shuffle: bool = False
    drop_last: bool = False
    limit: int | None = None

    @property
    def samples_per_step(self) -> int:
        """The samples that all cores together see in a step."""
        return self.batch_size * self.world_size

    def steps(self, done: int = 0) -> int:
        """Return the remaining steps of an epoch, after `done` samples of all cores."""
        left = self.count - done
        if self.drop_last:
            steps = left // self.samples_per_step
        else:
            steps = math.ceil(left / self.samples_per_step)  # the last step is padded
        if self.limit is not None:
            steps = min(steps, self.limit - done // self.samples_per_step)
        return max(0, steps)

    def positions(self, done: int = 0, *, epoch: int = 0, seed: int = 0):
        """Return this core's positions in the epoch; those from `count` on are padding.

        They are the same in every epoch, except for batches by length, which override this.

        Args:
            done: samples of all cores that were seen before.
            epoch: number of the epoch.
            seed: of the permutation.

        Returns:
            (steps, batch_size) int64.
        """
        import numpy

        steps = self.steps(done)
        if self.shuffle:
            positions = numpy.arange(done, done + steps * self.samples_per_step)
            by_core = positions.reshape(steps, self.world_size, self.batch_size)
            return by_core[:, self.rank]
        # In order, `done` counts samples of all cores, so it is the same number of steps on each.
        all_steps = replace(self, limit=None).steps()
        positions = numpy.arange(all_steps * self.samples_per_step)
        by_core = positions.reshape(self.world_size, all_steps, self.batch_size)
        first = done // self.samples_per_step
        return by_core[self.rank, first : first + steps]

    def samples(self, positions, *, epoch: int, seed: int):
        """Return the samples at positions of an epoch; padding repeats some samples.

        Args:
            positions: integers of any shape.
            epoch: number of the epoch.
            seed: of the permutation.
        """
        import numpy

        if not self.shuffle:
            return numpy.minimum(positions, self.count - 1)
        # Every core draws the whole permutation, so that none has to ask another: 25 ms for 1.8
        # million samples (measured). Padding continues at the start of the permutation, so each
        # epoch repeats other samples.
        permutation = numpy.random.default_rng((seed, epoch)).permutation(self.count)
        return permutation[positions % self.count]

    def places(self, step: int) -> Iterator[tuple[slice, slice]]:
        """Yield the places of the rows that the cores gathered in a step of an epoch in order.

        Padding is left out. With a `limit`, the places are those among the samples seen.

        Yields:
            (rows, places), a pair per core: `whole[places] = gathered[rows]`.
        """
        for rank in range(self.world_size):
            start = (rank * self.steps() + step) * self.batch_size
            real = max(0, min(self.batch_size, self.seen() - start))
            row = rank * self.batch_size
            yield slice(row, row + real), slice(start, start + real)

    def seen(self) -> int:
        """Return the number of samples of an epoch in order, without padding."""
        return min(self.count, self.steps() * self.samples_per_step)
