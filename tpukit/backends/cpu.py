"""Plain CPU tensors and gloo: processes that rehearse for cores."""

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

Body = Callable[["Cpu"], None]
_LARGE = 2**20  # bytes from which a tensor is a message of its own, which saves copying it there and back


class Cpu:
    """One CPU process among `world_size`, joined by gloo over the loopback interface."""

    collectives = "gloo"
    after_sync: Callable[[], None] | None = None  # where a running profile marks its steps

    def __init__(self, rank: int, world_size: int, listener: socket.socket | None):
        import torch

        self.rank = rank
        self.world_size = world_size
        self.device = self.open_device()
        self.real = torch.float64  # what a Python number becomes on its way through a collective
        self._join(listener)

    def open_device(self):
        """Return the device of this core; tensors of a batch and of a model go there."""
        import torch

        return torch.device("cpu")

    def _join(self, listener: socket.socket | None) -> None:
        import torch.distributed as dist

        if listener is None:  # one core, in the kernel's own process
            dist.init_process_group(self.collectives, store=dist.HashStore(), rank=0, world_size=1)
            return
        # Rank 0 serves on a socket the kernel opened: no port to agree on, none to collide, no file to leave behind.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        port = listener.getsockname()[1]
        master = {"is_master": True, "master_listen_fd": listener.detach()} if self.rank == 0 else {}
        listener.close()  # where it was inherited only: with rank 0 dead, nobody must seem to listen
        store = dist.TCPStore("127.0.0.1", port, self.world_size, wait_for_workers=False, **master)
        with _without_stdout():  # gloo greets every peer there
            dist.init_process_group(self.collectives, store=store, rank=self.rank, world_size=self.world_size)

    def seed(self, seed: int) -> None:
        """Seed the device's random numbers, where they are not the CPU's."""

    def sync(self) -> None:
        """Hand over the work recorded so far; a CPU has done it already."""
        if self.after_sync:
            self.after_sync()

    def barrier(self) -> None:
        """Wait until every core is here."""
        import torch.distributed as dist

        dist.barrier()

    def all_reduce(self, tensor, op: str):
        """Return the sum, mean, min or max over the cores, the same bits on each."""
        import torch.distributed as dist

        if op == "mean" and not tensor.is_floating_point():
            tensor = tensor.to(self.real)
        if self.world_size == 1:  # nor is a graph cut for it
            return tensor.clone()
        (host,) = self.to_cpu([tensor])
        host = host.clone().contiguous()
        dist.all_reduce(host, {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}.get(op, dist.ReduceOp.SUM))
        return (host / self.world_size if op == "mean" else host).to(tensor.device)

    def gather(self, tensor):
        """Return the tensors of all cores, one after the other along the first axis.

        Raises:
            ValueError: the shapes or dtypes differ. Chips would hang here instead: this is what a rehearsal is for.
        """
        import torch
        import torch.distributed as dist

        if self.world_size == 1:
            return tensor.clone()
        (host,) = self.to_cpu([tensor])
        forms: list[object] = [None] * self.world_size
        dist.all_gather_object(forms, f"{tuple(host.shape)} {host.dtype}".replace("torch.", ""))
        if len(set(forms)) > 1:
            found = ", ".join(f"core {rank} {form}" for rank, form in enumerate(forms))
            raise ValueError(
                "gather needs the same shape and dtype on every core\n"
                f"  found: {found}\n"
                "  fix:   pad to one shape first; core.batches(..., shuffle=False) does, and core.gather(...)[:n] cuts"
            )
        parts = [torch.empty_like(host) for _ in range(self.world_size)]
        dist.all_gather(parts, host.contiguous())
        return torch.cat(parts).to(tensor.device)

    def broadcast(self, tensors: list) -> None:
        """Overwrite the tensors with rank 0's."""
        import torch.distributed as dist

        self._change(tensors, lambda flat: dist.broadcast(flat, src=0, async_op=True))

    def average(self, tensors: list) -> None:
        """Overwrite the tensors with their mean over the cores: gradients, after backward."""
        import torch.distributed as dist

        def divide(flat) -> None:
            flat /= self.world_size

        self._change(tensors, lambda flat: dist.all_reduce(flat, async_op=True), divide)

    def _change(self, tensors: list, send: Callable, finish: Callable = lambda flat: None) -> None:
        """Change tensors by a collective: large ones where they lie, all small ones of a dtype in one message."""
        import torch

        if self.world_size == 1:
            return
        hosts = self.to_cpu(tensors)
        messages: dict[object, list[int]] = {}
        for number, host in enumerate(hosts):
            is_large = host.nbytes >= _LARGE and host.is_contiguous()
            messages.setdefault(number if is_large else host.dtype, []).append(number)
        sent = []
        for key, numbers in messages.items():
            parts = [hosts[number].reshape(-1) for number in numbers]
            flat = torch.cat(parts) if isinstance(key, torch.dtype) else parts[0]
            sent.append((numbers, flat, send(flat)))
        for numbers, flat, work in sent:
            work.wait()
            finish(flat)
            for number, part in zip(numbers, flat.split([hosts[number].numel() for number in numbers]), strict=True):
                host, tensor = hosts[number], tensors[number].detach()
                if part.data_ptr() != host.data_ptr() or host.device != tensor.device:  # not changed where it lies
                    tensor.copy_(part.view(tensor.shape))

    def to_device(self, tensors: list) -> list:
        """Return the tensors of a batch on the device; a thread other than the core's may ask."""
        return [tensor.to(self.device, non_blocking=True) for tensor in tensors]

    def to_cpu(self, tensors: list) -> list:
        """Return the tensors in host memory; those that live there are returned as they are."""
        return [tensor.detach().cpu() for tensor in tensors]

    # ---- what the device has to tell ---------------------------------------------------------------------------

    def compiles(self) -> tuple[int, float] | None:
        """Return the graphs this process has compiled, and the seconds it took; None where nothing is compiled."""
        return None

    def metrics(self) -> dict[str, tuple[int, float]]:
        """Return torch_xla's metrics and counters by name, as (count, total); without it there are none."""
        return {}

    def memory(self) -> dict[str, int]:
        """Return "peak", the most bytes in use on the device so far, and "limit", what it has; empty if not known."""
        return {}

    def start_trace(self, folder: Path) -> None:
        """Record what the device and the host do, until `stop_trace`."""
        from torch.profiler import ProfilerActivity, profile

        # A torch built for CUDA logs an error line where no driver is, though nothing is wrong.
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        self._trace, self._trace_folder = profile(activities=kinds), folder
        self._trace.start()

    def stop_trace(self) -> None:
        """End the recording and write it into the folder, as a Chrome trace."""
        self._trace.stop()
        self._trace.export_chrome_trace(str(self._trace_folder / "trace.json.gz"))

    def trace_step(self, number: int) -> contextlib.AbstractContextManager:
        """Name a stretch of the recording as a step."""
        from torch.profiler import record_function

        return record_function(f"step {number}")


def run(body: Body, *, rank: int, world_size: int, listener: socket.socket, core: type[Cpu] = Cpu) -> None:
    """Join the other processes and run the body as core `rank`."""
    body(core(rank, world_size, listener))


@contextlib.contextmanager
def _without_stdout() -> Iterator[None]:
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
