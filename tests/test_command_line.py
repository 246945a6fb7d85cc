"""The command line: wrong arguments end in one message and status 2, and help fits on a screen."""

import json

import pytest

from tpukit.__main__ import _COMMANDS, main

_SCREEN = 48  # lines of a terminal of a laptop

FILES = {
    "train.py": "def train(core):\n    pass\n",
    "empty.py": "",
    "broken.py": "def train(core:\n",
    "imports.py": "import broken_part\n",
    "broken_part.py": "def train(core:\n",
    "other.ipynb": json.dumps(
        {
            "cells": [
                {"cell_type": "code", "source": ["size = 1\n", "def fit(core):\n", "    pass"]}
            ],
            "nbformat": 4,
        }
    ),
    "old.ipynb": json.dumps({"worksheets": [], "nbformat": 3, "metadata": {}}),
    "list.ipynb": "[1, 2]",
    "text.ipynb": "no JSON {",
    "julia.ipynb": json.dumps(
        {"cells": [], "nbformat": 4, "metadata": {"kernelspec": {"language": "julia"}}}
    ),
}
WRONG = {
    "job old.ipynb": "jupyter nbconvert --to notebook --inplace ",
    "job list.ipynb": "is not a notebook",
    "job text.ipynb": "is not a notebook",
    "job julia.ipynb": "is a notebook in julia",
    "job none.ipynb": "no such file",
    "job train.py:": "a file that ends in .ipynb or .py",
    "job": "the notebook is missing\n  fix: ",
    "job train.py --to mars": "invalid choice: 'mars'",
    "job train.py --secret TOKEN": "--secret must be NAME=REFERENCE",
    "lint none.py": "there is no file",
    "lint text.ipynb": "cannot be read",
    "lint list.ipynb": "cannot be read",
    "lint": "the following arguments are required: file",
    "preflight train.py:": "the function must have the form file.py:train",
    "preflight train.py": "the function must have the form file.py:train",
    "preflight :train": "the function must have the form file.py:train",
    "preflight train.py:other": "has no function other",
    "preflight empty.py:train": "define train in empty.py",
    "preflight broken.py:train": "is not valid Python",
    "preflight imports.py:train": "/broken_part.py is not valid Python",
    "preflight other.ipynb:train": "found: fit\n  fix:   for example: other.ipynb:fit\n",
    "preflight other.ipynb:size": "found: fit\n  fix:   for example: other.ipynb:fit\n",
    "preflight none.py:train": "there is no file none.py",
    "preflight no_such_module:train": "there is no module no_such_module",
    "preflight no.such.module:train": "there is no module no.such.module",
    "preflight old.ipynb:train": "jupyter nbconvert --to notebook --inplace old.ipynb",
    "preflight list.ipynb:train": "is not a notebook",
    "preflight text.ipynb:train": "is not a notebook",
    "preflight train.py:train --args {": "--args must be a JSON list",
    "preflight train.py:train --args {}": "--args must be a JSON list",
    "preflight train.py:train --chip v9": "there is no TPU 'v9'",
    "preflight train.py:train --samples many": "invalid int value: 'many'",
    "logs": "the following arguments are required: name",
    "logs none": "no job none",
    "result none": "no job none",
    "cancel none": "no job none",
    "jobs extra": "unrecognized arguments: extra",
    "health --chips": "unrecognized arguments: --chips",
    "check extra": "unrecognized arguments: extra",
    "info extra": "unrecognized arguments: extra",
    "nothing": "invalid choice: 'nothing'",
}


def status(arguments):
    try:
        return main(arguments)
    except SystemExit as ended:  # argparse ends the process
        return ended.code


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", WRONG)
def test_wrong_arguments_end_in_one_message_and_status_2(line, folder, capsys):
    assert status(line.split()) == 2
    shown = capsys.readouterr().err
    assert WRONG[line] in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("command", ["check", "info", *_COMMANDS])
def test_the_help_of_a_command_fits_on_a_screen(command, capsys):
    assert status([command, "--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= _SCREEN


@pytest.mark.parametrize("command", ["job", "lint", "preflight"])
def test_the_help_of_a_command_with_arguments_ends_with_an_example(command, capsys):
    status([command, "--help"])
    assert f"Example: python -m tpukit {command} " in capsys.readouterr().out


def test_without_a_command_all_commands_are_listed(capsys):
    assert status([]) == 0
    shown = capsys.readouterr().out
    assert [name for name in ("check", "info", *_COMMANDS) if f"\n    {name}" not in shown] == []


def test_a_module_that_lacks_another_is_no_wrong_argument(folder, capsys, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    (folder / "lacks_another_module.py").write_text("import no_such_module\n")
    assert status(["preflight", "lacks_another_module:train"]) == 1
    assert "no_such_module" in capsys.readouterr().err
