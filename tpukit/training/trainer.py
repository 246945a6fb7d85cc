"""Train a model on all cores: `fit`, and the loop behind it.

A run is a sequence of epochs, and an epoch is a sequence of steps. With 120 steps per epoch and
`log_every=50`, `fit` does the following:

    step 1          all cores compare their weights, data and settings, before and after it
    steps 1-50      losses stay on the device: no step waits for the host
    step 50         one copy of 50 losses to the host; a row in `history.intervals`
    step 100        the same; a checkpoint if `save_every` has passed
    step 120        the same; a checkpoint; evaluation; a row in `history.epochs`; `best.pt` if
                    this epoch is the best; a checkpoint

A run that was killed continues from the newest checkpoint when it is started again, and gives the
same weights, bit for bit, as the uninterrupted run.
"""

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tpukit.essentials.data import Batches, Sent
from tpukit.essentials.display import InvalidTypeError, counted
from tpukit.essentials.environment import peak_memory
from tpukit.essentials.launcher import Core, Terminated, gather_objects
from tpukit.profiling import parse_duration
from tpukit.training.batch import FurtherParts, kind_of_samples
from tpukit.training.built_with import check_length
from tpukit.training.checks import (
    Best,
    best_of,
    check_batches,
    check_classes,
    check_numbers,
    check_parameters,
    check_statistics,
    remember_classes,
)
from tpukit.training.epoch_time import EpochClock
from tpukit.training.evaluation import Evaluation, evaluate_synced
from tpukit.training.fit_options import (
    Checkpoints,
    EarlyStopping,
    FitOptions,
    as_checkpoints,
    as_early_stopping,
    as_fit_options,
)
from tpukit.training.history import CHIP_RATES, History, steady_mean
from tpukit.training.index_checks import unequal_advice
from tpukit.training.interfaces import naming_closures
from tpukit.training.losses import PendingStep, StepLosses, not_finite
from tpukit.training.metrics import fresh_metrics, own_metrics, separate_metrics
from tpukit.training.modes import LayerModes, OptimizerModes
from tpukit.training.plain_names import PlainNames
from tpukit.training.resume import HeldOutData, Progress, RunState, TimeLimit
from tpukit.training.schedules import check_schedule, is_plateau
from tpukit.training.step import TrainStep
from tpukit.training.step_batches import (
    StepBatches,
    has_short_step,
    next_step,
    steps_of_epoch,
)

# An epoch's first step is captured and its last one ends it: replay needs one in between.
_STEPS_FOR_REPLAY = 3


def fit(
    core: Core,
    model,
    optimizer,
    loss: Callable,
    train: Batches,
    valid: Batches | None = None,
    *,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    scheduler=None,
    metrics: Mapping[str, Callable] | None = None,
    preprocess: Callable | None = None,
    augment: Callable | None = None,
    bf16: bool = False,
    accumulate_grad_batches: int = 1,
    max_grad_norm: float | None = None,
    monitor: str = "valid_loss",
    mode: str | None = None,
    early_stopping: EarlyStopping | int | None = None,
    checkpoints: Checkpoints | str | Path | None = None,
    max_time: str | float | None = None,
    replay: bool = False,
    options: FitOptions | None = None,
) -> History:
    """Train a model and return its `History`. Collective: call it on every core.

        batches = core.batches(images, batch_size=64, shuffle=True, drop_last=True)
        fit(core, model, optimizer, loss, batches, epochs=20, checkpoints="run")

    Gradients, float buffers and the loss are averaged over the cores in one message, so all cores
    hold the same model after every step. Losses stay on the device and are copied to the host
    every `log_every` steps. Random numbers depend only on the seed of the run, the step, the rank
    and the number of calls of `fit` before this one in the launch. So a resumed run equals the
    uninterrupted one, bit for bit; see `Core.seed` for v2 and v3.

    How a batch reaches the model and the loss:

    - A tuple `(inputs, targets)`: `loss(model(inputs), targets)`. Further parts, such as weights
      of the samples, are further arguments of the loss; `fit` raises if it does not take them.
    - A mapping with exactly one of the keys "labels", "label", "targets" and "target", as Hugging
      Face's datasets return: `loss(model(**batch), batch["labels"])`. If the model's `forward` has
      no argument "labels", it does not get that entry. If it has, the model may compute the loss:
      use `loss=lambda outputs, labels: outputs.loss`. That number includes padding, so an
      evaluation needs a loss of (outputs, targets).
    - Inputs that are a mapping are always passed by name.
    - Outputs and targets may be nested in tuples, dicts and other types that torch's pytree
      knows, as Hugging Face's are. For a dataclass, call `torch.export.register_dataclass` first.
    - Inputs and targets hold tensors only; text columns are not supported.

    Before the first step, one batch of `valid` is evaluated. This finds a metric that raises an
    error, or a shuffled `valid`, before the first epoch. If this fails, `fit` evaluates all of
    `valid`, because some metrics are undefined for one batch.

    Args:
        core: this core.
        model: from `core.model`. Layers in evaluation mode stay in it, unless all are.
        optimizer: any of torch.optim's except LBFGS, over the model's parameters. A resumed run
            takes its settings from the checkpoint. Its `train()` and `eval()` are called if it
            has them.
        loss: function of (outputs, targets) that returns one number, the mean over the samples;
            or `(total, weight)`, with `ignore_index` or weights of classes. Gradients and losses
            are then totals divided by the weight of all cores and accumulated batches. A module
            is saved in the checkpoints. If it has parameters, pass it through
            `core.model`, and its parameters to the optimizer.
        train: from `core.batches(..., shuffle=True, drop_last=True)`.
        valid: from `core.batches(...)`, not shuffled; evaluated after every epoch as `evaluate`
            does. None: no evaluation.
        epochs: number of passes over the data, or over `steps_per_epoch` of it.
        steps_per_epoch: optimizer steps per epoch; None for all the data.
        scheduler: any of torch.optim.lr_scheduler. It is stepped after every optimizer step; see
            `FitOptions.scheduler_interval`.
        metrics: functions of (outputs, targets), or torchmetrics' metrics, by name. The history
            has them as `valid_<name>`. A `MetricCollection` named "all" becomes its metrics,
            `valid_all_<name>`. A function whose first argument is named `y_true`, as all of
            scikit-learn's, gets the targets first, and `fit` prints a line.
        preprocess: changes the inputs on the device, in training and evaluation; for example, it
            normalises. It gets a batch that is a mapping as a whole. If it returns anything but
            a mapping, the model gets that as its only argument.
        augment: changes (inputs, targets), or a batch that is a mapping, on the device before
            `preprocess`, in training only.
        bf16: run the forward pass under autocast to bfloat16. The loss, BatchNorm's statistics
            and the optimizer stay float32.
        accumulate_grad_batches: batches per optimizer step, all in one graph. The last step of an
            epoch may have fewer, and its loss is the mean over these.
        max_grad_norm: longer gradients are shortened to this norm; None for no limit.
        monitor: column of the history that decides which epoch is best. NaN is never best.
        mode: "min" if lower values of `monitor` are better, "max" if higher; None decides by the
            name, for example for a loss or an accuracy.
        early_stopping: an `EarlyStopping`, or its patience in epochs. None trains to the last
            epoch and leaves its weights in the model.
        checkpoints: a `Checkpoints`, or its folder. None saves nothing.
        max_time: stop after this time with a checkpoint, counted from this call: "8h30m" or
            seconds; None for no limit.
        replay: True captures a step's program once and runs it again without the Python of the
            step, on XLA. Your code must then do the same in every step: docs/replay.md lists the
            changes that `fit` follows, checks, and cannot notice. `fit` prints from which step on
            it replays, or why it captures every step. CPU processes, GPUs and TorchTPU train as
            with False. Replay needs memory for a second set of weights and optimizer state. With
            False, `fit` prints once if the host takes more than 1.3 times as long as this TPU.
        options: rare options: `FitOptions(log_every=10)`.

    Raises:
        OutOfSyncError: the cores are out of sync in weights, buffers, data or settings. Checked
            before and after the first step, after each epoch and before each checkpoint.
        NonFiniteLossError: the loss became NaN or infinite.
        ValueError: an argument, a label or a token id is out of range; the model has no parameters,
            or the optimizer holds none of them; the loss or a metric is not one number; `monitor`
            is not a column, or its name does not show which numbers are better; the scheduler ends
            before the run; or the checkpoint belongs to another architecture, optimizer, scheduler
            or dataset.
        TypeError: an argument has the wrong type, or `train` or `valid` is not from
            `core.batches`.
        OSError: a checkpoint cannot be written, or another run uses the folder; or, at the start,
            the backup cannot be read and the folder has nothing to continue from.
    """
    options = as_fit_options(options)
    checkpoints = as_checkpoints(checkpoints)
    early_stopping = as_early_stopping(early_stopping)
    _check_replay(replay)
    _check_data(model, train, valid)
    check_numbers(
        max_grad_norm=max_grad_norm,
        steps_per_epoch=steps_per_epoch,
        epochs=epochs,
        accumulate_grad_batches=accumulate_grad_batches,
        bf16=bf16,
    )
    check_parameters(core, model, loss, optimizer)
    metrics = separate_metrics(core, metrics or {})
    best = best_of(core, monitor, mode, metrics=metrics, valid=valid is not None)
    interval = check_schedule(
        scheduler, options.scheduler_interval, column=best.column, lower=best.lower
    )
    steps_per_epoch = steps_of_epoch(core, train, steps_per_epoch, accumulate_grad_batches)
    has_short = has_short_step(train, steps_per_epoch, accumulate_grad_batches)
    if replay and steps_per_epoch < _STEPS_FOR_REPLAY:
        steps = counted(steps_per_epoch, "step")
        core.print(f"replay=True has no effect: no step of an epoch of {steps} is replayed")
    step = TrainStep(
        core,
        model,
        optimizer,
        loss,
        arrange=train.arrange,
        scheduler=scheduler if interval == "step" else None,
        preprocess=preprocess,
        augment=augment if options.augment_from == 1 else None,
        bf16=bf16,
        max_grad_norm=max_grad_norm,
        averaged_model=options.averaged_model,
        shapes=train.shapes + has_short,  # a step with fewer batches is a graph of its own
        further_parts=FurtherParts(train, loss),
        replay=bool(replay),
    )
    trainer = Trainer(
        core=core,
        step=step,
        train=train,
        valid=valid,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        scheduler=scheduler,
        metrics=own_metrics(metrics, one_core=not core.backend.shares_process),
        augment=augment,
        accumulate_grad_batches=accumulate_grad_batches,
        best=best,
        early_stopping=early_stopping,
        checkpoints=checkpoints,
        max_time=max_time,
        options=options,
    )
    with naming_closures(optimizer):
        return trainer.run()


def _check_replay(replay: object) -> None:
    if replay not in (True, False, None):
        raise InvalidTypeError(
            f"replay must be True or False, got {replay!r}",
            fix="replay=True, after you have read docs/replay.md",
        )


def _check_data(model, train: Batches, valid: Batches | None) -> None:
    check_batches("train", train)
    remember_classes(model, train)
    if valid is not None:
        check_batches("valid", valid)
        check_classes(model, valid, "validation")


@dataclass
class Trainer:
    """The loop of one call of `fit`. Most attributes are its arguments.

    Attributes:
        step: one optimizer step.
        steps_per_epoch: optimizer steps.
        scheduler: stepped by `step`, or by this loop after every epoch.
        augment: the augmentation of `step` from epoch `options.augment_from` on.
        best: decides which epoch is best.
    """

    core: Core
    step: TrainStep
    train: Batches
    valid: Batches | None
    epochs: int
    steps_per_epoch: int
    scheduler: object
    metrics: dict[str, Callable]
    augment: Callable | None
    accumulate_grad_batches: int
    best: Best
    early_stopping: EarlyStopping
    checkpoints: Checkpoints | None
    max_time: str | float | None
    options: FitOptions
    _compared: int | None = None  # step after which the cores were last compared
    _first_step: int = 1  # of this call
    _has_reported: bool = False

    def __post_init__(self):
        seconds = math.inf
        if self.max_time is not None:
            seconds = parse_duration(self.max_time)
        self.time_limit = TimeLimit(self.core, seconds)
        self.losses = StepLosses(self.core)
        self.history = History(cores=self.core.world_size)
        self.progress = Progress(
            samples_per_step=self.train.samples_per_step * self.accumulate_grad_batches,
            steps_per_epoch=self.steps_per_epoch,
            call=self.core.internal.numbers.fits,
        )
        self.clock = EpochClock(
            self.core.backend,
            wait_seconds=lambda: self.train.wait_seconds,
            host_seconds=lambda: self.step.host_seconds,
            device_seconds=self.step.device_seconds,
        )
        self.layer_modes = LayerModes(self.core, self.step.model)
        self.optimizer_modes = OptimizerModes(self.core, self.step.optimizer)
        modules = {}
        for name in ("model", "loss", "averaged_model"):
            module = getattr(self.step, name)
            modules[name] = PlainNames(module) if hasattr(module, "load_state_dict") else None
        parts = {
            "optimizer_mode": self.optimizer_modes if self.optimizer_modes.has_modes else None,
            **modules,
            "optimizer": self.step.optimizer,
            "scheduler": self.scheduler,
            "train": self.train,
            "valid": HeldOutData(self.valid) if self.valid is not None else None,
            "losses": self.losses,
            "progress": self.progress,
            "history": self.history,
        }
        # Preflight records a step, and must save nothing.
        checkpoints = None if self.core.backend.is_recording else self.checkpoints
        self.state = RunState(self.core, parts, checkpoints)

    @property
    def is_over(self) -> bool:
        """Whether all epochs are done, or the training was stopped."""
        return self.progress.epoch > self.epochs or bool(self.history.stopped)

    def run(self) -> History:
        """Train to the last epoch, or until something stops the training."""
        checking = self.train.checking(self.step.index_checks.check)
        with self.state.held(), self._in_fit(), checking:
            self._resume()
            # A resumed run keeps the number that it had, and the next call gets the one after it.
            self.core.internal.numbers.fits = (
                max(self.core.internal.numbers.fits, self.progress.call) + 1
            )
            check_length(self.scheduler, self._scheduler_steps())
            self._compare("before the first step of fit", first=True)
            self._first_step = self.progress.step + 1
            is_between_epochs = self.history.epochs and not self.progress.in_epoch
            if is_between_epochs and self.progress.epoch <= self.epochs:
                self._stop_early()  # a run that was stopped stays stopped
            with self.core.internal.finishing_steps():
                self._train_epochs()
            self.optimizer_modes.eval()
            if self.early_stopping.restore_best_weights and self.history.best:
                self._restore_best()
        return self.history

    def _scheduler_steps(self) -> int:
        """Return how often the scheduler is stepped until the last epoch."""
        at = self.progress
        epochs = max(0, self.epochs - at.epoch + 1)
        if self.step.scheduler is None:
            return epochs
        return max(0, epochs * at.steps_per_epoch - at.in_epoch)

    def _train_epochs(self) -> None:
        if not self.is_over:
            self._try_evaluation()
        epochs_before = self.progress.epoch - 1
        run_began = time.monotonic()
        while not self.is_over:
            epoch_began = time.monotonic()
            self.clock.start_epoch()
            self._show_epochs(epochs_before, seconds=epoch_began - run_began)
            with self.clock.part("steps"):
                self._train_epoch()
            self.step.end_epoch()
            if not self.history.stopped:
                self._end_epoch(epoch_began)
                self._stop_early()
        self._show_epochs(epochs_before, seconds=time.monotonic() - run_began)

    def _train_epoch(self) -> None:
        at = self.progress
        self.layer_modes.train()
        self.optimizer_modes.train()
        is_augmented = at.epoch >= self.options.augment_from
        if self.augment and not self.step.augment and is_augmented:
            self.step.begin_augmenting(self.augment)
        self._start_interval()
        batches = self._batches()
        while at.in_epoch < at.steps_per_epoch and not self.history.stopped:
            # Before the batch is made, because a dataset may draw random numbers, too.
            self.core.seed(*at.seed_words)
            group = next_step(batches, self.accumulate_grad_batches)
            if not group:  # after resuming on more cores, the rest of an epoch has fewer steps
                at.in_epoch = at.steps_per_epoch
                break
            self._train_step(group)
            self._end_on_sigterm()
            if len(self.losses) >= self.options.log_every:
                self._log()
        if len(self.losses):
            self._log()
        batches.close()

    def _batches(self) -> Iterator[Sent]:
        """Return the remaining batches of this epoch, with a progress bar."""
        start = self.progress.in_epoch * self.accumulate_grad_batches
        total = self.progress.steps_per_epoch * self.accumulate_grad_batches
        total = min(total, len(self.train))
        return iter(self.core.progress(StepBatches(self.train), "train", total=total, start=start))

    def _train_step(self, group: list[Sent]) -> None:
        at = self.progress
        number = at.step + 1
        is_first = number == self._first_step
        if is_first:
            self.history.of = kind_of_samples(self.train.arrange(group[0].tensors))
        if self.options.same_seed:
            # After the batch is made, because augmentation stays different on each core.
            self.core.same_seed(*at.seed_words)
        lr = self.step.lr  # before the step, at whose end a scheduler sets the next one's
        self.time_limit.update(save_is_due=self.core.is_main and self.state.is_due)
        local, reduced = self.step(
            number,
            tuple(sent.tensors for sent in group),
            self.time_limit.flags,
            is_last=at.in_epoch + 1 == at.steps_per_epoch,
        )
        self._report_unequal(len(group))
        at.step += 1
        at.in_epoch += 1
        self._interval_batches += len(group)
        if is_first:
            self._compare("after the first step of fit")
        samples = tuple(sent.samples for sent in group)
        self.losses.add(PendingStep(number, samples, local=local, reduced=reduced, lr=lr))

    def _report_unequal(self, batches: int) -> None:
        """Print once that `fit` averages the means of batches with different weights."""
        reason = self.step.index_checks.unequal
        if self._has_reported or reason is None or batches * self.core.world_size == 1:
            return
        self._has_reported = True
        self.core.print(unequal_advice(reason))

    def _end_epoch(self, began: float) -> None:
        """Evaluate, add a row to the history, and save."""
        at = self.progress
        row = {"epoch": at.epoch, "step": at.step, "train_loss": self.losses.epoch_mean()}
        self._compare(f"after epoch {at.epoch}")
        if not self.history.epochs and not self.core.backend.is_recording:
            check_statistics(self.core, self.step.model)
        if self.valid is not None:
            self._save()  # before the evaluation, which may raise, run out of memory, or be killed
        self.train.end_epoch()
        self.optimizer_modes.eval()
        if self.valid is not None:
            with self.clock.part("evaluation"):
                evaluated = self._evaluate()
            self.core.log(step=at.step, **evaluated)
            row |= evaluated
        intervals = [
            interval for interval in self.history.intervals if interval["epoch"] == at.epoch
        ]
        row["lr"] = self.losses.lr
        row["samples_per_second"] = steady_mean(intervals, "samples_per_second")
        for name in CHIP_RATES:
            rate = steady_mean(intervals, name)
            if not math.isnan(rate):
                row[name] = rate
        row["seconds"] = time.monotonic() - began
        is_best = self._add_to_history(row)
        at.epoch += 1
        at.in_epoch = 0
        self.losses.start_epoch()
        self._print_epoch(row)
        if is_best:  # before the checkpoint, so that a run that resumes from it finds these weights
            in_memory = self.early_stopping.restore_best_weights
            with self.clock.part("checkpoints"):
                self.state.save_best(PlainNames(self.step.evaluated_model), in_memory=in_memory)
        if self.step.scheduler is None and self.scheduler is not None:
            self._step_scheduler(row)  # before the checkpoint, which holds its state
        times = {"epoch": row["epoch"]}
        self.history.times.append(times)
        times |= self.clock.end_epoch()  # for the checkpoint
        self._save(best=is_best)
        times |= self.clock.end_epoch()  # with the time of the checkpoint

    def _add_to_history(self, row: dict) -> bool:
        """Add the row of an epoch; return whether it is the best so far."""
        best = self.history.best
        if self.augment and row["epoch"] == self.options.augment_from:
            # Earlier epochs trained on fewer images, and may only look better on similar ones.
            best = None
        is_best = self.best.is_better(row, than=best)
        self.history.epochs.append(row)
        if is_best:
            self.history.best = {**row, "by": self.best.column}
        return is_best

    def _print_epoch(self, row: dict) -> None:
        if self.core.backend.is_recording:
            return
        names = [name for name in row if "loss" in name or "valid" in name]
        numbers = ", ".join(f"{name} {row[name]:.4f}" for name in names)
        self.core.print(f"epoch {row['epoch']}: {numbers}")

    def _step_scheduler(self, row: dict) -> None:
        if is_plateau(self.scheduler):
            self.scheduler.step(row[self.best.column])
        else:
            self.scheduler.step()

    def _stop_early(self) -> None:
        """Stop after an epoch, on all cores, if patience has run out or `on_epoch_end` asks."""
        last = self.history.epochs[-1]["epoch"]
        best_epoch = self.history.best["epoch"] if self.history.best else 0
        patience = self.early_stopping.patience
        reason = None
        if patience and last - best_epoch >= patience:
            reason = f"no better {self.best.column} since epoch {best_epoch}, patience={patience}"
        # All cores stop if one of them asks: the seconds in their histories differ, and the others
        # would wait for a core that stops alone.
        on_epoch_end = self.options.on_epoch_end
        if on_epoch_end and any(gather_objects(self.core, bool(on_epoch_end(self.history)))):
            reason = reason or f"on_epoch_end returned True after epoch {last}"
        if reason and self.progress.epoch <= self.epochs:
            self.history.stopped = reason
            self.core.print(f"stopped: {reason}")

    def _start_interval(self) -> None:
        self._interval_began = time.monotonic()
        self._interval_step = self.progress.step
        self._interval_batches = 0
        self._waited_before = self.train.wait_seconds
        self._flops_before = self.step.flops.total
        self.step.start_interval()

    def _log(self) -> None:
        """End a log interval: fetch its losses, add a row to the history, save or stop if due."""
        at = self.progress
        self._fetch_losses()
        steps = at.step - self._interval_step
        self.step.end_interval(steps)
        # The losses are here, so the device has finished the steps.
        seconds = time.monotonic() - self._interval_began
        self.time_limit.record("interval", seconds)
        row = {
            "step": at.step,
            "epoch": at.epoch,
            "train_loss": self.losses.end_interval(),
            "lr": self.losses.lr,
            "samples_per_second": self._interval_batches * self.train.samples_per_step / seconds,
            "seconds": seconds,
            "data_wait": (self.train.wait_seconds - self._waited_before) / seconds,
            "compiles": self.step.monitor.compiles,
            "memory": peak_memory(),
            **self._chip_rates(seconds),
        }
        self.history.intervals.append(row)
        logged = ("train_loss", "lr", *CHIP_RATES)
        self.core.log(step=at.step, **{name: row[name] for name in logged if name in row})
        is_end_of_epoch = at.in_epoch == at.steps_per_epoch
        is_end_of_run = is_end_of_epoch and at.epoch == self.epochs
        if self.losses.time_is_up and not is_end_of_run:
            self._stop_for_time()
        elif self.losses.save_is_due and not is_end_of_epoch:
            self._compare(f"before the checkpoint of step {at.step}")
            self._save()
        self._start_interval()

    def _chip_rates(self, seconds: float) -> dict[str, float]:
        """Return the TFLOP/s per chip of this interval, and the MFU if the peak is known."""
        if self.step.flops.total is None:
            return {}
        flops = (self.step.flops.total - self._flops_before) / self.core.chips
        rates = {"tflops_per_second": flops / seconds / 1e12}
        if self.core.peak_tflops:
            rates["mfu"] = rates["tflops_per_second"] / self.core.peak_tflops
        return rates

    def _fetch_losses(self) -> None:
        """Copy the losses to the host; raise if one of them is not finite."""
        step = self.losses.fetch()
        if step is None:
            return
        if math.isfinite(step.local):
            # Another core's loss is not finite. That core raises, because it knows the samples.
            self.core.barrier()
        raise not_finite(
            step,
            rank=self.core.rank,
            dataset=self.train.dataset,
            lr=self.losses.lr,
            checkpoint=self.state.newest_name,
        )

    def _stop_for_time(self) -> None:
        at = self.progress
        done = (at.epoch - 1 + at.in_epoch / at.steps_per_epoch) / self.epochs
        self._compare(f"before the checkpoint of step {at.step}")
        self.history.stopped = (
            f"the time is up after {at.step} steps, {done:.0%} of {self.epochs} epochs"
        )
        self._save()
        advice = "with checkpoints= it could be continued"
        if self.state.is_kept:
            advice = "run this again to continue"
        self.core.print(f"{self.history.stopped}; {advice}")

    def _end_on_sigterm(self) -> None:
        """Save and leave if SIGTERM has come, from the platform or from an interrupted cell."""
        if not self.state.must_end():
            return
        if self.core.is_main and self.state.is_kept:
            self._fetch_losses()
            self._save()
            self.state.close()
            step = self.progress.step
            self.core.print(f"saved at step {step}; run this again to continue from there")
        raise Terminated

    def _evaluate(self) -> dict[str, float]:
        if self.core.backend.is_recording:  # preflight looks at the training step only
            return {f"valid_{name}": 1.0 for name in ["loss", *self.metrics]}
        began = time.monotonic()
        found = self._evaluation(self.valid)
        self.time_limit.record("evaluation", time.monotonic() - began)
        metrics = {f"valid_{name}": value for name, value in found.metrics.items()}
        return {"valid_loss": found.loss} | metrics

    def _evaluation(self, batches: Batches, label: str | None = "valid") -> Evaluation:
        # `evaluate` would average the buffers first, which every step has done: one graph more.
        return evaluate_synced(
            self.core,
            self.step.evaluated_model,
            self.step.loss,
            batches,
            metrics=fresh_metrics(self.metrics),
            preprocess=self.step.preprocess,
            bf16=self.step.bf16,
            keep_outputs=self.options.keep_outputs,
            between_steps=self._end_on_sigterm,
            label=label,
        )

    def _try_evaluation(self) -> None:
        """Evaluate one batch of every shape, so that an error comes now and not after an epoch."""
        if self.valid is None or self.core.backend.is_recording:
            return
        try:
            first = copy.copy(self.valid)
            first.sampler = replace(self.valid.sampler, limit=self.valid.shapes)
            self._evaluation(first, label=None)
        except Exception as error:
            if hasattr(error, "waiting"):  # raised within a collective: another core failed
                raise
        else:
            return
        # Some metrics fail on one batch only: an AUROC, for example, needs both classes.
        self._evaluation(self.valid)

    def _save(self, *, best: bool = False) -> None:
        began = time.monotonic()
        with self.clock.part("checkpoints"):
            self.state.save(self.progress.step, best=best)
        self.time_limit.record("save", time.monotonic() - began + self.state.copy_seconds)

    def _resume(self) -> None:
        self.history.resumed = self.state.load()
        if not self.history.resumed:
            return
        at = self.progress
        position = f"epoch {at.epoch}, step {at.in_epoch} of {at.steps_per_epoch}"
        if at.epoch > self.epochs:
            position = f"all {self.epochs} epochs are done; to train again, give another folder"
            if self.state.has_backup:
                position += " and another backup_dir"
        self.core.print(f"resumed from {self.history.resumed}: {position}")

    def _restore_best(self) -> None:
        model = self.step.evaluated_model
        # With several hosts core 0 has written the best weights, on its host only.
        only_on_main = self.core.hosts > 1 and self.state.is_kept
        if self.core.is_main or not only_on_main:
            PlainNames(model).load_state_dict(self.state.best_weights())
        if only_on_main:
            self.core.model(model, in_place=True)

    def _show_epochs(self, epochs_before: int, *, seconds: float) -> None:
        """Show how many epochs are done; an earlier run has done `epochs_before` of them."""
        self.core.flush()  # so that the newest numbers are shown with it
        done = min(self.progress.epoch - 1, self.epochs)
        total = done if self.history.stopped else self.epochs
        self.core.internal.output.report_progress(
            "epochs", done, total, seconds=seconds, start=epochs_before
        )

    @contextlib.contextmanager
    def _in_fit(self) -> Iterator[None]:
        """Switch off the checks for a loop of your own; afterwards restore the random numbers."""
        self.core.internal.agreement.forget()
        self.core.internal.in_fit = True
        try:
            with self.core.internal.numbers.kept():
                yield
        finally:
            self.core.internal.in_fit = False

    def _compare(self, when: str, *, first: bool = False) -> None:
        """Raise unless the cores are in sync. Collective.

        Float buffers are averaged in each step, so they may differ before the first. Layers may
        remember numbers of this core's batches, so they are compared before the first step only.
        """
        if self._compared == self.progress.step:
            return  # between two steps nothing changes
        self._compared = self.progress.step
        step = self.step
        modules = {"": step.model, "loss.": step.loss, "averaged_model.": step.averaged_model}
        data = {}
        for name, batches in (("train", self.train), ("valid", self.valid)):
            if batches is not None:
                data |= {f"{name}: {fact}": value for fact, value in batches.facts().items()}
        functions = {}
        if first:
            functions = {name: getattr(step, name) for name in ("loss", "preprocess", "augment")}
        self.core.internal.agreement.compare(
            when,
            modules={name: module for name, module in modules.items() if module is not None},
            optimizers=[step.optimizer],
            schedule=self.scheduler,
            data=data,
            called=functions,
            averaged=not first,
            layers=first,
            run=self._arguments(),
        )

    def _arguments(self) -> dict[str, object]:
        """Return the arguments of `fit` that must be the same on every core."""
        return {
            "epochs": self.epochs,
            "steps_per_epoch": self.progress.steps_per_epoch,
            "step": self.progress.step,
            "calls of fit before": self.progress.call,
            "accumulate_grad_batches": self.accumulate_grad_batches,
            "max_grad_norm": self.step.max_grad_norm,
            "log_every": self.options.log_every,
            "bf16": self.step.bf16,
            "same_seed": self.options.same_seed,
            "patience": self.early_stopping.patience,
            "restore_best_weights": self.early_stopping.restore_best_weights,
            "metrics": sorted(self.metrics),
            "checkpoint in the folder": self.history.resumed,
        }
