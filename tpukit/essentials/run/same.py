"""The same on every core, or said: what may not differ between the cores, compared in one small message.

Cores that train different networks end as well as others do. So each makes a checksum of what has to be the same, by
name, and one number for each group of them travels: a message of one size, and on a TPU one tiny graph, whatever the
model. Only where a group differs do the names and values of all cores follow, for the error.
"""

import fnmatch
import re
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from tpukit.essentials.run.objects import gather_objects
from tpukit.essentials.show import Explained, Failed, WrongValue, first_few

# In the order in which one explains the other: of different data come different weights.
GROUPS = ("run", "data", "model", "settings", "weights", "buffers")
_LEAST_STEPS = 100  # between two comparisons in a loop of one's own: one costs as much as a step or two
_MOST_SHOWN = 5
_FACTS = {
    "run": "the cores do not do the same",
    "data": "the cores have different datasets",
    "model": "the cores hold different models",
    "settings": "the cores' optimizers or schedules have different settings",
    "weights": "the cores hold different weights, and would train different models",
    "buffers": "the cores hold different buffers",
}
_CAUSES = {
    "run": "call it with the same arguments on every core, and give every core the same folder, one that all see",
    "data": (
        "make the dataset in the notebook, or from what all cores draw alike: torch.Generator().manual_seed(0), a "
        "sorted list of files, one seed= for core.batches"
    ),
    "model": "make the model in the notebook, or without what differs by core: random choices, core.rank, the time",
    "settings": (
        "the same numbers on every core: what is drawn at random in the notebook, what a schedule is stepped with as "
        "core.mean(loss)"
    ),
    "buffers": (
        "a float buffer, which is averaged over the cores; or the same change on every core, with "
        'core.all_reduce(counts) before it is added; or core.model(model, differs=["*counts"])'
    ),
}
_UNLIKE = "model = core.model(model), and the same for a loss with parameters: every core gets rank 0's"
_CHANGED = (
    "no weights that forward sets from this core's own batch (start values from the first batch: make them before "
    "core.model;\nEmbedding(max_norm=...): leave it out); core.optimizer_step(optimizer) in every step; and nothing "
    "drawn at random that decides about them"
)


class Differs(Explained, ValueError):
    """Something that may not differ between the cores does; the message names it, the cores, and since when."""


class Same:
    """What one core compares with the others, and what it remembers for that.

    Args:
        core: this core.

    Attributes:
        due: what the comparison that the next end of a step makes is called; None for none.
        optimizer: the last that stepped in a loop of the user's own, with the modules it trains: None after `fit`.
    """

    def __init__(self, core):
        self._core = core
        self._models: list[weakref.ref] = []
        self._batches: list[weakref.ref] = []
        self._steps = weakref.WeakKeyDictionary()  # by optimizer: its steps in a loop of the user's own
        self._seen = weakref.WeakSet()  # optimizers that stepped otherwise, and were looked at
        self._gradients: int | None = None
        self._passed = weakref.WeakKeyDictionary()  # by optimizer: by group the last check that it passed
        self._may_differ: list[str] = []
        self.due: str | None = None
        self.optimizer = None
        self._trained: list = []
        self._data: Mapping[str, object] = {}

    @property
    def is_on(self) -> bool:
        """Whether there is something to compare with; what only records programs has no results."""
        return self._core.world_size > 1 and not self._core.backend.is_recording

    # ---- what is there to compare ------------------------------------------------------------------------------

    def compare_models(self, module) -> None:
        """Compare what the cores bring to `core.model`, together, before the first weight travels."""
        if self.is_on:
            self.release()
            self.compare("in core.model", model=module, only=("run", "model"))

    def add_model(self, module, differs: Iterable[str]) -> None:
        """Note a module that came from `core.model`, and which of its tensors may differ."""
        self._may_differ += differs
        self._models = [one for one in self._models if one() is not None] + [weakref.ref(module)]

    def add_batches(self, batches) -> None:
        """Note batches that this core made."""
        if self.is_on:
            self._batches = [one for one in self._batches if one() is not None] + [weakref.ref(batches)]

    def names_of(self, parameters: list) -> list[str]:
        """Return the names that parameters have in the modules from `core.model`; of others their shapes."""
        models = [model for reference in self._models if (model := reference()) is not None]
        names = {id(one): name for model in models for name, one in model.named_parameters()}
        return [names.get(id(one), f"a parameter of {tuple(one.shape)}") for one in parameters]

    def _modules_of(self, optimizer) -> list:
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        models = [model for reference in self._models if (model := reference()) is not None]
        return [model for model in models if any(id(parameter) in ids for parameter in model.parameters())]

    # ---- a loop of the user's own ------------------------------------------------------------------------------

    def before_step(self, optimizer) -> None:
        """Look at the first gradients of an optimizer, where reading them costs nothing."""
        known = self._steps.setdefault(optimizer, 0)
        if not self.is_on or self._core.in_fit or known or self._core.backend.traced:
            return
        held = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        if self._core.device.type == "cpu" and any(bool(one.any()) for one in held):
            self._gradients = zlib.crc32(repr([checksum(one) for one in held]).encode())

    def after_step(self, optimizer) -> None:
        """Count the step; after the first one, and after each epoch, the next end of a step compares."""
        if not self.is_on or self._core.in_fit:
            return
        done = self._steps[optimizer] = self._steps[optimizer] + 1
        if self.optimizer is not optimizer:
            self.optimizer, self._trained = optimizer, self._modules_of(optimizer)
        if done == 1:
            self.due = "after the first step"
            alive = [batches for one in self._batches if (batches := one()) is not None and batches.drawn]
            newest = max(alive, key=lambda batches: batches.drawn, default=None)
            self._data = {} if newest is None else newest.facts()
        # By steps, which all cores count alike: that they have as many in an epoch is compared after the first.
        elif done % (-(-_LEAST_STEPS // self._epoch()) * self._epoch()) == 0:
            self.due = f"after step {done}"

    def _epoch(self) -> int:
        return self._data.get("steps", 1)

    def compare_if_due(self) -> None:
        """Make the comparison that `after_step` asked for, together."""
        when, self.due = self.due, None
        if when is None or self.optimizer is None:
            return
        self.compare_loop(when)
        # Whether to ask is the same on every core, whatever gradients it has; where reading them costs nothing.
        if when == "after the first step" and self._core.device.type == "cpu":
            mine, self._gradients = self._gradients, None
            sums = set(gather_objects(self._core, mine))
            if len(sums) == 1 and mine is not None:
                self._core.print(
                    "all cores have the same gradients, so the same batches: each does the work of one. "
                    "core.batches(dataset, batch_size=...) gives each core a share of its own"
                )

    def compare_loop(self, when: str) -> None:
        """Compare what a loop of the user's own trains, together: float buffers are each core's until averaged."""
        if not self.is_on or self.optimizer is None:
            return
        self.compare(when, modules=self._loop_modules(), optimizer=self.optimizer, data=self._data, averaged=False)

    def release(self) -> None:
        """Compare what the last optimizer holds, together, and let go of it: another model is about to come."""
        if self.optimizer is not None:
            self.compare_loop("after its last step")
            self.optimizer, self._trained, self.due = None, [], None

    def at_end(self) -> dict[str, dict] | None:
        """Return what the last optimizer of a loop of the user's own holds, for `apart`; None without one.

        The kernel compares it, when all results are there: a core that leaves before the others must not wait for them.
        """
        self.due = None
        if not self.is_on or self.optimizer is None:
            return None
        return self._describe(GROUPS, self._loop_modules(), self.optimizer, data=self._data, averaged=False)

    def _loop_modules(self) -> dict[str, object]:
        return {f"{number}." if number else "": model for number, model in enumerate(self._trained)}

    def look_at_step(self, optimizer) -> None:
        """Look at the first step of an optimizer that did not come through `core.optimizer_step`, before it is made."""
        if self.is_on and optimizer not in self._seen and optimizer not in self._steps:
            self._seen.add(optimizer)
            self._refuse_alone(optimizer)
            self._refuse_plain_step(optimizer)

    def _refuse_alone(self, optimizer) -> None:
        """Raise where torch_xla trains on a device of its own, in a rehearsal on plain CPU processes."""
        devices = {one.device.type for group in optimizer.param_groups for one in group["params"]}
        if "xla" in devices and self._core.device.type != "xla":
            raise Failed(
                "torch_xla's own calls join nothing in a rehearsal on plain CPU processes: each would train alone",
                found=f"{self._core.world_size} processes, of which torch_xla sees one; weights on an xla device",
                fix='launch(..., backend="xla"), where they are joined as on chips; or core.model and core.batches',
            )

    def _refuse_plain_step(self, optimizer) -> None:
        """Raise where an optimizer steps with gradients that nobody averaged, together; one step of each is looked at.

        A stranger's code may average by itself, as `xm.optimizer_step` does: then all cores have the same gradients.
        """
        if not self._modules_of(optimizer):
            return
        held = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        sums = zlib.crc32(repr([checksum(one) for one in self._core.to_host(held)]).encode())
        if len(set(gather_objects(self._core, sums))) > 1:
            raise Differs(
                f"{type(optimizer).__name__}.step() with gradients that differ between the cores: each would train a "
                "model of its own",
                found=f"parameters from core.model, and {self._core.world_size} cores whose gradients nobody averaged",
                fix=(
                    "core.optimizer_step(optimizer) in place of optimizer.step(), which averages first; for networks "
                    "that are meant to be independent tpukit.launch_each"
                ),
            )
        if self.optimizer is not optimizer:
            self.optimizer, self._trained = optimizer, self._modules_of(optimizer)

    # ---- the comparison ----------------------------------------------------------------------------------------

    def compare(
        self,
        when: str,
        *,
        model=None,
        modules: Mapping[str, object] | None = None,
        optimizer=None,
        schedule=None,
        data: Mapping[str, object] = MappingProxyType({}),
        averaged: bool = True,
        only: tuple[str, ...] = GROUPS,
        **run: object,
    ) -> None:
        """Raise unless all of this is the same on every core, together.

        Args:
            when: the name of this check, for the error.
            model: one module, or
            modules: several, by what their names begin with.
            optimizer: its settings, and the parameters that are in none of the modules.
            schedule: its state.
            data: the facts of batches, by name.
            averaged: whether float buffers have been averaged, so have to be the same.
            only: the groups that are compared.
            **run: further values, by name.

        Raises:
            Differs: it is not.
            WrongValue: a layer would not be joined, see `_refuse_local_layers`.
        """
        if not self.is_on:
            return
        modules = modules if modules is not None else {"": model}
        options = {"schedule": schedule, "data": data, "averaged": averaged, **run}
        found = self._describe(only, modules, optimizer, **options)
        groups = self._different([_digest(found[group]) if group in only else 0 for group in GROUPS])
        if not groups:
            if optimizer is not None:
                self._passed.setdefault(optimizer, {}).update(dict.fromkeys(only, when))
            return
        everyone = gather_objects(self._core, {group: found[group] for group in groups})
        before = self._passed.get(optimizer, {}).get(groups[0]) if optimizer is not None else None
        raise _error(when, everyone, before=before, modules=modules, known=self._from_core(modules))

    def _from_core(self, modules: Mapping) -> bool:
        ids = {id(reference()) for reference in self._models}
        return any(id(one) in ids for one in modules.values())

    def _describe(
        self, only: tuple, modules: Mapping, optimizer, *, schedule=None, data: Mapping, averaged: bool, **run: object
    ) -> dict[str, dict]:
        found: dict[str, dict] = {group: {} for group in GROUPS}
        found["run"] = {"seed of launch": self._core.seed_of_launch, "cores": self._core.world_size, **run}
        found["data"] = dict(data)
        if "model" in only:
            found["model"] = {name: value for key, one in modules.items() for name, value in structure(one, key)}
        found["settings"] = dict(_settings(optimizer, schedule))
        if "weights" in only:
            _refuse_local_layers(modules)
            self._add_tensors(found, modules, optimizer, averaged=averaged)
        return found

    def _add_tensors(self, found: dict, modules: Mapping, optimizer, *, averaged: bool) -> None:
        tensors, seen = {}, set()
        for key, module in modules.items():
            for group, named in (("weights", "named_parameters"), ("buffers", "named_buffers")):
                for name, tensor in getattr(module, named, list)():
                    if group == "weights" or averaged or not _is_averaged(tensor):
                        tensors[group, key + name] = tensor
                    seen.add(id(tensor))
        held = [one for group in getattr(optimizer, "param_groups", ()) for one in group["params"]]
        for number, tensor in enumerate(held):
            if id(tensor) not in seen:
                tensors["weights", f"parameter {number} of the {type(optimizer).__name__}"] = tensor
        wanted = {key: one for key, one in tensors.items() if self._is_compared(key[1], one)}
        for (group, name), tensor in zip(wanted, self._core.to_host(list(wanted.values())), strict=True):
            found[group][name] = checksum(tensor)

    def _is_compared(self, name: str, tensor) -> bool:
        import torch

        lazy = torch.nn.parameter.is_lazy(tensor) or tensor.layout != torch.strided
        return not lazy and not any(fnmatch.fnmatch(name, pattern) for pattern in self._may_differ)

    def _different(self, digests: list[int]) -> list[str]:
        import torch

        # Halves, because a TPU compares no 64-bit numbers between its cores, and float32 holds 16 bits exactly.
        halves = torch.tensor([(number >> 16, number & 0xFFFF) for number in digests], dtype=torch.float32)
        (halves,) = self._core.to_device([torch.stack([halves, -halves])])
        with self._core.step():  # or the next step's graph would begin with this collective, and compile again
            largest = self._core.all_reduce(halves, "max")
        (largest,) = self._core.to_host([largest])
        differ = (largest[0] != -largest[1]).any(dim=1).tolist()
        return [group for group, differs in zip(GROUPS, differ, strict=True) if differs]


def apart(everyone: list[dict | None]) -> Differs | None:
    """Return the error for what cores held when they returned, by rank; None where it is the same."""
    if None in everyone or len(everyone) < 2 or all(one == everyone[0] for one in everyone):
        return None
    return _error("when the worker function returned", everyone, before="before", modules={}, known=True)


def _error(when: str, everyone: list[dict], *, before: str | None, modules: Mapping, known: bool) -> Differs:
    found, groups = [], [group for group in GROUPS if any(one.get(group) != everyone[0].get(group) for one in everyone)]
    for group in groups or ["model"]:
        names = list(dict.fromkeys(name for one in everyone for name in one[group]))
        rows = [(name, [one[group].get(name, "none") for one in everyone]) for name in names]
        rows = [(name, values) for name, values in rows if len(set(map(str, values))) > 1]
        showing = group in ("run", "data", "settings", "model")
        shown = [name + (f": {_by_core(values)}" if showing else "") for name, values in rows[:_MOST_SHOWN]]
        more = f" and {len(rows) - _MOST_SHOWN} more" if len(rows) > _MOST_SHOWN else ""
        unlike = _by_core(rows[0][1], shown=False) if rows and not showing else ""
        found.append(f"{group}: " + (", " if not showing else "\n").join(shown or ["their order"]) + more + unlike)
    first = (groups or ["model"])[0]
    found.append(f"found {when}" + (f"; {before} it was the same" if before else ", the first check of it"))
    fix = _CAUSES.get(first) or (_CHANGED if before or known else _UNLIKE)
    if first == "weights" and (names := [name for one in modules.values() for name in _with_max_norm(one)]):
        fix = (
            f"{first_few(names, 3)} is an Embedding(max_norm=...), which changes weights in forward, by this core's "
            "samples alone: leave max_norm out"
        )
    return Differs(f"{_FACTS[first]} ({when})", found="\n".join(found), fix=fix)


def averaged_places(*modules: object) -> Callable[[], list]:
    """Return a function that looks up the buffers of modules that can be averaged, as they are at that moment.

    A layer may put a new tensor in the place of the old, as `self.center = 0.9 * self.center + ...` does. The places
    are found once: to walk through a ResNet-34 in every step would take 0.3 ms, this 4 microseconds.
    """
    parts = dict.fromkeys(part for one in modules if hasattr(one, "modules") for part in one.modules())
    places = [(part._buffers, name) for part in parts for name in part._buffers]

    def look_up() -> list:
        held = [place.get(name) for place, name in places]
        found = {id(one): one for one in held if one is not None and _is_averaged(one)}
        return list(found.values())

    return look_up


def _is_averaged(tensor) -> bool:
    return tensor.is_floating_point()


def checksum(tensor) -> int:
    """Return a checksum of a tensor in host memory, of its bits."""
    import torch

    tensor = tensor.detach()
    if tensor.layout != torch.strided:  # a sparse gradient: what it adds up to
        tensor = tensor.to_dense()
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def structure(module: object, prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield what a module computes, as far as it can be told: (name, kind and settings) of each layer and tensor.

    In their order, which decides what a Sequential does. Whole numbers count only where the layer shows them, since
    many a loss keeps its rank.
    """
    if not hasattr(module, "named_modules"):
        return
    for number, (name, part) in enumerate(module.named_modules(remove_duplicate=False)):
        shown = [f"{number}", type(part).__qualname__, part.extra_repr()]
        for key, value in vars(part).items():
            if key.startswith("_") or key == "training":
                continue
            if isinstance(value, bool | float):
                shown.append(f"{key}={value}")
            elif callable(value) and not hasattr(value, "parameters"):
                shown.append(f"{key}={getattr(value, '__qualname__', type(value).__qualname__)}")
        yield f"{prefix}{name or type(part).__name__}", re.sub(r" at 0x\w+", "", " ".join(filter(None, shown)))
    for kind in ("parameters", "buffers"):
        for name, tensor in getattr(module, f"named_{kind}")():
            if not hasattr(tensor, "materialize"):  # of a lazy layer
                yield f"{prefix}{name} ({kind})", f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"


def _settings(optimizer, schedule) -> Iterable[tuple[str, str]]:
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        for key, value in group.items():
            if key != "params":
                value = value.item() if hasattr(value, "item") else value
                yield f"{key} of {type(optimizer).__name__}'s group {number}", repr(value)
    if schedule is not None:
        for key, value in schedule.state_dict().items():
            if _is_number(value) or (isinstance(value, list | tuple) and all(map(_is_number, value))):
                yield f"{key} of {type(schedule).__name__}", repr(value)


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _digest(values: Mapping) -> int:
    return zlib.crc32(repr(list(values.items())).encode())


def _by_core(values: list, *, shown: bool = True) -> str:
    """Say which cores have which value, `0.1 on core 0, 0.2 on cores 1, 2`; or only which have the same."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    if not shown:
        return "; " + " unlike ".join(_cores(of) for of in ranks.values())
    return ", ".join(f"{value[:200]} on {_cores(of)}" for value, of in ranks.items())


def _cores(ranks: list[int]) -> str:
    return f"core {ranks[0]}" if len(ranks) == 1 else "cores " + first_few(ranks, 8)


def _refuse_local_layers(modules: Mapping) -> None:
    """Raise for layers that average by torch.distributed, where that does not join the cores."""
    import torch

    of = torch.nn.SyncBatchNorm
    parts = [part for one in modules.values() if hasattr(one, "named_modules") for part in one.named_modules()]
    layers = [name for name, part in parts if isinstance(part, of) and type(part).forward is of.forward]
    if layers and not torch.distributed.is_initialized():
        raise WrongValue(
            "torch.nn.SyncBatchNorm is joined by torch.distributed, which does not join these cores",
            found=f"{first_few(layers, 3)} takes the statistics of this core's share alone",
            fix="tpukit.train.sync_batchnorm(core, model), which changes it as well",
        )


def _with_max_norm(module: object) -> list[str]:
    parts = module.named_modules() if hasattr(module, "named_modules") else ()
    return [name for name, part in parts if getattr(part, "max_norm", None) is not None]
