"""The same on every core, or said: what may not differ between the cores, compared in one small message.

Cores that train different networks end as well as others do. So each makes a checksum of what has to be the same, by
name, and one number for each group of them travels: a message of one size, and on a TPU one tiny graph, whatever the
model. Only where a group differs do the names and values of all cores follow, for the error.
"""

import contextlib
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from tpukit.essentials.backends import BackendMismatchError
from tpukit.essentials.display import Failed, InvalidValueError, first_few
from tpukit.essentials.environment import runtime_started
from tpukit.essentials.launcher.core_values import (
    called_text,
    gradient_checksum,
    held_tensors,
    lazy_parameters,
    parameters_of,
    settings,
    structure,
    trains,
    versions,
)
from tpukit.essentials.launcher.difference import GROUPS, OutOfSyncError, difference
from tpukit.essentials.launcher.objects import gather_objects

_ALONE = "each process of a rehearsal on plain CPU processes is alone with it"
_MOST_MADE = 20  # batches whose layouts are compared at the end
_EARLY, _SELDOM = 64, 100  # steps: until there after each power of two, then after so many, at the end of an epoch


class Same:
    """What one core compares with the others, and what it remembers for that.

    A loop of the user's own is followed by the steps of its optimizers; `fit` compares at moments of its own.

    Attributes:
        due: what the comparison that the end of this step makes is called; None for none.
    """

    def __init__(self, core):
        self._core = core
        self._models: list[weakref.ref] = []  # from core.model, all of them, for their names
        self._may_differ: list[str] = []
        self._batches: list[weakref.ref] = []
        self._was_started = runtime_started()  # by the kernel, before the fork
        self._others = weakref.WeakSet()  # optimizers of nothing that came from core.model
        self._in_own_step = False
        self.forget()

    def forget(self) -> None:
        """Let go of a loop of the user's own: another begins, or `fit`, which compares at moments of its own."""
        self._new: list[weakref.ref] = []  # from core.model, since the last loop
        self._steps: dict[object, int] = {}  # of the loop that runs, by optimizer
        self._trained: list = []
        self._made: list[dict] = []  # how batches lay out their datasets: short, and there when the batches are gone
        self._data: Mapping[str, object] = {}
        self._passed: dict[str, str] = {}  # by group, the last check
        self._gradients: list[int] = []  # the first that this core had, before they were averaged
        self._versions: list[list[int]] = []  # of all optimizers' parameters, after the last step
        self._unwatched = 0  # ends of steps until a model that no optimizer steps is looked at
        self.due: str | None = None

    @property
    def is_on(self) -> bool:
        """Whether there is something to compare with; what only records programs has no results."""
        return self._core.world_size > 1 and not self._core.backend.is_recording

    def begin_model(self, module) -> None:
        """Compare what the cores bring to `core.model`, together, before the first weight travels."""
        if self._steps:
            self.forget()  # of a loop that is over: another begins
        if self.is_on and (lazy := lazy_parameters(module)):
            raise InvalidValueError(
                "core.model gives every core rank 0's weights, and a lazy layer has none yet",
                found=f"{first_few(lazy, 3)} of {type(module).__name__}",
                fix="call the model once before, as model(next(iter(loader))[0]) in the notebook, or give the sizes",
            )
        self.compare("in core.model", modules={"": module}, tensors=False)

    def add_model(self, module, differs: Iterable[str]) -> None:
        """Note a module that came from `core.model`, and which of its tensors may differ."""
        self._may_differ += differs
        self._models = [*_alive(self._models), weakref.ref(module)]
        self._new.append(self._models[-1])
        self._unwatched = 2

    def add_batches(self, batches):
        """Note batches that this core made, and return them."""
        self._batches = [*_alive(self._batches), weakref.ref(batches)]
        self._made = [*self._made[-_MOST_MADE:], batches.layout]
        return batches

    def names_of(self, parameters: list) -> list[str]:
        """Return the names that parameters have in the modules from `core.model`; of others their shapes."""
        named = [pair for one in _alive(self._models) for pair in one().named_parameters()]
        names = {id(one): name for name, one in named}
        return [names.get(id(one), f"a parameter of {tuple(one.shape)}") for one in parameters]

    def before_average(self, optimizer) -> None:
        """Follow an optimizer whose gradients are about to be averaged; look at the first where that costs nothing."""
        if self._watches() and optimizer not in self._steps:
            self._steps[optimizer] = 0
            if self._core.device.type == "cpu" and (mine := gradient_checksum(self._core, optimizer)) is not None:
                self._gradients.append(mine)

    @contextlib.contextmanager
    def own_step(self) -> Iterator[None]:
        """Say that `core.optimizer_step` steps: an optimizer may hold another, whose gradients have been averaged."""
        self._in_own_step = True
        try:
            yield
        finally:
            self._in_own_step = False

    def before_step(self, optimizer, *, closure: object = None) -> None:
        """Look at the first step of an optimizer that did not come through `core.optimizer_step`, before it is made.

        One that has a closure has its gradients only within: a comparison after it is the first look.
        """
        if not self._watches() or optimizer in self._steps or optimizer in self._others:
            return
        if not self._in_own_step:
            self._refuse_alone(optimizer)
            if not any(trains(optimizer, one()) for one in _alive(self._models)):
                self._others.add(optimizer)  # which may step on one core alone
                return
            if closure is None:
                self._refuse_plain_step(optimizer)
        self._steps[optimizer] = 0

    def after_step(self, optimizer) -> None:
        """Count the step; after the first ones, and then after each epoch, the end of the step compares."""
        if not self._watches() or optimizer not in self._steps:
            return
        steps = self._steps[optimizer] = self._steps[optimizer] + 1
        self._versions = [versions(one) for one in self._steps]
        self._unwatched = 0
        if steps == 1:
            self._trained = [one() for one in _alive(self._models) if one in self._new or self._is_trained(one())]
            drawn = [batches() for batches in _alive(self._batches) if batches().drawn]
            self._data = max(drawn, key=lambda one: one.drawn).facts() if drawn else {}
        # By steps, which all cores count alike: that they have as many in an epoch is compared after the first.
        epoch = self._data.get("steps", 1)
        early = steps <= _EARLY and steps & (steps - 1) == 0
        if early or steps % (-(-_SELDOM // epoch) * epoch) == 0:
            self.due = "after the first step" if steps == 1 else f"after step {steps}"
            if not self._core.open_steps and not self._core.backend.traced:
                self.end_of_step()

    def end_of_step(self) -> None:
        """Make the comparison that is due, together."""
        when, self.due = self.due, None
        if when is not None:
            self.compare_loop(when)
            mine, self._gradients = self._gradients, []
            # Whether to ask is the same on every core, where reading gradients costs nothing.
            if when == "after the first step" and self._core.device.type == "cpu":
                everyone = gather_objects(self._core, mine)
                if mine and all(one == mine for one in everyone):
                    self._core.print(
                        "all cores have the same gradients, so the same batches: each does the work of one. "
                        "core.batches(dataset, batch_size=...) gives each core a share of its own"
                    )
        elif self._unwatched and self._watches():
            self._unwatched -= 1
            if not self._unwatched:  # a loop that has no optimizer changes its weights by itself
                self._trained = [one() for one in _alive(self._new)]
                self.compare_loop("after the second step")
                self._trained = []

    def compare_loop(self, when: str) -> None:
        """Compare what a loop of the user's own trains, together: float buffers are each core's until averaged."""
        if self._steps or self._trained:
            modules, optimizers = self._loop()
            self.compare(when, modules=modules, optimizers=optimizers, data=self._data, averaged=False)

    def at_end(self) -> dict[str, dict] | None:
        """Return what a loop of the user's own holds, for `apart`; None without one, or where it was changed since.

        The kernel compares it, when all results are there: a core that leaves before the others must not wait for them.
        One core alone may load other weights after the last step, say the best, and look at them.
        """
        self.due = None
        if self.is_on and self._core.device.type != "xla" and runtime_started() and not self._was_started:
            self._core.print(f'torch_xla was used, and {_ALONE}: launch(..., backend="xla") joins them as on chips')
        if not self.is_on or self._versions != [versions(one) for one in self._steps]:
            return None
        modules, optimizers = self._loop()
        found = self._describe(modules, optimizers, data=self._data, averaged=False)
        return found | {"made": self._made}

    def _watches(self) -> bool:
        return self.is_on and not self._core.in_fit

    def _loop(self) -> tuple[dict[str, object], list]:
        return {f"{at}." if at else "": one for at, one in enumerate(self._trained)}, list(self._steps)

    def _is_trained(self, module) -> bool:
        return any(trains(optimizer, module) for optimizer in self._steps)

    def _refuse_alone(self, optimizer) -> None:
        """Raise where torch_xla trains on a device of its own, in a rehearsal on plain CPU processes."""
        devices = {one.device.type for group in optimizer.param_groups for one in group["params"]}
        if "xla" in devices and self._core.device.type != "xla":
            raise Failed(
                f"torch_xla would train on a device of its own, and {_ALONE}",
                found=f"{self._core.world_size} processes, of which torch_xla sees one; weights on an xla device",
                fix='launch(..., backend="xla"), where they are joined as on chips; or core.model and core.batches',
            )

    def _refuse_plain_step(self, optimizer) -> None:
        """Raise where an optimizer steps with gradients that nobody averaged, together; one step of each is looked at.

        A stranger's code may average by itself, as `xm.optimizer_step` does: then all cores have the same gradients.
        """
        if len(set(gather_objects(self._core, gradient_checksum(self._core, optimizer)))) > 1:
            raise OutOfSyncError(
                f"{type(optimizer).__name__}.step() with gradients that differ between the cores: each would train a "
                "model of its own",
                found=f"parameters from core.model, and {self._core.world_size} cores whose gradients nobody averaged",
                fix=(
                    "core.optimizer_step(optimizer) in place of optimizer.step(), which averages first; for networks "
                    "that are meant to be independent tpukit.launch_each"
                ),
            )

    def unlike_gradients(self, optimizer, error: BackendMismatchError) -> Exception:
        """Return the error that names what one core trains and another does not, together; else the one given."""
        trained = [one for one in parameters_of(optimizer) if one.requires_grad or one.grad is not None]
        named = zip(self.names_of(trained), trained, strict=True)
        everyone = gather_objects(
            self._core, {"model": {name: f"{tuple(one.shape)} {one.dtype}" for name, one in named}}
        )
        alike = all(one == everyone[0] for one in everyone)
        return error if alike else difference("in core.optimizer_step", everyone)

    def compare(self, when: str, *, modules: Mapping[str, object], optimizers: Iterable = (), **held: object) -> None:
        """Raise unless what is held is the same on every core, together.

        Args:
            when: the name of this check, for the error.
            modules: by what the names of their tensors begin with.
            optimizers: their settings, and the parameters that are in none of the modules.
            **held: what else; see `_describe`.

        Raises:
            OutOfSyncError: it is not.
            InvalidValueError: a layer would not be joined, see `_refuse_local_layers`.
        """
        if not self.is_on:
            return
        self._unwatched = 0
        found = self._describe(modules, optimizers, **held)
        if not (groups := self._different(found)):
            self._passed |= {group: when for group in GROUPS if found[group]}
            return
        everyone = gather_objects(self._core, {group: found[group] for group in groups})
        ours = {id(one()) for one in _alive(self._models)}
        from_core = any(id(one) in ours for one in modules.values())
        before = self._passed.get(groups[0])
        raise difference(when, everyone, before=before, from_core=from_core)

    def _describe(
        self,
        modules: Mapping[str, object],
        optimizers: Iterable,
        *,
        schedule=None,
        data: Mapping[str, object] = MappingProxyType({}),
        called: Mapping[str, object] = MappingProxyType({}),
        averaged: bool = True,
        layers: bool = True,
        tensors: bool = True,
        **run: object,
    ) -> dict[str, dict]:
        """Return, by group, short values by name: `data` are facts of batches, `called` functions, `run` what else.

        Args:
            averaged: whether float buffers have been averaged, so have to be the same.
            layers: whether the modules' layers have to be, with their settings.
            tensors: whether their weights and buffers have to be.
        """
        found: dict[str, dict] = {group: {} for group in GROUPS}
        found["run"] = {"seed of launch": self._core.seed_of_launch, "cores": self._core.world_size, **run}
        found["run"] |= {name: called_text(one) for name, one in called.items()}
        found["data"], found["settings"] = dict(data), settings(optimizers, schedule)
        for key, module in modules.items() if layers else ():
            found["model"] |= structure(module, key)
        if tensors:
            _refuse_local_layers(modules)
            found |= held_tensors(self._core, modules, optimizers, averaged=averaged, differs=self._may_differ)
        return found

    def _different(self, found: Mapping[str, dict]) -> list[str]:
        import torch

        digests = [zlib.crc32(repr(list(found[group].items())).encode()) for group in GROUPS]
        # Halves, because a TPU compares no 64-bit numbers between its cores, and float32 holds 16 bits exactly.
        halves = torch.tensor([(number >> 16, number & 0xFFFF) for number in digests], dtype=torch.float32)
        (halves,) = self._core.to_device([torch.stack([halves, -halves])])
        with self._core.step():  # or the next step's graph would begin with this collective, and compile again
            largest = self._core.all_reduce(halves, "max")
        (largest,) = self._core.to_host([largest])
        differ = (largest[0] != -largest[1]).any(dim=1).tolist()
        return [group for group, differs in zip(GROUPS, differ, strict=True) if differs]


def apart(everyone: list[dict | None]) -> OutOfSyncError | None:
    """Return the error for what cores held when they returned, by rank; None where it is the same."""
    if None in everyone or len(everyone) < 2 or all(one == everyone[0] for one in everyone):
        return None
    everyone = [{**one, "data": dict(one["data"])} for one in everyone]
    for one in everyone:
        made = one.pop("made")
        if len({len(other.get("made", made)) for other in everyone}) == 1:
            one["data"] |= {
                f"{key}, batches {at + 1}": value for at, it in enumerate(made) for key, value in it.items()
            }
    return difference("when the worker function returned", everyone, before="before")


def _alive(references: list[weakref.ref]) -> list[weakref.ref]:
    return [one for one in references if one() is not None]


def _refuse_local_layers(modules: Mapping) -> None:
    """Raise for layers that average by torch.distributed, where that does not join the cores."""
    import torch

    of = torch.nn.SyncBatchNorm
    parts = [part for one in modules.values() if hasattr(one, "named_modules") for part in one.named_modules()]
    layers = [name for name, part in parts if isinstance(part, of) and type(part).forward is of.forward]
    if layers and not torch.distributed.is_initialized():
        raise InvalidValueError(
            "torch.nn.SyncBatchNorm is joined by torch.distributed, which does not join these cores",
            found=f"{first_few(layers, 3)} takes the statistics of this core's share alone",
            fix="tpukit.training.sync_batchnorm(core, model), which changes it as well",
        )
