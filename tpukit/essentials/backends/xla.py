"""torch_xla: TPU cores, and what all that torch_xla runs on has in common."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from tpukit.essentials.backends.protocol import Backend, Compiling, Runtime, Topology
from tpukit.essentials.backends.running_variance import correct_running_variance
from tpukit.essentials.display import Failed, InvalidValueError, NotInstalledError, optional_subpackage
from tpukit.essentials.environment import runtime_started

# KiB of VMEM that one operation may use, by generation; of others libtpu decides. On a v5e, which has 128 MiB, it gives
# 16: a few fusions of convolutions need more, and would be compiled again in small pieces (benchmarks/preflight.py).
_VMEM_OF_AN_OPERATION = {"v5e": 22 * 1024}
# Where one process has all chips, their parts of a gradient are added up in the type of the product that makes it, so
# under autocast in bfloat16. With this flag it is float32, as in the ordinary launch, at no more cycles; libtpu 0.0.17,
# that of torch 2.8, knows the flag and stays with bfloat16.
_IN_FLOAT32 = "xla_tpu_spmd_f32_accum_for_bf16_ar"


class TorchXla(Backend):
    """What torch_xla does the same way on a TPU and on XLA:CPU: the graph, copies, counters."""

    traced = True
    kept = None  # what this process has done with kept programs; torch_xla takes a load for a compile
    _uncounted = 0

    def seed(self, seed: int) -> None:
        import torch_xla

        torch_xla.manual_seed(seed)  # of this core alone: its random numbers are drawn on the device

    def set_precision(self, precision: str) -> None:
        import torch_xla

        # torch_xla.backends.set_mat_mul_precision, without the warning that it logs every time (2.8 and 2.9).
        torch_xla._XLAC._xla_set_mat_mul_precision(precision)

    def sync(self) -> None:
        import torch_xla

        torch_xla.sync()  # cuts the graph here and runs it
        super().sync()

    def wait(self) -> None:
        import torch
        import torch_xla
        import torch_xla.core.xla_model as xm

        began = time.monotonic()
        # Not torch_xla.sync: the report would count it as a step. And its wait=True, as this one's, returns before the
        # device is done (2.9.0, XLA:CPU).
        torch_xla._XLAC._xla_sync_live_tensors(str(self.device), [], True)
        if self.shares_process:  # wait_device_ops would lock the other cores; one core does its work in order
            self.to_cpu([torch.zeros((), device=self.device)])
        else:
            xm.wait_device_ops()
        self.waits = (*self.waits[-63:], time.monotonic() - began)
        self.wait_count += 1

    def to_device(self, tensors: list) -> list:
        import torch_xla.core.xla_model as xm

        return xm.send_cpu_data_to_device(tensors, self.device)

    def to_cpu(self, tensors: list) -> list:
        import torch_xla

        tensors = [tensor.detach() for tensor in tensors]
        on_device = [tensor for tensor in tensors if tensor.device.type == "xla"]
        if on_device:
            torch_xla._XLAC._xla_sync_multi(on_device, devices=[], wait=True, sync_xla_data=False)
            copies = iter(self._copies(on_device))
        return [next(copies) if tensor.device.type == "xla" else tensor for tensor in tensors]

    def _copies(self, tensors: list) -> list:
        import torch_xla

        return torch_xla._XLAC._xla_get_cpu_tensors(tensors)

    # torch_xla counts for the whole process, so for both cores of a v2 or v3 chip.

    def compiles(self) -> tuple[int, float]:
        from torch_xla.debug import metrics

        loaded, loading = self.loads()
        count = (metrics.counter_value("UncachedCompile") or 0) - loaded
        seconds = (metrics.metric_data("CompileTime") or (0, 0))[1] / 1e9 - loading
        return count, seconds if count else 0.0  # torch_xla's own share of a load is no compile

    def loads(self) -> tuple[int, float]:
        return (self.kept.loaded, self.kept.loading_seconds) if self.kept else (0, 0.0)

    def compiling(self) -> Compiling | None:
        from torch_xla.debug import metrics

        # The one is counted before a graph is compiled, the other after, and both calls let other threads run while
        # they last (2.8 and 2.9). Asking takes 0.1 ms.
        begun = metrics.counter_value("UncachedCompile") or 0
        done, _, samples = metrics.metric_data("CompileTime") or (0, 0, ())
        self._uncounted = max(self._uncounted, done - begun)  # graphs that only the second counter knows
        if begun + self._uncounted <= done:
            return None
        last = samples[-1][1] / 1e9 if samples else None
        return Compiling(begun, last, *(self.kept.now() if self.kept else ()))

    def metrics(self) -> dict[str, tuple[int, float]]:
        from torch_xla.debug import metrics

        sums = {name: metrics.metric_data(name)[:2] for name in metrics.metric_names()}
        return {**sums, **{name: (metrics.counter_value(name), 0.0) for name in metrics.counter_names()}}


class Tpu(TorchXla):
    """One TPU core. Everything here is recorded into the graph of the step; `sync` compiles and runs it."""

    in_graph = True

    def __init__(self) -> None:
        import torch
        import torch_xla
        import torch_xla.runtime as xr

        self.rank = xr.global_ordinal()
        self.world_size = xr.world_size()
        self.device = torch_xla.device()
        self.real = torch.float32  # a TPU has no float64 of its own

    def barrier(self) -> None:
        import torch_xla.core.xla_model as xm

        xm.rendezvous("tpukit")

    def all_reduce(self, tensor, op: str):
        import torch
        import torch_xla.core.xla_model as xm

        if op in ("min", "max") and tensor.dtype in (torch.int64, torch.float64) and self.world_size > 1:
            # The TPU compiler: "Supported lowering only of Sum all reduce" for these two (libtpu 0.0.17 and 0.0.21).
            everyone = xm.all_gather(tensor.unsqueeze(0), dim=0)
            return everyone.amin(0) if op == "min" else everyone.amax(0)
        kinds = {"min": xm.REDUCE_MIN, "max": xm.REDUCE_MAX}
        if op == "mean" and not tensor.is_floating_point():
            tensor = tensor.to(self.real)
        scale = 1.0 / self.world_size if op == "mean" else 1.0
        return xm.all_reduce(kinds.get(op, xm.REDUCE_SUM), tensor, scale=scale)

    def gather(self, tensor):
        import torch_xla.core.xla_model as xm

        return xm.all_gather(tensor, dim=0)

    def reduce_scatter(self, tensor):
        import torch_xla.core.xla_model as xm

        return xm.reduce_scatter(xm.REDUCE_SUM, tensor, 1.0, scatter_dim=0, shard_count=self.world_size)

    def broadcast(self, tensors: list) -> None:
        import torch_xla.core.xla_model as xm

        xm.collective_broadcast(tensors, root_ordinal=0)
        self.sync()

    def average(self, tensors: list) -> None:
        import torch_xla.core.xla_model as xm

        if self.world_size > 1 and tensors:  # of no tensors, torch_xla 2.9 ends with a segmentation fault
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
        except RuntimeError:  # a client that does not count
            return {}
        return {"peak": info["peak_bytes_used"], "limit": info["bytes_limit"]}


class XlaRuntime(Runtime):
    """One process per TPU chip."""

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
                f"cores={cores} cannot be had: torch_xla runs on one core or on all {machine.cores}",
                found=f"{machine.chips} {machine.generation} chips",
                fix=f"cores=1, or leave cores out for all {machine.cores}",
            )
        kind, processes = machine.generation, 1 if cores == 1 else machine.chips
        return Topology(self.name, f"TPU {kind} core", cores or machine.cores, processes, generation=kind)

    def is_started(self) -> bool:
        return runtime_started()

    def load(self, topology: Topology) -> None:
        super().load(topology)
        try:
            import_torch_xla("TPU")
        except OSError as error:
            if not type(error).__module__.startswith("requests"):
                raise
            raise Failed(
                "torch_xla does not import: it asks Google Cloud's metadata server which TPU this is, and gets no "
                "answer",
                found=f"{type(error).__name__}: {str(error)[:200]}",
                fix=(
                    "outside of Google Cloud say it yourself, for eight v5e chips: TPU_SKIP_MDS_QUERY=1, "
                    "TPU_ACCELERATOR_TYPE=v5litepod-8,"
                    "\nTPU_HOST_BOUNDS=1,1,1, TPU_CHIPS_PER_HOST_BOUNDS=2,4,1, TPU_WORKER_ID=0; then restart the "
                    "kernel"
                ),
            ) from error

    def core(self, topology: Topology) -> Tpu:
        """Return the core that has been started."""
        return Tpu()

    def start(self, body: Callable[[Backend], None], topology: Topology, *, process: int, meeting_point) -> None:
        if topology.device_number is not None:
            # What torch_xla's configure_one_chip_topology sets for chip 0, unless an image has set something else.
            os.environ |= {
                "TPU_VISIBLE_CHIPS": str(topology.device_number),
                "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
                "TPU_PROCESS_BOUNDS": "1,1,1",
            }

        given = os.environ.get("LIBTPU_INIT_ARGS", "")
        os.environ["LIBTPU_INIT_ARGS"] = with_own_flags(given, topology.generation, sharded=topology.chips > 1)

        def on_core() -> None:
            backend = self.core(topology)
            backend.shares_process = topology.cores > topology.processes
            body(backend)

        start_pjrt("TPU", on_core, topology, process=process)


def import_torch_xla(device_type: str) -> None:
    """Import torch_xla in the kernel, so that the workers inherit it; it takes ten seconds, and starts no runtime.

    With no PJRT_DEVICE the import would choose one, keep it for the kernel and log a warning; and with torch 2.8 and
    Triton it would start processes that compile for GPUs, as many as there are processors.
    """
    with variable_set("PJRT_DEVICE", device_type), variable_set("TORCH_WARM_POOL", "0"):
        import torch_xla._internal.pjrt  # noqa: F401


def start_pjrt(device_type: str, on_core: Callable[[], None], topology: Topology, *, process: int) -> None:
    """Start this process's chip, number `process` of the run's, and call the function on each core of the chip.

    One chip starts the single-process way: Colab's advertises the bounds of four chips, and a multi-process start-up
    would wait for the other three. With "CPU" for "TPU", the same start-up finds one XLA:CPU core. Where several chips
    are one core, the process has all of the host, and the function is called once.
    """
    # Set, not defaulted: without it torch_xla falls back to the CPU with one log line.
    os.environ["PJRT_DEVICE"] = device_type
    import torch_xla._internal.pjrt as pjrt
    import torch_xla.runtime as xr

    # Without the subpackage Adam is PyTorch's, which records seven operations for one.
    with contextlib.suppress(NotInstalledError), optional_subpackage("the short Adam"):
        from tpukit.accelerators import shorten_adam

        shorten_adam()
    correct_running_variance()
    _complete_torch()
    TorchXla.kept = topology.kept.enter() if topology.kept else None

    if topology.chips > 1:
        xr.use_spmd()  # before the first device; the start of a single process would leave it one chip
        on_core()
    elif topology.processes == 1:
        pjrt._run_singleprocess(on_core)
    else:
        pjrt._run_thread_per_device(process, topology.processes, on_core, pjrt.initialize_multiprocess)


def _complete_torch() -> None:
    """Give torch the module of the device that torch.utils.checkpoint asks for: `torch.xla`, with the random numbers.

    What it computes again is the same with it, dropout included. XLA may join it with the first time, which costs
    the memory that was to be saved: `torch_xla.utils.checkpoint` has a barrier against that.
    """
    import types

    import torch
    import torch_xla.core.xla_model as xm

    module = types.ModuleType("torch.xla")
    module._initialized = True  # else the state of the random numbers would not be kept
    module.device, module.device_count = contextlib.nullcontext, lambda: 1
    module.get_rng_state = lambda device=None: xm.get_rng_state()
    module.set_rng_state = lambda state, device=None: xm.set_rng_state(state)
    if not hasattr(torch, "xla"):
        torch._register_device_module("xla", module)


def with_own_flags(given: str, generation: str, *, sharded: bool) -> str:
    """Add the kit's flags to LIBTPU_INIT_ARGS; one that is there already stays."""
    own = {"xla_tpu_scoped_vmem_limit_kib": _VMEM_OF_AN_OPERATION.get(generation), _IN_FLOAT32: sharded and "true"}
    added = [f"--{flag}={value}" for flag, value in own.items() if value and flag not in given]
    return " ".join([given, *added]).strip()


@contextlib.contextmanager
def variable_set(name: str, value: str) -> Iterator[None]:
    """Have a variable in the environment for as long as this lasts."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
