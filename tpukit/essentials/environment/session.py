"""Make this session ready for launches: correct variables, and name the versions to install.

torch_xla sets the variables of a worker with `setdefault`. So if the image has set one before, such
as Kaggle's TPU_PROCESS_ADDRESSES=local, all workers inherit the same value and cannot start.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpukit.essentials.display import InvalidTypeError, Table, as_html, current_cell
from tpukit.essentials.environment.hardware import MachineInfo, numbers
from tpukit.essentials.environment.instructions import how_to_restart, how_to_start_afresh
from tpukit.essentials.environment.platforms import THIS_MACHINE, Machine

Folders = str | os.PathLike | Sequence[str | os.PathLike]  # the type of `compile_cache`
KEEP_VARIABLE = "TPUKIT_KEEP_COMPILES"  # the folders of `setup(compile_cache=...)`, as JSON


@dataclass(frozen=True)
class Release:
    """The versions that work with a torch release; tpukit installs the last in each tuple."""

    torchvision: str
    torch_xla: tuple[str, ...]
    libtpu: tuple[str, ...]


# torch_xla declares no dependency on torch, but it is linked against exactly one torch release.
# With any other, its import fails with "undefined symbol". libtpu is the version that a torch_xla
# release requires; 0.0.21.1 is for Python 3.13, because 0.0.21 has no wheel for it. torch_xla 2.9
# is the last announced release.
RELEASES = {
    "2.8.0": Release("0.23.0", torch_xla=("2.8.1", "2.8.0"), libtpu=("0.0.17",)),
    "2.9.0": Release("0.24.0", torch_xla=("2.9.0",), libtpu=("0.0.21", "0.0.21.1")),
}
OLDEST_TORCH = next(iter(RELEASES))
# Variables that give a process its part of the chips. torch_xla sets them for each worker with
# setdefault, so existing values would apply to all workers. `setup` does not remove them, because
# two notebooks may use them to share a machine.
ONE_PROCESS_VARIABLES = (
    *("TPU_VISIBLE_CHIPS", "TPU_PROCESS_BOUNDS"),
    *("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_PORT"),
    *("PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT"),
)
IMAGES = ("Colab", "Kaggle", "Vertex AI")  # tpukit never replaces the torch of their images
_PYTHONS = ((3, 11), (3, 12), (3, 13))  # torch_xla 2.8 and 2.9 have wheels for all three


@dataclass(frozen=True)
class Change:
    """The change of an environment variable.

    Attributes:
        variable: the name of the variable.
        before: the value before; None if the variable was not set.
        after: the new value; None if the variable is removed.
        why: the reason.
    """

    variable: str
    before: str | None
    after: str | None
    why: str

    @property
    def action(self) -> str:
        """The change in one word."""
        if self.before is None:
            return "set"
        return "removed" if self.after is None else "changed"


@dataclass(frozen=True, repr=False)
class Changes(Table):
    """The changes that `setup` made, in order; it displays itself as a table.

    In the cell that called `setup` it displays nothing, because `setup` itself has displayed the
    changes.

    Attributes:
        changes: the changed variables.
        left: unchanged variables, as "NAME=value", with which a launch would fail or not use all
            chips. `setup` does not change them: the user may have set them on purpose.
        cell: number of the notebook cell that displays the changes; None outside of IPython.
        problem: why no launch can start with this machine's torch, with the fix; "" if a launch
            can start.
    """

    changes: tuple[Change, ...]
    left: tuple[str, ...] = ()
    cell: int | None = None
    problem: str = ""

    def __len__(self) -> int:
        return len(self.changes)

    @property
    def title(self) -> str:
        """The outcome in a line."""
        if self.problem:
            return f"not ready to launch: {self.problem}"
        if self.left:
            stays = f"{', '.join(self.left)} (not changed, because it may be set on purpose)"
            return f"not ready to launch on all chips: {stays}; see tpukit.check()"
        if self.changes:
            return "made this session ready"
        return "this session is ready: nothing had to be changed"

    def __repr__(self) -> str:
        return f"<Changes: {len(self)}>"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (action, variable and value, reason) for every change."""
        found = []
        for change in self.changes:
            value = change.after or change.before
            assignment = f"{change.variable}={value}" if value else change.variable
            found.append((change.action, assignment, change.why))
        return found

    def _ipython_display_(self) -> None:
        # IPython calls this for the last expression of a cell. `setup` itself has displayed the
        # changes already, because it need not be the last expression. Without this test,
        # `tpukit.setup()` in the last line would display them twice.
        if self.cell is None or self.cell != current_cell():
            self._show()

    def _show(self) -> None:
        if current_cell() is None:
            print(self)
            return
        from IPython.display import display

        heading = self.title[0].upper() + self.title[1:]
        html = as_html(self.rows(), title=heading)
        display({"text/plain": str(self), "text/html": html}, raw=True)


def setup(
    machine: Machine = THIS_MACHINE,
    *,
    compile_cache: Folders | bool | None = None,
    info: MachineInfo | None = None,
) -> Changes:
    """Make this session ready to launch on every core; display and return the changes.

    `setup` changes environment variables with which a start on several cores would fail, and
    removes variables that no program reads any more. It does not change a variable that you may
    have set on purpose, such as XLA_USE_BF16; `check` reports it. You can call `setup` again at any
    time.

    Args:
        machine: the machine; this machine by default.
        compile_cache: the folder, or a list of folders, for the compilation cache of all later
            launches to which you pass no `compile_cache`; see `launch`. False switches the cache
            off. None changes nothing.
        info: the facts about the machine; None to read them.

    Returns:
        The `Changes`, which display themselves as a table.

    Raises:
        InvalidTypeError: `compile_cache` is not a folder, a list of folders, or False.
    """
    environ = machine.environ
    info = info or MachineInfo.read(machine)
    changes = needed_changes(environ, info)
    if compile_cache is not None:
        folders = list(map(str, folders_of(compile_cache)))
        # JSON, because the name of a folder may contain any separator.
        changes += _cache_change(environ, json.dumps(folders) if folders else "")
    for change in changes:
        if change.after is None:
            del environ[change.variable]
        else:
            environ[change.variable] = change.after
    # After the changes, so that only variables that are still set are reported.
    left = tuple(f"{name}={environ[name]}" for name in _left_variables(environ, info))
    problem = torch_problem(info)
    if problem:
        problem += f"; {how_to_install(info)}"
    elif wrong := wrong_image(info):
        problem = f"{wrong}; {LATEST_IMAGE}"
    shown = Changes(changes, left, cell=current_cell(), problem=problem)
    shown._show()
    return shown


def _left_variables(environ: Mapping[str, str], info: MachineInfo) -> list[str]:
    """Return the variables with which a launch fails or leaves chips unused; see `Changes`."""
    left = []
    if info.chips > 1:
        left += [name for name in ONE_PROCESS_VARIABLES if name in environ]
    is_other_device = not environ.get("PJRT_DEVICE", "TPU").startswith("TPU")
    if info.chips and info.tpu_package == "torch_xla" and is_other_device:
        left.append("PJRT_DEVICE")
    return left


def needed_changes(environ: Mapping[str, str], info: MachineInfo) -> tuple[Change, ...]:
    """Return the changes that `setup` would make, without making them."""
    return (
        *_changes_of_addresses(environ),
        *_changes_of_other_runtimes(environ),
        *_changes_of_device(environ, info),
    )


def _change(environ: Mapping[str, str], variable: str, after: str | None, *, why: str) -> Change:
    return Change(variable, before=environ.get(variable), after=after, why=why)


def _changes_of_addresses(environ: Mapping[str, str]) -> Iterator[Change]:
    """Yield the changes of variables with the address or number of one process or host."""
    inherited = "every worker would inherit it, but each needs"
    # Kaggle's image sets this to "local", and the start fails with
    # "expected 8 worker addresses, got 1".
    if "TPU_PROCESS_ADDRESSES" in environ:
        why = f"{inherited} an address of its own"
        yield _change(environ, "TPU_PROCESS_ADDRESSES", None, why=why)
    if "CLOUD_TPU_TASK_ID" in environ:
        why = f"{inherited} a number of its own"
        yield _change(environ, "CLOUD_TPU_TASK_ID", None, why=why)
        # With TPU_SKIP_MDS_QUERY torch_xla does not ask the metadata server for this host's number,
        # but reads it from TPU_WORKER_ID or CLOUD_TPU_TASK_ID.
        if environ.get("TPU_SKIP_MDS_QUERY") and not environ.get("TPU_WORKER_ID"):
            number = environ["CLOUD_TPU_TASK_ID"] or "0"
            why = "this host's number, which was in CLOUD_TPU_TASK_ID before"
            yield _change(environ, "TPU_WORKER_ID", number, why=why)


def _changes_of_other_runtimes(environ: Mapping[str, str]) -> Iterator[Change]:
    """Yield the changes of variables that an older runtime or an earlier job has left."""
    for variable in sorted(name for name in environ if name.startswith("XRT_")):
        why = "belongs to XRT, the runtime before PJRT; torch_xla no longer reads it"
        yield _change(environ, variable, None, why=why)
    # With variables of an earlier job of several slices, the start hangs (ray-project/ray 62893).
    for variable in sorted(name for name in environ if name.startswith("MEGASCALE_")):
        why = "libtpu waits for the other slices of a job, and a launch has a single slice"
        yield _change(environ, variable, None, why=why)


def _changes_of_device(environ: Mapping[str, str], info: MachineInfo) -> Iterator[Change]:
    """Yield the changes after which workers use the chips, and the kernel does not open them."""
    uses_torch_xla = info.chips and info.tpu_package == "torch_xla"
    if uses_torch_xla and not environ.get("PJRT_DEVICE"):
        why = "if it is unset, torch_xla uses the CPU when it finds no libtpu"
        yield _change(environ, "PJRT_DEVICE", "TPU", why=why)
    loads_torch_tpu = environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0"
    if info.versions.get("torch_tpu") and loads_torch_tpu:
        # In torch_tpu 0.2.0 the first backward(), also of CPU tensors, counts the devices, and that
        # starts libtpu.
        why = (
            "`import torch` would load torch_tpu, whose first backward() opens the chips in the "
            "kernel; workers load torch_tpu themselves"
        )
        yield _change(environ, "TORCH_DEVICE_BACKEND_AUTOLOAD", "0", why=why)


def _stored_folders(text: str) -> list[str]:
    """Return the folders in KEEP_VARIABLE's text: a JSON list, or the path of a single folder."""
    if not text:
        return []
    with contextlib.suppress(ValueError):
        folders = json.loads(text)
        if isinstance(folders, list):
            return folders
    return [text]


def folders_of(
    given: Folders | bool | None, environ: Mapping[str, str] = os.environ
) -> tuple[Path, ...]:
    """Return the folders of `compile_cache`, as absolute paths.

    Args:
        given: a folder or a list of folders; None for the folders that `setup` has set; False for
            no folder.
        environ: the environment variables.

    Raises:
        InvalidTypeError: `given` is none of these.
    """
    if given is False:
        return ()
    if given is None:
        given = _stored_folders(environ.get(KEEP_VARIABLE, ""))
    if isinstance(given, str | os.PathLike):
        given = [given]
    if not isinstance(given, list | tuple) or not all(map(_is_folder, given)):
        raise InvalidTypeError(
            "compile_cache must be a folder, a list of folders, or False",
            found=repr(given),
            fix='compile_cache="runs/compiles"',
        )
    return tuple(Path(folder).expanduser().absolute() for folder in given)


def _is_folder(value: object) -> bool:
    return isinstance(value, str | os.PathLike) and bool(str(value))


def _cache_change(environ: Mapping[str, str], folders: str) -> tuple[Change, ...]:
    before = environ.get(KEEP_VARIABLE)
    if (before or "") == folders:
        return ()
    why = "not kept any more"
    if folders:
        why = "launches store compiled programs there, and the next session loads them"
    return (Change(KEEP_VARIABLE, before=before, after=folders or None, why=why),)


def install_line(info: MachineInfo, *, for_graphs: bool = False) -> str:
    """Return the pip line for matching versions of torch, torch_xla and libtpu; "" for none.

    The line names only packages to install or replace. It never replaces the torch that Colab,
    Kaggle or Vertex AI has installed. torch_xla has wheels for Linux x86-64 only. On other systems,
    and on machines without chips, torch alone is enough for a dry run.

    Args:
        info: the facts about the machine.
        for_graphs: add torch_xla also on a machine without chips, for a dry run of graphs.
    """
    has_wheels = info.system == "Linux x86_64" and numbers(info.versions["python"]) in _PYTHONS
    torch = info.versions.get("torch")
    torch_xla = info.versions.get("torch_xla")
    must_upgrade = bool(torch) and is_too_old(torch) and info.platform not in IMAGES
    if not has_wheels:
        if must_upgrade:
            return "pip install --upgrade torch torchvision"
        return "" if torch else "pip install torch torchvision"
    # Without chips and with torch, a dry run on CPU processes needs nothing more.
    wants_torch_xla = bool(info.chips or torch_xla or not torch or for_graphs)
    parts = []
    if not torch or must_upgrade or (wants_torch_xla and _can_replace(torch, info)):
        torch = list(RELEASES)[-1]
        parts += [f"torch=={torch}", f"torchvision=={RELEASES[torch].torchvision}"]
    release = RELEASES.get(base(torch))
    if release and wants_torch_xla:
        if torch_xla is None or base(torch_xla) not in release.torch_xla:
            parts.append(f"torch_xla=={release.torch_xla[-1]}")
        if info.chips and info.versions.get("libtpu") not in release.libtpu:
            # torch_xla[tpu] is not used: it pins a libtpu without a wheel for Python 3.13, so pip
            # would install an older torch_xla.
            parts.append(f"libtpu=={release.libtpu[-1]}")
    return " ".join(["pip install", *parts]) if parts else ""


def _can_replace(torch: str, info: MachineInfo) -> bool:
    """Return whether the pip line may replace torch by a version that torch_xla supports.

    It may if torch_xla does not support `torch`, the installed version, and the platform has no
    image with a torch of its own.
    """
    return base(torch) not in RELEASES and info.platform not in IMAGES


def is_too_old(torch: str) -> bool:
    """Return whether a version of torch is older than the oldest that tpukit supports."""
    return numbers(torch) < numbers(OLDEST_TORCH)


def torch_problem(info: MachineInfo) -> str:
    """Return why no launch can start with this machine's torch; "" if one can.

    `setup`, `check` and `launch` all report this text, with the fix of `how_to_install`.
    """
    torch = info.versions.get("torch")
    if not torch:
        return "torch is not installed"
    if is_too_old(torch):
        return f"torch {torch} is not supported: the first supported version is {OLDEST_TORCH}"
    return ""


# A pinned image replaces the image of a TPU session (Kaggle/kaggle-cli 1197), also after a factory
# reset.
LATEST_IMAGE = (
    "Settings > Environment > Always use latest environment; for `kaggle kernels push`, delete "
    "docker_image from kernel-metadata.json, and kaggle.dockerImageVersionId from the notebook"
)


def wrong_image(info: MachineInfo) -> str:
    """Return a description if a TPU session of Kaggle has an image for CPUs or GPUs; else ""."""
    torch = info.versions.get("torch")
    has_runtime = info.versions.get("torch_xla") or info.versions.get("torch_tpu")
    if info.platform != "Kaggle" or not info.chips or not torch or has_runtime:
        return ""
    if base(torch) in RELEASES:  # pip can add torch_xla, so the image is not the problem
        return ""
    processors = "GPUs" if "+cu" in torch else "CPUs"
    return (
        f"torch {torch}, no torch_xla: this is Kaggle's image for {processors}, in a session with "
        f"{info.chips} chips"
    )


def how_to_install(info: MachineInfo) -> str:
    """Return the pip line and how to restart; if no pip line helps, `how_to_start_afresh(info)`."""
    line = install_line(info)
    if not line:
        return how_to_start_afresh(info)
    return f"`{percent(info)}{line}`, then {how_to_restart(info)}"


def percent(info: MachineInfo) -> str:
    """Return "%" to put before pip on platforms that offer only notebooks; otherwise ""."""
    return "%" if info.platform in ("Colab", "Kaggle") else ""


def base(version: str) -> str:
    """Return a version without its local part: `2.9.0` for `2.9.0+cpu`."""
    return version.split("+")[0]
