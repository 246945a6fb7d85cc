"""`python -m tpukit job` and the commands about jobs, in a terminal."""

import json
import subprocess
import sys

import pytest

from tpukit.__main__ import main


def run(*arguments, capsys):
    status = main([str(one) for one in arguments])
    found = capsys.readouterr()
    return status, found.out, found.err


def test_a_notebook_is_submitted_listed_read_fetched(
    make_notebook, machine, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    make_notebook(
        "print(preset, epochs); open('made', 'w').close()", parameters="preset = 'cpu'\nepochs = 1"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text("a")
    options = ["--torch", "none", "--timeout", "1h", "--name", "first", "--files", "data", "--wait"]
    parameters = ["-p", "preset", "v5e-8", "-p", "epochs", "3"]
    status, out, err = run("job", "book.ipynb", *parameters, *options, capsys=capsys)
    assert (status, err) == (0, "")
    assert "in/files/data/a.txt" in out
    assert "first: succeeded" in out
    status, out, _ = run("logs", "first", capsys=capsys)
    assert (status, out) == (0, "v5e-8 3\n")
    status, out, _ = run("jobs", capsys=capsys)
    assert out.split()[:3] == ["first", "succeeded", "local"]
    status, out, _ = run("result", "first", "--folder", "copy", capsys=capsys)
    assert status == 0
    assert (tmp_path / "copy/out/made").exists()
    assert json.loads((tmp_path / "copy/notebook.ipynb").read_text())["cells"]
    status, out, _ = run("cancel", "first", capsys=capsys)
    assert "first: succeeded" in out  # it is over already


@pytest.mark.parametrize("value", ["-1e-3", "-1E5", "-.5e-2", "-3"])
def test_a_parameter_may_be_a_negative_number_in_any_notation(
    make_notebook, tmp_path, monkeypatch, capsys, value
):
    monkeypatch.chdir(tmp_path)
    make_notebook("1", parameters="lr = 0.1")
    sent = {}
    monkeypatch.setattr(
        "tpukit.cloud.job_command.submit", lambda notebook, **given: sent.update(given)
    )
    assert run("job", "book.ipynb", "-p", "lr", value, capsys=capsys) == (0, "", "")
    assert sent["parameters"] == {"lr": float(value)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["job", "there.ipynb"], "no such file"),
        (["job", "book.ipynb", "-p", "epoch", "3"], "no such parameter: epoch"),
        (["job", "book.ipynb", "-p", "epochs", "three"], "not a Python literal"),
        (["job", "book.ipynb", "--secret", "HF_TOKEN"], "must be NAME=REFERENCE"),
        (["job", "book.ipynb", "--secret", "HF_TOKEN=hf_abc"], "must say where the target local"),
        (["job", "book.ipynb", "--to", "vertex", "--chip", "v5e-8"], "needs a bucket"),
        (
            ["job", "book.ipynb", "--to", "gcloud", "--chip", "v5e-8", "--bucket", "gs://b-1/runs"],
            "zone",
        ),
        (["job", "book.ipynb", "--spot"], "spot"),
        (["job", "book.ipynb", "--timeout", "soon"], "a time is written"),
        (["logs", "none"], "no job none"),
        (["job"], "the notebook is missing"),
        (["job", "--files", "data.csv", "book.ipynb"], "--files has data.csv book.ipynb"),
        (["job", "--files", "data.csv", "book.ipynb"], "before the options: python -m tpukit job"),
        (["job", "--files", "data.csv", "--spot", "book.ipynb"], "data.csv"),
    ],
)
def test_what_is_wrong_is_one_message_and_exit_status_2(
    make_notebook, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    make_notebook("1", parameters="epochs = 1")
    status, _, err = run(*arguments, capsys=capsys)
    assert status == 2
    assert message in err
    assert not (tmp_path / "jobs").exists()


def test_the_help_of_each_command_names_its_arguments():
    for command, word in (
        ("job", "--chip"),
        ("logs", "--bucket"),
        ("result", "--folder"),
        ("jobs", "--bucket"),
    ):
        asked = [sys.executable, "-m", "tpukit", command, "--help"]
        assert word in subprocess.run(asked, capture_output=True, text=True, check=True).stdout
