"""Keep the losses of steps on the device, and copy them to the host at log points and saves.

If the host read the loss of each step, it would wait for the device to finish the step, and could
not prepare the next step meanwhile. So losses stay on the device and are copied together, in a
single transfer. For a loss of NaN or infinity, the error names the samples of its step.
"""

import math
from dataclasses import dataclass, replace

from tpukit.essentials.data import only_iterates
from tpukit.essentials.display import TpukitError, first_few


class NonFiniteLossError(TpukitError, ArithmeticError):
    """The loss became NaN or infinite.

    The message names the step, the core, the samples and the last checkpoint.
    """


@dataclass(frozen=True)
class PendingStep:
    """A step that was sent to the device, and whose loss is not on the host yet.

    Attributes:
        number: the number of the optimizer step, from 1.
        samples: for each batch of the step, the dataset indices of this core's samples: an array
            (batch_size,), int64.
        local: () float32, this core's loss.
        reduced: (3,) float32, the means over the cores of the loss and of the two flags of
            `TimeLimit`. If the loss has a weight, (4,): the last element is the mean weight.
        lr: the learning rate of this step; a tensor if the optimizer's is a tensor.
    """

    number: int
    samples: tuple
    local: object
    reduced: object
    lr: object


class StepLosses:
    """The losses of the current epoch: on the device, on the host, or as means of log intervals.

    Attributes:
        time_is_up: whether any core's `TimeLimit` flag was raised in a step that `fetch` has read.
        save_is_due: whether a checkpoint was due on core 0 in the last step that `fetch` has read.
        lr: the learning rate of the last step that `fetch` has read; NaN before the first `fetch`.
    """

    def __init__(self, core):
        self.time_is_up = False
        self.save_is_due = False
        self.lr = math.nan
        self._core = core
        self._pending: list[PendingStep] = []
        # [loss, weight] of each step since the last log point that is on the host already, because
        # of a save in between. Without a weighted loss, the weight is the step's number of batches.
        self._since_log: list[list[float]] = []
        # [mean loss, weight] of each log interval of this epoch. Lists, because JSON and
        # `torch.load(weights_only=True)` keep them.
        self._intervals: list[list] = []

    def __len__(self) -> int:
        """Return the number of steps since the last log point."""
        return len(self._pending) + len(self._since_log)

    def add(self, step: PendingStep) -> None:
        """Store the losses of a step, which stay on the device until `fetch`."""
        self._pending.append(step)

    def fetch(self) -> PendingStep | None:
        """Copy the pending losses to the host, in a single transfer.

        Returns:
            the first step whose loss is not finite, with its losses on the host; or None.
        """
        pending = self._pending
        self._pending = []
        values = self._core.to_host([(step.local, step.reduced, step.lr) for step in pending])
        for step, (local, reduced, lr) in zip(pending, values, strict=True):
            mean, time_is_up, save_is_due, *weights = reduced.tolist()
            self.lr = float(lr)
            if not math.isfinite(local + mean):
                return replace(step, local=local.item(), reduced=reduced)
            weight = weights[0] if weights else float(len(step.samples))
            # A weight of 0 gives NaN above, except in preflight, whose steps have no results.
            self._since_log.append([mean, weight or 1.0])
            # Each flag is 0 or 1 on a core, so its mean is above 0 if any core has raised it.
            self.time_is_up |= time_is_up > 0
            self.save_is_due = save_is_due > 0
        return None

    def end_interval(self) -> float:
        """Return the mean loss since the last log point, and begin the next interval.

        Call `fetch` first: losses that are still on the device would be missing.
        """
        interval = _joined(self._since_log)
        self._intervals.append(interval)
        self._since_log = []
        return interval[0]

    def epoch_mean(self) -> float:
        """Return the mean loss of the epoch so far."""
        return _joined(self._intervals)[0]

    def start_epoch(self) -> None:
        """Delete the intervals of the epoch that has ended."""
        self._intervals = []

    def state_dict(self) -> dict:
        """Return the losses on the host. Call `fetch` first: losses on the device are not saved."""
        return {"since_log": self._since_log, "intervals": self._intervals, "lr": self.lr}

    def load_state_dict(self, state: dict) -> None:
        """Continue where a state was saved."""
        self._since_log = state["since_log"]
        self._intervals = state["intervals"]
        self.lr = state["lr"]


def _joined(losses: list[list[float]]) -> list[float]:
    """Return the weighted mean of [loss, weight] pairs, and the sum of their weights."""
    total = sum(loss * weight for loss, weight in losses)
    weight = sum(weight for _, weight in losses)
    return [total / weight, weight]


def not_finite(
    step: PendingStep, *, rank: int, dataset, lr: float, checkpoint: str | None
) -> NonFiniteLossError:
    """Return the error for a NaN or infinite loss; read the samples to find the cause.

    Args:
        step: from `StepLosses.fetch`.
        rank: the rank of this core.
        dataset: the dataset of the training.
        lr: the learning rate of the step.
        checkpoint: the name of the newest checkpoint; None if there is none.
    """
    import numpy

    # With accumulation, a step has several batches.
    samples = numpy.concatenate(step.samples).tolist()
    shown = first_few(samples, 8)
    weight = step.reduced[3:]  # empty if the loss has no weights
    if weight.eq(0).any():
        return NonFiniteLossError(
            f"the weight of the loss is 0 at step {step.number}, on all cores together",
            found=f"none of the targets counts; on core {rank} samples {shown}",
            fix="leave out the samples whose targets are all ignored, or a larger batch_size",
        )
    if only_iterates(dataset):
        found = "its samples come from a stream and cannot be read again"
    else:
        bad = [sample for sample in samples if not _is_finite(dataset[sample])]
        found = f"none of its samples, {shown}, holds nan or infinity itself"
        if bad:
            found = f"sample {first_few(bad, 8)} holds nan or infinity, of samples {shown}"
    return NonFiniteLossError(
        f"the loss is {step.local:g} at step {step.number} on core {rank}",
        found=f"{found}\nlearning rate {lr:g}; last checkpoint: {checkpoint or 'none'}",
        fix=(
            "leave out the samples with nan or infinity; otherwise a lower learning rate, "
            "a warmup, or max_grad_norm=1.0"
        ),
    )


def _is_finite(sample: object) -> bool:
    """Return False if a sample contains NaN or infinity; texts and images are not examined."""
    import torch
    from torch.utils import _pytree as tree

    for leaf in tree.tree_leaves(sample):
        try:
            numbers = torch.as_tensor(leaf)
        except (TypeError, ValueError, RuntimeError):  # a text, None, an image
            continue
        if not bool(numbers.isfinite().all()):
            return False
    return True
