"""PyTorch on every TPU core, from a notebook. This page is the table of contents; importing it loads no torch."""

from tpukit import pe, schedules
from tpukit.augment import Augment
from tpukit.averaging import moving_average
from tpukit.cache import Cache
from tpukit.caching import build_cache, cache_or_decode
from tpukit.check import Check, Finding, RuntimeCheckFailed, check
from tpukit.core import Core
from tpukit.environment import Changes, prepare
from tpukit.evaluation import Evaluation, evaluate
from tpukit.finite import NotFinite
from tpukit.history import History
from tpukit.host import Host, NoTPU, host
from tpukit.launch import Interrupted, Run, WorkerFailed, launch
from tpukit.leftovers import Released, release
from tpukit.norm import sync_batchnorm
from tpukit.packing import pack
from tpukit.plan import RuntimeInUse
from tpukit.profiling import profile
from tpukit.records import Records
from tpukit.report import Report
from tpukit.show import show_batch, show_history, show_predictions
from tpukit.tfrecords import read_tfrecords
from tpukit.training import fit

__version__ = "0.1.0"

__all__ = [
    "Augment",
    "Cache",
    "Changes",
    "Check",
    "Core",
    "Evaluation",
    "Finding",
    "History",
    "Host",
    "Interrupted",
    "NoTPU",
    "NotFinite",
    "Records",
    "Released",
    "Report",
    "Run",
    "RuntimeCheckFailed",
    "RuntimeInUse",
    "WorkerFailed",
    "build_cache",
    "cache_or_decode",
    "check",
    "evaluate",
    "fit",
    "host",
    "launch",
    "moving_average",
    "pack",
    "pe",
    "prepare",
    "profile",
    "read_tfrecords",
    "release",
    "schedules",
    "show_batch",
    "show_history",
    "show_predictions",
    "sync_batchnorm",
]
