"""Which backend a run takes on a machine, and how its cores are laid out over processes."""

import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import replace

from tpukit.essentials.backends import REGISTRY, Runtime, Topology, runtimes
from tpukit.essentials.display import InvalidValueError, TpukitError
from tpukit.essentials.environment import (
    OLDEST_TORCH,
    ONE_PROCESS_VARIABLES,
    MachineInfo,
    how_to_restart,
    install_line,
    is_too_old,
)

_WHEELS = "Linux on x86-64, Python 3.11 to 3.13 and torch 2.8 or 2.9: torch_xla has no other wheels"
WORKER = "tpukit core"  # how the name of a worker process begins


class RuntimeInUseError(TpukitError, RuntimeError):
    """This process is a worker, or has started the device's runtime, so a fork of it could not start its own."""


def choose_topology(host: MachineInfo, cores: int | None, backend: str | None) -> Topology:
    """Choose backend, cores and processes for a machine; None chooses the best backend and all cores there are.

    Raises:
        ValueError: what was asked for cannot be had there.
    """
    names = [name for name, runtime in sorted(runtimes().items()) if runtime.is_for_launch]
    wanted = host.tpu_package if backend is None and host.chips else backend
    if wanted in REGISTRY and wanted not in runtimes():
        REGISTRY[wanted].load()  # raises NotInstalledError
    if backend not in (None, *names):
        raise ValueError(f"backend is one of None, {', '.join(map(repr, names))}; got {backend!r}")
    if cores is not None and (isinstance(cores, bool) or not isinstance(cores, int) or cores < 1):
        raise ValueError(f"cores is a whole number, at least 1, or None for all there are, got {cores!r}")
    torch = host.versions.get("torch") or OLDEST_TORCH
    if is_too_old(torch):
        raise InvalidValueError(
            f"torch {torch} is older than this kit can run: its first is {OLDEST_TORCH}",
            found=f"torch {torch}, torch_xla {host.versions.get('torch_xla')}",
            fix=install_line(host) or f"an environment with torch {OLDEST_TORCH} or later",
        )
    runtime = _choose_runtime(host, backend)
    if runtime.package and host.versions.get(runtime.package) is None:
        raise InvalidValueError(
            f"the {runtime.name.partition(':')[0]} backend needs {runtime.package}, which is not installed",
            found=host.summary,
            fix=(f"{runtime.how_to_install or install_line(host, for_graphs=True) or _WHEELS}; or backend='cpu'"),
        )
    return runtime.topology(host, cores)


def choose_device(host: MachineInfo, device: int, cores: int | None, backend: str | None) -> Topology:
    """Return a run of one process on the one chip or GPU of that number; a CPU process stands in for it.

    Raises:
        ValueError: there is none of that number, or more cores are asked for.
    """
    there = choose_topology(host, None, backend).processes or 1  # 0 where nothing can be forked
    if isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < there or cores not in (None, 1):
        raise InvalidValueError(
            f"device is the number of one chip, 0 to {there - 1} here, and runs one core",
            found=f"device={device!r}, cores={cores!r}",
            fix=f"launch(..., device={there - 1}), or leave device out for all",
        )
    return replace(choose_topology(host, 1, backend), device_number=device)


def refuse_one_process_variables(topology: Topology, environ: Mapping[str, str] = os.environ) -> None:
    """Raise where variables that give one process its part of the chips would be inherited by all workers.

    libtpu would then start each of them as "rank 0 of 1": they would train models of their own, in silence.
    """
    left = [f"{name}={environ[name]}" for name in ONE_PROCESS_VARIABLES if name in environ]
    if left and topology.processes * topology.chips > 1 and runtimes()[topology.backend].hardware == "TPU":
        pops = ", ".join(f'"{one.partition("=")[0]}"' for one in left)
        raise InvalidValueError(
            f"{left[0].partition('=')[0]} gives a process a part of the chips, and this run takes all",
            found=f"{', '.join(left)}, which every worker would inherit",
            fix=f"for name in ({pops},): os.environ.pop(name), then launch; or cores=1",
        )


def _choose_runtime(host: MachineInfo, backend: str | None) -> Runtime:
    """Return the runtime that was asked for, or what rehearses for it where the machine has no such device."""
    if backend is None:  # nothing slower than plain CPU processes unless it is asked for
        first, *others = [one for one in runtimes().values() if one.dry_run_of is None and one.is_present(host)]
        same = [one for one in (first, *others) if one.hardware == first.hardware]
        return next((one for one in same if one.package == host.tpu_package), first)
    asked = runtimes()[backend]
    dry_runs = [one for one in runtimes().values() if one.dry_run_of == backend and one.is_present(host)]
    return asked if asked.is_present(host) or not dry_runs else dry_runs[0]


def refuse_if_in_use(host: MachineInfo, environ: Mapping[str, str] = os.environ) -> None:
    """Raise `RuntimeInUseError` if this process is a worker, or has started or changed a runtime that no fork can share."""
    for process in (multiprocessing.current_process(), multiprocessing.parent_process()):
        if process and process.name.startswith(WORKER):
            raise RuntimeInUseError(
                "launch was called inside a worker, whose run has the cores already",
                found=f"this is {process.name}, or a process of its own",
                fix="call launch in the notebook, one after the other; in here call the function itself: fn(core)",
            )
    if environ.get("XLA_USE_SPMD", "0") not in ("", "0", "false"):
        raise RuntimeInUseError(
            "the notebook has called xr.use_spmd(), which every worker would inherit",
            found=f"XLA_USE_SPMD={environ['XLA_USE_SPMD']}, which gives all chips to one process",
            fix=f'{how_to_restart(host)}, without that call; launch(..., shard="fsdp") makes it in its own process',
        )
    started = [name.upper() for name, runtime in runtimes().items() if runtime.is_started()]
    if started:
        raise RuntimeInUseError(
            f"this kernel has started the {' and the '.join(started)} runtime, and a fork of it cannot start its own",
            found=(
                "an earlier cell did it: torch_xla.device(), xm.xla_device(), xr.world_size(), xm.master_print()"
                "\nmet.metrics_report(), torch_xla.sync(), torch_xla.manual_seed() and .cuda() do, imports do not;"
                "\nwhere torch_tpu is loaded, .backward() does, unless setup() came before `import torch`"
            ),
            fix=f"{how_to_restart(host)}, and keep such calls inside the worker function",
        )
