"""Train a model over a Core: no wait for the host in a step, exact evaluation, a run that survives a kill."""

import contextlib
import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tpukit.essentials.data import Batches
from tpukit.essentials.display import InvalidTypeError, InvalidValueError, counted
from tpukit.essentials.environment import peak_memory
from tpukit.essentials.launcher import Core, Terminated, gather_objects
from tpukit.profiling import parse_duration
from tpukit.training.batch import kind_of_samples, takes_mask
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
from tpukit.training.evaluation import Evaluation, evaluate_synced
from tpukit.training.history import History, samples_per_second
from tpukit.training.losses import PendingStep, StepLosses, not_finite
from tpukit.training.metrics import fresh_metrics, own_metrics
from tpukit.training.resume import Progress, RunState, TimeBudget
from tpukit.training.schedules import check_schedule, is_plateau
from tpukit.training.step import TrainStep


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
    schedule=None,
    schedule_every: str = "step",
    metrics: Mapping[str, Callable] | None = None,
    keep_outputs: bool = True,
    prepare: Callable | None = None,
    augment: Callable | None = None,
    augment_from: int = 1,
    bf16: bool = False,
    accumulate: int = 1,
    clip: float | None = None,
    average=None,
    best: str = "valid_loss",
    mode: str | None = None,
    patience: int | None = None,
    restore_best: bool = False,
    on_epoch: Callable[[History], bool | None] | None = None,
    log_every: int = 50,
    folder: str | Path | None = None,
    keep: int = 3,
    save_every: str | float = "10m",
    mirror: str | Path | None = None,
    resume: bool = True,
    budget: str | float | None = None,
    same_seed: bool = False,
    replay: bool = False,
) -> History:
    """Train a model, together, and return its `History`, the same on every core.

    Losses stay on the device: one copy to the host every `log_every` steps. Gradients, float buffers and the loss are
    averaged over the cores in one message, so all cores hold the same model after every step. Random numbers of a step
    depend only on the run's seed, the step and the rank, so a resumed run equals the uninterrupted one, bit for bit;
    for v2 and v3, `Core.seed` says which.

    What a batch is, and how the model is called:

    - `(inputs, targets)`, a tuple: `loss(model(inputs), targets)`. Further parts are ignored.
    - A mapping, as Hugging Face's datasets give: all of it is the inputs, and its entry "labels" (or "label",
      "targets", "target"; exactly one of them) is the targets: `loss(model(**batch), batch["labels"])`.
    - Inputs that are a mapping are always passed by name. The entry "labels" is left out where the model's `forward`
      has no such argument; with one, the model may compute its own loss: `loss=lambda outputs, labels: outputs.loss`.
      That number is of one batch, so an evaluation needs a loss of (outputs, targets).
    - Outputs and targets may be nested in tuples and dicts, or of a type that torch's pytree knows, as Hugging Face's
      are; the loss and the metrics get them as they are. For a dataclass, `torch.export.register_dataclass` first.
    - Everything in inputs and targets is a tensor: no text columns.

    Before the first step one batch of `valid` is evaluated: a metric that raises, or a shuffled `valid`, is found then
    and not after an epoch. If that fails, all of `valid` decides, since some metrics cannot be had of one batch.

    Args:
        core: this core.
        model: from `core.model`.
        optimizer: over the model's parameters; any of torch.optim's but LBFGS. On resuming, its settings are those of
            the checkpoint.
        loss: from (outputs, targets) to one number, the mean over the samples. A module is kept in the checkpoints; one
            with parameters comes from `core.model`, too, and its parameters are in the optimizer.
        train: `core.batches(..., shuffle=True, drop_last=True)`.
        valid: `core.batches(...)` in order, evaluated after every epoch as `evaluate` does; None for no evaluation.
        epochs: passes over the data, or over `steps_per_epoch` of it.
        steps_per_epoch: optimiser steps after which an epoch is over; None for all the data.
        schedule: of torch.optim.lr_scheduler.
        schedule_every: "step", after every optimiser step, so that its numbers count steps; or "epoch", after every
            epoch, for a schedule that counts epochs. ReduceLROnPlateau is stepped after every epoch, with `best`.
        metrics: functions of (outputs, targets), or torchmetrics' metrics, by name; rows say `valid_<name>`.
        keep_outputs: whether evaluation gathers all outputs; False where they do not fit into memory, see `evaluate`.
        prepare: changes the inputs on the device, in training and evaluation; for example, it normalises. Of a mapping
            it gets and returns all, or what it returns is the model's one argument.
        augment: changes (inputs, targets), or a batch that is a mapping, on the device before that, in training only.
        augment_from: the first epoch that does so, and the first that can be the best, where it is reached. On few data
            a network learns sooner from what is not changed yet; on chips the step is compiled once more there.
        bf16: run the forward pass under autocast to bfloat16; loss, BatchNorm's statistics and optimiser stay float32.
        accumulate: batches whose gradients one optimiser step takes, all in one graph.
        clip: the largest norm of the gradients; None for no limit.
        average: `torch.optim.swa_utils.AveragedModel` of the model, updated after every step; it is evaluated and kept
            in place of the model. Make it after `core.model` and without `device=`: with device="xla" its counter lives
            on the device and Python compares it with 0, two copies to the host per update that cut the step into three
            graphs (measured on torch_xla 2.9).
        best: the column that says which epoch is best; an epoch in which it is NaN never is.
        mode: "min" if lower is better there, "max" if higher; None decides by its name, of a loss or an accuracy, say.
        patience: epochs in a row without a better `best` after which to stop; None to go on to the last.
        restore_best: at the end, give the best epoch's weights back to the model, or to the averaged one.
        on_epoch: called on every core with the history after each epoch; True, from any of them, stops. A run that
            resumes between two epochs calls it at once, so what it stopped stays stopped.
        log_every: optimiser steps between two copies of the losses to the host.
        folder: of checkpoints and `best.pt`, the best epoch's weights; one run at a time. None to keep nothing.
        keep: how many of the newest checkpoints to keep, in addition to the best.
        save_every: time between checkpoints: "90s", "10m", "1h30m" or seconds; one is saved after every epoch anyway,
            and one before its evaluation.
        mirror: a second folder that outlives the machine, on a mounted drive or bucket, or "gs://bucket/run" and other
            URLs of fsspec. A thread copies the newest two checkpoints and `best.pt` there; a run whose folder has no
            whole checkpoint, or only older ones, continues from the mirror's. Trouble with it is said and ends nothing;
            the end waits for the last copy, a minute if nothing moves. `tpukit.training.run_folders` finds one.
        resume: continue from the newest whole checkpoint in the folder, or in the mirror, if there is one.
        budget: time after which to stop with a checkpoint, counted from here: "8h30m" or seconds; None for no limit.
        same_seed: draw the host's random numbers of a step alike on every core. For a model that decides with them
            which layers to use, as LayerDrop does: on chips all cores have to run one program. Augmentation stays each
            core's own, and so does what is drawn on the device; see `Core.same_seed`.
        replay: True to capture a step's program once and run it again without the Python of the step, on XLA. Your
            code must then do the same in every step: docs/replay.md lists what `fit` follows, what it checks and what
            nothing can notice. A line says from which step on, or why every step is recorded. Plain CPU processes,
            GPUs and TorchTPU train as with False. It needs memory for a second set of weights and optimizer state. With
            False, `fit` prints once if the host takes more than 1.3 times as long as this TPU.

    Raises:
        OutOfSyncError: something that may not differ between the cores does: weights, buffers, data, settings. It is looked
            for before and after the first step, after each epoch, and before each checkpoint is saved.
        NonFiniteLossError: the loss became NaN or infinite.
        ValueError: an argument is out of range; the model has no parameters, or the optimiser holds none of them; the
            loss or a metric is not one number; `best` is no column, or its name does
            not say which numbers are better; the checkpoint is of another architecture, optimiser or dataset.
        TypeError: `train` or `valid` is not what `core.batches` makes.
        OSError: a checkpoint could not be written, or another run saves in the folder; at the start, the mirror cannot
            be read and the folder has nothing to continue from.
    """
    if replay not in (True, False, None):
        raise InvalidTypeError(
            f"replay is True or False, got {replay!r}", fix="replay=True, after a look at docs/replay.md"
        )
    check_batches("train", train)
    remember_classes(model, train)
    if valid is not None:
        check_batches("valid", valid)
        check_classes(model, valid, "validation")
    check_numbers(
        clip=clip,
        steps_per_epoch=steps_per_epoch,
        epochs=epochs,
        augment_from=augment_from,
        accumulate=accumulate,
        log_every=log_every,
        keep=keep,
    )
    if accumulate > 1 and train.shapes > 1:
        raise InvalidValueError(
            f"accumulate={accumulate} puts batches of several lengths into one step, a graph for each combination",
            found=f"{train.shapes} lengths of batches",
            fix="accumulate=1, or a single bucket",
        )
    check_parameters(core, model, loss, optimizer)
    if patience is not None and patience < 1:
        raise InvalidValueError(f"patience is epochs, at least 1, got {patience}", fix="patience=None for no limit")
    by = best_of(core, best, mode, metrics=metrics or {}, valid=valid is not None)
    every = check_schedule(schedule, schedule_every, column=by.column, lower=by.lower)
    by_step, by_epoch = (schedule, None) if every == "step" else (None, schedule)
    steps = len(train) // accumulate
    if steps < 1:
        raise InvalidValueError(
            f"an epoch has {len(train)} batches, which is less than accumulate={accumulate}",
            fix=f"accumulate={len(train)}, or a smaller batch_size",
        )
    if steps_per_epoch and steps_per_epoch > steps:
        core.print(f"steps_per_epoch={steps_per_epoch} is more than the data has: an epoch is {steps} steps")
    steps = min(steps, steps_per_epoch or steps)
    if replay and steps < 3:
        core.print(f"replay=True has no effect: of an epoch of {counted(steps, 'step')} none is replayed")
    parts = {
        "model": model,
        "loss": loss if hasattr(loss, "load_state_dict") else None,
        "optimizer": optimizer,
        "schedule": schedule,
        "average": average,
        "train": train,
        "losses": StepLosses(core),
        "progress": Progress(samples_per_step=train.samples_per_step * accumulate, steps_per_epoch=steps),
        "history": History(cores=core.world_size),
    }
    trainer = Trainer(
        core=core,
        step=TrainStep(
            core,
            model,
            optimizer,
            loss,
            train.arrange,
            by_step,
            prepare,
            augment if augment_from == 1 else None,
            bf16,
            clip,
            average,
            train.shapes,
            takes_mask(train, loss),
            bool(replay),
        ),
        train=train,
        valid=valid,
        epochs=epochs,
        accumulate=accumulate,
        log_every=log_every,
        metrics=own_metrics(metrics or {}, one_core=not core.backend.shares_process),
        keep_outputs=keep_outputs,
        epoch_schedule=by_epoch,
        best=by,
        patience=patience,
        restore_best=restore_best,
        on_epoch=on_epoch,
        losses=parts["losses"],
        progress=parts["progress"],
        history=parts["history"],
        state=RunState(
            core,
            parts,
            folder=None if core.backend.is_recording else folder,
            keep=keep,
            save_every=parse_duration(save_every),
            mirror=None if core.backend.is_recording else mirror,
        ),
        budget=TimeBudget(core, parse_duration(budget) if budget is not None else math.inf),
        same_seed=same_seed,
        augment=augment,
        augment_from=augment_from,
    )
    return trainer.run(resume=resume)


@dataclass
class Trainer:
    """The loop of one call of `fit`: epochs of steps; a row per log interval; an evaluation and a save per epoch."""

    core: Core
    step: TrainStep
    train: Batches
    valid: Batches | None
    epochs: int
    accumulate: int
    log_every: int
    metrics: dict[str, Callable]
    keep_outputs: bool
    epoch_schedule: object
    best: Best
    patience: int | None
    restore_best: bool
    on_epoch: Callable[[History], bool | None] | None
    losses: StepLosses
    progress: Progress
    history: History
    state: RunState
    budget: TimeBudget
    same_seed: bool = False
    augment: Callable | None = None
    augment_from: int = 1
    _compared: int | None = None  # the step after which the cores were last compared
    _first_step: int = 1

    def run(self, *, resume: bool) -> History:
        """Train to the last epoch, or until the time is up."""
        with self.state.held(), self._in_fit():
            self._resume(resume)
            self._compare("before the first step of fit", first=True)
            self._first_step = self.progress.step + 1
            if self.history.epochs and not self.progress.in_epoch and self.progress.epoch <= self.epochs:
                self._stop_early()  # a run that was stopped stays stopped
            with self.core.finishing_steps():
                if self.progress.epoch <= self.epochs and not self.history.stopped:
                    self._try_evaluation()
                first, all_began = self.progress.epoch - 1, time.monotonic()
                while self.progress.epoch <= self.epochs and not self.history.stopped:
                    began = time.monotonic()
                    self._show_epochs(first, began - all_began)
                    self._train_epoch()
                    self.step.end_epoch()
                    if not self.history.stopped:
                        self._end_epoch(began)
                        self._stop_early()
                self._show_epochs(first, time.monotonic() - all_began)
            if self.restore_best and self.history.best:
                self._restore_best()
        return self.history

    @contextlib.contextmanager
    def _in_fit(self) -> Iterator[None]:
        """Compare and draw random numbers at moments of its own; what follows draws as if nothing had been drawn."""
        self.core.agreement.forget()
        self.core.in_fit = True
        try:
            with self.core.numbers.kept():
                yield
        finally:
            self.core.in_fit = False

    def _compare(self, when: str, *, first: bool = False) -> None:
        """Raise unless what is trained, and what with, is the same on every core, together.

        Float buffers are averaged in each step, so not at first; layers may note numbers of this core's batches later.
        """
        at, step = self.progress, self.step
        if self._compared == at.step:
            return  # between two steps nothing changes
        self._compared = at.step
        modules = {"": step.model, "loss.": step.loss, "average.": step.average}
        data = {"train": self.train} | ({} if self.valid is None else {"valid": self.valid})
        self.core.agreement.compare(
            when,
            modules={name: one for name, one in modules.items() if one is not None},
            optimizers=[step.optimizer],
            schedule=step.schedule or self.epoch_schedule,
            data={f"{name}: {key}": value for name, one in data.items() for key, value in one.facts().items()},
            called={name: getattr(step, name) for name in ("loss", "prepare", "augment")} if first else {},
            averaged=not first,
            layers=first,
            run={
                "epochs": self.epochs,
                "steps_per_epoch": at.steps_per_epoch,
                "step": at.step,
                "accumulate": self.accumulate,
                "clip": step.clip,
                "log_every": self.log_every,
                "bf16": step.bf16,
                "same_seed": self.same_seed,
                "patience": self.patience,
                "restore_best": self.restore_best,
                "metrics": sorted(self.metrics),
                "checkpoint in the folder": self.history.resumed,
            },
        )

    def _restore_best(self) -> None:
        model = self.step.evaluated_model
        only_here = self.core.hosts > 1 and self.state.is_kept  # core 0 has written them, on its host
        if self.core.is_main or not only_here:
            model.load_state_dict(self.state.best_weights())
        if only_here:
            self.core.model(model, in_place=True)

    def _resume(self, resume: bool) -> None:
        self.history.resumed = self.state.load(resume=resume)
        if self.history.resumed:
            at = self.progress
            where = f"epoch {at.epoch}, step {at.in_epoch} of {at.steps_per_epoch}"
            if at.epoch > self.epochs:
                where = f"all {self.epochs} epochs are done; to train again, give another folder"
                where += " and another mirror" * self.state.has_mirror
            self.core.print(f"resumed from {self.history.resumed}: {where}")

    def _show_epochs(self, first: int, seconds: float) -> None:
        """Show how many epochs are done; those before `first` were by an earlier run."""
        self.core.flush()  # so that the newest numbers stand beside it
        done = min(self.progress.epoch - 1, self.epochs)
        total = done if self.history.stopped else self.epochs
        self.core.report_progress("epochs", done, total, seconds=seconds, start=first)

    def _train_epoch(self) -> None:
        at = self.progress
        self.step.model.train()
        if self.augment and not self.step.augment and at.epoch >= self.augment_from:
            self.step.begin_augmenting(self.augment)
        self._start_interval()
        done, total = at.in_epoch * self.accumulate, at.steps_per_epoch * self.accumulate
        batches = iter(self.core.progress(_AsSent(self.train), "train", total=total, start=done))
        while at.in_epoch < at.steps_per_epoch and not self.history.stopped:
            self.core.seed(at.step)  # before the batch is made, since a dataset may draw random numbers, too
            group = [(batch, self.train.current) for batch in itertools.islice(batches, self.accumulate)]
            if len(group) < self.accumulate:  # after resuming on more cores, the rest of an epoch may not fill a step
                at.in_epoch = at.steps_per_epoch
                break
            inputs, samples = zip(*group, strict=True)
            if at.step + 1 == self._first_step:
                self.history.of = kind_of_samples(self.train.arrange(inputs[0]))
            if self.same_seed:
                self.core.same_seed(at.step)  # after the batch, whose augmentation stays this core's own
            lr = self.step.lr  # before the step, since a schedule sets the next one's at its end
            self.budget.update(save_is_due=self.core.is_main and self.state.is_due)
            is_last = at.in_epoch + 1 == at.steps_per_epoch
            local, reduced = self.step(at.step + 1, inputs, self.budget.flag, is_last=is_last)
            at.step, at.in_epoch = at.step + 1, at.in_epoch + 1
            if at.step == self._first_step:
                self._compare("after the first step of fit")
            self.losses.add(PendingStep(at.step, samples, local, reduced, lr))
            self._end_on_sigterm()
            if len(self.losses) >= self.log_every:
                self._log()
        if len(self.losses):
            self._log()
        batches.close()

    def _end_epoch(self, began: float) -> None:
        at = self.progress
        row = {"epoch": at.epoch, "step": at.step, "train_loss": self.losses.epoch_mean()}
        self._compare(f"after epoch {at.epoch}")
        if not self.history.epochs and not self.core.backend.is_recording:
            check_statistics(self.core, self.step.model)
        if self.valid is not None:
            self._save()  # before the evaluation, which may raise, run out of memory, or be killed: the epoch is kept
        self.train.end_epoch()
        if self.valid is not None:
            row |= self._evaluate()
            self.core.log(step=at.step, **{name: value for name, value in row.items() if name.startswith("valid_")})
        rate = samples_per_second([row for row in self.history.intervals if row["epoch"] == at.epoch])
        row |= {"lr": self.losses.lr, "samples_per_second": rate, "seconds": time.monotonic() - began}
        # Before, none was trained for what augmentation stands for, and may look better on what it was trained for.
        begins = bool(self.augment) and at.epoch == self.augment_from
        is_best = self.best.is_better(row, than=None if begins else self.history.best)
        self.history.epochs.append(row)
        if is_best:
            self.history.best = {**row, "by": self.best.column}
        at.epoch, at.in_epoch = at.epoch + 1, 0
        self.losses.start_epoch()
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in row.items() if "loss" in name or "valid" in name)
        if not self.core.backend.is_recording:
            self.core.print(f"epoch {row['epoch']}: {numbers}")
        if is_best:  # before the checkpoint, so that a run that resumes from it finds these weights in the folder
            self.state.save_best(self.step.evaluated_model, in_memory=self.restore_best)
        if self.epoch_schedule is not None:  # before the checkpoint, which holds its state
            self.epoch_schedule.step(*([row[self.best.column]] if is_plateau(self.epoch_schedule) else []))
        self._save(best=is_best)

    def _evaluate(self) -> dict[str, float]:
        if self.core.backend.is_recording:  # preflight looks at the step alone, and what it computes is no result
            return dict.fromkeys(["valid_loss", *(f"valid_{name}" for name in self.metrics)], 1.0)
        began = time.monotonic()
        found = self._evaluation(self.valid)
        self.budget.record("evaluation", time.monotonic() - began)
        return {"valid_loss": found.loss} | {f"valid_{name}": value for name, value in found.metrics.items()}

    def _evaluation(self, batches: Batches, label: str | None = "valid") -> Evaluation:
        # Not `evaluate`, which averages the buffers first: every step has done so already, and it is a graph more.
        return evaluate_synced(
            self.core,
            self.step.evaluated_model,
            self.step.loss,
            batches,
            metrics=fresh_metrics(self.metrics),
            prepare=self.step.prepare,
            bf16=self.step.bf16,
            keep_outputs=self.keep_outputs,
            between_steps=self._end_on_sigterm,
            label=label,
        )

    def _try_evaluation(self) -> None:
        """Evaluate one batch of every shape, to find now what would fail after an epoch."""
        if self.valid is None or self.core.backend.is_recording:
            return
        try:
            first = copy.copy(self.valid)
            first.sampler = replace(self.valid.sampler, limit=self.valid.shapes)
            self._evaluation(first, label=None)  # no bar: it is no part of the work
        except Exception as error:
            if hasattr(error, "waiting"):  # in a collective: it is another core's
                raise
        else:
            return
        self._evaluation(self.valid)  # an AUROC, for example, cannot be had of one class

    def _start_interval(self) -> None:
        self._interval_began, self._interval_step = time.monotonic(), self.progress.step
        self._waited_before = self.train.wait_seconds
        self.step.start_interval()

    def _log(self) -> None:
        at = self.progress
        self._fetch_losses()
        self.step.end_interval(at.step - self._interval_step)
        seconds = time.monotonic() - self._interval_began  # with the losses here, the device has done the steps
        self.budget.record("interval", seconds)
        row = {
            "step": at.step,
            "epoch": at.epoch,
            "train_loss": self.losses.end_interval(),
            "lr": self.losses.lr,
            "samples_per_second": (at.step - self._interval_step) * at.samples_per_step / seconds,
            "seconds": seconds,
            "data_wait": (self.train.wait_seconds - self._waited_before) / seconds,
            "compiles": self.step.monitor.compiles,
            "memory": peak_memory(),
        }
        self.history.intervals.append(row)
        self.core.log(step=at.step, train_loss=row["train_loss"], lr=row["lr"])
        epoch_is_over = at.in_epoch == at.steps_per_epoch
        if self.losses.time_is_up and not (epoch_is_over and at.epoch == self.epochs):
            self._stop_for_time()
        elif self.losses.save_is_due and not epoch_is_over:
            self._compare(f"before the checkpoint of step {at.step}")
            self._save()
        self._start_interval()

    def _fetch_losses(self) -> None:
        """Bring the losses to the host; raise where one is not finite."""
        step = self.losses.fetch()
        if step is None:
            return
        if math.isfinite(step.local):
            # The loss of another core is not finite. That core raises, since it knows the samples; this one waits.
            self.core.barrier()
        raise not_finite(
            step, rank=self.core.rank, dataset=self.train.dataset, lr=self.losses.lr, checkpoint=self.state.newest_name
        )

    def _stop_for_time(self) -> None:
        at = self.progress
        part = (at.epoch - 1 + at.in_epoch / at.steps_per_epoch) / self.epochs
        self._compare(f"before the checkpoint of step {at.step}")
        self.history.stopped = f"the time is up after {at.step} steps, {part:.0%} of {self.epochs} epochs"
        self._save()
        advice = "run this again to continue" if self.state.is_kept else "with folder= it could be continued"
        self.core.print(f"{self.history.stopped}; {advice}")

    def _stop_early(self) -> None:
        """Stop after an epoch, on all cores, where `patience` is at its end or `on_epoch` says so."""
        last, best, reason = self.history.epochs[-1]["epoch"], self.history.best, None
        since = best["epoch"] if best else 0
        if self.patience and last - since >= self.patience:
            reason = f"no better {self.best.column} since epoch {since}, patience={self.patience}"
        # All stop if one says so: what they see differs in seconds, and a core that stopped alone would be waited for.
        if self.on_epoch and any(gather_objects(self.core, bool(self.on_epoch(self.history)))):
            reason = reason or f"on_epoch returned True after epoch {last}"
        if reason and self.progress.epoch <= self.epochs:
            self.history.stopped = reason
            self.core.print(f"stopped: {reason}")

    def _end_on_sigterm(self) -> None:
        """Save and leave if SIGTERM has come, from the platform or from an interrupt of the cell."""
        if not self.state.must_end():
            return
        if self.core.is_main and self.state.is_kept:
            self._fetch_losses()
            self._save()
            self.state.close()
            self.core.print(f"saved at step {self.progress.step}; run this again to continue from there")
        raise Terminated

    def _save(self, *, best: bool = False) -> None:
        began = time.monotonic()
        self.state.save(self.progress.step, best=best)
        self.budget.record("save", time.monotonic() - began + self.state.copy_seconds)


class _AsSent:
    """Batches as they come to the device, for a loop that calls `arrange` within its step."""

    def __init__(self, batches: Batches):
        self._batches, self.samples_per_step = batches, batches.samples_per_step

    def __iter__(self) -> Iterator[object]:
        return self._batches.epoch_as_sent()
