"""Whether every chip on the PCI bus has a device node that this process may open."""

import os
from pathlib import Path

from tpukit.essentials.machine import IMAGES, THIS_MACHINE, Host, Machine, chip_nodes, find_chips, how_to_start_afresh
from tpukit.essentials.show import Finding


def device_nodes(host: Host, machine: Machine = THIS_MACHINE) -> Finding | None:
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
