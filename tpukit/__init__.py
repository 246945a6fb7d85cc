"""PyTorch on every TPU core, from a notebook. This page is the table of contents; importing it loads no torch."""

from tpukit import pe
from tpukit.cloud.answers import CloudFailed
from tpukit.cloud.health import Health, health
from tpukit.data.augment import Augment
from tpukit.data.buckets import Buckets
from tpukit.diagnostics.profiler import profile
from tpukit.diagnostics.report import Report
from tpukit.diagnostics.stopwatch import Stopwatch
from tpukit.display.figures import show_batch, show_history, show_predictions
from tpukit.display.findings import Finding
from tpukit.display.log_writers import CsvWriter, TensorBoardWriter
from tpukit.display.outcomes import choose_predictions, hardest_mistakes, show_outcomes
from tpukit.display.score_figures import show_roc
from tpukit.display.scores import auroc_table
from tpukit.display.study import Study, show_study
from tpukit.display.tpu_picture import show_tpu
from tpukit.distributed.core import Core
from tpukit.distributed.jobs import Jobs, launch_each
from tpukit.distributed.launcher import Interrupted, Run, WorkerFailed, launch
from tpukit.distributed.topology import RuntimeInUse
from tpukit.machine.chips import ChipsBusy
from tpukit.machine.environment import Changes, prepare
from tpukit.machine.host import Host, host
from tpukit.machine.orphans import Released, release
from tpukit.machine.runtime_check import Check, RuntimeCheckFailed, check
from tpukit.preflight.compiler import CompileFailed
from tpukit.preflight.libtpu import NoLibtpu, fetch_libtpu
from tpukit.preflight.recording import NoPreflight
from tpukit.preflight.report import Preflight, preflight
from tpukit.preflight.search import LargestBatch, compare_preflights, largest_batch
from tpukit.storage.build_pixel_cache import build_cache, cache_or_decode
from tpukit.storage.packing import pack
from tpukit.storage.pixel_cache import Cache
from tpukit.storage.records import Records
from tpukit.storage.tfrecords import read_tfrecords
from tpukit.training import schedules
from tpukit.training.batchnorm import sync_batchnorm
from tpukit.training.evaluation import Evaluation, evaluate
from tpukit.training.history import History
from tpukit.training.losses import NotFinite
from tpukit.training.parity import Comparison, LayerDifference, compare
from tpukit.training.prediction import predict
from tpukit.training.trainer import fit

__version__ = "0.1.0"


def __getattr__(name: str):
    """Return what is defined with torch, imported when it is asked for: the class of an optimiser."""
    if name == "LARS":
        from tpukit.training.lars import LARS

        return LARS
    raise AttributeError(f"module 'tpukit' has no attribute {name!r}")


__all__ = [
    "Augment",
    "Buckets",
    "Cache",
    "Changes",
    "Check",
    "ChipsBusy",
    "CloudFailed",
    "Comparison",
    "CompileFailed",
    "Core",
    "CsvWriter",
    "Evaluation",
    "Finding",
    "Health",
    "History",
    "Host",
    "Interrupted",
    "Jobs",
    "LARS",
    "LargestBatch",
    "LayerDifference",
    "NoLibtpu",
    "NoPreflight",
    "NotFinite",
    "Preflight",
    "Records",
    "Released",
    "Report",
    "Run",
    "RuntimeCheckFailed",
    "RuntimeInUse",
    "Stopwatch",
    "Study",
    "TensorBoardWriter",
    "WorkerFailed",
    "auroc_table",
    "build_cache",
    "cache_or_decode",
    "check",
    "choose_predictions",
    "compare",
    "compare_preflights",
    "evaluate",
    "fetch_libtpu",
    "fit",
    "hardest_mistakes",
    "health",
    "host",
    "largest_batch",
    "launch",
    "launch_each",
    "pack",
    "pe",
    "predict",
    "preflight",
    "prepare",
    "profile",
    "read_tfrecords",
    "release",
    "schedules",
    "show_batch",
    "show_history",
    "show_outcomes",
    "show_predictions",
    "show_roc",
    "show_study",
    "show_tpu",
    "sync_batchnorm",
]
