"""Lightning's own tests that need a TPU, at the tag of the installed version, on four simulated chips.

The source distributions of Lightning have no tests. So they come from git: from the address below, or
from a clone that LIGHTNING_SOURCE names. If both are out of reach, nothing of this suite is offered.
"""

import importlib.metadata

import pytest
from judges.checkout import fetch
from simulator import upstream

pytestmark = [pytest.mark.judges, pytest.mark.xla]

TIME_LIMIT = 600  # seconds, for hangs; the longest file takes a minute
# In these files, the tests that Lightning marks with `RunIf(tpu=True)`.
FILES = [
    "tests_pytorch/accelerators/test_xla.py",
    "tests_pytorch/plugins/precision/test_xla.py",
    "tests_fabric/accelerators/test_xla.py",
    "tests_fabric/plugins/environments/test_xla.py",
    "tests_fabric/strategies/test_xla.py",
]
# Lightning runs these in a process of their own.
ALONE = [
    "tests_pytorch/accelerators/test_xla.py::test_resume_training_on_cpu",
    "tests_pytorch/strategies/test_xla.py::test_xla_strategy_debug_state",
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Clone the tag of the installed Lightning, and return the folder of its tests."""
    folder = tmp_path_factory.mktemp("lightning")
    tag = importlib.metadata.version("lightning")
    address = "https://github.com/Lightning-AI/pytorch-lightning"
    fetch(folder, name="lightning", address=address, tag=tag)
    return folder / "tests"


def run(checkout, test: str, **environ: str) -> str:
    # Forked processes hang in PyTorch's operations on the CPU if they have several threads.
    environ |= {"PL_RUN_TPU_TESTS": "1", "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    options = {"cwd": checkout, "timeout": TIME_LIMIT, "capture_output": True, "text": True}
    done = upstream.run_python(
        "-m", "pytest", "-rs", "--color=no", test, environ=environ, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("file", FILES)
def test_the_tests_of_a_file_that_need_a_tpu(file, checkout):
    # A test that runs alone is skipped here.
    assert " passed" in run(checkout, file)


@pytest.mark.parametrize("test", ALONE)
def test_a_test_that_needs_a_tpu_and_runs_alone(test, checkout):
    assert "1 passed" in run(checkout, test, PL_RUN_STANDALONE_TESTS="1")
