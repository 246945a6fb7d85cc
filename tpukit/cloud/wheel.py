"""This kit as a wheel, made from its files: a job brings it, since by its name an index may have anybody's."""

import base64
import functools
import hashlib
import io
import re
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

_VERSION = sys.modules["tpukit"].__version__  # no room imports the face
_KIT = Path(__file__).parents[1]
NAME = f"tpukit-{_VERSION}-py3-none-any.whl"
_WHEEL = "Wheel-Version: 1.0\nGenerator: tpukit\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@functools.lru_cache(1)
def tpukit_wheel(kit: Path = _KIT) -> bytes:
    """Return the wheel; the same files give the same bytes. Nothing is built, so that nothing is fetched for it."""
    about = f"tpukit-{_VERSION}.dist-info"
    head = [f"Metadata-Version: 2.1\nName: tpukit\nVersion: {_VERSION}\nProvides-Extra: tpu"]
    files = {
        f"{about}/METADATA": "\n".join(head + [f"Requires-Dist: {one}" for one in _requirements(kit)] + [""]).encode()
    }
    files[f"{about}/WHEEL"] = _WHEEL.encode()
    for path in sorted(kit.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            files[f"tpukit/{path.relative_to(kit).as_posix()}"] = path.read_bytes()
    record = [f"{path},{_digest(content)},{len(content)}" for path, content in files.items()]
    files[f"{about}/RECORD"] = "\n".join([*record, f"{about}/RECORD,,", ""]).encode()
    return zipped(files)


def zipped(files: dict[str, bytes]) -> bytes:
    """Return files as a zip, without the time of this moment."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for path, content in files.items():
            archive.writestr(zipfile.ZipInfo(path), content, zipfile.ZIP_DEFLATED, compresslevel=9)
    return written.getvalue()


def _requirements(kit: Path) -> list[str]:
    """Return what the kit requires: of a clone from its files, of an installed kit from its metadata."""
    project = kit.parent / "pyproject.toml"
    if not project.is_file():
        return [one for one in metadata.requires("tpukit") or () if not re.search("extra ==", one) or '"tpu"' in one]
    lines = (kit.parent / "requirements.txt").read_text(encoding="utf-8").splitlines()
    always = [line.partition("  #")[0].strip() for line in lines if line and line[0] != "#"]
    (libtpu,) = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]["tpu"]
    package, _, marker = libtpu.partition(";")
    return [*always, f'{package.strip()}; ({marker.strip()}) and extra == "tpu"']


def _digest(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
