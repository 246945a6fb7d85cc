"""One call of `fit`: the loop, what it brings to the host and when, and what it leaves behind to go on from."""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tpukit.data.batches import Batches
from tpukit.diagnostics.recompiles import RecompileMonitor
from tpukit.distributed.core import Core
from tpukit.distributed.signals import STEP_SECONDS, Terminated
from tpukit.machine.resources import peak_memory
from tpukit.training.checkpoints import Checkpoints, check_architecture
from tpukit.training.evaluation import forward, judge
from tpukit.training.finite import explain
from tpukit.training.history import History

_PROGRESS = ("step", "epoch", "in_epoch", "since_log", "since_epoch")  # of `Trainer`, kept in a checkpoint


@dataclass(frozen=True)
class _Given:
    """A step that was handed to the device: the samples of its batches, and its losses, which are there still."""

    step: int
    samples: tuple
    local: object  # () float32, this core's loss
    shared: object  # (2,) float32: the mean of all cores' losses, and of whether their time is up


@dataclass
class Trainer:
    """One call of `fit`: what it was given, and how far it is."""

    core: Core
    model: object
    optimizer: object
    loss: Callable
    train: Batches
    valid: Batches | None
    epochs: int
    steps: int  # of the optimiser, in an epoch
    schedule: object
    metrics: dict
    prepare: Callable | None
    augment: Callable | None
    bf16: bool
    accumulate: int
    clip: float | None
    average: object
    best: str
    log_every: int
    save_seconds: float
    budget: float
    checkpoints: Checkpoints | None
    resume: bool

    step: int = 0  # of the optimiser, done
    epoch: int = 1  # under way
    in_epoch: int = 0  # steps of it done
    history: History = field(default_factory=History)
    since_log: list[float] = field(default_factory=list)  # losses that are on the host, not yet in a row
    since_epoch: list[list] = field(default_factory=list)  # [mean loss, steps] of the intervals of this epoch

    def run(self) -> History:
        """Train to the last epoch, or until the time is up."""
        import torch

        self.began = self.saved = time.monotonic()
        self.told: float | None = None  # when this core first saw that it shall end
        self.reserve = {"interval": 0.0, "save": 0.0, "valid": 0.0}  # seconds the longest of each took
        (self.up,), self.sent_up = self.core.to_device([torch.zeros(())]), False  # 1: this core's time is up
        self.given: list[_Given] = []  # the steps whose losses are on the device still
        self.watch = RecompileMonitor(self.core.backend)
        self.buffers = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        if self.checkpoints:
            self._load()
        with self.core.finishing_steps():
            while self.epoch <= self.epochs and not self.history.stopped:
                self._train_epoch()
        if self.checkpoints and self.core.is_main:
            self.checkpoints.close()
        return self.history

    # ---- an epoch ----------------------------------------------------------------------------------------------

    def _train_epoch(self) -> None:
        began = time.monotonic()
        self.model.train()
        self._start_interval()
        batches = iter(self.core.progress(self.train, f"epoch {self.epoch}", total=self.steps * self.accumulate))
        while self.in_epoch < self.steps and not self.history.stopped:
            self.core.seed(self.step)  # before the batch is made: a dataset may draw, too
            group = [(batch, self.train.current) for batch in itertools.islice(batches, self.accumulate)]
            if len(group) < self.accumulate:  # resumed on more cores than before
                self.in_epoch = self.steps
                break
            self._train_step(*zip(*group, strict=True))
            self._end_if_told()
            if len(self.given) + len(self.since_log) == self.log_every:
                self._log()
        batches.close()
        if self.given or self.since_log:
            self._log()
        if self.history.stopped:
            return
        row = {"epoch": self.epoch, "step": self.step, "train_loss": self._epoch_loss()}
        self.train.end_epoch()
        if self.valid is not None:
            row |= self._judge()
        row |= {"lr": self._lr(), "seconds": time.monotonic() - began}
        self.history.epochs.append(row)
        is_best = self._is_best(row)
        if is_best:
            self.history.best = {**row, "by": self.best}
        self.epoch, self.in_epoch, self.since_epoch = self.epoch + 1, 0, []
        told = ", ".join(f"{name} {value:.4f}" for name, value in row.items() if "_" in name)
        self.core.print(f"epoch {row['epoch']}: {told}")
        if self.checkpoints:
            if is_best:  # before the checkpoint: who goes on from that finds these weights
                self.core.save(self._judged().state_dict(), self.checkpoints.folder / "best.pt")
            self._save(best=is_best)

    def _train_step(self, group: tuple, samples: tuple) -> None:
        import torch

        self.watch.start_step(group)
        with self.core.step():
            local = None
            for inputs, targets, *_ in group:
                if self.augment:
                    inputs, targets = self.augment(inputs, targets)
                outputs = forward(self.core, self.model, self.prepare(inputs) if self.prepare else inputs, self.bf16)
                value = self.loss(outputs, targets)
                if getattr(value, "numel", lambda: 0)() != 1:
                    raise ValueError(
                        f"the loss is one number, got {type(value).__name__} {tuple(getattr(value, 'shape', ()))}\n"
                        '  fix:   take its mean, loss.mean(), or reduction="mean"'
                    )
                value = value.reshape(()) if value.ndim else value
                value = value / self.accumulate if self.accumulate > 1 else value
                value.backward()
                value = value.detach().float()
                local = value if local is None else local + value
            shared = torch.stack([local, self.up])
            self.watch.check_graph(self.model, shared)
            self.core.optimizer_step(self.optimizer, clip=self.clip, also=[shared, *self.buffers])
            if self.average:
                self.average.update_parameters(self.model)
        self.given.append(_Given(self.step, samples, local, shared))
        if self.schedule:
            self.schedule.step()
        self.step, self.in_epoch = self.step + 1, self.in_epoch + 1
        if told := self.watch.end_step(self.step):
            self.core.print(told)
        if self._is_time_up() and not self.sent_up:
            (self.up,) = self.core.to_device([torch.ones(())])  # sent, not filled: the graph stays the same
            self.sent_up = True

    # ---- numbers -----------------------------------------------------------------------------------------------

    def _start_interval(self) -> None:
        self.interval_began, self.waited = time.monotonic(), self.train.waited

    def _drain(self) -> bool:
        """Bring the losses of the steps since the last time to the host; say whether a core's time is up."""
        given, self.given = self.given, []
        time_is_up = False
        values = self.core.to_host([(step.local, step.shared) for step in given])
        for step, (local, (mean, up)) in zip(given, values, strict=True):
            if not math.isfinite(local + mean):
                self._stop_at(step, float(local))
            self.since_log.append(mean.item())
            time_is_up |= bool(up)
        return time_is_up

    def _log(self) -> None:
        steps = len(self.given) + len(self.since_log)
        time_is_up = self._drain()
        now = time.monotonic()
        took = now - self.interval_began
        self.reserve["interval"] = max(self.reserve["interval"], took)
        loss = sum(self.since_log) / steps
        row = {
            "step": self.step,
            "epoch": self.epoch,
            "train_loss": loss,
            "lr": self._lr(),
            "samples_per_second": steps * self.accumulate * self.train.sampler.batch_size / took,
            "data_wait": (self.train.waited - self.waited) / took,
            "compiles": self.watch.compiles,
            "memory": peak_memory(),
        }
        self.history.intervals.append(row)
        self.core.log(step=self.step, train_loss=loss, lr=row["lr"])
        self.since_epoch.append([loss, steps])
        self.since_log = []
        self._start_interval()
        if time_is_up and not (self.epoch == self.epochs and self.in_epoch == self.steps):
            self._stop_for_time()
        elif self.checkpoints and now - self.saved >= self.save_seconds and self.in_epoch < self.steps:
            self._save()

    def _epoch_loss(self) -> float:
        steps = sum(count for _, count in self.since_epoch)
        return sum(loss * count for loss, count in self.since_epoch) / steps

    def _samples_per_step(self) -> int:
        return self.train.samples_per_step * self.accumulate

    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _judge(self) -> dict:
        began = time.monotonic()
        found = judge(
            self.core,
            self._judged(),
            self.loss,
            self.valid,
            metrics=self.metrics,
            prepare=self.prepare,
            bf16=self.bf16,
            between_steps=self._end_if_told,
        )
        self.reserve["valid"] = max(self.reserve["valid"], time.monotonic() - began)
        return {"valid_loss": found.loss} | {f"valid_{name}": value for name, value in found.metrics.items()}

    def _is_best(self, row: dict) -> bool:
        name = self.best
        if name not in row:
            raise ValueError(f"best names a column of an epoch, got {name!r}\n  fix:   one of {', '.join(row)}")
        if self.history.best is None:
            return True
        low = name.endswith(("loss", "error"))
        return row[name] < self.history.best[name] if low else row[name] > self.history.best[name]

    def _stop_at(self, given: _Given, local: float) -> None:
        """Raise for a loss that is no number; a core whose own is one leaves the word to the core it came from."""
        import numpy

        if math.isfinite(local):
            self.core.barrier()
        saved = self.checkpoints.paths if self.checkpoints else []
        raise explain(
            local,
            step=given.step + 1,
            rank=self.core.rank,
            dataset=self.train.dataset,
            samples=numpy.concatenate(given.samples),
            lr=self._lr(),
            checkpoint=saved[-1].name if saved else "none",
        )

    # ---- surviving ---------------------------------------------------------------------------------------------

    def _is_time_up(self) -> bool:
        needed = 1.25 * self.reserve["interval"] + self.reserve["valid"] + self.reserve["save"]
        return time.monotonic() - self.began + needed > self.budget

    def _stop_for_time(self) -> None:
        share = (self.epoch - 1 + self.in_epoch / self.steps) / self.epochs
        self.history.stopped = f"the time is up after {self.step} steps, {share:.0%} of {self.epochs} epochs"
        if self.checkpoints:
            self._save()
        self.core.print(
            f"{self.history.stopped}; " + ("run this again to go on" if self.checkpoints else "folder= would keep it")
        )

    def _end_if_told(self) -> None:
        """Save and leave on SIGTERM, which came from the platform or from an interrupt of the cell."""
        if not self.core.told_to_end:
            return
        if self.checkpoints and not self.core.is_main:
            # Core 0 may have a step to finish before it saves, and that takes all cores.
            self.told = self.told or time.monotonic()
            if time.monotonic() < self.told + STEP_SECONDS:
                return
        if self.checkpoints and self.core.is_main:
            self._drain()
            self._save()
            self.checkpoints.close()
            self.core.print(f"saved at step {self.step}; run this again to go on from there")
        raise Terminated

    def _save(self, best: bool = False) -> None:
        began = time.monotonic()
        if self.core.is_main:
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict() if self.schedule else None,
                "average": self.average.state_dict() if self.average else None,
                "train": self.train.state_dict(),
                "progress": {name: getattr(self, name) for name in _PROGRESS},
                "samples_per_step": self._samples_per_step(),
                "history": {name: getattr(self.history, name) for name in ("intervals", "epochs", "best")},
            }
            self.checkpoints.save(self.core.snapshot(state), step=self.step, best=best)
        self.saved = time.monotonic()
        self.reserve["save"] = max(self.reserve["save"], self.saved - began)

    def _load(self) -> None:
        say = self.core.print if self.core.is_main else lambda line: None
        checkpoint = self.checkpoints.newest(say=say)
        if checkpoint is None:
            return
        if not self.resume:
            raise ValueError(
                f"resume=False, and {self.checkpoints.folder} holds checkpoints of step {checkpoint.step}\n"
                "  fix:   another folder, or remove that one; resume=True goes on from there"
            )
        state = checkpoint.state
        check_architecture(self.model.state_dict(), state["model"], saved=str(checkpoint.path))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule and state["schedule"]:
            self.schedule.load_state_dict(state["schedule"])
        if self.average and state["average"]:
            self.average.load_state_dict(state["average"])
        self.train.load_state_dict(state["train"])
        for name in _PROGRESS:
            setattr(self, name, state["progress"][name])
        self.history = History(**state["history"], resumed=checkpoint.path.name)
        # On other cores, or with other batches, an epoch has other steps.
        self.in_epoch = min(self.steps, self.in_epoch * state["samples_per_step"] // self._samples_per_step())
        where = f"epoch {self.epoch}, step {self.in_epoch} of {self.steps}"
        over = f"all {self.epochs} epochs are done; another folder starts anew"
        self.core.print(f"resumed from {checkpoint.path.name}: {where if self.epoch <= self.epochs else over}")

    def _judged(self):
        """Return the model that is judged and kept: the averaged one, if there is one."""
        return self.average.module if self.average else self.model
