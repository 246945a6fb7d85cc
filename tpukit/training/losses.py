"""The losses of steps: kept on the device, read once per log point; one that is not finite is traced to its samples."""

import math
from dataclasses import dataclass, replace

from tpukit.essentials.data import only_iterates
from tpukit.essentials.display import TpukitError, first_few


class NonFiniteLossError(TpukitError, ArithmeticError):
    """The loss became NaN or infinite; the message names the step, the core, the samples and the last checkpoint."""


DUE = 4096.0  # what core 0 adds to its flag when a checkpoint is due: more than the cores that say the time is up


@dataclass(frozen=True)
class PendingStep:
    """A step that was handed to the device and whose loss nobody has read yet.

    Attributes:
        number: of the optimiser step, from 1.
        samples: for each of its batches (batch_size,) int64, the samples it held.
        local: () float32, this core's loss.
        reduced: (2,) float32, means over the cores: of the loss, and of the flag of `TimeLimit`.
        lr: the learning rate that it used; a tensor where the optimiser's is one.
    """

    number: int
    samples: tuple
    local: object
    reduced: object
    lr: object


class StepLosses:
    """The losses of the epoch under way: pending on the device, then on the host, then one mean per log interval.

    Reading a loss makes the host wait until the device has finished that step, and meanwhile no further step is
    prepared; so they wait here and are copied together, in one transfer per log point.

    Attributes:
        time_is_up: True once a step was read in which any core had raised its flag, see `TimeLimit`.
        save_is_due: whether core 0 had raised its own for a checkpoint in the last step read.
        lr: the learning rate that the last step read used.
    """

    def __init__(self, core):
        self.time_is_up, self.save_is_due, self.lr = False, False, math.nan
        self._core = core
        self._pending: list[PendingStep] = []
        self._since_log: list[float] = []  # on the host already, because of a save between two log points
        self._intervals: list[list] = []  # [mean loss, steps] of each log interval of this epoch

    def __len__(self) -> int:
        """Return the number of steps since the last log point."""
        return len(self._pending) + len(self._since_log)

    def add(self, step: PendingStep) -> None:
        """Keep the losses of a step, on the device."""
        self._pending.append(step)

    def fetch(self) -> PendingStep | None:
        """Copy the pending losses to the host, in one transfer; return the first step whose loss is not finite."""
        pending, self._pending = self._pending, []
        values = self._core.to_host([(step.local, step.reduced, step.lr) for step in pending])
        for step, (local, reduced, lr) in zip(pending, values, strict=True):
            mean, flag = reduced.tolist()
            self.lr = float(lr)
            if not math.isfinite(local + mean):
                return replace(step, local=local.item(), reduced=reduced)
            self._since_log.append(mean)
            flags = round(flag * self._core.world_size)
            self.time_is_up |= flags % DUE > 0
            self.save_is_due = flags >= DUE
        return None

    def end_interval(self) -> float:
        """Return the mean loss since the last log point, and begin the next interval; everything must be fetched."""
        mean = sum(self._since_log) / len(self._since_log)
        self._intervals.append([mean, len(self._since_log)])
        self._since_log = []
        return mean

    def epoch_mean(self) -> float:
        """Return the mean loss of the epoch so far."""
        return sum(mean * steps for mean, steps in self._intervals) / sum(steps for _, steps in self._intervals)

    def start_epoch(self) -> None:
        """Forget the intervals of the epoch that is over."""
        self._intervals = []

    def state_dict(self) -> dict:
        """Return what is on the host; fetch before, because what is pending is not in it."""
        return {"since_log": self._since_log, "intervals": self._intervals, "lr": self.lr}

    def load_state_dict(self, state: dict) -> None:
        """Continue where a state was saved."""
        self._since_log, self._intervals, self.lr = state["since_log"], state["intervals"], state["lr"]


def not_finite(step: PendingStep, *, rank: int, dataset, lr: float, checkpoint: str | None) -> NonFiniteLossError:
    """Return the error for a step whose loss on this core is NaN or infinite, after reading its samples again."""
    import numpy

    samples = numpy.concatenate(step.samples).tolist()
    is_stream = only_iterates(dataset)
    bad = [] if is_stream else [sample for sample in samples if not _is_finite(dataset[sample])]
    if is_stream:
        found = "its samples come from a stream and cannot be read again"
    elif bad:
        found = f"sample {first_few(bad, 8)} holds nan or infinity, of samples {first_few(samples, 8)}"
    else:
        found = f"none of its samples, {first_few(samples, 8)}, holds nan or infinity itself"
    return NonFiniteLossError(
        f"the loss is {step.local:g} at step {step.number} on core {rank}",
        found=(f"{found}\nlearning rate {lr:g}; last checkpoint: {checkpoint or 'none'}"),
        fix=(
            "leave out the samples with nan or infinity; otherwise a lower learning rate, a warmup, "
            "or max_grad_norm=1.0"
        ),
    )


def _is_finite(sample: object) -> bool:
    import torch
    from torch.utils import _pytree as tree

    leaves = [torch.as_tensor(leaf) for leaf in tree.tree_leaves(sample) if not isinstance(leaf, str)]
    return all(bool(leaf.isfinite().all()) for leaf in leaves)
