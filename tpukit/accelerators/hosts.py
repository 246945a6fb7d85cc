"""A run over several hosts: each host launches its own cores, and all cores connect."""

import functools
from collections.abc import Callable

from tpukit.essentials.launcher import Core, Hosts, LaunchOptions, Run, refuse_call, run_on_cores


def launch_on_host(hosts: Hosts, fn: Callable, *args: object, **options: object) -> Run:
    """Run `fn(core, *args)` on every core of this host, as a part of a run over several hosts.

    Every host calls it with the same arguments, except for `hosts`. `core.rank` and
    `core.world_size` count the cores of all hosts. `tpukit.cloud.ray_train` finds the hosts and
    calls this on each. A core that waits for another host does not count as stalled, because only
    that host knows the state of its cores.

    Args:
        hosts: the number of this host, the number of hosts, and the address at which they connect.
        fn: the worker function; its first argument is a `Core`.
        *args: further arguments of `fn`.
        **options: options of `launch`. `shard` and `device` are not supported.

    Returns:
        The `Run` of this host's cores.

    Raises:
        As `launch`.
    """
    refuse_call(fn, args)
    on_core = functools.partial(_run_and_wait, fn)
    return run_on_cores(on_core, args, LaunchOptions(hosts=hosts, **options))


def _run_and_wait(fn: Callable, core: Core, *args: object) -> object:
    """Run the worker function as a single core, and return when all cores of all hosts have."""
    result = fn(core, *args)
    # If this host left now, the others would lose its part of their last collective.
    core.barrier()
    return result
