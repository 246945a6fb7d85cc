"""The display: sample batches, tables, curves, progress, errors as text, the style of figures."""

from tpukit.essentials.display import figure_inputs, figure_style
from tpukit.essentials.display.arguments import check_count, check_flag, check_number
from tpukit.essentials.display.bars import duration
from tpukit.essentials.display.class_names import names_in_order
from tpukit.essentials.display.durations import parse_duration
from tpukit.essentials.display.errors import (
    AccessDeniedError,
    ErrorFields,
    ErrorParts,
    InvalidIndexError,
    InvalidTypeError,
    InvalidValueError,
    NotInstalledError,
    PathExistsError,
    PathNotFoundError,
    SystemFailureError,
    TpukitError,
    TpukitRuntimeError,
    explain,
    kind_of,
    parts_of,
)
from tpukit.essentials.display.figure_style import style_figure
from tpukit.essentials.display.figures import show_batch
from tpukit.essentials.display.findings import Finding, Findings
from tpukit.essentials.display.measures import better
from tpukit.essentials.display.optional import optional_subpackage
from tpukit.essentials.display.progress import Screen, current_cell, running_shell, screen
from tpukit.essentials.display.tables import (
    Table,
    as_html,
    as_text,
    counted,
    first_few,
    human_size,
    plural,
)

__all__ = [
    "AccessDeniedError", "ErrorFields", "ErrorParts", "Finding", "Findings", "InvalidIndexError",
    "InvalidTypeError", "InvalidValueError", "NotInstalledError", "PathExistsError",
    "PathNotFoundError", "Screen", "SystemFailureError", "Table", "TpukitError",
    "TpukitRuntimeError", "as_html", "as_text", "better", "check_count", "check_flag",
    "check_number", "counted", "current_cell", "duration", "explain", "figure_inputs",
    "figure_style", "first_few", "human_size", "kind_of", "names_in_order", "optional_subpackage",
    "parse_duration", "parts_of", "plural", "running_shell", "screen", "show_batch", "style_figure",
]  # fmt: skip
