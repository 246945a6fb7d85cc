"""CUDA: one process per GPU, joined by NCCL."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tpukit.essentials.backends import Backend, Cpu, CpuRuntime, Topology
from tpukit.essentials.display import InvalidValueError

_PROC = Path("/proc/driver/nvidia/gpus")


def count(environ: Mapping[str, str] = os.environ, gpus: Path = _PROC) -> int:
    """Count the GPUs this process may use, from the driver's own list.

    CUDA is not asked: `torch.cuda.is_available()` starts it, and a process that has started CUDA cannot fork workers.
    """
    there = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    return min(there, len(_chosen(visible)))


def _chosen(visible: str) -> list[str]:
    return [part for part in visible.split(",") if part.strip() not in ("", "-1", "NoDevFiles")]


class Cuda(Cpu):
    """One GPU of this machine; collectives stay on the GPUs."""

    transport = "nccl"
    waits_idle = False  # CUDA spins while it waits for the GPU

    def open_device(self):
        import torch

        number = self.rank % torch.cuda.device_count()  # where several hosts have as many each, the rank counts all
        torch.cuda.set_device(number)
        return torch.device("cuda", number)

    def seed(self, seed: int) -> None:
        import torch

        torch.cuda.manual_seed(seed)

    def set_precision(self, precision: str) -> None:
        import torch

        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = precision == "high"  # convolutions, which torch rounds by default

    def wait(self) -> None:
        import torch

        torch.cuda.synchronize(self.device)

    def memory(self) -> dict[str, int]:
        import torch

        _, total = torch.cuda.mem_get_info(self.device)
        return {"peak": torch.cuda.max_memory_allocated(self.device), "limit": total}


class CudaRuntime(CpuRuntime):
    """One process per GPU; started as CPU processes are, on other devices."""

    name = "cuda"
    backend = Cuda
    hardware = "GPU"

    def is_present(self, machine) -> bool:
        return count() > 0

    def topology(self, machine, cores: int | None) -> Topology:
        gpus = count()
        if not gpus or (cores or 1) > gpus:
            wanted = "a GPU" if cores is None else f"cores={cores} GPUs"
            raise InvalidValueError(
                f"{wanted} cannot be had: this machine shows {gpus}",
                found="NVIDIA's driver and CUDA_VISIBLE_DEVICES",
                fix="leave cores out for all there are, or backend='cpu' to rehearse",
            )
        return Topology(self.name, "CUDA GPU", cores or gpus, processes=cores or gpus)

    def start(self, body: Callable[[Backend], None], topology: Topology, *, process: int, meeting_point) -> None:
        if topology.device_number is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count()))))
            os.environ["CUDA_VISIBLE_DEVICES"] = _chosen(visible)[topology.device_number]
        super().start(body, topology, process=process, meeting_point=meeting_point)

    def is_started(self) -> bool:
        torch = sys.modules.get("torch")  # without torch nothing has
        return torch is not None and torch.cuda.is_initialized()
