"""Run independent jobs from a queue, each on one core: folds, seeds, settings.

Three jobs on two devices; when a job ends, its device runs the next job of the queue:

    device 0    job 0 ===== | job 2 =====
    device 1    job 1 ============

The kernel watches all jobs in a single loop. It visits each running job once in `_LOOK_SECONDS`.
"""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

from tpukit.essentials.display import InvalidValueError, Screen, Table, counted, screen
from tpukit.essentials.environment import Folders, MachineInfo
from tpukit.essentials.launcher import (
    Failure,
    InProcessGroup,
    Limits,
    Run,
    Task,
    Topology,
    WorkerError,
    WorkerGroup,
    choose_topology,
    collect,
    interrupted,
    ready,
    refuse_call,
    refuse_if_in_use,
    seed_of,
    sigterm_ends_the_run,
    worker_failed,
)

_LOOK_SECONDS = 0.1  # time in which the loop visits every running job once
# A chip may stay busy for 10 to 30 s after the process of the previous job has ended. So a job
# whose device does not start is tried again every 3 s, for 60 s.
_BUSY_SECONDS = 60.0
_RETRY_SECONDS = 3.0
_LONGEST_TEXT = 60  # characters of a config or a result in the table


@dataclass(frozen=True, repr=False)
class Jobs(Table):
    """The result of `launch_each`, in the order of the configs; a notebook shows it as a table.

    Attributes:
        configs: the config of each job.
        runs: a `Run` for each job, with its log, seconds and memory; None for a job that had not
            started when the jobs were interrupted.
        failures: for each job that failed or was interrupted, its number and a `WorkerError` with
            the traceback.
        device: the kind of device on which each job ran, such as "CPU".
        seconds: time from the start of the first job to the end of the last.
    """

    configs: list
    runs: list[Run | None]
    failures: dict[int, WorkerError]
    device: str
    seconds: float

    @property
    def results(self) -> list:
        """The value that the function returned for each config; None if it did not return."""
        return [run.results[0] if run else None for run in self.runs]

    @property
    def title(self) -> str:
        """A line with the number of finished jobs, the device and the seconds."""
        done = sum(run is not None for run in self.runs) - len(self.failures)
        return (
            f"{done} of {len(self.configs)} jobs done, each on one "
            f"{self.device}; {self.seconds:.1f} s in all"
        )

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return (state, job, config, outcome) for each job."""
        rows = []
        for number, (config, run) in enumerate(zip(self.configs, self.runs, strict=True)):
            if number in self.failures:
                state = "failure"
                outcome = self.failures[number].summary
            elif run is None:
                state = "warning"
                outcome = "not started"
            else:
                state = "ok"
                outcome = f"{_short(run.results[0])}\n{run.seconds:.1f} s"
            rows.append((state, f"job {number}", _short(config), outcome))
        return rows


def launch_each(
    fn: Callable,
    configs: Iterable,
    *,
    cores: int | None = None,
    backend: str | None = None,
    seed: int | None = None,
    timeout: float | None = None,
    limits: Limits = Limits(),
    progress: str | None = None,
    matmul_precision: str | None = None,
    compile_cache: Folders | bool | None = None,
) -> Jobs:
    """Run `fn(core, config)` for each config; at any time, each core runs one of these jobs.

    A job is like `launch(fn, config, cores=1)`: a fresh process, and a core with `world_size` 1.
    `fit` and all other functions work in it, and nothing is averaged between jobs. If a job fails,
    the others continue. Each line that job 3 prints begins with `[job 3]`. If jobs save
    checkpoints, give each job its own folder.

    Args:
        fn: the worker function; its first argument is a `Core`.
        configs: for each job, the second argument of `fn`: a fold, a seed, a dict of settings.
        cores: number of jobs that run at the same time. None: one per chip or GPU; in a dry run,
            one per CPU process. A v2 or v3 chip has two cores, and a job uses only one of them.
        backend, limits, matmul_precision, compile_cache: as in `launch`; the limits apply to each
            job.
        seed: the seed of the random numbers, as in `launch`. All jobs have the same seed, so they
            differ only by their configs.
        timeout: seconds after which tpukit ends a job, which then counts as failed; None for no
            limit.
        progress: as in `launch`, with a bar for each job and without curves.

    Returns:
        a `Jobs` with the results, in the order of the configs.

    Raises:
        ValueError: `configs` is empty; `cores` is larger than the number of devices; or an argument
            is out of range, as in `launch`.
        TypeError: `fn` is not a function of a core and a config.
        RuntimeInUseError: this process has started the XLA or CUDA runtime.
        LaunchInterrupted: the jobs were interrupted. The error's `run` is a `Jobs` with the results
            so far.
    """
    host = MachineInfo.read()
    configs = list(configs)
    if not configs:
        raise InvalidValueError(
            "launch_each needs at least one config, got none", fix="pass a list, such as range(5)"
        )
    # Check everything before the first process starts. All configs are passed in the same way, so
    # one of them is enough for this check.
    refuse_call(fn, (configs[0],))
    topology = choose_topology(host, 1, backend)  # before `seed_of`, which imports torch
    options = {"seed": seed_of(seed), "matmul_precision": matmul_precision, "timeout": timeout}
    tasks = [Task(fn, (config,), **options) for config in configs]
    places = min(_places(host, cores, backend), len(configs))  # devices that are used
    refuse_if_in_use(host)
    with sigterm_ends_the_run(), screen(progress) as display:
        if topology.is_dry_run:
            display.line(
                f"dry run: {counted(places, f'{topology.device} job')} at a time, each in place of "
                "a TPU core"
            )
        with ready(topology, places, compile_cache, display) as topology:
            queue = _Queue(tasks, topology, places, limits, display)
            try:
                queue.work_off()
            except KeyboardInterrupt:
                # The error has the results of the jobs that have ended.
                raise interrupted(queue.jobs(configs)) from None
    return queue.jobs(configs)


def _places(host: MachineInfo, cores: int | None, backend: str | None) -> int:
    """Return the number of jobs that can run at the same time."""
    # A launch on all cores has one process per chip, GPU or processor.
    whole = choose_topology(host, None, backend)
    there = whole.processes or 1  # 0 processes if the platform cannot fork
    if cores is None:
        return there
    is_count = isinstance(cores, Integral) and not isinstance(cores, bool)
    if not is_count or cores < 1:
        raise InvalidValueError(
            f"cores must be the number of jobs at a time, at least 1, got {cores!r}",
            fix="cores=1, or leave it out for a job per device",
        )
    # In a dry run, the user may choose more processes than the host has processors.
    has_any_number = whole.is_dry_run and whole.processes
    if cores > there and not has_any_number:
        raise InvalidValueError(
            f"cores={cores} is not supported: this machine runs at most {there} jobs at a time",
            found=host.summary,
            fix="leave cores out: each job that has to wait starts as soon as a core is free",
        )
    return int(cores)


@dataclass(frozen=True)
class _Job:
    """A running job.

    Attributes:
        number: the number of the job's config.
        group: the job's process, or its thread on a platform that cannot fork.
        looks: an iterator. Each step visits the job for a short time, and it ends when the job
            ends.
    """

    number: int
    group: WorkerGroup
    looks: Iterator[None]


class _Queue:
    """The waiting, running and finished jobs, watched by a single loop in the main thread.

    The loop must run in the main thread, because Python raises KeyboardInterrupt only there.
    """

    def __init__(
        self, tasks: list[Task], topology: Topology, places: int, limits: Limits, display: Screen
    ):
        self._tasks = tasks
        self._topology = topology
        self._limits = limits
        self._display = display
        self._waiting = deque(range(len(tasks)))
        self._running: dict[int, _Job] = {}  # by the number of the device
        self._free_at = dict.fromkeys(range(places), 0.0)  # by the number of the device
        # By the number of the job: the first time at which its device did not start.
        self._first_failure: dict[int, float] = {}
        self._runs: list[Run | None] = [None for _ in tasks]
        self._failures: dict[int, WorkerError] = {}
        self._began = time.monotonic()

    def work_off(self) -> None:
        """Run all jobs; if an exception ends this method, end the running jobs first."""
        self._tell()
        try:
            while self._waiting or self._running:
                self._begin_some()
                for place, job in [*self._running.items()]:
                    is_over = next(job.looks, self) is self  # `self` marks the iterator's end
                    if is_over:
                        self._end(place)
                # All jobs wait for a busy chip: do not use a whole processor for this loop.
                if not self._running:
                    time.sleep(_LOOK_SECONDS)
        finally:
            # Tell all jobs before waiting for the first: `fit` may need seconds to save.
            for job in self._running.values():
                job.group.tell_to_end()
            # An ExitStack ends the other jobs even if an interrupt arrives while one of them ends.
            with contextlib.ExitStack() as ends:
                for place in self._running:
                    ends.callback(self._end, place)

    def jobs(self, configs: list) -> Jobs:
        """Return the `Jobs` with the results so far."""
        return Jobs(
            configs,
            runs=self._runs,
            failures=dict(sorted(self._failures.items())),
            device=self._topology.device,
            seconds=time.monotonic() - self._began,
        )

    def _begin_some(self) -> None:
        """Start waiting jobs on the devices that are free."""
        now = time.monotonic()
        for place, free_at in self._free_at.items():
            is_free = place not in self._running and now >= free_at
            # In the order of the configs; a job that must be tried again is at the front.
            if self._waiting and is_free:
                self._begin(self._waiting.popleft(), place)

    def _begin(self, number: int, place: int) -> None:
        # Without fork, a job runs in a thread of this process. `beside` lists the other running
        # jobs: a forked process must not keep their pipes open.
        kind = WorkerGroup if self._topology.processes else InProcessGroup
        group = kind(
            dataclasses.replace(self._topology, device_number=place),
            self._tasks[number],
            limits=self._limits,
            display=_JobScreen(self._display, number),
            beside=[job.group for job in self._running.values()],
        )
        looks = group.looks(_LOOK_SECONDS / len(self._free_at))
        # Add the job before it starts, so that an interrupt during the start ends it as well.
        self._running[place] = _Job(number, group, looks)
        group.start()

    def _end(self, place: int) -> None:
        """Store the result of the job on a device, or queue it again if the chip was busy."""
        job = self._running[place]
        may_be_busy = not job.group.results and self._may_be_busy(job)
        job.looks.close()
        job.group.end()
        del self._running[place]
        if may_be_busy:
            self._try_again(place, job.number)
            return
        self._runs[job.number] = collect(job.group)
        # A job has the single rank 0. Without its result, the job failed or was interrupted.
        if 0 not in job.group.results:
            failure = job.group.failures.first()
            if failure is None:
                ended = "was ended by an interrupt"
                failure = Failure(0, time.monotonic(), ended, fix="run the cell again")
            error = worker_failed(failure, job.group, f"job {job.number}: ")
            self._failures[job.number] = error
            self._display.line(error.summary)
        self._display.end_bar(f"job {job.number}")
        self._tell()

    def _tell(self) -> None:
        done = sum(run is not None for run in self._runs)
        seconds = time.monotonic() - self._began
        self._display.bar("jobs", done, len(self._tasks), None, seconds=seconds)
        self._display.draw()

    def _may_be_busy(self, job: _Job) -> bool:
        """Return whether the job may have failed because its chip was busy with an earlier job."""
        if self._topology.is_dry_run:
            return False  # there is no chip
        now = time.monotonic()
        has_started = any(one.started for one in job.group.workers)
        seconds = now - self._first_failure.get(job.number, now)
        return seconds < _BUSY_SECONDS and not has_started

    def _try_again(self, place: int, number: int) -> None:
        """Put a job at the front of the queue, and block its device for a few seconds."""
        if number not in self._first_failure:
            busy = f"its chip does not start, it may be busy; trying for {_BUSY_SECONDS:g} s"
            self._display.line(f"[job {number}] {busy}")
        self._first_failure.setdefault(number, time.monotonic())
        self._free_at[place] = time.monotonic() + _RETRY_SECONDS
        self._waiting.appendleft(number)


class _JobScreen(Screen):
    """The screen of one job: it shows the job's bar, and its lines with `[job 3]`, on `display`."""

    def __init__(self, display: Screen, number: int):
        super().__init__()
        self._display = display
        self._number = number

    def line(self, text: str) -> None:
        self._display.line(f"[job {self._number}] {text}")

    def show(self, data: dict, metadata: dict, **options: object) -> None:
        self.line("shows:")
        self._display.show(data, metadata, **options)

    def bar(self, label: str, *progress: object, **options: object) -> None:
        super().bar(label, *progress, **options)
        self._tell()

    def status(self, doing: str, cores: Sequence[tuple[str, str]] = ()) -> None:
        super().status(doing, cores)
        if self._changed and (self.bars or doing):
            self._tell()

    def curve(self, rows: list[dict]) -> None:
        pass

    def _tell(self) -> None:
        """Show the bar of the outermost running loop, with the innermost loop as a note.

        A job has only one bar. The outermost loop is the one that began first.
        """
        name = f"job {self._number}"
        if not self.bars:
            self._display.bar(name, 0, None, None, note=self.doing)
            return
        # The text is, for example, "epochs  train 30 of 120".
        outer, *inner = self.bars.values()
        words = [outer.label]
        inside = next((bar for bar in reversed(inner) if bar.running), None)
        if inside:
            words.append(f"{inside.label} {inside.count()}")
        if self.doing:
            words.append(self.doing)
        unit = outer.unit
        # The label "epochs" is also the unit of its count: "3 of 20 epochs".
        counts_its_label = outer.label.endswith("s") and not outer.samples_per_step
        if not unit and counts_its_label:
            unit = outer.label
        self._display.bar(
            name,
            outer.done,
            outer.total,
            outer.samples_per_step,
            seconds=outer.seconds,
            start=outer.start,
            unit=unit,
            note="  ".join(words),
        )
        self._changed = False

    def draw(self, last: bool = False) -> None:
        self._display.draw(last)


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    if len(text) <= _LONGEST_TEXT:
        return text
    return text[: _LONGEST_TEXT - 3] + "..."
