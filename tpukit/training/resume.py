"""Save and load the state of a run, and stop a run before its time limit.

`RunState` has the parts of a run by name: model, optimizer, scheduler, data, history and so on. All
cores have the same state after every step. So only core 0 saves a checkpoint, with the
`state_dict()` of each part. Every core loads it:

    {"model": ..., "optimizer": ..., "scheduler": None, ..., "progress": {"step": 120, ...},
     "kinds": {"optimizer": "Adam of 62 parameters", "scheduler": None},
     "built": {"optimizer": [{"lr": 0.1}], "scheduler": {}}, "seed": 0}

`TimeLimit` decides when a run has to stop, so that its last checkpoint is complete in time.
"""

import contextlib
import math
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tpukit.essentials.data import Batches
from tpukit.essentials.display import InvalidValueError, PathNotFoundError, explain
from tpukit.essentials.launcher import STEP_SECONDS, Core
from tpukit.profiling import parse_duration
from tpukit.training.backup import Backup
from tpukit.training.built_with import (
    changed_settings,
    check_scheduler,
    follow_own_function,
    values_as_built,
)
from tpukit.training.checkpoints import Checkpoint, CheckpointStore, one_run
from tpukit.training.fit_options import Checkpoints

# Time for the backup's last copy after an error or an interrupt. The launcher gives core 0 eight
# seconds for everything before it kills the process.
_ENDING_SECONDS = 2.0
_LINES_OF_AN_ERROR = 3  # of torch's error that a message shows


@dataclass
class Progress:
    """The position in a run, saved in every checkpoint.

    Attributes:
        samples_per_step: number of samples of all cores together in one optimizer step.
        steps_per_epoch: number of optimizer steps in an epoch.
        step: number of optimizer steps done in the run.
        epoch: the current epoch, from 1.
        in_epoch: number of optimizer steps done in the current epoch.
        call: number of earlier calls of `fit` in the launch; each call has its own random numbers.
    """

    samples_per_step: int
    steps_per_epoch: int
    step: int = 0
    epoch: int = 1
    in_epoch: int = 0
    call: int = 0

    @property
    def seed_words(self) -> tuple[int, ...]:
        """The numbers that seed the random numbers of the next step."""
        return (self.step, self.call) if self.call else (self.step,)

    def state_dict(self) -> dict:
        """Return the attributes by name, for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict) -> None:
        """Continue at the sample where a state was saved.

        The number of cores and the batch size may differ from those of the saved run. So the steps
        done in the epoch are computed from the number of samples done.
        """
        samples = state["in_epoch"] * state["samples_per_step"]
        self.step = state["step"]
        self.epoch = state["epoch"]
        self.call = state.get("call", 0)
        self.in_epoch = min(self.steps_per_epoch, samples // self.samples_per_step)


@dataclass(frozen=True)
class HeldOutData:
    """The identity of the validation data, which must be the same in a resumed run."""

    batches: Batches

    def state_dict(self) -> dict:
        """Return the identity of the dataset, for a checkpoint."""
        return self.batches.identity()

    def load_state_dict(self, state: dict) -> None:
        """Raise ValueError if the state belongs to another dataset."""
        self.batches.check_identity(state, kind="dataset for evaluation")


class RunState:
    """Saves and loads the parts of a run. Core 0 saves, and every core loads.

    Args:
        core: this core.
        parts: by name, objects with `state_dict` and `load_state_dict`; None for a part that this
            run does not have. The names "optimizer" and "scheduler" are required.
        checkpoints: the `Checkpoints` of `fit`; None: nothing is saved.
    """

    def __init__(self, core: Core, parts: Mapping[str, object], checkpoints: Checkpoints | None):
        self._core = core
        self._parts = parts
        self._options = checkpoints
        self._store: CheckpointStore | None = None
        self._backup: Backup | None = None  # on core 0 only
        self._kinds = {name: _kind(parts[name]) for name in ("optimizer", "scheduler")}
        self._built = values_as_built(parts["optimizer"], parts["scheduler"])
        self._saved = time.monotonic()
        self._sigterm_seen: float | None = None
        if checkpoints is None:
            return
        self._save_every = parse_duration(checkpoints.save_every)
        callbacks = {}
        if self.has_backup and core.is_main:
            self._backup = Backup(checkpoints.backup_dir, say=core.print, alive=self._stay_alive)
            callbacks = {"on_saved": self._backup.offer}
        self._store = CheckpointStore(checkpoints.folder, checkpoints.keep_last, **callbacks)

    @property
    def has_backup(self) -> bool:
        """Whether `fit` has a backup folder."""
        return self._options is not None and self._options.backup_dir is not None

    @property
    def is_kept(self) -> bool:
        """Whether checkpoints are saved."""
        return self._store is not None

    @property
    def copy_seconds(self) -> float:
        """Seconds of the longest copy to the backup so far; 0 on all cores but core 0."""
        return self._backup.seconds if self._backup else 0.0

    @property
    def newest_name(self) -> str | None:
        """The file name of the newest complete checkpoint; None if there is none."""
        paths = self._store.paths if self._store else []
        return paths[-1].name if paths else None

    @property
    def is_due(self) -> bool:
        """Whether the last save was `save_every` ago or longer."""
        return self.is_kept and time.monotonic() - self._saved >= self._save_every

    def save(self, step: int, *, best: bool = False) -> None:
        """Copy the state of every part, and let core 0 write it while training continues.

        Raises:
            CheckpointError: the previous save failed.
        """
        if not self.is_kept:
            return
        if self._core.is_main:
            self.close()  # wait for the last save first, so that memory has only one copy at a time
            state = {}
            for name, part in self._parts.items():
                state[name] = None if part is None else part.state_dict()
            state |= {"kinds": self._kinds, "built": self._built}
            state["seed"] = self._core.internal.seed_of_launch
            self._store.save(
                self._core.internal.snapshot(_without_numpy(state)), step=step, best=best
            )
        self._saved = time.monotonic()

    def save_best(self, model, *, in_memory: bool = False) -> None:
        """Write a model's weights to `best.pt`. Collective.

        Args:
            model: the model, or a `PlainNames` of it.
            in_memory: keep a copy in host memory if no checkpoints are saved.
        """
        if self.is_kept:
            self._core.save(model.state_dict(), self._store.folder / "best.pt")
        elif in_memory:
            self._best = self._core.internal.snapshot(model.state_dict())

    def best_weights(self, epoch: int) -> dict:
        """Return the weights of the last `save_best`, in host memory.

        Args:
            epoch: the number of the best epoch, which the error names.

        Raises:
            FileNotFoundError: best.pt is missing, because this run was resumed without this file.
        """
        import torch

        if not self.is_kept:
            return self._best
        path = self._store.folder / "best.pt"
        if not path.is_file():
            raise PathNotFoundError(
                f"{path} is missing, and it has the weights of the best epoch, epoch {epoch}",
                fix="put this file back into the folder; or train on with the last weights: "
                "EarlyStopping(restore_best_weights=False)",
            )
        return torch.load(path, map_location="cpu", weights_only=True)

    def close(self) -> None:
        """Wait until the last save is complete."""
        if self.is_kept and self._core.is_main:
            self._store.close()

    def _stay_alive(self) -> None:
        # Core 0 waits for the backup. Count an activity, so that the watchdog reports no hang.
        self._core.internal.activity.count += 1

    def load(self) -> str | None:
        """Load the newest complete checkpoint of the folder or the backup into the parts.

        Returns:
            the name of the checkpoint's file; None if there is no complete checkpoint.

        Raises:
            ValueError: there is a checkpoint although `resume` is False; or the checkpoint belongs
                to another architecture, optimizer, scheduler or dataset.
            OSError: the folder has no complete checkpoint, and the backup cannot be read; or a file
                from the backup cannot be written to the folder.
        """
        if not self.is_kept:
            return None
        if self.has_backup:
            if self._backup:
                self._backup.take(self._store, resume=self._options.resume)
            self._core.barrier()  # before any core looks for the newest checkpoint
        report = self._core.print if self._core.is_main else lambda line: None
        checkpoint = self._store.newest(say=report)
        if checkpoint is None:
            return None
        if not self._options.resume:
            raise InvalidValueError(
                f"resume=False, and {self._store.folder} holds checkpoints "
                f"up to step {checkpoint.step}",
                fix="another folder, or remove this one; resume=True continues from the checkpoint",
            )
        self._load_parts(checkpoint)
        if self._backup:  # an interrupted run may have saved it without copying it to the backup
            self._backup.offer(checkpoint.path)
        return checkpoint.path.name

    def _load_parts(self, checkpoint: Checkpoint) -> None:
        # Without `seed=`, this launch has drawn another seed than the launch that saved.
        self._core.internal.seed_of_launch = checkpoint.state["seed"]
        for name in self._kinds:
            self._check_kind(name, checkpoint)
        # Checkpoints of early versions have no "built": nothing is compared.
        built = checkpoint.state.get("built", self._built)
        check_scheduler(
            built["scheduler"],
            self._built["scheduler"],
            kind=type(self._parts["scheduler"]).__name__,
            path=checkpoint.path,
        )
        changed = changed_settings(built["optimizer"], self._built["optimizer"])
        self._built = built
        # In the order of the parts: the optimizer's mode is set before the weights are loaded.
        for name in self._parts:
            self._load_part(name, checkpoint)
        # The optimizer's state is whole and on the host: the backend sends each part to its chip.
        self._core.backend.place_state(self._parts["optimizer"])
        follow_own_function(self._parts["scheduler"])
        if changed:
            self._core.print(
                f"the checkpoint's {changed}: a resumed run keeps the settings of its first start; "
                "to use other settings, give a new folder, and load the weights of best.pt or of a "
                "checkpoint into the model"
            )

    def _load_part(self, name: str, checkpoint: Checkpoint) -> None:
        part = self._parts[name]
        if part is None or checkpoint.state.get(name) is None:
            return
        try:
            part.load_state_dict(checkpoint.state[name])
        except RuntimeError as error:
            # A module raises RuntimeError, with a list of missing, unknown and misshapen tensors.
            raise ValueError(_other_architecture(checkpoint.path, name, error)) from error

    def _check_kind(self, name: str, checkpoint: Checkpoint) -> None:
        """Raise if a checkpoint has another kind of optimizer or scheduler than this run.

        Loading its state would raise an error in the next step, or mix two states.

        Args:
            name: "optimizer" or "scheduler".
            checkpoint: the checkpoint.
        """
        saved = checkpoint.state["kinds"].get(name)
        here = self._kinds.get(name)
        if saved != here:
            # If the model differs as well, raise the model's error: the other follows from it.
            self._load_part("model", checkpoint)
            raise InvalidValueError(
                f"{checkpoint.path} was saved with another {name}",
                found=f"{saved}; this run has {here}",
                fix=(
                    f"build the {name} as it was when the checkpoint was saved, or give this run "
                    "another folder"
                ),
            )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder in the block; at its end, wait for the last save. Collective.

        Raises:
            CheckpointError: another run uses the folder, or the last save failed.
        """
        if not self.is_kept:
            yield
            return
        # Only core 0 writes, so only core 0 needs the lock.
        lock = contextlib.nullcontext()
        if self._core.is_main:
            lock = one_run(self._store.folder, say=self._core.print)
        with lock:
            # No core may read the newest checkpoint before core 0 has the lock: until then, the run
            # before may still be writing it.
            self._core.barrier()
            try:
                yield
            except BaseException:
                with contextlib.suppress(Exception):  # report the first error, not this one
                    self.close()
                if self._backup:
                    self._backup.close(_ENDING_SECONDS)
                raise
            self.close()
            if self._backup:
                self._backup.close()
        self._core.barrier()  # so that no core begins another run in this folder too early

    def must_end(self) -> bool:
        """Return whether this core must end now, because SIGTERM has arrived.

        If checkpoints are saved, core 0 first finishes its step, and needs the other cores for it.
        Therefore, the other cores continue for `STEP_SECONDS` after SIGTERM.
        """
        if not self._core.internal.end_requested:
            return False
        if self._core.is_main or not self.is_kept or self._core.internal.stops_together:
            return True
        self._sigterm_seen = self._sigterm_seen or time.monotonic()
        return time.monotonic() >= self._sigterm_seen + STEP_SECONDS


def _kind(part: object) -> str | None:
    """Return an optimizer's or a scheduler's class and group sizes: "Adam of 2 + 2 parameters"."""
    if part is None:
        return None
    sizes = [str(len(group["params"])) for group in getattr(part, "param_groups", [])]
    if not sizes:
        return type(part).__name__
    return f"{type(part).__name__} of {' + '.join(sizes)} parameters"


def _without_numpy(state: dict) -> dict:
    """Return a state with Python numbers in place of NumPy numbers.

    `torch.load(weights_only=True)` does not load NumPy numbers.
    """
    import numpy
    from torch.utils import _pytree as tree

    def plain(leaf: object) -> object:
        return leaf.item() if isinstance(leaf, numpy.generic) else leaf

    return tree.tree_map(plain, state)


def _other_architecture(path: Path, name: str, error: RuntimeError) -> str:
    """Return a message with the first lines of torch's error for a module."""
    _, *lines = str(error).splitlines()  # the first line is only a heading
    lines = lines or [str(error)]
    shown = [textwrap.shorten(line, 200, placeholder=" ...") for line in lines]
    left_out = len(shown) - _LINES_OF_AN_ERROR
    shown = shown[:_LINES_OF_AN_ERROR]
    if left_out > 0:
        shown.append(f"and {left_out} more lines, in the error above")
    return explain(
        f"{path} holds another architecture than the {name}",
        found="\n         ".join(shown),
        fix=f"build the {name} as it was when the checkpoint was saved, or give this run another "
        "folder",
    )


class TimeLimit:
    """Decides when a run must stop, so that an interval, an evaluation and a save still fit.

    The clocks of the cores differ. If one core stopped alone, the others would wait for it. So each
    core sets a flag when its time is up. The flags are averaged over the cores, as the loss is, and
    all cores read the means at the same log point. Core 0 sets a second flag when a checkpoint is
    due. All cores need this flag, because they compare their states before a checkpoint.

                     core 0    core 1    mean, on both cores
        time is up   0         1         0.5: both stop at this log point
        save is due  1         0         0.5: both compare their states, and core 0 saves

    Args:
        core: this core.
        seconds: the limit, counted from now; `math.inf` for no limit.

    Attributes:
        flags: two float32 tensors on the device, (), each 0 or 1: whether time is up, and whether a
            save is due. They are not one tensor, because the backend of a sharded model would
            divide a tensor of two numbers over the chips, as if it were a batch.
    """

    def __init__(self, core: Core, seconds: float = math.inf):
        import torch

        self._core = core
        self._seconds = seconds
        self._began = time.monotonic()
        self._longest = {"interval": 0.0, "evaluation": 0.0, "save": 0.0}  # seconds
        self._time_is_up = False
        self._sent = (False, False)
        self.flags = tuple(core.to_device([torch.zeros(()), torch.zeros(())]))

    def record(self, what: str, seconds: float) -> None:
        """Record the duration of an "interval", "evaluation" or "save".

        `update` reserves time for the longest interval, evaluation and save so far.
        """
        self._longest[what] = max(self._longest[what], seconds)

    def update(self, *, save_is_due: bool) -> None:
        """Set the flags: is time nearly up, and is a save due? Call this before each step."""
        # Reserve a quarter more than the longest interval so far: the flags are read at the end of
        # the current interval, which may take longer.
        interval = 1.25 * self._longest["interval"]
        needed = interval + self._longest["evaluation"] + self._longest["save"]
        passed = time.monotonic() - self._began
        self._time_is_up = self._time_is_up or passed + needed > self._seconds
        flags = (self._time_is_up, save_is_due)
        if flags == self._sent:
            return
        import torch

        # Send new tensors to the device. `fill_(1)` would make the 1 a constant of the graph, and
        # the step would compile again.
        self.flags = tuple(self._core.to_device([torch.tensor(float(flag)) for flag in flags]))
        self._sent = flags
