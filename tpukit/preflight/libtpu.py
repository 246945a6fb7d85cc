"""The TPU's compiler, libtpu: which version a platform has, and a copy of it in a folder of its own."""

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

from tpukit.essentials.machine import RELEASES, Host
from tpukit.essentials.show import WrongValue, human_size
from tpukit.preflight.recording import NoPreflight
from tpukit.standin import cache_folder

# The library does not depend on Python, though its newer wheels name one.
_WHEEL = ("--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_31_x86_64", "--no-deps")
_NEEDED = 560 * 2**20  # bytes: the wheel and what is taken out of it, for a moment both


class NoLibtpu(NoPreflight):
    """The TPU's compiler is not on this machine, or cannot be fetched."""


def platform_version() -> str:
    """Return the version of libtpu for this machine's torch: Kaggle's with torch 2.8, Colab's with 2.9."""
    torch = (Host.read().versions.get("torch") or "").partition("+")[0]
    newest = list(RELEASES.values())[-1]
    return RELEASES.get(torch, newest).libtpu[-1]


def find_libtpu(version: str | None = None, *, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file of libtpu in that version: the image's own, or the copy that `fetch_libtpu` made.

    Args:
        version, environ: as in `fetch_libtpu`.

    Raises:
        NoLibtpu: there is none.
        ValueError: `version` is no version.
    """
    version = _checked(version)
    kept = _place(version, environ)
    if kept.is_file():
        return kept
    if installed := _installed(version):
        return installed
    raise NoLibtpu(
        f"the TPU's compiler, libtpu {version}, is not on this machine",
        found=f"no {kept}, and no such version installed",
        fix=f'tpukit.preflight.fetch_libtpu("{version}"), which needs the internet once: 130 to 150 MB',
    )


def fetch_libtpu(version: str | None = None, *, environ: Mapping[str, str] = os.environ) -> Path:
    """Download libtpu from the package index into a folder of its own, and return its file; nothing is installed.

    What is there is not fetched again. The folder is `tpukit/libtpu` in the user's cache folder; removing it is safe.

    Args:
        version: such as "0.0.17", Kaggle's, or "0.0.21.1", Colab's; None for that of this machine's torch.
        environ: for the cache folder, and pip's own variables.

    Raises:
        NoLibtpu: it cannot be downloaded, or there is no room for it.
        ValueError: `version` is no version.
    """
    version = _checked(version)
    try:
        return find_libtpu(version, environ=environ)
    except NoLibtpu:
        pass
    kept = _place(version, environ)
    print(
        f"fetching libtpu {version} (130 to 150 MB) into {kept.parent}; nothing is installed, the image stays as it is"
    )
    kept.parent.parent.mkdir(mode=0o700, exist_ok=True)
    free = shutil.disk_usage(kept.parent.parent).free
    if free < _NEEDED:
        raise NoLibtpu(
            f"there is no room for libtpu {version}",
            found=f"{human_size(free)} free in {kept.parent.parent}, and it takes {human_size(_NEEDED)}",
            fix="free some, or set XDG_CACHE_HOME to a folder on another disk",
        )
    with tempfile.TemporaryDirectory(dir=kept.parent.parent, prefix="fetching-") as folder:
        wheel = _download(version, Path(folder), environ)
        part = Path(folder) / "libtpu.so"
        with zipfile.ZipFile(wheel) as archive, archive.open("libtpu/libtpu.so") as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, 2**24)
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        os.replace(part, kept)  # whole or not there
    return kept


def _checked(version: str | None) -> str:
    if version is None:
        return platform_version()
    if not re.fullmatch(r"\d+(\.\d+)+", str(version)):
        raise WrongValue(f'a version of libtpu is such as "0.0.17", got {version!r}', fix="None for this machine's own")
    return version


def _place(version: str, environ: Mapping[str, str]) -> Path:
    return cache_folder(environ) / "libtpu" / version / "libtpu.so"


def _installed(version: str) -> Path | None:
    try:
        if importlib.metadata.version("libtpu") != version:
            return None
    except importlib.metadata.PackageNotFoundError:
        return None
    package = importlib.util.find_spec("libtpu")  # not imported: that would set variables
    file = Path(package.origin).parent / "libtpu.so" if package and package.origin else None
    return file if file and file.is_file() else None


def _download(version: str, folder: Path, environ: Mapping[str, str]) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    command += [*_WHEEL, "--dest", str(folder), f"libtpu=={version}"]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", env=dict(environ), check=False)
    wheels = list(folder.glob("*.whl"))
    if ended.returncode == 0 and wheels:
        return wheels[0]
    said = [line for line in ended.stderr.splitlines() if line.strip()] or ["it said nothing"]
    raise NoLibtpu(
        f"libtpu {version} cannot be fetched",
        found=f"pip ended with status {ended.returncode}: {said[-1].strip()[:300]}",
        fix=(
            "turn the internet on (Kaggle: Settings, Internet), or put the libtpu.so of that version into "
            f"{_place(version, environ).parent}"
        ),
    )
