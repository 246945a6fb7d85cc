"""What makes a run survive: its state saved and loaded, a time limit, a last checkpoint on SIGTERM."""

import contextlib
import math
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tpukit.essentials.display import InvalidValueError, explain
from tpukit.essentials.launcher import STEP_SECONDS, Core
from tpukit.profiling import parse_duration
from tpukit.training.backup import Backup
from tpukit.training.checkpoints import Checkpoint, CheckpointStore, one_run
from tpukit.training.fit_options import Checkpoints
from tpukit.training.losses import DUE

_ENDING_SECONDS = 2.0  # for the backup of a run that failed or was interrupted: core 0 is given eight in all


@dataclass
class Progress:
    """How far a run has come, saved in every checkpoint.

    Attributes:
        samples_per_step: of all cores together, in one optimiser step.
        steps_per_epoch: optimiser steps of an epoch.
        step: optimiser steps done.
        epoch: the epoch under way, from 1.
        in_epoch: optimiser steps of that epoch done.
    """

    samples_per_step: int
    steps_per_epoch: int
    step: int = 0
    epoch: int = 1
    in_epoch: int = 0

    def state_dict(self) -> dict:
        """Return the numbers by name."""
        return asdict(self)

    def load_state_dict(self, state: dict) -> None:
        """Continue where a state was saved, by samples: other cores or batch sizes make other steps of an epoch."""
        samples = state["in_epoch"] * state["samples_per_step"]
        self.step, self.epoch = state["step"], state["epoch"]
        self.in_epoch = min(self.steps_per_epoch, samples // self.samples_per_step)


class RunState:
    """The parts of a run that its checkpoints hold; without a folder nothing is saved.

    Every core loads, and core 0 saves: all hold the same state after every step.

    Args:
        core: this core.
        parts: by name, whatever has `state_dict` and `load_state_dict`; None for a part that this run does not have.
            "optimizer" and "scheduler" are among them.
        checkpoints: as `fit` gets them; None: nothing is saved.
    """

    def __init__(self, core: Core, parts: Mapping[str, object], checkpoints: Checkpoints | None):
        self._core = core
        self._parts = parts
        self._options = checkpoints
        self._store: CheckpointStore | None = None
        self._backup: Backup | None = None  # on core 0
        self._kinds = {name: _kind(parts[name]) for name in ("optimizer", "scheduler")}
        self._saved = time.monotonic()
        self._sigterm_seen: float | None = None
        if checkpoints is None:
            return
        self._save_every = parse_duration(checkpoints.save_every)
        if self.has_backup and core.is_main:
            self._backup = Backup(checkpoints.backup_dir, say=core.print, alive=self._stay_alive)
        on_saved = {"on_saved": self._backup.offer} if self._backup else {}
        self._store = CheckpointStore(checkpoints.folder, checkpoints.keep_last, **on_saved)

    @property
    def has_backup(self) -> bool:
        """Whether there is a second folder, which outlives the machine."""
        return self._options is not None and self._options.backup_dir is not None

    @property
    def is_kept(self) -> bool:
        """Whether there is a folder to save in."""
        return self._store is not None

    @property
    def copy_seconds(self) -> float:
        """How long the longest copy to the backup took, on core 0."""
        return self._backup.seconds if self._backup else 0.0

    @property
    def newest_name(self) -> str | None:
        """The name of the newest complete checkpoint."""
        paths = self._store.paths if self._store else []
        return paths[-1].name if paths else None

    @property
    def is_due(self) -> bool:
        """Whether the last save was `save_every` seconds ago or more."""
        return self.is_kept and time.monotonic() - self._saved >= self._save_every

    def save(self, step: int, *, best: bool = False) -> None:
        """Save a copy of every part, from core 0, as `CheckpointStore.save` does: written while training continues."""
        if not self.is_kept:
            return
        if self._core.is_main:
            self.close()  # before the copy is made, so that there is one at a time
            state = {name: part.state_dict() if part is not None else None for name, part in self._parts.items()}
            state |= {"kinds": self._kinds, "seed": self._core.seed_of_launch}
            self._store.save(self._core.snapshot(_without_numpy(state)), step=step, best=best)
        self._saved = time.monotonic()

    def save_best(self, model, *, in_memory: bool = False) -> None:
        """Write the weights of a model to `best.pt` in the folder, together; without a folder keep them, if wanted."""
        if self.is_kept:
            self._core.save(model.state_dict(), self._store.folder / "best.pt")
        elif in_memory:
            self._best = self._core.snapshot(model.state_dict())

    def best_weights(self) -> dict:
        """Return the weights that `save_best` was last called with, in host memory."""
        import torch

        if not self.is_kept:
            return self._best
        return torch.load(self._store.folder / "best.pt", map_location="cpu", weights_only=True)

    def close(self) -> None:
        """Wait until the last save is complete."""
        if self.is_kept and self._core.is_main:
            self._store.close()

    def _stay_alive(self) -> None:
        self._core.activity += 1  # the other cores wait, and the watchdog is not to call this one stuck

    def load(self) -> str | None:
        """Load the newest whole checkpoint into the parts; return its name, or None where there is none.

        Raises:
            ValueError: there is one and `resume` is False, or it is of another architecture, optimiser or dataset.
        """
        if self.has_backup:
            if self._backup:
                self._backup.take(self._store, resume=self._options.resume)
            self._core.barrier()  # before any core looks for the newest checkpoint
        report = self._core.print if self._core.is_main else lambda line: None
        checkpoint = self._store.newest(say=report) if self._store else None
        if checkpoint is None:
            return None
        if not self._options.resume:
            raise InvalidValueError(
                f"resume=False, and {self._store.folder} holds checkpoints of step {checkpoint.step}",
                fix="another folder, or remove that one; resume=True continues from there",
            )
        # Of another kernel, whose generator nobody seeded, the seed is another one.
        self._core.seed_of_launch = checkpoint.state["seed"]
        before = _settings(self._parts["optimizer"])
        for name, part in self._parts.items():
            if part is None or checkpoint.state.get(name) is None:
                continue
            self._check_kind(name, checkpoint)
            try:
                part.load_state_dict(checkpoint.state[name])
            except RuntimeError as error:  # torch's, of a module: every missing, unknown and misshapen tensor
                raise ValueError(_other_architecture(checkpoint.path, name, error)) from error
        self._core.backend.place_state(self._parts["optimizer"])  # what was loaded is whole, and not yet sent
        if changed := _changed(before, _settings(self._parts["optimizer"])):
            self._core.print(
                f"the checkpoint's {changed}: a resumed run goes on with the settings it began with; for others give a "
                "new folder, and load best.pt or the model of a checkpoint into the model"
            )
        if self._backup:  # which an interrupt may have left behind
            self._backup.offer(checkpoint.path)
        return checkpoint.path.name

    def _check_kind(self, name: str, checkpoint: Checkpoint) -> None:
        """Raise where the state is of another optimizer or scheduler: it would fail in the next step, or mix."""
        saved, here = checkpoint.state["kinds"].get(name), self._kinds.get(name)
        if saved != here:
            raise InvalidValueError(
                f"{checkpoint.path} is of another {name}",
                found=f"{saved}; this run has {here}",
                fix=f"make the {name} as it was when that was saved, or give this run a folder of its own",
            )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep other runs out of the folder; wait, together, until the last save is complete.

        Raises:
            CheckpointError: another run holds the folder, or the last save failed.
        """
        if not self.is_kept:
            yield
            return
        folder, say = self._store.folder, self._core.print
        with one_run(folder, say=say) if self._core.is_main else contextlib.nullcontext():
            self._core.barrier()  # before any core looks for the newest checkpoint: that of the last run is complete
            try:
                yield
            except BaseException:
                with contextlib.suppress(Exception):  # the first error is the one to tell
                    self.close()
                if self._backup:
                    self._backup.close(_ENDING_SECONDS)
                raise
            self.close()
            if self._backup:
                self._backup.close()
        self._core.barrier()  # so that no core begins another run in this folder before

    def must_end(self) -> bool:
        """Return whether SIGTERM has arrived, from the platform or an interrupt, and this core is to leave now.

        With checkpoints the other cores continue for `STEP_SECONDS`: core 0 may be within a step, which needs all of
        them, and has to end it before it can save.
        """
        if not self._core.end_requested:
            return False
        if self._core.is_main or not self.is_kept:
            return True
        self._sigterm_seen = self._sigterm_seen or time.monotonic()
        return time.monotonic() >= self._sigterm_seen + STEP_SECONDS


def _kind(part: object) -> str | None:
    if part is None:
        return None
    sizes = [len(group["params"]) for group in getattr(part, "param_groups", [])]
    return type(part).__name__ + (f" of {' + '.join(map(str, sizes))} parameters" if sizes else "")


def _settings(optimizer) -> list[dict]:
    """Return the settings of each parameter group; of a learning rate that a schedule changes, the first."""
    groups = [{**group, "lr": group.get("initial_lr", group["lr"])} for group in optimizer.param_groups]
    kinds = bool | int | float | tuple
    return [{name: value for name, value in group.items() if isinstance(value, kinds)} for group in groups]


def _changed(given: list[dict], used: list[dict]) -> str:
    """Say which settings are used in place of those given: `lr 0.1 is used, not 0.01`; empty where all are the same."""
    pairs = [
        f"{name} {after[name]} is used, not {value}"
        for before, after in zip(given, used, strict=True)
        for name, value in before.items()
        if name != "initial_lr" and name in after and after[name] != value
    ]
    return "; ".join(dict.fromkeys(pairs))


def _without_numpy(state: dict) -> dict:
    """Return a state with Python's numbers for numpy's, which `torch.load(weights_only=True)` would refuse."""
    import numpy
    from torch.utils import _pytree as tree

    return tree.tree_map(lambda leaf: leaf.item() if isinstance(leaf, numpy.generic) else leaf, state)


def _other_architecture(path: Path, name: str, error: RuntimeError) -> str:
    _, *lines = str(error).splitlines()  # the first only announces them
    lines = [textwrap.shorten(line, 200, placeholder=" ...") for line in lines or [str(error)]]
    more = [f"and {len(lines) - 3} more lines, in the error above"] if len(lines) > 3 else []
    found = "\n         ".join([*lines[:3], *more])
    return explain(
        f"{path} is of another architecture than the {name}",
        found=found,
        fix=f"make the {name} as it was when that was saved, or give this run a folder of its own",
    )


class TimeLimit:
    """When a run has to stop, so that one more log interval, an evaluation and a save still fit into its time.

    The cores do not see the same time, and a core that stopped alone would leave the others waiting for it. So a core
    only raises its `flag`; the flags are averaged with the loss, and all cores read that mean at the same log point.
    The clock of core 0 says in the same way when a checkpoint is due: before it all cores compare what they hold.

    Args:
        seconds: counted from here; `math.inf` for no limit.
    """

    def __init__(self, core: Core, seconds: float = math.inf):
        import torch

        self._core, self._seconds, self._began = core, seconds, time.monotonic()
        self._longest = {"interval": 0.0, "evaluation": 0.0, "save": 0.0}  # seconds
        (self.flag,), self._raised, self._sent = core.to_device([torch.zeros(())]), False, 0.0

    def record(self, what: str, seconds: float) -> None:
        """Note how long a log interval, an evaluation or a save took; the longest of each is kept in reserve."""
        self._longest[what] = max(self._longest[what], seconds)

    def update(self, *, save_is_due: bool) -> None:
        """Raise the flag if the time is nearly up, or a checkpoint is due; call it before every step."""
        # A quarter more than the longest interval so far: the flag is read at its end, and the next may be longer.
        needed = 1.25 * self._longest["interval"] + self._longest["evaluation"] + self._longest["save"]
        self._raised = self._raised or time.monotonic() - self._began + needed > self._seconds
        number = float(self._raised) + DUE * save_is_due
        if number != self._sent:
            import torch

            # A number that is sent to the device, not `flag.fill_(1)`: one in the code is a constant of the graph, and
            # the step would compile again.
            (self.flag,), self._sent = self._core.to_device([torch.tensor(number)]), number
