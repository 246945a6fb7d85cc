"""A proof on a chip elsewhere: the platforms' own command lines, against servers on the loopback interface.

What is real here: Google's and Kaggle's packages, a Jupyter server and its kernel, the script and what it runs. What is
not: the accounts, and the chips.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from helpers.loopback import loopback

from tools.chip import remote
from tools.chip.remote import (
    MOST_BYTES,
    NotSent,
    colab_command,
    kaggle_commands,
    script,
    write_for_kaggle,
)

PYTHON = sys.executable


@pytest.mark.parametrize(
    "backend", ["cpu", pytest.param("xla:cpu", marks=[pytest.mark.xla, pytest.mark.only_soak])]
)
def test_the_script_proves_the_kit_it_carries_in_an_empty_folder(tmp_path, backend):
    file = tmp_path / "prove.py"
    file.write_text(
        script(
            "colab",
            ["--backend", backend, "--parts", "launch", "--run", "here", "--result", "it.json"],
        )
    )
    folder = tmp_path / "empty"
    folder.mkdir()
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, file], cwd=folder, env=environ, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found == json.loads((folder / "it.json").read_text())
    assert (found["run"], found["passed"], found["backend"], found["dry_run"]) == (
        "here",
        True,
        backend,
        True,
    )
    assert [path.name for path in folder.iterdir()] == ["it.json"]


def test_a_script_that_fails_says_so_with_its_exit_status(tmp_path):
    file = tmp_path / "prove.py"
    file.write_text(script("colab", ["--backend", "no such backend"]))
    ended = subprocess.run(
        [sys.executable, file], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 1
    assert "backend must be one of" in ended.stdout


def test_a_script_has_no_more_than_a_megabyte(tmp_path):
    assert len(script("kaggle", [])) < MOST_BYTES
    (tmp_path / "tpukit").mkdir()
    (tmp_path / "tpukit/large.py").write_bytes(os.urandom(1_000_000).hex().encode())
    with pytest.raises(ValueError, match=r"the script has [\d,]+ bytes, more than 1,000,000"):
        script("kaggle", [], root=tmp_path)


@pytest.mark.parametrize("user", [None, "", "me/you", "a b", "x" * 60])
def test_a_name_that_is_none_of_a_kaggle_user_is_refused(tmp_path, user):
    with pytest.raises(ValueError, match="fix:   make chip-kaggle KAGGLE_USER=your-name"):
        write_for_kaggle(tmp_path, user)


def test_a_command_line_that_is_missing_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        NotSent, match=r"kaggle is not installed(.|\n)*in the clone, pip install '\.\[chip\]'"
    ):
        remote.prove_on_kaggle(tmp_path / "it.json", user="me")
    with pytest.raises(NotSent, match="needs Python 3.12(.|\n)*pipx install google-colab-cli"):
        remote.prove_on_colab(tmp_path / "it.json")


KAGGLE = """
import kagglesdk.kaggle_env as where
where._env_to_endpoint[where.KaggleEnv.LOCAL] = {address!r}
from kaggle.cli import main
main()
"""


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Put a program beside the Python that looks for it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(folder / "python"))

    def write(name, program):
        (folder / name).write_text(f"#!{PYTHON}\n{program}")
        (folder / name).chmod(0o755)

    return write


class Kaggle:
    """What Kaggle's API answers: a kernel that runs for two questions, then has brought what `result` makes of it."""

    def __init__(
        self,
        result=lambda script: json.dumps({"tpukit_proof": 1, "run": ran(script), "passed": True}),
    ):
        self.result, self.pushed, self.asked, self.wrong = result, [], 0, {}
        self.states = ["QUEUED", "RUNNING", "COMPLETE"]

    def __call__(self, request):
        name = request.path.rpartition("/")[2]
        if name in self.wrong:
            wrong = self.wrong[name]
            return wrong(request) if callable(wrong) else wrong
        if name == "SaveKernel":
            self.pushed.append(json.loads(request.body))
            return 200, {"versionNumber": 3, "url": "https://kaggle.com/code/me/tpukit-proof"}
        if name == "GetKernelSessionStatus":
            self.asked += 1
            return 200, {"status": self.states[min(self.asked, len(self.states)) - 1]}
        if name == "ListKernelSessionOutput":
            address = f"http://{request.headers['Host']}"
            files = [
                {"url": f"{address}/files/{file}", "fileName": file}
                for file in ("other.bin", "result.json")
            ]
            return 200, {"files": files if self.result else [], "log": "printed"}
        if name == "result.json":
            return 200, json.loads(self.result(self.pushed[-1]["text"]))
        return 404, {}


def ran(script):
    """Return what a script calls its run."""
    return re.search(r"'--run', '(\w+)'", script)[1]


@pytest.fixture
def kaggle(monkeypatch, tmp_path, install):
    pytest.importorskip("kagglesdk", reason='the extra "chip" is not installed')
    monkeypatch.setenv("KAGGLE_API_ENVIRONMENT", "LOCALHOST")
    monkeypatch.setenv("KAGGLE_USERNAME", "me")
    monkeypatch.setenv("KAGGLE_KEY", "made up")
    monkeypatch.setenv("HOME", str(tmp_path))
    answers = Kaggle()
    with loopback(answers) as server:
        install("kaggle", KAGGLE.format(address=server.address))
        yield answers


def test_kaggles_own_command_line_sends_the_kit_and_fetches_the_result(kaggle, tmp_path, capfd):
    result = tmp_path / "runs" / "proof.json"
    assert (
        remote.prove_on_kaggle(result, user="me", arguments=["--parts", "check"], every=0.01) == 0
    )
    (sent,) = kaggle.pushed
    assert sent["text"] == (tmp_path / "runs/proof-sent/prove.py").read_text()
    assert "'--parts', 'check'" in sent["text"]
    wanted = {
        **{
            "slug": "me/tpukit-proof",
            "newTitle": "tpukit proof",
            "language": "python",
            "kernelType": "script",
        },
        **{"isPrivate": True, "enableTpu": True, "enableInternet": True, "machineShape": "TpuV5E8"},
        "sessionTimeoutSeconds": 3600,
    }
    assert {name: sent.get(name) for name in wanted} == wanted
    assert not sent.get("enableGpu")
    assert json.loads(result.read_text())["run"] == ran(sent["text"])
    printed = capfd.readouterr().out
    assert re.search(r"\d s: queued", printed)
    assert f"make chip-report FILE={result}" in printed


def test_a_proof_that_failed_on_kaggle_ends_with_1_and_is_kept(kaggle, tmp_path):
    kaggle.result = lambda script: json.dumps(
        {"tpukit_proof": 1, "run": ran(script), "passed": False}
    )
    assert remote.prove_on_kaggle(tmp_path / "proof.json", user="me", every=0.01) == 1
    assert (tmp_path / "proof.json").exists()


def test_the_result_of_an_earlier_run_is_not_taken_for_this_ones(kaggle, monkeypatch, tmp_path):
    kaggle.result = lambda script: json.dumps({"tpukit_proof": 1, "run": "earlier", "passed": True})
    kaggle.states = ["COMPLETE"]
    monkeypatch.setattr(remote, "_EARLIER", 0.0)
    with pytest.raises(
        NotSent, match="(?s)no result.*state is complete.*kaggle kernels logs me/tpukit-proof"
    ):
        remote.prove_on_kaggle(tmp_path / "proof.json", user="me", every=0.01)
    assert not (tmp_path / "proof.json").exists()


def test_a_run_that_ends_with_an_error_is_told_with_where_its_lines_are(
    kaggle, monkeypatch, tmp_path
):
    monkeypatch.setattr(remote, "_EARLIER", 0.0)
    kaggle.states, kaggle.result = ["ERROR"], None
    with pytest.raises(NotSent, match="(?s)state is error.*kaggle kernels logs"):
        remote.prove_on_kaggle(tmp_path / "proof.json", user="me", every=0.01)


def test_a_question_without_an_answer_does_not_cost_the_run(kaggle, monkeypatch, tmp_path, capfd):
    kaggle.states = ["ERROR", "RUNNING", "COMPLETE"]  # first that of an earlier run

    def lose(_):
        kaggle.wrong.clear()
        return 503, {"code": 503, "message": "Service unavailable"}

    kaggle.wrong["GetKernelSessionStatus"] = lose
    assert remote.prove_on_kaggle(tmp_path / "proof.json", user="me", every=0.01) == 0
    assert "kernels status was refused" in capfd.readouterr().out
    monkeypatch.setattr(remote, "_UNANSWERED", 1)
    kaggle.wrong["GetKernelSessionStatus"] = 401, {"code": 401, "message": "Unauthenticated"}
    with pytest.raises(NotSent, match="kernels status was refused"):
        remote.prove_on_kaggle(tmp_path / "proof.json", user="me", every=0.01)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            (401, {"code": 401, "message": "Unauthenticated"}),
            "kernels push was refused(.|\n)*kaggle auth login",
        ),
        (
            (403, {"code": 403, "message": "Permission denied"}),
            "kernels push was refused(.|\n)*Permission denied",
        ),
        # Kaggle's command line ends with 0 here.
        (
            (200, {"error": "Maximum weekly TPU quota of 20.00 hours reached"}),
            "refused(.|\n)*TPU quota of 20.00 hours",
        ),
    ],
)
def test_what_kaggle_refuses_is_said_in_its_words(kaggle, tmp_path, answer, said):
    kaggle.wrong["SaveKernel"] = answer
    with pytest.raises(NotSent, match=said):
        remote.prove_on_kaggle(tmp_path / "proof.json", user="me", every=0.01)


def test_kaggles_parser_knows_every_command(monkeypatch, capsys):
    cli = pytest.importorskip("kaggle.cli", reason='the extra "chip" is not installed')
    seen = []
    names = ("kernels_push_cli", "kernels_status_cli", "kernels_output_cli", "kernels_logs_cli")
    for name in names:
        monkeypatch.setattr(
            type(cli.api), name, lambda self, _name=name, **given: seen.append((_name, given))
        )
    monkeypatch.setattr(cli.api, "_authenticated", True)
    for command in kaggle_commands(Path("here"), "me/tpukit-proof").values():
        monkeypatch.setattr(sys, "argv", command)
        with contextlib.suppress(SystemExit):
            cli.main()
    assert [name for name, _ in seen] == list(names)
    wanted = {
        name: value for name, value in seen[0][1].items() if value is not False
    }  # newer ones know "no_run"
    assert wanted == {"folder": "here", "timeout": 3600, "acc": "TpuV5E8"}
    output = seen[2][1]
    assert re.search(output["file_pattern"], "result.json")
    assert (output["path"], output["force"]) == ("here/output", True)


COLAB = """
import types
import requests
import colab_cli.common as common
common.Prod = lambda: types.SimpleNamespace(domain={address!r}, api={address!r})
common.get_credentials = lambda *_, **__: requests.Session()  # in place of an account
from colab_cli.cli import main
main()
"""


@pytest.mark.parametrize("chip", ["v5e1", "v6e1"])
def test_colabs_parser_knows_the_command_and_the_chip(chip):
    cli = pytest.importorskip(
        "colab_cli.cli", reason='the extra "chip" is not installed, or Python is 3.11'
    )
    from colab_cli.client import Accelerator, Variant
    from colab_cli.commands.session import resolve_runtime_options
    from typer.main import get_command

    run = get_command(cli.app).commands["run"]
    _, name, *arguments = colab_command(Path("prove.py"), chip)
    assert name == "run"
    given = run.make_context("run", arguments).params
    assert (given["script"], given["timeout"], given["script_args"] or []) == (
        "prove.py",
        3600.0,
        [],
    )
    assert resolve_runtime_options(given["gpu"], given["tpu"])[:2] == (
        Variant.TPU,
        Accelerator[chip.upper()],
    )


@contextlib.contextmanager
def jupyter(folder):
    """Start a Jupyter server, which stands for a machine of Colab; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = [
        "--ServerApp.token=secret",
        f"--ServerApp.port={port}",
        "--ServerApp.ip=127.0.0.1",
        "--no-browser",
    ]
    options += [
        f"--ServerApp.root_dir={folder}",
        "--allow-root",
        "--ServerApp.disable_check_xsrf=True",
    ]
    environ = {**os.environ} | {
        f"JUPYTER_{kind}_DIR": str(folder / kind) for kind in ("RUNTIME", "CONFIG")
    }
    command = [PYTHON, "-m", "jupyter_server", *options]
    server = subprocess.Popen(
        command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{address}/api?token=secret"),
            ):
                break
            time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait(600)


@pytest.mark.parametrize(("parts", "status"), [("launch", 0), ("no such part", 1)])
def test_colabs_own_command_line_runs_the_script_in_a_kernel_and_brings_its_result(
    install, monkeypatch, tmp_path, capfd, parts, status
):
    pytest.importorskip("colab_cli", reason='the extra "chip" is not installed, or Python is 3.11')
    pytest.importorskip("jupyter_server", reason='the extra "browser" is not installed')
    machine = tmp_path / "machine"
    machine.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    calls = []
    with jupyter(machine) as address:

        def answer(request):
            calls.append((request.method, request.path.partition("&authuser")[0]))
            if "unassign" in request.path:
                return 200, {"token": "t"}
            if request.method == "GET":
                return 200, {"acc": "V5E1", "nbh": "x", "token": "t", "variant": "TPU"}
            proxy = {"token": "secret", "tokenExpiresInSeconds": 3600, "url": address}
            return 200, {
                "accelerator": "V5E1",
                "endpoint": "m-1",
                "runtimeProxyInfo": proxy,
                "variant": 2,
            }

        with loopback(answer) as server:
            install("colab", COLAB.format(address=server.address))
            result = tmp_path / "proof.json"
            arguments = ["--backend", "cpu", "--parts", parts]
            if status:
                with pytest.raises(
                    NotSent, match="there is no result(.|\n)*colab ended with exit status 1"
                ):
                    remote.prove_on_colab(result, arguments=arguments)
                assert "no such part" in capfd.readouterr().out
            else:
                assert remote.prove_on_colab(result, arguments=arguments) == 0
                found = json.loads(result.read_text())
                assert (found["passed"], list(found["parts"]), found["cores"] >= 2) == (
                    True,
                    ["launch"],
                    True,
                )
    assert any("accelerator=V5E1" in path and "variant=TPU" in path for _, path in calls)
    assert calls[-1][0] == "POST"
    assert "unassign/m-1" in calls[-1][1], "the machine is given back"
