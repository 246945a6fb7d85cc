"""Compile a training step with the TPU's own compiler, on a machine without a TPU."""

from tpukit.preflight.compiler import CompileError
from tpukit.preflight.libtpu import LibtpuNotFoundError, fetch_libtpu
from tpukit.preflight.recording import PreflightError
from tpukit.preflight.search import LargestBatch, compare_preflights, largest_batch
from tpukit.preflight.step_report import Preflight, preflight
from tpukit.preflight.tpu_picture import draw_tpu

__all__ = [
    "CompileError", "LargestBatch", "LibtpuNotFoundError", "PreflightError", "Preflight",
    "compare_preflights", "fetch_libtpu", "largest_batch", "preflight", "draw_tpu",
]  # fmt: skip
