"""Run a worker function on every core of several hosts, by Ray Train.

    Ray cluster      host 0                        host 1
    Ray worker       one process: launches         one process: launches
    forked workers   core 0, 1, 2, 3               core 4, 5, 6, 7

Ray finds the hosts, starts one process on each, and stores the checkpoints. If a host is lost, Ray
starts all hosts again from the last checkpoint. Ray's process on a host has the role of a
notebook's kernel: it calls `launch`, and never opens the device.
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
from typing import NamedTuple

from tpukit.accelerators import launch_on_host
from tpukit.essentials.display import (
    InvalidValueError,
    NotInstalledError,
    TpukitError,
    TpukitRuntimeError,
)
from tpukit.essentials.environment import is_installed_file, setup
from tpukit.essentials.launcher import Core, Hosts, Run
from tpukit.profiling import parse_duration

_SECONDS_BETWEEN_REPORTS = 1.0
# Ray's variable for the seconds in which all hosts must start. After that, Ray Train tries again.
_SECONDS_PER_TRY = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
_DEFAULT_SECONDS_PER_TRY = 60
_RUN = "run-{}.pickle"  # the file of a host's `Run` in the last checkpoint


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
    """Run `fn(core, *args)` on every core of several hosts as a single run, and return all results.

    Call it on a machine of a Ray cluster. `core.rank` and `core.world_size` count the cores of all
    hosts. On each host, the function runs in a temporary folder. If the path in
    `fit(checkpoints=...)` is relative to this folder, tpukit copies the checkpoints to `storage`
    within seconds. Other files of the folder are deleted at the end. If a host is lost, all hosts
    start again from the last checkpoint. A later call with the same storage and name continues
    from it, too.

    Args:
        fn: the worker function, as for `launch`.
        *args: further arguments of the function. The function, its arguments and the code of its
            module are pickled. All other modules that it imports must be installed on the hosts.
        hosts: the number of hosts, 2 or more, with the same number of cores each; None for a TPU
            slice.
        topology: the topology of a TPU slice, such as "4x4", whose hosts are reserved together;
            None without a slice.
        accelerator: Ray's name of the slice: "TPU-V5LITEPOD", "TPU-V6E", "TPU-V4"; None without a
            slice.
        storage: a folder that all hosts can read and write: "gs://bucket/runs", or a folder on a
            shared file system.
        name: the name of the run.
        failures: how often the run may start again after a failure; 0 for never. An error of the
            function is a failure too.
        patience: the longest wait for hosts, at the start and for the replacement of a lost host,
            such as "30m", or seconds.
        resources: the resources that Ray reserves per host besides the TPU; None for one CPU.
        **options: options of `launch`: cores (per host), backend, seed, timeout, limits,
            matmul_precision.

    Returns:
        A `Run` with the results of all hosts' cores in `results`, by rank. `cores` is the number of
        all cores, and `seconds` the time since the last start.

    Raises:
        NotInstalledError: Ray is not installed.
        InvalidValueError: neither `hosts` nor `topology` is given, `accelerator` is given without
            `topology`, or the slice does not exist.
        TpukitRuntimeError: this machine is in no Ray cluster.
        MultiHostError: the run failed more than `failures` times, or hosts did not start.
    """
    ray = import_ray()
    from ray.train import (
        CheckpointConfig,
        FailureConfig,
        LoggingConfig,
        RunConfig,
        ScalingConfig,
        TrainingFailedError,
    )
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    seconds_per_try = float(os.environ.get(_SECONDS_PER_TRY, _DEFAULT_SECONDS_PER_TRY))
    # For Ray, a start that takes too long is a failure of its controller, so limit their number.
    start_attempts = math.ceil(parse_duration(patience, "patience") / seconds_per_try)
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
            failure_config=FailureConfig(
                max_failures=failures, controller_failure_limit=start_attempts
            ),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            logging_config=LoggingConfig(log_level="ERROR"),  # the hosts print their own lines
        ),
    )
    try:
        with keep_signals():
            result = trainer.fit()
    except TrainingFailedError as error:
        raise _explained(error, failures) from None
    # Ray merges the files that the hosts report into one checkpoint.
    with result.checkpoint.as_directory() as folder:
        return _joined([*Path(folder).glob(_RUN.format("*"))])


class MultiHostError(TpukitError, RuntimeError):
    """A run over several hosts failed, and is not started again.

    Attributes:
        failures: the error of each host that failed, as text, by the number of the host.
    """

    failures: Mapping[int, str] = types.MappingProxyType({})


def import_ray():
    """Import Ray Train; raise `NotInstalledError` with the command that installs it."""
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
    """Restore the handlers of SIGINT and SIGTERM at the end of the block.

    Ray replaces these handlers, and without them cells could no longer be interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: the handler was not set by Python
                signal.signal(number, handler)


def _connect(ray) -> None:
    try:
        ray.init("auto")
    except ConnectionError as error:
        raise TpukitRuntimeError(
            "there is no Ray cluster on this machine",
            found=" ".join(str(error).split())[:200],
            fix=(
                "run `ray start --head` on the first host and, with its address for FIRST,\n"
                "`ray start --address=FIRST:6379` on the others"
            ),
        ) from None


def _scaling(
    hosts: int | None,
    topology: str | None,
    accelerator: str | None,
    resources: dict[str, float] | None,
) -> dict:
    """Return the arguments of Ray's `ScalingConfig` for the arguments of `launch_on_hosts`."""
    more = {"CPU": 1} | (resources or {})
    if topology is None and accelerator is not None:
        raise InvalidValueError(
            f"accelerator={accelerator!r} is the name of a slice, and topology= is missing",
            fix=f'add the topology: topology="4x4", accelerator="{accelerator}"; '
            "if the hosts are not a slice, replace accelerator= by their number: hosts=2",
        )
    if topology is None and (not isinstance(hosts, int) or hosts < 2):
        raise InvalidValueError(
            f"a run over several hosts needs at least two, got hosts={hosts!r} and no topology",
            fix=(
                'hosts=2; or topology="4x4", '
                'accelerator="TPU-V5LITEPOD"; for one host, tpukit.launch'
            ),
        )
    if topology is None:
        return {
            "num_workers": hosts,
            "resources_per_worker": more,
            "placement_strategy": "STRICT_SPREAD",  # at most one worker per host
        }
    count, per_host = hosts_of_slice(topology, accelerator)
    if hosts not in (None, count):
        raise InvalidValueError(
            f"a slice {topology} of {accelerator} has {count} hosts, got hosts={hosts}",
            fix="leave hosts out",
        )
    return {
        "num_workers": count,
        "use_tpu": True,
        "topology": topology,
        "accelerator_type": accelerator,
        # All resources of a host, because by default Ray starts one worker per chip, and each
        # worker would be a host for torch_xla.
        "resources_per_worker": per_host | more,
    }


def hosts_of_slice(topology: str, accelerator: str | None) -> tuple[int, dict[str, float]]:
    """Return the number of hosts of a TPU slice, and Ray's resources per host.

    Raises:
        InvalidValueError: the slice does not exist.
    """
    from ray.util.tpu import get_tpu_worker_resources

    try:
        return get_tpu_worker_resources(
            topology=topology, accelerator_type=accelerator or "none", num_slices=1
        )
    except ValueError as error:
        raise InvalidValueError(
            f"there is no TPU slice topology={topology!r}, accelerator={accelerator!r}",
            found=f"Ray: {error}",
            fix='topology="4x4", accelerator="TPU-V5LITEPOD" or "TPU-V6E"; or topology="2x2x2", '
            'accelerator="TPU-V4"',
        ) from None


class _CoreResult(NamedTuple):
    """The result of one core of a run."""

    rank: int
    result: object
    memory: object  # its entry of `Run.memory`
    grown: object  # its entry of `Run.memory_growth`


def _joined(parts: list[Path]) -> Run:
    """Join the pickled runs of all hosts to one `Run`, with the cores in the order of ranks."""
    from ray import cloudpickle

    runs: list[Run] = [cloudpickle.loads(part.read_bytes()) for part in parts]
    cores = []
    for run in runs:
        grown = run.memory_growth or [0] * run.cores
        for result, memory, growth in zip(run.results, run.memory, grown, strict=True):
            cores.append(_CoreResult(*result, memory, growth))
    cores.sort(key=lambda core: core.rank)
    return replace(
        max(runs, key=lambda run: len(run.log)),  # only the host of rank 0 has logged rows
        results=[core.result for core in cores],
        cores=len(cores),
        seconds=max(run.seconds for run in runs),
        memory=[core.memory for core in cores],
        memory_growth=[core.grown for core in cores],
    )


def _explained(error: Exception, failures: int) -> MultiHostError:
    """Return the error for the user, with the message of the host that failed first."""
    by_host = getattr(error, "worker_failures", {})
    texts = {number: str(failure) for number, failure in by_host.items()}
    if not texts:
        return MultiHostError(
            "not all hosts of the run have started",
            found=" ".join(str(error).split())[:400],
            fix="`ray status` on a host lists hosts and resources; or pass a longer patience=",
        )

    def order(number: int) -> tuple[bool, int]:
        # When a host fails, all others wait for it in a collective until they fail too. So a host
        # with another error has failed first.
        return "waiting for the other cores" in texts[number], number

    first = min(texts, key=order)
    return MultiHostError(
        f"host {first} of the run failed, in the last of {failures + 1} attempts\n{texts[first]}",
        failures=texts,
    )


def _pickled(task: "_Task") -> bytes:
    """Pickle the function with the code of its module, which the hosts need not have.

    The module of an installed package is not pickled.
    """
    from ray import cloudpickle

    function = getattr(task.fn, "func", task.fn)  # the function in a functools.partial
    module = inspect.getmodule(function)
    file = getattr(module, "__file__", None)
    is_sent = bool(file) and module.__name__ != "__main__" and not is_installed_file(file)
    if is_sent:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(task)
    finally:
        if is_sent:
            cloudpickle.unregister_pickle_by_value(module)


@dataclass(frozen=True)
class _Task:
    """The worker function, its arguments, and the options of `launch`."""

    fn: Callable
    args: tuple
    options: dict = field(default_factory=dict)

    def on_core(self, core: Core, *args: object) -> tuple[int, object]:
        """Run the function on a core; return (rank, result).

        The rank is returned because on a TPU the chips of a host may have any ranks.
        """
        return core.rank, self.fn(core, *args)


def _on_a_host(config: dict) -> None:
    """Launch the function on the cores of this host, and report new checkpoints of its folder.

    Ray Train calls it on every host.
    """
    from ray import cloudpickle, train

    task: _Task = cloudpickle.loads(config["task"])
    # Below this level, Ray prints a line for every report.
    logging.getLogger("ray.train").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="tpukit-host-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.chdir(folder)
        # The folder is new, so every host begins with the last reported checkpoint. With newer
        # files of their own, hosts would continue from different steps.
        last = train.get_checkpoint()
        if last:
            last.to_directory(name)
        hosts = _meet(train)
        is_first = hosts.number == 0
        if last and is_first:
            checkpoint = Path(last.path).name
            print(f"{hosts.count} hosts start again, from the checkpoint {checkpoint}", flush=True)
        reports = _Reports(train, folder, is_first=is_first)
        setup()
        run = launch_on_host(
            hosts, task.on_core, *task.args, progress="text", loggers=reports.row, **task.options
        )
        reports.end()
        file = _RUN.format(hosts.number)
        (folder / file).write_bytes(cloudpickle.dumps(run))
        # The folders of other hosts may have the checkpoint with which they began. It must not
        # replace the newer checkpoint that core 0 has written.
        has_core_0 = any(rank == 0 for rank, _ in run.results)
        reports.report(file, checkpoints=has_core_0)


def _meet(train) -> Hosts:
    """Return this host's number, the number of hosts, and the address of a port on host 0.

    Collective: call it on every host.
    """
    from ray.train.collective import broadcast_from_rank_zero
    from ray.util import get_node_ip_address

    context = train.get_context()
    listener = None
    address = None
    if context.get_world_rank() == 0:
        # The system chooses a free port. The socket stays open, so that no other process gets it.
        listener = socket.create_server((get_node_ip_address(), 0))
        address = listener.getsockname()
    address = broadcast_from_rank_zero(address)
    return Hosts(context.get_world_rank(), context.get_world_size(), address, listener)


class _Reports:
    """Report new checkpoints of a folder to Ray, from a thread that runs during the launch.

    A report is a collective of all hosts, but only the host of core 0 writes checkpoints. So host 0
    begins a report about every second, and all hosts take part. Most reports have no checkpoint.

    Args:
        train: the module `ray.train`.
        folder: the folder in which the worker function runs.
        is_first: True on host 0.
    """

    def __init__(self, train, folder: Path, *, is_first: bool):
        self._train = train
        self._folder = folder
        self._is_first = is_first
        self._row: dict = {}
        self._done = threading.Event()
        self._reported = self._steps()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._report_until_done, name="tpukit-reports", daemon=True
        )
        self._thread.start()

    def row(self, row: dict) -> None:
        """Store the newest logged numbers for the next report."""
        self._row = self._row | row

    def end(self) -> None:
        """Stop the reports of the thread, and wait until all hosts have stopped theirs.

        Collective: call it on every host.
        """
        self._done.set()
        self._thread.join()
        if self._error:
            raise self._error

    def report(self, *also: str, checkpoints: bool = True) -> None:
        """Report the newest numbers to Ray, and new checkpoints and further files if there are any.

        Collective: call it on every host.

        Args:
            also: the names of further files in the folder.
            checkpoints: True to report new checkpoints of the folder.
        """
        steps = self._steps() if checkpoints else set()
        if steps <= self._reported and not also:
            self._train.report(self._row)
            return
        with self._copy({path.parent for path in steps}, also) as copy:
            checkpoint = self._train.Checkpoint.from_directory(copy)
            self._train.report(self._row, checkpoint=checkpoint)
        self._reported = steps

    def _report_until_done(self) -> None:
        from ray.train.collective import broadcast_from_rank_zero

        try:
            while True:
                goes_on = None  # the broadcast ignores the value of all hosts except host 0
                if self._is_first:
                    goes_on = not self._done.wait(_SECONDS_BETWEEN_REPORTS)
                if not broadcast_from_rank_zero(goes_on):
                    return
                self.report()
        except BaseException as error:  # `end` raises it in the main thread
            self._error = error

    def _steps(self) -> set[Path]:
        """Return the paths of `fit`'s checkpoints, `step-*.pt`, all of which are complete."""
        return {*self._folder.rglob("step-*.pt")}

    @contextlib.contextmanager
    def _copy(self, folders: set[Path], also: tuple[str, ...]) -> Iterator[str]:
        """Yield a temporary folder with hard links to the files.

        Ray reads the files there, because the running `fit` removes old checkpoints meanwhile.
        """
        files = [self._folder / name for name in also]
        for folder in folders:
            files += [path for path in folder.iterdir() if path.is_file()]
        with tempfile.TemporaryDirectory(prefix="tpukit-report-", dir=self._folder.parent) as copy:
            for path in files:
                if path.name.startswith("."):  # a lock file, or an unfinished file
                    continue
                to = Path(copy) / path.relative_to(self._folder)
                to.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):  # `fit` has just removed it
                    os.link(path, to)
            yield copy
