"""Choose the backend of a run, and divide its cores among processes.

    machine               asked for          backend          cores x processes
    8 v5e chips           nothing            xla              8 x 8
    4 v3 chips            nothing            xla              8 x 4 (two cores per chip)
    no chip, 4 CPUs       nothing            cpu              4 x 4
    no chip               backend="xla"      xla:simulator    as asked (or xla:cpu)

It also raises an error if forks of this kernel could not start a runtime of their own.
"""

import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral

from tpukit.essentials.backends import REGISTRY, Runtime, Topology, runtimes
from tpukit.essentials.display import InvalidValueError, NotInstalledError, TpukitError
from tpukit.essentials.environment import (
    ONE_PROCESS_VARIABLES,
    MachineInfo,
    how_to_install,
    how_to_restart,
    install_line,
    torch_problem,
)

WORKER = "tpukit core"  # the name of a worker process begins like this
_WHEELS = "Linux on x86-64, Python 3.11 to 3.13 and torch 2.8 or 2.9: torch_xla has no other wheels"


class RuntimeInUseError(TpukitError, RuntimeError):
    """A fork of this process would not be able to start the device's runtime.

    The reason: this process is a worker, or has started or changed a runtime itself.
    """


def choose_topology(host: MachineInfo, cores: int | None, backend: str | None) -> Topology:
    """Return the layout of a run on a machine.

    Args:
        host: the machine.
        cores: number of cores; None for all.
        backend: name of the backend; None for the fastest device of the machine.

    Raises:
        InvalidValueError: the machine does not support `cores` or `backend`; torch is too old; or
            the backend's other package, such as torch_xla, is not installed.
        NotInstalledError: torch, or tpukit's own subpackage for the backend, is not installed.
    """
    _check_backend(host, backend)
    if cores is not None:
        is_count = isinstance(cores, Integral) and not isinstance(cores, bool)
        if not is_count or cores < 1:
            raise InvalidValueError(
                f"cores must be a whole number, at least 1, or None for all, got {cores!r}",
                fix="leave cores out for all, or cores=1",
            )
        cores = int(cores)  # numpy's as well
    refuse_torch(host)  # before the packages that need torch
    runtime = _choose_runtime(host, backend)
    if runtime.package and host.versions.get(runtime.package) is None:
        # The line for torch_xla depends on the machine, and is "" where it has no wheels.
        line = runtime.how_to_install or install_line(host, for_graphs=True) or _WHEELS
        raise InvalidValueError(
            f"the {runtime.name.partition(':')[0]} backend needs "
            f"{runtime.package}, which is not installed",
            found=host.summary,
            fix=f"{line}; or backend='cpu'",
        )
    return runtime.topology(host, cores)


def refuse_torch(host: MachineInfo) -> None:
    """Raise an error if torch is not installed or too old, with the text of `check`."""
    problem = torch_problem(host)
    if not problem:
        return
    if not host.versions.get("torch"):
        raise NotInstalledError(problem, fix=how_to_install(host))
    raise InvalidValueError(
        problem,
        found=f"torch_xla {host.versions.get('torch_xla') or 'is not installed'}",
        fix=how_to_install(host),
    )


def _check_backend(host: MachineInfo, backend: str | None) -> None:
    """Raise an error if there is no such backend, or its optional subpackage is absent."""
    wanted = backend
    if backend is None and host.chips:  # a machine with chips must not fall back to the CPU
        wanted = host.tpu_package
    if wanted in REGISTRY and wanted not in runtimes():
        REGISTRY[wanted].load()  # raises NotInstalledError
    names = [name for name, runtime in sorted(runtimes().items()) if runtime.is_for_launch]
    if backend is not None and backend not in names:
        raise InvalidValueError(
            f"backend must be one of None, {', '.join(map(repr, names))}; got {backend!r}",
            fix="leave backend out for the best that this machine has",
        )


def _choose_runtime(host: MachineInfo, backend: str | None) -> Runtime:
    """Return the runtime of this name, or its dry run if the machine has no such device.

    With None it returns the runtime of the fastest device: "cpu" if there is no accelerator, and
    never the dry run of another backend.
    """
    if backend is None:
        present = [
            runtime
            for runtime in runtimes().values()
            if runtime.dry_run_of is None and runtime.is_present(host)
        ]
        # The registry lists the runtimes from the fastest to the slowest. torch_xla and TorchTPU
        # use the same chips, so the installed package decides between them.
        fastest = present[0]
        for runtime in present:
            is_same_device = runtime.hardware == fastest.hardware
            if is_same_device and runtime.package == host.tpu_package:
                return runtime
        return fastest
    asked = runtimes()[backend]
    if asked.is_present(host):
        return asked
    for runtime in runtimes().values():
        if runtime.dry_run_of == backend and runtime.is_present(host):
            return runtime
    return asked


def choose_device(
    host: MachineInfo,
    device: int,
    cores: int | None,
    backend: str | None,
) -> Topology:
    """Return the layout of a run on a single chip, GPU or CPU process.

    Args:
        host: the machine.
        device: number of the device, from 0.
        cores, backend: as in `choose_topology`.

    Raises:
        InvalidValueError: there is no device of this number, or `cores` is neither 1 nor None.
    """
    count = choose_topology(host, None, backend).processes or 1  # 0 on systems without fork
    is_number = isinstance(device, Integral) and not isinstance(device, bool)
    if not is_number or not 0 <= device < count or cores not in (None, 1):
        raise InvalidValueError(
            f"device must be the number of a chip, 0 to {count - 1}, and cores must be 1 or None",
            found=f"device={device!r}, cores={cores!r}",
            fix=f"launch(..., device={count - 1}), or leave device out for all",
        )
    return replace(choose_topology(host, 1, backend), device_number=int(device))


def refuse_one_process_variables(
    topology: Topology,
    environ: Mapping[str, str] = os.environ,
) -> None:
    """Raise an error if the workers would inherit variables that are meant for one process.

    With these variables libtpu would start each worker as "rank 0 of 1". Each worker would train a
    separate model, without an error.
    """
    names = [name for name in ONE_PROCESS_VARIABLES if name in environ]
    has_several_chips = topology.processes * topology.chips > 1
    is_tpu = runtimes()[topology.backend].hardware == "TPU"
    if names and has_several_chips and is_tpu:
        left = [f"{name}={environ[name]}" for name in names]
        pops = ", ".join(f'"{name}"' for name in names)
        raise InvalidValueError(
            f"{names[0]} limits a process to a part of the chips, but this run uses all of them",
            found=f"{', '.join(left)}, which every worker would inherit",
            fix="launch with cores=1; or launch again after this line: "
            f"for name in ({pops},): os.environ.pop(name)",
        )


def refuse_if_in_use(host: MachineInfo, environ: Mapping[str, str] = os.environ) -> None:
    """Raise an error if forks of this process could not start the device's runtime.

    Raises:
        RuntimeInUseError: this process is a worker, or has started or changed a runtime that no
            fork can share.
    """
    # The parent, too, because this may be a DataLoader's process, which a worker has started.
    for process in (multiprocessing.current_process(), multiprocessing.parent_process()):
        if process and process.name.startswith(WORKER):
            raise RuntimeInUseError(
                "launch was called inside a worker, and its run already uses the cores",
                found=f"this is {process.name}, or a process that it started",
                fix=(
                    "call launch in the notebook; inside a worker call the "
                    "function itself: fn(core)"
                ),
            )
    # xr.use_spmd() sets this variable.
    if environ.get("XLA_USE_SPMD", "0") not in ("", "0", "false"):
        raise RuntimeInUseError(
            "the notebook has called xr.use_spmd(), which every worker would inherit",
            found=f"XLA_USE_SPMD={environ['XLA_USE_SPMD']}, which gives all chips to one process",
            fix=(
                f"{how_to_restart(host)}, and leave out that call; to use all chips from one "
                'process: launch(..., shard="fsdp")'
            ),
        )
    started = [name.upper() for name, runtime in runtimes().items() if runtime.is_started()]
    if started:
        raise RuntimeInUseError(
            f"this kernel has started the {' and the '.join(started)} "
            "runtime, so the workers, which are forks of this kernel, cannot start it",
            found="an earlier cell has started it; an import does not start a runtime, but these "
            "calls do:\ntorch_xla.device(), xm.xla_device(), xr.world_size(), xm.master_print(), "
            "met.metrics_report(),\ntorch_xla.sync(), torch_xla.manual_seed(), .cuda(); and "
            ".backward(),\nif torch_tpu was loaded without a call of setup() before `import torch`",
            fix=f"{how_to_restart(host)}, and keep such calls inside the worker function",
        )
