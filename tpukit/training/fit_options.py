"""The options of `fit` that travel together: `FitOptions`, `Checkpoints` and `EarlyStopping`.

Each class checks its values when an object is made. An `EarlyStopping(patience=0)` in the notebook
therefore raises in the notebook, and not later in a worker process.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from tpukit.essentials.display import InvalidTypeError, InvalidValueError, check_count, check_flag
from tpukit.profiling import parse_duration
from tpukit.training.history import History


@dataclass(frozen=True)
class FitOptions:
    """The rare options of `fit`.

    Attributes:
        scheduler_interval: "step" if the scheduler counts optimizer steps, "epoch" if it counts
            epochs. `fit` always steps a ReduceLROnPlateau after an epoch, with the value of
            `monitor`.
        keep_outputs: gather all outputs in an evaluation. Use False if they do not fit into
            memory; see `evaluate`.
        augment_from: first epoch with augmentation, from 1. With little data, a network at first
            learns faster from unchanged images. From this epoch on, no earlier epoch can be the
            best epoch. On a TPU, the step is compiled once more.
        averaged_model: `torch.optim.swa_utils.AveragedModel` of the model, or timm's `ModelEmaV3`.
            `fit` updates it after every step, evaluates it instead of the model, and saves it in
            `best.pt`. Make it after `core.model` and without the argument `device`. With
            `AveragedModel(model, device="xla")`, a number would be copied to the host twice per
            step, which cuts each step into three graphs (measured on torch_xla 2.9).
        on_epoch_end: function that `fit` calls on every core with the `History` after each epoch.
            If it returns True on any core, training stops. A run that resumes at the end of an
            epoch calls the function before it trains. So if you repeat a run that the
            function has stopped, the function stops it again.
        log_every: number of optimizer steps after which the losses are copied to the host.
        same_seed: give every core the same random numbers of the host in a step. Use it for models
            that skip layers at random, as LayerDrop does, because on TPU chips all cores must run
            the same program. Augmentation and random numbers of the device still differ between
            the cores; see `Core.same_seed`.

    Raises:
        ValueError: a value is out of range.
        TypeError: a value has the wrong type.
    """

    scheduler_interval: str = "step"
    keep_outputs: bool = True
    augment_from: int = 1
    averaged_model: object = None
    on_epoch_end: Callable[[History], bool | None] | None = None
    log_every: int = 50
    same_seed: bool = False

    def __post_init__(self):
        check_count("augment_from", self.augment_from)
        check_count("log_every", self.log_every)
        check_flag("keep_outputs", self.keep_outputs)
        check_flag("same_seed", self.same_seed)
        if self.scheduler_interval not in ("step", "epoch"):
            raise InvalidValueError(
                f'scheduler_interval must be "step" or "epoch", got {self.scheduler_interval!r}',
                fix='scheduler_interval="step" if the scheduler counts optimizer steps',
            )
        if self.on_epoch_end is not None and not callable(self.on_epoch_end):
            raise InvalidTypeError(
                f"on_epoch_end must be a function of the history, got {self.on_epoch_end!r}",
                fix="pass a function that returns True to stop the training: "
                "on_epoch_end=lambda history: history.epochs[-1]['train_loss'] < 0.1",
            )


@dataclass(frozen=True)
class EarlyStopping:
    """Choose when `fit` stops early, and which weights the model has at the end.

    `EarlyStopping(patience=None, restore_best_weights=True)` trains all epochs, and then restores
    the weights of the best epoch.

    Attributes:
        patience: at least 1: stop after this number of epochs in a row in which `monitor` was not
            better than in the best epoch. None: do not stop early.
        restore_best_weights: at the end, load the best epoch's weights into the model, or into the
            averaged model if there is one.

    Raises:
        ValueError: `patience` is less than 1.
        TypeError: a value has the wrong type.
    """

    patience: int | None = None
    restore_best_weights: bool = False

    def __post_init__(self):
        check_flag("restore_best_weights", self.restore_best_weights)
        if self.patience is not None:
            check_count("patience", self.patience, otherwise="None for no limit")


@dataclass(frozen=True)
class Checkpoints:
    """Choose where `fit` saves checkpoints, how often, and whether it resumes from them.

    Only one run at a time may use the folder.

    Attributes:
        folder: folder on this machine for the checkpoints, and for `best.pt` with the best epoch's
            weights. It is created if it does not exist.
        keep_last: number of newest checkpoints to keep, in addition to the best epoch's.
        save_every: time between checkpoints: "90s", "10m", "1h30m" or seconds. When it has passed,
            `fit` saves at the next log point (see `log_every`). It also saves a checkpoint at the
            end of each epoch, before and after the evaluation.
        backup_dir: backup folder, which outlives the machine: on a mounted drive or bucket, or
            "gs://bucket/run" and other URLs of fsspec. A thread copies the newest checkpoint and
            `best.pt` to it, and keeps the checkpoint of one earlier step there. If the backup has
            the newest complete checkpoint, a run continues from the backup, and its `best.pt`
            replaces that in `folder`. If a copy fails, `fit` prints the reason and continues. At
            the end, `fit` waits for the last copy, at most ten minutes. It gives up after one
            minute without progress. See `tpukit.training.run_folder`. None: no backup.
        resume: continue from the newest complete checkpoint in the folder or the backup, if there
            is one. With False, `fit` raises an error if there is a checkpoint.

    Raises:
        ValueError: a value is out of range, or `backup_dir` is the same folder as `folder`.
        TypeError: a value has the wrong type.
    """

    folder: str | Path
    keep_last: int = 3
    save_every: str | float = "10m"
    backup_dir: str | Path | None = None
    resume: bool = True

    def __post_init__(self):
        _check_folder(self.folder)
        check_count("keep_last", self.keep_last)
        parse_duration(self.save_every, "save_every")  # raises for a text that is no duration
        check_flag("resume", self.resume)
        if self.backup_dir is None:
            return
        if not isinstance(self.backup_dir, str | os.PathLike):
            raise InvalidTypeError(
                f"backup_dir must be a folder or a URL, got {self.backup_dir!r}",
                fix='backup_dir="gs://bucket/run", or the folder of a mounted drive',
            )
        # A backup in the same folder would be lost with the machine.
        if absolute(self.folder) == absolute(self.backup_dir):
            raise InvalidValueError(
                "backup_dir and folder must be different folders",
                found=f"folder={str(self.folder)!r}, backup_dir={str(self.backup_dir)!r}",
                fix="another backup_dir, on a disk that outlives this machine",
            )


def as_checkpoints(given: object) -> Checkpoints | None:
    """Return the argument `checkpoints` of `fit` as a `Checkpoints`, made from a path if needed."""
    if given is None or isinstance(given, Checkpoints):
        return given
    if isinstance(given, str | os.PathLike):
        return Checkpoints(given)
    raise InvalidTypeError(
        f"checkpoints must be a folder or a Checkpoints, got {given!r}",
        fix='checkpoints="run", or checkpoints=tpukit.Checkpoints("run", save_every="5m")',
    )


def as_early_stopping(given: object) -> EarlyStopping:
    """Return the argument `early_stopping` of `fit` as an `EarlyStopping`."""
    if given is None:
        return EarlyStopping()
    if isinstance(given, EarlyStopping):
        return given
    # True would count as the number 1.
    if isinstance(given, Integral) and not isinstance(given, bool):
        return EarlyStopping(patience=given)
    raise InvalidTypeError(
        f"early_stopping must be a number of epochs or an EarlyStopping, got {given!r}",
        fix="early_stopping=3, or early_stopping=tpukit.EarlyStopping(restore_best_weights=True)",
    )


def as_fit_options(given: object) -> FitOptions:
    """Return the argument `options` of `fit`, or the defaults."""
    if given is None:
        return FitOptions()
    if isinstance(given, FitOptions):
        return given
    raise InvalidTypeError(
        f"options must be a FitOptions, got a {type(given).__name__}",
        fix="options=tpukit.FitOptions(log_every=10)",
    )


def absolute(folder: str | os.PathLike) -> Path:
    """Return a folder's absolute path, with `~` as the home folder."""
    return Path(folder).expanduser().absolute()


def _check_folder(folder: object) -> None:
    if not isinstance(folder, str | os.PathLike):
        raise InvalidTypeError(
            f"folder must be a path, got {folder!r}",
            fix='Checkpoints("run"); to save nothing: fit(..., checkpoints=None)',
        )
    # As a path, "gs://bucket" would create folders "gs:" and "bucket" here, and the checkpoints
    # would be lost with this machine.
    if "://" in os.fspath(folder):
        raise InvalidValueError(
            f"folder must be a path on this machine, got {os.fspath(folder)!r}",
            fix=f'Checkpoints("run", backup_dir={os.fspath(folder)!r})',
        )
