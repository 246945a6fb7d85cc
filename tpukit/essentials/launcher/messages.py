"""The messages that a worker sends to the kernel, each a type with named fields.

A core that trains sends, in this order: `Started`, `Memory`; then `Memory` and `Alive` at every
heartbeat, and `Line`, `LogRows`, `Progress` when its code prints, logs or loops; at the end
`StateAtEnd`, `Memory` and `Result`. A core that raises sends `CoreFailed` in place of the last
three. The other types say when they are sent. `Activity` is no message: `Alive` reports it.
`WorkerGroup` handles all messages, and raises an error for any other.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tpukit.essentials.launcher.failure import Failure


class Started(NamedTuple):
    """The device of a core has started, so the core knows its rank."""

    rank: int


class Memory(NamedTuple):
    """The host memory of a core's process.

    Attributes:
        rank: the core.
        peak: largest memory so far in bytes, with the pages shared with the notebook's kernel.
        own: bytes at present that the process does not share with another process.
        most: the largest value of `own` so far, in bytes.
    """

    rank: int
    peak: int
    own: int
    most: int


@dataclass
class Activity:
    """The activity of a core, which its heartbeats report.

    Attributes:
        count: a counter of steps, collectives, printed lines and items of loops. While it does not
            change, the core may hang.
        waiting: the collective that the core is in; None for none.
        doing: "data" while a loop waits for its next batch, "tracing" while torch records a step,
            "running" while the step is passed to the device; otherwise None.
    """

    count: int = 0
    waiting: str | None = None
    doing: str | None = None


class Alive(NamedTuple):
    """A heartbeat.

    Attributes:
        rank: the core.
        activity: `Activity.count`.
        waiting: the collective that the core is in; None for none.
        doing: a `Compiling` while the core compiles a graph; otherwise `Activity.doing`.
    """

    rank: int
    activity: int
    waiting: str | None
    doing: object


class Result(NamedTuple):
    """The value that the worker function returned."""

    rank: int
    value: object


class StateAtEnd(NamedTuple):
    """The state that must be in sync when the worker functions return.

    Attributes:
        rank: the core.
        state: as `Agreement.state_at_end` returns it; None for nothing to compare.
        alone: True if the core has trained but was in no collective.
    """

    rank: int
    state: dict | None
    alone: bool = False


class CoreFailed(NamedTuple):
    """A core failed."""

    failure: Failure


class Stack(NamedTuple):
    """The Python stack of a core as text; the answer to the command SEND_STACKS."""

    rank: int
    text: str


class FinishesSteps(NamedTuple):
    """From now on, this core ends its step and saves when SIGTERM arrives.

    The kernel therefore waits for core 0 before it kills the processes.
    """

    rank: int


class At(NamedTuple):
    """The position of a core in a run of a session.

    Attributes:
        rank: the core.
        run: number of the run.
        place: "running"; "paused" at a boundary; or "prompt": the core waits for the next run.
        passed: number of boundaries that the core has passed in this run. If a running core has
            arrived at a boundary, this boundary is included: the core may pass it at any time.
        is_clean: True if collectives can be reset after a core has left in the middle of one.
        numbers: checksum of the random state that the cores share; None if they share none.
    """

    rank: int
    run: int
    place: str
    passed: int
    is_clean: bool
    numbers: int | None


class Line(NamedTuple):
    """A line to print; `named` puts the number of the core in front of it."""

    rank: int
    text: str
    named: bool


class LogRows(NamedTuple):
    """Rows of `core.log`."""

    rank: int
    rows: list[dict]


class Progress(NamedTuple):
    """The state of a progress bar; `options` are those of `Screen.bar`."""

    label: str
    done: int
    total: int | None
    options: dict


class Display(NamedTuple):
    """An object that IPython displays: {MIME type: its representation}."""

    rank: int
    data: dict
    metadata: dict
    options: dict
