"""The interface of every backend.

A `Runtime` belongs to a kind of device. In the kernel it plans the cores and processes of a run
(`Topology`). In each worker process it starts the devices, and makes a `Backend` object per core,
which has the core's device and its collectives.

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
    """The cores call the same collective with tensors of different shapes or dtypes."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run. Each host launches the same function on equally many cores.

    Attributes:
        number: the number of this host, from 0.
        count: number of hosts in the run, 2 or more.
        address: (IP address of host 0, port), through which the CPU processes or GPUs of all hosts
            find each other. TPU chips find each other by a TPU VM's environment variables.
        listener: on host 0, the socket that listens at `address`; None on other hosts.
    """

    number: int
    count: int
    address: tuple[str, int]
    listener: socket.socket | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Topology:
    """The layout of a run: its cores and processes.

    Attributes:
        backend: the name of the runtime, a key of `tpukit.essentials.backends.runtimes()`.
        device: a core in words, such as "TPU v5e core".
        cores: number of cores of the run on this host.
        processes: number of worker processes on this host, each with the same number of cores; 0 if
            the only core runs in the kernel itself.
        is_dry_run: whether CPU processes or a simulated TPU replace TPU cores.
        generation: the generation of a TPU, such as "v5e"; otherwise "".
        device_number: the index, from 0, of the only chip or GPU that the run uses; other runs may
            use the others. None if the run may use the whole machine.
        hosts: the hosts of the run; None for a single host.
        compile_cache: the open compilation cache; None for none.
        chips: number of chips per core; more than 1 if the model is sharded over them.
    """

    backend: str
    device: str
    cores: int
    processes: int
    is_dry_run: bool = False
    generation: str = ""
    device_number: int | None = None
    hosts: Hosts | None = None
    compile_cache: object | None = field(default=None, repr=False, compare=False)
    chips: int = 1

    @property
    def world_size(self) -> int:
        """The number of cores of the run on all hosts."""
        return self.cores * (self.hosts.count if self.hosts else 1)

    @property
    def first_rank(self) -> int:
        """The rank of the first core of this host."""
        return self.cores * (self.hosts.number if self.hosts else 0)

    def ranks(self, process: int) -> range:
        """Return the ranks of the cores in a worker process.

        On a TPU torch_xla assigns the ranks at the start, so these are only the expected ranks.

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
        last_seconds: seconds that the previous graph took; None for the first graph.
        doing: "compiling", or "loading" from the compilation cache.
        is_waiting: whether another process compiles the graph, and this process waits for it.
    """

    number: int
    last_seconds: float | None
    doing: str = "compiling"
    is_waiting: bool = False


class Backend:
    """The device of a core, and its collectives.

    A method whose description says "Collective" must be called on every core.

    Attributes:
        rank: number of this core, 0 to world_size - 1.
        world_size: number of cores in the run.
        device: the `torch.device` of this core.
        real: the dtype that a Python number has in a collective.
        chips: number of chips of this core. If there are several, each has a part of every tensor.
        in_graph: True if collectives are recorded into the graph of the step. Cores then wait for
            each other in `sync` and when they read a tensor, not in the call of the collective.
        waits_idle: True if a core that waits in a collective uses no processor.
        traced: True if Python code only records a step, which `sync` compiles and runs.
        shares_process: True if other cores are threads of the same process, as on v2 and v3.
        can_reopen: True if `reopen` makes collectives work again after a core has left in the
            middle of one.
        is_recording: True while `preflight` records the programs of a run. Values from the device
            are then not results, so nothing may be saved.
        waits: seconds of each of the last 64 calls of `wait`.
        wait_count: number of all calls of `wait`.
        after_sync: a function that is called after every `sync`, and after a step without `sync`.
            A profile and `preflight` set it, to see the ends of steps. None for none.
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
        """Seed the device's random generator. If the device is the CPU, do nothing."""

    def set_precision(self, precision: str) -> None:
        """Set the precision of float32 matrix products and convolutions.

        Args:
            precision: "high" or "highest".
        """

    def sync(self) -> None:
        """Start the recorded work on the device, and return without waiting for its end."""
        if self.after_sync:
            self.after_sync()

    def wait(self) -> None:
        """Wait until the device has done all recorded work; for measurements of time."""

    def place_model(self, module) -> str:
        """Shard a module; return a line about large tensors that stay whole, or "" for none."""
        return ""

    def place_state(self, optimizer) -> None:
        """Shard the state that an optimizer got in its first step or from a checkpoint."""

    def barrier(self) -> None:
        """Wait until every core has called this method. Collective."""
        raise NotImplementedError

    def all_reduce(self, tensor, op: str):
        """Return a tensor reduced over the cores, with equal bits on all. Collective.

        Args:
            tensor: a tensor of the same shape and dtype on every core.
            op: "sum", "mean", "min" or "max".
        """
        raise NotImplementedError

    def with_fractions(self, tensor):
        """Return a tensor whose dtype can hold a mean: convert integers and bools to `real`."""
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor
        return tensor.to(self.real)

    def gather(self, tensor):
        """Concatenate the tensors of all cores in order of rank, along axis 0. Collective.

        Shapes and dtypes must be the same on every core.
        """
        raise NotImplementedError

    def reduce_scatter(self, tensor):
        """Return this core's rows of the sum over the cores. Collective.

        Args:
            tensor: (world_size * N, ...); core r gets the rows from r * N to (r + 1) * N.
        """
        each = len(tensor) // self.world_size
        first = self.rank * each
        return self.all_reduce(tensor, "sum")[first : first + each]

    def broadcast(self, tensors: list) -> None:
        """Overwrite the tensors with those of rank 0. Collective."""
        raise NotImplementedError

    def average(self, tensors: list) -> None:
        """Overwrite tensors, such as gradients, with their mean over cores. Collective."""
        raise NotImplementedError

    def reopen(self, run: int) -> None:
        """Open new process groups after a core has left a session's run. Collective.

        In the old groups a message may still wait for that core.

        Args:
            run: number of the next run.
        """

    def init_process_group(self):
        """Create torch.distributed's default process group, and return it. Collective.

        A second call returns the same group.
        """
        raise NotImplementedError

    def to_device(self, tensors: list) -> list:
        """Copy tensors to the device in a single transfer, or return those that are there already.

        Any thread may call this method.
        """
        raise NotImplementedError

    def note_batch(self, batch: object) -> None:
        """Record a batch that `core.batches` gives to a loop. Only `preflight` needs it."""

    def to_cpu(self, tensors: list) -> list:
        """Detach tensors and copy them to host memory, in a single transfer.

        If a tensor is in host memory, the result is not a copy: it shares the tensor's memory.
        """
        raise NotImplementedError

    def compiles(self) -> tuple[int, float] | None:
        """Return (number of compiled graphs, seconds) of this process.

        None if the backend does not compile.
        """
        return None

    def loads(self) -> tuple[int, float]:
        """Return (number of graphs loaded from the compilation cache, seconds of loading them)."""
        return 0, 0.0

    def compiling(self) -> Compiling | None:
        """Return the graph that this process compiles now; None for none.

        Any thread may call this method.
        """
        return None

    def metrics(self) -> dict[str, tuple[int, float]]:
        """Return torch_xla's metrics and counters by name; empty on other backends.

        A metric is (number of samples, their sum), with times in ns. A counter is (value, 0.0).
        """
        return {}

    def memory(self) -> dict[str, int]:
        """Return, in bytes, the "peak" use of the device's memory and the "limit" of this memory.

        The dict is empty if the device does not report these numbers.
        """
        return {}


class Runtime:
    """The layout and the start of runs on a kind of device.

    Attributes:
        name: the name in `launch(backend=...)`.
        backend: the `Backend` class of its cores.
        hardware: the kind of device: "TPU", "GPU" or "CPU". Of two runtimes for the same kind,
            `launch` chooses the one whose package is installed.
        package: the package that the runtime needs besides torch; None for none.
        how_to_install: the line that installs `package`; "" for torch_xla, whose line depends on
            the machine.
        sharded: the name of the runtime in which all devices of a host are a single core; None if
            there is none.
        dry_run_of: for a dry run, the name of the runtime that this one replaces if the machine
            has no accelerator; None if this is no dry run of another runtime.
        is_for_launch: whether `launch(backend=...)` accepts the name.
        note: text at the end of the line that a dry run prints.
        keeps_compiles: whether a compilation cache can store the compiled programs.
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
            machine: the `MachineInfo` of the machine.
            cores: number of cores; None for all.

        Raises:
            InvalidValueError: the machine does not support this number of cores.
        """
        raise NotImplementedError

    def is_started(self) -> bool:
        """Return whether this process has started the runtime, without starting it.

        A fork of such a process cannot start the runtime.
        """
        return False

    def load(self, topology: Topology) -> None:
        """Import the workers' modules in the kernel, once for all; start no device."""
        # The first optimizer of a process imports torch._dynamo, which takes a second or more.
        import torch._dynamo
        import torch.distributed

        if torch.distributed.is_available():
            # This import makes a temporary folder, which a killed worker would leave behind.
            with contextlib.suppress(ImportError):
                import torch.distributed.nn.jit.instantiator  # noqa: F401

    def open_compile_cache(self, folders: Iterable[Path], say: Callable[[str], object]):
        """Open the compilation cache of a launch, and return the cache.

        If a cache is not supported here, this method prints the reason and returns None.

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
        """Return a context manager that yields the object through which processes find each other.

        The kernel opens the object before it forks the workers, which inherit the object. After the
        forks, the kernel closes its own copy.
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
        """Start the devices of a worker process, and call `body` once per core.

        Args:
            body: a function; its argument is the `Backend` of a core.
            topology: the layout of the run.
            process: number of the worker process, from 0.
            meeting_point: the object from the method `meeting_point`.
        """
        raise NotImplementedError
