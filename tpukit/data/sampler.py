"""Which samples a core sees in an epoch, batch by batch: arithmetic on numbers, the same on every machine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ShardedSampler:
    """How an epoch of `count` samples is laid out over the cores; every core has as many batches as every other.

    Shuffled, step `i` of all cores together is samples `i * n` to `(i + 1) * n` of one permutation that depends on
    seed and epoch alone: two cores with batch B see what one sees with 2 B. In order, core 0 has the first stretch,
    core 1 the next, and the padding is at the very end: `gather(outputs)[:count]` is every sample once, in order.
    """

    count: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    shuffle: bool = False
    drop_last: bool = False

    @property
    def samples_per_step(self) -> int:
        """Samples that all cores together take in one step."""
        return self.batch_size * self.world_size

    def steps(self, done: int = 0) -> int:
        """Return the steps that remain of an epoch of which `done` samples have been seen."""
        left = self.count - done
        return max(0, left // self.samples_per_step if self.drop_last else -(-left // self.samples_per_step))

    def positions(self, done: int = 0):
        """Return (steps, batch_size) int64: this core's places in the order of all; from `count` on, padding."""
        import numpy

        steps = self.steps(done)
        if self.shuffle:
            places = numpy.arange(done, done + steps * self.samples_per_step)
            return places.reshape(steps, self.world_size, self.batch_size)[:, self.rank]
        places = numpy.arange(self.steps() * self.samples_per_step)
        mine = places.reshape(self.world_size, self.steps(), self.batch_size)[self.rank]
        return mine[done // self.samples_per_step :]

    def samples(self, positions, *, epoch: int, seed: int):
        """Return which samples lie at these places of an epoch; padding repeats some of them."""
        import numpy

        if not self.shuffle:
            return numpy.minimum(positions, self.count - 1)
        return numpy.random.default_rng((seed, epoch)).permutation(self.count)[positions % self.count]
