"""A short run of `make fuzz`: damaged, odd and lying files give errors, and no wrong pixels or labels."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchvision")
pytest.importorskip("pydicom")
pytest.importorskip("array_record")
FUZZ = Path(__file__).with_name("fuzz.py")


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory as Linux has them")
def test_hundreds_of_damaged_files_give_no_wrong_pixels_and_none_hangs(tmp_path):
    command = [sys.executable, str(FUZZ), "--files", "180", "--meanings", "24", "--seed", "1"]
    ended = subprocess.run(
        [*command, "--keep", str(tmp_path)], capture_output=True, text=True, check=False, timeout=800
    )
    last = {"files": 180, "meanings": 24, "wrong": 0, "hung": 0}
    assert json.loads(ended.stdout.splitlines()[-1]) == last, ended.stdout + ended.stderr
