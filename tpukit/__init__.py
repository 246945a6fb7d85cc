"""PyTorch on every TPU core, from a notebook. This page is the table of contents; importing it loads no torch."""

from tpukit import pe
from tpukit.check import Check, Finding, RuntimeCheckFailed, check
from tpukit.core import Core
from tpukit.environment import Changes, prepare
from tpukit.host import Host, NoTPU, host
from tpukit.launch import Interrupted, Run, WorkerFailed, launch
from tpukit.leftovers import Released, release
from tpukit.plan import RuntimeInUse
from tpukit.show import show_batch, show_history, show_predictions

__version__ = "0.1.0"

__all__ = [
    "Changes",
    "Check",
    "Core",
    "Finding",
    "Host",
    "Interrupted",
    "NoTPU",
    "Released",
    "Run",
    "RuntimeCheckFailed",
    "RuntimeInUse",
    "WorkerFailed",
    "check",
    "host",
    "launch",
    "pe",
    "prepare",
    "release",
    "show_batch",
    "show_history",
    "show_predictions",
]
