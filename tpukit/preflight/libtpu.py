"""Find or download libtpu, the TPU's compiler, in the version of a platform.

libtpu is not installed as a package, because that would replace the libtpu of the machine's image.
`fetch_libtpu` extracts only the library from the wheel, into the user's cache folder.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tpukit.essentials.display import InvalidValueError, human_size
from tpukit.essentials.environment import RELEASES, MachineInfo
from tpukit.preflight.recording import PreflightError
from tpukit.simulator import cache_folder

# Newer wheels have a Python version in their names, but the library does not depend on it.
_WHEEL = (
    "--only-binary=:all:",
    "--python-version=3.12",
    "--platform=manylinux_2_31_x86_64",
    "--no-deps",
)
_NEEDED = 560 * 2**20  # bytes of disk for the wheel and the library, which exist at the same time


class LibtpuNotFoundError(PreflightError):
    """The TPU's compiler is not on this machine, or cannot be downloaded."""


def platform_version() -> str:
    """Return libtpu's version for this machine's torch; for an unknown torch, the newest."""
    torch = (MachineInfo.read().versions.get("torch") or "").partition("+")[0]
    newest = list(RELEASES.values())[-1]
    return RELEASES.get(torch, newest).libtpu[-1]


def find_libtpu(version: str | None = None, *, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of a version of libtpu that `fetch_libtpu` downloaded or that is installed.

    Args:
        version, environ: as in `fetch_libtpu`.

    Raises:
        LibtpuNotFoundError: this version is not on this machine.
        ValueError: `version` is not a version.
    """
    version = _checked(version)
    kept = _place(version, environ)
    if kept.is_file():
        return kept
    if installed := _installed(version):
        return installed
    call = f'tpukit.preflight.fetch_libtpu("{version}")'
    raise LibtpuNotFoundError(
        f"the TPU's compiler, libtpu {version}, is not on this machine",
        found=f"no {kept}, and no such version installed",
        fix=f"download it once, 130 to 150 MB: {call}",
    )


def fetch_libtpu(version: str | None = None, *, environ: Mapping[str, str] = os.environ) -> Path:
    """Download libtpu from the package index without installing it, and return its path.

    If this machine has the version already, nothing is downloaded. The file is in `tpukit/libtpu`
    in the user's cache folder; you may remove that folder at any time.

    Args:
        version: the version of libtpu: "0.0.17" for Kaggle, "0.0.21.1" for Colab; None for the
            version that belongs to this machine's torch.
        environ: the environment variables, which determine the cache folder and pip's settings.

    Raises:
        LibtpuNotFoundError: libtpu cannot be downloaded, or the disk is too small.
        ValueError: `version` is not a version number.
    """
    version = _checked(version)
    try:
        return find_libtpu(version, environ=environ)
    except LibtpuNotFoundError:
        pass
    kept = _place(version, environ)
    reassurance = "nothing is installed, the image stays as it is"
    print(f"fetching libtpu {version} (130 to 150 MB) into {kept.parent}; {reassurance}")
    versions = kept.parent.parent
    versions.mkdir(mode=0o700, exist_ok=True)
    _check_space(version, versions)
    with tempfile.TemporaryDirectory(dir=versions, prefix="fetching-") as name:
        folder = Path(name)
        part = folder / "libtpu.so"
        _extract(_download(version, folder, environ), part)
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        os.replace(part, kept)  # so that the file is either complete or absent
    return kept


def _check_space(version: str, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _NEEDED:
        raise LibtpuNotFoundError(
            f"there is no room for libtpu {version}",
            found=f"{human_size(free)} free in {folder}, but libtpu needs {human_size(_NEEDED)}",
            fix="delete files, or set XDG_CACHE_HOME to a folder on another disk",
        )


def _extract(wheel: Path, target: Path) -> None:
    name = "libtpu/libtpu.so"
    with zipfile.ZipFile(wheel) as archive, archive.open(name) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file, 2**24)


def _checked(version: str | None) -> str:
    if version is None:
        return platform_version()
    if not re.fullmatch(r"\d+(\.\d+)+", str(version)):
        fact = f'the version of libtpu must have a form such as "0.0.17", got {version!r}'
        raise InvalidValueError(fact, fix="pass None: the version of this machine")
    return version


def _place(version: str, environ: Mapping[str, str]) -> Path:
    return cache_folder(environ) / "libtpu" / version / "libtpu.so"


def _installed(version: str) -> Path | None:
    """Return the library of the installed package if it has this version; else None.

    The package is not imported, because that would set environment variables and load the library.
    """
    try:
        installed = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None
    package = importlib.util.find_spec("libtpu")
    if installed != version or package is None or not package.origin:
        return None
    file = Path(package.origin).parent / "libtpu.so"
    return file if file.is_file() else None


def _download(version: str, folder: Path, environ: Mapping[str, str]) -> Path:
    """Download the wheel with pip, which uses the user's package index; return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet"]
    command += ["--disable-pip-version-check", "--no-cache-dir", *_WHEEL]
    command += ["--dest", str(folder), f"libtpu=={version}"]
    pip = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        env=dict(environ),
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if pip.returncode == 0 and wheels:
        return wheels[0]
    # pip's last line has the reason.
    printed = [line for line in pip.stderr.splitlines() if line.strip()]
    printed = printed or ["it printed nothing"]
    place = _place(version, environ).parent
    raise LibtpuNotFoundError(
        f"libtpu {version} cannot be fetched",
        found=f"pip ended with status {pip.returncode}: {printed[-1].strip()[:300]}",
        fix=f"turn the internet on (Kaggle: Settings, Internet), or copy libtpu.so into {place}",
    )
