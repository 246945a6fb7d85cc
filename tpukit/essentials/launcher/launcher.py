"""Run a function on every core and bring every core's result back, or the first failure."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpukit.essentials.backends import Hosts, Topology, runtimes
from tpukit.essentials.display import Screen, as_html, counted, optional_subpackage, screen
from tpukit.essentials.environment import Folders, MachineInfo, folders_of, wait_for_chips
from tpukit.essentials.launcher.agreement import apart
from tpukit.essentials.launcher.calls import refuse_call, refuse_options
from tpukit.essentials.launcher.failure import Failure, message
from tpukit.essentials.launcher.signals import INTERRUPT_STACKS_SECONDS, sigterm_ends_the_run
from tpukit.essentials.launcher.topology import (
    choose_device,
    choose_topology,
    refuse_if_in_use,
    refuse_one_process_variables,
)
from tpukit.essentials.launcher.watchdog import Limits
from tpukit.essentials.launcher.worker import Task, seed_of
from tpukit.essentials.launcher.worker_group import InProcessGroup, WorkerGroup


class WorkerError(RuntimeError):
    """A core failed; the others were ended.

    Attributes:
        rank: the core that failed first.
        traceback: its traceback as text.
        run: what the run had brought by then: the results of cores that were done, and the log.
    """

    def __init__(self, message: str, *, rank: int, traceback: str, run: "Run"):
        super().__init__(message)
        self.rank, self.traceback, self.run = rank, traceback, run

    def __reduce__(self) -> tuple:  # an exception is pickled by its args alone, which would lack the keywords
        again = functools.partial(type(self), rank=self.rank, traceback=self.traceback, run=self.run)
        return again, self.args, vars(self)


class LaunchInterrupted(KeyboardInterrupt):
    """The run was interrupted and its workers ended.

    Attributes:
        run: what it had brought by then: a `Run` of `launch`, the `Jobs` of `launch_each`.
        stacks: by rank, where each core stood that had not returned; without a core that did not answer at once, and
            empty for `launch_each`.
    """

    def __init__(self, run, stacks: Mapping[int, str] | None = None, *, hung: bool = False):
        stacks = dict(stacks or {})
        text = "the run was interrupted; its workers were ended"
        if hung:
            text += "\n\nwhere the cores stood:\n" + "".join(f"core {rank}:\n{stacks[rank]}" for rank in sorted(stacks))
        super().__init__(text)
        self.run, self.stacks = run, stacks

    def __reduce__(self) -> tuple:
        return type(self), (self.run, self.stacks), vars(self) | {"args": self.args}


@dataclass(frozen=True)
class Run:
    """What a launch brought back.

    Attributes:
        results: what the worker function returned, by rank; tensors are on the CPU. None for a core that has not
            returned, which only a failed run has.
        cores: cores that ran.
        device: what they were, in words.
        seconds: wall time from the fork to the last result.
        memory: peak host memory of each core's process in bytes, pages shared with the kernel included.
        log: the rows of `core.log`, in order: a dict with "step" and the values.
        grown: by how many bytes each core's process grew from its start, at most, by the peak that the system keeps;
            without files that are mapped, such as a cache, and what the kernel held.
    """

    results: list
    cores: int
    device: str
    seconds: float
    memory: list[int]
    log: list[dict] = field(repr=False)
    grown: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        most = f", {self._most()}" if self._most() else ""
        return (
            f"Run: {self.cores} x {self.device}, {self.seconds:.1f} s, peak host memory {self._memory()} a core{most}; "
            f"results: {len(self.results)} x {self._kinds()}; {counted(len(self.log), 'logged row')}"
        )

    def _repr_html_(self) -> str:
        rows = [
            ("cores", f"{self.cores} x {self.device}"),
            ("time", f"{self.seconds:,.1f} s, from the fork to the last result"),
            ("peak host memory", "\n".join(filter(None, [f"{self._memory()} a core", self._most()]))),
            ("results", f"{self._kinds()} from {'each core' if self.cores > 1 else 'the core'}: `run.results[0]`"),
        ]
        rows += [("log", f"{counted(len(self.log), 'row')}: `run.log`")] * bool(self.log)
        return as_html(rows, title="Run")

    def _memory(self) -> str:
        low, high = (f"{end(self.memory, default=0) / 2**20:,.0f}" for end in (min, max))
        if not self.memory:
            return "unknown"
        return f"{low} MiB" if low == high else f"{low} to {high} MiB"

    def _kinds(self) -> str:
        return ", ".join(dict.fromkeys(type(result).__name__ for result in self.results))

    def _most(self) -> str:
        """Say which core grew most."""
        if not any(self.grown):
            return ""
        most = max(range(len(self.grown)), key=self.grown.__getitem__)
        return f"core {most} grew most, by {self.grown[most] / 2**20:,.0f} MiB"


def launch(
    fn: Callable,
    *args: object,
    cores: int | None = None,
    device: int | None = None,
    backend: str | None = None,
    seed: int | None = None,
    timeout: float | None = None,
    stall: float | None = 120.0,
    heartbeat: float = 1.0,
    progress: str | None = None,
    to: Callable[[dict], object] | Sequence[Callable[[dict], object]] | None = None,
    precision: str | None = None,
    compile_cache: Folders | bool | None = None,
    hosts: Hosts | None = None,
    shard: str | None = None,
    **unknown: object,
) -> Run:
    """Run `fn(core, *args)` on every core, each in a process of its own, and return when all are done.

    The workers are forks: they see everything the notebook has defined, nothing has to be pickled on the way in, and
    nothing they change is changed here. The kernel never touches the device, so this can be run again and again.

    On v5e chips torch_xla's compiler may use 22 MiB of VMEM for one operation, not 16. For another limit set
    LIBTPU_INIT_ARGS before, to "--xla_tpu_scoped_vmem_limit_kib=16384" or what you like.

    Args:
        fn: the worker function; its first argument is a `Core`.
        *args: passed on as they are.
        cores: None for all there are; on a TPU that or 1. Where no accelerator is, any number of CPU processes.
        device: the number of the one chip or GPU to run on, from 0; None for all, or with cores=1 the first.
        backend: None for the best there is; "cpu" rehearses on plain CPU processes, "xla" on a machine without a
            chip through torch_xla, slowly but with real graphs: on the stand-in for libtpu where it is installed, else
            on XLA:CPU processes that gloo joins ("xla:simulator" and "xla:cpu" choose one of them).
        seed: of all random numbers of the run. None takes the notebook's, `torch.initial_seed()`, so that
            `torch.manual_seed` in a cell counts; where nobody seeded, that is another in every kernel. A worker
            function begins with the same random numbers on every core; within steps each core draws its own.
        timeout: seconds after which the run is ended; None for no limit.
        stall: seconds that cores may wait for one that neither moves on nor uses a processor, before the run is ended
            with the stacks of all; None to wait for ever. A core that compiles uses a processor.
        heartbeat: seconds between two signs of life of a worker.
        progress: "panel", "line", "text" or "off"; None decides by where this runs.
        to: a function, or a list of them, that the kernel calls with each row of `core.log` as it arrives, a dict with
            "step" and the values: `TensorBoardWriter(folder)`, `CsvWriter(file)`; for wandb `to=wandb.log`; for MLflow
            `to=lambda row: mlflow.log_metrics(row, step=row["step"])`. The kernel waits for it, and does not look at
            the cores meanwhile, so keep it fast. One that raises, or that an interrupt ends, is told and gets no more
            rows; after an error the run goes on.
        precision: of matrix products and convolutions in float32. None for the device's own: a TPU rounds their inputs
            to bfloat16 (8 significant bits) and adds up in float32, a GPU does float32 products as they are and rounds
            the inputs of convolutions to 11 bits. "high" keeps about 14 bits on a TPU, 11 on a GPU; "highest" keeps
            them all, on a TPU in six passes instead of one. torch_xla 2.8 and 2.9 leave it out in the backward pass of
            convolutions and in torch.einsum. CPU processes and XLA:CPU keep all bits anyway.
        compile_cache: a folder where what is compiled is kept, so that the next session loads it instead, also on
            another machine of the same kind; or a list of folders, the first of which is written, the others only
            read. False for none; None for what `setup(compile_cache=...)` has named. What is loaded from there is
            code: the folder is made for this user alone, and one that others can write to is refused. Past 2 GB, those
            programs are removed that nobody has used for longest. Where it cannot be had, that is said, and the launch
            goes on without it.
        hosts: which of several hosts this is, where each of them calls launch with the same arguments; the run it
            returns is this host's part. `tpukit.cloud.ray_train` does all that. A core that waits for another host is
            not called stalled, since only that host knows what its cores do.
        shard: "fsdp" for a model that one chip cannot hold: all chips are one core of one process then, rank 0 of 1,
            and each has a part of every weight and of the optimiser's state, and computes its share of the batch. The
            same function runs; `batch_size` is of the whole run, and `core.chips` divides it. Checkpoints are those of
            the plain model. For torch_xla alone; without a chip one CPU process holds all of it, and says so.
        **unknown: refused: every keyword is an option of launch. What `fn` takes by keyword goes through
            `functools.partial(fn, lr=0.1)`.

    Raises:
        TypeError: a keyword is none of these options, `fn` is no function that takes a core and `args`, or `to` is
            neither a function nor a list of functions.
        ValueError: `cores`, `device`, `backend` or `shard` cannot be had on this machine, or not together, a number of
            seconds is not above 0, there is no such `precision`, or others can write to a folder of `compile_cache`.
        RuntimeInUseError: this process has started the XLA or CUDA runtime, or is a worker itself.
        DeviceBusyError: on a TPU, other programs still hold the chips after a minute, unless `device` chose one.
        WorkerError: a core failed, or the run hung; its `__cause__` is the original exception where that could be
            pickled and has no text of megabytes.
        LaunchInterrupted: a KeyboardInterrupt, with what had been brought by then, and where the cores stood.
    """
    if unknown:
        refuse_options(fn, unknown, launch)
    refuse_call(fn, args)
    host = MachineInfo.read()
    limits, task = Limits(timeout, stall, heartbeat), Task(fn, args, seed_of(seed, hosts), precision)
    if shard is not None:
        choose = functools.partial(choose_topology, host, backend=backend)
        with optional_subpackage("launch(shard=...)"):
            from tpukit.accelerators import choose_sharded, how_it_is_cut
        topology = choose_sharded(shard, choose, cores=cores, device=device, hosts=hosts)
    elif device is None:
        topology = choose_topology(host, cores, backend)
    else:
        topology = choose_device(host, device, cores, backend)
    refuse_one_process_variables(topology)
    if hosts is not None:
        topology = replace(topology, hosts=hosts)
        with optional_subpackage("launch(hosts=...)"):
            from tpukit.accelerators import over_hosts
        task = replace(task, fn=functools.partial(over_hosts, fn, topology))
    refuse_if_in_use(host)
    group_type = WorkerGroup if topology.processes else InProcessGroup
    with sigterm_ends_the_run(), screen(progress) as display:
        if to is not None:
            with optional_subpackage("launch(to=...)"):
                from tpukit.training import LogWriters
            to = LogWriters(to, display.line)
        with (
            ready(topology, topology.processes * topology.chips, compile_cache, display) as topology,
            group_type(topology, task, limits, display, to) as group,
        ):
            if shard is not None:
                display.line(how_it_is_cut(topology))
            if topology.is_dry_run:
                take = "processes take" if topology.cores > 1 else "process takes"
                who = f"{topology.cores} {topology.device} {take}"
                if topology.chips > 1:
                    who = f"{topology.device} of one process take"
                note = runtimes()[topology.backend].note
                display.line(f"dry run: {who} the place of TPU cores{note}")
            if topology.cores > topology.processes > 0:
                display.line(
                    "cores that share a chip share the host's random numbers: those of the device and of datasets in "
                    "core.batches can be drawn again from the seed, others on the host cannot (see Core.seed)"
                )
            try:
                failure = group.watch()
                if failure is not None:
                    display.close("failed")
            except KeyboardInterrupt:
                display.close("interrupted")
                hung, stacks = group.waits_long(), group.stacks(INTERRUPT_STACKS_SECONDS)
                group.end()
                raise LaunchInterrupted(collect(group), stacks, hung=hung) from None
    if failure is None and (error := apart([group.same[rank] for rank in sorted(group.same)])):
        raise WorkerError(str(error), rank=0, traceback="", run=collect(group)) from error
    if failure is None:
        return collect(group)
    raise worker_failed(failure, group)


@contextlib.contextmanager
def ready(topology: Topology, chips: int, compile_cache: Folders | bool | None, display: Screen) -> Iterator[Topology]:
    """Wait for so many chips of a TPU; yield the layout with the folders of compiled programs, and say what came of it.

    Raises:
        DeviceBusyError: other programs hold the chips.
        TypeError, ValueError: as `launch` has it of `compile_cache`.
    """
    runtime, folders = runtimes()[topology.backend], folders_of(compile_cache)
    if runtime.hardware == "TPU":
        wait_for_chips(chips, display.line, chip=topology.device_number)
    kept = runtime.open_compile_cache(folders, display.line) if folders else None
    if kept is None:
        yield topology
        return
    try:
        yield replace(topology, kept=kept)
    finally:
        if said := kept.summary():
            display.line(said)
        kept.close()


def worker_failed(failure: Failure, group: WorkerGroup, what: str = "") -> WorkerError:
    """Return the error that tells of a group's failure; `what` names the group where there are several."""
    text = what + message(failure, group.topology)
    error = WorkerError(text, rank=failure.rank, traceback=failure.trace, run=collect(group))
    error.__cause__ = failure.error
    return error


def collect(group: WorkerGroup) -> Run:
    """Return what the group has brought by now."""
    ranks = group.ranks
    return Run(
        results=[group.results.get(rank) for rank in ranks],
        cores=group.topology.cores,
        device=group.topology.device,
        seconds=group.ended - group.began,
        memory=[group.memory[rank] for rank in ranks if rank in group.memory],
        log=group.log,
        grown=[group.grown[rank] for rank in ranks if rank in group.grown],
    )
