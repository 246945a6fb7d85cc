"""Run on TorchTPU, the announced successor of torch_xla.

In TorchTPU, TPU chips are ordinary PyTorch devices, and torch.distributed connects the processes.
This module is experimental and not tested on hardware. It is based on the source of torch_tpu 0.2.0
and on public reports of runs on a v6e host. `TorchTpuCpu` runs everything except the chip itself on
CPU processes, with gloo.
"""

import contextlib
import importlib
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from tpukit.accelerators.compile_cache import CompileCache, own_folders
from tpukit.accelerators.torch_patches import correct_running_statistics
from tpukit.essentials.backends import Backend, Cpu, CpuRuntime, Topology, variable_set
from tpukit.essentials.display import InvalidValueError, TpukitRuntimeError

# Environment variables of torch and TorchTPU.
# `import torch` loads torch_tpu, unless this variable is "0".
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_ADDRESSES = "TORCH_TPU_SLICEBUILDER_ADDRESSES"
_SHAPE = "TORCH_TPU_TOPOLOGY"
_PROGRAMS = "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"
_INSTALL = (
    "pip install torch_tpu, in a separate environment: it needs torch 2.11 to 2.15 and Python 3.11 "
    "to 3.14, and torch_xla needs another torch"
)

# Undocumented parts of torch_tpu that tpukit uses, as they are in this release. The variables above
# and the transport "tpu_dist" are undocumented as well. `make torchtpu` reports the parts that a
# new release does not have.
SEEN = "0.2.0"
INSIDES = (
    "torch.tpu:is_initialized",
    "torch.tpu:manual_seed",
    "torch.tpu.distributed:set_tpu_launch_env",
)


class TorchTpuProcess(Cpu):
    """The backend of a TorchTPU process, without its device: environment and collectives."""

    def _join(self) -> list:
        return [self.init_process_group()]  # the default group joins the chips, too

    def take_environment(self) -> None:
        """Set the environment variables with this process's chip and all processes' addresses.

        Core 0 chooses the addresses and sends them to the other cores.

        Raises:
            InvalidValueError: the environment has addresses already, and their number is not the
                number of processes.
        """
        # TorchTPU needs the same addresses in every process. The kernel's environment does not
        # change, so each launch has new ports.
        if self.rank == 0:
            self.store.set("launch environment", json.dumps(self.launch_environment()))
        shared = json.loads(self.store.get("launch environment"))
        if _ADDRESSES in shared:
            self._check_addresses(shared[_ADDRESSES])
        # The variables that torchrun sets. TorchTPU chooses its chip by LOCAL_RANK, and raises an
        # error for a process group without the address.
        variables = {
            "RANK": self.rank,
            "LOCAL_RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.world_size,
            "MASTER_ADDR": self.store.host,
            "MASTER_PORT": self.store.port,
        }
        os.environ |= shared | {name: str(value) for name, value in variables.items()}

    def _check_addresses(self, addresses: str) -> None:
        count = len(addresses.split(","))
        if count != self.world_size:
            raise InvalidValueError(
                f"{_ADDRESSES} names {count} processes, and this run has {self.world_size}",
                found=f"{addresses}, which an earlier cell or the shell has set",
                fix=f'for name in ("{_ADDRESSES}", "{_SHAPE}"): os.environ.pop(name, None)',
            )

    def launch_environment(self) -> dict[str, str]:
        """Return the environment variables that every process needs. Only core 0 calls it."""
        return {name: os.environ[name] for name in (_ADDRESSES, _SHAPE) if name in os.environ}

    def all_reduce(self, tensor, op: str):
        import torch

        # For 64-bit numbers, the TPU compiler supports only the sum. So gather them instead.
        has_64_bits = tensor.dtype in (torch.int64, torch.float64)
        if op in ("min", "max") and has_64_bits and self.world_size > 1:
            everyone = self.gather(tensor.unsqueeze(0))
            return everyone.amin(0) if op == "min" else everyone.amax(0)
        return super().all_reduce(tensor, op)


class TorchTpu(TorchTpuProcess):
    """The backend of one TPU chip, or of one of the two cores of a 7x chip."""

    transport = "cpu:gloo,tpu:tpu_dist"  # gloo for objects and for tensors in host memory
    # Collectives are asynchronous: a core waits for the others when it reads a tensor.
    in_graph = True
    can_reopen = False

    def open_device(self):
        import torch

        self.take_environment()
        load_torch_tpu()
        self.real = torch.float32
        correct_running_statistics()
        # A process sees only its own chip, and TorchTPU numbers that chip 0.
        return torch.device("tpu", 0)

    def launch_environment(self) -> dict[str, str]:
        load_torch_tpu()
        before = dict(os.environ)
        arguments = sys.argv
        # TorchTPU would parse the program's arguments as its flags.
        sys.argv = arguments[:1]
        try:
            inside("torch.tpu.distributed:set_tpu_launch_env")(nproc_per_node=self.world_size)
        finally:
            sys.argv = arguments
        # TorchTPU does not replace a variable that was set before. The base class returns such
        # variables, so that `take_environment` checks their addresses.
        changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
        return super().launch_environment() | changed

    def seed(self, seed: int) -> None:
        import torch

        torch.tpu.manual_seed(seed)

    def set_precision(self, precision: str) -> None:
        import torch

        torch.set_float32_matmul_precision(precision)  # TorchTPU has replaced this function

    def wait(self) -> None:
        import torch

        torch.accelerator.synchronize()


class TorchTpuCpu(TorchTpuProcess):
    """The backend of one CPU process in a dry run of TorchTPU."""

    def open_device(self):
        self.take_environment()
        return super().open_device()


class TorchTpuRuntime(CpuRuntime):
    """Starts one process per core of a TPU, v4 or later."""

    name = "torch_tpu"
    backend = TorchTpu
    hardware = "TPU"
    package = "torch_tpu"
    how_to_install = _INSTALL
    keeps_compiles = True

    def is_present(self, machine) -> bool:
        return bool(machine.chips)

    def topology(self, machine, cores: int | None) -> Topology:
        if machine.generation in ("v2", "v3", "v2/v3"):
            raise InvalidValueError(
                f"TorchTPU does not support {machine.generation}",
                found=machine.summary,
                fix="backend='xla', in an environment with torch_xla; or a TPU from v4 on",
            )
        # TorchTPU has a layout for one chip and for all chips of a host, but not for some of them.
        if cores not in (None, 1, machine.cores):
            raise InvalidValueError(
                f"cores={cores} is not supported: TorchTPU uses 1 core or all {machine.cores}",
                found=f"{machine.chips} {machine.generation} chips; TorchTPU has "
                f"no layout for {cores} of {machine.cores} cores",
                fix=f"cores=1, or leave cores out for all {machine.cores}",
            )
        cores = cores or machine.cores
        device = f"TPU {machine.generation} core by TorchTPU"
        return Topology(self.name, device, cores, processes=cores, generation=machine.generation)

    def is_started(self) -> bool:
        if "torch_tpu" not in sys.modules or not hasattr(sys.modules.get("torch"), "tpu"):
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchTPU warns that it is experimental
            return bool(sys.modules["torch"].tpu.is_initialized())

    def load(self, topology: Topology) -> None:
        if topology.device_number:
            raise InvalidValueError(
                f"device={topology.device_number} is not supported: a run of one process on "
                "TorchTPU gets the first chip",
                found="TorchTPU documents no way to choose another chip",
                fix="device=0; or cores=None for all chips",
            )
        # Only the workers may load torch_tpu, and not the kernel. It reads some variables only
        # once. After its first tensor, or after the first backward() of any tensors, no fork of the
        # process could use a chip. `setup` also prevents the kernel from loading it.
        with variable_set(_AUTOLOAD, "0"):
            super().load(topology)

    def open_compile_cache(
        self, folders: Iterable[Path], say: Callable[[str], object]
    ) -> CompileCache:
        # TorchTPU has its own cache, with only one folder: `start` passes the first folder to it.
        return CompileCache(own_folders(folders))

    def start(
        self,
        body: Callable[[Backend], None],
        topology: Topology,
        *,
        process: int,
        meeting_point,
    ) -> None:
        if topology.compile_cache:
            os.environ[_PROGRAMS] = str(topology.compile_cache.folders[0])
        super().start(body, topology, process=process, meeting_point=meeting_point)


class TorchTpuCpuRuntime(CpuRuntime):
    """Starts a dry run of TorchTPU: CPU processes with a TPU's environment, connected by gloo."""

    name = "torch_tpu:cpu"
    dry_run_of = "torch_tpu"
    backend = TorchTpuCpu
    note = ", started and joined as on TorchTPU"

    def is_present(self, machine) -> bool:
        return not machine.chips


def load_torch_tpu() -> None:
    """Load torch_tpu. tpukit has prevented `import torch` from loading it.

    Raises:
        TpukitRuntimeError: torch_tpu finds no chip, or lacks a part that tpukit uses.
    """
    import torch

    os.environ[_AUTOLOAD] = "1"  # torch_tpu reads it when it is imported
    # Every second call warns that TorchTPU is experimental.
    warnings.filterwarnings("ignore", message="<TorchTpu/ApiStage/")
    (entry,) = metadata.entry_points(group="torch.backends", name="torch_tpu")
    with contextlib.redirect_stderr(io.StringIO()):  # torch_tpu prints each step of its loading
        load = entry.load()
        load()
    for place in INSIDES:
        inside(place)
    accelerator = torch.accelerator.current_accelerator()
    # Without a chip, the first tensor would end the process by SIGABRT, without a message.
    if accelerator is None or accelerator.type != "tpu":
        raise TpukitRuntimeError(
            "TorchTPU finds no chip that it can open",
            found=(
                f"torch_tpu {metadata.version('torch_tpu')}, torch {torch.__version__}; "
                "TorchTPU supports chips from v4 on, and opens their nodes in /dev/vfio"
            ),
            fix=(
                "call tpukit.check(), which names chips without a node; if you use a container, "
                "start the container with --privileged"
            ),
        )


def inside(place: str):
    """Return an undocumented part of torch_tpu.

    Args:
        place: the part, as "module:name".

    Raises:
        TpukitRuntimeError: the installed release of torch_tpu has no such part.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise TpukitRuntimeError(
            f"torch_tpu {metadata.version('torch_tpu')} has no "
            f"{name} in {module}, which tpukit uses",
            found=f"{error}; torch_tpu {SEEN} has this part",
            fix=f"update tpukit; or, in a separate environment, pip install torch_tpu=={SEEN}",
        ) from error
