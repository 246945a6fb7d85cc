"""The output of a core in the notebook: lines, numbers, progress bars and displays.

Widgets and displays of a forked process show nothing, so a core sends all output to the kernel as
messages, and the kernel draws it. Only logged tensors make the core wait for the device: they are
copied from it at most four times per second, and at the end of a loop.
"""

import contextlib
import itertools
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from tpukit.essentials.display import InvalidTypeError, check_number, running_shell
from tpukit.essentials.launcher import messages

_SECONDS_BETWEEN_MESSAGES = 0.25
# Limits of the displays of a process: a line reports the first display that exceeds each.
_DISPLAYS_PER_SECOND = 10
_LARGEST_DISPLAY = 10 * 10**6  # bytes or characters
# The MIME type of a widget's view. The kernel has no model for a widget of a worker.
_WIDGET = "application/vnd.jupyter.widget-view+json"


class NotebookOutput:
    """The part of a `Core` that sends output to the notebook.

    Args:
        rank: the rank of the core.
        send: sends a message to the kernel.
        activity: the core's activity. Each output increases `activity.count`. A loop that waits for
            a batch sets `activity.doing` to "data".
        to_host: copies the tensors of a value to host memory.
    """

    def __init__(
        self,
        rank: int,
        send: Callable[[object], None],
        activity: messages.Activity,
        to_host: Callable[[object], object],
    ):
        self._rank = rank
        self._is_main = rank == 0
        self._send = send
        self._activity = activity
        self._to_host = to_host
        self.begin_run()

    def begin_run(self) -> None:
        """Forget logged rows that an earlier run did not send, because it raised an error."""
        self._rows: list[dict] = []  # logged, not yet sent
        self._ends: list[messages.Progress] = []  # ends of loops, sent after the rows they logged
        self._logged_step = 0
        self._next_send = 0.0

    def print(self, *values: object, everywhere: bool) -> None:
        """Print a line, as `Core.print` documents."""
        if self._is_main or everywhere:
            self._activity.count += 1
            text = " ".join(map(str, values))
            self._send(messages.Line(self._rank, text, named=everywhere))

    def log(self, step: int | None, values: dict) -> None:
        """Record numbers, as `Core.log` documents."""
        if step is None:
            step = self._logged_step + 1
        check_number("step", step, fix="core.log(loss=loss), or core.log(**losses) for a dict")
        self._logged_step = step
        if not self._is_main:
            return
        row = {"step": step}
        for name, value in values.items():
            row[name] = _loggable(name, value)
        self._rows.append(row)
        if time.monotonic() >= self._next_send:
            self.flush()

    def flush(self) -> None:
        """Send the logged rows, then the last state of each progress bar that waits for them."""
        if self._rows:
            rows = self._to_host(self._rows)
            self._rows = []
            self._send(messages.LogRows(self._rank, [_numbers(row) for row in rows]))
            self._next_send = time.monotonic() + _SECONDS_BETWEEN_MESSAGES
        ends = self._ends
        self._ends = []
        for message in ends:
            self._send(message)

    def progress(
        self,
        iterable: Iterable,
        label: str | None,
        total: int | None,
        *,
        start: int,
        unit: str | None,
    ) -> Iterator:
        """Yield the items of an iterable and show a bar, as `Core.progress` documents."""
        if not isinstance(label, str | None):
            raise InvalidTypeError(
                f"the label of core.progress must be a text or None, got {label!r}",
                fix=f"core.progress(..., total={label!r}) for the number of items",
            )
        if total is None:
            with contextlib.suppress(TypeError):  # a DataLoader may have a `__len__` that raises
                total = start + len(iterable)
        is_shown = self._is_main and label is not None
        if is_shown:
            self.flush()  # the rows logged before this loop do not belong to it
        options = {
            "samples_per_step": getattr(iterable, "samples_per_step", 0),
            "start": start,
            "unit": unit,
        }
        began = time.monotonic()
        done = start
        next_send = 0.0
        is_finished = False
        try:
            for item in self._items(iterable):
                self._activity.count += 1
                if is_shown and time.monotonic() >= next_send:
                    options["seconds"] = time.monotonic() - began
                    self.report_progress(label, done, total, **options)
                    next_send = time.monotonic() + _SECONDS_BETWEEN_MESSAGES
                done += 1
                yield item
            is_finished = True
        finally:  # also after a `break` or an exception, but then the bar is not complete
            if is_shown:
                options["seconds"] = time.monotonic() - began
                options["over"] = True
                total = done if is_finished else total
                end = messages.Progress(label, done, total, options)
                self._end(end, is_finished=is_finished)

    def _items(self, iterable: Iterable) -> Iterator:
        """Yield the items; set the activity to "data" while the next batch is read."""
        reads_data = hasattr(iterable, "samples_per_step")
        items = iter(iterable)
        while True:
            if reads_data:
                self._activity.doing = "data"
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                if reads_data:
                    self._activity.doing = None
            yield item

    def report_progress(self, label: str, done: int, total: int | None, **options: object) -> None:
        """Show the progress of a loop that does not use `progress`; `Bar` documents the options."""
        if self._is_main:
            self._send(messages.Progress(label, done, total, options))

    def _end(self, message: messages.Progress, *, is_finished: bool) -> None:
        """Send the end of a loop after its rows, so that the curve has its newest numbers.

        After a `break` or an exception, a copy of logged tensors from the device could wait
        forever, because the run may have failed. Then the next `flush` sends the rows and the end.
        """
        self._ends.append(message)
        if is_finished or not self._has_tensors():
            self.flush()

    def _has_tensors(self) -> bool:
        values = itertools.chain.from_iterable(row.values() for row in self._rows)
        return any(hasattr(value, "item") for value in values)


def _loggable(name: str, value: object) -> object:
    """Return a value of `core.log` as a number, or as a tensor that is still on the device."""
    import torch

    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.detach()
        return value.item() if value.device.type == "cpu" else value
    # A larger int has no float; NaN and infinity go through `_as_float`, which returns them.
    if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
        return value
    return _as_float(name, value)


def _as_float(name: str, value: object) -> float:
    """Return the float of a number or of an array with one element.

    Raises:
        InvalidTypeError: it is not a real number and not an array with one real number.
    """
    try:
        if hasattr(value, "item"):  # first, since numpy warns if float() gets an array
            return float(value.item())
        if hasattr(value, "__float__"):
            return float(value)
        cause = None
    except OverflowError:  # an int above the largest float; curves and files need a float
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError) as error:
        cause = error
    shape = tuple(getattr(value, "shape", ()))
    kind = f"{type(value).__name__}{shape or ''}"
    raise InvalidTypeError(
        f"core.log supports real numbers and one-element tensors, got {name} = {kind}",
        fix=f"log one number, such as the mean of {name}; or return {name} from the worker "
        "function",
    ) from cause


def _numbers(row: dict) -> dict:
    return {name: value.item() if hasattr(value, "item") else value for name, value in row.items()}


def forward_displays(send: Callable[[object], None], rank: Callable[[], int]) -> None:
    """Make IPython's `display` and `plt.show` in this worker send to the kernel.

    Args:
        send: sends a message to the kernel.
        rank: returns the rank of the core that runs in the calling thread.
    """
    shell = running_shell()
    if not hasattr(shell, "kernel"):  # IPython in a terminal prints
        return
    process = os.getpid()
    shown: deque[float] = deque(maxlen=_DISPLAYS_PER_SECOND)  # times of the last displays
    reported: set[str] = set()

    def publish(
        data: dict,
        metadata: dict | None = None,
        *,
        transient: dict | None = None,
        update: bool = False,
        **_: object,
    ) -> None:
        if os.getpid() != process:  # a DataLoader's process must not write into the same pipe
            return
        refusal = _why_not_shown(data, shown)
        if refusal is None:
            shown.append(time.monotonic())
            options = {"transient": transient or {}, "update": update}
            send(messages.Display(rank(), data, metadata or {}, options))
        elif refusal not in reported:
            reported.add(refusal)
            send(messages.Line(rank(), refusal, named=True))

    shell.display_pub.publish = publish
    # ipykernel drops other messages of a fork, and logs each in full. tqdm.auto sends several per
    # bar.
    shell.kernel.session.send = lambda *_, **__: None


def _why_not_shown(data: dict, shown: deque[float]) -> str | None:
    """Return the reason why a display is not sent; None if it is sent."""
    if _WIDGET in data:
        return (
            "a widget cannot be shown from a worker; core.progress and core.log draw bars and "
            "curves"
        )
    size = 0
    for part in data.values():
        text = part if isinstance(part, str | bytes) else str(part)
        size += len(text)
    if size > _LARGEST_DISPLAY:
        return (
            f"a display of more than {_LARGEST_DISPLAY / 1e6:.0f} MB is not shown; "
            "save it to a file, or return it"
        )
    # `shown` has the times of the last ten displays. The limit is reached if the oldest of them is
    # less than a second old.
    is_full = len(shown) == shown.maxlen
    if is_full and time.monotonic() - shown[0] < 1:
        return f"displays above {_DISPLAYS_PER_SECOND} per second are not shown"
    return None
