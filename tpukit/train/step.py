"""One step of a model on the device: forward, and in training everything up to the averaged weights."""

import contextlib
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tpukit.essentials.run import Core, averaged_places
from tpukit.essentials.show import WrongType, WrongValue
from tpukit.measure import RecompileMonitor
from tpukit.runtimes import programs_of
from tpukit.train.batch import call, inputs_and_targets
from tpukit.train.host_time import Moment, advice
from tpukit.train.replay import Replay


def forward(core: Core, model, inputs, *, bf16: bool):
    """Return the model's outputs, half precision as float32; with `bf16` computed in bfloat16 where autocast does."""
    import torch
    from torch.utils import _pytree as tree

    context = torch.autocast(core.device.type, dtype=torch.bfloat16) if bf16 else contextlib.nullcontext()
    with context:
        outputs = model(inputs) if isinstance(inputs, torch.Tensor) else call(model, inputs)
    # The usual case first: tree_map_only takes 10 microseconds in every step, this check 0.3 (measured).
    if isinstance(outputs, torch.Tensor) and outputs.dtype == torch.float32:
        return outputs
    leaves, structure = tree.tree_flatten(outputs)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        kind = type(outputs).__name__
        raise WrongType(
            "the model's outputs are no tensor, and of no type that torch's pytree can look into",
            found=f"{type(model).__name__} returns a {kind}",
            fix=f"return a tuple or a dict; for a dataclass, torch.export.register_dataclass({kind}) once",
        )
    halves = (torch.bfloat16, torch.float16)
    leaves = [leaf.float() if getattr(leaf, "dtype", None) in halves else leaf for leaf in leaves]
    return tree.tree_unflatten(leaves, structure)


@dataclass
class TrainStep:
    """One optimiser step over one or several batches, recorded as a single graph; the arguments are those of `fit`.

    `arrange` makes of a batch, as it was sent, what a loop would get: within the step, or it could not be replayed.
    """

    core: Core
    model: object
    optimizer: object
    loss: Callable
    arrange: Callable[[object], object]
    schedule: object = None
    prepare: Callable | None = None
    augment: Callable | None = None
    bf16: bool = False
    clip: float | None = None
    average: object = None
    shapes: int = 1
    masked: bool = False
    replay: bool = False

    def __post_init__(self):
        _check_optimizer(self.optimizer)
        self._buffers = averaged_places(self.model, self.loss)
        self._replay = None
        self._recording = 0.0  # this thread's seconds for the Python of all steps so far
        self._began, self._is_advised = None, False
        self.begin_augmenting(self.augment)
        backend = self.core.backend
        if self.replay and not self._replay and backend.traced and not backend.is_recording:
            self.core.print("replay=True has no effect here: on this backend a step is more than one program")

    def begin_augmenting(self, augment: Callable | None) -> None:
        """Change the batches of all steps from here on: another graph, whose first compile is expected."""
        self.write_back()
        self.augment = augment
        self.monitor = RecompileMonitor(self.core.backend, shapes=self.shapes)
        self._replay = None
        self._programs = programs_of(self.core.backend)
        if self.replay and self._programs:
            called = {name: getattr(self, name) for name in ("model", "loss", "prepare", "augment", "average")}
            self._replay = Replay(self.core, self._programs, self.optimizer, called, self.schedule)

    @property
    def evaluated_model(self):
        """The model that is evaluated and kept as the best: the averaged one, if there is one."""
        return self.average.module if self.average else self.model

    @property
    def lr(self) -> object:
        """The learning rate that the next step will use, of the optimiser's first group."""
        lr = self.optimizer.param_groups[0]["lr"]
        return lr.detach().clone() if hasattr(lr, "detach") else float(lr)  # a schedule changes a tensor in place

    def __call__(self, number: int, batches: tuple, flag, *, is_last: bool = False) -> tuple:
        """Train on batches, whose gradients are added up; return two float32 tensors that stay on the device.

        `is_last` says that an epoch ends with this step.

        Returns:
            this core's loss, (); and the means over the cores of the loss and of `flag`, (2,).
        """
        losses = None
        if self._replay:
            self._replay.begin_step(number, is_last=is_last)
            losses = self._replay.step(number, batches, flag)
        losses = losses or self._record(number, batches, flag)
        if self.schedule:
            self.schedule.step()
        return losses

    def write_back(self) -> None:
        """Give model, average and optimizer the results of replayed steps, before anybody reads them.

        A use by Python is noticed and does so by itself. This is for code below Python, and for several cores at once.
        """
        if self._replay:
            self._replay.write_back()

    def end_epoch(self) -> None:
        """Write back, and have all cores capture the next step: between epochs anything may have changed."""
        if self._replay:
            self._replay.write_back()
            self._replay.look_again()

    def start_interval(self) -> None:
        """Begin to measure host and device, if `fit` may recommend replay; no step may be running."""
        # XLA:CPU shares its processors with Python, so only a TPU is measured.
        if self._programs and self.core.backend.in_graph and not (self._replay or self._is_advised):
            self._began = self._now()

    def end_interval(self, steps: int) -> None:
        """Print once that replay would save time, if the interval of so many steps has shown it."""
        before, self._began = self._began, None
        if before is None:
            return
        if line := advice(before, self._now(), steps):
            self._is_advised = True
            self.core.print(line)

    def _now(self) -> Moment:
        return Moment(self._recording, *self._programs.executions(), self.monitor.compiles)

    def _record(self, number: int, batches: tuple, flag) -> tuple:
        import torch

        self.monitor.start_step(batches)
        capturing, forward = contextlib.nullcontext([]), contextlib.nullcontext()
        if self._replay:
            capturing, forward = self._replay.capturing(number, batches, flag), self._replay.watching_forward()
        with self.core.step(), capturing as losses:
            began = time.thread_time()
            with forward:
                local = self._backward(batches)
            # The loss and the flag travel in the message of the gradients: a collective of their own would be one more
            # wait for the slowest core in every step.
            reduced = torch.stack([local, flag])
            self.monitor.check_graph(self.model, reduced)
            self.core.optimizer_step(self.optimizer, clip=self.clip, also=[reduced, *self._buffers()])
            if self.average:
                self.average.update_parameters(self.model)
            losses += local, reduced
            self._recording += time.thread_time() - began
        if message := self.monitor.end_step(number):
            self.core.print(message)
        if self._replay and self._replay.agree(number):
            self.monitor.expect()
        return local, reduced

    def _backward(self, batches: tuple):
        """Compute the gradients of all batches; return the mean of their losses, () float32."""
        total = None
        for batch in map(self.arrange, batches):
            mask = batch[-1:] if self.masked else ()
            if self.augment:
                parts = (batch,) if isinstance(batch, Mapping) else inputs_and_targets(batch)
                batch = self.augment(*parts)
            inputs, targets = inputs_and_targets(batch)
            inputs = self.prepare(inputs) if self.prepare else inputs
            loss = self.loss(forward(self.core, self.model, inputs, bf16=self.bf16), targets, *mask)
            if getattr(loss, "numel", lambda: 0)() != 1:
                raise WrongValue(
                    f"the loss is one number, got {type(loss).__name__} {tuple(getattr(loss, 'shape', ()))}",
                    fix='take its mean, loss.mean(), or reduction="mean"',
                )
            # Only where it changes something: each of these is one more operation in the graph of every step.
            loss = loss.reshape(()) if loss.ndim else loss
            loss = loss / len(batches) if len(batches) > 1 else loss
            loss.backward()
            loss = loss.detach().float()
            total = loss if total is None else total + loss
        return total


def _check_optimizer(optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        name = type(optimizer).__name__
        raise WrongType(
            f"fit computes the gradients once per step, and {name} evaluates the loss several times in each",
            found=f"{name}.step needs a closure",
            fix="Adam or SGD; on few data, a loop of your own on one core: launch(fn, cores=1)",
        )
