"""One function on every core: launch, `Core`, failures, output."""

from tpukit.essentials.backends import Hosts, Topology
from tpukit.essentials.data import Batches
from tpukit.essentials.run.calls import refuse_call
from tpukit.essentials.run.core import Core
from tpukit.essentials.run.difference import Differs
from tpukit.essentials.run.failure import Failure
from tpukit.essentials.run.held import averaged_places
from tpukit.essentials.run.launcher import Interrupted, Run, WorkerFailed, collect, launch, ready, worker_failed
from tpukit.essentials.run.objects import gather_objects
from tpukit.essentials.run.signals import STEP_SECONDS, Terminated, die_with_parent, sigterm_ends_the_run
from tpukit.essentials.run.tensors import save_tensors
from tpukit.essentials.run.this_core import core
from tpukit.essentials.run.topology import RuntimeInUse, choose_topology, refuse_if_in_use
from tpukit.essentials.run.watchdog import Limits
from tpukit.essentials.run.worker import Task, seed_of
from tpukit.essentials.run.worker_group import InProcessGroup, WorkerGroup

__all__ = [
    "Batches", "Core", "Differs", "Failure", "Hosts", "InProcessGroup", "Interrupted", "Limits", "Run",
    "RuntimeInUse", "STEP_SECONDS", "Task", "Terminated", "Topology", "WorkerFailed", "WorkerGroup", "averaged_places",
    "choose_topology", "collect", "core", "die_with_parent", "gather_objects", "launch", "ready", "refuse_call",
    "refuse_if_in_use", "save_tensors", "seed_of", "sigterm_ends_the_run", "worker_failed",
]  # fmt: skip
