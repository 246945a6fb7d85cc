"""torch_xla: TPU cores, and XLA:CPU processes that rehearse for them. The only file that imports torch_xla."""

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator

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
