"""Compile a training step with the TPU's own compiler, on a machine without a TPU."""

from tpukit.preflight.compiler import CompileFailed
from tpukit.preflight.libtpu import NoLibtpu, fetch_libtpu
from tpukit.preflight.recording import NoPreflight
from tpukit.preflight.search import LargestBatch, compare_preflights, largest_batch
from tpukit.preflight.step_report import Preflight, preflight
from tpukit.preflight.tpu_picture import show_tpu

__all__ = [
    "CompileFailed", "LargestBatch", "NoLibtpu", "NoPreflight", "Preflight", "compare_preflights",
    "fetch_libtpu", "largest_batch", "preflight", "show_tpu",
]  # fmt: skip
