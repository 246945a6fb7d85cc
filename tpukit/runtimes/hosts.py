"""A worker function whose cores are on several hosts, each of which launches its own."""

from collections.abc import Callable

from tpukit.essentials.backends import Topology
from tpukit.essentials.show import Failed


def over_hosts(fn: Callable, topology: Topology, core, *args: object) -> object:
    """Run the worker function where there are several hosts, and leave with the cores of all of them.

    Raises:
        RuntimeError: the devices of the hosts have not become one run; each would train a model of its own.
    """
    if core.world_size != topology.world_size:
        raise Failed(
            f"the hosts' devices did not become one run: {core.world_size} cores of {topology.world_size} are joined",
            found=f"{topology.hosts.count} hosts with {topology.cores} x {topology.device} each",
            fix=(
                "hosts of one slice, all its chips, and what a TPU VM's environment says of it: "
                "TPU_WORKER_HOSTNAMES,"
                "\nTPU_WORKER_ID, TPU_HOST_BOUNDS; CPU processes need one process a core, which Windows lacks"
            ),
        )
    core.hosts = topology.hosts.count
    result = fn(core, *args)
    core.barrier()  # a host that left now would take its part of the others' last collective along
    return result
