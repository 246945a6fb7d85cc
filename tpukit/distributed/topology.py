"""How a run is laid out on a machine: which backend, how many cores, over how many processes."""

import os
import sys
from dataclasses import dataclass

from tpukit.backends import cuda, xla
from tpukit.machine.environment import install_line
from tpukit.machine.host import Host
from tpukit.machine.instructions import how_to_restart

_MOST_REHEARSAL_CORES = 8  # as many as the largest notebook TPU has


class RuntimeInUse(RuntimeError):
    """This process has started the device's runtime, so a forked worker could not start its own."""


@dataclass(frozen=True)
class Topology:
    """How a run is laid out: `cores` over `processes`, none where the only process is this one."""

    backend: str
    device: str
    cores: int
    processes: int

    @property
    def rehearsal(self) -> bool:
        """True where CPU processes stand in for cores."""
        return self.backend in ("cpu", "xla rehearsal")


def choose_topology(machine: Host, cores: int | None, backend: str | None) -> Topology:
    """Choose backend, cores and processes for a machine; None chooses the best and all there are.

    Raises:
        ValueError: what was asked for cannot be had there.
    """
    if backend not in (None, "cpu", "cuda", "xla"):
        raise ValueError(f"backend is one of None, 'cpu', 'cuda' and 'xla', got {backend!r}")
    if cores is not None and (isinstance(cores, bool) or not isinstance(cores, int) or cores < 1):
        raise ValueError(f"cores is a whole number, at least 1, or None for all there are, got {cores!r}")
    gpus = cuda.count()
    if backend is None:
        backend = "xla" if machine.chips else "cuda" if gpus else "cpu"
    if backend == "xla" and machine.versions.get("torch_xla") is None:
        raise ValueError(
            f"the xla backend needs torch_xla, which is not installed\n"
            f"  found: {machine.summary}\n"
            f"  fix:   {install_line(machine) or 'Linux on x86-64, the only one it has wheels for'}; or backend='cpu'"
        )
    if backend == "xla" and machine.chips:
        if cores not in (None, 1, machine.cores):
            raise ValueError(
                f"cores={cores} cannot be had: torch_xla runs on one core or on all {machine.cores}\n"
                f"  found: {machine.chips} {machine.generation} chips\n"
                f"  fix:   cores=1, or leave cores out for all {machine.cores}"
            )
        chips = 1 if cores == 1 else machine.chips
        return Topology("tpu", f"TPU {machine.generation} core", cores or machine.cores, chips)
    if backend == "cuda":
        if not gpus or (cores or 1) > gpus:
            raise ValueError(
                f"cores={cores} GPUs cannot be had: this machine shows {gpus}\n"
                "  found: NVIDIA's driver and CUDA_VISIBLE_DEVICES\n"
                "  fix:   leave cores out for all there are, or backend='cpu' to rehearse"
            )
        return Topology("cuda", "CUDA GPU", cores or gpus, cores or gpus)
    if cores is None:
        cores = min(_MOST_REHEARSAL_CORES, max(2, machine.cpus)) if hasattr(os, "fork") else 1
    if backend == "xla":
        return Topology("xla rehearsal", "XLA:CPU", cores, cores)
    if not hasattr(os, "fork"):
        if cores > 1:
            raise ValueError(
                f"cores={cores} CPU processes cannot be had: {machine.platform} on {sys.platform} has no fork\n"
                "  fix:   leave cores out to rehearse with one core in this process, or use Linux (WSL on Windows)"
            )
        return Topology("cpu", "CPU", 1, 0)
    return Topology("cpu", "CPU", cores, cores)


def refuse_if_in_use(machine: Host) -> None:
    """Raise `RuntimeInUse` if this process has started a device's runtime, which a fork of it cannot share."""
    held = "XLA" if xla.runtime_started() else ""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        held = "CUDA"
    if held:
        raise RuntimeInUse(
            f"this kernel has started the {held} runtime, and a fork of it cannot start its own\n"
            "  found: an earlier cell did it: torch_xla.device(), xm.xla_device(), xr.world_size(), xm.master_print()\n"
            "         met.metrics_report(), torch_xla.sync(), torch_xla.manual_seed() and .cuda() do, imports do not\n"
            f"  fix:   {how_to_restart(machine)}, and keep such calls inside the worker function"
        )
