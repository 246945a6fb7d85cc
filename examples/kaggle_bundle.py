"""Make a folder to upload as a Kaggle dataset, for a notebook without internet.

    python examples/kaggle_bundle.py runs/exams/runs/06 build/kaggle-bundle

The folder holds tpukit, the networks, and wheels for the Python of Kaggle's TPU image. It has only
the packages that the image lacks; the image's torch is not replaced.
"""

import argparse
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = "3.12"  # of Kaggle's TPU image
# The image lacks these: packages of requirements.txt that submission.py uses, and those that read
# DICOM files, compressed or not.
PACKAGES = ("array_record>=0.8.3", "simplejpeg>=1.8", "pydicom>=3.0", "python-gdcm>=3.0.24")
KEPT = ("numpy",)  # the image's own, because its other packages are built for that version
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
NETWORKS = {
    "slices.pt": "slices/best.pt",
    "exams.pt": "exams/best.pt",
    "settings.json": "settings.json",
}

OWN_NAMES = {
    "wheels",
    "networks",
    *[f"networks/{name}" for name in NETWORKS],
    "submission.py",
    "submission.ipynb",
    "dataset-metadata.json",
}

SLUG = "rsna-str-pulmonary-embolism-detection"

NOTEBOOK = (
    (
        "markdown",
        "# Pulmonary embolism: a submission\n\nSettings: accelerator *TPU*, internet *off*. "
        "Inputs: "
        "the competition, and this dataset. The first cell installs tpukit from the dataset; the "
        "second answers `test.csv`.",
    ),
    (
        "code",
        # Two and three levels deep, no deeper: the competition's folders hold 1.8 million files.
        "import pathlib\n\n"
        'inputs = pathlib.Path("/kaggle/input")\n'
        'found = [*inputs.glob("*/submission.py"), *inputs.glob("datasets/*/*/submission.py")]\n'
        'found = [file for file in found if (file.parent / "networks/settings.json").is_file()]\n'
        "if len(found) > 1:  # code of another dataset must not run\n"
        '    raise FileExistsError(f"several bundles, detach all but one: {found}")\n'
        "if not found:\n"
        '    raise FileNotFoundError("no submission.py in /kaggle/input: '
        'Add Input > Datasets > your tpukit-bundle")\n'
        "bundle = found[0].parent\n"
        "%pip install -q --no-index --no-deps --find-links {bundle}/wheels tpukit\n"
        "%pip install -q --no-index --find-links {bundle}/wheels "
        + " ".join(p.partition(">")[0] for p in PACKAGES),
    ),
    (
        "code",
        f'slug = "{SLUG}"\n'
        'found = [place / slug for place in (inputs / "competitions", inputs)]\n'
        'found = [folder for folder in found if (folder / "test.csv").is_file()]\n'
        "if not found:\n"
        '    raise FileNotFoundError(f"no test.csv of {slug} in /kaggle/input: '
        'Add Input > Competitions > {slug}")\n'
        "data = found[0]\n"
        "!python {bundle}/submission.py --table {data}/test.csv --images {data}/test "
        "--networks {bundle}/networks --max-time 8h",
    ),
    ("code", "!head -3 submission.csv; head -5 submission-report.csv"),
)


def main() -> int:
    """Make the folder, and print what is in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run_path of notebook 06, after it ran")
    parser.add_argument(
        "to", type=Path, help="the folder to make; an earlier bundle there is replaced"
    )
    parser.add_argument(
        "--python",
        default=PYTHON,
        help=f"of the machine that installs it (default: {PYTHON}, Kaggle's)",
    )
    options = parser.parse_args()
    missing = [name for name in NETWORKS.values() if not (options.run / name).is_file()]
    if missing:
        print(
            f"there is no {missing[0]} in {options.run}\n"
            "  fix: `make exams`, or run notebook 06: it writes them"
        )
        return 1
    known = set(runpy.run_path(str(ROOT / "examples" / "submission.py"))["SETTINGS"])
    other = known ^ json.loads((options.run / "settings.json").read_text()).keys()
    if other:
        print(
            f"{options.run}/settings.json is not of this version of notebook 06: "
            f"{', '.join(sorted(other))}\n  fix: run it again"
        )
        return 1
    other = not_of_a_bundle(options.to)
    if other:
        print(
            f"{options.to} is not a bundle: it holds {other}\n"
            "  fix: name another folder, such as build/kaggle-bundle"
        )
        return 1
    shutil.rmtree(options.to, ignore_errors=True)
    (options.to / "networks").mkdir(parents=True)
    for name, source in NETWORKS.items():
        shutil.copy(options.run / source, options.to / "networks" / name)
    shutil.copy(ROOT / "examples" / "submission.py", options.to)
    wheels = options.to / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([sys.executable, ROOT / "tools" / "wheel.py", wheels], check=True)
    # pip downloads for another machine only if it may not build anything.
    only = ["--only-binary=:all:", f"--python-version={options.python}", "--implementation=cp"]
    only += [f"--platform={platform}" for platform in PLATFORMS]
    subprocess.run([*pip, "download", "--quiet", "--dest", wheels, *only, *PACKAGES], check=True)
    for kept in KEPT:
        for wheel in wheels.glob(f"{kept}-*.whl"):
            wheel.unlink()
    (options.to / "submission.ipynb").write_text(json.dumps(notebook(), indent=1) + "\n")
    metadata = {
        "title": "tpukit-bundle",
        "id": "USERNAME/tpukit-bundle",
        "licenses": [{"name": "apache-2.0"}],
    }
    (options.to / "dataset-metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
    print_what_to_do(options.to)
    return 0


def not_of_a_bundle(folder: Path) -> str:
    """Return the name of a file that no bundle has; "" for a bundle or an empty folder."""
    if folder.is_symlink() or folder.is_file():
        return folder.name
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_wheel = path.parent == folder / "wheels" and path.suffix == ".whl"
        if name not in OWN_NAMES and not is_wheel:
            return name
    return ""


def notebook() -> dict:
    """Return the notebook that is submitted, in Jupyter's format."""
    cells = []
    for number, (kind, source) in enumerate(NOTEBOOK):
        cell = {
            "cell_type": kind,
            "id": f"submission-{number}",
            "metadata": {},
            "source": source.splitlines(True),
        }
        if kind == "code":
            cell |= {"outputs": [], "execution_count": None}
        cells.append(cell)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def print_what_to_do(folder: Path) -> None:
    """Print the files of the folder, and the commands that upload it to Kaggle."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in files:
        print(f"{path.stat().st_size / 1e6:8.1f} MB  {path.relative_to(folder)}")
    print(f"{sum(path.stat().st_size for path in files) / 1e6:8.1f} MB  in {folder}")
    print(
        "Put your user name into dataset-metadata.json, then:\n"
        f"  kaggle datasets create --dir-mode zip -p {folder}\n"
        "and on Kaggle: open submission.ipynb, attach the dataset and the competition, "
        "internet off, submit."
    )


if __name__ == "__main__":
    sys.exit(main())
