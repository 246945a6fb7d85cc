"""Build the wheel of tpukit.

    python tools/wheel.py dist

It also has the files outside of the package that notebooks 07, 08 and 15 read in a clone:
tpukit/notebooks.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
BESIDE = (
    "notebooks/00_quickstart.ipynb",
    "notebooks/flowers.py",
    "notebooks/hospital.py",
)
SETUPTOOLS = 77  # what pyproject.toml asks for; without it pip fetches one


def build(to: Path) -> Path:
    """Build the wheel into a folder, in place of other versions; return its path."""
    for old in to.glob("tpukit-*.whl"):
        old.unlink()
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "wheel",
        "--quiet",
        "--no-deps",
    ]
    # a build leaves files in the source folder, which would go into later wheels
    with tempfile.TemporaryDirectory() as copy:
        for name in ("tpukit", "pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
            source = ROOT / name
            target = Path(copy) / name
            traces = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target, ignore=traces) if source.is_dir() else shutil.copy(
                source, target
            )
        for name in BESIDE:
            (Path(copy, "tpukit") / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(copy, "tpukit") / name)
        if has_setuptools():
            pip.append("--no-build-isolation")
        subprocess.run([*pip, "--wheel-dir", to, copy], check=True)
    (wheel,) = to.glob("tpukit-*.whl")
    return wheel


def has_setuptools() -> bool:
    """Return whether this Python has what builds a wheel, so that nothing is fetched."""
    try:
        return int(metadata.version("setuptools").partition(".")[0]) >= SETUPTOOLS
    except metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    if importlib.util.find_spec("pip") is None:
        fix = "`make test` makes .venv, whose Python has pip"
        fact = "pip builds the wheel, and this Python has none"
        sys.exit(f"{fact}\n  found: {sys.executable}\n  fix:   {fix}")
    print(build(Path(sys.argv[1])))
