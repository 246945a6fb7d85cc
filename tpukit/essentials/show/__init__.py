"""What a notebook shows: sample batches, tables, curves, progress, and the look of every figure."""

from tpukit.essentials.show import figure_inputs, house_style
from tpukit.essentials.show.bars import duration
from tpukit.essentials.show.errors import (
    Explained,
    Failed,
    NoSuchFile,
    NotInstalled,
    SystemFailed,
    WrongType,
    WrongValue,
    explain,
    kind_of,
)
from tpukit.essentials.show.figures import show_batch
from tpukit.essentials.show.findings import Finding, Findings
from tpukit.essentials.show.house_style import show_figure
from tpukit.essentials.show.measures import better
from tpukit.essentials.show.notebook import current_cell, running_shell
from tpukit.essentials.show.parts import load_part, missing_part
from tpukit.essentials.show.progress import Screen, screen
from tpukit.essentials.show.tables import Table, as_html, as_text, counted, first_few, human_size, plural

__all__ = [
    "Explained", "Failed", "NoSuchFile", "NotInstalled", "SystemFailed", "WrongType", "WrongValue", "explain",
    "Finding", "Findings", "Screen", "Table", "as_html", "as_text", "better", "counted", "current_cell", "duration",
    "figure_inputs", "first_few", "house_style", "human_size", "kind_of", "load_part", "missing_part",
    "plural", "running_shell", "screen", "show_batch", "show_figure",
]  # fmt: skip
