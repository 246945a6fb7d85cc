"""Find the processes that hold TPU chips, and wait until chips are free.

A process holds a chip while it has the chip's device node open: /dev/accel0 up to v4, /dev/vfio/0
from v5e on. Only one process at a time can hold a chip.
"""

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tpukit.essentials.display import TpukitError
from tpukit.essentials.environment.platforms import THIS_MACHINE, Machine
from tpukit.essentials.environment.resources import read_text

_LONGEST_COMMAND = 90  # characters
# If one of these is set, several processes use different chips of the machine.
_SHARING_VARIABLES = ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")


class SessionRecord(NamedTuple):
    """An open `tpukit.Session` of this kernel.

    Attributes:
        cores: the cores in words, such as "8 x TPU v5e core".
        holds_chips: whether the session holds chips of a TPU.
        device: the number of the chip, if the session uses a single one; None if it uses all.
        processes: process ids of the session's workers.
    """

    cores: str
    holds_chips: bool
    device: int | None
    processes: tuple[int, ...]


open_sessions: list[SessionRecord] = []  # `launcher.session` adds and removes the records


class DeviceBusyError(TpukitError, RuntimeError):
    """Other processes, or a `tpukit.Session`, hold the chips that a run needs."""


def is_chip(node: str) -> bool:
    """Return whether a name in /dev or /dev/vfio belongs to a chip.

    Up to v4 such a name is `accel0`; from v5e on it is the number of an IOMMU group.
    """
    return re.fullmatch(r"(accel)?\d+", node) is not None


def chip_nodes(machine: Machine) -> list[Path]:
    """Return the device nodes of all chips."""
    nodes = [*entries(machine.dev), *entries(machine.dev / "vfio")]
    return [node for node in nodes if is_chip(node.name)]


def chip_holders(machine: Machine) -> Iterator[tuple[int, str]]:
    """Yield (process id, device node) for every chip that a process holds, each pair once.

    Without root rights, processes of other users are not visible.
    """
    folders = (str(machine.dev.resolve()), str((machine.dev / "vfio").resolve()))
    for process in entries(machine.proc):
        if not process.name.isdigit():
            continue
        # A process may have several file descriptors of one node.
        for target in dict.fromkeys(open_files(process)):
            folder, _, node = target.rpartition("/")
            if folder in folders and is_chip(node):
                yield int(process.name), target


def open_files(process: Path) -> Iterator[str]:
    """Yield the targets of the file descriptors of a process in /proc."""
    for descriptor in entries(process / "fd"):
        with contextlib.suppress(OSError):  # closed since it was listed
            yield os.readlink(descriptor)


def entries(folder: Path) -> list[Path]:
    """Return the entries of a folder; [] if the folder is missing or cannot be read."""
    try:
        return list(folder.iterdir())
    except OSError:  # for a folder of /proc also if its process has just ended
        return []


def ancestors(proc: Path, pid: int) -> list[int]:
    """Return the ids of a process's parent, of that parent's parent, and so on."""
    # The first process of a machine or container has the parent 0, which does not match.
    parent = re.compile(r"^PPid:\s*([1-9]\d*)", re.MULTILINE)
    above = []
    while found := parent.search(read_text(proc / str(pid) / "status")):
        pid = int(found[1])
        above.append(pid)
    return above


def command(proc: Path, pid: int) -> str:
    """Return the command line of a process, cut to 90 characters."""
    words = read_text(proc / str(pid) / "cmdline").replace("\0", " ").split()
    line = " ".join(words) or "its command cannot be read"
    if len(line) <= _LONGEST_COMMAND:
        return line
    return line[: _LONGEST_COMMAND - 1] + "…"


def wait_for_chips(
    needed: int,
    say: Callable[[str], None],
    *,
    chip: int | None = None,
    seconds: float = 60.0,
    machine: Machine = THIS_MACHINE,
) -> None:
    """Wait until enough chips are free; print once who holds the busy chips.

    This function starts no runtime. It tries to open each chip's device node: this fails if the
    chip is busy. If several programs share the chips (TPU_VISIBLE_CHIPS), or if no device node is
    visible, the function returns at once.

    Args:
        needed: number of chips that the run needs.
        say: prints a line.
        chip: wait only for this chip, counted from 0 in the order of the nodes' numbers. If the
            chip is still busy after `seconds`, the function returns. None to wait for any chips.
        seconds: the longest wait in seconds.
        machine: the machine; this machine by default.

    Raises:
        DeviceBusyError: an open session of this kernel holds chips that the run may need; or `chip`
            is None, and too few chips are free after `seconds` seconds.
    """
    # After a SIGKILL chips stay busy for some seconds (10 to 30 on Kaggle and v6e), and torch_xla
    # 2.8 ends a process that tries to open a chip twice. So a run tests the chips before it forks.
    _refuse_chips_of_a_session(chip)
    nodes = chip_nodes(machine)
    is_shared = any(machine.environ.get(name) for name in _SHARING_VARIABLES)
    if not nodes or is_shared:
        return
    if chip is not None:
        nodes = sorted(nodes, key=_number)[chip : chip + 1]
    deadline = time.monotonic() + seconds
    was_printed = False
    while True:
        busy = [node for node in nodes if _is_busy(node, machine)]
        count_free = len(nodes) - len(busy)
        # If fewer nodes are visible than the run needs, libtpu reports that with more detail.
        if count_free >= min(needed, len(nodes)):
            return
        facts = _describe_holders(busy, machine)
        if time.monotonic() > deadline:
            if chip is not None:  # libtpu may count the chips in another order
                return
            raise _still_busy(len(busy), len(nodes), seconds=seconds, facts=facts)
        if not was_printed:
            chips = f"{len(busy)} of {len(nodes)} chips"
            say(f"waiting for {chips} to become free, {seconds:.0f} s at most: {facts}")
            was_printed = True
        time.sleep(min(0.5, seconds / 10))


def _refuse_chips_of_a_session(chip: int | None) -> None:
    for session in open_sessions:
        is_another_chip = None not in (chip, session.device) and chip != session.device
        if session.holds_chips and not is_another_chip:
            raise DeviceBusyError(
                "a session of this notebook holds the chips",
                found=f"{session.cores}, in processes {', '.join(map(str, session.processes))}",
                fix="session.close(), then run this cell again; or run the function in the open "
                "session: session.run(...)",
            )


def _still_busy(busy: int, chips: int, *, seconds: float, facts: str) -> DeviceBusyError:
    return DeviceBusyError(
        f"{busy} of {chips} chips are still busy after {seconds:.0f} s",
        found=facts,
        fix="shut down the notebook or program that holds the chips; "
        "tpukit.cleanup() ends workers of a killed kernel;\n"
        "a restart of the session frees the chips in any case",
    )


def _number(node: Path) -> int:
    return int(node.name.removeprefix("accel"))


def _is_busy(node: Path, machine: Machine) -> bool:
    try:
        os.close(machine.open_node(str(node), os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EBUSY  # libtpu reports other errors, with more detail
    return False


def _describe_holders(busy: list[Path], machine: Machine) -> str:
    """Return a line that names these chips and their holders, grouped by holder."""
    holders = {node: pid for pid, node in chip_holders(machine)}
    by_holder: dict[int | None, list[str]] = {}
    for node in busy:
        holder = holders.get(str(node.resolve()))
        by_holder.setdefault(holder, []).append(str(node))
    parts = []
    for pid, nodes in by_holder.items():
        holder = "no process that is visible from here"
        if pid:
            holder = f"process {pid}: {command(machine.proc, pid)}"
        parts.append(f"{', '.join(nodes)} by {holder}")
    return "; ".join(parts)
