"""Find out why a run is slow, and whether its numbers are right."""

from tpukit.essentials.display import parse_duration
from tpukit.profiling.device_report import Report, report
from tpukit.profiling.instruments import graph_text, named, record_lines
from tpukit.profiling.parity import Comparison, LayerDifference, compare
from tpukit.profiling.profiler import profile
from tpukit.profiling.recompiles import RecompileMonitor, what_differs
from tpukit.profiling.stopwatch import Stopwatch
from tpukit.profiling.tpus import TPUS, Tpu, find_tpu

__all__ = [
    "Comparison", "LayerDifference", "RecompileMonitor", "Report", "Stopwatch", "TPUS", "Tpu",
    "compare", "find_tpu", "graph_text", "named", "parse_duration", "profile", "record_lines",
    "report", "what_differs",
]  # fmt: skip
