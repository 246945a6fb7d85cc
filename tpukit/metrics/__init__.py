"""Measure predictions, and draw figures of them."""

from tpukit.metrics.areas import FEW, auroc_table
from tpukit.metrics.comparison import AurocDifference, compare_aurocs
from tpukit.metrics.false_alarms import FalseAlarmPoint, sensitivity_at_false_alarms
from tpukit.metrics.operating_point import OperatingPoint, sensitivity_at
from tpukit.metrics.outcomes import choose_predictions, hardest_mistakes, show_outcomes
from tpukit.metrics.predictions_figure import show_predictions
from tpukit.metrics.reliability import brier_score, calibration_error
from tpukit.metrics.samples import as_array, check_probabilities, count_groups
from tpukit.metrics.score_figures import show_roc

__all__ = [
    "FEW", "AurocDifference", "FalseAlarmPoint", "OperatingPoint", "as_array", "auroc_table",
    "brier_score", "calibration_error", "check_probabilities", "choose_predictions",
    "compare_aurocs", "count_groups", "hardest_mistakes", "sensitivity_at",
    "sensitivity_at_false_alarms", "show_outcomes", "show_predictions", "show_roc",
]  # fmt: skip
