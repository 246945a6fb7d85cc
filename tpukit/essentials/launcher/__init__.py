"""Run one function on every core: `launch`, `Core`, failures, output."""

from tpukit.essentials.backends import Hosts, Topology
from tpukit.essentials.data import Batches
from tpukit.essentials.launcher import messages
from tpukit.essentials.launcher.calls import refuse_call
from tpukit.essentials.launcher.core import Core
from tpukit.essentials.launcher.core_lookup import current_core
from tpukit.essentials.launcher.core_values import averaged_buffers, called_text, checksum
from tpukit.essentials.launcher.difference import OutOfSyncError
from tpukit.essentials.launcher.failure import Failure
from tpukit.essentials.launcher.flops import FlopCounter
from tpukit.essentials.launcher.gathering import gather_objects
from tpukit.essentials.launcher.launcher import (
    LaunchInterrupted,
    LaunchOptions,
    Run,
    WorkerError,
    collect,
    interrupted,
    launch,
    ready,
    run_on_cores,
    worker_failed,
)
from tpukit.essentials.launcher.session import Session, SessionEndedError
from tpukit.essentials.launcher.signals import (
    STEP_SECONDS,
    Terminated,
    die_with_parent,
    sigterm_ends_the_run,
)
from tpukit.essentials.launcher.tensors import move_module, save_tensors
from tpukit.essentials.launcher.topology import RuntimeInUseError, choose_topology, refuse_if_in_use
from tpukit.essentials.launcher.watchdog import Limits
from tpukit.essentials.launcher.worker import Task, seed_of
from tpukit.essentials.launcher.worker_group import InProcessGroup, WorkerGroup

__all__ = [
    "Batches", "Core", "Failure", "FlopCounter", "Hosts", "InProcessGroup", "LaunchInterrupted",
    "LaunchOptions", "Limits", "OutOfSyncError", "Run", "RuntimeInUseError", "STEP_SECONDS",
    "Session", "SessionEndedError", "Task", "Terminated", "Topology", "WorkerError", "WorkerGroup",
    "averaged_buffers", "called_text", "checksum", "choose_topology", "collect", "current_core",
    "die_with_parent", "gather_objects", "interrupted", "launch", "messages", "move_module",
    "ready", "refuse_call", "refuse_if_in_use", "run_on_cores", "save_tensors", "seed_of",
    "sigterm_ends_the_run", "worker_failed",
]  # fmt: skip
