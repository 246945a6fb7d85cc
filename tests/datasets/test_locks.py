"""locks: one process at a time in a folder; those of a run and of its checkpoints are tested where they are used."""

import subprocess
import sys
import textwrap
from pathlib import Path

from tpukit.datasets.locks import lock_folder

KIT = Path(__file__).parents[2]


def test_one_process_at_a_time_is_alone_in_a_folder(tmp_path):
    code = f"""
        import os, time
        from tpukit.datasets.locks import lock_folder
        for _ in range(5):
            with lock_folder({str(tmp_path)!r}):
                os.mkdir({str(tmp_path / "held")!r})  # raises if another one is in
                time.sleep(0.02)
                os.rmdir({str(tmp_path / "held")!r})
    """
    started = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=KIT) for _ in range(3)
    ]
    assert [process.wait(600) for process in started] == [0, 0, 0]


def test_the_lock_of_a_killed_process_is_open(tmp_path):
    code = (
        "from tpukit.datasets.locks import lock_folder\n"
        f"with lock_folder({str(tmp_path)!r}): print('in', flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=KIT, **pipes) as process:
        assert process.stdout.readline() == b"in\n"
        process.kill()
    with lock_folder(tmp_path):
        pass
