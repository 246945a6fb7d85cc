"""One function on every core: launch, `Core`, failures, output."""

from tpukit.essentials.backends import Hosts
from tpukit.essentials.run.core import Core
from tpukit.essentials.run.difference import Differs
from tpukit.essentials.run.held import averaged_places
from tpukit.essentials.run.jobs import Jobs, launch_each
from tpukit.essentials.run.launcher import Interrupted, Run, WorkerFailed, collect, launch, worker_failed
from tpukit.essentials.run.log_writers import Row
from tpukit.essentials.run.objects import gather_objects
from tpukit.essentials.run.signals import STEP_SECONDS, Terminated, die_with_parent, sigterm_ends_the_run
from tpukit.essentials.run.tensors import save_tensors
from tpukit.essentials.run.this_core import core
from tpukit.essentials.run.topology import RuntimeInUse, choose_topology, refuse_if_in_use
from tpukit.essentials.run.watchdog import Limits
from tpukit.essentials.run.worker import Task
from tpukit.essentials.run.worker_group import WorkerGroup

__all__ = [
    "Core", "Differs", "Hosts", "Interrupted", "Jobs", "Limits", "Row", "Run", "RuntimeInUse", "STEP_SECONDS",
    "Task", "Terminated", "WorkerFailed", "WorkerGroup", "averaged_places", "choose_topology", "collect", "core",
    "die_with_parent", "gather_objects", "launch", "launch_each", "refuse_if_in_use", "save_tensors",
    "sigterm_ends_the_run", "worker_failed",
]  # fmt: skip
