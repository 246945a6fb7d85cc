"""Simulate several hosts on this machine: a Ray cluster of several raylets, which can be killed."""

import contextlib
import functools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tpukit.cloud.ray_train import hosts_of_slice, import_ray, keep_signals

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # a test sends no statistics
    # several hosts share what processors there are
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # no cloud takes these hosts back
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
_OBJECT_STORE = 80 * 2**20  # bytes; Ray's default is a third of the memory for each host
# seconds until a host counts as dead
_NOTICE = {"health_check_period_ms": 1000, "health_check_failure_threshold": 10}


class SimulatedHosts:
    """The simulated hosts; the first has the cluster's head and cannot be killed."""

    def __init__(self, cluster, about: Callable[[int], dict]):
        self._cluster = cluster
        self._about = about
        self._nodes = []

    def add(self, **options: object) -> None:
        """Start one more host, with what the one of its number had."""
        about = self._about(len(self._nodes))
        # Only the main thread may register what ends a node at exit; one that a thread starts ends
        # without its head.
        self._cluster._shutdown_at_exit = threading.current_thread() is threading.main_thread()
        self._nodes.append(
            self._cluster.add_node(
                num_cpus=1, object_store_memory=_OBJECT_STORE, **about, **options
            )
        )

    def kill(self) -> int:
        """Kill all processes of the newest host at once; return the number of processes."""
        node = self._nodes.pop()
        (raylet,) = [one.process.pid for one in node.all_processes["raylet"]]
        there = _with_descendants(raylet)
        for process in there:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)
        return len(there)


@contextlib.contextmanager
def hosts_here(
    count: int = 2, *, topology: str | None = None, accelerator: str | None = None
) -> Iterator[SimulatedHosts]:
    """Start hosts of one CPU each on this machine, and connect to their cluster.

    Between them everything is as between machines but the network, which is this machine's own.

    Args: count: hosts, where they are no TPU slice. topology: of a slice that the hosts say they
        are, such as "2x2x2"; Ray then reserves it as it would a real one. accelerator: of the
        slice, as Ray calls it: "TPU-V4".

    Raises:
        ImportError: Ray is not installed.
        ValueError: Ray does not know such a slice.
    """
    ray = import_ray()
    from ray.cluster_utils import Cluster

    about: Callable[[int], dict] = _about_nothing
    if topology is not None:
        count, of_a_host = hosts_of_slice(topology, accelerator)
        about = functools.partial(_about_slice, topology, accelerator, of_a_host["TPU"])
    before = {name: os.environ.get(name) for name in _SETTINGS}
    os.environ |= _SETTINGS
    cluster = Cluster()
    with keep_signals():
        try:
            hosts = SimulatedHosts(cluster, about)
            hosts.add(include_dashboard=False, _system_config=_NOTICE)
            for _ in range(count - 1):
                hosts.add()
            # Without a dashboard, Ray Train would warn every second that it cannot ask it.
            quiet = ray.LoggingConfig(log_level="ERROR")
            ray.init(address=cluster.address, logging_level="error", logging_config=quiet)
            yield hosts
        finally:
            ray.shutdown()
            cluster.shutdown()
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def _about_nothing(_: int) -> dict:
    return {}


def _about_slice(topology: str, accelerator: str, chips: float, number: int) -> dict:
    """Return the description that a TPU VM's node gives to Ray; no host here has a chip."""
    generation = accelerator.lower().removeprefix("tpu-")
    size = math.prod(map(int, topology.split("x"))) * (
        1 if generation in ("v5litepod", "v6e") else 2
    )
    head = {f"TPU-{generation}-{size}-head": 1} if number == 0 else {}
    return {
        "resources": {"TPU": chips, f"accelerator_type:{accelerator}": 1, **head},
        "labels": {
            "ray.io/accelerator-type": accelerator,
            "ray.io/tpu-slice-name": "simulated",
            "ray.io/tpu-worker-id": str(number),
            "ray.io/tpu-topology": topology,
            "ray.io/tpu-pod-type": f"{generation}-{size}",
        },
        "env_vars": {"TPU_NAME": "simulated", "TPU_WORKER_ID": str(number)},
    }


def _with_descendants(process: int) -> list[int]:
    """Return a process and all below it, as /proc tells."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended a moment ago
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
    found = [process]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found
