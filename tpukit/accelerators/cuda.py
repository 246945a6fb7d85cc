"""Run on NVIDIA GPUs, with one process per GPU, and with NCCL for the collectives."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tpukit.essentials.backends import Backend, Cpu, CpuRuntime, Topology
from tpukit.essentials.display import InvalidValueError, counted

_PROC = Path("/proc/driver/nvidia/gpus")  # NVIDIA's driver has a folder per GPU in it
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def count(environ: Mapping[str, str] = os.environ, gpus: Path = _PROC) -> int:
    """Return the number of GPUs that this process may use, from the driver's own list.

    `torch.cuda.is_available()` is not called, because it starts CUDA, and a process that has
    started CUDA cannot fork workers.

    Args:
        environ: environment variables; CUDA_VISIBLE_DEVICES limits the GPUs.
        gpus: the driver's folder.
    """
    present = _present(gpus)
    visible = environ.get(_VISIBLE)
    if visible is None:
        return present
    return min(present, len(_chosen(visible, present)))


def _present(gpus: Path = _PROC) -> int:
    """Return the number of GPUs of this machine."""
    return len(list(gpus.iterdir())) if gpus.is_dir() else 0


def _chosen(visible: str, present: int) -> list[str]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES makes visible.

    CUDA uses the GPUs before the first invalid entry, and no other.

    Args:
        visible: the value, numbers or names such as "GPU-8932f937".
        present: the number of GPUs of this machine.
    """
    chosen = []
    for part in visible.split(","):
        name = part.strip()
        is_number = name.isdecimal() and int(name) < present
        if not is_number and not name.startswith(("GPU-", "MIG-")):
            break
        chosen.append(name)
    return chosen


class Cuda(Cpu):
    """The backend of a core on a GPU. For collectives, NCCL sends data between the GPUs."""

    transport = "nccl"
    can_reopen = False
    waits_idle = False  # CUDA spins while it waits for the GPU

    def open_device(self):
        import torch

        # In a run over several hosts, the rank counts the cores of all hosts. The ranks of a host
        # are consecutive and at most as many as its GPUs, so each has a GPU of its own.
        number = self.rank % torch.cuda.device_count()
        torch.cuda.set_device(number)
        return torch.device("cuda", number)

    def seed(self, seed: int) -> None:
        import torch

        torch.cuda.manual_seed(seed)

    def set_precision(self, precision: str) -> None:
        import torch

        torch.set_float32_matmul_precision(precision)
        # PyTorch's default rounds the inputs of convolutions to TF32.
        torch.backends.cudnn.allow_tf32 = precision == "high"

    def wait(self) -> None:
        import torch

        torch.cuda.synchronize(self.device)

    def memory(self) -> dict[str, int]:
        import torch

        _, total = torch.cuda.mem_get_info(self.device)
        return {"peak": torch.cuda.max_memory_allocated(self.device), "limit": total}


class CudaRuntime(CpuRuntime):
    """Starts one process per GPU, in the same way as CPU processes."""

    name = "cuda"
    backend = Cuda
    hardware = "GPU"

    def is_present(self, machine) -> bool:
        return count() > 0

    def topology(self, machine, cores: int | None) -> Topology:
        # Fewer cores than GPUs are fine. A run on one host uses the first GPUs.
        gpus = count()
        if gpus == 0 or (cores or 1) > gpus:
            wanted = "backend='cuda'" if cores is None else f"cores={cores}"
            fix = "backend='cpu' for a dry run"
            if gpus:
                fix = f"leave cores out for all GPUs; or {fix}"
            raise InvalidValueError(
                f"{wanted} is not supported: this machine has {counted(gpus, 'GPU')}",
                found="NVIDIA's driver reports the GPUs; CUDA_VISIBLE_DEVICES may hide some",
                fix=fix,
            )
        cores = cores or gpus
        return Topology(self.name, "CUDA GPU", cores, processes=cores)

    def start(
        self,
        body: Callable[[Backend], None],
        topology: Topology,
        *,
        process: int,
        meeting_point,
    ) -> None:
        # For a launch on one chosen GPU, such as a job of `launch_each`: hide all other GPUs.
        if topology.device_number is not None:
            all_of_them = ",".join(map(str, range(count())))
            visible = os.environ.get(_VISIBLE, all_of_them)
            os.environ[_VISIBLE] = _chosen(visible, _present())[topology.device_number]
        super().start(body, topology, process=process, meeting_point=meeting_point)

    def is_started(self) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and torch.cuda.is_initialized()
