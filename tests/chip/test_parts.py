"""A proof: its parts on real cores, a process that runs them and may die, the JSON, and its row of the evidence."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import tpukit
from tools.chip import __main__ as command_line
from tools.chip import evidence_row, parts, result, supervisor, worker_functions
from tools.chip.answers import NotAsExpected
from tools.chip.result import NoProof, find_result, read_result_of_a_chip, summarize
from tpukit.essentials.launcher.topology import choose_topology

ROOT = Path(__file__).parents[2]


def prove(*arguments, folder, **environ):
    command = [sys.executable, "-m", "tools.chip", *arguments]
    environ = os.environ | {"PYTHONPATH": str(ROOT)} | environ
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600
    )


def test_the_parts_are_those_that_a_whole_proof_has():
    assert tuple(parts.PARTS) == result.PARTS
    assert all(part.__doc__ for part in parts.PARTS.values())


def test_a_proof_prints_one_line_of_json_last(tmp_path):
    chosen = "fault,interrupt,launch"
    ended = prove(
        "--backend",
        "cpu",
        "--parts",
        chosen,
        "--result",
        "runs/it.json",
        "--code",
        "mine",
        folder=tmp_path,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told == json.loads((tmp_path / "runs/it.json").read_text()) == find_result(ended.stdout)
    assert (told["passed"], told["code"], told["backend"], told["dry_run"]) == (
        True,
        "mine",
        "cpu",
        True,
    )
    assert list(told["parts"]) == ["launch", "fault", "interrupt"]  # in their order
    assert all(one["passed"] and one["seconds"] > 0 for one in told["parts"].values())
    assert "raised LookupError: deliberate" in told["parts"]["fault"]["told"]
    assert told["parts"]["interrupt"]["rows_kept"] >= 3
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "launch,lunch"], "no such part: lunch(.|\n)*the parts are check, health"),
        (["--backend", "tpu"], "backend must be one of"),
        (["--folder", "full"], "--folder full is not empty"),
        (["--on", "kaggle"], "make chip-kaggle KAGGLE_USER=your-name"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_runs(
    tmp_path, arguments, said, monkeypatch, capfd
):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    monkeypatch.chdir(tmp_path)
    assert command_line.main(arguments) == 1
    printed, errors = capfd.readouterr()
    assert re.search(said, errors), errors
    assert "----" not in printed


def test_a_python_without_torch_is_refused_before_anything_runs():
    # -S leaves out all installed packages
    command = [sys.executable, "-S", "-m", "tools.chip"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
    fact, found, fix = ended.stderr.splitlines()
    assert fact == "torch is not installed in this Python"
    assert found == f"  found: {sys.executable}"
    assert fix.startswith("  fix:   in a clone .venv/bin/python")


@pytest.mark.parametrize("cores", [1, 2])
def test_the_parts_that_ask_for_right_answers_pass_and_a_last_bit_more_does_not(tmp_path, cores):
    machine = tpukit.machine_info()
    proof = parts.Proof(machine, choose_topology(machine, cores, "cpu"), tmp_path, 120.0)
    assert parts.count_samples(proof)["samples"] == 32 * cores + 3
    assert parts.train_by_hand(proof)["apart"] < 1e-4
    by_fit = parts.train_with_fit(proof)
    assert by_fit["float32"]["apart"] < 1e-4 < by_fit["bfloat16"]["apart"]
    assert by_fit["float32"]["best"] == 2  # neither the first nor the last
    assert parts.resume(proof)["loss"] == by_fit["float32"]["losses"][-1]
    # A number that differs in its last bit: the proof notices.
    whole = torch.load(tmp_path / "fit.pt")
    whole[-1]["state"]["0.weight"][0, 0, 0, 0] += 1e-7
    torch.save(whole, tmp_path / "fit.pt")
    shutil.rmtree(tmp_path / "resumed")  # it would be resumed
    with pytest.raises(NotAsExpected, match=f"core {cores - 1}: the weights are others"):
        parts.resume(proof)


def test_rates_are_those_of_a_network_that_learns_right(tmp_path, monkeypatch):
    monkeypatch.setattr(
        parts, "ON_CPU_PROCESSES", dataclasses.replace(parts.ON_XLA_CPU, studies=2, slices=4)
    )
    machine = tpukit.machine_info()
    proof = parts.Proof(machine, choose_topology(machine, 2, "cpu"), tmp_path, 120.0)
    assert parts.measure_rates(proof)["images_per_second_with_input"] > 0
    right = worker_functions.measure_rates
    monkeypatch.setattr(
        worker_functions,
        "measure_rates",
        lambda core, *given: {**right(core, *given), "weights": core.rank},
    )
    with pytest.raises(NotAsExpected, match="cores ended with different weights"):
        parts.measure_rates(proof)


def test_plain_pytorch_is_trained_without_the_kit():
    program = "import sys, tools.chip.reference; print([name for name in sys.modules if name[:6] == 'tpukit'])"
    assert (
        subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).strip()
        == "[]"
    )


def test_a_result_that_cannot_be_written_is_said_before_anything_runs(tmp_path, capfd):
    arguments = [
        "--backend",
        "cpu",
        "--parts",
        "launch",
        "--result",
        str(tmp_path),
        "--folder",
        str(tmp_path / "new"),
    ]
    assert command_line.main(arguments) == 1
    printed, errors = capfd.readouterr()
    assert "cannot be written: is a directory" in errors
    assert "----" not in printed


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("all_reduce", "sum of float32"),
        ("gather", "gather of float32"),
    ],
)
def test_a_collective_that_is_wrong_is_named(broken, named):
    def work(core):
        right = getattr(core.backend, broken)

        def wrong(tensor, *others):
            answer = right(tensor, *others)
            return answer if answer.dtype == torch.bool else answer + 1

        setattr(core.backend, broken, wrong)
        return worker_functions.use_collectives(core)

    results = tpukit.launch(work, cores=2, backend="cpu", progress="off").results
    assert any(one.startswith(named) for one in results[1]["wrong"]), results[1]["wrong"]


@pytest.mark.parametrize("broken", ["average", "broadcast"])
def test_a_collective_that_does_nothing_leaves_weights_that_differ(broken):
    def work(core):
        setattr(core.backend, broken, lambda tensors, *others: None)
        return worker_functions.use_collectives(core)

    with pytest.raises(tpukit.WorkerError, match="cores hold different weights"):
        tpukit.launch(work, cores=2, backend="cpu", progress="off")


def supervise(names, folder, monkeypatch, *, seconds=600.0):
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    said = []
    outcomes = supervisor.run_parts(
        names,
        folder=folder,
        backend="cpu",
        seconds=seconds,
        say=said.append,
        module="chip.faulty_parts",
    )
    return outcomes, b"".join(said).decode()


def test_a_part_that_fails_or_ends_its_process_costs_that_part_alone(tmp_path, monkeypatch):
    names = ["raises", "is_interrupted", "aborts", "works"]
    outcomes, said = supervise(names, tmp_path, monkeypatch)
    assert list(outcomes) == names
    assert [outcomes[name]["passed"] for name in names] == [False, False, False, True]
    assert outcomes["raises"]["error"] == "ValueError: wrong\n  found: this"
    assert outcomes["is_interrupted"]["error"].startswith("KeyboardInterrupt")
    assert "ended by SIGABRT" in outcomes["aborts"]["error"]
    assert "its traceback: long" in said


def test_a_part_that_hangs_is_ended_and_told_of_every_so_often(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_END", 4.0)
    monkeypatch.setattr(supervisor, "_SILENCE", 0.5)
    outcomes, said = supervise(["hangs", "works"], tmp_path, monkeypatch, seconds=1.0)
    assert "did not end within 5 s" in outcomes["hangs"]["error"]
    assert outcomes["works"]["passed"]
    assert re.search(r"^hangs: [1-5] s$", said, re.MULTILINE)


def test_a_process_that_cannot_start_does_not_keep_the_proof_from_ending(tmp_path):
    outcomes = supervisor.run_parts(
        ["launch", "fault"], folder=tmp_path, say=lambda _: None, module="no.such.module"
    )
    assert [one["passed"] for one in outcomes.values()] == [False, False]
    assert "exit status 1" in outcomes["launch"]["error"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end a process with its parent")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_goes_on_when_the_proof_is_killed(tmp_path, number):
    program = (
        "import sys; from pathlib import Path; from tools.chip import supervisor; "
        f"supervisor.run_parts(['hangs'], folder=Path({str(tmp_path)!r}), backend='cpu', module='chip.faulty_parts')"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": paths}
    )
    told = tmp_path / "outcomes.jsonl"
    deadline = time.monotonic() + 600
    while not (told.exists() and "hangs" in told.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(number)
    process.wait(600)
    while any(str(tmp_path) in line for line in _commands()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _commands():
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_text()
        except OSError:
            continue
        if "faulty_parts" in line and "outcomes" in line:
            yield line


@pytest.fixture
def of_a_chip(tmp_path):
    """What a Colab v5e-1 would tell; the numbers are made up. Returns how to write it, with something changed."""
    versions = {
        "python": "3.13.15",
        "torch": "2.9.0+cpu",
        "torch_xla": "2.9.0",
        "libtpu": "0.0.21.1",
    }
    machine = dataclasses.replace(
        tpukit.machine_info(), platform="Colab", chips=1, generation="v5e", versions=versions
    )
    rates = {"images_per_second_with_input": 1234.5, "images_per_second_without_input": 2345.6}
    rates |= {"network": "resnet34", "size": 128, "batch_size": 128}
    outcomes = {name: {"passed": True, "seconds": 1.0} for name in result.PARTS}
    outcomes["rates"] |= rates
    told = {"run": "abc", "code": "commit 1234abc", "date": "2026-11-22", "seconds": 321.4}
    found = summarize(machine, choose_topology(machine, None, "xla"), outcomes, **told)
    file = tmp_path / "proof.json"

    def write(change=None, **changed):
        again = json.loads(json.dumps(found | changed))
        if change:
            change(again)
        file.write_text(
            "something before\n" + json.dumps(again) + "\n[colab] Session terminated.\n"
        )
        return file

    return write


def test_the_proof_of_a_chip_is_read(of_a_chip):
    found = read_result_of_a_chip(of_a_chip())
    assert (found["chips"], found["cores"], found["dry_run"], found["passed"]) == (
        1,
        1,
        False,
        True,
    )


def fail_one(found):
    found["parts"]["fault"] = {"passed": False, "seconds": 2.0, "error": "core 7 was not named"}


REFUSED = {
    "a dry run": (
        {"chips": 0, "generation": None, "dry_run": True, "backend": "cpu"},
        "is not of a TPU",
    ),
    "the simulator": ({"dry_run": True, "backend": "xla:simulator"}, "is not of a TPU"),
    "a GPU": ({"chips": 0, "generation": None, "backend": "cuda"}, "is not of a TPU"),
    "one of eight chips": ({"chips": 8}, "part of a TPU: 1 cores of 8 chips"),
    "a part that failed": (
        {"change": fail_one, "passed": False},
        "failed\n  found: fault: core 7 was not named",
    ),
    "a part that failed in a whole that passed": ({"change": fail_one}, "failed\n  found: fault"),
    "another format": ({"tpukit_proof": 2}, "format 2, this tpukit reads 1"),
    "a part too few": (
        {"change": lambda found: found["parts"].pop("resume")},
        "the parts resume are missing",
    ),
    "no parts": ({"parts": {}}, "the parts check, health, .* are missing"),
    "a part without an outcome": (
        {"change": lambda found: found["parts"].update(fit="yes")},
        "part fit does not say",
    ),
    "rates that are none": (
        {"change": lambda found: found["parts"]["rates"].update(size="x")},
        "rates are",
    ),
    "no rates": (
        {"change": lambda found: found["parts"].update(rates={"passed": True})},
        "rates are",
    ),
    "a word for a number": ({"chips": "eight"}, "chips is 'eight'"),
    "nothing for a text": ({"platform": None}, "platform is None"),
    "no date": ({"date": "yesterday"}, "date is 'yesterday'"),
    "the end of a cell": ({"code": "a | b"}, "'a | b' is no name or version"),
    "the end of a line": ({"platform": "Colab\n| a | b"}, "is no name or version"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_proves_nothing_about_a_chip_is_refused(of_a_chip, case):
    changed, said = REFUSED[case]
    with pytest.raises(NoProof, match=said) as refused:
        read_result_of_a_chip(of_a_chip(**changed))
    assert "\n  fix:   " in str(refused.value)


@pytest.mark.parametrize(
    "text", ["", "no JSON", '{"tpukit_proof": 1, "passed": tr', '["tpukit_proof"]', "\0\x80 tpu"]
)
def test_a_file_without_a_proof_is_refused(tmp_path, text):
    file = tmp_path / "proof.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(NoProof, match="has no line that is a proof's JSON"):
        read_result_of_a_chip(file)
    with pytest.raises(FileNotFoundError, match="make chip-colab"):
        read_result_of_a_chip(tmp_path / "none.json")


def test_the_evidence_gets_a_row_in_place_of_not_yet_run(of_a_chip, tmp_path, capsys):
    page, before = tmp_path / "evidence.md", evidence_row.EVIDENCE.read_text()
    (old,) = [
        line
        for line in before.splitlines()
        if line.startswith("| [a proof]") and "| Colab v5e-1;" in line
    ]
    page.write_text(before)
    assert evidence_row.main([str(of_a_chip()), "--evidence", str(page)]) == 0
    new = capsys.readouterr().out.strip()
    assert page.read_text() == before.replace(old, new)
    for words in (
        *(
            "Colab v5e-1; torch 2.9.0+cpu, torch_xla 2.9.0, libtpu 0.0.21.1, Python 3.13.15",
            "commit 1234abc",
        ),
        *("22 November 2026", f"all {len(result.PARTS)} parts passed in 321 s"),
        *("resnet34 at 128 pixels", "1,234 images/s", "2,346 on"),
    ):
        assert words in new
    assert new.count("|") == 4
    # Once more: the row of the same machine is replaced. Another machine has a row of its own, below.
    again = of_a_chip(date="2026-12-01")
    assert evidence_row.main([str(again), "--evidence", str(page)]) == 0
    other = of_a_chip(platform="TPU VM", generation="v6e")
    assert evidence_row.main([str(other), "--evidence", str(page)]) == 0
    rows = [line for line in page.read_text().splitlines() if line.startswith("| [a proof]")]
    assert len(rows) == 1 + before.count("\n| [a proof]")
    assert ["1 December 2026" in row for row in rows].count(True) == 1
    assert "| TPU VM v6e-1;" in rows[-1]


def test_a_proof_that_is_refused_leaves_the_evidence_alone(of_a_chip, tmp_path, capsys):
    page = tmp_path / "evidence.md"
    page.write_text("| what | where | result |\n|---|---|---|\n")
    assert evidence_row.main([str(of_a_chip(chips=0)), "--evidence", str(page)]) == 1
    assert "is not of a TPU" in capsys.readouterr().err
    assert page.read_text().count("\n") == 2
    page.write_text("nothing")
    assert evidence_row.main([str(of_a_chip()), "--evidence", str(page)]) == 1
    assert "has no table" in capsys.readouterr().err
