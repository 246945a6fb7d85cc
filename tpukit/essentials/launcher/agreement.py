"""Check that all cores are in sync, and raise an error that names the difference.

If the cores train different networks by mistake, torch raises no error. So each core describes its
state in groups, as short values by name, and the cores compare one checksum per group:

               core 0                         core 1
    data       {"seed": 0}         -> 81      {"seed": 1}         -> 97      out of sync
    weights    {"0.weight": 512}   -> 23      {"0.weight": 512}   -> 23      in sync

The checksums have the same small size for every model, and on a TPU their exchange is a tiny graph.
If a group is out of sync, the cores also exchange its names and values, for the error.

`fit` calls `compare` itself. In a loop that the user writes, the cores are compared after its first
step, then more and more rarely (`is_comparison_step`), and when the worker function returns.
"""

import contextlib
import itertools
import math
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tpukit.essentials.backends import BackendMismatchError
from tpukit.essentials.display import InvalidValueError, TpukitRuntimeError, first_few
from tpukit.essentials.environment import runtime_started
from tpukit.essentials.launcher.core_values import (
    called_text,
    gradient_checksum,
    lazy_parameters,
    parameters_of,
    settings,
    structure,
    tensor_checksums,
    trains,
    versions,
)
from tpukit.essentials.launcher.difference import GROUPS, OutOfSyncError, difference
from tpukit.essentials.launcher.gathering import gather_objects

_FIRST = "after the first step"
_OFTEN_UNTIL = 64  # steps; up to here the cores are compared after each power of two
_STEPS_BETWEEN = 100  # at least so many steps between two later comparisons
_LAYOUTS = "layouts"  # the key of `state_at_end` for the layouts of the last `core.batches`
_MOST_LAYOUTS = 20  # a loop may call `core.batches` in every epoch; the last calls are compared
# Counters of torch_xla. xm.optimizer_step, for example, counts "xla::AllReduceInPlace".
_XLA_COLLECTIVES = (
    *("xla::AllReduce", "xla::AllGather", "xla::AllToAll"),
    *("xla::ReduceScatter", "xla::CollectivePermute"),
)


def is_comparison_step(step: int, steps_per_epoch: int) -> bool:
    """Return whether the cores are compared after this step.

    The comparisons are frequent at first, because most mistakes show at once. Later comparisons
    are at ends of epochs, at least 100 steps apart. With 40 steps per epoch, the cores are compared
    after steps 1, 2, 4, 8, 16, 32, 64, then 120, 240, 360 and so on.
    """
    is_power_of_two = step.bit_count() == 1
    if step <= _OFTEN_UNTIL and is_power_of_two:
        return True
    epochs_between = math.ceil(_STEPS_BETWEEN / steps_per_epoch)
    return step % (epochs_between * steps_per_epoch) == 0


@dataclass(frozen=True)
class State:
    """The values of a core that must be in sync with the other cores.

    Attributes:
        modules: {prefix: module}. The prefix stands before the names of the module's tensors.
        optimizers: optimizers, whose settings are compared. Parameters of an optimizer that are in
            none of the modules are compared as weights.
        schedule: the learning rate schedule; None for none.
        data: facts about the batches, such as their seed.
        called: functions that were passed to `fit`, by the name of the argument, such as "loss".
        run: other arguments of `fit`, by name.
        averaged: True if float buffers have been averaged. They must then be equal on all cores.
        layers: True to compare the types and settings of the modules' layers.
        tensors: True to compare weights and buffers.
    """

    modules: Mapping[str, object]
    optimizers: Sequence = ()
    schedule: object = None
    data: Mapping[str, object] = field(default_factory=dict)
    called: Mapping[str, object] = field(default_factory=dict)
    run: Mapping[str, object] = field(default_factory=dict)
    averaged: bool = True
    layers: bool = True
    tensors: bool = True


@dataclass
class _Loop:
    """The state of a training loop that the user wrote.

    Attributes:
        new_models: modules from `core.model` since the last loop.
        steps: number of steps so far, per optimizer.
        trained: modules whose weights the loop changes.
        data: facts about the batches that the loop uses.
        layouts: facts about the last calls of `core.batches`. They are stored here because the
            batches themselves may no longer exist when the worker function returns.
        passed: per group, the name of the last comparison in which it was in sync.
        first_gradients: checksums of each optimizer's gradients before their first average.
        versions: write counters of the parameters after the last step, per optimizer.
        unwatched: number of `core.step` blocks after which new models are compared, if no
            optimizer makes a step before.
        due: name of the comparison to make at the end of this step; None for none.
    """

    new_models: list[weakref.ref] = field(default_factory=list)
    steps: dict[object, int] = field(default_factory=dict)
    trained: list = field(default_factory=list)
    data: Mapping[str, object] = field(default_factory=dict)
    layouts: list[dict] = field(default_factory=list)
    passed: dict[str, str] = field(default_factory=dict)
    first_gradients: list[int] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    unwatched: int = 0
    due: str | None = None


class _KeptLoop(NamedTuple):
    """Weak references to a loop's models and optimizers, between two runs of a session.

    Strong references would keep the memory of a model that the user has deleted.
    """

    steps: dict[weakref.ref, int]
    trained: list[weakref.ref]


class Agreement:
    """Counts the steps of the user's loop, and compares the cores after some of the steps."""

    def __init__(self, core):
        self._core = core
        self._models = weakref.WeakKeyDictionary()  # an ordered set: all modules from core.model
        self._batches = weakref.WeakKeyDictionary()  # an ordered set: all from core.batches
        self._may_differ: list[str] = []  # patterns of tensor names that are not compared
        # Optimizers without a parameter from core.model. Such an optimizer may step on one core.
        self._other_optimizers = weakref.WeakSet()
        self._runtime_was_started = runtime_started()  # by the notebook, before the fork
        self._in_optimizer_step = False
        self._has_stepped_alone = False  # whether one of `_other_optimizers` has made a step
        self._kept = _KeptLoop({}, [])
        self.forget()

    def forget(self) -> None:
        """Forget the steps and models of the user's loop, because a new loop or `fit` begins."""
        self._loop = _Loop()

    def end_run(self) -> None:
        """Keep weak references to the loop's optimizers and modules for the session's next run."""
        loop = self._loop
        self._kept = _KeptLoop(
            {weakref.ref(optimizer): step for optimizer, step in loop.steps.items()},
            [weakref.ref(module) for module in loop.trained],
        )
        loop.steps = {}
        loop.trained = []

    def begin_run(self) -> None:
        """Restore the optimizers and modules of the previous run's loop that still exist."""
        loop = self._loop
        for reference, step in self._kept.steps.items():
            if reference() is not None:
                loop.steps[reference()] = step
        loop.trained += _alive(self._kept.trained)
        # Without a step in this run, `state_at_end` sees a difference and compares nothing.
        loop.versions = []
        loop.due = None
        self._kept = _KeptLoop({}, [])
        for batches in self._batches:  # made in an earlier run, and stored in `core.state`
            batches.wait_seconds = 0.0
        self._in_optimizer_step = False
        self._has_stepped_alone = False

    def clear_gradients(self) -> None:
        """Clear the gradients of all modules from `core.model`."""
        for module in self._models:
            module.zero_grad(set_to_none=True)

    @property
    def is_on(self) -> bool:
        """True if the run has several cores and is not recorded by `preflight`."""
        return self._core.world_size > 1 and not self._core.backend.is_recording

    def compare(self, when: str, **state: object) -> None:
        """Raise an error unless a `State` is in sync. Collective: call it on every core.

        Args:
            when: name of this check for the error, such as "before core.save".
            **state: the fields of `State`.

        Raises:
            OutOfSyncError: the cores are out of sync.
            InvalidValueError: a SyncBatchNorm would not synchronise these cores.
        """
        self._compare(when, State(**state))

    def _compare(self, when: str, state: State) -> None:
        if not self.is_on:
            return
        self._loop.unwatched = 0
        values = self._describe(state)
        out_of_sync = self._groups_out_of_sync(values)
        if not out_of_sync:
            self._loop.passed |= {group: when for group in GROUPS if values[group]}
            return
        everyone = gather_objects(self._core, {group: values[group] for group in out_of_sync})
        # If the model is not from `core.model`, the fix is to call that.
        ours = set(map(id, self._models))
        raise difference(
            when,
            everyone,
            before=self._loop.passed.get(out_of_sync[0]),
            from_core=any(id(module) in ours for module in state.modules.values()),
        )

    def _describe(self, state: State) -> dict[str, dict]:
        """Return short values by name for each of GROUPS, without communication."""
        core = self._core
        values: dict[str, dict] = {group: {} for group in GROUPS}
        # The groups in the order of GROUPS. Each value is a short text or number.
        values["run"] = {"seed of launch": core.internal.seed_of_launch, "cores": core.world_size}
        values["run"] |= state.run
        values["run"] |= {name: called_text(function) for name, function in state.called.items()}
        values["data"] = dict(state.data)
        values["settings"] = settings(state.optimizers, state.schedule)
        if state.layers:
            for prefix, module in state.modules.items():
                values["model"] |= structure(module, prefix)
        if state.tensors:
            _check_sync_batchnorm(state.modules)
            values |= tensor_checksums(
                core,
                state.modules,
                state.optimizers,
                averaged=state.averaged,
                allow_different=self._may_differ,
            )
        return values

    def _groups_out_of_sync(self, values: Mapping[str, dict]) -> list[str]:
        """Return the groups whose checksums differ. Collective."""
        import torch

        checksums = [zlib.crc32(repr(list(values[group].items())).encode()) for group in GROUPS]
        # Two halves, because a TPU does not compare 64-bit numbers between cores, and float32 can
        # represent 16 bits exactly.
        halves = [(checksum >> 16, checksum & 0xFFFF) for checksum in checksums]
        mine = torch.tensor(halves, dtype=torch.float32)
        # The cores are in sync if max(x) equals min(x), which is -max(-x): one collective.
        (both,) = self._core.to_device([torch.stack([mine, -mine])])
        # Without this step, the collective would become a part of the next step's graph, which
        # would compile again.
        with self._core.step():
            both = self._core.all_reduce(both, "max")
        (both,) = self._core.to_host([both])
        is_different = (both[0] != -both[1]).any(dim=1)
        return list(itertools.compress(GROUPS, is_different.tolist()))

    # The user's loop calls these methods through core.model, core.batches, an optimizer's step and
    # core.step.

    def before_model(self, module) -> None:
        """Compare the modules that the cores pass to `core.model`. Collective."""
        if self._loop.steps:
            self.forget()  # a new model means that the earlier loop is over
        if self.is_on and (lazy := lazy_parameters(module)):
            raise InvalidValueError(
                "core.model copies the weights of core 0 to every core, but a lazy layer has no "
                "weights yet",
                found=f"{first_few(lazy, 3)} of {type(module).__name__}",
                fix="give the layers their sizes; or, in the notebook, call the model once with a "
                "batch of your DataLoader: model(next(iter(loader))[0])",
            )
        self.compare("in core.model", modules={"": module}, tensors=False)

    def add_model(self, module, allow_different: Iterable[str]) -> None:
        """Register a module; tensors named in `allow_different` may differ between cores."""
        self._may_differ += allow_different
        self._models[module] = None
        self._loop.new_models.append(weakref.ref(module))
        # After a second step without an optimizer, the loop must change the weights by itself.
        self._loop.unwatched = 2

    def add_batches(self, batches):
        """Register the batches from `core.batches`, and return them."""
        self._batches[batches] = None
        self._loop.layouts = [*self._loop.layouts, batches.layout][-_MOST_LAYOUTS:]
        return batches

    def before_average(self, optimizer) -> None:
        """Register an optimizer whose gradients are averaged next."""
        loop = self._loop
        if optimizer in loop.steps or not self._watches():
            return
        loop.steps[optimizer] = 0
        if self._core.device.type == "cpu":  # on a TPU this would copy all gradients to the host
            mine = gradient_checksum(self._core, optimizer)
            if mine is not None:
                loop.first_gradients.append(mine)

    @contextlib.contextmanager
    def optimizer_step_marked(self) -> Iterator[None]:
        """Mark the step in the `with` block as one whose gradients have been averaged.

        If the optimizer calls another optimizer, as Lookahead does, the mark applies to both.
        """
        self._in_optimizer_step = True
        try:
            yield
        finally:
            self._in_optimizer_step = False

    def before_step(self, optimizer, *, closure: object = None) -> None:
        """Check that an optimizer's first step uses averaged gradients; raise an error if not."""
        is_known = optimizer in self._loop.steps or optimizer in self._other_optimizers
        if is_known or not self._watches():
            return
        if not self._in_optimizer_step:
            self._check_joined(optimizer)
            if not any(trains(optimizer, module) for module in self._models):
                self._other_optimizers.add(optimizer)
                return
            if closure is None:  # a closure computes the gradients later, within the step
                self._check_gradients(optimizer)
        self._loop.steps[optimizer] = 0

    def after_step(self, optimizer) -> None:
        """Count a step of an optimizer, and compare the cores if a comparison is due."""
        loop = self._loop
        if optimizer in self._other_optimizers:
            self._has_stepped_alone = True
        if optimizer not in loop.steps or not self._watches():
            return
        loop.steps[optimizer] += 1
        step = loop.steps[optimizer]
        # `state_at_end` compares these, to see whether weights have changed since the last step.
        loop.versions = [versions(each) for each in loop.steps]
        loop.unwatched = 0
        if step == 1:
            self._find_trained()
        # All cores agree on this, because steps per epoch are compared after the first step.
        if is_comparison_step(step, steps_per_epoch=loop.data.get("steps", 1)):
            loop.due = _FIRST if step == 1 else f"after step {step}"
            # In a `core.step` block, or on a TPU, the comparison waits for the end of the step.
            if not self._core.internal.open_steps and not self._core.backend.traced:
                self.end_of_step()

    def _find_trained(self) -> None:
        """Find the modules and the batches that the loop uses, after its first step."""
        loop = self._loop
        new = _alive(loop.new_models)
        loop.trained = [one for one in self._models if one in new or self._is_stepped(one)]
        used = [batches for batches in self._batches if batches.requested_at]
        if used:
            # The first step has just drawn from the training batches, later than from any others.
            loop.data = max(used, key=lambda batches: batches.requested_at).facts()

    def _is_stepped(self, module) -> bool:
        return any(trains(optimizer, module) for optimizer in self._loop.steps)

    def end_of_step(self) -> None:
        """Compare the cores if a comparison is due. Collective in that case."""
        loop = self._loop
        when = loop.due
        loop.due = None
        if when is not None:
            self.compare_loop(when)
            if when == _FIRST and self._core.device.type == "cpu":
                self._warn_of_same_batches(loop.first_gradients)
            loop.first_gradients = []
        elif loop.unwatched and self._watches():
            loop.unwatched -= 1
            if not loop.unwatched:  # the loop has no optimizer, so it changes the weights itself
                loop.trained = _alive(loop.new_models)
                self.compare_loop("after the second step")
                loop.trained = []

    def compare_loop(self, when: str) -> None:
        """Compare the user's loop. Collective."""
        if self._loop.steps or self._loop.trained:
            self._compare(when, self._loop_state())

    def _loop_state(self) -> State:
        modules = {}
        for number, module in enumerate(self._loop.trained):
            modules[f"{number}." if number else ""] = module
        # Float buffers are each core's own until `core.average_buffers`.
        return State(modules, list(self._loop.steps), data=self._loop.data, averaged=False)

    def state_at_end(self) -> dict[str, dict] | None:
        """Describe the loop when the worker function returns, for `difference_at_end`.

        It returns None if the run has only one core, or if the weights have changed since the
        loop's last step: one core may load the best weights for a plot, and that is no mistake.
        The kernel compares the states, because a core that returns early must not wait for other
        cores.
        """
        loop = self._loop
        loop.due = None
        was_started_here = runtime_started() and not self._runtime_was_started
        if self.is_on and self._core.device.type != "xla" and was_started_here:
            self._core.print(
                "torch_xla was used, but it does not connect the CPU processes of this dry run. "
                'To connect them with torch_xla: launch(..., backend="xla")'
            )
        is_changed = loop.versions != [versions(each) for each in loop.steps]
        if is_changed or not self.is_on:
            return None
        return self._describe(self._loop_state()) | {_LAYOUTS: loop.layouts}

    def has_trained_alone(self) -> bool:
        """Return whether this core has stepped an optimizer but has been in no collective.

        Collectives of torch_xla count as well. If torch.distributed is initialized, the result is
        always False, because tpukit does not see the collectives of torch.distributed.
        """
        import torch

        if not self._has_stepped_alone or self._core.internal.has_met:
            return False
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return False
        counters = self._core.backend.metrics()
        return not any(name.startswith(_XLA_COLLECTIVES) for name in counters)

    def _watches(self) -> bool:
        """Return whether the user's loop is compared; False in `fit`, which compares itself."""
        return self.is_on and not self._core.internal.in_fit

    def _warn_of_same_batches(self, mine: list[int]) -> None:
        everyone = gather_objects(self._core, mine)
        if mine and all(other == mine for other in everyone):
            self._core.print(
                "all cores have the same gradients, so each trains on the same batches. "
                "core.batches(dataset, batch_size=...) gives each core its own share"
            )

    def _check_joined(self, optimizer) -> None:
        """Raise if a dry run on CPU processes trains on XLA devices, which are not connected."""
        devices = {parameter.device.type for parameter in parameters_of(optimizer)}
        if "xla" in devices and self._core.device.type != "xla":
            raise TpukitRuntimeError(
                "each process would train alone, on a separate device of torch_xla",
                found=f"weights on an xla device, in {self._core.world_size} processes that "
                "torch_xla does not connect",
                fix="to train on the CPU, use core.model and core.batches; to connect the "
                'processes with torch_xla: launch(..., backend="xla")',
            )

    def _check_gradients(self, optimizer) -> None:
        """Raise if the gradients of a step are not averaged. Collective.

        Other code may have averaged them before, as `xm.optimizer_step` does; then they are equal
        on all cores.
        """
        everyone = gather_objects(self._core, gradient_checksum(self._core, optimizer))
        if len(set(everyone)) > 1:
            raise OutOfSyncError(
                "each core would train a separate model, because the gradients in this call differ "
                f"between the cores: {type(optimizer).__name__}.step()",
                found=f"parameters from core.model, and {self._core.world_size} cores whose "
                "gradients were not averaged",
                fix="core.optimizer_step(optimizer) in place of optimizer.step(): it averages the "
                "gradients first; to train independent networks, use tpukit.launch_each",
            )

    def gradients_error(self, optimizer, error: BackendMismatchError) -> Exception:
        """Return an error that names the parameters that some cores train and others do not.

        Collective. If there are no such parameters, it returns the argument `error`.
        """
        described = {}
        parameters = parameters_of(optimizer)
        trained = [one for one in parameters if one.requires_grad or one.grad is not None]
        for name, parameter in zip(self.names_of(trained), trained, strict=True):
            described[name] = f"{tuple(parameter.shape)} {parameter.dtype}"
        everyone = gather_objects(self._core, {"model": described})
        if all(other == everyone[0] for other in everyone):
            return error
        return difference("in core.optimizer_step", everyone)

    def names_of(self, parameters: list) -> list[str]:
        """Return the names of parameters in the modules from `core.model`, else their shapes."""
        names = {}
        for module in self._models:
            names |= {id(parameter): name for name, parameter in module.named_parameters()}
        return [names.get(id(one), f"a parameter of {tuple(one.shape)}") for one in parameters]


def difference_at_end(everyone: list[dict | None]) -> OutOfSyncError | None:
    """Return an error if the states from `state_at_end` of all cores differ, otherwise None."""
    if None in everyone or all(state == everyone[0] for state in everyone):
        return None
    compared = []
    for state in everyone:
        groups = {group: dict(state[group]) for group in GROUPS}
        for number, layout in enumerate(state[_LAYOUTS], start=1):
            groups["data"] |= {f"{key}, batches {number}": layout[key] for key in layout}
        compared.append(groups)
    # The kernel does not know the comparisons of the workers, so it claims nothing about them.
    return difference("when the worker function returned", compared, before="")


def _alive(references: Iterable[weakref.ref]) -> list:
    return [reference() for reference in references if reference() is not None]


def _check_sync_batchnorm(modules: Mapping) -> None:
    """Raise for a SyncBatchNorm, which needs torch.distributed, if that is not initialized."""
    import torch

    if torch.distributed.is_initialized():
        return
    of_torch = torch.nn.SyncBatchNorm
    layers = []
    for module in modules.values():
        named = module.named_modules() if hasattr(module, "named_modules") else ()
        for name, layer in named:
            # A subclass with its own `forward`, such as tpukit's, averages in another way.
            if isinstance(layer, of_torch) and type(layer).forward is of_torch.forward:
                layers.append(name)
    if layers:
        raise InvalidValueError(
            "torch.nn.SyncBatchNorm averages through torch.distributed, which does not connect "
            "these cores",
            found=f"{first_few(layers, 3)} would use the statistics of this core's batch alone",
            fix="let these layers average over the cores: "
            "model = tpukit.training.sync_batchnorm(core, model)",
        )
