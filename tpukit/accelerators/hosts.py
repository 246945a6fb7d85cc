"""Run over several hosts: each host launches its own cores, and all cores connect."""

import functools
from collections.abc import Callable

from tpukit.essentials.launcher import Core, Hosts, LaunchOptions, Run, refuse_call, run_on_cores


def launch_on_host(hosts: Hosts, fn: Callable, *args: object, **options: object) -> Run:
    """Run `fn(core, *args)` on every core of this host, as a part of a run over several hosts.

    Call this function on every host, with the same arguments except for `hosts`.
    `tpukit.cloud.ray_train` does that. `core.rank` and `core.world_size` count the cores of all
    hosts. tpukit does not report a core as stalled while the core waits for another host.

    Args:
        hosts: the index of this host, how many hosts there are, and the address of the first host.
        fn: the worker function; its first argument is a `Core`.
        *args: further arguments of `fn`.
        **options: options of `launch`, except `shard` and `device`, which are not supported.

    Returns:
        the `Run` of this host's cores.

    Raises:
        the errors of `launch`.
    """
    refuse_call(fn, args)
    on_core = functools.partial(_run_and_wait, fn)
    return run_on_cores(on_core, args, LaunchOptions(hosts=hosts, **options))


def _run_and_wait(fn: Callable, core: Core, *args: object) -> object:
    """Run the worker function, and return when the cores of all hosts have finished it."""
    result = fn(core, *args)
    # If this process ended now, a last collective of the other hosts could fail.
    core.barrier()
    return result
