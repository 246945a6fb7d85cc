"""What a notebook shows: sample batches, tables, curves, progress, and the look of every figure."""

from tpukit.essentials.show import figure_inputs
from tpukit.essentials.show.bars import duration
from tpukit.essentials.show.figures import show_batch, show_history, show_predictions
from tpukit.essentials.show.findings import Finding, Findings
from tpukit.essentials.show.house_style import (
    COLORS,
    INK,
    MARGIN,
    MUTED,
    PAPER,
    RULE,
    SMALL,
    WIDTH,
    axes_at,
    describe,
    new_figure,
    show_figure,
    style,
)
from tpukit.essentials.show.measures import better
from tpukit.essentials.show.notebook import current_cell, running_shell
from tpukit.essentials.show.progress import Screen, screen
from tpukit.essentials.show.tables import Table, as_html, as_text, counted, human_size, numbers_as_html

__all__ = [
    "COLORS",
    "Finding",
    "Findings",
    "INK",
    "MARGIN",
    "MUTED",
    "PAPER",
    "RULE",
    "SMALL",
    "Screen",
    "Table",
    "WIDTH",
    "as_html",
    "as_text",
    "axes_at",
    "better",
    "counted",
    "current_cell",
    "describe",
    "duration",
    "figure_inputs",
    "human_size",
    "new_figure",
    "numbers_as_html",
    "running_shell",
    "screen",
    "show_batch",
    "show_figure",
    "show_history",
    "show_predictions",
    "style",
]
