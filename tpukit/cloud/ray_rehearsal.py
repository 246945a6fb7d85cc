"""Hosts played by this machine: a Ray cluster of several raylets, to rehearse a run over hosts, and the loss of one."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tpukit.cloud.ray_train import import_ray

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing of a rehearsal is anybody's business
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",  # several hosts share what processors there are
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # no cloud takes these hosts back
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
_OBJECT_STORE = 80 * 2**20  # bytes; Ray's default is a third of the memory for each host
_NOTICE = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}  # seconds until a host counts as dead


class RehearsedHosts:
    """The hosts of a rehearsal; the first has the cluster's head and cannot be lost."""

    def __init__(self, cluster, resources: dict[str, float]):
        self._cluster, self._resources = cluster, resources
        self._others = []

    def add(self) -> None:
        """Start one more host."""
        self._others.append(
            self._cluster.add_node(num_cpus=1, resources=self._resources, object_store_memory=_OBJECT_STORE)
        )

    def kill(self) -> int:
        """Kill the newest host as a loss of power would, every process of it at once; return how many those were."""
        node = self._others.pop()
        (raylet,) = [one.process.pid for one in node.all_processes["raylet"]]
        there = _with_descendants(raylet)
        for process in there:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)
        return len(there)


@contextlib.contextmanager
def hosts_here(count: int = 2, *, resources: dict[str, float] | None = None) -> Iterator[RehearsedHosts]:
    """Play so many hosts of one CPU each on this machine, and be connected to their cluster.

    Everything between them is as it is between machines but the network: it is this machine's own.

    Args:
        count: hosts, 2 or more.
        resources: what each has beside its CPU, as Ray counts it.

    Raises:
        ImportError: Ray is not installed.
    """
    ray = import_ray()
    from ray.cluster_utils import Cluster

    before = {name: os.environ.get(name) for name in _SETTINGS}
    os.environ |= _SETTINGS
    cluster = Cluster()
    try:
        cluster.add_node(
            num_cpus=1,
            resources=resources or {},
            object_store_memory=_OBJECT_STORE,
            include_dashboard=False,
            _system_config=_NOTICE,
        )
        hosts = RehearsedHosts(cluster, resources or {})
        for _ in range(count - 1):
            hosts.add()
        ray.init(address=cluster.address, logging_level="warning")
        yield hosts
    finally:
        ray.shutdown()
        cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


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
