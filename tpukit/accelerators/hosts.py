"""A worker function whose cores are on several hosts, each of which launches its own."""

from collections.abc import Callable

from tpukit.essentials.backends import Topology


def over_hosts(fn: Callable, topology: Topology, core, *args: object) -> object:
    """Run the worker function where there are several hosts, and leave with the cores of all of them."""
    core.hosts = topology.hosts.count
    result = fn(core, *args)
    core.barrier()  # a host that left now would take its part of the others' last collective along
    return result
