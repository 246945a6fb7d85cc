"""Rebuild Colab's and Kaggle's TPU images, install tpukit there as their users would, and run the test suite.

The images are rebuilt from the lists beside this file, on the CPU. Three times the list of packages is
compared with the image's own: after a notebook's bootstrap cell, after `pip install .`, and after the packages that
only the tests need. Nothing that the image has may have another version or be gone. The last line is JSON; the exit
status is 0 when nothing failed and nothing changed. Takes about two minutes a platform besides the tests, nearly all of
it for torch (7 GB a platform on disk).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Colab offers its past runtimes, too: Runtime > Change runtime type > Runtime version.
PYTHON = {"colab": "3.13", "colab-2026.07": "3.12", "kaggle": "3.12"}
STREAMS = re.search(r"^streams := (.+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()


@dataclass
class Outcome:
    """What happened on one platform."""

    packages: int = 0
    added: dict[str, list[str]] = field(default_factory=dict)  # by step
    changed: dict[str, str] = field(default_factory=dict)  # package: "was -> is"
    tests: str = "not run"
    notebooks: int = 0
    failure: str = ""


class StepFailed(Exception):
    """A command of a step ended with an error; its last lines are the message."""


def main() -> int:
    """Rebuild what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PYTHON, help="this platform alone")
    parser.add_argument(
        "--no-tests", action="store_true", help="build and install, compare, and stop there"
    )
    options = parser.parse_args()

    outcomes = {}
    for name in [options.only] if options.only else PYTHON:
        outcomes[name] = outcome = Outcome()
        try:
            check(name, outcome, tests=not options.no_tests)
        except StepFailed as failed:
            outcome.failure = str(failed)
            print(f"{name}: FAILED: {failed}", flush=True)
    print_table(outcomes)
    failed = sum(bool(outcome.failure or outcome.changed) for outcome in outcomes.values())
    changed = sum(len(outcome.changed) for outcome in outcomes.values())
    run = sum(outcome.notebooks for outcome in outcomes.values())
    counts = {
        "platforms": len(outcomes),
        "notebooks_run": run,
        "failed": failed,
        "changed_packages": changed,
    }
    print(json.dumps(counts))
    return int(failed > 0)


def check(name: str, outcome: Outcome, *, tests: bool) -> None:
    """Take one platform through all steps, writing into `outcome` as they end."""
    folder = ROOT / ".platforms" / name
    python = folder / "bin" / "python"
    uv = [sys.executable, "-m", "uv"]
    step(
        name,
        f"Python {PYTHON[name]}",
        [*uv, "venv", "--clear", "--seed", "--python", interpreter(PYTHON[name]), folder],
    )
    image = HERE / f"{name}-tpu.txt"
    # Every module is imported many times over by the tests' subprocesses: compile once.
    install = [*uv, "pip", "install", "--python", python, "--compile-bytecode"]
    step(name, "the image's packages (torch is several GB)", [*install, "--requirement", image])
    before = freeze(python)
    outcome.packages = len(before)
    frozen = ROOT / ".platforms" / f"{name}-frozen.txt"
    frozen.write_text("".join(f"{package}=={version}\n" for package, version in before.items()))

    seen = before

    def compare_with_image(what: str) -> None:
        nonlocal seen
        after = freeze(python)
        outcome.added[what] = sorted(
            f"{package} {after[package]}" for package in after.keys() - seen.keys()
        )
        outcome.changed |= changes(before, after)
        seen = after

    # A copy, because building leaves its traces beside the source, and a fresh clone has none.
    source = ROOT / ".platforms" / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT, source, ignore=left_out)
    # The bootstrap cell of a notebook that is alone with a wheel.
    with tempfile.TemporaryDirectory() as empty:
        step(name, "tpukit's wheel", [sys.executable, source / "tools" / "wheel.py", empty])
        step(
            name,
            "a notebook's bootstrap cell",
            [python, "-m", "IPython", "-c", bootstrap_cell()],
            cwd=Path(empty),
        )
    compare_with_image("bootstrap")
    step(name, "pip install .", [python, "-m", "pip", "install", "--quiet", source])
    compare_with_image("pip install .")
    step(name, "what the tests need", [*install, "--constraint", frozen, f"{source}[test]"])
    compare_with_image("tests")
    if tests:
        started = time.monotonic()
        cases = folder / "tests.xml"
        report = step(
            name, "the tests", [python, "-m", "pytest", *STREAMS, f"--junitxml={cases}"], echo=True
        )
        outcome.notebooks = notebooks_run(cases)
        outcome.tests = f"{report.strip().splitlines()[-1]} ({time.monotonic() - started:.0f} s)"


def left_out(folder: str, names: list[str]) -> set[str]:
    """Return what of a folder a fresh clone would not have; tpukit/data is no folder of images."""
    patterns = [
        ".*",
        "*.egg-info",
        "__pycache__",
        *(["runs", "data", "build"] if Path(folder) == ROOT else []),
    ]
    return shutil.ignore_patterns(*patterns)(folder, names)


def interpreter(version: str) -> str:
    """Return a Python of that version: one that runs from the path, else pyenv's, else the version for uv to fetch."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    on_path = shutil.which(f"python{version}")
    for candidate in [
        *([on_path] if on_path else []),
        *sorted(pyenv.glob(f"versions/{version}.*/bin/python")),
    ]:
        # pyenv's shim on the path ends with an error where no version of it is switched on
        if subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return str(candidate)
    return version


def changes(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """Return what became of the packages of `before` that are gone or have another version."""
    now = {package: after.get(package, "gone") for package in before}
    return {
        package: f"{version} -> {now[package]}"
        for package, version in before.items()
        if now[package] != version
    }


def freeze(python: Path) -> dict[str, str]:
    """Return the packages of that environment but tpukit itself, as {name: version}."""
    command = [sys.executable, "-m", "uv", "pip", "list", "--format=json", "--python", python]
    listed = subprocess.run(command, check=True, capture_output=True).stdout
    return {row["name"]: row["version"] for row in json.loads(listed) if row["name"] != "tpukit"}


def bootstrap_cell() -> str:
    """Return the first code cell of a notebook, which is the same in all of them."""
    notebook = json.loads(min((ROOT / "notebooks").glob("*.ipynb")).read_text())
    return next(
        "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"
    )


def step(name: str, what: str, command: list, *, cwd: Path = ROOT, echo: bool = False) -> str:
    """Run a command, say how long it took, and return what it printed; its end goes into the error if it fails."""
    started = time.monotonic()
    print(f"{name}: {what} ...", flush=True)
    # Settings of the environment that runs this script are not the platform's.
    environ = {
        key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")
    }
    lines = []
    command = [str(part) for part in command]
    with subprocess.Popen(
        command, cwd=cwd, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        for line in process.stdout:
            lines.append(line)
            if echo:
                print(f"{name}: {line}", end="", flush=True)
    if process.returncode:
        raise StepFailed(f"{what}: exit status {process.returncode}\n" + "".join(lines[-25:]))
    print(f"{name}: {what}: {time.monotonic() - started:.0f} s", flush=True)
    return "".join(lines)


def notebooks_run(report: Path) -> int:
    """Return how many notebooks ran from top to bottom, from pytest's report in XML."""
    cases = [
        case
        for case in ElementTree.parse(report).iter("testcase")
        if "test_it_runs_from_top" in case.get("name")
    ]
    return sum(
        not len(case) for case in cases
    )  # a case that failed or was skipped has an element that says so


def print_table(outcomes: dict[str, Outcome]) -> None:
    """Print what was seen on each platform, and what was added to it by what."""
    print(f"\n{'platform':<15}{'python':<8}{'packages':>9}{'changed':>9}  tests")
    for name, outcome in outcomes.items():
        tests = re.sub(
            r"\x1b\[\d+m|=+ ?",
            "",
            outcome.failure.splitlines()[0] if outcome.failure else outcome.tests,
        )
        print(f"{name:<15}{PYTHON[name]:<8}{outcome.packages:>9}{len(outcome.changed):>9}  {tests}")
    for name, outcome in outcomes.items():
        for what, packages in outcome.added.items():
            print(f"{name}, added by {what}: {', '.join(packages) or 'nothing'}")
        for package, change in outcome.changed.items():
            print(f"{name}, CHANGED: {package} {change}")


if __name__ == "__main__":
    sys.exit(main())
