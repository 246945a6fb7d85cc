"""CPU processes instead of TPU cores: plain CPU tensors, and gloo's collectives.

Every core must call the same collective with tensors of the same shapes and dtypes. If the calls
differ, gloo ends the process (SIGABRT), waits forever, or adds up bits of different dtypes. TPU
chips hang. A dry run must report such mistakes, so here the cores compare their calls:

    core 0    all_reduce(sum) (2,) float32    checksum 17
    core 1    all_reduce(sum) (3,) float32    checksum 42    -> BackendMismatchError on both

The comparison is a small message before each collective. It would double the cost of a collective
that the cores call in every step. So the first three collectives with eight equal calls each get
their own gloo group. No other collective uses that group, so it needs no comparison. If a core then
waits for more than a second, it reads the store, into which every waiting core writes its call
(`_wait`).
"""

import contextlib
import datetime
import os
import socket
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpukit.essentials.backends.dtypes import as_bits, as_numbers, from_numbers
from tpukit.essentials.backends.protocol import Backend, BackendMismatchError, Runtime, Topology
from tpukit.essentials.display import InvalidValueError, TpukitRuntimeError

_MOST_DRY_RUN_CORES = 8  # the number of cores of the largest TPU of a notebook platform
_SIOCGIFADDR = 0x8915  # ioctl that returns an interface's IPv4 address (man 7 netdevice)
_LONGEST_TEXT = 256  # bytes of a call in words
_OFTEN = 8  # equal calls, with the same shapes, after which they get their own gloo group
_GROUPS = 3  # collectives that get one, because each group needs threads and sockets
# A core that waits for longer reads the other cores' calls in the store.
_PATIENCE = datetime.timedelta(seconds=1)
# From this size in bytes on, a tensor is a message of its own, which saves two copies.
_LARGE = 2**20

# The address of rank 0's store, and the listening socket for it, which only host 0 has.
MeetingPoint = tuple[tuple[str, int], socket.socket | None]


class _Call(NamedTuple):
    """A call of a collective, for the comparison between cores."""

    name: str  # the collective with its operation, such as "all_reduce(sum)"
    tensors: tuple[tuple, ...]  # (shape, dtype) of each tensor

    def in_words(self) -> str:
        """Return the call with the shape and dtype of its tensor, or with their number."""
        each = [f"{tuple(shape)} {dtype}".replace("torch.", "") for shape, dtype in self.tensors]
        if not each:
            return self.name
        if len(each) == 1:
            return f"{self.name} {each[0]}"
        numbers = sum(shape.numel() for shape, _ in self.tensors)
        return f"{self.name} {len(each)} tensors, {numbers:,} numbers"


@dataclass
class _Message:
    """Tensors that are sent together: one large tensor, or all small tensors of a dtype."""

    places: list[int]  # indices of the tensors in the caller's list
    flat: object  # the numbers of these tensors as a tensor with one axis
    is_copy: bool  # whether `flat` has its own memory, so that the result must be copied back
    work: object = None  # gloo's handle of the message


class Cpu(Backend):
    """A core that is a CPU process; gloo connects the processes.

    Args:
        rank: number of this core.
        world_size: number of cores in the run.
        meeting_point: the address at which rank 0 opens its store, and the socket that listens
            there; None for one core in the kernel's own process.

    Attributes:
        store: the key-value store of torch.distributed, through which the processes find each
            other. `open_device` may use it.
        group: the process group of torch.distributed, in which the cores compare their calls.
    """

    transport = "gloo"  # the backend of torch.distributed; a subclass has another
    can_reopen = True

    def __init__(self, rank: int, world_size: int, meeting_point: MeetingPoint | None):
        import torch

        self.rank = rank
        self.world_size = world_size
        self.store = self._open_store(meeting_point)
        self.real = torch.float64
        self.device = self.open_device()
        with _without_stdout():  # gloo prints a line per peer
            if self.transport != "gloo":
                self.group = self.init_process_group()
                return  # the groups below are for comparisons, as `_agree` documents
            # Groups with an unfinished message. To delete such a group would wait for the message.
            self._abandoned: list = []
            self._calls = 0  # number of collectives that this core has called
            self._open_groups()

    # Opening: the store, the device, the groups.

    def _open_store(self, meeting_point: MeetingPoint | None):
        """Return the store of torch.distributed, through which the processes find each other."""
        import torch.distributed as dist

        if meeting_point is None:
            return dist.HashStore()
        # Rank 0 serves the store on a socket that the kernel opened before the fork. So the port is
        # certainly free, all processes know it, and no file is left behind.
        (address, port), listener = meeting_point
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_towards(address))
        server = {}
        if self.rank == 0:
            server = {"is_master": True, "master_listen_fd": listener.detach()}
        if listener is not None:
            # All processes inherit the socket. If rank 0 dies, connections must fail and not wait.
            listener.close()
        return dist.TCPStore(address, port, self.world_size, wait_for_workers=False, **server)

    def open_device(self):
        """Start the device of this core, and return its `torch.device`."""
        import torch

        return torch.device("cpu")

    def _open_groups(self) -> None:
        self.group, *self._free = self._join()
        self._own: dict[_Call, object] = {}  # the groups of frequent collectives
        self._agreed: Counter = Counter()  # how often all cores have made the same call

    def reopen(self, run: int) -> None:
        if not self.can_reopen:
            return  # without `can_reopen` a session continues only if no collective is half done
        self._abandoned.append((self.group, self._free, self._own))
        # Names of groups and keys of the store contain this number. It must be the same on every
        # core, and larger than every number of earlier runs, which have fewer than 2**32 calls.
        self._calls = run << 32
        with _without_stdout():
            self._open_groups()

    def _join(self) -> list:
        """Return the group for comparisons, and the groups for frequent collectives.

        All groups are opened at the start. gloo then prints a line per peer, so this process
        discards its standard output meanwhile. Later, output of other threads would also be lost.
        """
        options = _gloo_options()
        count = 1
        if self.world_size > 1:
            count += _GROUPS
        names = [f"tpukit {self._calls} {number}" for number in range(count)]
        return [self._own_group(name, options) for name in names]

    def _own_group(self, name: str, options):
        """Return a process group that is not torch.distributed's default group.

        A default group makes `torch.distributed.is_initialized()` True, and some layers then
        average over the processes. TPU cores have no default group, so these layers would compute
        other results in a dry run than on a TPU.
        """
        import torch
        import torch.distributed as dist

        kind = dist.ProcessGroup.BackendType.GLOO
        store = dist.PrefixStore(name, self.store)
        group = dist.ProcessGroup(store, self.rank, self.world_size)
        gloo = dist.ProcessGroupGloo(store, self.rank, self.world_size, options)
        group._register_backend(torch.device("cpu"), kind, gloo)
        group._set_default_backend(kind)
        return group

    def init_process_group(self):
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group(
                self.transport,
                store=dist.PrefixStore("default", self.store),
                rank=self.rank,
                world_size=self.world_size,
            )
        return dist.group.WORLD

    # Collectives: agree on the call, then make it.

    def barrier(self) -> None:
        self._wait(self._agree("barrier", []).barrier())

    def all_reduce(self, tensor, op: str):
        import torch.distributed as dist

        if op == "mean":
            tensor = self.with_fractions(tensor)
        if self.world_size == 1:  # with `XlaCpu`, a subclass, a collective would cut the graph
            return tensor.clone()
        group = self._agree(f"all_reduce({op})", [tensor])
        (host,) = self._for_collectives([tensor])
        numbers = as_numbers(host, op).clone().contiguous()
        kinds = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        self._wait(group.allreduce([numbers], op=kinds.get(op, dist.ReduceOp.SUM)))
        if op == "mean":
            numbers = numbers / self.world_size
        return from_numbers(numbers, host.dtype, op).to(tensor.device)

    def gather(self, tensor):
        import torch

        if self.world_size == 1:
            return tensor.clone()
        group = self._agree("gather", [tensor])
        (host,) = self._for_collectives([tensor])
        bits = as_bits(host.contiguous())
        parts = [torch.empty_like(bits) for _ in range(self.world_size)]
        self._wait(group.allgather([parts], [bits]))
        return torch.cat(parts).view(host.dtype).to(tensor.device)

    def broadcast(self, tensors: list) -> None:
        group = self._agree("broadcast", tensors)
        self._change(tensors, lambda flat: group.broadcast(as_bits(flat), 0))

    def average(self, tensors: list) -> None:
        def divide(flat) -> None:
            flat /= self.world_size

        group = self._agree("average", tensors)
        self._change(tensors, lambda flat: group.allreduce(flat), finish=divide)

    # Agreement: all cores are in the same call.

    def _agree(self, name: str, tensors: list):
        """Return the group for a collective, after the cores have compared their calls.

        A frequent collective has its own group, and needs no comparison. With another transport
        than gloo (GPUs), a comparison would wait for the device, so only `gather` is compared.

        Args:
            name: the collective with its operation, such as "all_reduce(sum)".
            tensors: its tensors.

        Raises:
            InvalidValueError: the cores are in different collectives.
            BackendMismatchError: the tensors of the cores differ in shape or dtype.
        """
        call = _Call(name, tuple((tensor.shape, tensor.dtype) for tensor in tensors))
        if self.world_size == 1:
            return self.group
        if self.transport != "gloo":
            if name == "gather":
                _check_same(self._gather_texts(call.in_words()))
            return self.group
        self._call = call
        self._calls += 1
        if call in self._own:
            return self._own[call]
        if not self._is_same_everywhere(call):
            _check_same(self._gather_texts(call.in_words()), differ=True)
        self._agreed[call] += 1
        # `broadcast` never gets a group: core 0 does not wait in it, so other cores may still be in
        # the previous broadcast when core 0 makes the next.
        can_have_own_group = bool(self._free) and name != "broadcast"
        if can_have_own_group and self._agreed[call] == _OFTEN:
            self._own[call] = self._free.pop()
        return self.group

    def _is_same_everywhere(self, call: _Call) -> bool:
        """Return whether all cores make the same call, by a message with its checksum."""
        import torch
        import torch.distributed as dist

        form = (call.name, *call.tensors)
        checksum = zlib.crc32(repr(form).encode())
        # The maximum of the second number is minus the smallest checksum. The checksums are equal
        # if the largest and the smallest are.
        largest = torch.tensor([checksum, -checksum])
        self._wait(self.group.allreduce([largest], op=dist.ReduceOp.MAX))
        return bool(largest[0] == -largest[1])

    def _gather_texts(self, text: str) -> list[str]:
        """Return the texts of all cores, each cut to 256 bytes, in order of rank."""
        import torch

        padded = text.encode().ljust(_LONGEST_TEXT)[:_LONGEST_TEXT]
        mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        (mine,) = self._for_collectives([mine])
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._wait(self.group.allgather([everyone], [mine]))
        texts = [bytes(letters.tolist()).decode(errors="replace") for letters in everyone]
        return [text.strip() for text in texts]

    def _wait(self, work) -> None:
        """Wait for a message; after a second, check that all cores are in the same call.

        Raises:
            InvalidValueError, BackendMismatchError: as `_agree`.
        """
        if self.transport != "gloo":
            work.wait()
            return
        while not _is_done(work):
            self._check_waiting_cores()

    def _check_waiting_cores(self) -> None:
        """Write this core's call into the store; raise if every core waits and calls differ."""
        self.store.set(f"waits/{self.rank}", f"{self._calls} {self._call.in_words()}")
        # Until every core has waited for a second once, some entries do not exist.
        keys = [f"waits/{rank}" for rank in range(self.world_size)]
        if not self.store.check(keys):
            return
        numbers = set()
        calls = []
        for key in keys:
            number, _, call = self.store.get(key).decode().partition(" ")
            numbers.add(number)
            calls.append(call)
        # With different numbers, some entries are old: their cores have left that call since.
        if len(numbers) == 1 and len(set(calls)) > 1:
            self._abandoned.append((self.group, self._free, self._own))
            with _without_stdout():
                self._open_groups()
            _check_same(calls)

    # Copies of tensors to the transport and back.

    def _change(
        self, tensors: list, send: Callable, *, finish: Callable = lambda flat: None
    ) -> None:
        """Overwrite tensors with the result of a collective.

        A large contiguous tensor is sent without a copy. All small tensors of a dtype are sent in
        one message.

        Args:
            tensors: the tensors of this core.
            send: starts the collective on a flat tensor, and returns gloo's handle.
            finish: called with the flat tensor when the collective is done.
        """
        import torch

        if self.world_size == 1:
            return
        # gloo does not support complex numbers (torch 2.8). A view as pairs shares their memory.
        tensors = [
            torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor
            for tensor in tensors
        ]
        hosts = self._for_collectives(tensors)
        messages = _messages(hosts)
        # Start all messages before the wait for the first, so that they overlap.
        for message in messages:
            message.work = send(message.flat)
        for message in messages:
            self._wait(message.work)
            finish(message.flat)
            sizes = [hosts[place].numel() for place in message.places]
            for place, part in zip(message.places, message.flat.split(sizes), strict=True):
                tensor = tensors[place].detach()
                # Not by a comparison of addresses: TorchTPU returns addresses of handles, and a
                # part of one tensor may begin at another tensor's address.
                was_copied = message.is_copy or hosts[place].device != tensor.device
                if was_copied:
                    tensor.copy_(part.view(tensor.shape))

    def _for_collectives(self, tensors: list) -> list:
        """Return the tensors where the transport reads them: gloo in host memory, else device."""
        if self.transport == "gloo":
            return self.to_cpu(tensors)
        return [tensor.detach().to(self.device) for tensor in tensors]

    def to_device(self, tensors: list) -> list:
        return [tensor.to(self.device, non_blocking=True) for tensor in tensors]

    def to_cpu(self, tensors: list) -> list:
        return [tensor.detach().cpu() for tensor in tensors]


class CpuRuntime(Runtime):
    """The dry run with CPU processes; without `os.fork`, with a single core in this process."""

    name = "cpu"
    backend = Cpu
    hardware = "CPU"

    def is_present(self, machine) -> bool:
        return True

    def topology(self, machine, cores: int | None) -> Topology:
        cores = cores or dry_run_cores(machine)
        processes = cores
        if not hasattr(os, "fork"):
            processes = 0  # a single core, which runs in the kernel
            if cores > 1:
                raise InvalidValueError(
                    f"cores={cores} CPU processes are not supported: "
                    f"{machine.platform} on {sys.platform} has no fork",
                    fix=(
                        "leave cores out for a dry run with one core in this "
                        "process, or use Linux (WSL on Windows)"
                    ),
                )
        return Topology(self.name, "CPU", cores=cores, processes=processes, is_dry_run=True)

    def load(self, topology: Topology) -> None:
        """Import the modules of the workers.

        Raises:
            TpukitRuntimeError: the notebook has imported torch_tpu. Workers inherit the
                import. Their first backward() then opens the chips, even with CPU tensors.
        """
        # torch_tpu counts the devices in backward(). Without chips it asks Google Cloud for them,
        # which takes minutes.
        if "torch_tpu" in sys.modules and self.package != "torch_tpu":
            raise TpukitRuntimeError(
                "this kernel has imported torch_tpu, so workers on the CPU would open the chips",
                found=(
                    "the first backward() of CPU tensors starts the TPU runtime if torch_tpu is "
                    "imported"
                ),
                fix=(
                    "restart the kernel, call tpukit.setup() before "
                    "`import torch`, and do not import torch_tpu in a cell"
                ),
            )
        super().load(topology)

    @contextlib.contextmanager
    def meeting_point(self, topology: Topology) -> Iterator[MeetingPoint]:
        hosts = topology.hosts
        if hosts is None:
            with socket.create_server(("127.0.0.1", 0)) as listener:  # rank 0 will listen there
                yield listener.getsockname(), listener
            return
        with hosts.listener or contextlib.nullcontext():
            yield hosts.address, hosts.listener

    def start(
        self,
        body: Callable[[Backend], None],
        topology: Topology,
        *,
        process: int,
        meeting_point,
    ) -> None:
        (rank,) = topology.ranks(process)
        body(self.backend(rank, topology.world_size, meeting_point))


def dry_run_cores(machine) -> int:
    """Return the default number of cores: one per processor, from 2 to 8; 1 without `os.fork`."""
    if not hasattr(os, "fork"):
        return 1
    return min(_MOST_DRY_RUN_CORES, max(2, machine.cpus))


def _gloo_options():
    """Return the options for all groups of gloo, with network devices that the groups share.

    They are shared because each device has a thread that wakes up a hundred times per second.
    """
    import torch.distributed as dist

    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = dist.default_pg_timeout
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        options._devices = [gloo.create_device(interface=name) for name in names.split(",")]
    else:
        options._devices = [gloo.create_default_device()]
    return options


def _is_done(work) -> bool:
    """Wait for a message for at most a second; return whether it has arrived.

    Raises:
        RuntimeError: the message has failed, for example because a process has ended.
    """
    # `wait` raises a RuntimeError after a timeout as well as after a failure.
    with contextlib.suppress(RuntimeError):
        work.wait(_PATIENCE)
        return True
    if not work.is_completed():
        return False
    work.wait()  # raises the error of a failure; the message may also have arrived just now
    return True


def _messages(hosts: list) -> list[_Message]:
    """Return the messages for tensors: one per large tensor, one for all small of a dtype."""
    import torch

    messages = []
    small: dict[object, list[int]] = {}
    for place, host in enumerate(hosts):
        # Only the size decides: all cores must make the same messages, but strides may differ.
        if host.nbytes >= _LARGE:
            is_copy = not host.is_contiguous()
            messages.append(_Message([place], flat=host.reshape(-1), is_copy=is_copy))
        else:
            small.setdefault(host.dtype, []).append(place)
    for places in small.values():
        flat = torch.cat([hosts[place].reshape(-1) for place in places])
        messages.append(_Message(places, flat=flat, is_copy=True))
    return messages


def _check_same(texts: Sequence[str], *, differ: bool = False) -> None:
    """Raise an error if the cores are in different calls.

    Args:
        texts: the calls in words, in order of rank.
        differ: True if the calls are known to differ. Their texts may still be equal, because long
            texts are cut.

    Raises:
        InvalidValueError: the collectives differ.
        BackendMismatchError: the shapes or dtypes differ.
    """
    # A text is the collective, a space, and the shape and dtype.
    names = [text.partition(" ")[0] for text in texts]
    tensors = [text.partition(" ")[2] for text in texts]
    if len(set(names)) > 1:
        raise InvalidValueError(
            "the cores are in different collectives, but a collective ends only when every core "
            "has called it",
            found=", ".join(f"core {rank} {text}" for rank, text in enumerate(texts)),
            fix=(
                "make the same calls in the same order on every core, "
                "none of them under `if core.is_main`"
            ),
        )
    if differ or len(set(texts)) > 1:
        raise BackendMismatchError(
            f"{names[0].partition('(')[0]} needs the same shape and dtype on every core",
            found=", ".join(f"core {rank} {text}" for rank, text in enumerate(tensors)),
            fix=(
                "convert the tensors to one dtype, for example by tensor.float(), and pad them to "
                "one shape; all batches of core.batches have the same shape"
            ),
        )


def _interface_towards(address: str) -> str:
    """Return the name of the network interface that leads to an address.

    By default gloo uses the address of the host's own name. On many hosts that is 127.0.0.1, which
    processes of other hosts cannot reach.
    """
    if address.startswith("127."):
        if sys.platform == "darwin":
            return "lo0"
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # For a datagram socket, `connect` sends nothing but chooses the route and with it the local
        # address. The port has no meaning.
        probe.connect((address, 9))
        ours = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                if _address_of(name, probe) == ours:
                    return name
    raise TpukitRuntimeError(
        "no network interface of this host leads to host 0",
        found=f"the route to {address} begins at {ours}, but no interface has this address",
        fix=(
            "on every host, run `ip address`, and set the name of the interface that connects "
            "the hosts: GLOO_SOCKET_IFNAME=eth0"
        ),
    )


def _address_of(interface: str, any_socket: socket.socket) -> str:
    import fcntl

    answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, interface.encode().ljust(256, b"\0"))
    # Fields of struct ifreq: the name, the address family, the port, the address.
    return socket.inet_ntoa(answer[20:24])


@contextlib.contextmanager
def _without_stdout() -> Iterator[None]:
    """Discard the standard output of this process in the block, also that of native code."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
