"""Mistakes in tpukit, each of which the self-test of tools/chip finds: all of them by `make mutants`, three here."""

import json
import sys

import pytest
from mutants import mutation
from mutants.mutation import MUTANTS, ROOT, Mutant, self_test


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_what_is_there_exactly_once(mutant, tmp_path):
    file = tmp_path / "tpukit" / mutant.file
    file.parent.mkdir(parents=True)
    before = (ROOT / "tpukit" / mutant.file).read_text()
    file.write_text(before)
    mutant.apply(tmp_path)
    assert file.read_text() != before


def test_mutants_are_many_and_none_is_there_twice():
    assert (
        len({one.name for one in MUTANTS})
        == len({(one.file, one.old, one.new) for one in MUTANTS})
        == len(MUTANTS)
    )
    assert len(MUTANTS) >= 15


@pytest.mark.parametrize(
    ("name", "part", "said"),
    [
        ("labels of the image before", "samples", "images with the labels of others"),
        ("gradients added, not averaged", "by hand", "core 0: losses"),
        ("best.pt of the last epoch", "fit", "best.pt does not hold epoch 2"),
    ],
)
def test_the_self_test_says_no(name, part, said):
    (mutant,) = (one for one in MUTANTS if one.name == name)
    failed = self_test(mutant, backend="cpu", cores=2, parts=part)
    assert failed.startswith(f"{part}: tools.chip.answers.NotAsExpected: ")
    assert said in failed


def test_a_mutant_that_survives_is_named_and_the_exit_status_is_1(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mutation.py", "--only", "fit"])
    monkeypatch.setattr(
        mutation, "MUTANTS", [Mutant(name, "", "", "") for name in ("fit one", "fit two", "other")]
    )
    caught = {"fit one": "fit: NotAsExpected"}
    monkeypatch.setattr(
        mutation, "self_test", lambda mutant, **_: caught.get(mutant and mutant.name)
    )
    assert mutation.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == {"mutants": 2, "caught": 1}
    assert any(line.startswith("fit two") and line.endswith("SURVIVED") for line in lines)
