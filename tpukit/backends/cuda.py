"""CUDA: one process a GPU, joined by NCCL."""

import os
from collections.abc import Mapping
from pathlib import Path

from tpukit.backends.cpu import Cpu

_PROC = Path("/proc/driver/nvidia/gpus")


def count(environ: Mapping[str, str] = os.environ, gpus: Path = _PROC) -> int:
    """Count the GPUs this process may use, from the driver's own list.

    CUDA is not asked: `torch.cuda.is_available()` starts it, and a process that has started CUDA cannot fork workers.
    """
    there = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    chosen = [part for part in visible.split(",") if part.strip() not in ("", "-1", "NoDevFiles")]
    return min(there, len(chosen))


class Cuda(Cpu):
    """One GPU of this machine; collectives stay on the GPUs."""

    collectives = "nccl"

    def open_device(self):
        """Take the GPU whose number is this core's rank."""
        import torch

        torch.cuda.set_device(self.rank)
        return torch.device("cuda", self.rank)

    def seed(self, seed: int) -> None:
        """Seed this GPU's random numbers."""
        import torch

        torch.cuda.manual_seed(seed)

    def to_cpu(self, tensors: list) -> list:
        """Return the tensors as they are: NCCL wants them on the GPU."""
        return [tensor.detach().to(self.device) for tensor in tensors]

    def memory(self) -> dict[str, int]:
        """Return "peak", the most bytes that tensors took on this GPU so far, and "limit", what it has."""
        import torch

        _, total = torch.cuda.mem_get_info(self.device)
        return {"peak": torch.cuda.max_memory_allocated(self.device), "limit": total}
