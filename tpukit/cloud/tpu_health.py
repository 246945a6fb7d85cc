"""Check the health of this machine's TPU, or of a TPU VM by its name."""

import argparse
import contextlib
import io
import os
import time
from dataclasses import dataclass
from pathlib import Path

from tpukit.cloud.tpu_vm import node_health
from tpukit.essentials.display import Finding, Findings, parts_of, screen
from tpukit.essentials.environment import (
    IMAGES,
    THIS_MACHINE,
    DeviceBusyError,
    Machine,
    MachineInfo,
    check,
    chip_nodes,
    find_chips,
    how_to_restart,
    how_to_start_afresh,
)
from tpukit.essentials.launcher import RuntimeInUseError, WorkerError, launch
from tpukit.profiling import parse_duration

# The names of the findings of `check` that are about chips.
_ABOUT_THE_CHIPS = ("TPU", "PJRT_DEVICE", "versions", "variables", "in use", "runtime")
_SIDE = 128  # every core multiplies two matrices of (128, 128)


@dataclass(frozen=True, repr=False)
class Health(Findings):
    """A table of the findings about a TPU, in the order of the checks."""

    findings: tuple[Finding, ...]
    subject: str


def health(
    name: str | None = None,
    *,
    zone: str | None = None,
    project: str | None = None,
    wait: str | float = "10m",
    every: float = 15.0,
    timeout: float = 120.0,
    progress: str | None = None,
    credentials=None,
    endpoint: str | None = None,
) -> Health:
    """Check this machine's TPU or, with a name, a TPU VM, and return the findings.

    Without a name, `health` checks the chips, their device nodes, the processes that use them, the
    environment variables and the versions. Then every core multiplies matrices, and the results
    are summed over all cores. This computation runs in worker processes, so you can still call
    `launch` afterwards. Without a TPU chip, it runs on GPUs or CPU processes, and a finding warns.

    With a name, `health` asks the Cloud TPU API. While the TPU VM is in a temporary state, such as
    STARTING, `health` waits and prints the state. The API does not list the TPUs of Colab and
    Kaggle notebooks: omit the name there.

    Args:
        name: the name of a TPU VM, or `projects/<project>/locations/<zone>/nodes/<name>`; None for
            the TPU of this machine.
        zone: the zone of the TPU VM; None for CLOUDSDK_COMPUTE_ZONE.
        project: the Google Cloud project; None for GOOGLE_CLOUD_PROJECT, or the project of the
            credentials.
        wait: the longest wait until a TPU VM is healthy: "10m", "90s" or seconds; 0 for a single
            request.
        every: the seconds between two requests about a TPU VM.
        timeout: the limit in seconds for the computation on this machine.
        progress: as in `launch`, for the wait for a TPU VM.
        credentials: the credentials of google-auth; None for those of this machine.
        endpoint: the endpoint of the Cloud TPU API; None for Google's.

    Returns:
        The findings, a table that a notebook displays.

    Raises:
        CloudError: the API does not answer, or the TPU VM does not exist.
        NotInstalledError: a name is given, and cloud-tpu-client is not installed.
        ValueError: a number of seconds is out of range.
    """
    seconds = parse_duration(wait, "wait") if wait else 0.0
    for argument, value in (("every", every), ("timeout", timeout)):
        if not value > 0:
            raise ValueError(f"{argument} must be a number of seconds above 0, got {value!r}")
    if name is None:
        return local_health(timeout=timeout)
    with screen(progress) as display:
        full, findings = node_health(
            name,
            zone=zone,
            project=project,
            wait=seconds,
            every=every,
            say=display.line,
            credentials=credentials,
            endpoint=endpoint,
        )
    return Health(tuple(findings), full)


def local_health(
    machine: Machine = THIS_MACHINE,
    *,
    host: MachineInfo | None = None,
    timeout: float = 120.0,
    compute=launch,
) -> Health:
    """Check the chips of a machine, and return the findings.

    Args:
        machine: the file system and the environment variables of the machine.
        host: the facts about the machine; None to read them.
        timeout: the limit in seconds for the computation.
        compute: `launch`, or a replacement in tests.
    """
    host = host or MachineInfo.read(machine)
    checked = check(machine, info=host)
    findings = []
    for finding in checked.findings:
        if finding.name in _ABOUT_THE_CHIPS or finding.state == "failure":
            findings.append(finding)
    nodes = device_nodes(host, machine)
    if nodes:
        findings.insert(1, nodes)
    # The computation would only fail for the same reasons, perhaps after a long wait.
    failures = [finding.name for finding in findings if finding.state == "failure"]
    if failures:
        fact = f"not tried, because there are failures: {', '.join(dict.fromkeys(failures))}"
        fix = "apply the fixes of the failures, and check again"
        findings.append(Finding("computation", "warning", fact, fix))
    else:
        findings.append(_computation(host, timeout, compute))
    return Health(tuple(findings), checked.subject)


def device_nodes(host: MachineInfo, machine: Machine = THIS_MACHINE) -> Finding | None:
    """Return a finding about the device nodes of the chips; None if the machine has no chip.

    A container may have all chips on the PCI bus but only some of their nodes. The node of a v5e or
    later is /dev/vfio/<number of its IOMMU group>; of a v4 or earlier, /dev/accel<N>. No node is
    opened.
    """
    chips, _ = find_chips(machine.pci)
    if not chips:
        return None
    name = "device nodes"
    # A missing node is a fault of the container or the machine, so it is reported before nodes that
    # this user may not open.
    nodes = chip_nodes(machine)
    missing = _missing_nodes([device for _, device in chips], nodes, machine.dev)
    if missing:
        fact = f"{len(missing)} of {len(chips)} chips cannot be opened: no {', no '.join(missing)}"
        fix = "start the container with `--privileged`, or with these devices; "
        fix += "on a TPU VM, reboot it"
        if host.platform in IMAGES:
            fix = how_to_start_afresh(host)
        return Finding(name, "failure", fact, fix)
    refused = []
    for node in sorted(nodes):
        if not machine.access(node, os.R_OK | os.W_OK):
            refused.append(str(node))
    if refused:
        fact = f"this user may not open {', '.join(refused)}"
        fix = f"`sudo chmod a+rw {' '.join(refused)}`, or run as root"
        return Finding(name, "failure", fact, fix)
    return Finding(name, "ok", f"one for each of {len(chips)} chips, in {nodes[0].parent}")


def _missing_nodes(devices: list[Path], nodes: list[Path], dev: Path) -> list[str]:
    """Return the missing device nodes, as texts.

    The texts are paths if the IOMMU group of every chip is known. Otherwise only the number of
    missing nodes is known, and each text is the same.
    """
    groups = [device / "iommu_group" for device in devices]
    has_groups = all(group.exists() for group in groups)
    if has_groups and not any(node.name.startswith("accel") for node in nodes):
        wanted = [dev / "vfio" / group.resolve().name for group in groups]
        return [str(node) for node in wanted if node not in nodes]
    return [f"device node in {dev} or {dev}/vfio"] * (len(devices) - len(nodes))


def _computation(host: MachineInfo, timeout: float, compute) -> Finding:
    name = "computation"
    began = time.monotonic()
    try:
        # Hide the lines that a launch prints, because the finding has the result.
        with contextlib.redirect_stdout(io.StringIO()):
            run = compute(_multiply, timeout=timeout, progress="off")
    except WorkerError as error:
        fix = f"{how_to_restart(host)}; if it comes again, take another machine"
        return Finding(name, "failure", error.summary, fix)
    except (DeviceBusyError, RuntimeInUseError, ValueError) as error:
        parts = parts_of(error)
        fix = " ".join(parts.fix.split())  # on one line of the table
        return Finding(name, "failure", parts.fact, fix or how_to_restart(host))
    expected = float(_SIDE**3 * run.cores)
    if run.results != [expected] * run.cores:
        fact = f"the cores computed {run.results}, each should have {expected:g}"
        fix = "take another machine: this one computes wrongly"
        return Finding(name, "failure", fact, fix)
    seconds = time.monotonic() - began
    who = f"{run.cores} x {run.device}"
    if not host.chips:
        who += ", in place of TPU cores,"
    fact = f"{who} multiplied and added up as they should, in {seconds:.1f} s"
    return Finding(name, "ok", fact)


def _multiply(core) -> float:
    import torch

    # The sums are whole numbers, which float32 and bfloat16 products of ones give exactly.
    ones = torch.ones(_SIDE, _SIDE, device=core.device)
    return core.all_reduce((ones @ ones).sum()).item()


# The command `python -m tpukit health`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command `python -m tpukit health`."""
    parser.add_argument(
        "name", nargs="?", help="name of a TPU VM; without a name, the TPU of this machine"
    )
    parser.add_argument("--zone", help="zone of the TPU VM")
    parser.add_argument("--project", help="the Google Cloud project")
    parser.add_argument(
        "--wait",
        default="10m",
        help="longest wait until a TPU VM is healthy: 10m, 90s, 0 (default: 10m)",
    )


def run(given: argparse.Namespace) -> int:
    """Print the findings; return 0, or 1 if there is a failure."""
    wait = 0 if given.wait == "0" else given.wait
    found = health(given.name, zone=given.zone, project=given.project, wait=wait)
    print(found)
    return 0 if found.ok else 1
