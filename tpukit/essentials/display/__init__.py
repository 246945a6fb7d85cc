"""What a notebook shows: sample batches, tables, curves, progress, and the look of every figure."""

from tpukit.essentials.display import figure_inputs, figure_style
from tpukit.essentials.display.bars import duration
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
from tpukit.essentials.display.notebook import current_cell, running_shell
from tpukit.essentials.display.optional import load_part, missing_part
from tpukit.essentials.display.progress import Screen, screen
from tpukit.essentials.display.tables import Table, as_html, as_text, counted, first_few, human_size, plural

__all__ = [
    "AccessDeniedError", "ErrorFields", "ErrorParts", "InvalidIndexError", "PathExistsError", "TpukitError",
    "TpukitRuntimeError", "parts_of", "PathNotFoundError", "NotInstalledError", "SystemFailureError",
    "InvalidTypeError", "InvalidValueError", "explain",
    "Finding", "Findings", "Screen", "Table", "as_html", "as_text", "better", "counted", "current_cell", "duration",
    "figure_inputs", "first_few", "figure_style", "human_size", "kind_of", "load_part", "missing_part",
    "plural", "running_shell", "screen", "show_batch", "style_figure",
]  # fmt: skip
