"""Several streams of tests, and those that want the machine to themselves."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist", reason="several streams of tests need pytest-xdist")

TESTS = """
import time
import pytest

@pytest.mark.parametrize("number", range(4))
def test_something(number):
    began = time.time()
    time.sleep(0.15)
    with open({times!r}, "a") as file:
        print({alone!r}, began, time.time(), file=file)
"""
BYTECODE = """
import subprocess
import sys

def test_a_python_that_is_started_writes_bytecode():
    code = "import sys; print(sys.dont_write_bytecode)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\\n"
"""
FILES = {"test_a": False, "test_b": False, "test_c": True, "test_d": False, "test_e": True}


def run(folder, *options, **environ):
    """Run the tests of a folder as those of tpukit are run."""
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers = alone\n xla\n every_machine\n soak\n only_soak\n"
    )
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider"]
    environ = {**os.environ, **environ}
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=600
    )


def test_nothing_runs_beside_a_test_that_is_marked_alone_and_others_run_at_once(tmp_path):
    times = tmp_path / "times"
    for name, alone in FILES.items():
        text = TESTS.format(times=str(times), alone=alone)
        (tmp_path / f"{name}.py").write_text(text + "pytestmark = pytest.mark.alone\n" * alone)
    ended = run(tmp_path, "-n3", "--dist=loadfile")
    assert ended.returncode == 0, ended.stdout
    rows = [line.split() for line in times.read_text().splitlines()]
    assert len(rows) == 20
    together = 0
    for number, (alone, began, over) in enumerate(rows):
        for other_alone, other_began, other_over in rows[:number]:
            if float(began) < float(other_over) and float(other_began) < float(over):
                together += 1
                assert "True" not in (alone, other_alone)
    assert together


def test_what_is_imported_is_compiled_once_whatever_the_shell_says(tmp_path):
    (tmp_path / "test_a.py").write_text(BYTECODE)
    ended = run(tmp_path, "-n1", PYTHONDONTWRITEBYTECODE="1")
    assert ended.returncode == 0, ended.stdout
