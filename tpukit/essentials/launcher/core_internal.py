"""The part of a `Core` that tpukit itself uses, as `core.internal`.

A worker function calls the methods of `Core`. The launcher, `fit` and the other subpackages also
follow the core's steps, mark its collectives, and compare it with the other cores. These methods
are here, so that the reference of `Core` lists only methods for users.
"""

import contextlib
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator

from tpukit.essentials.launcher import messages
from tpukit.essentials.launcher.agreement import Agreement
from tpukit.essentials.launcher.core_values import parameters_of
from tpukit.essentials.launcher.flops import FlopCounter
from tpukit.essentials.launcher.notebook_output import NotebookOutput
from tpukit.essentials.launcher.random_numbers import RandomNumbers

_STEPS_IN_MEDIAN = 64  # enough steps that the few which compile do not change the median


class CoreInternal:
    """The part of a core that only tpukit's own code uses. It may change in any version.

    Attributes:
        send: sends a message to the kernel.
        activity: the current activity of the core, which its heartbeats report.
        output: lines, numbers and progress bars in the notebook.
        agreement: checks that the cores are in sync; see `tpukit.essentials.launcher.agreement`.
        numbers: the random number generators; see `tpukit.essentials.launcher.random_numbers`.
        seed_of_launch: the seed of all random numbers of the run.
        in_fit: True while `fit` trains. `fit` compares the cores itself.
        open_steps: number of `core.step` blocks that are open in the worker function.
        has_met: whether this core has completed a collective.
        step_seconds: the time of each of the last 64 steps on the host, in seconds.
        flops_per_second: FLOP/s of the last 64 steps whose FLOPs are known. The time of a step
            begins at the end of the previous step. The FLOPs of evaluation steps are unknown.
        seconds_of_step: seconds between the ends of the last two steps; None before the second
            step has ended.
        flops: the counter of `Core.counting_flops`, which counts the FLOPs of the first step.
        flops_of_step: FLOPs of the forward and backward pass of the current step; None if they are
            not known.
        ends_between_steps: True while SIGTERM and a session's END only set `end_requested`.
        end_requested: True once SIGTERM or END has arrived; see `finishing_steps`.
        stops_together: True if a session asked all cores to end, and all are at the same boundary.
        began: `time.monotonic()` of the start of the core; in a session, of the run.
        compiled_before: seconds of compilation in this process before the run.
        at_boundary: called at each boundary if the core belongs to a session. A boundary is the
            beginning of an outermost step, or of a collective outside of steps. All cores
            must begin the same steps and collectives, so they pass the same boundaries in order.
        on_abandon: functions that `abandon` calls.
    """

    def __init__(self, core, send: Callable[[object], None], seed: int):
        self._core = core
        self.send = send
        self.seed_of_launch = seed
        self.activity = messages.Activity()
        self.output = NotebookOutput(core.rank, send, self.activity, core.to_host)
        self.agreement = Agreement(core)
        self.numbers = RandomNumbers(core)
        self.step_seconds: deque[float] = deque(maxlen=_STEPS_IN_MEDIAN)
        self.flops_per_second: deque[float] = deque(maxlen=_STEPS_IN_MEDIAN)
        self.flops_of_step: int | None = None
        self._last_step_ended: float | None = None
        self.seconds_of_step: float | None = None
        self.at_boundary: Callable[[], None] | None = None
        self.on_abandon: list[Callable[[], None]] = []
        self.begin_run()

    def begin_run(self) -> None:
        """Reset the state of a run. A run that raised may have left its state behind."""
        self.began = time.monotonic()
        _, self.compiled_before = self._core.backend.compiles() or (0, 0.0)
        self.in_fit = False
        self.open_steps = 0
        self.has_met = False
        self.flops = FlopCounter()
        self._flops_are_known = False
        self.flops_of_step = None
        self.seconds_of_step = None
        self._last_step_ended = None
        self.ends_between_steps = False
        self.end_requested = False
        self.stops_together = False
        self.step_seconds.clear()
        self.flops_per_second.clear()
        self.activity.count = 0
        self.activity.waiting = None
        self.activity.doing = None
        self.output.begin_run()
        self.agreement.begin_run()

    def abandon(self) -> None:
        """Forget the unfinished step of a run that failed or was interrupted; keep the weights."""
        import torch

        # The next backward() would add to these gradients. All cores would average the same wrong
        # sum, so no check would report it. No list has all optimizers of the user, but the garbage
        # collector knows every object.
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.optim.Optimizer) and not self._is_of_another(thing):
                thing.zero_grad(set_to_none=True)
        self.agreement.clear_gradients()
        for forget in self.on_abandon:
            forget()

    def _is_of_another(self, optimizer) -> bool:
        """Return whether an optimizer belongs to the other core of this process (v2 and v3)."""
        if not self._core.backend.shares_process:
            return False
        mine = self._core.device
        devices = {parameter.device for parameter in parameters_of(optimizer)}
        return any(device.type == mine.type and device != mine for device in devices)

    def _pass_boundary(self) -> None:
        is_outermost = not self.open_steps and self.activity.waiting is None
        if self.at_boundary is not None and is_outermost:
            self.at_boundary()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run the step inside the `with` block, as `Core.step` documents."""
        self._pass_boundary()
        began = time.monotonic()
        core = self._core
        traced = core.backend.traced
        self.activity.doing = "tracing" if traced else None
        self.open_steps += 1
        if core.backend.shares_process and not self.numbers.seeded:
            # Two cores draw from the host's generator, so its state cannot be restored after the
            # step.
            core.seed(*self.numbers.words)
        try:
            with self.numbers.own():
                yield
            self.activity.doing = "running" if traced else None
            core.sync()
        finally:
            self.activity.doing = None
            self.open_steps -= 1
        self._count_step(began)
        if not self.open_steps:
            self.agreement.end_of_step()

    @contextlib.contextmanager
    def counting_flops(self) -> Iterator[None]:
        """Count the FLOPs of the `with` block, as `Core.counting_flops` documents."""
        if self.flops.problem:  # printed already, in the block that had it
            yield
            return
        counting = contextlib.nullcontext() if self._flops_are_known else self.flops.counting()
        with counting:
            yield
        self.flops_of_step = self.flops.flops
        if self.flops.problem:
            self.flops_of_step = None
            self.output.print(f"FLOP/s and MFU are not known: {self.flops.problem}")

    @contextlib.contextmanager
    def replayed_step(self) -> Iterator[None]:
        """Replay a captured step in the `with` block; `fit` uses this instead of `step`."""
        self._pass_boundary()
        began = time.monotonic()
        self.activity.doing = "running"
        try:
            with self.in_graph("step"):
                yield
        finally:
            self.activity.doing = None
        self._count_step(began)
        if self._core.backend.after_sync:
            self._core.backend.after_sync()

    def _count_step(self, began: float) -> None:
        now = time.monotonic()
        self.activity.count += 1
        self.step_seconds.append(now - began)
        seconds = None  # the first step has no step before it
        if self._last_step_ended is not None:
            seconds = now - self._last_step_ended
        self._last_step_ended = now
        self.seconds_of_step = seconds
        if self.flops_of_step is not None:
            self._flops_are_known = True
            self.add_flops(self.flops_of_step)
        self.flops_of_step = None

    def add_flops(self, flops: int) -> None:
        """Record the FLOPs of the step that has just ended, for `Core.tflops_per_second`."""
        if flops and self.seconds_of_step:
            self.flops_per_second.append(flops / self.seconds_of_step)

    @contextlib.contextmanager
    def together(self, name: str) -> Iterator[None]:
        """Mark a collective in the `with` block, for heartbeats and for failure reports.

        If the block raises an error, the failure report names the collective: another core
        probably caused the failure.
        """
        self._pass_boundary()
        with self._marked(name):
            yield

    @contextlib.contextmanager
    def _marked(self, name: str) -> Iterator[None]:
        activity = self.activity
        outer = activity.waiting
        activity.waiting = outer or name  # of nested collectives, the user called the outermost
        try:
            yield
        except BaseException as error:
            # On the exception itself, because user code may catch it and raise another from it.
            error.waiting = activity.waiting
            raise
        finally:
            activity.waiting = outer
        activity.count += 1
        self.has_met = True

    @contextlib.contextmanager
    def in_graph(self, name: str) -> Iterator[None]:
        """Report that the core waits for the device, while the `with` block runs.

        If the device's graph contains collectives, the core also waits for the other cores. If
        another core never runs this graph, the watchdog's error says that this core waits in
        `name`.
        """
        if not self._core.backend.in_graph or self.activity.waiting is not None:
            yield
            return
        has_met = self.has_met  # restored below, because the graph may contain no collective
        # This is no boundary: core 0 alone copies the numbers that it logs to the host.
        with self._marked(name):
            yield
        self.has_met = has_met

    @contextlib.contextmanager
    def finishing_steps(self) -> Iterator[None]:
        """On SIGTERM in the block, only set `end_requested`, so that `fit` can still save.

        `fit` ends its step, and core 0 saves. After a SIGTERM or an interrupt, the kernel waits up
        to `signals.SAVE_SECONDS` for that.
        """
        self.ends_between_steps = True
        self.send(messages.FinishesSteps(self._core.rank))
        try:
            yield
        finally:
            self.ends_between_steps = False

    def snapshot(self, value: object) -> object:
        """Copy a value to host memory; the copy shares no memory with the value."""
        import torch
        from torch.utils import _pytree as tree

        def cloned(tensor):
            return tensor.clone() if tensor.is_cpu else tensor

        return self._core.to_host(tree.tree_map_only(torch.Tensor, cloned, value))
