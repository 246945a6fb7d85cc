"""The backend of torch_xla: TPU cores, and the parts common to all devices of torch_xla."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from tpukit.essentials.backends.protocol import Backend, Compiling, Runtime, Topology
from tpukit.essentials.backends.torch_patches import complete_torch, correct_running_variance
from tpukit.essentials.display import (
    InvalidValueError,
    NotInstalledError,
    TpukitRuntimeError,
    optional_subpackage,
)
from tpukit.essentials.environment import runtime_started

# VMEM in KiB that an operation may use, by generation; for other generations libtpu's default
# applies. A v5e has 128 MiB, of which libtpu allows 16 MiB. A few fusions of convolutions need
# more, and the compiler would split them into small pieces (benchmarks/preflight.py).
_VMEM_OF_AN_OPERATION = {"v5e": 22 * 1024}
# In a sharded run the compiler adds the chips' parts of a gradient in the dtype of the matrix
# product that computes it, which is bfloat16 under autocast. With this flag it adds in float32, as
# in other runs, and needs no more cycles. libtpu 0.0.17 (for torch 2.8) accepts the flag but still
# adds in bfloat16.
_IN_FLOAT32 = "xla_tpu_spmd_f32_accum_for_bf16_ar"
_NANOSECONDS = 1e9
_WAITS = 64  # calls of `wait` whose seconds are stored


class TorchXla(Backend):
    """The parts that a TPU and XLA:CPU have in common: graphs, copies, counters."""

    traced = True
    # The compilation cache in this process. torch_xla counts a load from it as a compilation.
    compile_cache = None
    # Number of compilations that torch_xla counted at their end, but not at their beginning.
    _uncounted = 0

    def seed(self, seed: int) -> None:
        import torch_xla

        torch_xla.manual_seed(seed)  # only this core's generator

    def set_precision(self, precision: str) -> None:
        import torch_xla

        # The same as torch_xla.backends.set_mat_mul_precision, which logs a warning in every call
        # (2.8 and 2.9).
        torch_xla._XLAC._xla_set_mat_mul_precision(precision)

    def sync(self) -> None:
        import torch_xla

        torch_xla.sync()  # ends the graph here, compiles it if it is new, and runs it
        super().sync()

    def wait(self) -> None:
        import torch
        import torch_xla
        import torch_xla.core.xla_model as xm

        began = time.monotonic()
        # Not torch_xla.sync, which the report would count as a step. The True for waiting has no
        # effect, here and there: both calls return before the device is done (2.9.0, XLA:CPU).
        torch_xla._XLAC._xla_sync_live_tensors(str(self.device), [], True)
        if self.shares_process:
            # wait_device_ops would block the other cores of the process. A device does its work in
            # order, so a copy to the host waits for all earlier work of this core.
            self.to_cpu([torch.zeros((), device=self.device)])
        else:
            xm.wait_device_ops()
        seconds = time.monotonic() - began
        self.waits = (*self.waits, seconds)[-_WAITS:]
        self.wait_count += 1

    def to_device(self, tensors: list) -> list:
        import torch_xla.core.xla_model as xm

        return xm.send_cpu_data_to_device(tensors, self.device)

    def to_cpu(self, tensors: list) -> list:
        import torch_xla

        tensors = [tensor.detach() for tensor in tensors]
        on_device = [tensor for tensor in tensors if tensor.device.type == "xla"]
        if not on_device:
            return tensors
        torch_xla._XLAC._xla_sync_multi(on_device, devices=[], wait=True, sync_xla_data=False)
        copies = iter(self._copies(on_device))
        return [next(copies) if tensor.device.type == "xla" else tensor for tensor in tensors]

    def _copies(self, tensors: list) -> list:
        import torch_xla

        return torch_xla._XLAC._xla_get_cpu_tensors(tensors)

    # torch_xla's counters belong to the process, so on v2 and v3 they are those of both cores.

    def compiles(self) -> tuple[int, float]:
        from torch_xla.debug import metrics

        loaded, loading_seconds = self.loads()
        count = (metrics.counter_value("UncachedCompile") or 0) - loaded
        if not count:
            return 0, 0.0  # the rest of "CompileTime" is torch_xla's own part of loads
        _, nanoseconds, *_ = metrics.metric_data("CompileTime") or (0, 0)
        return count, nanoseconds / _NANOSECONDS - loading_seconds

    def loads(self) -> tuple[int, float]:
        if self.compile_cache is None:
            return 0, 0.0
        return self.compile_cache.loaded, self.compile_cache.loading_seconds

    def compiling(self) -> Compiling | None:
        from torch_xla.debug import metrics

        # The first counter rises before the compilation of a graph, the second after it. Other
        # threads may run between the two reads (2.8 and 2.9). The two reads take 0.1 ms.
        begun = metrics.counter_value("UncachedCompile") or 0
        done, _, samples = metrics.metric_data("CompileTime") or (0, 0, ())
        self._uncounted = max(self._uncounted, done - begun)
        if begun + self._uncounted <= done:
            return None
        last_seconds = None
        if samples:
            _, nanoseconds = samples[-1]
            last_seconds = nanoseconds / _NANOSECONDS
        activity = self.compile_cache.now() if self.compile_cache else ()
        return Compiling(begun, last_seconds, *activity)

    def metrics(self) -> dict[str, tuple[int, float]]:
        from torch_xla.debug import metrics

        found = {name: metrics.metric_data(name)[:2] for name in metrics.metric_names()}
        for name in metrics.counter_names():
            found[name] = (metrics.counter_value(name), 0.0)
        return found


class Tpu(TorchXla):
    """A TPU core. It records operations into a graph, which `sync` compiles and runs."""

    in_graph = True

    def __init__(self) -> None:
        import torch
        import torch_xla
        import torch_xla.runtime as xr

        self.rank = xr.global_ordinal()
        self.world_size = xr.world_size()
        self.device = torch_xla.device()
        self.real = torch.float32  # a TPU only emulates float64

    def barrier(self) -> None:
        import torch_xla.core.xla_model as xm

        xm.rendezvous("tpukit")

    def all_reduce(self, tensor, op: str):
        import torch
        import torch_xla.core.xla_model as xm

        if op == "mean":
            tensor = self.with_fractions(tensor)
            return xm.all_reduce(xm.REDUCE_SUM, tensor, scale=1.0 / self.world_size)
        if op == "sum":
            return xm.all_reduce(xm.REDUCE_SUM, tensor, scale=1.0)
        is_wide = tensor.dtype in (torch.int64, torch.float64)
        if is_wide and self.world_size > 1:
            # For these dtypes the TPU compiler supports no minimum or maximum: "Supported lowering
            # only of Sum all reduce" (libtpu 0.0.17 and 0.0.21). So gather, and reduce here.
            everyone = xm.all_gather(tensor.unsqueeze(0), dim=0)
            return everyone.amin(0) if op == "min" else everyone.amax(0)
        kind = xm.REDUCE_MIN if op == "min" else xm.REDUCE_MAX
        return xm.all_reduce(kind, tensor, scale=1.0)

    def gather(self, tensor):
        import torch_xla.core.xla_model as xm

        return xm.all_gather(tensor, dim=0)

    def reduce_scatter(self, tensor):
        import torch_xla.core.xla_model as xm

        options = {"scale": 1.0, "scatter_dim": 0, "shard_count": self.world_size}
        return xm.reduce_scatter(xm.REDUCE_SUM, tensor, **options)

    def broadcast(self, tensors: list) -> None:
        import torch_xla.core.xla_model as xm

        # On one core it would multiply every weight by 1, which is one more graph to compile.
        if self.world_size > 1:
            xm.collective_broadcast(tensors, root_ordinal=0)
        self.sync()

    def average(self, tensors: list) -> None:
        import torch_xla.core.xla_model as xm

        # With an empty list torch_xla 2.9 ends in a segmentation fault.
        if self.world_size > 1 and tensors:
            xm.all_reduce(xm.REDUCE_SUM, tensors, scale=1.0 / self.world_size)

    def init_process_group(self):
        import torch.distributed as dist
        import torch_xla.distributed.xla_backend  # noqa: F401

        if not dist.is_initialized():
            dist.init_process_group("xla", init_method="xla://")
        return dist.group.WORLD

    def memory(self) -> dict[str, int]:
        import torch_xla

        try:
            info = torch_xla._XLAC._xla_memory_info(str(self.device))
        except RuntimeError:  # the client does not measure memory, as XLA:CPU
            return {}
        return {"peak": info["peak_bytes_used"], "limit": info["bytes_limit"]}


class XlaRuntime(Runtime):
    """The runtime of TPU chips with torch_xla: a process per chip."""

    name = "xla"
    backend = Tpu
    hardware = "TPU"
    package = "torch_xla"
    keeps_compiles = True
    sharded = "xla:sharded"

    def is_present(self, machine) -> bool:
        return bool(machine.chips)

    def topology(self, machine, cores: int | None) -> Topology:
        if cores not in (None, 1, machine.cores):
            raise InvalidValueError(
                f"cores={cores} is not supported: torch_xla uses 1 core or all {machine.cores}",
                found=f"{machine.chips} {machine.generation} chips",
                fix=f"cores=1, or leave cores out for all {machine.cores}",
            )
        return Topology(
            self.name,
            device=f"TPU {machine.generation} core",
            cores=cores or machine.cores,
            processes=1 if cores == 1 else machine.chips,
            generation=machine.generation,
        )

    def is_started(self) -> bool:
        return runtime_started()

    def load(self, topology: Topology) -> None:
        """Import the modules of the workers.

        Raises:
            TpukitRuntimeError: torch_xla asked Google Cloud's metadata server about the TPU, and
                got no answer.
        """
        super().load(topology)
        try:
            import_torch_xla("TPU")
        except OSError as error:
            # The errors of requests derive from OSError. Their module's name avoids its import.
            if not type(error).__module__.startswith("requests"):
                raise
            raise TpukitRuntimeError(
                "torch_xla cannot be imported: it asks Google Cloud's metadata server which TPU "
                "this is, and gets no answer",
                found=f"{type(error).__name__}: {str(error)[:200]}",
                fix="outside of Google Cloud set the variables yourself, for eight v5e chips: "
                "TPU_SKIP_MDS_QUERY=1, TPU_ACCELERATOR_TYPE=v5litepod-8,\n"
                "TPU_HOST_BOUNDS=1,1,1, TPU_CHIPS_PER_HOST_BOUNDS=2,4,1, TPU_WORKER_ID=0; "
                "then restart the kernel",
            ) from error

    def core(self, topology: Topology) -> Tpu:
        """Return the `Backend` of the core whose device has started in this thread."""
        return Tpu()

    def start(
        self,
        body: Callable[[Backend], None],
        topology: Topology,
        *,
        process: int,
        meeting_point,
    ) -> None:
        if topology.device_number is not None:
            # The variables that torch_xla's configure_one_chip_topology sets for chip 0. It uses
            # `setdefault`, so these values remain.
            os.environ |= {
                "TPU_VISIBLE_CHIPS": str(topology.device_number),
                "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
                "TPU_PROCESS_BOUNDS": "1,1,1",
            }
        given = os.environ.get("LIBTPU_INIT_ARGS", "")
        flags = with_own_flags(given, topology.generation, sharded=topology.chips > 1)
        os.environ["LIBTPU_INIT_ARGS"] = flags

        def on_core() -> None:
            backend = self.core(topology)
            backend.shares_process = topology.cores > topology.processes
            body(backend)

        start_pjrt("TPU", on_core, topology, process=process)


def import_torch_xla(device_type: str) -> None:
    """Import torch_xla in the kernel, for all workers; start no runtime.

    The import takes ten seconds.

    Args:
        device_type: "TPU" or "CPU".
    """
    # Without PJRT_DEVICE torch_xla would choose a device, set the variable in the kernel and log a
    # warning. Without TORCH_WARM_POOL=0, torch 2.8 with Triton would start one process per
    # processor, to compile for GPUs.
    with variable_set("PJRT_DEVICE", device_type), variable_set("TORCH_WARM_POOL", "0"):
        import torch_xla._internal.pjrt  # noqa: F401


def start_pjrt(
    device_type: str, on_core: Callable[[], None], topology: Topology, *, process: int
) -> None:
    """Start the device of a worker process, and call a function on each of its cores.

    A run with one worker process calls torch_xla's function for a single process. The function for
    several processes would wait forever on Colab, where one chip reports the bounds of four. In a
    sharded run the process has all chips of the host as one core, and `on_core` is called once.

    Args:
        device_type: "TPU"; or "CPU" for an XLA:CPU core.
        on_core: the function, which is called in the thread of each core.
        topology: the layout of the run.
        process: number of this worker process, from 0.
    """
    # Not `setdefault`: with another value torch_xla would use the CPU, and only log a line.
    os.environ["PJRT_DEVICE"] = device_type
    import torch_xla._internal.pjrt as pjrt
    import torch_xla.runtime as xr

    # Without the subpackage Adam is PyTorch's own, which records seven operations per parameter.
    with contextlib.suppress(NotInstalledError), optional_subpackage("the short Adam"):
        from tpukit.accelerators import shorten_adam

        shorten_adam()
    correct_running_variance()
    complete_torch()
    TorchXla.compile_cache = topology.compile_cache.enter() if topology.compile_cache else None

    if topology.chips > 1:
        # Before the first device starts. `_run_singleprocess` is not used, because it would give
        # the process only one chip.
        xr.use_spmd()
        on_core()
    elif topology.processes == 1:
        pjrt._run_singleprocess(on_core)
    elif topology.cores == topology.processes:
        _run_in_this_thread(on_core, process, topology.processes)
    else:
        pjrt._run_thread_per_device(
            local_rank=process,
            local_world_size=topology.processes,
            fn=on_core,
            initializer_fn=pjrt.initialize_multiprocess,
        )


def _run_in_this_thread(on_core: Callable[[], None], process: int, processes: int) -> None:
    """Start the only device of this process, and call the function in the main thread.

    torch_xla's own start (`_run_thread_per_device`) would call the function in a thread of a pool.
    There no signal could interrupt a `time.sleep`, a lock, or a wait for another core.
    """
    import torch_xla
    import torch_xla._internal.pjrt as pjrt
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    pjrt.initialize_multiprocess(process, processes)
    (device,) = xm.get_xla_supported_devices()
    torch_xla._XLAC._xla_set_default_device(device)
    xr._init_world_size_ordinal()
    on_core()


def with_own_flags(given: str, generation: str, *, sharded: bool) -> str:
    """Add tpukit's flags to LIBTPU_INIT_ARGS, but keep flags that the user has set.

    Args:
        given: the user's value of LIBTPU_INIT_ARGS.
        generation: the generation of the chip, such as "v5e".
        sharded: whether one process has all chips.
    """
    own = {}
    if generation in _VMEM_OF_AN_OPERATION:
        own["xla_tpu_scoped_vmem_limit_kib"] = _VMEM_OF_AN_OPERATION[generation]
    if sharded:
        own[_IN_FLOAT32] = "true"
    added = [f"--{flag}={value}" for flag, value in own.items() if flag not in given]
    return " ".join([given, *added]).strip()


@contextlib.contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment in this block; restore it afterwards."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
