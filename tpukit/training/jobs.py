"""Independent jobs from a queue, each on its own core: folds, seeds, settings."""

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tpukit.essentials.display import InvalidValueError, Screen, Table, screen
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

_LOOK_SECONDS = 0.1  # in which every job is looked at
# A chip may stay busy for 10 to 30 s after its process has ended: here, after the job before.
_BUSY_SECONDS = 60.0
_RETRY_SECONDS = 3.0
_LONGEST_TEXT = 60  # characters of a config or a result in the table


@dataclass(frozen=True, repr=False)
class Jobs(Table):
    """The result of `launch_each`, in the order of the configs; a notebook shows it as a table.

    Attributes:
        configs: the config of each job.
        runs: a `Run` for each job, with its log, seconds and memory; None for a job that had not
            begun before an interrupt.
        failures: a `WorkerError`, with its traceback, for each job that failed or was interrupted,
            by its number.
        device: the device of a job, in words.
        seconds: wall time of all jobs together.
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
        """The outcome in a line."""
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
                state, outcome = "failure", self.failures[number].summary
            elif run is None:
                state, outcome = "warning", "not begun"
            else:
                state, outcome = "ok", f"{_short(run.results[0])}\n{run.seconds:.1f} s"
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
    """Run `fn(core, config)` for each config, a job per core at a time.

    A job is like `launch(fn, config, cores=1)`: a fresh process, and a core with `world_size` 1.
    `fit` and all other functions work in it, and nothing is averaged between jobs. If a job fails,
    the others continue. The output of a job begins with `[job 3]`. If jobs save checkpoints, give
    each job its own folder.

    Args:
        fn: the worker function; its first argument is a `Core`.
        configs: the second argument of each job: a fold, a seed, a dict of settings.
        cores: jobs at a time. None for a job per chip, GPU, or CPU process of a dry run. A job
            uses a single core of a v2 or v3 chip, which has two.
        backend, limits, matmul_precision, compile_cache: as in `launch`; the limits hold for each
            job.
        seed: the seed of the random numbers, as in `launch`. All jobs have the same seed, so they
            differ by their configs alone.
        timeout: seconds after which a job is ended, and counts as failed; None for no limit.
        progress: as in `launch`; a bar for each job, and no curves.

    Raises:
        ValueError: `configs` is empty, `cores` is larger than the number of devices, or as in
            `launch`.
        TypeError: `fn` is no function that takes a core and a config.
        RuntimeInUseError: this process has started the XLA or CUDA runtime.
        LaunchInterrupted: a KeyboardInterrupt; its `run` is a `Jobs` with the results so far.
    """
    host = MachineInfo.read()
    configs = list(configs)
    if not configs:
        raise InvalidValueError(
            "launch_each needs at least one config, got none", fix="pass a list, such as range(5)"
        )
    refuse_call(fn, (configs[0],))
    topology = choose_topology(host, 1, backend)  # first, because the seed is torch's
    options = {"seed": seed_of(seed), "matmul_precision": matmul_precision, "timeout": timeout}
    tasks = [Task(fn, (config,), **options) for config in configs]
    places = min(_places(host, cores, backend), len(configs))
    refuse_if_in_use(host)
    with sigterm_ends_the_run(), screen(progress) as display:
        if topology.is_dry_run:
            display.line(
                f"dry run: {places} {topology.device} jobs at a time, each in place of a TPU core"
            )
        with ready(topology, places, compile_cache, display) as topology:
            queue = _Queue(tasks, topology, places, limits, display)
            try:
                queue.work_off()
            except KeyboardInterrupt:
                raise interrupted(queue.jobs(configs)) from None
    return queue.jobs(configs)


def _places(host: MachineInfo, cores: int | None, backend: str | None) -> int:
    """Return how many jobs run at a time."""
    whole = choose_topology(host, None, backend)
    there = whole.processes or 1  # 0 where nothing can be forked
    if cores is None:
        return there
    if isinstance(cores, bool) or not isinstance(cores, int) or cores < 1:
        raise ValueError(f"cores is how many jobs run at a time, at least 1, got {cores!r}")
    if cores > there and not (whole.is_dry_run and whole.processes):
        raise InvalidValueError(
            f"cores={cores} is not supported: this machine runs at most {there} jobs at a time",
            found=host.summary,
            fix="leave cores out; configs that have to wait are run as soon as a core is free",
        )
    return cores


@dataclass(frozen=True)
class _Job:
    """A job that runs."""

    number: int
    group: WorkerGroup
    looks: Iterator[None]


class _Queue:
    """The jobs that wait, run and are done, watched by a single loop in the main thread.

    Python raises an interrupt in the main thread alone, so no other thread must wait for jobs.
    """

    def __init__(
        self, tasks: list[Task], topology: Topology, places: int, limits: Limits, display: Screen
    ):
        self._tasks, self._topology, self._limits, self._display = tasks, topology, limits, display
        self._waiting = deque(range(len(tasks)))
        self._running: dict[int, _Job] = {}  # by the number of the device
        self._free_at = dict.fromkeys(range(places), 0.0)
        self._first_failure: dict[int, float] = {}  # of jobs whose device did not start
        self._runs: list[Run | None] = [None] * len(tasks)
        self._failures: dict[int, WorkerError] = {}
        self._began = time.monotonic()

    def work_off(self) -> None:
        """Run all jobs; after an exception from here, none is left running."""
        self._tell()
        try:
            while self._waiting or self._running:
                self._begin_some()
                for place, job in [*self._running.items()]:
                    if next(job.looks, self) is self:  # it is over
                        self._end(place)
                if not self._running:
                    time.sleep(_LOOK_SECONDS)
        finally:
            for job in self._running.values():  # all at once: `fit` may take seconds to save
                job.group.tell_to_end()
            # The rest are ended even if another interrupt comes while one of them ends.
            with contextlib.ExitStack() as ends:
                for place in self._running:
                    ends.callback(self._end, place)

    def jobs(self, configs: list) -> Jobs:
        """Return the `Jobs` with the results so far."""
        failures = dict(sorted(self._failures.items()))
        return Jobs(
            configs, self._runs, failures, self._topology.device, time.monotonic() - self._began
        )

    def _begin_some(self) -> None:
        for place, free_at in self._free_at.items():
            if self._waiting and place not in self._running and time.monotonic() >= free_at:
                number = self._waiting.popleft()
                group_type = WorkerGroup if self._topology.processes else InProcessGroup
                alone = dataclasses.replace(self._topology, device_number=place)
                display = _JobScreen(self._display, number)
                beside = [job.group for job in self._running.values()]
                group = group_type(alone, self._tasks[number], self._limits, display, beside=beside)
                self._running[place] = _Job(
                    number, group, group.looks(_LOOK_SECONDS / len(self._free_at))
                )
                group.start()

    def _end(self, place: int) -> None:
        job = self._running[place]
        may_be_busy = not job.group.results and self._may_be_busy(job)
        job.looks.close()
        job.group.end()
        del self._running[place]
        if may_be_busy:
            self._try_again(place, job.number)
            return
        self._runs[job.number] = collect(job.group)
        if 0 not in job.group.results:
            interrupt = Failure(
                0, time.monotonic(), "was ended by an interrupt", fix="run the cell again"
            )
            failure = job.group.failures.first() or interrupt
            self._failures[job.number] = error = worker_failed(
                failure, job.group, f"job {job.number}: "
            )
            self._display.line(error.summary)
        self._display.end_bar(f"job {job.number}")
        self._tell()

    def _tell(self) -> None:
        done = sum(run is not None for run in self._runs)
        self._display.bar("jobs", done, len(self._tasks), None, time.monotonic() - self._began)
        self._display.draw()

    def _may_be_busy(self, job: _Job) -> bool:
        """Return whether the job may have failed because its chip was busy with the job before."""
        seconds = time.monotonic() - self._first_failure.get(job.number, time.monotonic())
        workers = job.group.workers
        return seconds < _BUSY_SECONDS and not (
            self._topology.is_dry_run or any(one.started for one in workers)
        )

    def _try_again(self, place: int, number: int) -> None:
        if number not in self._first_failure:
            busy = f"its chip does not start, it may be busy; trying for {_BUSY_SECONDS:g} s"
            self._display.line(f"[job {number}] {busy}")
        self._first_failure.setdefault(number, time.monotonic())
        self._free_at[place] = time.monotonic() + _RETRY_SECONDS
        self._waiting.appendleft(number)


class _JobScreen(Screen):
    """The screen of one job: a bar, and its lines with its number, on the screen of all."""

    def __init__(self, display: Screen, number: int):
        super().__init__()
        self._display, self._number = display, number

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
        """Show the bar of the outermost loop, which began first; the loop inside it is a note."""
        name = f"job {self._number}"
        if not self.bars:
            return self._display.bar(name, 0, None, None, note=self.doing)
        outer, *inner = self.bars.values()
        inside = next((bar for bar in reversed(inner) if bar.running), None)
        words = (outer.label, f"{inside.label} {inside.count()}" if inside else "", self.doing)
        note = "  ".join(part for part in words if part)
        unit = outer.unit or (
            outer.label if outer.label.endswith("s") and not outer.samples_per_step else None
        )
        options = {"start": outer.start, "unit": unit, "note": note}
        self._display.bar(
            name, outer.done, outer.total, outer.samples_per_step, outer.seconds, **options
        )
        self._changed = False
        return None

    def draw(self, last: bool = False) -> None:
        self._display.draw(last)


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."
