import re
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.machines import COLAB, KAGGLE

from tpukit.essentials.environment.platforms import Machine
from tpukit.essentials.environment.runtime_check import EnvironmentCheckError, check
from tpukit.essentials.environment.session import setup

ROOT = Path(__file__).parents[3]
TPU_VM = replace(COLAB, platform="TPU VM", chips=4, generation="v4")
LAPTOP = replace(COLAB, platform="laptop", chips=0, generation=None)
READY = {"PJRT_DEVICE": "TPU"}
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")


@pytest.fixture
def dev(tmp_path):
    """A /dev with eight chips that nobody holds."""
    folder = tmp_path / "dev"
    (folder / "vfio").mkdir(parents=True)
    for name in ("vfio", *map(str, range(8))):
        (folder / "vfio" / name).touch()
    return folder


@pytest.fixture
def look(dev, tmp_path):
    """Check a machine on which nothing else runs."""

    def look(host, **places):
        return check(
            Machine(**{"environ": READY, "modules": {}, "dev": dev, "proc": tmp_path, **places}),
            info=host,
        )

    return look


def found(outcome, name):
    """The finding of that name that matters most."""
    order = ("failure", "warning", "info", "ok")
    return min(
        (f for f in outcome.findings if f.name == name),
        key=lambda finding: order.index(finding.state),
    )


def do(fix, environ, machine):
    """Do what a fix says: run the code that it quotes, as a reader would."""
    (code, *_) = re.findall(r"`([^`]+)`", fix)
    scope = {
        "os": SimpleNamespace(environ=environ),
        "tpukit": SimpleNamespace(setup=lambda: setup(Machine(environ=environ), info=machine)),
    }
    exec(code, scope)


@pytest.mark.parametrize("machine", [KAGGLE, COLAB, TPU_VM])
def test_a_ready_machine_is_ok_from_top_to_bottom(look, machine):
    outcome = look(machine)
    assert [finding.name for finding in outcome.findings if finding.state != "ok"] == ["patches"]
    fact = found(outcome, "patches").fact
    assert "the running variance of BatchNorm and InstanceNorm is that of PyTorch" in fact
    assert "Adam has fewer operations, with equal results (docs/in_sync.md)" in fact
    assert outcome.ok
    assert outcome.raise_for_failures() is outcome
    assert "all is well" in str(outcome)


@pytest.mark.parametrize(
    ("machine", "environ", "name", "state", "words"),
    [
        (KAGGLE, {}, "PJRT_DEVICE", "warning", "unset"),
        (KAGGLE, {"PJRT_DEVICE": ""}, "PJRT_DEVICE", "warning", "unset"),
        (
            KAGGLE,
            {"PJRT_DEVICE": "CPU"},
            "PJRT_DEVICE",
            "failure",
            "would leave them unused, without a message",
        ),
        (COLAB, {"PJRT_DEVICE": "CUDA"}, "PJRT_DEVICE", "failure", "1 v5e chip"),
        (LAPTOP, READY, "PJRT_DEVICE", "warning", "but there is no chip"),
        (
            KAGGLE,
            READY | {"TPU_PROCESS_ADDRESSES": "local"},
            "variables",
            "failure",
            "an address of its own",
        ),
        (KAGGLE, READY | {"CLOUD_TPU_TASK_ID": "0"}, "variables", "failure", "a number of its own"),
        (
            COLAB,
            READY | {"TPU_PROCESS_ADDRESSES": "local"},
            "variables",
            "warning",
            "TPU_PROCESS_ADDRESSES=local",
        ),
        (KAGGLE, READY | {"XRT_WORKERS": "x"}, "variables", "warning", "no longer reads it"),
        (
            COLAB,
            READY | {"MEGASCALE_NUM_SLICES": "2"},
            "variables",
            "failure",
            "waits for the other slices",
        ),
        (
            KAGGLE,
            READY | {"XLA_USE_BF16": "1"},
            "variables",
            "warning",
            "while their dtype says float32",
        ),
        (
            KAGGLE,
            READY | {"XLA_DOWNCAST_BF16": "1"},
            "variables",
            "warning",
            "while their dtype says float32",
        ),
        (KAGGLE, READY | {"XLA_USE_FP16": "1"}, "variables", "warning", "deprecated"),
        (KAGGLE, READY | {"XLA_USE_SPMD": "1"}, "variables", "warning", "one process"),
        (
            KAGGLE,
            READY | {"XLA_TENSOR_ALLOCATOR_MAXSIZE": "9"},
            "variables",
            "warning",
            "has no effect any more",
        ),
        (
            KAGGLE,
            READY | {"COLAB_TPU_ADDR": "10.0.0.2:8470"},
            "variables",
            "warning",
            "another machine",
        ),
        (
            KAGGLE,
            READY | {"TPU_VISIBLE_CHIPS": "0"},
            "variables",
            "failure",
            "all 8 workers would inherit it",
        ),
        (
            KAGGLE,
            READY | {"TPU_PROCESS_BOUNDS": "1,1,1"},
            "variables",
            "failure",
            "all 8 workers would inherit it",
        ),
        (
            TPU_VM,
            READY | {"PJRT_LOCAL_PROCESS_RANK": "0"},
            "variables",
            "failure",
            "all 4 workers would inherit it",
        ),
    ],
)
def test_a_misleading_variable_is_found_and_its_fix_removes_it(
    look, machine, environ, name, state, words
):
    environ = dict(environ)
    finding = found(look(machine, environ=environ), name)
    assert (finding.state, words in finding.fact) == (state, True), finding
    do(finding.fix, environ, machine)
    assert found(look(machine, environ=environ), name).state == "ok"


@pytest.mark.parametrize(
    ("machine", "environ"),
    [
        (KAGGLE, {"XLA_USE_BF16": "0", "XLA_USE_SPMD": "false", "COLAB_TPU_ADDR": ""}),
        (
            COLAB,
            {"TPU_VISIBLE_CHIPS": "0", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"},
        ),  # one chip is one worker's anyway
        (LAPTOP, {"PJRT_DEVICE": "CPU"}),
    ],
)
def test_a_variable_that_misleads_nobody_is_no_finding(look, machine, environ):
    outcome = look(machine, environ=(READY if machine.chips else {}) | environ)
    assert found(outcome, "variables").state == found(outcome, "PJRT_DEVICE").state == "ok"


def test_where_torchtpu_takes_the_place_of_torch_xla_it_is_told_to_be_experimental(look):
    versions = {
        "python": "3.12.1",
        "torch": "2.15.0",
        "torch_tpu": "0.2.0",
        "torch_xla": None,
        "libtpu": "0.0.52",
    }
    finding = found(look(replace(TPU_VM, versions=versions)), "versions")
    assert (finding.state, finding.fix != "") == ("warning", True)
    assert (
        "torch_tpu 0.2.0: experimental, because tpukit's support of TorchTPU is not tested on a chip"
        in finding.fact
    )
    assert found(look(replace(LAPTOP, versions=versions)), "versions").state == "ok"
    assert found(look(replace(TPU_VM, versions=versions), environ={}), "PJRT_DEVICE").state == "ok"
    assert 'backend="torch_tpu"' in found(look(replace(LAPTOP, versions=versions)), "dry run").fact
    both = found(look(replace(TPU_VM, versions=versions | {"torch_xla": "2.9.0"})), "versions")
    assert (both.state, "a launch uses torch_tpu" in both.fact) == ("warning", True)
    older = found(
        look(replace(TPU_VM, versions=versions | {"torch_xla": "2.9.0", "torch": "2.9.0"})),
        "versions",
    )
    assert "torch_tpu" not in older.fact
    for apart in ({"torch": "2.9.0"}, {"torch": "2.10.1"}, {"libtpu": None}):
        finding = found(look(replace(TPU_VM, versions=versions | apart)), "versions")
        assert (
            finding.state,
            "torch_tpu needs libtpu, and torch 2.11 to 2.15" in finding.fact,
            "None" not in finding.fact,
        ) == ("failure", True, True)
        assert "pip install --upgrade 'torch>=2.11,<2.16' torch_tpu" in finding.fix


@pytest.mark.parametrize(
    ("machine", "versions", "state", "fact", "fix"),
    [
        (COLAB, {"torch": None}, "failure", "torch is not installed", "torch==2.9.0"),
        (
            COLAB,
            {"torch_xla": None},
            "failure",
            "the chips cannot be used",
            "`%pip install torch_xla==2.9.0`, then Runtime",
        ),
        (
            KAGGLE,
            {"torch_xla": None},
            "failure",
            "the chips cannot be used",
            "Always use latest environment",
        ),
        (
            TPU_VM,
            {"torch_xla": None},
            "failure",
            "the chips cannot be used",
            "`pip install torch_xla==2.9.0`",
        ),
        (
            COLAB,
            {"torch": "2.11.0", "torch_xla": None},
            "failure",
            "cannot be used",
            "Disconnect and delete runtime",
        ),
        (
            TPU_VM,
            {"torch_xla": None, "python": "3.14.1"},
            "failure",
            "cannot be used",
            "Python 3.11 to 3.13",
        ),
        (
            TPU_VM,
            {"torch": "2.15.0"},
            "failure",
            "do not work together",
            "`pip install torch==2.9.0",
        ),
        (
            KAGGLE,
            {"torch": "2.9.0"},
            "failure",
            "do not work together",
            "%pip install torch_xla==2.9.0",
        ),
        (
            COLAB,
            {"torch": "2.15.0"},
            "failure",
            "do not work together",
            "Disconnect and delete runtime",
        ),
        (
            LAPTOP,
            {"torch": "2.15.0"},
            "failure",
            "do not work together",
            "`pip install torch==2.9.0",
        ),
        (
            COLAB,
            {"torch": "2.10.0", "torch_xla": "2.10.0"},
            "warning",
            "not tested with this pair",
            "torch 2.9.0",
        ),
        (
            COLAB,
            {"torch": "2.7.0", "torch_xla": "2.7.0"},
            "failure",
            "the first supported version is 2.8.0",
            "Disconnect and delete",
        ),
        (COLAB, {"torch": "2.9.1"}, "warning", "not tested with this pair", "torch 2.9.0"),
        (
            COLAB,
            {"libtpu": None},
            "failure",
            "would use the CPU, without a message",
            "`%pip install libtpu==0.0.21.1`",
        ),
        (
            KAGGLE,
            {"libtpu": "0.0.21"},
            "warning",
            "released with libtpu 0.0.17",
            "`%pip install libtpu==0.0.17`",
        ),
        (COLAB, {"libtpu": "0.0.21"}, "ok", "libtpu 0.0.21", ""),
        (KAGGLE, {"torch_xla": "2.8.1"}, "ok", "torch_xla 2.8.1", ""),
        (LAPTOP, {"torch": "2.15.0", "torch_xla": None}, "ok", "no torch_xla, but a dry run", ""),
        (LAPTOP, {"libtpu": None}, "ok", "torch 2.9.0", ""),
    ],
)
def test_versions_that_do_not_belong_together_are_found_and_the_fix_is_a_line(
    look, machine, versions, state, fact, fix
):
    machine = replace(machine, versions=dict(machine.versions) | versions)
    finding = found(look(machine), "versions")
    assert (finding.state, fact in finding.fact, fix in finding.fix) == (state, True, True), finding
    installed = dict(
        re.findall(r"(\w+)==([\d.]+\d)", (re.findall("`([^`]+)`", finding.fix) or [""])[0])
    )
    if installed:  # what pip would leave behind
        machine = replace(machine, versions=dict(machine.versions) | installed)
        assert found(look(machine), "versions").state == "ok"


def test_a_libtpu_of_ones_own_is_taken_at_its_word(look):
    machine = replace(COLAB, versions=dict(COLAB.versions) | {"libtpu": None})
    assert (
        found(
            look(machine, environ=READY | {"TPU_LIBRARY_PATH": "/lib/libtpu.so"}), "versions"
        ).state
        == "ok"
    )


@pytest.mark.parametrize(
    ("platform", "click"),
    [
        ("Colab", "Runtime > Change runtime type > v5e-1 TPU"),
        ("Kaggle", "Settings > Accelerator > TPU v5e-8"),
        ("Vertex AI", "ct5lp-hightpu-8t"),
        ("laptop", "open the notebook on Colab"),
    ],
)
def test_no_tpu_is_a_dry_run_and_names_the_click_that_gets_one(look, platform, click):
    outcome = look(replace(LAPTOP, platform=platform), environ={})
    finding = found(outcome, "TPU")
    assert finding.state == "warning"
    assert "dry run on CPU processes" in finding.fact
    assert click in finding.fix
    assert outcome.ok


def test_a_chip_newer_than_torch_xla_is_named(look):
    finding = found(look(replace(TPU_VM, generation="unknown (0x1ae0:0x00ab)")), "TPU")
    assert finding.state == "warning"
    assert "unknown (0x1ae0:0x00ab)" in finding.fact


def test_a_chip_that_only_torchtpu_knows_is_named(look):
    machine = replace(TPU_VM, generation="7x")
    finding = found(look(machine), "TPU")
    assert finding.state == "warning"
    assert "4 7x chips, 8 cores: torch_xla up to 2.9 does not support them" in finding.fact
    versions = {"python": "3.12.11", "torch": "2.11.0", "torch_tpu": "0.2.0", "libtpu": "0.1"}
    assert found(look(replace(machine, versions=versions)), "TPU").state == "ok"


def test_chips_without_device_nodes_are_found(look, tmp_path):
    empty = tmp_path / "container"
    empty.mkdir()
    finding = found(look(TPU_VM, dev=empty), "TPU")
    assert (finding.state, "--privileged" in finding.fix) == ("warning", True)
    (empty / "accel0").touch()
    assert found(look(TPU_VM, dev=empty), "TPU").state == "ok"


@pytest.mark.parametrize(
    ("machine", "restart"),
    [
        (COLAB, "Runtime > Restart session"),
        (KAGGLE, "Run > Restart & clear cell outputs"),
        (LAPTOP, "Kernel > Restart"),
    ],
)
def test_a_started_runtime_is_found_and_the_fix_is_the_platforms_restart(look, machine, restart):
    finding = found(look(machine, started=lambda: True), "runtime")
    assert (finding.state, restart in finding.fix) == ("failure", True)
    assert found(look(machine, started=lambda: False), "runtime").state == "ok"


HOLD = "import sys, time; held = [open(path) for path in sys.argv[1:]]; print(flush=True); time.sleep(900)"


def holding(*paths, grandchild=False):
    """Start a process that really holds these files open."""
    command = [sys.executable, "-c", HOLD, *map(str, paths)]
    if grandchild:  # the process ends when its standard input does
        outer = f"import subprocess, sys; p = subprocess.Popen({command!r}); sys.stdin.read(); p.kill(); p.wait()"
        command = [sys.executable, "-c", outer]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def end(process):
    process.stdin.close()
    process.stdout.close()
    if "Popen" not in str(process.args):
        process.send_signal(signal.SIGTERM)
    process.wait(600)


@LINUX
@pytest.mark.parametrize("grandchild", [False, True])
def test_a_process_that_holds_a_chip_is_named_and_killing_it_frees_the_chip(look, dev, grandchild):
    process = holding(
        dev / "vfio" / "0", dev / "vfio" / "3", dev / "vfio" / "vfio", grandchild=grandchild
    )
    try:
        finding = found(check(Machine(environ=READY, modules={}, dev=dev), info=KAGGLE), "in use")
        assert finding.state == "failure"
        assert "a child of this kernel, holds 2 chips: " in finding.fact
        assert "import sys, time" in finding.fact
        (pid,) = re.findall(r"`!kill (\d+)`", finding.fix)
        assert f"process {pid}," in finding.fact
        if not grandchild:
            assert int(pid) == process.pid
            subprocess.run(["kill", pid], check=True)
            process.wait(600)
    finally:
        end(process)
    assert (
        found(check(Machine(environ=READY, modules={}, dev=dev), info=KAGGLE), "in use").state
        == "ok"
    )


@LINUX
def test_a_kernel_that_holds_a_chip_itself_has_to_restart(dev):
    with open(dev / "vfio" / "7"):
        finding = found(check(Machine(environ=READY, modules={}, dev=dev), info=COLAB), "in use")
    assert "this kernel (process" in finding.fact
    assert finding.fix == "Runtime > Restart session"
    assert (
        found(check(Machine(environ=READY, modules={}, dev=dev), info=COLAB), "in use").state
        == "ok"
    )


def process(proc, pid, parent, *targets, command=b"python\0train.py\0"):
    """Make a process as /proc shows it."""
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "status").write_text(f"Name:\tpython\nPid:\t{pid}\nPPid:\t{parent}\n")
    (proc / str(pid) / "cmdline").write_bytes(command)
    for number, target in enumerate(targets):
        (proc / str(pid) / "fd" / str(number)).symlink_to(target)


@pytest.mark.parametrize(
    ("target", "held"),
    [
        ("accel0", True),
        ("vfio/12", True),
        ("vfio/vfio", False),  # the door to all groups, not a chip
        ("vfio/noiommu-0", False),
        ("accel", False),
        ("accel0p1", False),
        ("accel/accel0", False),  # an NPU under Linux's own accel drivers
        ("shm", False),
        ("../socket:[123]", False),
    ],
)
def test_another_programs_chip_is_distinguished_from_its_other_files(
    look, dev, tmp_path, target, held
):
    proc = tmp_path / "proc"
    process(proc, 4321, 1, dev / target)
    (proc / "99" / "fd").parent.mkdir()
    (proc / "99" / "fd").write_text("not to be listed, as another user's")
    (proc / "meminfo").write_text("")
    finding = found(look(KAGGLE, proc=proc), "in use")
    assert finding.state == ("failure" if held else "ok")
    if held:
        assert (
            f"process 4321, another program, holds {dev / target}: python train.py" in finding.fact
        )
        assert "shut down its notebook, or `!kill 4321`" in finding.fix


def test_a_long_command_with_terminal_escapes_does_not_break_the_table(look, dev, tmp_path):
    process(
        tmp_path / "proc",
        7,
        1,
        dev / "accel0",
        command=b"python\0-c\0" + b"\x1b[2J\xff x = 1\n" * 200,
    )
    text = str(look(KAGGLE, proc=tmp_path / "proc"))
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("machine", "versions", "modules", "state"),
    [
        (KAGGLE, {}, {}, "ok"),
        (KAGGLE, {"tensorflow-cpu": "2.20.0"}, {"tensorflow"}, "ok"),
        (KAGGLE, {"tensorflow": "2.20.0"}, {}, "warning"),
        (KAGGLE, {"tensorflow": "2.20.0"}, {"tensorflow"}, "failure"),
        (KAGGLE, {"tensorflow-tpu": "2.19.1"}, {"tensorflow"}, "failure"),
        (LAPTOP, {"tensorflow": "2.20.0"}, {"tensorflow"}, "ok"),
    ],
)
def test_tensorflow_that_takes_the_tpus_library_is_found(look, machine, versions, modules, state):
    present = replace(machine, versions=dict(machine.versions) | versions)
    finding = found(look(present, modules=modules), "TensorFlow")
    assert finding.state == state
    if state != "ok":  # what the fix leaves after the restart
        removed, installed = re.findall(r"`pip (?:uninstall -y|install) ([\w-]+)`", finding.fix)
        assert versions.keys() == {removed}
        fixed = replace(machine, versions=dict(machine.versions) | {installed: "2.20.0"})
        assert found(look(fixed), "TensorFlow").state == "ok"


@pytest.mark.parametrize(
    ("machine", "name", "words", "fixed"),
    [
        (
            replace(KAGGLE, memory=4 * 2**30),
            "memory",
            "4.0 GiB for 8 workers",
            {"memory": 9 * 2**30},
        ),
        (
            replace(KAGGLE, memory=4 * 2**30, generation="v3", chips=4),
            "memory",
            "4.0 GiB for 4 workers",  # each with the two cores of a chip
            {"memory": 5 * 2**30},
        ),
        (
            replace(LAPTOP, memory=2 * 2**30, cpus=1),
            "memory",
            "2.0 GiB for 2 workers",
            {"memory": 3 * 2**30},
        ),
        (replace(KAGGLE, shm=64 * 2**20), "/dev/shm", "64 MiB", {"shm": 8 * 2**30}),
    ],
)
def test_too_little_memory_is_found(look, machine, name, words, fixed):
    finding = found(look(machine), name)
    assert (finding.state, words in finding.fact) == ("warning", True), finding
    assert found(look(replace(machine, **fixed)), name).state == "ok"


def test_a_system_that_does_not_say_is_not_blamed(look):
    outcome = look(replace(LAPTOP, memory=None, shm=None))
    assert found(outcome, "memory").state == found(outcome, "/dev/shm").state == "ok"


def test_windows_cannot_fork_and_macos_can_with_a_word(look):
    windows = replace(LAPTOP, system="Windows AMD64")
    assert "WSL 2" in found(look(windows, can_fork=False), "fork").fix
    mac = replace(LAPTOP, system="Darwin arm64")
    finding = found(look(mac, can_fork=True), "fork")
    assert finding.state == "warning"
    (assignment,) = re.findall(r"\w+=YES", finding.fix)
    assert (
        found(look(mac, environ=dict([assignment.split("=")]), can_fork=True), "fork").state == "ok"
    )


def test_failures_are_raised_with_fact_evidence_and_fix(look):
    outcome = look(COLAB, environ={"PJRT_DEVICE": "CPU"}, started=lambda: True)
    assert not outcome.ok
    with pytest.raises(EnvironmentCheckError) as raised:
        outcome.raise_for_failures()
    assert str(raised.value).splitlines() == [
        "not ready to launch: 2 of 12 findings are failures",
        "  found: Colab (given by the test), 1 chips on the PCI bus, torch_xla 2.9.0",
        "         PJRT_DEVICE: CPU, although 1 v5e chip, 1 core are here: "
        "torch_xla would leave them unused, without a message",
        "         runtime: this kernel has started the XLA runtime, so forked workers cannot start theirs",
        '  fix:   PJRT_DEVICE: `os.environ["PJRT_DEVICE"] = "TPU"`',
        "         runtime: Runtime > Restart session; "
        "call torch_xla.device(), xm.master_print() and similar functions only in the worker",
    ]


def test_every_finding_that_is_not_ok_has_a_fix_and_every_ok_one_has_none(look):
    environ = {
        "PJRT_DEVICE": "CPU",
        "XLA_USE_BF16": "1",
        "TPU_PROCESS_ADDRESSES": "local",
        "TPU_VISIBLE_CHIPS": "0",
    }
    bad = replace(
        KAGGLE,
        memory=2**30,
        shm=2**20,
        versions={"python": "3.12.1", "torch": "2.8.0", "tensorflow": "2"},
    )
    for outcome in (
        look(bad, environ=environ, can_fork=False, started=lambda: True),
        look(LAPTOP),
        look(KAGGLE),
    ):
        for finding in outcome.findings:
            assert finding.state in ("ok", "info", "warning", "failure")
            assert bool(finding.fix) == (finding.state in ("warning", "failure")), finding
            assert finding.fact


@pytest.mark.parametrize(
    ("options", "arguments", "status", "words"),
    [
        ([], ["info"], 0, "platform"),
        ([], ["check"], 0 if check().ok else 1, "PJRT_DEVICE"),
        (["-S"], ["check"], 1, "torch is not installed"),  # -S: a Python without its packages
        ([], ["--help"], 0, "exit status 1 if a launch would fail"),
        ([], [], 0, "list the jobs of a folder"),
    ],
)
def test_the_command_line_answers_with_an_exit_status(options, arguments, status, words):
    command = [sys.executable, *options, "-m", "tpukit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == status, done.stdout + done.stderr
    assert words in " ".join((done.stdout + done.stderr).split())


@pytest.mark.skipif(not find_spec("torch_xla"), reason="torch_xla has no wheel for this system")
@pytest.mark.xla
def test_checking_leaves_the_runtime_unstarted_and_sees_it_once_it_is():
    program = """
import os
os.environ["PJRT_DEVICE"] = "CPU"
import torch_xla
from tpukit.essentials.environment.runtime_check import check
before = check()
assert not torch_xla._XLAC._xla_runtime_is_initialized()
print([finding.state for finding in before.findings if finding.name == "runtime"])
torch_xla.device()
print([finding.state for finding in check().findings if finding.name == "runtime"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["['ok']", "['failure']"], done.stderr


@pytest.mark.parametrize(
    ("machine", "obstacle", "words"),
    [
        (KAGGLE, None, "not needed, there are chips"),
        (LAPTOP, None, "torch_xla's own TPU client on a simulated TPU"),
        (
            LAPTOP,
            "no C compiler is here",
            'joined by gloo (`backend="xla"`); no simulated TPU: no C compiler is here',
        ),
    ],
)
def test_it_lists_the_dry_runs_that_this_machine_has(look, machine, obstacle, words):
    finding = found(look(machine, no_simulator=lambda: obstacle), "dry run")
    assert finding.state == "ok"
    assert words in finding.fact
