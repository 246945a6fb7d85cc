"""Execute the TPU path on five simulated machines, with both versions of torch_xla; print a table.

    python tests/simulator/table.py [--only VERSION]

Runs with this interpreter, and with the other version in an environment made for it below .platforms, where the reports
stay as well: with --only the other version is counted from its last one. The last line is JSON; the exit status is 0
when nothing failed. Takes about twenty minutes on two processors.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))
from tpukit.essentials.environment.session import RELEASES  # noqa: E402
from tpukit.simulator import build, shapes  # noqa: E402

ELSEWHERE = "no machine of its own"


def python_with(version: str) -> str:
    """Return an interpreter with this torch and torch_xla, tpukit and the plugin; made where it is not this one."""
    if importlib.metadata.version("torch_xla") == version:
        return sys.executable
    folder = ROOT / ".platforms" / f"simulator-{version}"
    python = folder / "bin" / "python"
    uv = [sys.executable, "-m", "uv"]
    if not python.exists():
        subprocess.run(
            [*uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True
        )
    pair = [
        f"torch=={version}",
        f"torch_xla=={version}",
        f"torchvision=={RELEASES[version].torchvision}",
    ]
    # Compiled now: torch_xla 2.8 has escapes that Python warns of when it compiles them, and warnings are errors here.
    install = [*uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python)]
    subprocess.run([*install, *pair, "--editable", f"{ROOT}[test,simulator]"], check=True)
    return str(python)


def run(version: str, report: Path) -> None:
    """Run the whole suite with this version, and leave its report."""
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    everything = "every_machine or only_soak or not every_machine"
    subprocess.run(
        [
            python_with(version),
            "-m",
            "pytest",
            str(HERE),
            "-q",
            "-m",
            everything,
            f"--junitxml={report}",
        ],
        cwd=ROOT,
    )


def outcomes(report: Path) -> Counter:
    """Return how often each (machine, outcome) came."""
    found = Counter()
    for case in ET.parse(report).iter("testcase"):
        name = case.get("name")
        machine = next((machine for machine in shapes.SHAPES if machine in name), ELSEWHERE)
        kinds = {child.tag for child in case}
        state = (
            "failed"
            if kinds & {"failure", "error"}
            else "skipped"
            if "skipped" in kinds
            else "passed"
        )
        found[machine, state] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        choices=RELEASES,
        help="run this version; the other is counted from its last report",
    )
    only = parser.parse_args().only
    reason = build.why_not()
    if reason:
        print(f"the simulator cannot be had here: {reason}")
        return 1
    reports = {version: ROOT / ".platforms" / f"simulator-{version}.xml" for version in RELEASES}
    for version in [only] if only else reports:
        run(version, reports[version])
    found = {version: outcomes(report) for version, report in reports.items() if report.exists()}
    print(f"\n{'machine':<24}" + "".join(f"{'torch_xla ' + version:>28}" for version in found))
    for machine in [*shapes.SHAPES, ELSEWHERE]:
        cells = [
            ", ".join(
                f"{counts[machine, state]} {state}"
                for state in ("passed", "failed")
                if counts[machine, state]
            )
            for counts in found.values()
        ]
        print(f"{machine:<24}" + "".join(f"{cell or 'none':>28}" for cell in cells))
    total = Counter()
    for counts in found.values():
        for (_, state), count in counts.items():
            total[state] += count
    machines, versions = len(shapes.SHAPES), len(found)
    print(
        json.dumps(
            {
                "machines": machines,
                "versions": versions,
                "passed": total["passed"],
                "failed": total["failed"],
            }
        )
    )
    return total["failed"] > 0


if __name__ == "__main__":
    sys.exit(main())
