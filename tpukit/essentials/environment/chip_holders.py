"""Which processes hold a chip, that is, have its device node open; and the wait until they do not."""

import contextlib
import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tpukit.essentials.display import TpukitError
from tpukit.essentials.environment.platforms import THIS_MACHINE, Machine
from tpukit.essentials.environment.resources import read_text


def is_chip(node: str) -> bool:
    """Return whether a name in /dev or /dev/vfio is a chip: `accel0` up to v4, an IOMMU group's number from v5e on."""
    return re.fullmatch(r"(accel)?\d+", node) is not None


def chip_nodes(machine: Machine) -> list[Path]:
    """Return the device nodes of chips, of a v4 or earlier in /dev, of a v5e or later in /dev/vfio."""
    return [node for node in [*entries(machine.dev), *entries(machine.dev / "vfio")] if is_chip(node.name)]


def chip_holders(machine: Machine) -> Iterator[tuple[int, str]]:
    """Yield (process id, device node) for every open chip; processes of other users are not visible to all users."""
    folders = (str(machine.dev.resolve()), str((machine.dev / "vfio").resolve()))
    for process in entries(machine.proc):
        if not process.name.isdigit():
            continue
        for target in open_files(process):
            folder, _, node = target.rpartition("/")
            if folder in folders and is_chip(node):
                yield int(process.name), target


def open_files(process: Path) -> Iterator[str]:
    """Yield what the descriptors of a process in /proc point to."""
    for fd in entries(process / "fd"):
        with contextlib.suppress(OSError):  # closed since it was listed
            yield os.readlink(fd)


def entries(folder: Path) -> list[Path]:
    """List a folder; empty where it is missing, not readable, or belongs to a process that has just ended."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def ancestors(proc: Path, pid: int) -> list[int]:
    """Return the ids of the parent of a process, of its parent's parent, and so on."""
    above = []
    while found := re.search(r"^PPid:\s*([1-9]\d*)", read_text(proc / str(pid) / "status"), re.MULTILINE):
        pid = int(found[1])  # 0 for the first process of a machine or container: it has no parent
        above.append(pid)
    return above


def command(proc: Path, pid: int) -> str:
    """Return the command line of a process, cut to 90 characters."""
    words = read_text(proc / str(pid) / "cmdline").replace("\0", " ").split()
    line = " ".join(words) or "its command cannot be read"
    return line if len(line) <= 90 else line[:89] + "…"


class DeviceBusyError(TpukitError, RuntimeError):
    """The chips that a run needs are in use."""


def wait_for_chips(
    needed: int,
    say: Callable[[str], None],
    *,
    chip: int | None = None,
    seconds: float = 60.0,
    machine: Machine = THIS_MACHINE,
) -> None:
    """Wait until so many chips, or one chosen `chip`, can be opened, saying so once with who holds the others.

    After a SIGKILL chips stay busy for some seconds (10 to 30 on Kaggle and v6e), and torch_xla 2.8 ends a process that
    tries twice; so a run looks before it forks. A node is opened and closed at once, which tells EBUSY and starts
    nothing. Where the chips are shared between programs (TPU_VISIBLE_CHIPS), or no node is visible, nothing is awaited.

    Raises:
        DeviceBusyError: they are still busy after so many seconds. Not for a chosen chip: nodes are counted in the order of
            their numbers here, and libtpu, which may count otherwise, has the last word.
    """
    nodes = chip_nodes(machine)
    if not nodes or any(machine.environ.get(name) for name in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES")):
        return
    if chip is not None:
        nodes = sorted(nodes, key=lambda node: int(node.name.removeprefix("accel")))[chip : chip + 1]
    deadline, said = time.monotonic() + seconds, False
    while len(nodes) - len(busy := [node for node in nodes if _is_busy(node, machine)]) < min(needed, len(nodes)):
        facts = _who_holds(busy, machine)
        if time.monotonic() > deadline:
            if chip is not None:
                return
            raise DeviceBusyError(
                f"{len(busy)} of {len(nodes)} chips are still busy after {seconds:.0f} s",
                found=facts,
                fix=(
                    "shut down the notebook or program that holds them; tpukit.cleanup() ends workers of a killed "
                    "kernel;\na restart of the session frees them in any case"
                ),
            )
        if not said:
            say(f"waiting for {len(busy)} of {len(nodes)} chips to become free, {seconds:.0f} s at most: {facts}")
            said = True
        time.sleep(min(0.5, seconds / 10))


def _is_busy(node: Path, machine: Machine) -> bool:
    try:
        os.close(machine.open_node(str(node), os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:  # any other is for libtpu to tell, which knows more
        return error.errno == errno.EBUSY
    return False


def _who_holds(busy: list[Path], machine: Machine) -> str:
    """Say who holds these chips, one after the other; those of one holder together."""
    holders = {node: pid for pid, node in chip_holders(machine)}
    by_holder: dict[int | None, list[str]] = {}
    for node in busy:
        by_holder.setdefault(holders.get(str(node.resolve())), []).append(str(node))
    return "; ".join(
        f"{', '.join(nodes)} by "
        + (f"process {pid}: {command(machine.proc, pid)}" if pid else "no process that is visible from here")
        for pid, nodes in by_holder.items()
    )
