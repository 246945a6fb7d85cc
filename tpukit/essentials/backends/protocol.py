"""The interface of every backend.

A `Runtime` knows one kind of device: it lays out a run on a machine (`Topology`) and starts it in
the worker processes. There it makes a `Backend` object per core, which has the core's device and
its collectives.

    kernel    runtime.topology(machine, cores)    -> 8 cores on 8 processes
    worker 3  runtime.start(body, topology, ...)  -> body(Backend(rank=3, world_size=8))
"""

import contextlib
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.essentials.display import (
    InvalidValueError,
    NotInstalledError,
    optional_subpackage,
)


class BackendMismatchError(InvalidValueError):
    """The cores call one collective with tensors of different shapes or dtypes."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run, each of which launches the same function on the same number of cores.

    Attributes:
        number: the number of this host, from 0.
        count: hosts of the run, 2 or more.
        address: (IP address of host 0, port), for the CPU processes or GPUs of all hosts. Chips
            find each other by the environment of a TPU VM.
        listener: on host 0, the socket that listens there.
    """

    number: int
    count: int
    address: tuple[str, int]
    listener: socket.socket | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Topology:
    """The layout of a run: its cores and processes.

    Attributes:
        backend: the name of the runtime, as in `tpukit.essentials.backends.runtimes()`.
        device: one core in words, such as "TPU v5e core".
        cores: cores of the run on this host.
        processes: worker processes, each with the same number of cores; 0 if the only core runs
            in the kernel itself.
        is_dry_run: whether CPU processes take the place of TPU cores.
        generation: the generation of a TPU, such as "v5e"; otherwise "".
        device_number: the chip or GPU, from 0, of a run of one process, while others run on the
            other chips; None if the run is alone on the machine.
        hosts: the hosts of the run; None for a single host.
        kept: the open compilation cache; None for none.
        chips: chips per core; more than 1 if the model is sharded over them.
    """

    backend: str
    device: str
    cores: int
    processes: int
    is_dry_run: bool = False
    generation: str = ""
    device_number: int | None = None
    hosts: Hosts | None = None
    kept: object | None = field(default=None, repr=False, compare=False)
    chips: int = 1

    @property
    def world_size(self) -> int:
        """Cores of the run, on all hosts."""
        return self.cores * (self.hosts.count if self.hosts else 1)

    @property
    def first_rank(self) -> int:
        """The rank of the first core of this host."""
        return self.cores * (self.hosts.number if self.hosts else 0)

    def ranks(self, process: int) -> range:
        """Return the ranks of the cores in a worker process.

        On a TPU torch_xla assigns the ranks, so these are only the probable ranks.

        Args:
            process: number of the worker process on this host, from 0.
        """
        each = self.cores // self.processes
        first = self.first_rank + process * each
        return range(first, first + each)


@dataclass(frozen=True)
class Compiling:
    """A graph that is being compiled.

    Attributes:
        number: the number of the graph in this process, from 1.
        last_seconds: the time that the graph before took; None for the first.
        doing: "compiling", or "loading" from the compilation cache.
        is_waiting: whether another process compiles it.
    """

    number: int
    last_seconds: float | None
    doing: str = "compiling"
    is_waiting: bool = False


class Backend:
    """One core's device and its collectives. A method marked "Collective" must run on every core.

    Attributes:
        rank: this core's number, 0 to world_size - 1.
        world_size: cores in the run.
        device: the torch.device of this core.
        real: the dtype that a Python number has in a collective.
        chips: chips of this core; each has a part of every tensor.
        in_graph: whether collectives are recorded into the graph of the step. Cores then wait for
            each other in `sync` and when they read a tensor, not in the call of the collective.
        waits_idle: whether a core that waits for others uses no processor.
        traced: whether a step is only recorded while Python runs, and compiled and run in `sync`.
        shares_process: whether other cores are threads of the same process, as on v2 and v3.
        can_reopen: whether `reopen` makes collectives work again after a core has left one.
        is_recording: whether `preflight` records the programs of a run. Values from the device are
            then not results, so nothing may be saved.
        waits: seconds of the last 64 calls of `wait`, if the backend can wait.
        wait_count: number of all calls of `wait`.
        after_sync: called after every `sync`, and after a step without one. A running profile
            marks its steps there.
    """

    rank: int
    world_size: int
    device: object
    real: object
    chips = 1
    in_graph = False
    waits_idle = True
    traced = False
    shares_process = False
    can_reopen = False
    is_recording = False
    waits: tuple[float, ...] = ()
    wait_count = 0
    after_sync: Callable[[], None] | None = None

    def seed(self, seed: int) -> None:
        """Seed the device's random numbers, unless they are the CPU's."""

    def set_precision(self, precision: str) -> None:
        """Set the precision of float32 matrix products and convolutions.

        Args:
            precision: "high" or "highest".
        """

    def sync(self) -> None:
        """Start the work recorded so far, and return without waiting for its end."""
        if self.after_sync:
            self.after_sync()

    def wait(self) -> None:
        """Return when the device has done all recorded work; only a stopwatch needs it."""

    def place_model(self, module) -> str:
        """Shard the weights and buffers of a module; return a line on large unsharded parts."""
        return ""

    def place_state(self, optimizer) -> None:
        """Shard the new state of an optimizer: of a first step, or from a checkpoint."""

    def barrier(self) -> None:
        """Wait until every core is here. Collective."""
        raise NotImplementedError

    def all_reduce(self, tensor, op: str):
        """Return a tensor reduced over the cores, with the same bits on each. Collective.

        Args:
            tensor: a tensor of the same shape and dtype on every core.
            op: "sum", "mean", "min" or "max".
        """
        raise NotImplementedError

    def with_fractions(self, tensor):
        """Return a tensor whose dtype can hold a mean: whole numbers become `real`."""
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor
        return tensor.to(self.real)

    def gather(self, tensor):
        """Return the tensors of all cores, joined along the first axis. Collective.

        Shapes and dtypes must be the same on every core.
        """
        raise NotImplementedError

    def reduce_scatter(self, tensor):
        """Return this core's part of the sum over the cores, along the first axis. Collective."""
        each = len(tensor) // self.world_size
        first = self.rank * each
        return self.all_reduce(tensor, "sum")[first : first + each]

    def broadcast(self, tensors: list) -> None:
        """Overwrite the tensors with those of rank 0. Collective."""
        raise NotImplementedError

    def average(self, tensors: list) -> None:
        """Overwrite the tensors, such as gradients, with their mean over the cores. Collective."""
        raise NotImplementedError

    def reopen(self, run: int) -> None:
        """Open new groups for the next run of a session, after a run that was left. Collective.

        In the old groups a message may still wait for a core that has left.

        Args:
            run: number of the next run.
        """

    def init_process_group(self):
        """Join torch.distributed's default group, and return it. Collective.

        The process stays in the group.
        """
        raise NotImplementedError

    def to_device(self, tensors: list) -> list:
        """Copy tensors to the device, in a single transfer. Any thread may call it."""
        raise NotImplementedError

    def note_batch(self, batch: object) -> None:
        """Note a batch on the device that a loop over `core.batches` receives; `preflight` does."""

    def to_cpu(self, tensors: list) -> list:
        """Copy tensors to host memory, in a single transfer; return host tensors unchanged."""
        raise NotImplementedError

    def compiles(self) -> tuple[int, float] | None:
        """Return (graphs compiled in this process, seconds); None if nothing is compiled."""
        return None

    def loads(self) -> tuple[int, float]:
        """Return (graphs loaded from the compilation cache in this process, seconds)."""
        return 0, 0.0

    def compiling(self) -> Compiling | None:
        """Return the graph that this process compiles now, or None; any thread may call it."""
        return None

    def metrics(self) -> dict[str, tuple[int, float]]:
        """Return torch_xla's metrics as (samples, sum), times in ns; counters as (value, 0)."""
        return {}

    def memory(self) -> dict[str, int]:
        """Return "peak", the most device memory in use so far, and "limit", in bytes.

        It is empty if the device does not report them.
        """
        return {}


class Runtime:
    """One kind of device: how its runs are laid out, and started in a worker process.

    Attributes:
        name: the name that `launch(backend=...)` takes.
        backend: the class of its cores.
        hardware: the kind of its cores: "TPU", "GPU" or "CPU". Of two runtimes for the same kind, a
            launch takes the one whose package is installed.
        package: the package that it needs besides torch; None for none.
        how_to_install: the line that installs it, unless it is torch_xla's.
        sharded: the name of the runtime for which all devices of a host are a single core; None if
            there is none.
        dry_run_of: the name of the backend that this backend replaces on a machine without such a
            device; None for a backend that is not a dry run.
        is_for_launch: whether `launch(backend=...)` accepts it.
        note: added to the line that a dry run prints.
        keeps_compiles: whether a compilation cache can hold its programs.
    """

    name: str
    backend: type[Backend]
    hardware: str
    package: str | None = None
    how_to_install: str = ""
    sharded: str | None = None
    dry_run_of: str | None = None
    is_for_launch = True
    note: str = ""
    keeps_compiles = False

    def is_present(self, machine) -> bool:
        """Return whether the machine has devices of this kind, without starting anything."""
        raise NotImplementedError

    def topology(self, machine, cores: int | None) -> Topology:
        """Return the layout of a run on a machine.

        Args:
            machine: its `MachineInfo`.
            cores: number of cores; None for all.

        Raises:
            ValueError: this number of cores is not supported there.
        """
        raise NotImplementedError

    def is_started(self) -> bool:
        """Return whether this process has started the runtime, without starting it.

        A fork of such a process cannot start the runtime.
        """
        return False

    def load(self, topology: Topology) -> None:
        """Import in the kernel the modules that every worker would import. It starts nothing."""
        # Every optimizer's __init__ imports it, for a second or more in each worker otherwise.
        import torch._dynamo
        import torch.distributed

        if torch.distributed.is_available():
            # This makes a temporary folder, which a worker would leave behind.
            with contextlib.suppress(ImportError):
                import torch.distributed.nn.jit.instantiator  # noqa: F401

    def open_compile_cache(self, folders: Iterable[Path], say: Callable[[str], object]):
        """Open the compilation cache of a launch; print why and return None if there can be none.

        Args:
            folders: the folders of the cache.
            say: prints a line.
        """
        if not self.keeps_compiles:
            say(f"compile_cache: the backend {self.name} compiles nothing that can be kept")
            return None
        try:
            with optional_subpackage("compile_cache"):
                from tpukit.accelerators import open_compile_cache
        except NotInstalledError as error:
            say(error.fact)
            return None
        return open_compile_cache(folders, say)

    def meeting_point(self, topology: Topology) -> contextlib.AbstractContextManager:
        """Open the connection by which the processes of a run find each other.

        The kernel closes it once all processes are forked.
        """
        return contextlib.nullcontext()

    def start(
        self,
        body: Callable[[Backend], None],
        topology: Topology,
        *,
        process: int,
        meeting_point,
    ) -> None:
        """Start the devices of a worker process, and call the body once per core.

        Args:
            body: takes the backend of a core.
            topology: the layout of the run.
            process: number of the worker process, from 0.
            meeting_point: opened by the method of that name, and inherited by the fork.
        """
        raise NotImplementedError
