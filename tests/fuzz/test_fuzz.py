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


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory as Linux has them")
def test_damaged_files_give_no_wrong_pixels_and_none_hangs(tmp_path, how_often):
    files, meanings = how_often(60, 240), how_often(5, 12)
    command = [
        sys.executable,
        str(FUZZ),
        "--files",
        str(files),
        "--meanings",
        str(meanings),
        "--layouts",
        "12",
        "--seed",
        "1",
    ]
    ended = subprocess.run(
        [*command, "--keep", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    last = {"files": files, "meanings": meanings, "layouts": 12, "wrong": 0, "hung": 0}
    assert json.loads(ended.stdout.splitlines()[-1]) == last, ended.stdout + ended.stderr
