"""health: is the TPU of this machine healthy, or one of the cloud by its name?"""

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

_ABOUT_THE_CHIPS = ("TPU", "PJRT_DEVICE", "versions", "variables", "in use", "runtime")  # of check's findings
_SIDE = 128  # of the matrices that every core multiplies


@dataclass(frozen=True, repr=False)
class Health(Findings):
    """What was found about a TPU, in order: a table, as text or in a notebook."""

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
    """Say whether a TPU is healthy: this machine's, or with a name a TPU VM, by the cloud's own word.

    Without a name: chips, their device nodes, who holds them, variables, versions; and a product of matrices on every
    core, summed over all, in forked workers, so the kernel stays free for launches. Without a chip CPU processes
    compute, and a warning says so. With a name: waits while its state passes by itself, and says what it waits for. A
    Colab or Kaggle notebook's TPU is its own machine's, which the cloud tells nobody about: leave the name out.

    Args:
        name: of a TPU VM, or `projects/<project>/locations/<zone>/nodes/<name>`.
        zone: of the TPU VM; None for CLOUDSDK_COMPUTE_ZONE.
        project: None for GOOGLE_CLOUD_PROJECT, or the credential's own.
        wait: for a named TPU to become healthy: "10m", "90s" or seconds; 0 asks once.
        every: seconds between two questions.
        timeout: seconds for the computation on this machine.
        progress: as in `launch`.
        credentials: of google-auth; None for this machine's own.
        endpoint: of the Cloud TPU API; None for Google's.

    Raises:
        CloudError: the cloud cannot be asked, or knows no such TPU; the message says what to do.
        ImportError: with a name, and cloud-tpu-client is not installed.
        ValueError: a number of seconds is out of range.
    """
    seconds = parse_duration(wait, "wait") if wait else 0.0
    for argument, value in (("every", every), ("timeout", timeout)):
        if not value > 0:
            raise ValueError(f"{argument} is seconds, more than 0, got {value!r}")
    if name is None:
        return local_health(timeout=timeout)
    with screen(progress) as display:
        where = {"zone": zone, "project": project, "credentials": credentials, "endpoint": endpoint}
        full, findings = node_health(name, wait=seconds, every=every, say=display.line, **where)
    return Health(tuple(findings), full)


def local_health(
    machine: Machine = THIS_MACHINE, *, host: MachineInfo | None = None, timeout: float = 120.0, compute=launch
) -> Health:
    """Say whether the chips of a machine are healthy; `host` is what is known of it already."""
    host = host or MachineInfo.read(machine)
    checked = check(machine, info=host)
    findings = [one for one in checked.findings if one.name in _ABOUT_THE_CHIPS or one.state == "failure"]
    nodes = device_nodes(host, machine)
    if nodes:
        findings.insert(1, nodes)
    failures = [one.name for one in findings if one.state == "failure"]
    if failures:
        fact = f"not tried: it would fail for {', '.join(dict.fromkeys(failures))}"
        findings.append(Finding("computation", "warning", fact, "do what the failures say, and ask again"))
    else:
        findings.append(_computation(host, timeout, compute))
    return Health(tuple(findings), checked.subject)


def device_nodes(host: MachineInfo, machine: Machine = THIS_MACHINE) -> Finding | None:
    """Return a finding about the device nodes of a machine's chips, without opening one; None without a chip.

    A v5e or later is opened through its IOMMU group, /dev/vfio/<group>, so a container may show all chips on the PCI
    bus and the nodes of a few; a v4 or earlier is /dev/accel<N>.
    """
    chips, _ = find_chips(machine.pci)
    if not chips:
        return None
    name = "device nodes"
    nodes = chip_nodes(machine)
    refused = [node for node in sorted(nodes) if not machine.access(node, os.R_OK | os.W_OK)]
    missing = _without_node([device for _, device in chips], nodes, machine.dev)
    if missing:
        fact = f"{len(missing)} of {len(chips)} chips cannot be opened: no {', no '.join(missing)}"
        fix = "start the container with `--privileged`, or with these devices; on a TPU VM, reboot it"
        return Finding(name, "failure", fact, how_to_start_afresh(host) if host.platform in IMAGES else fix)
    if refused:
        fact = f"this user may not open {', '.join(map(str, refused))}"
        return Finding(name, "failure", fact, f"`sudo chmod a+rw {' '.join(map(str, refused))}`, or run as root")
    return Finding(name, "ok", f"one for each of {len(chips)} chips, in {nodes[0].parent}")


def _without_node(devices: list[Path], nodes: list[Path], dev: Path) -> list[str]:
    """Return the nodes that are missing: by name where the IOMMU group of a chip is known, else by their number."""
    groups = [device / "iommu_group" for device in devices]
    if all(group.exists() for group in groups) and not any(node.name.startswith("accel") for node in nodes):
        wanted = [dev / "vfio" / group.resolve().name for group in groups]
        return [str(node) for node in wanted if node not in nodes]
    return [f"device node in {dev} or {dev}/vfio"] * (len(devices) - len(nodes))


def _computation(host: MachineInfo, timeout: float, compute) -> Finding:
    name, began = "computation", time.monotonic()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # "a rehearsal: ..." is what the finding says
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
        return Finding(name, "failure", fact, "take another machine: this one computes wrongly")
    who = f"{run.cores} x {run.device}" + ("" if host.chips else ", in place of TPU cores,")
    return Finding(name, "ok", f"{who} multiplied and added up as they should, in {time.monotonic() - began:.1f} s")


def _multiply(core) -> float:
    import torch

    ones = torch.ones(_SIDE, _SIDE, device=core.device)  # sums of whole numbers, exact in any precision
    return core.all_reduce((ones @ ones).sum()).item()
