"""Make a wheel of tpukit from its own files, for a job.

A job installs this wheel, because the package "tpukit" on a package index may be another project.
"""

import base64
import functools
import hashlib
import io
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

# From sys.modules, because subpackages must not import tpukit itself, which imports them.
_VERSION = sys.modules["tpukit"].__version__
_PACKAGE = Path(__file__).parents[1]
NAME = f"tpukit-{_VERSION}-py3-none-any.whl"
_WHEEL = "Wheel-Version: 1.0\nGenerator: tpukit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@functools.lru_cache(1)
def tpukit_wheel(package: Path = _PACKAGE) -> bytes:
    """Return the bytes of the wheel; the same files give the same bytes.

    The files are read only once per process. No build tool is used, because it would have to be
    downloaded.

    Args:
        package: the folder of tpukit.
    """
    about = f"tpukit-{_VERSION}.dist-info"
    lines = ["Metadata-Version: 2.1", "Name: tpukit", f"Version: {_VERSION}", "Provides-Extra: tpu"]
    lines += [f"Requires-Dist: {requirement}" for requirement in _requirements(package)]
    files = {
        f"{about}/METADATA": ("\n".join(lines) + "\n").encode(),
        f"{about}/WHEEL": _WHEEL.encode(),
    }
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            files[f"tpukit/{path.relative_to(package).as_posix()}"] = path.read_bytes()
    # RECORD is the list of all files with their checksums; its own line has none.
    record = [f"{path},{_digest(content)},{len(content)}" for path, content in files.items()]
    files[f"{about}/RECORD"] = "\n".join([*record, f"{about}/RECORD,,", ""]).encode()
    return zipped(files)


def zipped(files: dict[str, bytes]) -> bytes:
    """Return files as a zip archive without time stamps; equal files give equal bytes."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for path, content in files.items():
            about = zipfile.ZipInfo(path)
            archive.writestr(about, content, zipfile.ZIP_DEFLATED, compresslevel=9)
    return written.getvalue()


def _requirements(package: Path) -> list[str]:
    """Return the requirements of tpukit and of its extra "tpu".

    In a clone of the repository, they are in requirements.txt and pyproject.toml. Otherwise they
    are in the metadata of the installed tpukit.
    """
    project = package.parent / "pyproject.toml"
    if not project.is_file():
        installed = metadata.requires("tpukit") or ()
        return [one for one in installed if "extra ==" not in one or '"tpu"' in one]
    lines = (package.parent / "requirements.txt").read_text(encoding="utf-8").splitlines()
    always = [line.partition("  #")[0].strip() for line in lines if line and line[0] != "#"]
    settings = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    (libtpu,) = settings["optional-dependencies"]["tpu"]
    name, _, marker = libtpu.partition(";")
    return [*always, f'{name.strip()}; ({marker.strip()}) and extra == "tpu"']


def _digest(content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return "sha256=" + digest.decode().rstrip("=")
