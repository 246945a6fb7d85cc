"""Fetch the tests of a project from git, at the tag of the installed version."""

import os
import subprocess
from pathlib import Path

import pytest

from tpukit.simulator import build


def fetch(folder: Path, *, name: str, address: str, tag: str) -> Path:
    """Clone a tag into a folder, and return the folder; skip the test if that is impossible.

    Args:
        folder: an empty folder.
        name: of the project. A variable such as TORCH_XLA_SOURCE may name a clone in place of `address`.
        address: of the repository.
        tag: to check out.
    """
    reason = build.why_not()
    if reason or os.geteuid() != 0:
        pytest.skip(f"not offered: {reason or 'the simulated chips of these tests need root'}")
    source = os.environ.get(f"{name.upper()}_SOURCE", address)
    command = ["git", "clone", "--quiet", "--depth", "1", "--branch", tag, source, folder]
    # The tests may not wait for a password.
    environ = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        problem = done.stderr.strip().splitlines()[-1]
        pytest.skip(f"not offered: the package index has no source of {name}'s tests; {problem}")
    return folder
