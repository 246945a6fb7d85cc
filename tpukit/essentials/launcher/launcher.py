"""Run a function on every core, and return each core's result or raise the first failure.

    launch(train, config)
      check the arguments; choose backend, cores and processes      here and in `topology`
      fork the worker processes                                     `worker_group`
      read their messages until all are done or a core failed       `worker_group`, `watchdog`
      end the processes                                             `worker_group`

`launch` returns a `Run`, or raises a `WorkerError` or a `LaunchInterrupted`. The attribute `run` of
these errors is a `Run` with the results so far.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpukit.essentials.backends import Hosts, Topology, runtimes
from tpukit.essentials.data import lines_about
from tpukit.essentials.display import (
    ErrorFields,
    Screen,
    TpukitError,
    as_html,
    counted,
    optional_subpackage,
    screen,
)
from tpukit.essentials.environment import Folders, MachineInfo, folders_of, wait_for_chips
from tpukit.essentials.launcher.agreement import difference_at_end
from tpukit.essentials.launcher.calls import explain_unknown_options, refuse_call
from tpukit.essentials.launcher.failure import Failure, report
from tpukit.essentials.launcher.signals import INTERRUPT_STACKS_SECONDS, sigterm_ends_the_run
from tpukit.essentials.launcher.topology import (
    choose_device,
    choose_topology,
    refuse_if_in_use,
    refuse_one_process_variables,
    refuse_torch,
)
from tpukit.essentials.launcher.watchdog import Limits
from tpukit.essentials.launcher.worker import Task, seed_of
from tpukit.essentials.launcher.worker_group import InProcessGroup, WorkerGroup

_MIB = 2**20
# Printed if every core has trained and none was in a collective.
_EACH_ALONE = (
    "no core has waited for another: each has trained a separate model. core.model, "
    "core.batches and core.optimizer_step join the cores; tpukit.launch_each is for independent "
    "runs"
)
Logger = Callable[[dict], object]


@dataclass(frozen=True)
class Run:
    """The outcome of a launch.

    Attributes:
        results: the return values of the worker function, by rank, with tensors on the CPU. None
            for a core that has not returned, which is only possible in the attribute `run` of an
            exception.
        cores: number of cores that ran.
        device: the kind of core, such as "TPU v5e core".
        seconds: wall time to the last result, from the fork; in a session, from the call of `run`.
        memory: peak host memory of each core's process in bytes, with the pages that the process
            shares with the notebook's kernel.
        log: the rows of `core.log` in order, each a dict with "step" and the values.
        memory_growth: largest growth in bytes of each core's process since the worker function
            began, computed from the peak that the operating system records. Mapped files, such as a
            cache, and memory of the notebook's kernel do not count.
    """

    results: list[Any]
    cores: int
    device: str
    seconds: float
    memory: list[int]
    log: list[dict] = field(repr=False)
    memory_growth: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        parts = [
            f"{self.cores} x {self.device}",
            f"{self.seconds:.1f} s",
            f"peak host memory {self._memory_in_words()} per core",
        ]
        growth = self._growth_in_words()
        if growth:
            parts.append(growth)
        results = f"results: {len(self.results)} x {self._types_of_results()}"
        return f"Run: {', '.join(parts)}; {results}; {counted(len(self.log), 'logged row')}"

    def _repr_html_(self) -> str:
        memory = f"{self._memory_in_words()} per core"
        growth = self._growth_in_words()
        if growth:
            memory = f"{memory}\n{growth}"
        source = "each core" if self.cores > 1 else "the core"
        rows = [
            ("cores", f"{self.cores} x {self.device}"),
            ("time", f"{self.seconds:,.1f} s, from the start to the last result"),
            ("peak host memory", memory),
            ("results", f"{self._types_of_results()} from {source}: `run.results[0]`"),
        ]
        if self.log:
            rows.append(("log", f"{counted(len(self.log), 'row')}: `run.log`"))
        return as_html(rows, title="Run")

    def _memory_in_words(self) -> str:
        if not self.memory:
            return "unknown"
        low = f"{min(self.memory) / _MIB:,.0f}"
        high = f"{max(self.memory) / _MIB:,.0f}"
        if low == high:
            return f"{low} MiB"
        return f"{low} to {high} MiB"

    def _types_of_results(self) -> str:
        names = [type(result).__name__ for result in self.results]
        return ", ".join(dict.fromkeys(names))  # each name once, in the order of ranks

    def _growth_in_words(self) -> str:
        """Return a phrase that names the core whose memory grew most; "" if none grew."""
        if not any(self.memory_growth):
            return ""
        largest = max(self.memory_growth)
        core = self.memory_growth.index(largest)
        return f"core {core} grew most, by {largest / _MIB:,.0f} MiB"


class WorkerError(TpukitError, RuntimeError):
    """A core failed, the run hung, or the cores were out of sync when they returned.

    After a failure `launch` ends the worker processes. A session stops the worker function, and
    keeps the processes if it can. The exception that the core raised is the `__cause__`, if it can
    be pickled and its text has at most 100,000 characters.

    Attributes:
        rank: the core that failed first or that causes a hang; 0 if the cores were out of sync.
        traceback: the traceback of that core as text.
        run: the results and the log so far, as a `Run`.
    """

    rank = 0
    traceback = ""
    run: Run | None = None


class LaunchInterrupted(ErrorFields, KeyboardInterrupt):
    """The user interrupted the run, so tpukit has stopped the worker function.

    The exception has the fields of `TpukitError`, but `except Exception` does not catch it.

    Attributes:
        run: the outcome so far: a `Run` of `launch`, or the `Jobs` of `launch_each`.
        stacks: the stack of each core that had not returned, as text by rank. A core that did not
            answer at once is left out. Empty for `launch_each`.
    """

    run: object = None
    stacks: Mapping[int, str] = {}


@dataclass(frozen=True)
class LaunchOptions:
    """The options of `launch`; `hosts` is set only in a run over several hosts."""

    cores: int | None = None
    device: int | None = None
    backend: str | None = None
    seed: int | None = None
    timeout: float | None = None
    limits: Limits = Limits()
    progress: str | None = None
    loggers: Logger | Sequence[Logger] | None = None
    matmul_precision: str | None = None
    compile_cache: Folders | bool | None = None
    shard: str | None = None
    hosts: Hosts | None = None


@explain_unknown_options
def launch(
    fn: Callable,
    *args: object,
    cores: int | None = None,
    device: int | None = None,
    backend: str | None = None,
    seed: int | None = None,
    timeout: float | None = None,
    limits: Limits = Limits(),
    progress: str | None = None,
    loggers: Logger | Sequence[Logger] | None = None,
    matmul_precision: str | None = None,
    compile_cache: Folders | bool | None = None,
    shard: str | None = None,
) -> Run:
    """Run `fn(core, *args)` on every core, and return the results.

    The workers are forks of the kernel: they see everything that the notebook has defined, and no
    argument needs pickling. Changes that a worker makes to variables do not reach the notebook. The
    kernel never opens the device, so you can call `launch` again and again.

    Every keyword is an option of `launch`. To pass `fn` a keyword, use
    `functools.partial(fn, lr=0.1)`.

    On v5e chips tpukit lets torch_xla's compiler use 22 MiB of VMEM (the chip's fast memory) per
    operation instead of 16. For another limit set LIBTPU_INIT_ARGS before the launch, such as
    "--xla_tpu_scoped_vmem_limit_kib=16384".

    Args:
        fn: the worker function; its first argument is a `Core`.
        *args: further arguments of `fn`.
        cores: number of cores. None for all. A TPU supports all cores or 1. Without an accelerator,
            it is the number of CPU processes: 1 on Windows, any number on other systems.
        device: index of a single chip or GPU to use, from 0. None for all of them, or for the first
            one if cores=1.
        backend: None for the fastest device of the machine. "cpu" is a dry run on plain CPU
            processes. "xla" on a machine without a chip is a dry run through torch_xla: slow, but
            with real graphs. It uses the simulated TPU if that is installed ("xla:simulator"), and
            otherwise XLA:CPU processes, which gloo connects ("xla:cpu").
        seed: seed of all random numbers of the run, 0 or more. None for the notebook's seed,
            `torch.initial_seed()`, which a cell can set by `torch.manual_seed`; without such a cell
            each kernel has a different seed. The worker function begins with the same random
            numbers on every core; in `core.step()` blocks each core draws different numbers.
        timeout: seconds after which tpukit ends the run. None for no limit.
        limits: how long cores may wait for a core that makes no progress, and the interval of a
            worker's reports; see `Limits`. `timeout` and `limits` need worker processes, so they
            have no effect on Windows.
        progress: "panel", "line", "text" or "off". None chooses by the kind of notebook.
        loggers: a function of a row, or a list of such functions: `TensorBoardWriter(folder)`,
            `CsvWriter(file)`, `wandb.log`, or for MLflow
            `lambda row: mlflow.log_metrics(row, step=row["step"])`. The kernel calls each function
            with every row of `core.log`, a dict with "step" and the values. A function must be
            fast, because the kernel does not watch the cores meanwhile. If a function raises an
            error, tpukit prints the error, does not call this function again, and continues.
        matmul_precision: precision of float32 matrix products and convolutions. None for the
            device's own: a TPU rounds their inputs to bfloat16 (8 significant bits) and adds in
            float32; a GPU rounds only the inputs of convolutions, to 11 bits. "high" keeps about
            14 bits on a TPU and 11 on a GPU. "highest" keeps all 24 bits, for which a TPU needs six
            passes instead of one. torch_xla 2.8 and 2.9 ignore this option in the backward pass of
            convolutions and in torch.einsum. CPU processes and XLA:CPU always keep all bits.
        compile_cache: folder for compiled programs. A later launch loads them from the folder,
            also on another machine of the same kind. In a list of folders, the first is written to
            and the others are only read. False for none; None for the folder of
            `setup(compile_cache=...)`. Loaded programs are code, so a folder to which other users
            can write raises an error. Above 2 GB tpukit removes the least recently used programs.
            If the runtime does not support a cache, tpukit prints that and continues.
        shard: "fsdp" for a model that is larger than one chip's memory; None otherwise. All chips
            are then one core of one process, rank 0 of 1. Each chip stores a part of every weight
            and of the optimizer's state, and computes its share of the batch. The worker function
            does not change. `batch_size` is for the whole run, a multiple of `core.chips`.
            Checkpoints are those of the model without sharding. Only torch_xla supports this
            option; without a chip, one CPU process stores everything.

    Returns:
        A `Run` with the results by rank.

    Raises:
        InvalidTypeError: a keyword is not an option, `fn` is not a function of a core and `args`,
            or `loggers` is not a function or a list of functions.
        InvalidValueError: this machine does not support `cores`, `device`, `backend`, `shard` or
            their combination; `seed` is below 0; a number of seconds is not above 0;
            `matmul_precision` is unknown; other users can write to a folder of `compile_cache`.
        NotInstalledError: torch, or the part of tpukit that an option needs, is not installed.
        RuntimeInUseError: this process has started the XLA or CUDA runtime, or is a worker itself.
        DeviceBusyError: a session of this notebook uses the chips; or, without `device`, other
            programs still use them after a minute.
        WorkerError: a core failed, the run hung, or the cores were out of sync at the end.
        LaunchInterrupted: the user interrupted the run. The exception has the outcome so far.
    """
    refuse_call(fn, args)
    options = LaunchOptions(
        cores=cores,
        device=device,
        backend=backend,
        seed=seed,
        timeout=timeout,
        limits=limits,
        progress=progress,
        loggers=loggers,
        matmul_precision=matmul_precision,
        compile_cache=compile_cache,
        shard=shard,
    )
    return run_on_cores(fn, args, options)


def run_on_cores(fn: Callable, args: tuple, options: LaunchOptions) -> Run:
    """Run `fn` on every core as `launch` does; `fn` and `args` are not checked."""
    host = MachineInfo.read()
    task, topology = plan(fn, args, options, host)
    # The display opens first: it shows the wait for chips and the start of the workers, too.
    with sigterm_ends_the_run(), screen(options.progress) as display:
        writers = log_writers(options.loggers, display)
        with started(task, topology, options, display, writers) as group:
            failure = watch(group, display)
    # After the group has ended: the error has the complete log and no worker is left.
    if failure is not None:
        raise worker_failed(failure, group)
    return outcome(group)


def plan(
    fn: Callable, args: tuple, options: LaunchOptions, host: MachineInfo
) -> tuple[Task, Topology]:
    """Check the options of a run; return its task and the layout of its cores.

    All checks come before the first fork, so that an error leaves no process behind.

    Raises:
        InvalidValueError, NotInstalledError, RuntimeInUseError: as `launch` documents.
    """
    refuse_torch(host)  # before `seed_of`, which needs torch
    task = Task(
        fn,
        args,
        seed=seed_of(options.seed, options.hosts),
        matmul_precision=options.matmul_precision,
        timeout=options.timeout,
    )
    topology = _choose(host, options)
    refuse_one_process_variables(topology)
    refuse_if_in_use(host)
    return task, topology


@contextlib.contextmanager
def started(
    task: Task, topology: Topology, options: LaunchOptions, display: Screen, writers=None
) -> Iterator[WorkerGroup]:
    """Fork the workers of a run, yield their group, and end them after the `with` block."""
    chips = topology.processes * topology.chips
    # A system without fork, such as Windows, has no processes: the kernel itself is the only core.
    group_type = WorkerGroup if topology.processes else InProcessGroup
    with (
        ready(topology, chips, options.compile_cache, display) as topology,
        group_type(topology, task, options.limits, display, writers) as group,
    ):
        _print_layout(topology, options.shard, display)
        if topology.cores > 1:
            for line in lines_about(task.fn):
                display.line(line)
        yield group


def outcome(group: WorkerGroup) -> Run:
    """Return the `Run` after every core has returned, if the cores are in sync.

    Raises:
        WorkerError: the states of the cores at the end are out of sync.
    """
    error = difference_at_end([group.states[rank] for rank in sorted(group.states)])
    if error is not None:
        raise WorkerError(
            error.fact, found=error.found, fix=error.fix, run=collect(group)
        ) from error
    return collect(group)


def _choose(host: MachineInfo, options: LaunchOptions) -> Topology:
    """Return the layout of the run on this machine: backend, cores and processes."""
    if options.shard is not None:
        return _choose_sharded(host, options)
    if options.device is None:
        topology = choose_topology(host, options.cores, options.backend)
    else:
        topology = choose_device(host, options.device, options.cores, options.backend)
    return replace(topology, hosts=options.hosts)


def _choose_sharded(host: MachineInfo, options: LaunchOptions) -> Topology:
    with optional_subpackage("launch(shard=...)"):
        from tpukit.accelerators import choose_sharded
    return choose_sharded(
        options.shard,
        functools.partial(choose_topology, host, backend=options.backend),
        cores=options.cores,
        device=options.device,
        hosts=options.hosts,
    )


def log_writers(loggers: Logger | Sequence[Logger] | None, display: Screen):
    """Return the object that calls the user's loggers; None if there are none."""
    if loggers is None:
        return None
    with optional_subpackage("launch(loggers=...)"):
        from tpukit.training import LogWriters
    return LogWriters(loggers, display.line)


def _print_layout(topology: Topology, shard: str | None, display: Screen) -> None:
    """Print how the layout differs from the normal one, which is one process per TPU core."""
    if shard is not None:
        with optional_subpackage("launch(shard=...)"):
            from tpukit.accelerators import how_it_is_cut
        display.line(how_it_is_cut(topology))
    if topology.is_dry_run:
        take = "processes take" if topology.cores > 1 else "process takes"
        who = f"{topology.cores} {topology.device} {take}"
        if topology.chips > 1:
            who = f"{topology.device} of one process take"
        note = runtimes()[topology.backend].note
        display.line(f"dry run: {who} the place of TPU cores{note}")
    # On v2 and v3 the two cores of a chip are threads of a process.
    if topology.cores > topology.processes > 0:
        display.line(
            "cores that share a chip share the host's random numbers: only random numbers of the "
            "device and of datasets in core.batches are reproducible from the seed (see Core.seed)"
        )


def watch(
    group: WorkerGroup, display: Screen, stop: Callable[[], str] | None = None
) -> Failure | None:
    """Wait for the end of a run, and return its first failure, or None.

    Args:
        group: the workers.
        display: shows the run.
        stop: a function that stops the workers after an interrupt, and returns a phrase for the
            message. With None, `watch` ends the workers.

    Raises:
        LaunchInterrupted: on a KeyboardInterrupt.
    """
    try:
        failure = group.watch()
        if failure is not None:
            display.close("failed")
        # All cores trained, and none was in a collective: probably `core.model` was forgotten.
        elif len(group.alone) > 1 and group.alone.issuperset(group.ranks):
            display.line(_EACH_ALONE)
        return failure
    except KeyboardInterrupt:
        display.close("interrupted")
        # Read the stacks before the workers end, because an ended process has no stack.
        has_waited_long = group.waits_long()
        stacks = group.stacks(INTERRUPT_STACKS_SECONDS)
        if stop is None:
            group.end()
            text = "its workers were ended"
        else:
            text = stop()
        raise interrupted(
            collect(group), stacks, has_waited_long=has_waited_long, text=text
        ) from None


def interrupted(
    run: object,
    stacks: Mapping[int, str] = LaunchInterrupted.stacks,
    *,
    has_waited_long: bool = False,
    text: str = "its workers were ended",
) -> LaunchInterrupted:
    """Return the exception that reports an interrupt, with the outcome so far."""
    details = ""
    if has_waited_long:  # probably the user interrupted because the cores hung
        texts = [f"core {rank}:\n{stacks[rank]}" for rank in sorted(stacks)]
        details = "the stacks of the cores:\n" + "".join(texts)
    return LaunchInterrupted(
        f"the run was interrupted; {text}",
        details=details,
        run=run,
        stacks=dict(stacks),
    )


@contextlib.contextmanager
def ready(
    topology: Topology,
    chips: int,
    compile_cache: Folders | bool | None,
    display: Screen,
) -> Iterator[Topology]:
    """Wait until the TPU's chips are free, open the compilation cache, and yield the layout.

    The layout has the open cache as `compile_cache`. The cache is closed after the block.

    Args:
        topology: the layout of the run.
        chips: number of chips that the run needs.
        compile_cache: as in `launch`.
        display: shows the wait, and a summary of the cache at the end.

    Raises:
        DeviceBusyError: a session of this notebook uses the chips, or other programs still use them
            after a minute.
        TypeError, ValueError: `compile_cache` is invalid, as `launch` documents.
    """
    runtime = runtimes()[topology.backend]
    folders = folders_of(compile_cache)
    # Chips stay busy for 10 to 30 s after the process that held them was killed.
    if runtime.hardware == "TPU":
        wait_for_chips(chips, display.line, chip=topology.device_number)
    cache = runtime.open_compile_cache(folders, display.line) if folders else None
    if cache is None:
        yield topology
        return
    try:
        yield replace(topology, compile_cache=cache)
    finally:
        summary = cache.summary()
        if summary:
            display.line(summary)
        cache.close()


def worker_failed(
    failure: Failure,
    group: WorkerGroup,
    prefix: str = "",
    *,
    others: str = "ended",
    text: str = "",
) -> WorkerError:
    """Return the error that reports the failure of a core.

    Args:
        failure: the failure that caused all others.
        group: the workers.
        prefix: text before the message. It names the group if there are several groups.
        others: what happened to the other cores, "ended" or "stopped", as in `report`.
        text: a phrase about the session's state; "" for a launch.
    """
    described = report(failure, group.topology, others)
    error = WorkerError(
        f"{prefix}{described.fact}",
        found="\n".join(filter(None, (described.found, text))),
        fix=described.fix,
        details=described.details,
        rank=failure.rank,
        traceback=failure.trace,
        run=collect(group),
    )
    # As `raise ... from` does, so that the notebook shows the core's own exception first.
    error.__cause__ = failure.error
    return error


def collect(group: WorkerGroup) -> Run:
    """Return the `Run` of a group with the results so far."""
    ranks = group.ranks  # a core that failed early may have no result and no memory report
    return Run(
        results=[group.results.get(rank) for rank in ranks],
        cores=group.topology.cores,
        device=group.topology.device,
        # `ended` is 0 if an interrupt has stopped the run of a session.
        seconds=(group.ended or time.monotonic()) - group.began,
        memory=[group.memory[rank] for rank in ranks if rank in group.memory],
        log=group.log,
        memory_growth=[group.memory_growth[rank] for rank in ranks if rank in group.memory_growth],
    )
