"""One step of a model on the device: forward pass, gradients, optimizer, averaged weights."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tpukit.accelerators import programs_of
from tpukit.essentials.display import InvalidTypeError
from tpukit.essentials.launcher import Core, averaged_buffers
from tpukit.profiling import RecompileMonitor
from tpukit.training.batch import call, inputs_and_targets
from tpukit.training.host_time import Moment, advice
from tpukit.training.index_checks import IndexChecks, can_watch, integers_of
from tpukit.training.interfaces import average_update, check_optimizer
from tpukit.training.replay import Replay
from tpukit.training.step_flops import StepFlops
from tpukit.training.weighted_loss import Loss, as_loss, check_gradient, weight_on_device


def forward(core: Core, model, inputs, *, bf16: bool):
    """Return the model's outputs, with half precision converted to float32.

    Args:
        core: this core.
        model: a module or a function.
        inputs: a tensor, or a tuple or dict of arguments.
        bf16: compute in bfloat16 those operations for which autocast does so.

    Raises:
        InvalidTypeError: the outputs contain no tensor.
    """
    import torch
    from torch.utils import _pytree as tree

    context = contextlib.nullcontext()
    if bf16:
        context = torch.autocast(core.device.type, dtype=torch.bfloat16)
    with context:
        outputs = model(inputs) if isinstance(inputs, torch.Tensor) else call(model, inputs)
    # The usual case first: tree_flatten takes 10 microseconds per step, this check 0.3 (measured).
    if isinstance(outputs, torch.Tensor) and outputs.dtype == torch.float32:
        return outputs
    leaves, structure = tree.tree_flatten(outputs)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        kind = type(outputs).__name__
        register = f"torch.export.register_dataclass({kind})"
        raise InvalidTypeError(
            "the model returns neither a tensor nor a type that torch's pytree can flatten",
            found=f"{type(model).__name__} returns a {kind}",
            fix=f"return a tuple or a dict; for a dataclass, {register} once",
        )
    halves = (torch.bfloat16, torch.float16)
    for place, leaf in enumerate(leaves):
        if getattr(leaf, "dtype", None) in halves:
            leaves[place] = leaf.float()
    return tree.tree_unflatten(leaves, structure)


@dataclass
class TrainStep:
    """One optimizer step over one or several batches, as a single graph.

    Most attributes are the arguments of `fit`.

    Attributes:
        arrange: converts a batch, as it was sent, into the form that a loop gets. It runs within
            the step, because a replayed step could not do it otherwise.
        further_parts: returns the arguments of the loss after (outputs, targets).
        shapes: how many shapes of batches are expected, each with a compilation.
    """

    core: Core
    model: object
    optimizer: object
    loss: Callable
    arrange: Callable[[object], object]
    further_parts: Callable[[object], tuple]
    scheduler: object = None
    preprocess: Callable | None = None
    augment: Callable | None = None
    bf16: bool = False
    max_grad_norm: float | None = None
    averaged_model: object = None
    shapes: int = 1
    replay: bool = False

    def __post_init__(self):
        check_optimizer(self.optimizer)
        self._update_average = average_update(self.averaged_model)
        backend = self.core.backend
        self._buffers = averaged_buffers(self.model, self.loss)
        self._programs = programs_of(backend)
        self.host_seconds = 0.0  # of this thread, for whole steps
        self._python_seconds = 0.0  # of this thread, for all steps so far
        self._interval_start: Moment | None = None
        self._has_advised = False
        self.index_checks = IndexChecks()
        self.flops = StepFlops(self.core, shapes=self.shapes, model=self.model, loss=self.loss)
        self._can_watch_model = False
        self._is_weighted: bool | None = None  # whether the loss returns (total, weight)
        self.begin_augmenting(self.augment)
        if self.replay and not self._replay and backend.traced and not backend.is_recording:
            why = "on this backend a step is more than one program"
            self.core.print(f"replay=True has no effect here: {why}")

    def begin_augmenting(self, augment: Callable | None) -> None:
        """Augment the batches of all later steps.

        This is a new graph, so one more compilation is expected.
        """
        self.augment = augment
        self.monitor = RecompileMonitor(self.core.backend, shapes=self.shapes)
        self._replay = None
        if self.replay and self._programs:
            called = {
                "model": self.model,
                "loss": self.loss,
                "preprocess": self.preprocess,
                "augment": self.augment,
                "averaged_model": self.averaged_model,
            }
            self._replay = Replay(
                self.core,
                self._programs,
                optimizer=self.optimizer,
                called=called,
                schedule=self.scheduler,
            )

    @property
    def evaluated_model(self):
        """The model that is evaluated and kept as the best: the averaged model if there is one."""
        return self.averaged_model.module if self.averaged_model else self.model

    @property
    def lr(self) -> object:
        """The learning rate of the next step, of the optimizer's first group."""
        lr = self.optimizer.param_groups[0]["lr"]
        if hasattr(lr, "detach"):
            return lr.detach().clone()  # because a scheduler changes a tensor in place
        return float(lr)

    def __call__(
        self, number: int, batches: tuple, flags: tuple, *, is_last: bool = False
    ) -> tuple:
        """Train on batches, whose gradients are added up.

        Args:
            number: the number of the step, from 1.
            batches: as they were sent to the device.
            flags: two float32 tensors, (), to be averaged over the cores; see `TimeLimit`.
            is_last: whether an epoch ends with this step.

        Returns:
            this core's loss, (); and the means over the cores of the loss and of `flags`, (3,),
            with a weighted loss also of the weight, (4,). All are float32 and stay on the device.
        """
        losses = None
        began = time.thread_time()
        if self._replay:
            self._replay.begin_step(number, is_last=is_last)
        with self.flops.step(batches):
            if self._replay:
                losses = self._replay.step(number, batches, flags)
            if losses is None:
                losses = self._capture(number, batches, flags)
        if self.scheduler:
            self.scheduler.step()
        self.host_seconds += time.thread_time() - began
        return losses

    def device_seconds(self) -> float | None:
        """Return the seconds in which programs ran on the device so far; None if unknown."""
        if self._programs is None:
            return None
        _, seconds = self._programs.executions()
        return seconds

    def end_epoch(self) -> None:
        """Have all cores capture the next step, because between epochs anything may change."""
        if self._replay:
            self._replay.capture_next()

    def start_interval(self) -> None:
        """Begin to measure host and device, if `fit` may recommend replay. No step may run yet."""
        if self._replay or self._has_advised:
            return
        # XLA:CPU shares its processors with Python, so only a TPU is measured.
        if self._programs and self.core.backend.in_graph:
            self._interval_start = self._now()

    def end_interval(self, steps: int) -> None:
        """Print once that replay would save time, if this interval of `steps` steps shows it."""
        before = self._interval_start
        self._interval_start = None
        if before is None:
            return
        line = advice(before, self._now(), steps)
        if line:
            self._has_advised = True
            self.core.print(line)

    def _now(self) -> Moment:
        programs, running = self._programs.executions()
        return Moment(
            recording=self._python_seconds,
            programs=programs,
            running=running,
            compiles=self.monitor.compiles,
        )

    def _capture(self, number: int, batches: tuple, flags: tuple) -> tuple:
        """Run the Python code of a step, and then the program that it has recorded."""
        self.monitor.start_step(batches)
        first_step = contextlib.nullcontext()
        if self.index_checks.is_due:
            first_step = self._checking_indices(batches)
        capturing = contextlib.nullcontext([])
        watching_forward = contextlib.nullcontext()
        if self._replay:
            capturing = self._replay.capturing(number, batches, flags)
            watching_forward = self._replay.watching_forward()
        with self.core.step(), capturing as losses:
            began = time.thread_time()
            with watching_forward, first_step:
                loss = self._backward(batches)
            losses += self._update(loss, flags)
            del loss  # a captured step may hold no tensor besides its results
            self._python_seconds += time.thread_time() - began
        message = self.monitor.end_step(number)
        if message:
            self.core.print(message)
        if self._replay and self._replay.agree(number):
            self.monitor.expect()
        return tuple(losses)

    def _checking_indices(self, batches: tuple) -> contextlib.AbstractContextManager:
        """Check labels and token ids in this block, and learn the limits for later batches."""
        on_cpu = not self.core.backend.traced
        functions = (self.loss, self.preprocess, self.augment)
        can_watch_functions = all(can_watch(function, on_cpu=on_cpu) for function in functions)
        if self.core.backend.is_recording or not can_watch_functions:
            self.index_checks.end({})
            return contextlib.nullcontext()
        self._can_watch_model = can_watch(self.model, on_cpu=on_cpu)
        sent = integers_of(batches)
        return self.index_checks.first_step(sent, self.core.to_host(sent))

    def _backward(self, batches: tuple) -> Loss:
        """Compute the gradients of all batches; return the mean of their losses, () float32.

        If the loss has weights, return the sum of the totals and the sum of the weights.
        """
        total = None
        weight = None
        for batch in batches:
            loss = self._loss(batch)
            value = loss.total
            # Only if it changes something, because each is one more operation in every step.
            if value.ndim:
                value = value.reshape(())
            if len(batches) > 1 and not self._is_weighted:
                value = value / len(batches)
            value.backward()
            value = value.detach().float()
            total = value if total is None else total + value
            if self._is_weighted:
                mine = weight_on_device(loss)
                # A new tensor, because it is overwritten, and the first may be the user's own.
                weight = mine + 0 if weight is None else weight + mine
        return Loss(total, weight)

    def _loss(self, batch) -> Loss:
        """Return the loss of one batch, as it was sent."""
        watching = self.index_checks.watching
        with watching:
            batch = self.arrange(batch)
            further = self.further_parts(batch)
            if self.augment:
                parts = (batch,) if isinstance(batch, Mapping) else inputs_and_targets(batch)
                batch = self.augment(*parts)
            inputs, targets = inputs_and_targets(batch)
            if self.preprocess:
                inputs = self.preprocess(inputs)
        watching_model = watching if self._can_watch_model else contextlib.nullcontext()
        with self.flops.forward(), watching_model:
            outputs = forward(self.core, self.model, inputs, bf16=self.bf16)
        with self.flops.forward(), watching:
            value = self.loss(outputs, targets, *further)
        loss = as_loss(value)
        check_gradient(loss)
        is_weighted = loss.weight is not None
        if is_weighted and self._is_weighted is None:
            self.core.print(
                "the loss returns (total, weight): totals are divided by the weight of all "
                "cores and accumulated batches"
            )
        elif self._is_weighted not in (None, is_weighted):
            raise InvalidTypeError(
                "the loss returns (total, weight) for some batches, and one number for others",
                fix="return (total, weight) for every batch",
            )
        self._is_weighted = is_weighted
        return loss

    def _update(self, loss: Loss, flags: tuple) -> list:
        """Update the weights and their average; return the losses of `__call__`."""
        import torch

        local = loss.total
        weight = loss.weight
        if weight is not None:
            # A core without any weight has the loss 0, and not NaN.
            local = torch.where(weight == 0, loss.total, loss.total / weight)
        # Loss and flags travel in the message of the gradients: a collective of their own would be
        # one more wait for the slowest core in every step.
        reduced = torch.stack([loss.total, *flags])
        self.monitor.check_graph(self.model, reduced)
        averaged = [reduced, *self._buffers()]
        self.core.optimizer_step(
            self.optimizer, clip=self.max_grad_norm, average_also=averaged, weight=weight
        )
        if self.averaged_model:
            self._update_average(self.model)
        if weight is not None:
            mean, *flags = reduced
            reduced = torch.stack([mean / weight, *flags, weight])
        return [local, reduced]
