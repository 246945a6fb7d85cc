"""TorchTPU, the named successor of torch_xla: TPU chips as ordinary devices, joined by torch.distributed.

Experimental, and not yet run on a chip. What it may rely on was read in torch_tpu 0.2.0 and in reports of others who
ran it on a v6e host. Everything but the chip itself runs on CPU processes and gloo, too: `TorchTpuCpu`.
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
from tpukit.accelerators.running_statistics import correct_running_statistics
from tpukit.essentials.backends import Backend, Cpu, CpuRuntime, Topology, variable_set
from tpukit.essentials.display import InvalidValueError, TpukitRuntimeError

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # `import torch` loads torch_tpu, unless this is "0"
_ADDRESSES, _SHAPE = "TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY"
_PROGRAMS = "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"
_INSTALL = (
    "pip install torch_tpu, in an environment of its own: its torch is 2.11 to 2.15, its Python 3.11 to 3.14, "
    "and torch_xla needs another torch"
)


# What is used of torch_tpu and no page of it promises, as this release has it. `make torchtpu` tells what a new release
# has moved; beside these, the variables above and the transport "tpu_dist".
SEEN = "0.2.0"
INSIDES = ("torch.tpu:is_initialized", "torch.tpu:manual_seed", "torch.tpu.distributed:set_tpu_launch_env")


class TorchTpuProcess(Cpu):
    """One process among those of a TorchTPU run, on whatever device: its launch environment and its collectives."""

    def _join(self) -> list:
        return [self.init_process_group()]  # on chips, too, it is the default group that joins them

    def take_environment(self) -> None:
        """Set the variables that tell this process which chip is its own and where the others are.

        TorchTPU has every process find the same addresses. Core 0 chooses them and hands them on through the store, so
        that the kernel's environment stays as it is and every launch has ports of its own.

        Raises:
            ValueError: the addresses found are of another number of processes.
        """
        if self.rank == 0:
            self.store.set("launch environment", json.dumps(self.launch_environment()))
        shared = json.loads(self.store.get("launch environment"))
        addresses = shared.get(_ADDRESSES)
        if addresses is not None and len(addresses.split(",")) != self.world_size:
            raise InvalidValueError(
                f"{_ADDRESSES} names {len(addresses.split(','))} processes, and this run has {self.world_size}",
                found=f"{addresses}; TorchTPU keeps what an earlier cell or the shell has set",
                fix=f'for name in ("{_ADDRESSES}", "{_SHAPE}"): os.environ.pop(name, None)',
            )
        # What torchrun sets; TorchTPU takes its chip from LOCAL_RANK and refuses a process group without the address.
        ranks = {"RANK": self.rank, "LOCAL_RANK": self.rank}
        sizes = {"WORLD_SIZE": self.world_size, "LOCAL_WORLD_SIZE": self.world_size}
        master = {"MASTER_ADDR": self.store.host, "MASTER_PORT": self.store.port}
        os.environ |= shared | {name: str(value) for name, value in (ranks | sizes | master).items()}

    def launch_environment(self) -> dict[str, str]:
        """Return what every process has to find in its environment; asked on core 0 alone."""
        return {name: os.environ[name] for name in (_ADDRESSES, _SHAPE) if name in os.environ}

    def all_reduce(self, tensor, op: str):
        import torch

        if op in ("min", "max") and tensor.dtype in (torch.int64, torch.float64) and self.world_size > 1:
            # As for torch_xla, whose compiler has only the sum of these two on a TPU.
            everyone = self.gather(tensor.unsqueeze(0))
            return everyone.amin(0) if op == "min" else everyone.amax(0)
        return super().all_reduce(tensor, op)


class TorchTpu(TorchTpuProcess):
    """One TPU chip, or one of the two cores of a 7x chip."""

    transport = "cpu:gloo,tpu:tpu_dist"  # tensors in host memory, and objects, by gloo
    in_graph = True  # work is handed over and goes on; a core waits for the others where it reads a tensor

    def open_device(self):
        import torch

        self.take_environment()
        load_torch_tpu()
        self.real = torch.float32
        correct_running_statistics()
        return torch.device("tpu", 0)  # with the number that tensors there have; a process sees its own chip alone

    def launch_environment(self) -> dict[str, str]:
        load_torch_tpu()
        before = dict(os.environ)
        given, sys.argv = sys.argv, sys.argv[:1]  # it would take the program's own arguments for flags of its own
        try:
            inside("torch.tpu.distributed:set_tpu_launch_env")(nproc_per_node=self.world_size)
        finally:
            sys.argv = given
        # A variable that was set before is kept by TorchTPU; the base class returns it, to be compared with the run.
        changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
        return super().launch_environment() | changed

    def seed(self, seed: int) -> None:
        import torch

        torch.tpu.manual_seed(seed)

    def set_precision(self, precision: str) -> None:
        import torch

        torch.set_float32_matmul_precision(precision)  # TorchTPU's own, in its place

    def wait(self) -> None:
        import torch

        torch.accelerator.synchronize()


class TorchTpuCpu(TorchTpuProcess):
    """One CPU process that rehearses for a chip of TorchTPU."""

    def open_device(self):
        self.take_environment()
        return super().open_device()


class TorchTpuRuntime(CpuRuntime):
    """One process per device of a TPU from v4 on."""

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
                f"TorchTPU does not run on {machine.generation}",
                found=machine.summary,
                fix="backend='xla', in an environment with torch_xla; or a TPU from v4 on",
            )
        if cores not in (None, 1, machine.cores):
            raise InvalidValueError(
                f"cores={cores} cannot be had: TorchTPU is launched here on one core or on all {machine.cores}",
                found=f"{machine.chips} {machine.generation} chips; it has no layout for 2 of 8",
                fix=f"cores=1, or leave cores out for all {machine.cores}",
            )
        cores = cores or machine.cores
        return Topology(self.name, f"TPU {machine.generation} core by TorchTPU", cores, processes=cores)

    def is_started(self) -> bool:
        if "torch_tpu" not in sys.modules or not hasattr(sys.modules.get("torch"), "tpu"):
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is experimental
            return bool(sys.modules["torch"].tpu.is_initialized())

    def load(self, topology: Topology) -> None:
        if topology.device_number:
            raise InvalidValueError(
                f"device={topology.device_number} cannot be had: TorchTPU gives a run of one process the first chip",
                found="no documented way to choose another",
                fix="device=0; or cores=None for all chips",
            )
        # torch_tpu is left to the workers: it reads some variables once and keeps them, and after its first tensor, or
        # the first backward() of any tensors, no fork of this process could use a chip. `setup` keeps it out, too.
        with variable_set(_AUTOLOAD, "0"):
            super().load(topology)

    def open_compile_cache(self, folders: Iterable[Path], say: Callable[[str], object]) -> CompileCache:
        return CompileCache(own_folders(folders))  # TorchTPU has such a folder of its own, and reads no other

    def start(self, body: Callable[[Backend], None], topology: Topology, *, process: int, meeting_point) -> None:
        if topology.kept:
            os.environ[_PROGRAMS] = str(topology.kept.folders[0])
        super().start(body, topology, process=process, meeting_point=meeting_point)


class TorchTpuCpuRuntime(CpuRuntime):
    """CPU processes that rehearse for TorchTPU: the same launch environment and collectives, by gloo."""

    name = "torch_tpu:cpu"
    dry_run_of = "torch_tpu"
    backend = TorchTpuCpu
    note = ", started and joined as TorchTPU's are"

    def is_present(self, machine) -> bool:
        return not machine.chips


def load_torch_tpu() -> None:
    """Load torch_tpu as `import torch` does where nothing forbids it.

    Raises:
        RuntimeError: it finds no chip. A tensor for one would end the process without a message, by SIGABRT.
    """
    import torch

    os.environ[_AUTOLOAD] = "1"  # read when torch_tpu is imported
    warnings.filterwarnings("ignore", message="<TorchTpu/ApiStage/")  # of every second call, that it is experimental
    (entry,) = metadata.entry_points(group="torch.backends", name="torch_tpu")
    with contextlib.redirect_stderr(io.StringIO()):  # where it tells, line by line, that it is loaded
        entry.load()()
    for place in INSIDES:
        inside(place)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "tpu":
        raise TpukitRuntimeError(
            "TorchTPU finds no chip that it can open",
            found=(
                f"torch_tpu {metadata.version('torch_tpu')}, torch {torch.__version__}; it looks for chips "
                "from v4 on, and their nodes in /dev/vfio"
            ),
            fix="tpukit.check() names chips without a node; in a container, start it with --privileged",
        )


def inside(place: str):
    """Return a part of torch_tpu that its pages do not promise: "module:name".

    Raises:
        TpukitRuntimeError: this release has it no more, or somewhere else.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise TpukitRuntimeError(
            f"torch_tpu {metadata.version('torch_tpu')} has no {name} in {module}, which this kit uses",
            found=f"{error}; torch_tpu {SEEN} has it",
            fix=f"pip install torch_tpu=={SEEN}, in an environment of its own; or a newer tpukit",
        ) from error
