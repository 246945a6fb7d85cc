"""torch_xla: TPU cores, and XLA:CPU processes that rehearse for them. The only file that imports torch_xla."""

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tpukit.backends.cpu import Cpu


def runtime_started() -> bool:
    """Say whether this process has started the XLA runtime, without starting it."""
    if "torch_xla" not in sys.modules:  # importing it costs ten seconds, and proves nothing
        return False
    return bool(sys.modules["torch_xla"]._XLAC._xla_runtime_is_initialized())


def load(device_type: str) -> None:
    """Import torch_xla once, in the kernel, so that the workers inherit it. Starts no runtime.

    `device_type` is "TPU" or "CPU": with none in the environment the import would choose one, keep it for the kernel
    and log a warning. The kernel's environment is left as it was.
    """
    with _variable("PJRT_DEVICE", device_type):
        import torch_xla  # noqa: F401
        import torch_xla._internal.pjrt  # noqa: F401


class Tpu:
    """One TPU core. Everything here is recorded into the graph of the step; `sync` compiles and runs it."""

    collectives = "in the graph"
    after_sync: Callable[[], None] | None = None  # where a running profile marks its steps

    def __init__(self) -> None:
        import torch
        import torch_xla
        import torch_xla.runtime as xr

        self.rank = xr.global_ordinal()
        self.world_size = xr.world_size()
        self.device = torch_xla.device()
        self.real = torch.float32  # a TPU has no float64 of its own

    def seed(self, seed: int) -> None:
        """Seed this core's random numbers, which are drawn on the device."""
        import torch_xla

        torch_xla.manual_seed(seed)

    def sync(self) -> None:
        """Cut the graph here and run it; returns before the device has finished."""
        import torch_xla

        torch_xla.sync()
        if self.after_sync:
            self.after_sync()

    def barrier(self) -> None:
        """Wait until every core is here."""
        import torch_xla.core.xla_model as xm

        xm.rendezvous("tpukit")

    def all_reduce(self, tensor, op: str):
        """Return the sum, mean, min or max over the cores."""
        import torch_xla.core.xla_model as xm

        kinds = {"min": xm.REDUCE_MIN, "max": xm.REDUCE_MAX}
        if op == "mean" and not tensor.is_floating_point():
            tensor = tensor.to(self.real)
        scale = 1.0 / self.world_size if op == "mean" else 1.0
        return xm.all_reduce(kinds.get(op, xm.REDUCE_SUM), tensor, scale=scale)

    def gather(self, tensor):
        """Return the tensors of all cores, one after the other along the first axis; shapes must be the same."""
        import torch_xla.core.xla_model as xm

        return xm.all_gather(tensor, dim=0)

    def broadcast(self, tensors: list) -> None:
        """Overwrite the tensors with rank 0's."""
        import torch_xla.core.xla_model as xm

        xm.collective_broadcast(tensors, root_ordinal=0)
        self.sync()

    def average(self, tensors: list) -> None:
        """Overwrite the tensors with their mean over the cores, inside the graph."""
        import torch_xla.core.xla_model as xm

        if self.world_size > 1:
            xm.all_reduce(xm.REDUCE_SUM, tensors, scale=1.0 / self.world_size)

    def to_device(self, tensors: list) -> list:
        """Return the tensors of a batch on the device, in one transfer; a thread other than the core's may ask."""
        import torch_xla.core.xla_model as xm

        return xm.send_cpu_data_to_device(tensors, self.device)

    def to_cpu(self, tensors: list) -> list:
        """Return the tensors in host memory, in one transfer."""
        return _to_cpu(tensors)

    # ---- what torch_xla has to tell; counted for the whole process, both cores of a v2 or v3 chip -----------------

    def compiles(self) -> tuple[int, float]:
        """Return the graphs this process has compiled so far, and the seconds it took."""
        from torch_xla.debug import metrics

        return metrics.counter_value("UncachedCompile") or 0, (metrics.metric_data("CompileTime") or (0, 0))[1] / 1e9

    def metrics(self) -> dict[str, tuple[int, float]]:
        """Return torch_xla's metrics by name as (samples, their sum), times in ns; counters as (value, 0)."""
        from torch_xla.debug import metrics

        sums = {name: metrics.metric_data(name)[:2] for name in metrics.metric_names()}
        return {**sums, **{name: (metrics.counter_value(name), 0.0) for name in metrics.counter_names()}}

    def memory(self) -> dict[str, int]:
        """Return "peak", the most bytes in use on the device so far, and "limit", what it has; empty if not known."""
        import torch_xla

        try:
            told = torch_xla._XLAC._xla_memory_info(str(self.device))
        except RuntimeError:  # XLA:CPU does not count
            return {}
        return {"peak": told["peak_bytes_used"], "limit": told["bytes_limit"]}

    def graph_key(self, tensors: list) -> bytes:
        """Return what identifies the graph recorded for these tensors: 2 ms for a ResNet-34's step."""
        import torch_xla

        return torch_xla._XLAC._get_graph_hash(tensors)

    def graph_text(self, tensors: list) -> str:
        """Return the graph recorded for these tensors as HLO, constants written out: 60 ms for a ResNet-34's step."""
        import torch_xla

        return torch_xla._XLAC._get_xla_tensors_hlo(tensors)

    def record_lines(self, wanted: bool) -> None:
        """Have every operation remember the line of Python it came from, for `graph_text`."""
        import torch_xla

        torch_xla._XLAC._set_ir_debug(wanted)

    def start_trace(self, folder: Path) -> None:
        """Record what the device and the host do, until `stop_trace`."""
        from torch_xla.debug import profiler

        profiler.start_trace(folder)

    def stop_trace(self) -> None:
        """End the recording and write it into the folder, for TensorBoard and as a Chrome trace."""
        import torch_xla.core.xla_model as xm
        from torch_xla.debug import profiler

        xm.wait_device_ops()  # or the last steps would be missing
        try:
            profiler.stop_trace()
        finally:  # what could not be written would be in the way of the next
            profiler._profile_state.reset()

    def trace_step(self, number: int) -> contextlib.AbstractContextManager:
        """Name a stretch of the recording as a step, which TensorBoard groups by."""
        import torch_xla

        return torch_xla._XLAC.profiler.TraceMe("step", step_num=number, _r=1)


class Rehearsal(Cpu):
    """One XLA:CPU client among `world_size` processes, joined by gloo through host memory.

    Collectives end the graph, which they do not on a TPU; everything else about graphs is as it is there.
    """

    def open_device(self):
        """Return this process's own XLA:CPU device."""
        import torch_xla

        return torch_xla.device()

    seed = Tpu.seed
    sync = Tpu.sync
    to_device = Tpu.to_device
    compiles = Tpu.compiles
    metrics = Tpu.metrics
    graph_key = Tpu.graph_key
    graph_text = Tpu.graph_text
    record_lines = Tpu.record_lines
    start_trace = Tpu.start_trace
    stop_trace = Tpu.stop_trace
    trace_step = Tpu.trace_step

    def to_cpu(self, tensors: list) -> list:
        """Return the tensors in host memory, in one transfer."""
        return _to_cpu(tensors)


def run_tpu(body: Callable[[Tpu], None], *, rank: int, processes: int, device_type: str = "TPU") -> None:
    """Take chip `rank` of `processes` and run the body on each core of the chip.

    One chip starts the single-process way: Colab's advertises the bounds of four, and a multi-process start-up
    would wait for the other three. With "CPU" for `device_type`, the same start-up finds one XLA:CPU core.
    """
    # Set, not defaulted: without it torch_xla falls back to the CPU with one log line.
    os.environ["PJRT_DEVICE"] = device_type
    import torch
    import torch_xla._internal.pjrt as pjrt

    def on_this_core() -> None:
        # One backward() in the kernel, on any tensor, and the engine that the fork inherits has no thread for XLA
        # ("device_ready_queues_.size()" in torch 2.8 and 2.9). Without such threads it runs in this one, which loses
        # nothing: it only records the graph.
        with torch.autograd.set_multithreading_enabled(False):
            body(Tpu())

    if processes == 1:
        pjrt._run_singleprocess(on_this_core)
    else:
        pjrt._run_thread_per_device(rank, processes, on_this_core, pjrt.initialize_multiprocess)


def run_rehearsal(body: Callable[[Cpu], None], *, rank: int, world_size: int, listener: socket.socket) -> None:
    """Start an XLA:CPU client through the start-up a TPU takes, and run the body as core `rank`.

    In this start-up every process believes itself alone, so rank and world size come from the launcher.
    """
    run_tpu(lambda _: body(Rehearsal(rank, world_size, listener)), rank=rank, processes=world_size, device_type="CPU")


def _to_cpu(tensors: list) -> list:
    import torch_xla

    tensors = [tensor.detach() for tensor in tensors]
    there = [tensor for tensor in tensors if tensor.device.type == "xla"]
    if there:
        torch_xla._XLAC._xla_sync_multi(there, devices=[], wait=True, sync_xla_data=False)
        moved = iter(torch_xla._XLAC._xla_get_cpu_tensors(there))
    return [next(moved) if tensor.device.type == "xla" else tensor for tensor in tensors]


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
