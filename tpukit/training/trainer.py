"""Train a model on all cores: `fit`, and the loop behind it.

A run is a sequence of epochs, and an epoch is a sequence of steps. With 120 steps per epoch and
`log_every=50`, `fit` does the following:

    step 1          before and after it, all cores compare their weights, data and settings
    steps 1-50      losses stay on the device: no step waits for the host
    step 50         copy 50 losses to the host at once; add a row to `history.intervals`; save a
                    checkpoint if the last one is `save_every` old
    step 100        as step 50
    step 120        copy 20 losses; add a row; with `valid`, save a checkpoint and evaluate; add a
                    row to `history.epochs`; write `best.pt` if this epoch is the best; save a
                    checkpoint

If a run is killed and started again, it continues from the newest checkpoint. Its weights are then
the same, bit for bit, as those of the uninterrupted run.
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
from tpukit.training.adam_state import adam_state_created
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

# `fit` captures the first and the last step of an epoch, so it replays only steps between them.
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

    In every step, one collective averages gradients, float buffers and the loss over the cores, so
    all cores have the same model after the step. Losses stay on the device and are copied to the
    host every `FitOptions.log_every` steps. Random numbers depend only on the seed of the run, the
    step, the rank and the number of earlier calls of `fit` in the launch. So a resumed run equals
    the uninterrupted run, bit for bit; `Core.seed` describes the exceptions on v2 and v3.

    How a batch reaches the model and the loss:

    - A tuple `(inputs, targets)`: `loss(model(inputs), targets)`. The loss gets the third and later
      parts of a tuple, such as sample weights, as further arguments.
    - A mapping with exactly one of the keys "labels", "label", "targets" and "target", as Hugging
      Face's datasets return: `loss(model(**batch), batch["labels"])`. If the model's `forward` has
      no parameter "labels", the model does not get that entry. If `forward` has it, the model may
      compute the loss itself: pass `loss=lambda outputs, labels: outputs.loss`. With `valid`, the
      loss must instead be computed from the other outputs, because `outputs.loss` counts padding.
    - Inputs that are a mapping are always passed as keyword arguments.
    - Outputs and targets may be nested in tuples, dicts and other types that torch's pytree
      supports, as Hugging Face's are. For a dataclass, call `torch.export.register_dataclass`.
    - Inputs and targets must contain tensors only; text columns are not supported.

    Before the first step, `fit` evaluates one batch of `valid` (one per length, with buckets). So a
    metric that raises an error, or a shuffled `valid`, is reported before the first epoch. If this
    evaluation fails, `fit` evaluates all of `valid`, because some metrics are undefined for one
    batch.

    Args:
        core: this core.
        model: the module that `core.model` returned. Layers in evaluation mode stay in this mode.
            But if all layers are in evaluation mode, `fit` puts all into training mode.
        optimizer: an optimizer of torch.optim, except LBFGS, with the model's parameters. A resumed
            run restores the optimizer's settings, such as the learning rate, from the checkpoint.
            If an optimizer has the methods `train` and `eval`, as schedule-free ones have, `fit`
            calls these methods.
        loss: function of (outputs, targets) that returns a tensor with one element, the mean over
            the samples. With `ignore_index` or class weights, let it return `(total, weight)`:
            `fit` divides the sum of the totals by the sum of the weights, over all cores and
            accumulated batches. If the loss is a module, checkpoints contain it. If this module
            has parameters, pass it through `core.model`, and its parameters to the optimizer.
        train: the training data, from `core.batches(..., shuffle=True, drop_last=True)`.
        valid: the validation data, from `core.batches(...)`, not shuffled. `fit` evaluates it after
            every epoch as `evaluate` does. None: no evaluation.
        epochs: number of epochs of the whole run, at least 1. A resumed run trains those that are
            left.
        steps_per_epoch: optimizer steps per epoch, at least 1. None: one pass over `train`. An
            epoch with fewer steps uses only a part of `train`; no epoch has more than one pass.
        scheduler: a scheduler of torch.optim.lr_scheduler. `fit` calls its `step` after every
            optimizer step, or after every epoch: see `FitOptions.scheduler_interval`.
        metrics: for each name a function of (outputs, targets), or a metric of torchmetrics. The
            history has the results in columns `valid_<name>`. A `MetricCollection` named "all" is
            split into its metrics, with columns `valid_all_<name>`. A function whose first
            parameter is named `y_true`, as in scikit-learn, gets the targets first, and `fit`
            prints a line.
        preprocess: function from a batch's inputs to the model's inputs, for example one that
            normalises images. It runs on the device, in training and evaluation. If a batch is a
            mapping, the function gets all of it, and returns a mapping or the model's only
            argument.
        augment: function from (inputs, targets), or from a batch that is a mapping, to the
            augmented ones. It runs on the device before `preprocess`, in training only.
        bf16: run the forward pass under autocast to bfloat16. The loss, BatchNorm's statistics
            and the optimizer stay float32.
        accumulate_grad_batches: batches per optimizer step, all in one graph. If the last step of
            an epoch has fewer batches, its loss is the mean over these.
        max_grad_norm: scale gradients with a larger total norm down to this norm, as
            `clip_grad_norm_` does; None for no limit.
        monitor: column of the history that decides which epoch is best. NaN is never best. Without
            `valid`, the default means `train_loss`.
        mode: "min" if lower values of `monitor` are better, "max" if higher values are. None: the
            column's name decides, for example for a loss or an accuracy.
        early_stopping: an `EarlyStopping`, or its patience in epochs. None: train all epochs, and
            leave the last epoch's weights in the model.
        checkpoints: a `Checkpoints`, or its folder. None saves nothing.
        max_time: save a checkpoint and stop before this time is over, counted from this call:
            "8h30m" or seconds. `fit` stops at a log point, also in the middle of an epoch. None for
            no limit.
        replay: True captures a step's program once and runs it again without the Python of the
            step, on XLA only. Your code must then do the same operations in every step.
            docs/replay.md lists the values that may change, and the changes that `fit` does not
            detect. `fit` prints from which step on it replays, or why it captures every step. CPU
            processes, GPUs and TorchTPU train as with False. Replay needs memory for a second set
            of weights and optimizer state. With False, `fit` prints once if a step's Python takes
            more than 1.3 times as long as its program on the TPU.
        options: rare options: `FitOptions(log_every=10)`.

    Raises:
        OutOfSyncError: the cores are out of sync in weights, buffers, data or settings. `fit`
            compares them before and after the first step, after each epoch, and before each
            checkpoint within an epoch.
        NonFiniteLossError: the loss became NaN or infinite.
        ValueError: an argument, a label or a token id is out of range; the model has no parameters
            to train, or the optimizer has none of them; the loss or a metric is not one number;
            `monitor` is not a column; `mode` is None, and the name of the column does not show
            whether lower values are better; the scheduler ends before the run; or the checkpoint
            belongs to another architecture, optimizer, scheduler or dataset.
        TypeError: an argument has the wrong type; `train` or `valid` is not from `core.batches`; or
            batches have parts that the loss does not accept.
        OSError: a checkpoint cannot be written; another run uses the folder; at the start, the
            backup cannot be read and the folder has no complete checkpoint; or, at the end, the
            best weights are to be restored and best.pt is missing.
    """
    # Check all arguments first, so that a wrong one raises an error before anything is changed.
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
    # A last step with fewer batches has another graph: one more compilation is expected for it.
    steps_per_epoch = steps_of_epoch(core, train, steps_per_epoch, accumulate_grad_batches)
    has_short = has_short_step(train, steps_per_epoch, accumulate_grad_batches)
    if replay and steps_per_epoch < _STEPS_FOR_REPLAY:
        steps = counted(steps_per_epoch, "step")
        core.print(
            f"replay=True has no effect: an epoch has {steps}, and replay needs {_STEPS_FOR_REPLAY}"
        )
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
        shapes=train.shapes + has_short,
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
    """The loop of one call of `fit`.

    Attributes that are not listed here are arguments of `fit`.

    Attributes:
        step: runs one optimizer step.
        steps_per_epoch: optimizer steps per epoch.
        scheduler: the learning-rate scheduler, stepped after every optimizer step or every epoch.
        augment: the augmentation that `step` uses from epoch `options.augment_from` on.
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
    _first_step: int = 1  # number of this call's first step; above 1 in a resumed run
    _has_reported: bool = False  # whether `_report_unequal` has printed
    _compiled_before: int = 0  # graphs that the resumed run has compiled in earlier processes

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
        # A checkpoint's names are those of the user's modules, without the prefixes of wrappers.
        modules = {}
        for name in ("model", "loss", "averaged_model"):
            module = getattr(self.step, name)
            modules[name] = PlainNames(module) if hasattr(module, "load_state_dict") else None
        parts = {
            # First, because loading exchanges the weights in the model; the saved ones come after.
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
        # `is_recording`: preflight compiles one step without training, so it must save nothing.
        checkpoints = None if self.core.backend.is_recording else self.checkpoints
        self.state = RunState(self.core, parts, checkpoints)

    @property
    def is_over(self) -> bool:
        """Whether all epochs are done, or the training was stopped."""
        return self.progress.epoch > self.epochs or bool(self.history.stopped)

    def run(self) -> History:
        """Train until the last epoch, or until time, patience or `on_epoch_end` ends the run."""
        checking = self.train.checking(self.step.index_checks.check)
        with self.state.held(), self._in_fit(), checking:
            self._resume()
            # A resumed call keeps the number that the checkpoint has, because its random numbers
            # depend on it. The next call of `fit` gets the number after it.
            self.core.internal.numbers.fits = (
                max(self.core.internal.numbers.fits, self.progress.call) + 1
            )
            check_length(self.scheduler, self._scheduler_steps())
            self._compare("before the first step of fit", first=True)
            self._first_step = self.progress.step + 1
            is_between_epochs = self.history.epochs and not self.progress.in_epoch
            if is_between_epochs and self.progress.epoch <= self.epochs:
                self._stop_early()  # a run that was stopped stays stopped
            # In this block, SIGTERM does not end the process: `_end_on_sigterm` saves first.
            with self.core.internal.finishing_steps():
                self._train_epochs()
            self.optimizer_modes.eval()
            if self.early_stopping.restore_best_weights and self.history.best:
                self._restore_best()
        return self.history

    def _scheduler_steps(self) -> int:
        """Return how many `scheduler.step()` calls remain until the end of the last epoch."""
        at = self.progress
        epochs = max(0, self.epochs - at.epoch + 1)
        # `TrainStep` has only a scheduler that counts steps.
        if self.step.scheduler is None:
            return epochs
        return max(0, epochs * at.steps_per_epoch - at.in_epoch)

    def _train_epochs(self) -> None:
        if not self.is_over:
            self._try_evaluation()
        epochs_before = self.progress.epoch - 1
        run_began = time.perf_counter()
        while not self.is_over:
            epoch_began = time.perf_counter()
            self.clock.start_epoch()
            self._show_epochs(epochs_before, seconds=epoch_began - run_began)
            with self.clock.part("steps"):
                self._train_epoch()
            self.step.end_epoch()
            # If the time is up within an epoch, the epoch is not complete, so it gets no row.
            if not self.history.stopped:
                self._end_epoch(epoch_began)
                self._stop_early()
        self._show_epochs(epochs_before, seconds=time.perf_counter() - run_began)

    def _train_epoch(self) -> None:
        at = self.progress
        self.layer_modes.train()
        self.optimizer_modes.train()
        # The first epoch with augmentation, also after a resume in or after it.
        is_augmented = at.epoch >= self.options.augment_from
        if self.augment and not self.step.augment and is_augmented:
            self.step.begin_augmenting(self.augment)
        self._start_interval()
        batches = self._batches()
        while at.in_epoch < at.steps_per_epoch and not self.history.stopped:
            # Seed before the batch is made, because a dataset may draw random numbers, too.
            self.core.seed(*at.seed_words)
            group = next_step(batches, self.accumulate_grad_batches)
            if not group:  # after resuming on more cores, the rest of an epoch has fewer steps
                at.in_epoch = at.steps_per_epoch
                break
            self._train_step(group)
            self._end_on_sigterm()
            if len(self.losses) >= self.options.log_every:
                self._log()
        # The last interval of an epoch may be shorter than `log_every` steps.
        if len(self.losses):
            self._log()
        batches.close()

    def _batches(self) -> Iterator[Sent]:
        """Return the remaining batches of this epoch, and show a progress bar for them."""
        # The bar counts batches and not steps. The last step may have fewer batches.
        start = self.progress.in_epoch * self.accumulate_grad_batches
        total = self.progress.steps_per_epoch * self.accumulate_grad_batches
        total = min(total, len(self.train))
        return iter(self.core.progress(StepBatches(self.train), "train", total=total, start=start))

    def _train_step(self, group: list[Sent]) -> None:
        at = self.progress
        number = at.step + 1
        is_first = number == self._first_step
        if is_first:
            self.history.cores = self.core.world_size  # in place of those of the checkpoint
            self.history.of = kind_of_samples(self.train.arrange(group[0].tensors))
        if self.options.same_seed:
            # Seed after the batch is made: the dataset's random augmentation must differ per core.
            self.core.same_seed(*at.seed_words)
        lr = self.step.lr  # read before the step, because a scheduler changes it at the step's end
        self.time_limit.update(save_is_due=self.core.is_main and self.state.is_due)
        creating = contextlib.nullcontext()
        if is_first:
            creating = adam_state_created(self.core, self.step.optimizer)
        with creating:
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
        """Print once if `fit` averages the mean losses of batches that have different weights."""
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
        intervals = self.history.intervals
        row["lr"] = self.losses.lr
        # Speeds are those of the log intervals, without the time of evaluations and saves.
        row["samples_per_second"] = steady_mean(intervals, "samples_per_second", epoch=at.epoch)
        for name in CHIP_RATES:
            rate = steady_mean(intervals, name, epoch=at.epoch)
            # NaN means that no interval of the epoch has this rate.
            if not math.isnan(rate):
                row[name] = rate
        row["seconds"] = time.perf_counter() - began
        is_best = self._add_to_history(row)
        at.epoch += 1
        at.in_epoch = 0
        self.losses.start_epoch()
        self._print_epoch(row)
        if is_best:  # before the checkpoint, so that a run that resumes from it finds these weights
            in_memory = self.early_stopping.restore_best_weights
            with self.clock.part("checkpoints"):
                self.state.save_best(PlainNames(self.step.evaluated_model), in_memory=in_memory)
        # A scheduler of steps is called in `TrainStep`, and a scheduler of epochs here: before the
        # checkpoint, which contains its state.
        if self.step.scheduler is None and self.scheduler is not None:
            self._step_scheduler(row)
        times = {"epoch": row["epoch"]}
        self.history.times.append(times)
        times |= self.clock.end_epoch()  # for the checkpoint
        self._save(best=is_best)
        times |= self.clock.end_epoch()  # with the time of the checkpoint

    def _add_to_history(self, row: dict) -> bool:
        """Add the row of an epoch to the history; return whether it is the best epoch so far."""
        best = self.history.best
        start = self.options.augment_from
        if self.augment and best and best["epoch"] < start <= row["epoch"]:
            # Earlier epochs saw no augmented images. A better number of theirs may be overfitting.
            best = None
        is_best = self.best.is_better(row, than=best)
        self.history.epochs.append(row)
        if is_best:
            self.history.best = {**row, "by": self.best.column}
        return is_best

    def _print_epoch(self, row: dict) -> None:
        if self.core.backend.is_recording:
            return
        # Losses and metrics only, without the learning rate and the times.
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
        # Without a best epoch, as with NaN from the start, patience counts from epoch 0.
        best_epoch = self.history.best["epoch"] if self.history.best else 0
        patience = self.early_stopping.patience
        reason = None
        if patience and last - best_epoch >= patience:
            reason = f"no better {self.best.column} since epoch {best_epoch}, patience={patience}"
        # If `on_epoch_end` returns True on one core, all cores stop. It may do so on some cores
        # only, for example by their times. A core that stopped alone would make the others wait.
        on_epoch_end = self.options.on_epoch_end
        if on_epoch_end and any(gather_objects(self.core, bool(on_epoch_end(self.history)))):
            reason = reason or f"on_epoch_end returned True after epoch {last}"
        # After the last epoch there is nothing to stop.
        if reason and self.progress.epoch <= self.epochs:
            self.history.stopped = reason
            self.core.print(f"stopped: {reason}")

    def _start_interval(self) -> None:
        # Not `monotonic`: on Windows, Python 3.12 counts it in ticks of 16 ms, so it may give 0 s.
        self._interval_began = time.perf_counter()
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
        # The losses are on the host, so the device has finished the steps of the interval.
        seconds = time.perf_counter() - self._interval_began
        self.time_limit.record("interval", seconds)
        row = {
            "step": at.step,
            "epoch": at.epoch,
            "train_loss": self.losses.end_interval(),
            "lr": self.losses.lr,
            "samples_per_second": self._interval_batches * self.train.samples_per_step / seconds,
            "seconds": seconds,
            "data_wait": (self.train.wait_seconds - self._waited_before) / seconds,
            "compiles": self._compiled_before + self.step.monitor.compiles,
            "memory": peak_memory(),
            **self._chip_rates(seconds),
        }
        self.history.intervals.append(row)
        logged = ("train_loss", "lr", *CHIP_RATES)
        self.core.log(step=at.step, **{name: row[name] for name in logged if name in row})
        # At the end of an epoch, `_end_epoch` saves. At the run's end, nothing is left to stop.
        is_end_of_epoch = at.in_epoch == at.steps_per_epoch
        is_end_of_run = is_end_of_epoch and at.epoch == self.epochs
        if self.losses.time_is_up and not is_end_of_run:
            self._stop_for_time()
        elif self.losses.save_is_due and not is_end_of_epoch:
            self._compare(f"before the checkpoint of step {at.step}")
            self._save()
        self._start_interval()

    def _chip_rates(self, seconds: float) -> dict[str, float]:
        """Return the TFLOP/s per chip of this interval, and the MFU if the chip's peak is known."""
        if self.step.flops.total is None:
            return {}
        # A core of a sharded model has several chips.
        flops = (self.step.flops.total - self._flops_before) / self.core.chips
        rates = {"tflops_per_second": flops / seconds / 1e12}
        if self.core.peak_tflops:
            rates["mfu"] = rates["tflops_per_second"] / self.core.peak_tflops
        return rates

    def _fetch_losses(self) -> None:
        """Copy the losses since the last log point to the host; raise if one is not finite."""
        step = self.losses.fetch()  # the first step with a loss that is not finite
        if step is None:
            return
        # `fetch` also reports a step whose mean over the cores is not finite.
        if math.isfinite(step.local):
            # The mean over the cores is not finite, but this core's loss is. Wait here, while the
            # core with the NaN or infinity raises the error: only it knows its samples.
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
        # The share of the run that is done, with the part of the current epoch.
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
        """Save a checkpoint and raise `Terminated` if this process has received SIGTERM.

        The platform sends this signal before it stops the machine. tpukit sends it if a cell is
        interrupted.
        """
        if not self.state.must_end():
            return
        # Only core 0 saves. A save needs no collective here, so the other cores may end already.
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
        # Not `evaluate`: it averages the buffers first, which costs a graph. Each step has done so.
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
        """Evaluate one batch of every shape, so that errors come before the first epoch."""
        if self.valid is None or self.core.backend.is_recording:
            return
        try:
            # The same batches with a sampler that ends early: one step per shape of batch.
            first = copy.copy(self.valid)
            first.sampler = replace(self.valid.sampler, limit=self.valid.shapes)
            self._evaluation(first, label=None)
        except Exception as error:
            if hasattr(error, "waiting"):  # raised within a collective: another core failed
                raise
        else:
            return
        # A metric may fail only because one batch is too few: an AUROC needs both classes.
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
        if self.history.intervals:
            # A new process counts its graphs from 0, and the history counts those of the whole run.
            counted_before = self.history.intervals[-1]["compiles"]
            self._compiled_before = counted_before - self.step.monitor.compiles
        at = self.progress
        position = f"epoch {at.epoch}, step {at.in_epoch} of {at.steps_per_epoch}"
        if at.epoch > self.epochs:
            position = f"all {self.epochs} epochs are done; to train again, give another folder"
            if self.state.has_backup:
                position += " and another backup_dir"
        self.core.print(f"resumed from {self.history.resumed}: {position}")

    def _restore_best(self) -> None:
        model = self.step.evaluated_model
        # With several hosts, only core 0's host has the file of the best weights. So core 0 reads
        # it, and `core.model` sends the weights to the other cores.
        only_on_main = self.core.hosts > 1 and self.state.is_kept
        if self.core.is_main or not only_on_main:
            weights = self.state.best_weights(self.history.best["epoch"])
            PlainNames(model).load_state_dict(weights)
        if only_on_main:
            self.core.model(model, in_place=True)

    def _show_epochs(self, epochs_before: int, *, seconds: float) -> None:
        """Show how many epochs are done.

        Args:
            epochs_before: epochs that were done before this call of `fit`.
            seconds: duration of this call so far.
        """
        self.core.flush()  # so that the newest losses appear together with the progress
        done = min(self.progress.epoch - 1, self.epochs)
        # A run that has stopped early has a full bar.
        total = done if self.history.stopped else self.epochs
        self.core.internal.output.report_progress(
            "epochs", done, total, seconds=seconds, start=epochs_before
        )

    @contextlib.contextmanager
    def _in_fit(self) -> Iterator[None]:
        """Switch off the checks of the user's own loops; restore the random numbers at the end."""
        self.core.internal.agreement.forget()
        self.core.internal.in_fit = True
        try:
            with self.core.internal.numbers.kept():
                yield
        finally:
            self.core.internal.in_fit = False

    def _compare(self, when: str, *, first: bool = False) -> None:
        """Raise unless the cores are in sync. Collective.

        Each step averages the float buffers, so these may differ only before the first step. The
        attributes of layers are compared before the first step only, because a layer may store
        numbers of this core's batches.

        Args:
            when: the place in the run, for the error message.
            first: whether this call of `fit` has run no step yet.
        """
        if self._compared == self.progress.step:
            return  # nothing has changed since the last comparison
        self._compared = self.progress.step
        step = self.step
        # The keys are prefixes of the names in an error message.
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
