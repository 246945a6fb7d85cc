"""Run tests and test data of other projects against tpukit, and print a table with a row per suite.

    python tests/judges/table.py [--only WORD]

`make judges` runs it in an environment that has the packages. Nothing of other projects is kept in
this repository: it comes from the package index, or from a checkout at the tag of the installed
version. A test that asks for something that tpukit does not offer is counted as "not offered", and
its reason is printed. The last line is JSON; the exit status is 0 if nothing failed.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EVERY_TEST = "judges or not judges"
# By the file of a suite, the packages whose programs, data or answers it uses.
SUITES = {
    "test_scikit_learn.py": ("scikit-learn", "scipy"),
    "test_torchmetrics.py": ("torchmetrics",),
    "test_pillow.py": ("pillow",),
    "test_pydicom.py": ("pydicom", "pydicom-data", "simpleitk"),
    "test_transformers.py": ("transformers",),
    "test_timm.py": ("timm",),
    "test_accelerate.py": ("accelerate",),
    "test_torch_xla.py": ("torch_xla",),
    "test_lightning.py": ("lightning",),
    "test_tfrecord.py": ("tensorflow-cpu", "tfrecord"),
}


@dataclass
class Outcome:
    """The results of a suite."""

    seconds: float = 0.0
    counts: Counter = field(default_factory=Counter)  # of "passed", "failed", "not offered"
    reasons: Counter = field(default_factory=Counter)  # why tests are not offered
    failures: list[str] = field(default_factory=list)


def run(file: str, report: Path) -> Outcome:
    """Run the tests of a suite, and return their results."""
    command = [sys.executable, "-m", "pytest", HERE / file, "-q", "-m", EVERY_TEST]
    command += [f"--junitxml={report}"]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    outcome = read(report) if report.exists() else Outcome()
    outcome.seconds = time.monotonic() - began
    if outcome.failures or not outcome.counts:
        print(done.stdout)
    if not outcome.counts:
        outcome.counts["failed"] = 1
        outcome.failures.append(f"{file}: pytest ended with {done.returncode}")
    return outcome


def read(report: Path) -> Outcome:
    """Return the results in a report of pytest."""
    outcome = Outcome()
    for case in ET.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.counts["failed"] += 1
            outcome.failures.append(case.get("name"))
        elif skipped is not None:
            outcome.counts["not offered"] += 1
            outcome.reasons[skipped.get("message").removeprefix("not offered: ")] += 1
        else:
            outcome.counts["passed"] += 1
    return outcome


def name_of(packages: tuple[str, ...]) -> str:
    """Return packages with their versions: "scikit-learn 1.9.1, scipy 1.17.1"."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)


def print_table(outcomes: dict[str, Outcome]) -> None:
    print(f"\n{'suite':<52}{'passed':>8}{'failed':>8}{'not offered':>13}{'seconds':>9}")
    for suite, outcome in outcomes.items():
        counts = outcome.counts
        print(
            f"{suite:<52}{counts['passed']:>8}{counts['failed']:>8}"
            f"{counts['not offered']:>13}{outcome.seconds:>9.0f}"
        )
    for suite, outcome in outcomes.items():
        for reason, count in outcome.reasons.items():
            print(f"{suite}: {count} not offered: {reason}")
        for failure in outcome.failures:
            print(f"{suite}: failed: {failure}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run the suites whose file has this word")
    only = parser.parse_args().only
    files = [file for file in SUITES if only in file]
    # Two suites at a time on two processors, because their processes wait for each other a lot.
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda file: run(file, Path(folder) / f"{file}.xml"), files)
        outcomes = {
            name_of(SUITES[file]): outcome for file, outcome in zip(files, found, strict=True)
        }
    print_table(outcomes)
    total = Counter()
    for outcome in outcomes.values():
        total += outcome.counts
    numbers = {name: total[name] for name in ("passed", "failed", "not offered")}
    names = {name.replace(" ", "_"): number for name, number in numbers.items()}
    print(json.dumps({"suites": len(outcomes), **names}))
    return int(total["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
