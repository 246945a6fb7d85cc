"""Make this session ready: the variables that stop torch_xla from forking, and the versions that belong together."""

import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from tpukit.display import tables
from tpukit.machine.host import Host, host


@dataclass(frozen=True)
class Release:
    """What belongs to a torch release; the one to install is the last."""

    torchvision: str
    torch_xla: tuple[str, ...]
    libtpu: tuple[str, ...]


# torch_xla declares no torch, and links against exactly one: pairing others ends in "undefined symbol" at import.
# libtpu is what each torch_xla release asks for, and on Python 3.13 0.0.21.1, as 0.0.21 has no wheel there. 2.9 is the
# last torch_xla announced.
RELEASES = {
    "2.8.0": Release("0.23.0", torch_xla=("2.8.1", "2.8.0"), libtpu=("0.0.17",)),
    "2.9.0": Release("0.24.0", torch_xla=("2.9.0",), libtpu=("0.0.21", "0.0.21.1")),
}
IMAGES = ("Colab", "Kaggle", "Vertex AI")  # their torch comes with the image, and is not ours to replace
_PYTHONS = ("3.11", "3.12", "3.13")  # with a torch_xla wheel, as far as this kit goes


@dataclass(frozen=True)
class Change:
    """One variable: None for `before` where it was not set, None for `after` where it was removed."""

    variable: str
    before: str | None
    after: str | None
    why: str


@dataclass(frozen=True, repr=False)
class Changes:
    """What `prepare` changed, in order. Draws itself, except in the notebook cell where `prepare` has just done so."""

    changes: tuple[Change, ...]
    cell: int | None = None  # the notebook cell that shows it already

    def __len__(self) -> int:
        return len(self.changes)

    def __str__(self) -> str:
        if not self.changes:
            return "this session is ready: nothing had to be changed"
        return "made this session ready:\n" + tables.as_text(self._rows())

    def __repr__(self) -> str:
        return f"<Changes: {len(self)}>"

    def _rows(self) -> list[tuple[str, str, str]]:
        return [
            (
                "set" if change.before is None else "removed" if change.after is None else "changed",
                change.variable + (f"={change.after or change.before}" if change.after or change.before else ""),
                change.why,
            )
            for change in self.changes
        ]

    def _ipython_display_(self) -> None:
        # IPython calls this for the last expression of a cell. prepare() shows its changes itself, so that they are
        # seen wherever in the cell it stands; this keeps `tpukit.prepare()` as a last line from showing them twice.
        if self.cell is None or self.cell != _cell():
            self._show()

    def _show(self) -> None:
        if _cell() is None:
            print(self)
            return
        from IPython.display import display

        heading = "This session is ready: nothing had to be changed" if not self else "Made this session ready"
        display({"text/plain": str(self), "text/html": tables.as_html(self._rows(), title=heading)}, raw=True)


def prepare(environ: MutableMapping[str, str] = os.environ, machine: Host | None = None) -> Changes:
    """Make this session ready for launching on every core; shows and returns what it changed.

    Touches only what stops torch_xla from forking and what nothing reads any more. A variable that somebody may mean,
    such as XLA_USE_BF16, stays; `check` names it. Can be run again at any time.
    """
    changes = needed_changes(environ, machine or host(environ))
    for change in changes:
        if change.after is None:
            del environ[change.variable]
        else:
            environ[change.variable] = change.after
    shown = Changes(changes, cell=_cell())
    shown._show()
    return shown


def needed_changes(environ: Mapping[str, str], machine: Host) -> tuple[Change, ...]:
    """Say what `prepare` would change, without changing it."""
    changes = []

    def change(variable: str, after: str | None, why: str) -> None:
        changes.append(Change(variable, environ.get(variable), after, why))

    # torch_xla gives each worker its own value of these two with setdefault, so one found here goes to all of them
    # (Kaggle's image sets TPU_PROCESS_ADDRESSES=local): "expected 8 worker addresses, got 1".
    if "TPU_PROCESS_ADDRESSES" in environ:
        change("TPU_PROCESS_ADDRESSES", None, "every worker would inherit it, and needs an address of its own")
    if "CLOUD_TPU_TASK_ID" in environ:
        change("CLOUD_TPU_TASK_ID", None, "every worker would inherit it, and needs a number of its own")
        # Where the metadata server is not to be asked, torch_xla takes this host's number from either variable.
        if environ.get("TPU_SKIP_MDS_QUERY") and not environ.get("TPU_WORKER_ID"):
            number = environ["CLOUD_TPU_TASK_ID"] or "0"
            change("TPU_WORKER_ID", number, "this host's number, which CLOUD_TPU_TASK_ID stood for")
    for variable in sorted(name for name in environ if name.startswith("XRT_")):
        change(variable, None, "of the runtime before PJRT; torch_xla reads it no more")
    if machine.chips and not environ.get("PJRT_DEVICE"):
        change("PJRT_DEVICE", "TPU", "unset, torch_xla turns to the CPU where it finds no libtpu")
    return tuple(changes)


def install_line(machine: Host) -> str:
    """Write the pip line that completes torch, torch_xla and libtpu here; empty where nothing can be added.

    An image's own torch is kept: what is added is what belongs to it. torch_xla has wheels for Linux x86-64 only, so
    elsewhere, and without chips where there is none yet, torch alone is enough to rehearse.
    """
    torch, torch_xla, libtpu = (machine.versions.get(name) for name in ("torch", "torch_xla", "libtpu"))
    newest = list(RELEASES)[-1]
    has_wheels = machine.system == "Linux x86_64" and _minor(machine.versions["python"]) in _PYTHONS
    if not has_wheels:
        return "" if torch else "pip install torch torchvision"
    wants_torch_xla = bool(machine.chips or torch_xla or not torch)
    parts = []
    if not torch or (wants_torch_xla and base(torch) not in RELEASES and machine.platform not in IMAGES):
        torch = newest
        parts += [f"torch=={newest}", f"torchvision=={RELEASES[newest].torchvision}"]
    release = RELEASES.get(base(torch))
    if release and wants_torch_xla:
        if torch_xla is None or base(torch_xla) not in release.torch_xla:
            parts.append(f"torch_xla=={release.torch_xla[-1]}")
        if machine.chips and libtpu not in release.libtpu:
            # Not as torch_xla[tpu]: its libtpu pin has no wheel on Python 3.13, and pip then takes an older torch_xla.
            parts.append(f"libtpu=={release.libtpu[-1]}")
    return " ".join(["pip install", *parts]) if parts else ""


def base(version: str) -> str:
    """Drop what follows the release in a version: 2.9.0 of `2.9.0+cpu`."""
    return version.split("+")[0]


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _cell() -> int | None:
    """Number the notebook cell that runs now; None outside of IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell.execution_count if shell else None
