"""The messages that a worker sends to the kernel, each a type with named fields.

A core that trains sends, in this order: `Started`, `Memory`; then `Alive` with every heartbeat,
and `Line`, `LogRows`, `Progress` as its code calls for them; at the end `StateAtEnd`, `Memory` and
`Result`. A core that raises sends `CoreFailed` in place of the last three. `WorkerGroup` takes all
of them in a single match, which raises an error for any other type.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tpukit.essentials.launcher.failure import Failure


class Started(NamedTuple):
    """A core's device has started, and the core has this rank."""

    rank: int


class Memory(NamedTuple):
    """The host memory of a core's process.

    Attributes:
        rank: the core.
        peak: most bytes so far, with pages that it shares with the kernel.
        own: present bytes that it does not share with another process.
        most: the largest value of `own` so far.
    """

    rank: int
    peak: int
    own: int
    most: int


@dataclass
class Activity:
    """What a core does, as its heartbeats report it.

    Attributes:
        count: changes when the core moves on; a core whose count does not change hangs.
        waiting: the collective that it is in; None for none.
        doing: "data" while a loop waits for its next batch, "tracing" while a step is recorded,
            "running" while it is passed to the device; otherwise None.
    """

    count: int = 0
    waiting: str | None = None
    doing: str | None = None


class Alive(NamedTuple):
    """A heartbeat.

    Attributes:
        rank: the core.
        activity: a counter that changes when the core moves on.
        waiting: the collective that it is in; None for none.
        doing: its part of a step, or the graph that it compiles; None for nothing special.
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
    """The state that must be in sync when the worker functions return; None if there is none.

    `alone` is True if the core has trained, and was in no collective.
    """

    rank: int
    state: dict | None
    alone: bool = False


class CoreFailed(NamedTuple):
    """A core failed."""

    failure: Failure


class Stack(NamedTuple):
    """The Python stack of a core as text, because the kernel asked for it."""

    rank: int
    text: str


class FinishesSteps(NamedTuple):
    """This core ends its step and saves when SIGTERM arrives, so the kernel waits for it."""

    rank: int


class At(NamedTuple):
    """The place of a core in a run of a session.

    Attributes:
        rank: the core.
        run: number of the run.
        place: "running", "paused" at a boundary, or "prompt" if it is in no worker function.
        passed: boundaries that it has passed in this run.
        is_clean: whether new collectives work after one that a core has left.
        numbers: checksum of the random numbers that the cores share; None if they share none.
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
    """An object for IPython to display, as representations by MIME type."""

    rank: int
    data: dict
    metadata: dict
    options: dict
