"""A worker function on every core of several hosts, by Ray Train: one Ray worker a host, our forked workers inside it.

Ray finds the hosts, starts one process on each, keeps the checkpoints, and starts all of it again from the last one
when a host is lost. That process is to its host what a notebook's kernel is: it launches, and never touches the device.
"""

import contextlib
import inspect
import logging
import math
import os
import signal
import socket
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tpukit.accelerators import launch_on_host
from tpukit.essentials.display import InvalidValueError, NotInstalledError, TpukitError, TpukitRuntimeError
from tpukit.essentials.environment import setup
from tpukit.essentials.launcher import Core, Hosts, Run
from tpukit.profiling import parse_duration

_SECONDS_BETWEEN_REPORTS = 1.0
_SECONDS_OF_A_TRY = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"  # to start on all hosts; then Ray Train tries again
_RUN = "run-{}.pickle"  # what a host has brought, in the last checkpoint


def launch_on_hosts(
    fn: Callable,
    *args: object,
    hosts: int | None = None,
    topology: str | None = None,
    accelerator: str | None = None,
    storage: str,
    name: str,
    failures: int = 3,
    patience: str | float = "30m",
    resources: dict[str, float] | None = None,
    **options: object,
) -> Run:
    """Run `fn(core, *args)` on every core of several hosts, one run over all of them; return what all have brought.

    Call it on a machine of a Ray cluster. The function is `launch`'s own: `core.rank` and `core.world_size` count the
    cores of all hosts. On each host it runs in an empty folder, so give `fit` a relative one: its checkpoints are
    copied to the storage within seconds. When a host is lost, all hosts begin again from the last of them; nothing else
    that is written there outlives its host. A run of the same storage and name continues from its last checkpoint.

    Args:
        fn: the worker function.
        *args: passed on as they are. They and the function are pickled with the code of the function's own module;
            every other module that it imports must be on the hosts.
        hosts: how many, where the cluster has no TPU slice: each host has as many cores.
        topology: of a TPU slice, such as "4x4": its hosts are reserved together.
        accelerator: of the slice, as Ray calls it: "TPU-V5LITEPOD", "TPU-V6E", "TPU-V4".
        storage: a folder that every host reaches: "gs://bucket/runs", or one of a shared file system.
        name: of the run.
        failures: how often to begin again, at most; 0 for never. An error of the function itself counts as well.
        patience: how long to wait for hosts, at the start and for one in place of one that was lost.
        resources: what a Ray worker takes of its host beside the TPU; None for one CPU.
        **options: of `launch`: cores (of each host), backend, seed, timeout, limits, matmul_precision.

    Returns:
        a `Run`: `results` by rank, `cores` of all hosts; `seconds` are those since the last start.

    Raises:
        ImportError: Ray is not installed.
        ValueError: neither `hosts` nor a slice is given, or Ray does not know such a slice.
        MultiHostError: the run has failed more than `failures` times, or the hosts did not come.
    """
    ray = import_ray()
    from ray.train import CheckpointConfig, FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    tries = math.ceil(parse_duration(patience, "patience") / float(os.environ.get(_SECONDS_OF_A_TRY, 60)))
    scaling = ScalingConfig(**_scaling(hosts, topology, accelerator, resources))
    if not ray.is_initialized():
        _connect(ray)
    trainer = DataParallelTrainer(
        _on_a_host,
        train_loop_config={"task": _pickled(_Task(fn, args, options))},
        scaling_config=scaling,
        run_config=RunConfig(
            name=name,
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=failures, controller_failure_limit=tries),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            logging_config=LoggingConfig(log_level="ERROR"),  # the hosts say what there is to say
        ),
    )
    try:
        with keep_signals():
            result = trainer.fit()
    except TrainingFailedError as error:
        raise _explained(error, failures) from None
    with result.checkpoint.as_directory() as folder:
        return _joined([*Path(folder).glob(_RUN.format("*"))])


class MultiHostError(TpukitError, RuntimeError):
    """A run over several hosts failed for good.

    Attributes:
        failures: by host, what it said.
    """

    failures: Mapping[int, str] = types.MappingProxyType({})


def import_ray():
    """Import Ray Train, or say what to install."""
    try:
        import ray
        import ray.train
    except ImportError as error:
        raise NotInstalledError(
            "a run over several hosts needs Ray Train, which is not installed",
            found=error,
            fix="pip install 'ray[train]>=2.54,<3', here and on every host",
        ) from error
    return ray


@contextlib.contextmanager
def keep_signals() -> Iterator[None]:
    """Put back how this process takes SIGINT and SIGTERM: Ray leaves handlers, and no cell could be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # it is not Python's
                signal.signal(number, handler)


def _connect(ray) -> None:
    try:
        ray.init("auto")
    except ConnectionError as error:
        raise TpukitRuntimeError(
            "there is no Ray cluster on this machine",
            found=" ".join(str(error).split())[:200],
            fix=(
                "`ray start --head` on the first host, `ray start --address=FIRST:6379` on others; to rehearse"
                "\nwith hosts that this machine plays: notebook 11, `with hosts_here(2): ...`"
            ),
        ) from None


def _scaling(
    hosts: int | None, topology: str | None, accelerator: str | None, resources: dict[str, float] | None
) -> dict:
    if topology is None and (not isinstance(hosts, int) or hosts < 2):
        raise InvalidValueError(
            f"a run over several hosts needs two at least, got hosts={hosts!r}, and no topology of a slice",
            fix='hosts=2; or topology="4x4", accelerator="TPU-V5LITEPOD"; for one host, tpukit.launch',
        )
    if topology is None:
        return {
            "num_workers": hosts,
            "resources_per_worker": {"CPU": 1} | (resources or {}),
            "placement_strategy": "STRICT_SPREAD",  # one a host
        }
    count, of_a_host = hosts_of_slice(topology, accelerator)
    if hosts not in (None, count):
        raise InvalidValueError(
            f"a slice {topology} of {accelerator} has {count} hosts, got hosts={hosts}", fix="leave hosts out"
        )
    return {
        "num_workers": count,
        "use_tpu": True,
        "topology": topology,
        "accelerator_type": accelerator,
        # Ray would give each chip a worker of its own, and torch_xla then takes every chip for a host.
        "resources_per_worker": of_a_host | {"CPU": 1} | (resources or {}),
    }


def hosts_of_slice(topology: str, accelerator: str | None) -> tuple[int, dict[str, float]]:
    """Return how many hosts a TPU slice has, and what Ray counts of each; ValueError where Ray knows no such slice."""
    from ray.util.tpu import get_tpu_worker_resources

    try:
        return get_tpu_worker_resources(topology=topology, accelerator_type=accelerator or "none", num_slices=1)
    except ValueError as error:
        raise InvalidValueError(
            f"there is no TPU slice topology={topology!r}, accelerator={accelerator!r}",
            found=f"Ray says: {error}",
            fix='topology="4x4", accelerator="TPU-V5LITEPOD"; "TPU-V6E", "TPU-V4" with "2x2x2"',
        ) from None


def _joined(parts: list[Path]) -> Run:
    from ray import cloudpickle

    runs: list[Run] = [cloudpickle.loads(part.read_bytes()) for part in parts]
    cores = []
    for run in runs:
        growth = run.memory_growth or [0] * run.cores
        cores += zip(run.results, run.memory, growth, strict=True)
    cores.sort(key=lambda core: core[0][0])  # by rank
    return replace(
        max(runs, key=lambda run: len(run.log)),  # rank 0's: nobody else's rows are kept
        results=[result for (_, result), _, _ in cores],
        cores=len(cores),
        seconds=max(run.seconds for run in runs),
        memory=[memory for _, memory, _ in cores],
        memory_growth=[grown for _, _, grown in cores],
    )


def _explained(error: Exception, failures: int) -> MultiHostError:
    said = {number: str(one) for number, one in getattr(error, "worker_failures", {}).items()}
    if not said:
        return MultiHostError(
            "the hosts of the run did not come together",
            found=" ".join(str(error).split())[:400],
            fix="`ray status` on a host shows which hosts and resources there are; a longer patience",
        )
    # The first host to fail leaves the others in a collective, which then fails, too.
    number = min(said, key=lambda one: ("waiting for the other cores" in said[one], one))
    return MultiHostError(
        f"host {number} of the run failed, the last of {failures + 1} times that it was tried\n{said[number]}",
        failures=said,
    )


def _pickled(task: "_Task") -> bytes:
    """Pickle the function with its code: the module that it is from need not be on the hosts."""
    from ray import cloudpickle

    module = inspect.getmodule(getattr(task.fn, "func", task.fn))  # of a functools.partial, its function
    file = getattr(module, "__file__", None)
    sent = file and module.__name__ != "__main__" and "site-packages" not in Path(file).parts
    if sent:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(task)
    finally:
        if sent:
            cloudpickle.unregister_pickle_by_value(module)


@dataclass(frozen=True)
class _Task:
    fn: Callable
    args: tuple
    options: dict = field(default_factory=dict)

    def on_core(self, core: Core, *args: object) -> tuple[int, object]:
        """Run the function as one core, and say which it is: on a TPU the chips of a host have any ranks."""
        return core.rank, self.fn(core, *args)


def _on_a_host(config: dict) -> None:
    """Be the kernel of one host: launch its part of the run, and report what appears in its folder."""
    from ray import cloudpickle, train

    task: _Task = cloudpickle.loads(config["task"])
    logging.getLogger("ray.train").setLevel(logging.ERROR)  # a line for every report otherwise
    with tempfile.TemporaryDirectory(prefix="tpukit-host-", ignore_cleanup_errors=True) as folder:
        os.chdir(folder)
        # Every host begins with what was reported, nothing newer: they would otherwise continue from different steps.
        if last := train.get_checkpoint():
            last.to_directory(folder)
        hosts = _meet(train)
        if last and hosts.number == 0:
            print(f"{hosts.count} hosts begin again, from the checkpoint {Path(last.path).name}", flush=True)
        reports = _Reports(train, Path(folder), is_first=hosts.number == 0)
        setup()
        run = launch_on_host(
            hosts, task.on_core, *task.args, progress="text", loggers=reports.row, **task.options
        )
        reports.end()
        (Path(folder) / _RUN.format(hosts.number)).write_bytes(cloudpickle.dumps(run))
        # Another host's folder may hold what it began with, which must not cover what core 0 has written since.
        saves = any(rank == 0 for rank, _ in run.results)
        reports.report(_RUN.format(hosts.number), checkpoints=saves)


def _meet(train) -> Hosts:
    """Agree on where the processes of all hosts find each other: on a port that host 0 has open already."""
    from ray.train.collective import broadcast_from_rank_zero
    from ray.util import get_node_ip_address

    context, listener = train.get_context(), None
    if context.get_world_rank() == 0:
        listener = socket.create_server((get_node_ip_address(), 0))
    address = broadcast_from_rank_zero(listener and listener.getsockname())
    return Hosts(context.get_world_rank(), context.get_world_size(), address, listener)


class _Reports:
    """Reports new checkpoints in a folder to Ray, in a thread beside the launch.

    A report is a call that all hosts make together, and only the host of core 0 has any checkpoint. So all report in
    turns that host 0 begins; most of these carry nothing.
    """

    def __init__(self, train, folder: Path, *, is_first: bool):
        self._train, self._folder, self._is_first = train, folder, is_first
        self._row: dict = {}
        self._done = threading.Event()
        self._reported = self._steps()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._turns, name="tpukit-reports", daemon=True)
        self._thread.start()

    def row(self, row: dict) -> None:
        """Keep the newest logged numbers: `launch(loggers=...)`."""
        self._row = self._row | row

    def end(self) -> None:
        """Return when all hosts have ended their turns."""
        self._done.set()
        self._thread.join()
        if self._error:
            raise self._error

    def report(self, *also: str, checkpoints: bool = True) -> None:
        """Report, together, the folders with checkpoints, if there is a new one, and other files."""
        steps = self._steps() if checkpoints else set()
        if steps <= self._reported and not also:
            self._train.report(self._row)
            return
        with self._copy({path.parent for path in steps}, also) as copy:
            self._train.report(self._row, checkpoint=self._train.Checkpoint.from_directory(copy))
        self._reported = steps

    def _turns(self) -> None:
        from ray.train.collective import broadcast_from_rank_zero

        try:
            while broadcast_from_rank_zero(not self._done.wait(_SECONDS_BETWEEN_REPORTS) if self._is_first else None):
                self.report()
        except BaseException as error:  # raised where the launch has ended
            self._error = error

    def _steps(self) -> set[Path]:
        return {*self._folder.rglob("step-*.pt")}  # complete: they get this name when they are

    @contextlib.contextmanager
    def _copy(self, folders: set[Path], also: tuple[str, ...]) -> Iterator[str]:
        """Link the files into a folder of their own, where the run that goes on removes none of them."""
        with tempfile.TemporaryDirectory(prefix="tpukit-report-", dir=self._folder.parent) as copy:
            files = [path for folder in folders for path in folder.iterdir() if path.is_file()]
            for path in [*files, *(self._folder / name for name in also)]:
                if path.name.startswith("."):  # a lock, or unfinished
                    continue
                to = Path(copy) / path.relative_to(self._folder)
                to.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # an old one, removed at this moment
                    os.link(path, to)
            yield copy
