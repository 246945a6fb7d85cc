"""Run a worker function whose cores are on several hosts, each of which launches its own cores."""

from collections.abc import Callable

from tpukit.essentials.backends import Topology


def over_hosts(fn: Callable, topology: Topology, core, *args: object) -> object:
    """Run the worker function on this host, and return when the cores of all hosts are done.

    Collective: call it on every core.

    Args:
        fn: the worker function, `fn(core, *args)`.
        topology: of the run; `topology.hosts` counts the hosts.
        core: the `Core` of this process.
        args: more arguments of the worker function.

    Returns:
        The result of the worker function.
    """
    core.hosts = topology.hosts.count
    result = fn(core, *args)
    # If this host left now, the others would lose its part of their last collective.
    core.barrier()
    return result
