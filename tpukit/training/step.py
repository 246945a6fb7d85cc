"""Run one step of a model on the device: forward pass, gradients, optimizer, averaged weights."""

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
    """Return the model's outputs; convert bfloat16 and float16 outputs to float32.

    Args:
        core: this core.
        model: a module or a function.
        inputs: a tensor, or a mapping of keyword arguments.
        bf16: run the model under autocast to bfloat16.

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
    # Losses and metrics are computed from float32 outputs, also if the model computes in bfloat16.
    halves = (torch.bfloat16, torch.float16)
    for place, leaf in enumerate(leaves):
        if getattr(leaf, "dtype", None) in halves:
            leaves[place] = leaf.float()
    return tree.tree_unflatten(leaves, structure)


@dataclass
class TrainStep:
    """One optimizer step over one or several batches, as a single graph.

    Attributes that are not listed here are arguments of `fit`.

    Attributes:
        arrange: converts a batch from the layout in which it is sent to the device into the batch
            that `core.batches` yields. The conversion is a part of the step's program, so a
            replayed step contains it, too.
        further_parts: function of a batch that returns the third and later arguments of the loss.
        shapes: number of expected batch shapes; each causes one compilation.
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
        # Processor time of this thread in all steps so far: of whole steps, and of the Python code
        # of captured steps, without the hand-over of their programs to the device.
        self.host_seconds = 0.0
        self._python_seconds = 0.0
        self._interval_start: Moment | None = None
        self._has_advised = False
        self.index_checks = IndexChecks()
        self.flops = StepFlops(self.core, shapes=self.shapes, model=self.model, loss=self.loss)
        self._can_watch_model = False
        self._is_weighted: bool | None = None  # whether the loss returns (total, weight)
        self.begin_augmenting(self.augment)
        if self.replay and not self._replay and backend.traced and not backend.is_recording:
            where = _where_without_replay(backend)
            self.core.print(f"replay=True has no effect here: it is not supported {where}")

    def begin_augmenting(self, augment: Callable | None) -> None:
        """Augment the batches of all later steps; None: do not augment them.

        Augmentation changes the graph. So replay and the count of recompilations start anew.
        """
        self.augment = augment
        self.monitor = RecompileMonitor(self.core.backend, shapes=self.shapes)
        self._replay = None
        if self.replay and self._programs:
            # The objects whose code runs in the step, and whose tensors the step may change.
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
        """The model to evaluate and to save as the best: the averaged model if there is one."""
        return self.averaged_model.module if self.averaged_model else self.model

    @property
    def lr(self) -> object:
        """The next step's learning rate in the optimizer's first group: a number or a tensor."""
        lr = self.optimizer.param_groups[0]["lr"]
        if hasattr(lr, "detach"):
            return lr.detach().clone()  # because a scheduler changes a tensor in place
        return float(lr)

    def __call__(
        self, number: int, batches: tuple, flags: tuple, *, is_last: bool = False
    ) -> tuple:
        """Run one optimizer step, with the gradients of the batches' joint loss.

        Args:
            number: the number of the step, from 1.
            batches: the step's batches, as they were sent to the device.
            flags: two float32 tensors, (), to be averaged over the cores; see `TimeLimit`.
            is_last: whether an epoch ends with this step.

        Returns:
            two float32 tensors on the device: this core's loss, (); and means over the cores, (3,),
            of the loss and of the two flags. With a weighted loss, a fourth element has the
            mean of the weight.
        """
        losses = None
        began = time.thread_time()
        if self._replay:
            self._replay.begin_step(number, is_last=is_last)
        # `Replay.step` returns None if the step must be captured.
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
        """Return the total seconds in which programs have run on the device; None if unknown."""
        if self._programs is None:
            return None
        _, seconds = self._programs.executions()
        return seconds

    def end_epoch(self) -> None:
        """Make all cores capture the next step, because user code may run between epochs."""
        if self._replay:
            self._replay.capture_next()

    def start_interval(self) -> None:
        """Begin to measure host and device times, if `fit` may recommend replay.

        Call it while no step runs on the device.
        """
        if self._replay or self._has_advised:
            return
        # XLA:CPU shares its processors with Python, so only a TPU is measured.
        if self._programs and self.core.backend.in_graph:
            self._interval_start = self._now()

    def end_interval(self, steps: int) -> None:
        """Advise the use of replay, once, if it would have saved time in the last steps."""
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
        """Run the Python code of a step, and then the program that this code has recorded."""
        self.monitor.start_step(batches)
        first_step = contextlib.nullcontext()
        if self.index_checks.is_due:
            first_step = self._checking_indices(batches)
        capturing = contextlib.nullcontext([])
        watching_forward = contextlib.nullcontext()
        if self._replay:
            capturing = self._replay.capturing(number, batches, flags)
            watching_forward = self._replay.watching_forward()
        # On XLA, the code below only records operations. At the end of the block the program is
        # compiled, if it is new, and handed to the device.
        with self.core.step(), capturing as losses:
            began = time.thread_time()
            with watching_forward, first_step:
                loss = self._backward(batches)
            losses += self._update(loss, flags)
            # Replay reads which tensors are alive at the end of the step: only its results may be.
            del loss
            self._python_seconds += time.thread_time() - began
        message = self.monitor.end_step(number)
        if message:
            self.core.print(message)
        if self._replay and self._replay.agree(number):
            self.monitor.expect()
        return tuple(losses)

    def _checking_indices(self, batches: tuple) -> contextlib.AbstractContextManager:
        """Check labels and token ids within the block, and store the limits for later batches."""
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
        """Compute the gradients of all batches of a step, and return their joint loss.

        Returns:
            a `Loss` of () float32 tensors. Without weights, it is the mean of the batches' losses.
            With weights, it is the sum of their totals and the sum of their weights.
        """
        total = None
        weight = None
        for batch in batches:
            loss = self._loss(batch)
            value = loss.total
            # Reshape and divide only if needed: each is one more operation in every step.
            if value.ndim:
                value = value.reshape(())
            if len(batches) > 1 and not self._is_weighted:
                value = value / len(batches)
            value.backward()
            value = value.detach().float()
            total = value if total is None else total + value
            if self._is_weighted:
                mine = weight_on_device(loss)
                # `+ 0` makes a new tensor: `optimizer_step` writes into it, and the weight may be a
                # tensor of the user's.
                weight = mine + 0 if weight is None else weight + mine
        return Loss(total, weight)

    def _loss(self, batch) -> Loss:
        """Return the loss of one batch, given in the layout in which it was sent."""
        # In the first step, `watching` checks the labels and token ids in all functions that can be
        # watched; later it does nothing. The model has its own flag: it may be compiled.
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
            # If all targets of this core are ignored, its loss is 0, and not 0 / 0 = NaN.
            local = torch.where(weight == 0, loss.total, loss.total / weight)
        # The collective of the gradients also averages loss and flags. A second collective would be
        # one more wait for the slowest core in every step.
        reduced = torch.stack([loss.total, *flags])
        self.monitor.check_graph(self.model, reduced)
        averaged = [reduced, *self._buffers()]
        self.core.optimizer_step(
            self.optimizer, clip=self.max_grad_norm, average_also=averaged, weight=weight
        )
        # After the optimizer's step, so that the average contains the new weights.
        if self.averaged_model:
            self._update_average(self.model)
        if weight is not None:
            # `optimizer_step` has replaced `reduced` and `weight` by their means over the cores.
            mean, *flags = reduced
            reduced = torch.stack([mean / weight, *flags, weight])
        return [local, reduced]


def _where_without_replay(backend) -> str:
    """Return, for a message, on which traced backends replay is not supported."""
    if backend.chips > 1:
        return "for a sharded model"
    if backend.shares_process:
        return "if two cores share a process"
    return "on several XLA:CPU processes"
