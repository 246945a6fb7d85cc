"""Make this session ready: variables that make a multi-core start fail, and versions that work together."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpukit.essentials.display import InvalidTypeError, Table, as_html, current_cell
from tpukit.essentials.environment.hardware import MachineInfo, numbers
from tpukit.essentials.environment.platforms import THIS_MACHINE, Machine

Folders = str | os.PathLike | Sequence[str | os.PathLike]  # what `compile_cache` may be
KEEP_VARIABLE = "TPUKIT_KEEP_COMPILES"  # what `prepare` sets for all launches


@dataclass(frozen=True)
class Release:
    """The versions that work with a torch release; of several, the last is the one to install."""

    torchvision: str
    torch_xla: tuple[str, ...]
    libtpu: tuple[str, ...]


# torch_xla declares no dependency on torch, but is linked against exactly one release: with another, its import fails
# with "undefined symbol". libtpu is the version that each torch_xla release asks for; 0.0.21.1 is for Python 3.13, for
# which 0.0.21 has no wheel. 2.9 is the last torch_xla announced.
RELEASES = {
    "2.8.0": Release("0.23.0", torch_xla=("2.8.1", "2.8.0"), libtpu=("0.0.17",)),
    "2.9.0": Release("0.24.0", torch_xla=("2.9.0",), libtpu=("0.0.21", "0.0.21.1")),
}
OLDEST_TORCH = next(iter(RELEASES))
# Variables that give one process its part of the chips. torch_xla sets them for each worker with setdefault, so all
# workers would keep the values found here. setup() does not remove them: two notebooks may share a machine this way.
ONE_PROCESS_VARIABLES = (
    *("TPU_VISIBLE_CHIPS", "TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_PORT"),
    *("PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT"),
)
IMAGES = ("Colab", "Kaggle", "Vertex AI")  # their torch comes with the image and is never replaced
_PYTHONS = ((3, 11), (3, 12), (3, 13))  # those that this kit supports: torch_xla 2.8 and 2.9 have wheels for all three


@dataclass(frozen=True)
class Change:
    """One changed variable: `before` is None where it was not set, `after` is None where it was removed."""

    variable: str
    before: str | None
    after: str | None
    why: str


@dataclass(frozen=True, repr=False)
class Changes(Table):
    """What `prepare` changed, in order. Shows itself, except in the notebook cell where `prepare` has just shown it."""

    changes: tuple[Change, ...]
    left: tuple[str, ...] = ()  # variables that would make a launch fail, and that may be set on purpose
    cell: int | None = None  # the notebook cell that already shows them

    def __len__(self) -> int:
        return len(self.changes)

    @property
    def title(self) -> str:
        """What was done, in one line."""
        if self.left:
            names = ", ".join(self.left)
            return f"not ready to launch on all chips: {names} may be set on purpose, and stays; see tpukit.check()"
        return "made this session ready" if self.changes else "this session is ready: nothing had to be changed"

    def __repr__(self) -> str:
        return f"<Changes: {len(self)}>"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (what was done, variable and value, why) for every change."""
        return [
            (
                "set" if change.before is None else "removed" if change.after is None else "changed",
                change.variable + (f"={change.after or change.before}" if change.after or change.before else ""),
                change.why,
            )
            for change in self.changes
        ]

    def _ipython_display_(self) -> None:
        # IPython calls this for the last expression of a cell. setup() has already shown its changes, because it may
        # be called anywhere in the cell; without this test, `tpukit.setup()` as the last line would show them twice.
        if self.cell is None or self.cell != current_cell():
            self._show()

    def _show(self) -> None:
        if current_cell() is None:
            print(self)
            return
        from IPython.display import display

        heading = self.title[0].upper() + self.title[1:]
        display({"text/plain": str(self), "text/html": as_html(self.rows(), title=heading)}, raw=True)


def setup(
    machine: Machine = THIS_MACHINE, *, compile_cache: Folders | bool | None = None, info: MachineInfo | None = None
) -> Changes:
    """Make this session ready for launching on every core; show and return what was changed.

    Changes only variables that make a multi-core start fail, and removes those that nothing reads any more. A variable
    that may be set on purpose, such as XLA_USE_BF16, stays; `check` names it. Can be called again at any time.

    Args:
        machine, info: what is made ready, if not this machine.
        compile_cache: the folder, or the list of folders, of compiled programs for all launches that name none
            themselves, see `launch`; False for none from here on.
    """
    environ, info = machine.environ, info or MachineInfo.read(machine)
    changes = needed_changes(environ, info)
    if compile_cache is not None:
        changes += _kept(environ, os.pathsep.join(map(str, folders_of(compile_cache))))
    for change in changes:
        if change.after is None:
            del environ[change.variable]
        else:
            environ[change.variable] = change.after
    left = [name for name in ONE_PROCESS_VARIABLES if info.chips > 1 and name in environ]
    is_other = not environ.get("PJRT_DEVICE", "TPU").startswith("TPU")
    left += ["PJRT_DEVICE"] if info.chips and info.tpu_package == "torch_xla" and is_other else []
    shown = Changes(changes, tuple(f"{name}={environ[name]}" for name in left), cell=current_cell())
    shown._show()
    return shown


def needed_changes(environ: Mapping[str, str], info: MachineInfo) -> tuple[Change, ...]:
    """Return what `prepare` would change, without changing it."""
    changes = []

    def change(variable: str, after: str | None, why: str) -> None:
        changes.append(Change(variable, environ.get(variable), after, why))

    # torch_xla sets both for each worker with setdefault, so a value found here is kept by all workers. Kaggle's image
    # sets TPU_PROCESS_ADDRESSES=local, and the start fails with "expected 8 worker addresses, got 1".
    if "TPU_PROCESS_ADDRESSES" in environ:
        change("TPU_PROCESS_ADDRESSES", None, "every worker would inherit it, but each needs an address of its own")
    if "CLOUD_TPU_TASK_ID" in environ:
        change("CLOUD_TPU_TASK_ID", None, "every worker would inherit it, but each needs a number of its own")
        # Where TPU_SKIP_MDS_QUERY forbids asking the metadata server, torch_xla reads this host's number from either.
        if environ.get("TPU_SKIP_MDS_QUERY") and not environ.get("TPU_WORKER_ID"):
            number = environ["CLOUD_TPU_TASK_ID"] or "0"
            change("TPU_WORKER_ID", number, "this host's number, which CLOUD_TPU_TASK_ID has given so far")
    for variable in sorted(name for name in environ if name.startswith("XRT_")):
        change(variable, None, "belongs to XRT, the runtime before PJRT; torch_xla no longer reads it")
    if info.chips and info.tpu_package == "torch_xla" and not environ.get("PJRT_DEVICE"):
        change("PJRT_DEVICE", "TPU", "if it is unset, torch_xla uses the CPU where it finds no libtpu")
    if info.versions.get("torch_tpu") and environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
        # Seen in torch_tpu 0.2.0: the first backward(), of CPU tensors too, counts its devices and so starts libtpu.
        why = "`import torch` would load torch_tpu, whose first backward() takes the chips; workers load it themselves"
        change("TORCH_DEVICE_BACKEND_AUTOLOAD", "0", why)
    return tuple(changes)


def folders_of(given: Folders | bool | None, environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return the folders that `compile_cache` names: of None those that `prepare` has named, of False none.

    Raises:
        TypeError: it is none of these, nor a folder or a list of them.
    """
    if given is None:
        given = [one for one in environ.get(KEEP_VARIABLE, "").split(os.pathsep) if one]
    given = [] if given is False else [given] if isinstance(given, str | os.PathLike) else given
    if not isinstance(given, list | tuple) or not all(isinstance(one, str | os.PathLike) and str(one) for one in given):
        raise InvalidTypeError(
            "compile_cache is a folder, a list of folders, or False",
            found=repr(given),
            fix='compile_cache="runs/compiles"',
        )
    return tuple(Path(one).expanduser().absolute() for one in given)


def _kept(environ: Mapping[str, str], folders: str) -> tuple[Change, ...]:
    if environ.get(KEEP_VARIABLE, "") == folders:
        return ()
    why = "launches keep there what they compile, and the next session loads it" if folders else "not kept any more"
    return (Change(KEEP_VARIABLE, environ.get(KEEP_VARIABLE), folders or None, why),)


def install_line(info: MachineInfo, *, rehearse_graphs: bool = False) -> str:
    """Return the pip line that completes torch, torch_xla and libtpu here; empty where nothing can be added.

    The torch of a platform's image is kept, and what matches it is added. torch_xla has wheels for Linux x86-64 only;
    elsewhere torch alone is enough to rehearse, as it is on a machine without chips that has torch already, unless
    graphs are to be rehearsed.
    """
    torch, torch_xla, libtpu = (info.versions.get(name) for name in ("torch", "torch_xla", "libtpu"))
    newest = list(RELEASES)[-1]
    has_wheels = info.system == "Linux x86_64" and numbers(info.versions["python"]) in _PYTHONS
    if not has_wheels:
        return "" if torch else "pip install torch torchvision"
    wants_torch_xla = bool(info.chips or torch_xla or not torch or rehearse_graphs)
    parts = []
    if not torch or (wants_torch_xla and base(torch) not in RELEASES and info.platform not in IMAGES):
        torch = newest
        parts += [f"torch=={newest}", f"torchvision=={RELEASES[newest].torchvision}"]
    release = RELEASES.get(base(torch))
    if release and wants_torch_xla:
        if torch_xla is None or base(torch_xla) not in release.torch_xla:
            parts.append(f"torch_xla=={release.torch_xla[-1]}")
        if info.chips and libtpu not in release.libtpu:
            # Not as torch_xla[tpu]: it pins a libtpu without a wheel for Python 3.13, so pip takes an older torch_xla.
            parts.append(f"libtpu=={release.libtpu[-1]}")
    return " ".join(["pip install", *parts]) if parts else ""


def is_too_old(torch: str) -> bool:
    """Say whether a torch is older than any that this kit runs on."""
    return numbers(torch) < numbers(OLDEST_TORCH)


def base(version: str) -> str:
    """Return a version without its local part: `2.9.0` for `2.9.0+cpu`."""
    return version.split("+")[0]
