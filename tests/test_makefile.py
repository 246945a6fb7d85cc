"""The commands of README.md as a stranger types them, and the choice of torch's build."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
from test_repository import entries

ROOT = Path(__file__).parents[1]
NEEDS_MAKE = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
HAS_UV = importlib.util.find_spec("uv") is not None
NEEDS_UV = pytest.mark.skipif(not HAS_UV, reason="uv is not installed: make installs it")


def commands():
    """Return the commands of README.md's block, as they are printed."""
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"^```\n(make .*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line.partition("#")[0].strip() for line in block.splitlines()]


COMMANDS = commands()
MAKE_COMMANDS = [command for command in COMMANDS if command.startswith("make ")]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Copy what git keeps into a path with a blank, an umlaut and the project's name."""
    folder = tmp_path_factory.mktemp("clones") / "Ordner mit Ä" / "tpukit"
    folder.mkdir(parents=True)
    for path in entries(ROOT):
        ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=ignored)
        else:
            shutil.copy(path, folder)
    return folder


def shell(command, folder, **environ):
    """Run a line in a shell whose python3 is this Python."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = os.environ | {"PATH": path} | environ
    for name in ("MAKEFLAGS", "MAKELEVEL"):  # of the `make test` that runs these tests
        own.pop(name, None)
    program = ["sh", "-c", command]
    return subprocess.run(program, cwd=folder, env=own, capture_output=True, text=True, timeout=600)


# The README's commands


def test_the_commands_of_the_readme_are_plain():
    assert {"make walkthrough", "make test"} <= set(COMMANDS)
    assert all(re.fullmatch(r"make [a-z-]+|python -m tools\.chip", command) for command in COMMANDS)


@NEEDS_MAKE
@pytest.mark.parametrize("command", MAKE_COMMANDS)
def test_a_command_of_the_readme_sets_up_all_that_it_needs(command, clone):
    done = shell(command.replace("make ", "make -n ", 1), clone)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    made = [number for number, line in enumerate(lines) if line.endswith("-m venv .venv")]
    used = [number for number, line in enumerate(lines) if ".venv/bin/python" in line]
    if command != "make wheel":  # any Python builds it
        assert len(made) == 1
        assert made[0] < used[0]
    assert not any("--torch-backend" in line or "torch_backend" in line for line in lines)
    assert str(clone) not in done.stdout  # a path with a blank would have to be quoted


@NEEDS_MAKE
def test_no_command_of_the_makefile_names_the_path_of_the_clone(clone):
    """Paths within the clone need no quotes; that of the clone itself has a blank."""
    named = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    done = shell(f"make -n {' '.join(set(named))}", clone)
    assert done.returncode == 0, done.stderr
    assert str(clone) not in done.stdout


@NEEDS_MAKE
def test_the_wheel_is_built_in_a_path_with_a_blank_and_an_umlaut(clone):
    done = shell("make wheel", clone)
    assert done.returncode == 0, done.stderr
    (wheel,) = (clone / "dist").iterdir()
    assert done.stdout.strip() == f"dist/{wheel.name}"
    assert "tpukit/py.typed" in zipfile.ZipFile(wheel).namelist()  # else no checker reads the types


def test_the_command_for_a_new_machine_runs_in_a_path_with_a_blank_and_an_umlaut(clone):
    (command,) = set(COMMANDS) - set(MAKE_COMMANDS)
    done = shell(f"{command} --backend cpu --parts launch", clone)
    assert done.returncode == 0, done.stdout + done.stderr


# Some of the tests


def given_to_pytest(command, folder):
    """Return the files and folders of tests that a command gives to pytest."""
    done = shell(command, folder)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "-m pytest" in line]
    return {word for word in line.split() if word.startswith("tests")}


@NEEDS_MAKE
def test_a_subpackages_tests_are_its_own_and_those_that_import_it(clone):
    found = given_to_pytest("make -n test ONLY=training", clone)
    assert {"tests/training", "tests/cloud/test_ray_train.py"} <= found
    assert all((ROOT / path).exists() for path in found)
    assert not any(path.startswith(("tests/training/", "tests/notebooks")) for path in found)
    within = given_to_pytest("make -n test ONLY=essentials/data", clone)
    assert {"tests/essentials/data", "tests/datasets/test_masks.py"} <= within
    assert given_to_pytest("make -n test", clone) == set()


@NEEDS_MAKE
def test_the_quick_tests_are_there_and_are_not_all(clone):
    found = given_to_pytest("make -n quick", clone)
    assert "tests/test_repository.py" in found
    assert all((ROOT / path).exists() for path in found)


# TORCH=cpu


@NEEDS_MAKE
def test_torch_for_the_cpu_is_an_option_of_the_first_command(clone):
    done = shell("make -n test TORCH=cpu", clone)
    assert done.returncode == 0
    assert done.stdout.count('tools/torch_backend.py "cpu"') == 1


@contextlib.contextmanager
def proxy(answer):
    """Yield the address of a proxy between uv and the network; `answer` gets each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            with contextlib.suppress(OSError):  # the server is closed
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def refused(status):
    def answer(connection):
        connection.recv(4096)
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())
        connection.close()

    return answer


def silent(connection):
    """Take the request, and never answer."""
    connection.recv(4096)
    time.sleep(600)


def backend(folder, name="cpu", **environ):
    program = [sys.executable, ROOT / "tools" / "torch_backend.py", name]
    names = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy")
    own = {key: value for key, value in os.environ.items() if key not in names}
    own |= {"UV_CACHE_DIR": str(folder / "cache")} | environ
    # The time limit is for a hang.
    return subprocess.run(program, env=own, capture_output=True, text=True, timeout=100)


SAID = "TORCH=cpu: PyTorch's own index does not answer; make takes the ordinary build\n"


@NEEDS_UV
@pytest.mark.parametrize("answer", [refused("403 Forbidden"), refused("502 Bad Gateway"), silent])
def test_make_says_in_one_line_that_an_index_cannot_be_reached_and_goes_on(answer, tmp_path):
    with proxy(answer) as address:
        done = backend(tmp_path, HTTPS_PROXY=address)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", SAID)


@NEEDS_UV
def test_another_error_of_uv_is_no_index_that_cannot_be_reached(tmp_path):
    (tmp_path / "cache").write_text("a file where uv's cache should be")
    with proxy(refused("403 Forbidden")) as address:
        done = backend(tmp_path, HTTPS_PROXY=address)
        unknown = backend(tmp_path, name="gpu", HTTPS_PROXY=address)
    assert done.returncode not in (0, None)
    assert (done.stdout, "does not answer" in done.stderr) == ("", False)
    assert "cache" in done.stderr
    assert unknown.returncode == 2
    assert "invalid value 'gpu'" in unknown.stderr


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """Make a certificate for PyTorch's index, which only the uv of these tests trusts."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificate")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=index"
    command += " -keyout key.pem -out certificate.pem"
    extensions = ("subjectAltName=DNS:download.pytorch.org", "basicConstraints=critical,CA:FALSE")
    added = [word for extension in extensions for word in ("-addext", extension)]
    subprocess.run([*command.split(), *added], cwd=folder, check=True, capture_output=True)
    return folder


def index(certificate, pages):
    """Answer as PyTorch's index with these pages; others are not found."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "certificate.pem", certificate / "key.pem")

    def answer(connection):
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        with context.wrap_socket(connection, server_side=True) as safe:
            while request := safe.recv(65536):
                page = pages.get(request.split()[1].decode())
                status = "404 Not Found" if page is None else "200 OK"
                content = (page or "").encode()
                kind = f"Content-Type: text/html\r\nContent-Length: {len(content)}"
                safe.sendall(f"HTTP/1.1 {status}\r\n{kind}\r\n\r\n".encode() + content)

    return answer


WHEEL = "torch-2.9.0%2Bcpu-py3-none-any.whl"
PAGE = f'<!DOCTYPE html><a href="/whl/{WHEEL}" data-dist-info-metadata="true">{WHEEL}</a>'
METADATA = "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0+cpu\n"
HAS_TORCH = {"/whl/cpu/torch/": PAGE, f"/whl/{WHEEL}.metadata": METADATA}


@NEEDS_UV
@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        (HAS_TORCH, ("--torch-backend cpu", "")),
        ({"/whl/cpu/torch/": "<!DOCTYPE html><p>Log in to this network</p>"}, ("", SAID)),
        ({}, ("", SAID)),
    ],
    ids=["has torch", "a page of the network's own", "nothing found"],
)
def test_an_index_is_used_if_it_has_torch(pages, expected, certificate, tmp_path):
    with proxy(index(certificate, pages)) as address:
        trusted = str(certificate / "certificate.pem")
        done = backend(tmp_path, HTTPS_PROXY=address, SSL_CERT_FILE=trusted)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, *expected)


def test_the_table_of_the_benchmarks_names_the_best_peer_and_leaves_no_result_out(tmp_path):
    found = {
        "recording": {
            "record_ms": 30.0,
            "replay_ms": 6.0,
            "pytorch_ms": 100.0,
            "chip_ms": 9.0,
            "vs_pytorch": 0.3,
            "replay_vs_record": 0.2,
        },
        "step": {"vs_hand_written": 0.9, "vs_lightning": None, "vs_tutorial": 0.7},
        "startup": {
            "cpu": {"import": 1.0, "first launch": 2.0, "model": 0.5, "first step": 0.5},
            "ratio": 0.1,
        },
    }
    kept = tmp_path / "lines.jsonl"
    lines = [json.dumps({"benchmark": name, "found": value}) for name, value in found.items()]
    kept.write_text("\n".join(lines))
    command = [sys.executable, ROOT / "benchmarks" / "table.py", "--from", kept]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [re.split(r"  +", line) for line in out.splitlines()[:-1]]
    assert rows[0] == ["question", "tpukit", "best peer", "limit", "ratio"]
    assert rows[1] == [
        "host time of a step",
        "30.0 ms",
        "PyTorch's Adam 100.0 ms",
        "chip's step 9 ms",
        "0.3",
    ]
    assert rows[3] == ["a step of fit, worst case", "hand_written", "0.9"]
    assert rows[4] == ["from import to the first step, cpu", "4.0 s"]
    ratios = json.loads(out.splitlines()[-1])
    assert ratios["compiling in the second session over the first"] == 0.1
    assert len(ratios) == len(rows) - 1


def test_every_benchmark_of_make_bench_is_a_program():
    benchmarks = ROOT / "benchmarks"
    text = (benchmarks / "table.py").read_text()
    names = re.findall(r'^    "(\w+)": of_\w+,$', text, re.MULTILINE)
    assert len(names) > 8
    assert all((benchmarks / f"{name}.py").is_file() for name in names)
