"""Divide the batches of an epoch into optimizer steps.

With `accumulate_grad_batches=4` and 10 batches per epoch, the steps have 4, 4 and 2 batches. The
loss of a step is the mean over its own batches, also in the shorter last step.
"""

import itertools
import math
from collections.abc import Iterator

from tpukit.essentials.data import Batches, Sent
from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.launcher import Core


class StepBatches:
    """The batches of an epoch, as they were sent to the device, before `Batches.arrange`."""

    def __init__(self, batches: Batches):
        self._batches = batches
        self.samples_per_step = batches.samples_per_step

    def __iter__(self) -> Iterator[Sent]:
        return self._batches.epoch_as_sent()


def next_step(batches: Iterator[Sent], accumulated: int) -> list[Sent]:
    """Return the batches of one optimizer step; fewer, or none, at the end of the data."""
    return list(itertools.islice(batches, accumulated))


def steps_of_epoch(core: Core, train: Batches, wanted: int | None, accumulated: int) -> int:
    """Return the optimizer steps per epoch.

    Print a line if the data has too few steps, or the last step fewer than `accumulated` batches.

    Args:
        core: this core.
        train: the training data.
        wanted: `steps_per_epoch` of `fit`; None for all the data.
        accumulated: batches per step, `accumulate_grad_batches` of `fit`.

    Raises:
        InvalidValueError: an epoch has fewer batches than one step needs, or the batches have
            several lengths and `accumulated` is above 1.
    """
    argument = f"accumulate_grad_batches={accumulated}"
    if accumulated > 1 and train.shapes > 1:
        raise InvalidValueError(
            f"{argument} is not supported for batches of several lengths: XLA would compile a "
            "graph for each combination of lengths in a step",
            found=f"batches of {train.shapes} different lengths",
            fix="accumulate_grad_batches=1, or a single bucket",
        )
    count = len(train)
    if count < accumulated:
        raise InvalidValueError(
            f"an epoch has {count} batches, which is less than {argument}",
            fix=f"accumulate_grad_batches={count}, or a smaller batch_size",
        )
    # The last step of an epoch may have fewer batches.
    available = math.ceil(count / accumulated)
    if wanted is not None and wanted > available:
        core.print(
            f"steps_per_epoch={wanted} is more than the data has: an epoch is {available} steps"
        )
    steps = available if wanted is None else min(wanted, available)
    rest = count % accumulated
    if rest and steps == available:
        core.print(
            f"the last step of an epoch has {rest} of {accumulated} batches, and its loss is the "
            "mean over these"
        )
    return steps


def has_short_step(train: Batches, steps: int, accumulated: int) -> bool:
    """Return whether the last of `steps` steps has fewer than `accumulated` batches."""
    return steps * accumulated > len(train)
