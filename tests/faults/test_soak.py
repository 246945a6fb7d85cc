"""A short run of `make soak`: launches in one kernel, some of which fail, leave nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fcntl", reason="workers are forked")
SOAK = Path(__file__).with_name("soak.py")


def test_forty_launches_leave_memory_files_processes_and_threads_as_they_were():
    command = [sys.executable, str(SOAK), "--launches", "40"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["failed_on_purpose"] == 8
