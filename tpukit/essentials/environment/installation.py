"""The end of a notebook's install cell: check the version, install what `pack` needs."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tpukit.essentials.display import TpukitRuntimeError
from tpukit.essentials.environment.hardware import MachineInfo
from tpukit.essentials.environment.instructions import how_to_restart

_LOADED = sys.modules["tpukit"].__version__  # the version of this kernel until it is restarted
# The packages that `pack` needs. Colab's image has array_record, Kaggle's has neither.
_FOR_PACKS = ("array_record", "simplejpeg")
_ROOT = Path(__file__).parents[3]  # the folder that contains the package


def finish_install(wheels: str | Path = ".") -> None:
    """Finish the install cell of a notebook, and print tpukit's version and folder.

    If packages that `pack` needs are missing, this function installs them from the folder `wheels`
    or from the package index. If the installation fails, for example without internet, the function
    prints the names of the packages.

    Args:
        wheels: the folder of tpukit's wheel, by default the current folder. A notebook in a clone
            of the repository uses the clone's package, and ignores this argument.

    Raises:
        TpukitRuntimeError: the wheel is newer than the version that this kernel has loaded.
    """
    # The same rule as in the install cell: the current folder is the notebook folder of a clone, or
    # contains a clone in the folder "tpukit".
    has_notebooks = (_ROOT / "notebooks/first_cell.txt").is_file()
    is_clone = has_notebooks and _ROOT in (Path.cwd().parent, Path.cwd() / "tpukit")
    if not is_clone:
        _refuse_newer_wheel(Path(wheels))
    missing = ""
    if not _has_packages():
        _install_packages(Path(wheels))
        if not _has_packages():
            missing = f"; without {' and '.join(_FOR_PACKS)}, which `pack` needs"
    print(f"tpukit {_LOADED} from {_ROOT}{missing}")


def _refuse_newer_wheel(folder: Path) -> None:
    for wheel in folder.glob("tpukit-*.whl"):
        version = wheel.name.split("-")[1]
        if _as_numbers(version) > _as_numbers(_LOADED):
            raise TpukitRuntimeError(
                f"this kernel has loaded tpukit {_LOADED}, and {wheel.name} is newer",
                found=f"loaded from {_ROOT}",
                fix=f"restart the runtime: {how_to_restart(MachineInfo.read())}; "
                "then run this cell again",
            )


def _as_numbers(version: str) -> list[int]:
    """Return a version as numbers to compare: "0.10.1" as [0, 10, 1]."""
    return [int(part) for part in version.split(".") if part.isdigit()]


def _has_packages() -> bool:
    # On Windows the packages count as present, because neither has a wheel for it.
    return sys.platform == "win32" or all(map(find_spec, _FOR_PACKS))


def _install_packages(wheels: Path) -> None:
    quiet = ["--quiet", "--quiet", "--retries", "1", "--find-links", str(wheels)]
    command = [sys.executable, "-m", "pip", "install", *quiet, *_FOR_PACKS]
    # Without internet pip fails. The packages are optional, so the notebook continues.
    subprocess.run(command, check=False, capture_output=True)
