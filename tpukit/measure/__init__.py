"""Find out why a run is slow, and whether its numbers are right."""

from tpukit.measure.device_report import Report, report
from tpukit.measure.durations import parse_duration
from tpukit.measure.instruments import graph_text, named, record_lines
from tpukit.measure.parity import Comparison, LayerDifference, compare
from tpukit.measure.profiler import profile
from tpukit.measure.recompiles import RecompileMonitor, what_differs
from tpukit.measure.stopwatch import Stopwatch
from tpukit.measure.tpus import TPUS, Tpu, find_tpu

__all__ = [
    "Comparison", "LayerDifference", "RecompileMonitor", "Report", "Stopwatch", "TPUS", "Tpu",
    "compare", "find_tpu", "graph_text", "named", "parse_duration", "profile", "record_lines",
    "report", "what_differs",
]  # fmt: skip
