"""What every backend offers: a `Runtime` that lays out and starts a run, and a `Backend` object for each core of it."""

import contextlib
import importlib
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tpukit.essentials.display import InvalidValueError, missing_part


class BackendMismatchError(InvalidValueError):
    """The cores are in one collective, with tensors of different shapes or dtypes."""


@dataclass(frozen=True)
class Hosts:
    """Which of several hosts of a run this is; every one launches the same function on as many cores.

    Attributes:
        number: of this host, from 0.
        count: hosts of the run, 2 or more.
        address: (IP address of host 0, port) where the CPU processes or GPUs of all hosts find each other; chips find
            each other themselves, by what a TPU VM's environment says.
        listener: on host 0, the socket that listens there.
    """

    number: int
    count: int
    address: tuple[str, int]
    listener: socket.socket | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Topology:
    """How a run is laid out: `cores` over `processes`; 0 processes where the one core runs in the kernel itself.

    Attributes:
        backend: the name of the runtime, as in `tpukit.essentials.backends.runtimes()`.
        device: one core in words, such as "TPU v5e core".
        cores: cores of the run on this host.
        processes: worker processes, each with as many cores as every other.
        rehearsal: True where CPU processes stand in for the cores of a TPU.
        generation: of a TPU that torch_xla drives, such as "v5e"; otherwise "".
        device_number: the chip or GPU, counted from 0, that a run of one process has to itself while others run on the
            others; None where it is alone on the machine.
        hosts: which of several hosts this is; None where there is one.
        kept: the folders of compiled programs; None where none are kept.
        chips: that are the one core together, each with a part of every tensor; 1 where a core is one of its own.
    """

    backend: str
    device: str
    cores: int
    processes: int
    rehearsal: bool = False
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
        """Return the ranks of the cores in worker process number `process`; on a TPU what they probably are."""
        each = self.cores // self.processes
        return range(self.first_rank + process * each, self.first_rank + (process + 1) * each)


@dataclass(frozen=True)
class Compiling:
    """A graph that is being compiled.

    Attributes:
        number: which of the process's graphs it is, counted from 1.
        last_seconds: what the one before took; None for the first.
        doing: "loading" where it is taken from a folder of compiled programs.
        is_waiting: whether another process compiles it.
    """

    number: int
    last_seconds: float | None
    doing: str = "compiling"
    is_waiting: bool = False


class Backend:
    """One core's device and its collectives. Whatever says "together" must be called by every core.

    Attributes:
        rank: this core's number, 0 to world_size - 1.
        world_size: cores in the run.
        device: the torch.device of this core.
        chips: that are this core together, each with a part of every tensor.
        real: the dtype that a Python number has on its way through a collective.
        in_graph: True where collectives are recorded into the graph of the step, so that cores wait for each other in
            `sync` and when they read a tensor, not in the call of the collective.
        waits_idle: True where a core that waits for others uses no processor.
        traced: True where a step is only recorded as Python comes by, and compiled and run in `sync`.
        shares_process: True where other cores are threads of the same process, as on v2 and v3.
        is_recording: True where `preflight` only looks which programs a run would compile: what comes back from the
            device is no result then, so nothing of it is kept.
        waits: seconds of the last calls of `wait`, where there is something to wait for; of `wait_count` in all.
        after_sync: called after every `sync`, and after a step without one; a running profile marks its steps there.
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
    is_recording = False
    waits: tuple[float, ...] = ()
    wait_count = 0
    after_sync: Callable[[], None] | None = None

    def seed(self, seed: int) -> None:
        """Seed the device's own random numbers, where they are not the CPU's."""

    def set_precision(self, precision: str) -> None:
        """Have float32 matrix products and convolutions keep more bits of their inputs: "high" or "highest"."""

    def sync(self) -> None:
        """Hand over the work recorded so far and return before it is done; where nothing is recorded it is done."""
        if self.after_sync:
            self.after_sync()

    def wait(self) -> None:
        """Return when the device has done the work recorded so far; only a stopwatch needs it."""

    def place_model(self, module) -> str:
        """Cut the weights and buffers of a module over the chips; return a line if much of it stays whole, or ""."""
        return ""

    def place_state(self, optimizer) -> None:
        """Cut the state of an optimizer where it is new: a first step makes it, or a checkpoint brought it whole."""

    def barrier(self) -> None:
        """Wait until every core is here, together."""
        raise NotImplementedError

    def all_reduce(self, tensor, op: str):
        """Return the "sum", "mean", "min" or "max" of a tensor over the cores, the same bits on each, together."""
        raise NotImplementedError

    def gather(self, tensor):
        """Return the tensors of all cores, one after the other along the first axis, together.

        Shapes and dtypes must be the same on every core.
        """
        raise NotImplementedError

    def reduce_scatter(self, tensor):
        """Return this core's part, along the first axis, of the sum of a tensor over the cores, together."""
        each = len(tensor) // self.world_size
        return self.all_reduce(tensor, "sum")[self.rank * each : (self.rank + 1) * each]

    def broadcast(self, tensors: list) -> None:
        """Overwrite the tensors with rank 0's, together."""
        raise NotImplementedError

    def average(self, tensors: list) -> None:
        """Overwrite the tensors with their mean over the cores, together: gradients, after backward."""
        raise NotImplementedError

    def init_process_group(self):
        """Join torch.distributed's default group, and return it, together; once joined it stays."""
        raise NotImplementedError

    def to_device(self, tensors: list) -> list:
        """Return the tensors of a batch on the device, in one transfer; a thread other than the core's may ask."""
        raise NotImplementedError

    def to_cpu(self, tensors: list) -> list:
        """Return the tensors in host memory, in one transfer; those that are there are returned as they are."""
        raise NotImplementedError

    def compiles(self) -> tuple[int, float] | None:
        """Return the graphs this process has compiled, and the seconds it took; None where nothing is compiled."""
        return None

    def loads(self) -> tuple[int, float]:
        """Return the graphs this process has loaded where they were compiled before, and the seconds it took."""
        return 0, 0.0

    def compiling(self) -> Compiling | None:
        """Return the graph that this process compiles right now; None if it does not. Any thread may ask."""
        return None

    def metrics(self) -> dict[str, tuple[int, float]]:
        """Return torch_xla's metrics by name as (samples, their sum), times in ns, and its counters as (value, 0)."""
        return {}

    def memory(self) -> dict[str, int]:
        """Return "peak", the most bytes in use on the device so far, and "limit", what it has; empty if not known."""
        return {}


class Runtime:
    """How runs of one kind of device are laid out, and started in a worker process.

    Attributes:
        name: what `launch(backend=...)` calls it. "xla:cpu" rehearses for "xla": it is taken where "xla" was asked for
            and the machine has no device of that kind.
        backend: the class of its cores.
        hardware: what its cores are: "TPU", "GPU" or "CPU". Of two for the same, a launch takes the one whose package
            is installed.
        package: what has to be installed beside torch, None for nothing.
        how_to_install: the line that installs it, where that is not torch_xla's.
        sharded: the name of the runtime for which all devices of a host are one core, each with a part of every tensor;
            None where there is none.
        is_for_launch: False for what is no backend of a launch, but started otherwise.
        note: what a rehearsal on it says about itself, beside the number of processes.
        keeps_compiles: whether what it compiles can be kept in a folder.
    """

    name: str
    backend: type[Backend]
    hardware: str
    package: str | None = None
    how_to_install: str = ""
    sharded: str | None = None
    is_for_launch = True
    note: str = ""
    keeps_compiles = False

    def is_present(self, machine) -> bool:
        """Say whether the machine has devices of this kind; nothing is started to find out."""
        raise NotImplementedError

    def topology(self, machine, cores: int | None) -> Topology:
        """Lay out a run of so many cores on a machine; None for all there are.

        Raises:
            ValueError: so many cannot be had there.
        """
        raise NotImplementedError

    def is_started(self) -> bool:
        """Say whether this process has started the runtime, so that a fork of it could not; does not start it."""
        return False

    def load(self, topology: Topology) -> None:
        """Import in the kernel what every worker would otherwise import for itself. Starts nothing."""
        import torch._dynamo  # every optimizer's __init__ does, for a second or more in each worker otherwise
        import torch.distributed

        if torch.distributed.is_available():
            with contextlib.suppress(ImportError):  # makes a temporary folder, which a worker would leave behind
                import torch.distributed.nn.jit.instantiator  # noqa: F401

    def open_compile_cache(self, folders: Iterable[Path], say: Callable[[str], object]):
        """Make folders ready for what a launch compiles; None where nothing can be kept, which is said."""
        if not self.keeps_compiles:
            return say(f"compile_cache: the backend {self.name} compiles nothing that can be kept")
        if missing := missing_part("tpukit.accelerators"):
            return say(f"compile_cache needs the subpackage {missing}, which this copy of tpukit does not have")
        return importlib.import_module("tpukit.accelerators").open_compile_cache(folders, say)

    def meeting_point(self, topology: Topology) -> contextlib.AbstractContextManager:
        """Open what the processes of a run find each other through; the kernel closes it once all are forked."""
        return contextlib.nullcontext()

    def start(self, body: Callable[[Backend], None], topology: Topology, *, process: int, meeting_point) -> None:
        """Start the devices of worker process number `process`, and call the body once for each of its cores.

        `meeting_point` is what the method of that name opened, inherited by the fork.
        """
        raise NotImplementedError
