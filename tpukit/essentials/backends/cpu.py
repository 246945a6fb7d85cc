"""Plain CPU tensors and gloo: processes that rehearse for cores."""

import contextlib
import datetime
import os
import socket
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from tpukit.essentials.backends.protocol import Backend, BackendMismatchError, Runtime, Topology
from tpukit.essentials.display import Failed, InvalidValueError

_MOST_REHEARSAL_CORES = 8  # as many as the largest notebook TPU has
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_TEXT = 256  # bytes of a collective in words, at most
_OFTEN, _GROUPS = 8, 3  # from so many times on a collective has a gloo group of its own; the first so many collectives
_PATIENCE = datetime.timedelta(seconds=1)  # then a core that waits looks where the others are
_LARGE = 2**20  # bytes from which a tensor is a message of its own, which saves copying it there and back


class Cpu(Backend):
    """One CPU process among `world_size`, joined by gloo.

    Args:
        meeting_point: the address where rank 0 serves, and the socket that listens there, which is host 0's alone;
            None for one core in the kernel's own process.

    Attributes:
        store: of torch.distributed, in which the processes find each other; open before the device is.
    """

    transport = "gloo"  # of torch.distributed

    def __init__(self, rank: int, world_size: int, meeting_point: tuple[tuple[str, int], socket.socket | None] | None):
        import torch

        self.rank = rank
        self.world_size = world_size
        self.store = self._open_store(meeting_point)
        self.device = self.open_device()
        self.real = torch.float64  # what a Python number becomes on its way through a collective
        with _without_stdout():  # gloo greets every peer there
            if self.transport != "gloo":
                self.group = self.init_process_group()
            else:
                self._left: list = []  # groups with a message that is still on its way, for which their end would wait
                self._calls = 0  # collectives of this core
                self._open_groups()

    def _open_groups(self) -> None:
        self.group, *self._free = self._join()
        self._own: dict[tuple, object] = {}  # groups, by the form of the collective
        self._agreed: Counter = Counter()  # times that all cores were in it, by form

    def _join(self) -> list:
        """Return the group in which collectives are compared, and one for each of the first that are made often.

        All are open before they are needed: gloo greets, and what else is said meanwhile would be lost, too.
        """
        options, count = _gloo_options(), 1 + _GROUPS * (self.world_size > 1)
        return [self._own_group(f"tpukit {self._calls} {number}", options) for number in range(count)]

    def _own_group(self, name: str, options):
        """Return a process group that is not torch.distributed's default one, which chips do not have either.

        Layers that average by themselves where `is_initialized()` says so would do it in the rehearsal alone.
        """
        import torch
        import torch.distributed as dist

        kind, store = dist.ProcessGroup.BackendType.GLOO, dist.PrefixStore(name, self.store)
        group = dist.ProcessGroup(store, self.rank, self.world_size)
        gloo = dist.ProcessGroupGloo(store, self.rank, self.world_size, options)
        group._register_backend(torch.device("cpu"), kind, gloo)
        group._set_default_backend(kind)
        return group

    def init_process_group(self):
        import torch.distributed as dist

        if not dist.is_initialized():
            store = dist.PrefixStore("default", self.store)
            dist.init_process_group(self.transport, store=store, rank=self.rank, world_size=self.world_size)
        return dist.group.WORLD

    def open_device(self):
        """Return the device of this core; tensors of a batch and of a model go there."""
        import torch

        return torch.device("cpu")

    def _open_store(self, meeting_point: tuple[tuple[str, int], socket.socket | None] | None):
        """Return the store of torch.distributed in which the processes find each other."""
        import torch.distributed as dist

        if meeting_point is None:
            return dist.HashStore()
        # Rank 0 serves on a socket the kernel opened: no port to agree on, none to collide, no file to leave behind.
        (address, port), listener = meeting_point
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_towards(address))
        master = {"is_master": True, "master_listen_fd": listener.detach()} if self.rank == 0 else {}
        if listener is not None:
            listener.close()  # where it was inherited only: with rank 0 dead, nobody must seem to listen
        return dist.TCPStore(address, port, self.world_size, wait_for_workers=False, **master)

    def barrier(self) -> None:
        self._wait(self._agree("barrier", []).barrier())

    def all_reduce(self, tensor, op: str):
        import torch.distributed as dist

        if op == "mean" and not tensor.is_floating_point():
            tensor = tensor.to(self.real)
        if self.world_size == 1:  # nor is a graph cut for it
            return tensor.clone()
        group = self._agree(f"all_reduce({op})", [tensor])
        (host,) = self._for_collectives([tensor])
        host = host.clone().contiguous()
        kinds = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        self._wait(group.allreduce([host], op=kinds.get(op, dist.ReduceOp.SUM)))
        return (host / self.world_size if op == "mean" else host).to(tensor.device)

    def gather(self, tensor):
        import torch

        if self.world_size == 1:
            return tensor.clone()
        group = self._agree("gather", [tensor])
        (host,) = self._for_collectives([tensor])
        parts = [torch.empty_like(host) for _ in range(self.world_size)]
        self._wait(group.allgather([parts], [host.contiguous()]))
        return torch.cat(parts).to(tensor.device)

    def _agree(self, call: str, tensors: list):
        """Return the group for a collective, which every core makes with tensors of the same shapes and dtypes.

        gloo would end the process (SIGABRT), wait, or add up the bits of another dtype, and chips would hang: this is
        what a rehearsal is for. So the cores compare, in a message before. A collective that they have often made alike
        goes without, through a group that is its alone: there no other can meet it, and a core that is in another one
        waits; see `_wait`. On devices of their own the comparison is a wait for them, so there `gather` alone is looked
        at.

        Raises:
            InvalidValueError: they are in different calls.
            BackendMismatchError: the tensors differ.
        """
        import torch
        import torch.distributed as dist

        if self.world_size == 1 or (self.transport != "gloo" and call != "gather"):
            return self.group
        form = (call, *((one.shape, one.dtype) for one in tensors))
        if self.transport != "gloo":
            _refuse(self._gather_texts(_in_words(form)))
            return self.group
        self._form, self._calls = form, self._calls + 1
        if form in self._own:
            return self._own[form]
        digest = zlib.crc32(repr(form).encode())
        ends = torch.tensor([digest, -digest])
        self._wait(self.group.allreduce([ends], op=dist.ReduceOp.MAX))
        if ends[0] != -ends[1]:
            _refuse(self._gather_texts(_in_words(form)), differ=True)
        self._agreed[form] += 1
        # Not of a broadcast: core 0 does not wait in that one, so a core may be in the one behind.
        if self._agreed[form] == _OFTEN and call != "broadcast" and self._free:
            self._own[form] = self._free.pop()
        return self.group

    def _wait(self, work) -> None:
        """Wait for a message of a collective; where that takes long, see whether all cores are in the same one.

        Raises:
            InvalidValueError, BackendMismatchError: as `_agree`.
        """
        while self.transport == "gloo":
            with contextlib.suppress(RuntimeError):
                work.wait(_PATIENCE)
                return
            if work.is_completed():
                break  # just now, or it failed, which the last line says
            self.store.set(f"waits/{self.rank}", f"{self._calls} {_in_words(self._form)}")
            keys = [f"waits/{rank}" for rank in range(self.world_size)]
            if self.store.check(keys):
                waits = [self.store.get(key).decode().partition(" ")[::2] for key in keys]
                numbers, said = zip(*waits, strict=True)
                if len(set(numbers)) == 1 and len(set(said)) > 1:
                    self._left.append((self.group, self._free, self._own))
                    with _without_stdout():
                        self._open_groups()
                    _refuse(said)
        work.wait()

    def _gather_texts(self, text: str) -> list[str]:
        """Return the short texts of all cores."""
        import torch

        mine = torch.frombuffer(bytearray(text.encode().ljust(_TEXT)[:_TEXT]), dtype=torch.uint8)
        (mine,) = self._for_collectives([mine])
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._wait(self.group.allgather([everyone], [mine]))
        return [bytes(one.tolist()).decode(errors="replace").strip() for one in everyone]

    def broadcast(self, tensors: list) -> None:
        group = self._agree("broadcast", tensors)
        self._change(tensors, lambda flat: group.broadcast(flat, 0))

    def average(self, tensors: list) -> None:
        def divide(flat) -> None:
            flat /= self.world_size

        group = self._agree("average", tensors)
        self._change(tensors, lambda flat: group.allreduce(flat), divide)

    def _change(self, tensors: list, send: Callable, finish: Callable = lambda flat: None) -> None:
        """Change tensors by a collective: large ones where they lie, all small ones of a dtype in one message."""
        import torch

        if self.world_size == 1:
            return
        # torch 2.8's gloo knows no complex numbers; as pairs they are the same memory.
        tensors = [torch.view_as_real(one.detach()) if one.is_complex() else one for one in tensors]
        hosts = self._for_collectives(tensors)
        messages: dict[object, list[int]] = {}
        for number, host in enumerate(hosts):
            is_large = host.nbytes >= _LARGE and host.is_contiguous()
            messages.setdefault(number if is_large else host.dtype, []).append(number)
        sent = []
        for key, numbers in messages.items():
            parts = [hosts[number].reshape(-1) for number in numbers]
            flat = torch.cat(parts) if isinstance(key, torch.dtype) else parts[0]
            sent.append((key, numbers, flat, send(flat)))
        for key, numbers, flat, work in sent:
            self._wait(work)
            finish(flat)
            for number, part in zip(numbers, flat.split([hosts[number].numel() for number in numbers]), strict=True):
                host, tensor = hosts[number], tensors[number].detach()
                # Not by addresses: TorchTPU's are those of handles, and one of a part may be another tensor's.
                if isinstance(key, torch.dtype) or host.device != tensor.device:  # not changed where it lies
                    tensor.copy_(part.view(tensor.shape))

    def _for_collectives(self, tensors: list) -> list:
        """Return the tensors where the collectives want them: gloo's in host memory, any other's on the device."""
        return self.to_cpu(tensors) if self.transport == "gloo" else [one.detach().to(self.device) for one in tensors]

    def to_device(self, tensors: list) -> list:
        return [tensor.to(self.device, non_blocking=True) for tensor in tensors]

    def to_cpu(self, tensors: list) -> list:
        return [tensor.detach().cpu() for tensor in tensors]


class CpuRuntime(Runtime):
    """CPU processes: the rehearsal on every machine; one core in the kernel itself where nothing can be forked."""

    name = "cpu"
    backend = Cpu
    hardware = "CPU"

    def is_present(self, machine) -> bool:
        return True

    def topology(self, machine, cores: int | None) -> Topology:
        cores = cores or dry_run_cores(machine)
        if hasattr(os, "fork"):
            return Topology(self.name, "CPU", cores, processes=cores, is_dry_run=True)
        if cores > 1:
            raise InvalidValueError(
                f"cores={cores} CPU processes cannot be had: {machine.platform} on {sys.platform} has no fork",
                fix="leave cores out to rehearse with one core in this process, or use Linux (WSL on Windows)",
            )
        return Topology(self.name, "CPU", cores, processes=0, is_dry_run=True)

    def load(self, topology: Topology) -> None:
        """Import what the workers need.

        Raises:
            Failed: the notebook has torch_tpu, whose first backward(), of CPU tensors too, counts its devices: the
                worker would open the chips, or ask Google Cloud for minutes where the chips are.
        """
        if "torch_tpu" in sys.modules and self.package != "torch_tpu":
            raise Failed(
                "this kernel has imported torch_tpu, and with it no worker can stay away from the chips",
                found="the first backward() of CPU tensors starts the TPU runtime where torch_tpu is imported",
                fix="restart the kernel, call tpukit.setup() before `import torch`, and import torch_tpu in no cell",
            )
        super().load(topology)

    @contextlib.contextmanager
    def meeting_point(self, topology: Topology) -> Iterator[tuple[tuple[str, int], socket.socket | None]]:
        hosts = topology.hosts
        listener = hosts.listener if hosts else socket.create_server(("127.0.0.1", 0))  # where rank 0 will listen
        with listener or contextlib.nullcontext():
            yield hosts.address if hosts else listener.getsockname(), listener

    def start(self, body: Callable[[Backend], None], topology: Topology, *, process: int, meeting_point) -> None:
        (rank,) = topology.ranks(process)
        body(self.backend(rank, topology.world_size, meeting_point))


def dry_run_cores(machine) -> int:
    """Return how many CPU processes rehearse if nobody says: one per processor, at least 2 and at most 8."""
    return min(_MOST_REHEARSAL_CORES, max(2, machine.cpus)) if hasattr(os, "fork") else 1


def _gloo_options():
    """Return the options of all groups, with one device: each has a thread that wakes up a hundred times a second."""
    import torch.distributed as dist

    options, names = dist.ProcessGroupGloo._Options(), os.environ.get("GLOO_SOCKET_IFNAME")
    options._timeout, make = dist.default_pg_timeout, dist.ProcessGroupGloo
    options._devices = [make.create_device(interface=name) for name in names.split(",")] if names else []
    options._devices = options._devices or [make.create_default_device()]
    return options


def _in_words(form: tuple) -> str:
    """Return a collective in words: the call, then the shape and dtype of its tensor, or how many they are."""
    call, *parts = form
    each = [f"{tuple(shape)} {dtype}".replace("torch.", "") for shape, dtype in parts]
    several = f"{len(each)} tensors, {sum(shape.numel() for shape, _ in parts):,} numbers"
    return f"{call} {each[0] if len(each) == 1 else several if each else ''}".strip()


def _refuse(said: Sequence[str], *, differ: bool = False) -> None:
    """Raise where the cores say, by rank, that they are in different collectives; or `differ` in what it leaves out."""
    calls, forms = zip(*(one.partition(" ")[::2] for one in said), strict=True)
    if len(set(calls)) > 1:
        raise InvalidValueError(
            "the cores are in different collectives, each of which waits for all",
            found=", ".join(f"core {rank} {one}" for rank, one in enumerate(said)),
            fix="the same calls in the same order on every core, none of them under `if core.is_main`",
        )
    if len(set(said)) > 1 or differ:
        raise BackendMismatchError(
            f"{calls[0].partition('(')[0]} needs the same shape and dtype on every core",
            found=", ".join(f"core {rank} {one}" for rank, one in enumerate(forms)),
            fix="pad to one shape first; core.batches(..., shuffle=False) does, and core.gather(...)[:n] cuts",
        )


def _interface_towards(address: str) -> str:
    """Return the name of the network interface that leads to an address; gloo would ask what the host's name means.

    Many a host's own name means 127.0.0.1 to itself, where the processes of other hosts would look for it in vain.
    """
    if address.startswith("127."):
        return "lo0" if sys.platform == "darwin" else "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: it only asks for the route
        ours = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an IPv4 address
                if _address_of(name, probe) == ours:
                    return name
    raise Failed(
        "no network interface of this host leads to host 0",
        found=f"{address} is reached from {ours}, an address that none has",
        fix="GLOO_SOCKET_IFNAME=eth0 in the environment of every host, or what `ip address` shows there",
    )


def _address_of(interface: str, any_socket: socket.socket) -> str:
    import fcntl

    answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, interface.encode().ljust(256, b"\0"))
    return socket.inet_ntoa(answer[20:24])  # of struct ifreq: the name, the address family, the port, the address


@contextlib.contextmanager
def _without_stdout() -> Iterator[None]:
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
