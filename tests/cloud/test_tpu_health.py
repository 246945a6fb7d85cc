"""health: this machine's on fake PCI trees and real /proc holders, a TPU VM's from an API on the loopback interface."""

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.loopback import HANG, LOSE, loopback, refusal
from helpers.machines import KAGGLE

from tpukit.cloud import tpu_vm
from tpukit.cloud.answers import CloudError
from tpukit.cloud.tpu_health import device_nodes, health, local_health
from tpukit.essentials.environment.chip_holders import DeviceBusyError
from tpukit.essentials.environment.hardware import MachineInfo
from tpukit.essentials.environment.platforms import Machine
from tpukit.essentials.launcher.launcher import WorkerError, launch

pytest.importorskip(
    "cloud_tpu_client", reason="health(name) asks through cloud-tpu-client, which is not installed"
)
from google.oauth2.credentials import Credentials

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
READY = {
    "state": "READY",
    "health": "HEALTHY",
    "acceleratorType": "v5litepod-8",
    "runtimeVersion": "v2-alpha-tpuv5-lite",
}


def ask(api, name="my-tpu", **options):
    options = {
        "zone": "us-west4-a",
        "project": "demo",
        "wait": 0,
        "progress": "off",
        "every": 0.05,
    } | options
    return health(name, credentials=Credentials("a-token"), endpoint=api.address, **options)


def one(findings, name):
    (finding,) = [finding for finding in findings if finding.name == name]
    return finding


def test_a_healthy_tpu_is_asked_for_by_its_full_name_with_the_credential():
    with loopback(lambda request: (200, READY)) as api:
        outcome = ask(api)
    (request,) = api.requests
    assert request.path.partition("?")[0] == "/v2/projects/demo/locations/us-west4-a/nodes/my-tpu"
    assert request.headers["authorization"] == "Bearer a-token"
    assert outcome.ok
    assert outcome.subject == "projects/demo/locations/us-west4-a/nodes/my-tpu"
    assert [(finding.name, finding.state, finding.fact) for finding in outcome.findings] == [
        ("state", "ok", "READY"),
        ("health", "ok", "HEALTHY"),
        ("kind", "ok", "v5litepod-8, v2-alpha-tpuv5-lite"),
    ]
    assert "all is well" in str(outcome)


@pytest.mark.parametrize(
    ("state", "waits", "fix"),
    [
        ("CREATING", True, "ask again"),
        ("STARTING", True, "ask again"),
        ("RESTARTING", True, "ask again"),
        ("REIMAGING", True, "ask again"),
        ("REPAIRING", True, "ask again"),
        ("UNHIDING", True, "ask again"),
        ("UNKNOWN", True, "ask again"),
        ("STATE_UNSPECIFIED", True, "ask again"),
        ("A_STATE_OF_LATER_YEARS", True, "ask again"),
        ("STOPPING", False, "tpu-vm start my-tpu --zone us-west4-a --project demo"),
        ("STOPPED", False, "tpu-vm start my-tpu --zone us-west4-a --project demo"),
        ("PREEMPTED", False, "tpu-vm delete my-tpu"),
        ("TERMINATED", False, "tpu-vm delete my-tpu"),
        ("DELETING", False, "create another"),
        ("HIDING", False, "tpu-vm delete my-tpu"),
        ("HIDDEN", False, "tpu-vm delete my-tpu"),
    ],
)
def test_every_state_but_ready_is_a_failure_and_only_one_that_passes_is_waited_for(
    state, waits, fix
):
    with loopback(lambda request: (200, {"state": state})) as api:
        outcome = ask(api, wait=1)
    assert not outcome.ok
    finding = one(outcome.findings, "state")
    assert finding.fact.startswith(state)
    assert fix in finding.fix
    assert ("still after 1 s" in finding.fact, len(api.requests) > 1) == (waits, waits)


def test_the_states_of_the_api_are_all_known():
    discovery = pytest.importorskip("googleapiclient.discovery_cache")
    folder = Path(discovery.__file__).parent / "documents"
    import json

    node = json.loads((folder / "tpu.v2.json").read_text())["schemas"]["Node"]["properties"]
    assert set(node["state"]["enum"]) - {"UNSPECIFIED"} <= set(tpu_vm._STATES)
    assert set(node["health"]["enum"]) == {"HEALTH_UNSPECIFIED", "HEALTHY", *tpu_vm._HEALTHS}


@pytest.mark.parametrize(
    ("health_", "state", "waits"),
    [
        ("TIMEOUT", "failure", True),
        ("UNHEALTHY_TENSORFLOW", "failure", True),
        ("UNHEALTHY_MAINTENANCE", "failure", True),
        ("HEALTH_UNSPECIFIED", "warning", False),
        (None, "warning", False),
    ],
)
def test_a_ready_tpu_may_be_unhealthy(health_, state, waits):
    with loopback(
        lambda request: (200, READY | {"health": health_, "healthDescription": "worker 3"})
    ) as api:
        outcome = ask(api, wait=1)
    finding = one(outcome.findings, "health")
    assert (finding.state, len(api.requests) > 1) == (state, waits)
    assert "(worker 3)" in finding.fact
    assert finding.fix
    assert outcome.ok == (state == "warning")


def test_symptoms_are_warnings():
    symptom = {
        "symptomType": "OUT_OF_MEMORY",
        "details": "the runtime was killed",
        "workerId": "1",
        "createTime": "2026-11-01T10:00:00Z",
    }
    with loopback(lambda request: (200, READY | {"symptoms": [symptom]})) as api:
        outcome = ask(api)
    finding = one(outcome.findings, "symptom")
    assert finding.fact == "OUT_OF_MEMORY the runtime was killed 2026-11-01T10:00:00Z"
    assert finding.fix == "look at the log of worker 1 before a long run"
    assert outcome.ok


def test_it_waits_until_the_tpu_is_healthy_and_says_for_what(capsys):
    states = [{"state": "CREATING"}] * 3 + [READY | {"health": "TIMEOUT"}] * 2 + [READY]
    with loopback(lambda request: (200, states[min(request.number, 5)])) as api:
        outcome = ask(api, wait="1m")
    assert outcome.ok
    assert len(api.requests) == 6
    assert [line.partition(";")[0] for line in capsys.readouterr().out.splitlines()] == [
        "my-tpu: CREATING",
        "my-tpu: READY TIMEOUT",
    ]


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (
            refusal(400, "Invalid zone"),
            400,
            ["not valid", "Invalid zone", "correct the value that the answer names"],
        ),
        (
            refusal(401, "Invalid credentials"),
            401,
            ["the credential was not accepted", "application-default login"],
        ),
        (
            refusal(403, "Permission 'tpu.nodes.get' denied"),
            403,
            ["not permitted", "tpu.nodes.get", "roles/tpu.viewer"],
        ),
        (
            refusal(403, "Cloud TPU API has not been used in project 7 before", "SERVICE_DISABLED"),
            403,
            ["`gcloud services enable tpu.googleapis.com --project demo`"],
        ),
        (
            refusal(404, "Resource was not found"),
            404,
            ["not found", "tpu-vm list --zone us-west4-a --project demo"],
        ),
        (refusal(429, "Quota exceeded"), 429, ["too many requests", "iam-admin/quotas"]),
        (refusal(500, "Internal"), 500, ["the service failed", "status.cloud.google.com"]),
        (refusal(503, "Unavailable"), 503, ["not available", "status.cloud.google.com"]),
        (HANG, None, ["did not answer", "timed out", "network and its proxy"]),
        (LOSE, None, ["did not answer", "network and its proxy"]),
    ],
)
def test_what_the_cloud_refuses_is_an_error_with_fact_evidence_and_fix(
    answer, status, words, monkeypatch
):
    if answer == HANG:
        monkeypatch.setattr(tpu_vm, "_REQUEST_SECONDS", 0.3)
    with loopback(lambda request: answer) as api, pytest.raises(CloudError) as caught:
        ask(api)
    fact, found, fix = str(caught.value).splitlines()
    assert fact.startswith("TPU my-tpu in us-west4-a: ")
    assert (found[:9], fix[:9]) == ("  found: ", "  fix:   ")
    assert [word for word in words if word not in str(caught.value)] == []
    assert caught.value.status == status


@pytest.mark.parametrize("answer", [refusal(429, "Slow"), refusal(503, "Unavailable"), HANG, LOSE])
def test_an_answer_that_may_come_later_is_asked_for_again_while_there_is_time(
    answer, monkeypatch, capsys
):
    monkeypatch.setattr(tpu_vm, "_REQUEST_SECONDS", 0.3)
    with loopback(lambda request: answer if request.number < 3 else (200, READY)) as api:
        assert ask(api, wait=30).ok
    assert "my-tpu: no answer; waiting," in capsys.readouterr().out


def test_what_will_not_change_is_not_asked_twice():
    with loopback(lambda request: refusal(404, "no such")) as api, pytest.raises(CloudError):
        ask(api, wait=30)
    assert len(api.requests) == 1


def test_a_cloud_that_never_answers_ends_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(tpu_vm, "_REQUEST_SECONDS", 0.2)
    began = time.monotonic()
    with loopback(lambda request: HANG) as api, pytest.raises(CloudError, match="did not answer"):
        ask(api, wait=1)
    assert 1 <= time.monotonic() - began < 300


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "begins with a letter"),
        ("My-TPU", "begins with a letter"),
        ("my_tpu", "begins with a letter"),
        ("../nodes/x", "begins with a letter"),
        ("grpc://10.0.0.2:8470", "an address, as of a TPU Node"),
        ("10.0.0.2:8470", "an address, as of a TPU Node"),
    ],
)
def test_a_name_that_cannot_be_one_is_refused_before_anybody_is_asked(name, words):
    with loopback(lambda request: (200, READY)) as api, pytest.raises(CloudError) as caught:
        ask(api, name=name)
    assert words in str(caught.value)
    assert "fix:" in str(caught.value)
    assert api.requests == []


def test_a_full_name_holds_project_and_zone():
    with loopback(lambda request: (200, READY)) as api:
        full = "projects/other/locations/us-east5-b/nodes/x"
        assert ask(api, name=full, zone=None, project=None).subject == full


def test_a_missing_zone_project_or_credential_is_an_error_with_its_fix(monkeypatch, tmp_path):
    for variable in ("CLOUDSDK_COMPUTE_ZONE", "GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    with loopback(lambda request: (200, READY)) as api:
        with pytest.raises(
            CloudError, match=r"zone of my-tpu is not known(.|\n)*zone=\"us-west4-a\""
        ):
            ask(api, zone=None)
        with pytest.raises(CloudError, match=r"project is not known(.|\n)*`gcloud projects list`"):
            ask(api, project=None)
        monkeypatch.setenv("CLOUDSDK_COMPUTE_ZONE", "us-west4-b")
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "told")
        assert "projects/told/locations/us-west4-b/" in ask(api, zone=None, project=None).subject
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
        with pytest.raises(
            CloudError, match=r"no credential(.|\n)*none.json(.|\n)*application-default login"
        ):
            health("my-tpu", wait=0, endpoint=api.address)
    assert len(api.requests) == 1


@pytest.mark.parametrize("options", [{"wait": "soon"}, {"wait": -1}, {"every": 0}, {"timeout": -1}])
def test_seconds_out_of_range_are_refused(options):
    (argument,) = options
    with pytest.raises(ValueError, match=argument):
        health(**options)


def test_without_the_client_the_error_names_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloud_tpu_client", None)
    with (
        loopback(lambda request: (200, READY)) as api,
        pytest.raises(ImportError, match="cloud-tpu-client==0.7"),
    ):
        ask(api)


@pytest.fixture
def v5e(tmp_path):
    """A machine with four v5e chips: PCI tree, IOMMU groups 7 to 10, device nodes."""
    pci, dev = tmp_path / "pci", tmp_path / "dev"
    (dev / "vfio").mkdir(parents=True)
    (dev / "vfio" / "vfio").touch()
    for number in range(4):
        device, group = pci / f"0000:00:0{number + 4}.0", tmp_path / "groups" / str(number + 7)
        for folder in (device, group):
            folder.mkdir(parents=True)
        for name, value in (("vendor", "0x1ae0"), ("device", "0x0063")):
            (device / name).write_text(value + "\n")
        (device / "iommu_group").symlink_to(group)
        (dev / "vfio" / group.name).touch()
    return SimpleNamespace(pci=pci, dev=dev, proc=tmp_path / "proc")


def computes(results=None, cores=4, raises=None):
    """Return what stands in for launch on a machine that is not there."""

    def launch(fn, **options):
        assert options["timeout"] == 120.0
        if raises:
            raise raises
        return SimpleNamespace(
            results=results or [float(128**3 * cores)] * cores, cores=cores, device="v5e chip"
        )

    return launch


def look(there, environ=None, compute=None, **changes):
    environ = {"PJRT_DEVICE": "TPU"} | (environ or {})
    machine = Machine(
        environ, **vars(there), installed=lambda package: dict(KAGGLE.versions).get(package)
    )
    return local_health(
        machine, host=replace(MachineInfo.read(machine), **changes), compute=compute or computes()
    )


def test_a_machine_whose_chips_all_open_and_compute_is_healthy(v5e):
    outcome = look(v5e)
    assert outcome.ok, outcome
    assert (
        one(outcome.findings, "device nodes").fact == f"one for each of 4 chips, in {v5e.dev}/vfio"
    )
    assert one(outcome.findings, "computation").fact.startswith(
        "4 x v5e chip multiplied and added up as they should"
    )


def test_a_chip_without_its_device_node_is_named_and_nothing_is_tried(v5e):
    (v5e.dev / "vfio" / "9").unlink()
    outcome = look(v5e, compute=computes(raises=AssertionError("tried")))
    finding = one(outcome.findings, "device nodes")
    assert (finding.state, finding.fact) == (
        "failure",
        f"1 of 4 chips cannot be opened: no {v5e.dev}/vfio/9",
    )
    assert "--privileged" in finding.fix
    assert (
        one(outcome.findings, "computation").fact
        == "not tried, because there are failures: device nodes"
    )
    (v5e.dev / "vfio" / "9").touch()  # as the fix says
    assert look(v5e).ok


def test_nodes_that_this_user_may_not_open_are_named_with_the_line_that_changes_it(v5e):
    def access(node, mode):
        return node.name != "8"

    machine = Machine({}, pci=v5e.pci, dev=v5e.dev, access=access)
    finding = device_nodes(MachineInfo.read(machine), machine)
    assert (finding.state, "/vfio/8" in finding.fact, "/vfio/7" in finding.fact) == (
        "failure",
        True,
        False,
    )
    assert finding.fix.startswith(f"`sudo chmod a+rw {v5e.dev}/vfio/8`")


def test_chips_up_to_v4_are_counted_as_accel_nodes(tmp_path):
    dev, pci = tmp_path / "dev", tmp_path / "pci"
    dev.mkdir()
    for number in range(4):
        (pci / str(number)).mkdir(parents=True)
        (pci / str(number) / "vendor").write_text("0x1ae0")
        (pci / str(number) / "device").write_text("0x005e")
        if number:
            (dev / f"accel{number}").touch()
    machine = Machine({}, pci, dev=dev)
    host = MachineInfo.read(machine)
    assert "1 of 4 chips" in device_nodes(host, machine).fact
    (dev / "accel0").touch()
    assert device_nodes(host, machine).state == "ok"


@LINUX
def test_a_process_that_holds_a_chip_is_named_by_health_too(v5e):
    program = "import sys, time; held = open(sys.argv[1]); print(flush=True); time.sleep(900)"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, v5e.dev / "vfio" / "7"], stdout=subprocess.PIPE
    )
    try:
        holder.stdout.readline()
        outcome = look(SimpleNamespace(pci=v5e.pci, dev=v5e.dev, proc=Path("/proc")))
        finding = one(outcome.findings, "in use")
        assert finding.state == "failure"
        assert (
            f"process {holder.pid}, a child of this kernel, holds {v5e.dev}/vfio/7" in finding.fact
        )
        assert "in use" in one(outcome.findings, "computation").fact
    finally:
        holder.kill()
        holder.stdout.close()
        holder.wait(600)
    assert look(SimpleNamespace(pci=v5e.pci, dev=v5e.dev, proc=Path("/proc"))).ok


@pytest.mark.parametrize(
    ("environ", "name"),
    [({"PJRT_DEVICE": "CPU"}, "PJRT_DEVICE"), ({"TPU_PROCESS_ADDRESSES": "local"}, "variables")],
)
def test_a_variable_that_misleads_is_a_failure(v5e, environ, name):
    outcome = look(v5e, environ)
    assert one(outcome.findings, name).state == "failure"
    assert not outcome.ok


@pytest.mark.parametrize(
    ("raises", "words", "fix"),
    [
        (
            DeviceBusyError("4 of 4 chips are still busy", found="x", fix="shut\nit"),
            "still busy",
            "shut it",
        ),
        (
            WorkerError("core 2 of 4 hung", details="traceback", rank=2),
            "core 2 of 4",
            "another machine",
        ),
    ],
)
def test_a_computation_that_fails_is_a_failure_with_its_fix(v5e, raises, words, fix):
    finding = one(look(v5e, compute=computes(raises=raises)).findings, "computation")
    assert (finding.state, words in finding.fact, fix in finding.fix) == ("failure", True, True)
    assert "traceback" not in finding.fact


def test_a_chip_that_computes_wrongly_is_not_healthy(v5e):
    outcome = look(v5e, compute=computes(results=[8388608.0, 8388608.0, 8388607.0, 8388608.0]))
    assert "8388607.0" in one(outcome.findings, "computation").fact
    assert not outcome.ok


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks CPU processes")
def test_without_a_chip_cpu_processes_really_compute_and_a_warning_says_so(capfd, tmp_path):
    outcome = local_health(Machine({}, tmp_path), timeout=600)
    assert outcome.ok, outcome
    assert one(outcome.findings, "TPU").state == "warning"
    assert re.search(
        "in place of TPU cores, multiplied and added up", one(outcome.findings, "computation").fact
    )
    assert capfd.readouterr().out == ""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks CPU processes")
def test_a_computation_that_does_not_end_is_ended_and_a_failure(tmp_path):
    def never_ends(core):
        while True:
            time.sleep(1)

    def compute(_fn, **options):
        return launch(never_ends, **options)

    began = time.monotonic()
    outcome = local_health(Machine({}, tmp_path), timeout=0.01, compute=compute)
    finding = one(outcome.findings, "computation")
    assert (finding.state, "0.01" in finding.fact) == ("failure", True), finding
    assert time.monotonic() - began < 600


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["health"], 0, "computation"),
        (["health", "my_tpu"], 1, "is not the name of a TPU VM"),
        (["health", "my-tpu", "--wait", "soon"], 2, "a time is written"),
    ],
)
def test_the_command_line_says_it_with_an_exit_status(arguments, status, words):
    command = [sys.executable, "-m", "tpukit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, words in done.stdout + done.stderr) == (status, True), (
        done.stdout + done.stderr
    )
    assert "Traceback" not in done.stderr
