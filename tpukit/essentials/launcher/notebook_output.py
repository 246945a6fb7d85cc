"""What a core says to the notebook: lines, numbers, progress, displays; sent as messages, drawn by the kernel."""

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from tpukit.essentials.display import InvalidTypeError, running_shell
from tpukit.essentials.launcher import messages

_SECONDS_BETWEEN_MESSAGES = 0.25
_DISPLAYS_PER_SECOND = 10  # of one process; what is above either limit is said not to be shown, once
_LARGEST_DISPLAY = 10 * 10**6  # bytes or characters
_WIDGET = "application/vnd.jupyter.widget-view+json"  # the view of a widget that lives in this process


class NotebookOutput:
    """The part of a `Core` that speaks to the notebook.

    A fork's own widgets and displays would show nothing, so all of it travels as messages; no message waits for the
    device, or copies from it more than four times a second.

    Attributes:
        doing: "data" while a loop waits for its next batch, "tracing" while a step is recorded, "running" while it is
            handed over to the device; None otherwise. A heartbeat carries it.
    """

    def __init__(self, rank: int, send: Callable[[object], None]):
        self.rank = rank
        self.activity = 0
        self.doing: str | None = None
        self._send = send
        self._rows: list[dict] = []  # logged, not yet sent
        self._ends: list[tuple] = []  # of loops, not sent before the rows that they have logged
        self._logged = 0
        self._next_send = 0.0

    @property
    def is_main(self) -> bool:
        """True on core 0, which prints, logs and saves for all."""
        return self.rank == 0

    def print(self, *values: object, everywhere: bool = False) -> None:
        """Print one whole line in the notebook, from core 0; from each core, named, with `everywhere`."""
        if self.is_main or everywhere:
            self.activity += 1
            self._send(messages.Line(self.rank, " ".join(map(str, values)), named=everywhere))

    def log(self, step: int | None = None, **values: object) -> None:
        """Record numbers of core 0 for the live curve and `Run.log`; the other cores' are ignored.

        A one-element tensor stays on the device and is copied with others at most four times a second, so logging
        every step does not make the chip wait. Do not change it in place afterwards.

        Args:
            step: what the curve is drawn over; counted from 1 if left out.
            **values: numbers, numpy's too, or one-element tensors by name.

        Raises:
            TypeError: a value is neither.
        """
        import torch

        self._logged = self._logged + 1 if step is None else step
        if not self.is_main:
            return
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                values[name] = value.detach().item() if value.device.type == "cpu" else value.detach()
            elif not isinstance(value, int | float) or abs(value) > sys.float_info.max:
                values[name] = _as_float(name, value)
        self._rows.append({"step": self._logged, **values})
        if time.monotonic() >= self._next_send:
            self.flush()

    def flush(self) -> None:
        """Send the logged rows now; the end of a loop and of a run does it too."""
        if self._rows:
            rows, self._rows = self.to_host(self._rows), []
            self._send(messages.LogRows(self.rank, [_numbers(row) for row in rows]))
            self._next_send = time.monotonic() + _SECONDS_BETWEEN_MESSAGES
        ends, self._ends = self._ends, []
        for message in ends:
            self._send(message)

    def progress(
        self,
        iterable: Iterable,
        label: str | None = "steps",
        total: int | None = None,
        *,
        start: int = 0,
        unit: str | None = None,
    ) -> Iterator:
        """Yield the items of an iterable and show in the notebook how far core 0 has come.

        Loops may be nested: `core.progress(range(epochs), "epochs")` around `core.progress(batches, "train")` are two
        bars, and the second starts again in every epoch.

        Args:
            iterable: anything; for `core.batches(...)` the samples a second of all cores are shown as well.
            label: the name of the bar; the same label starts the same bar again. None shows nothing.
            total: items to expect, where the iterable has no length.
            start: items that were done before, as in a loop that is resumed.
            unit: what a rate counts, such as "images"; None for samples, or steps.
        """
        total = start + len(iterable) if total is None and hasattr(iterable, "__len__") else total
        samples, reads = getattr(iterable, "samples_per_step", 0), hasattr(iterable, "samples_per_step")
        options = {"samples_per_step": samples, "start": start, "unit": unit}
        done, next_send, began, whole = start, 0.0, time.monotonic(), False
        told = self.is_main and label is not None
        if told:
            self.flush()  # what was logged before this loop is not of it
        items = iter(iterable)
        try:
            while True:
                self.doing = "data" if reads else self.doing
                try:
                    item = next(items)
                except StopIteration:
                    break
                finally:
                    self.doing = None if reads else self.doing
                self.activity += 1
                if told and time.monotonic() >= next_send:
                    self.report_progress(label, done, total, seconds=time.monotonic() - began, **options)
                    next_send = time.monotonic() + _SECONDS_BETWEEN_MESSAGES
                done += 1
                yield item
            whole = True
        finally:  # a loop that was left early is over, too, and not finished
            if told:
                options["seconds"] = time.monotonic() - began
                total = done if whole else total
                self._end(messages.Progress(label, done, total, {**options, "over": True}), whole)

    def report_progress(self, label: str, done: int, total: int | None, **options: object) -> None:
        """Show how far a loop has come that `progress` cannot go through; see `Bar` for the options."""
        if self.is_main:
            self._send(messages.Progress(label, done, total, options))

    def _end(self, message: tuple, whole: bool) -> None:
        """Send the end of a loop after all that it has logged, so that the newest numbers stand beside it.

        Numbers on the device are fetched only where the loop has come to its end. One that was left early may be on its
        way out of a run that failed, where a copy could wait for ever: its end goes with the numbers, when they do.
        """
        self._ends.append(message)
        if whole or not any(hasattr(value, "item") for row in self._rows for value in row.values()):
            self.flush()

    def to_host(self, value: object) -> object:
        """Bring every tensor of nested dicts, lists and tuples into host memory, in one transfer."""
        raise NotImplementedError


def forward_displays(send: Callable[[object], None], rank: Callable[[], int]) -> None:
    """Have IPython's `display`, and so `plt.show`, send what it shows to the kernel: from a fork it goes nowhere."""
    shell = running_shell()
    if not hasattr(shell, "kernel"):  # a terminal's IPython prints
        return
    process, shown, told = os.getpid(), deque(maxlen=_DISPLAYS_PER_SECOND), set()

    def publish(data: dict, metadata: dict | None = None, *, transient=None, update=False, **_: object) -> None:
        if os.getpid() != process:  # a DataLoader's, say: it must not write into the same pipe
            return
        refusal = _why_not_shown(data, shown)
        if refusal is None:
            shown.append(time.monotonic())
            options = {"transient": transient or {}, "update": update}
            send(messages.Display(rank(), data, metadata or {}, options))
        elif refusal not in told:
            told.add(refusal)
            send(messages.Line(rank(), refusal, named=True))

    shell.display_pub.publish = publish
    # A fork's messages go nowhere, and each is logged whole: those of a widget, as tqdm.auto makes one for each bar.
    shell.kernel.session.send = lambda *_, **__: None


def _why_not_shown(data: dict, shown: deque) -> str | None:
    if _WIDGET in data:
        return "a widget cannot be shown from a worker; core.progress and core.log draw bars and curves"
    size = sum(len(part if isinstance(part, str | bytes) else str(part)) for part in data.values())
    if size > _LARGEST_DISPLAY:
        return f"a display of more than {_LARGEST_DISPLAY / 1e6:.0f} MB is not shown; save it to a file, or return it"
    if len(shown) == shown.maxlen and time.monotonic() - shown[0] < 1:
        return f"displays above {_DISPLAYS_PER_SECOND} a second are not shown"
    return None


def _numbers(row: dict) -> dict:
    return {name: value.item() if hasattr(value, "item") else value for name, value in row.items()}


def _as_float(name: str, value: object) -> float:
    try:  # `item`, since numpy warns where an array of one element is converted
        return float(value.item() if hasattr(value, "item") else value if hasattr(value, "__float__") else None)
    except OverflowError:  # a whole number that no float holds: where it is drawn or written, it has to be one
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError) as error:
        shape = tuple(getattr(value, "shape", ()))
        raise InvalidTypeError(
            f"log takes numbers and one-element tensors, got {name} = {type(value).__name__}{shape or ''}",
            fix=f"{name}.mean(), or return it from the worker",
        ) from error
