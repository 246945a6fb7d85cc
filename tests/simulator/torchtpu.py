"""What `make torchtpu` runs beside torch_tpu: its tests, and seven notebooks unchanged; the last line is the result.

NOTEBOOKS="01 03" in the environment runs these alone, NOTEBOOKS=none none.
"""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tpukit.accelerators.torch_tpu import SEEN
from tpukit.simulator import SimulatedTorchTpuRuntime

ROOT = Path(__file__).parents[2]
TESTS = ("tests/simulator/test_torch_tpu_runtime.py", "tests/accelerators/test_torch_tpu.py")
NOTEBOOKS = ("01", "02", "04", "05", "06", "08", "09")


class Count:
    """How the tests ended, and the most processes of a launch on the simulator's chips."""

    def __init__(self):
        self.passed = self.failed = self.processes = 0
        laid_out = SimulatedTorchTpuRuntime.topology

        def topology(runtime, machine, cores):
            found = laid_out(runtime, machine, cores)
            self.processes = max(self.processes, found.processes)
            return found

        SimulatedTorchTpuRuntime.topology = topology

    def pytest_runtest_logreport(self, report):
        self.passed += report.when == "call" and report.passed
        self.failed += report.failed


def main() -> int:
    version = metadata.version("torch_tpu")
    if version != SEEN:
        print(
            f"torch_tpu {version}: tpukit was written for {SEEN}; what it has moved fails by name",
            flush=True,
        )
    count = Count()
    status = pytest.main(
        ["-o", "filterwarnings=", "-rs", *(str(ROOT / test) for test in TESTS)], plugins=[count]
    )
    wanted = os.environ.get("NOTEBOOKS", " ".join(NOTEBOOKS)).split()
    ran = 0
    for name in NOTEBOOKS:
        if name not in wanted:
            print(f"skipped: notebook {name}")
            continue
        program = [
            sys.executable,
            "-W",
            "ignore",
            str(ROOT / "tests/notebooks/on_torchtpu.py"),
            name,
        ]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        ended = subprocess.run(program, env={**os.environ, "PYTHONPATH": paths}, check=False)
        ran, count.failed = ran + (ended.returncode == 0), count.failed + (ended.returncode != 0)
    numbers = {
        "passed": count.passed,
        "failed": count.failed,
        "notebooks_run": ran,
        "processes": count.processes,
    }
    print(json.dumps({"version": version, **numbers}))
    return int(bool(count.failed or status not in (0, pytest.ExitCode.TESTS_FAILED)))


if __name__ == "__main__":
    sys.exit(main())
