"""While preflight looks at a function no file of the user's changes, whatever writes it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import preflight_workers as workers

import tpukit
from tpukit.preflight.recording import record
from tpukit.profiling import find_tpu
from tpukit.simulator import why_not

ROOT = Path(__file__).parents[2]

# Each is tried in a folder with the file "kept", which holds "mine", in one process.
WAYS = {
    "open": 'open("kept", "w")',
    "append": 'open("kept", "a")',
    "read and write": 'open("kept", "r+b")',
    "a new file": 'Path("new").write_text("x")',
    "os.open": 'os.open("kept", os.O_WRONLY | os.O_TRUNC)',
    "remove": 'os.remove("kept")',
    "rename": 'os.replace("kept", "other")',
    "from elsewhere": 'Path(tempfile.mkdtemp(), "x").write_text("x") and os.replace(tempfile.gettempdir(), "there")',
    "copy": 'shutil.copy(__import__("torch").__file__, "kept")',
    "rmtree": 'shutil.rmtree(".")',
    "folder": 'os.mkdir("folder")',
    "truncate": 'os.truncate("kept", 0)',
    "torch.save": 'torch.save({}, "kept")',
    "torch.save, by its own name": 'save({}, Path("kept"))',
    "torch.save, the old format": 'save({}, "kept", _use_new_zipfile_serialization=False)',
    "numpy": 'numpy.save("kept.npy", numpy.zeros(3))',
    "sqlite": 'sqlite3.connect("kept")',
    "a link": 'os.symlink("kept", "link")',
    "remove, by its folder's descriptor": 'os.remove("kept", dir_fd=os.open(".", os.O_RDONLY))',
    "a folder, by a descriptor": 'os.mkdir("folder", dir_fd=os.open(".", os.O_RDONLY))',
    "utime": 'os.utime("kept", (0, 0))',
    "out of the temporary folder, by a descriptor": (
        'Path(tempfile.gettempdir(), "x").write_text("x") and os.rename("x", "x", '
        'src_dir_fd=os.open(tempfile.gettempdir(), os.O_RDONLY), dst_dir_fd=os.open(".", os.O_RDONLY))'
    ),
}
ALLOWED = {
    "reading": 'Path("kept").read_text()',
    "a temporary file": 'tempfile.TemporaryFile().write(b"x")',
    "a temporary folder": 'torch.save({}, Path(tempfile.mkdtemp(), "weights.pt"))',
    "a folder that is there": 'Path(".").mkdir(exist_ok=True)',
    "nowhere": 'open(os.devnull, "w").write("x")',
    "the cache": 'Path(os.environ["XDG_CACHE_HOME"], "weights").write_text("x")',
    "its own temporary folder, deleted": (
        'shutil.rmtree(Path(shutil.copy("kept", tempfile.mkdtemp())).parent)'
    ),
    "a folder of folders, deleted": (
        'shutil.rmtree(Path(shutil.copytree(".", Path(tempfile.mkdtemp(), "copy"))).parent)'
    ),
    "a cache of Hugging Face": 'Path(os.environ["HF_HOME"], "weights").write_text("x")',
    "a cache of torch.hub": 'Path(os.environ["TORCH_HOME"], "weights").write_text("x")',
    "a cache of Kaggle": 'Path(os.environ["KAGGLEHUB_CACHE"], "weights").write_text("x")',
    "memory": 'sqlite3.connect(":memory:")',
    "a buffer": "torch.save({}, io.BytesIO())",
}
TRY = """
import io, json, os, shutil, sqlite3, sys, tempfile
from pathlib import Path
import numpy, torch
from torch import save
from tpukit.preflight.write_guard import guard_files
guard_files(Path(sys.argv[1]))
told = {}
for name, code in json.loads(sys.argv[2]).items():
    try:
        eval(compile(code, "cell 7", "eval"))
    except OSError as error:
        told[name] = f"{type(error).__name__}: {error}"
shell = os.system("(echo x > kept) 2>/dev/null")
print(json.dumps({"told": told, "shell": shell}))
"""


def test_no_way_of_writing_changes_a_file(tmp_path):
    user, temporary, cache = (tmp_path / name for name in ("user", "temporary", "cache"))
    for folder in (user, temporary, cache):
        folder.mkdir()
    (user / "kept").write_text("mine")
    environ = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)}
    for variable in ("HF_HOME", "TORCH_HOME", "KAGGLEHUB_CACHE"):
        environ[variable] = str(tmp_path / variable.lower())
    command = [sys.executable, "-c", TRY, str(temporary), json.dumps(WAYS | ALLOWED)]
    ran = subprocess.run(
        command, cwd=user, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert {
        name: "FileChangeError: a preflight does not let" in words
        for name, words in said["told"].items()
    } == dict.fromkeys(WAYS, True)
    # The user's line, also where a package such as NumPy writes.
    assert {words.split("found: ")[1][:8] for words in said["told"].values()} == {"cell 7:1"}
    assert (user / "kept").read_text() == "mine" or said[
        "shell"
    ] == 0  # a kernel without Landlock lets programs write
    assert [path.name for path in user.iterdir()] == ["kept"]


@pytest.mark.xla
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_weights_of_a_real_training_are_not_replaced(tmp_path):
    weights = tmp_path / "weights.pt"
    weights.write_bytes(b"of a real training")
    with pytest.raises(
        tpukit.WorkerError,
        match=r"does not let the function write(.|\n)*torch.save(.|\n)*fix: +core.save",
    ):
        record(workers.saves_by_itself, weights, chip=find_tpu("v5e-1"), progress="off")
    assert weights.read_bytes() == b"of a real training"
