"""Small tables: aligned text in a terminal, plain HTML in a notebook."""

import html as _html
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence

_NARROWEST = 8  # characters; no column is made narrower than this
_WIDEST = 120  # characters of a table in a terminal
_GAP = 2  # spaces between two columns

# Mid-tones: each has a contrast of 3:1 or more on white and on #111 (WCAG 2.1, 1.4.11). Only the
# dot is coloured. The text has the notebook's own colour, so it is legible in any theme.
_DOTS = {"ok": "#2f9e5f", "info": "#3b7dd8", "warning": "#c77d0a", "failure": "#dc4c4c"}


class Table:
    """Base of objects that appear as a table: text when printed, HTML in a notebook.

    A subclass defines the method `rows()`, which returns the cells of each row. It may define
    `title`.
    """

    title = ""

    def __str__(self) -> str:
        parts = (self.title, as_text(self.rows()))
        return "\n\n".join(filter(None, parts))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self.rows(), title=self.title)


def as_text(rows: Sequence[Sequence[str]], *, width: int | None = None) -> str:
    """Return rows as aligned columns, two spaces apart; long cells are wrapped.

    Args:
        rows: the cells of each row. A line break in a cell starts a new line in that cell.
        width: width of the table in characters. None means the width of the terminal, at most 120.
            Without a terminal, None means 100.
    """
    if not rows:
        return ""
    width = width or min(shutil.get_terminal_size((100, 0)).columns, _WIDEST)
    cells = [[_lines(cell) for cell in row] for row in rows]
    widths = _column_widths(cells, width)
    lines = []
    for row in cells:
        wrapped = [_wrap(cell, size) for cell, size in zip(row, widths, strict=True)]
        height = max(map(len, wrapped))  # lines of the row: those of its longest cell
        for number in range(height):
            parts = []
            for cell, size in zip(wrapped, widths, strict=True):
                text = cell[number] if number < len(cell) else ""
                parts.append(text.ljust(size))
            lines.append((" " * _GAP).join(parts).rstrip())
    return "\n".join(lines)


def _column_widths(cells: Sequence[Sequence[list[str]]], width: int) -> list[int]:
    """Return the widths of columns in characters.

    The widest column shrinks until the table fits `width`, or no column has more than 8 characters.
    """
    widths = []
    for column in zip(*cells, strict=True):
        widths.append(max(_longest(cell) for cell in column))
    gaps = _GAP * (len(widths) - 1)
    # A character at a time, so that several wide columns share the loss.
    while sum(widths) + gaps > width and max(widths) > _NARROWEST:
        widest = widths.index(max(widths))
        widths[widest] -= 1
    return widths


def _longest(lines: list[str]) -> int:
    return max(map(len, lines))


def as_html(rows: Sequence[Sequence[str]], *, title: str = "") -> str:
    """Return rows as an HTML table, in the text colour of the notebook.

    Cells are escaped, and line breaks remain. Text between backticks becomes code. A cell with
    exactly the text ok, info, warning or failure gets a dot in the colour of that state.

    Args:
        rows: the cells of each row.
        title: a heading; "" for none.
    """
    # JupyterLab colours every second row and aligns cells to the right, and Colab draws borders.
    # Inline styles override both.
    cell_style = (
        "padding:4px 18px 4px 0;text-align:left;vertical-align:top;"
        "white-space:normal;overflow-wrap:anywhere;border:none;"
    )
    first = f"{cell_style}white-space:nowrap;"
    rest = f"{cell_style}max-width:48em;"
    row_style = "background:none;border:none;border-top:1px solid rgba(128,128,128,.3)"
    parts = []
    for row in rows:
        cells = []
        for number, cell in enumerate(row):
            style = first if number == 0 else rest
            cells.append(f'<td style="{style}">{_cell(str(cell))}</td>')
        parts.append(f'<tr style="{row_style}">{"".join(cells)}</tr>')
    heading = ""
    if title:
        text = _html.escape(title)
        heading = f'<div style="padding:0 0 4px;font-weight:600">{text}</div>'
    style = (
        "border-collapse:collapse;border:none;background:none;color:inherit;font:inherit;margin:0"
    )
    table = f'<table style="{style}">{"".join(parts)}</table>'
    return f'<div style="font-size:13px;line-height:1.45">{heading}{table}</div>'


def counted(number: int, singular: str) -> str:
    """Return a number and its noun: 1 file, 2 files."""
    noun = plural(singular)
    if number == 1:
        noun = singular
    return f"{number:,} {noun}"


def first_few(values: Iterable, limit: int = 3) -> str:
    """Return the first values and the number of further ones: `a, b, c and 12 more`."""
    words = [str(value) for value in values]
    shown = ", ".join(words[:limit])
    hidden = len(words) - limit
    if hidden > 0:
        return f"{shown} and {hidden:,} more"
    return shown


def plural(singular: str) -> str:
    """Return the plural of a noun: files, classes, studies."""
    if singular.endswith("y") and not singular.endswith(("ay", "ey", "oy", "uy")):
        return f"{singular[:-1]}ies"
    if singular.endswith(("s", "x", "ch", "sh")):
        return f"{singular}es"
    return f"{singular}s"


def human_size(size: int | None) -> str:
    """Return a number of bytes as KiB, MiB or GiB; "unknown" for None."""
    if size is None:
        return "unknown"
    if 0 < size < 2**20:
        return f"{size / 2**10:.0f} KiB"
    if size < 2**30:
        return f"{size / 2**20:.0f} MiB"
    return f"{size / 2**30:.1f} GiB"


def _cell(text: str) -> str:
    if text in _DOTS:
        return f'<span style="color:{_DOTS[text]}">&#9679;</span>&nbsp;{text}'
    lines = [_printable(line) for line in text.splitlines()]
    text = _html.escape("\n".join(lines)).replace("\n", "<br>")
    style = "background:none;color:inherit;font-size:inherit;padding:0;white-space:pre-wrap"
    return re.sub(r"`([^`]+)`", rf'<code style="{style}">\1</code>', text)


def _lines(cell: object) -> list[str]:
    return [_printable(line) for line in str(cell).splitlines()] or [""]


def _wrap(lines: list[str], width: int) -> list[str]:
    wrapped = []
    for line in lines:
        # Hyphens are not break points: `--no-deps` and `v5e-1` stay whole.
        # A column of empty cells has the width 0, which textwrap refuses.
        wrapped += textwrap.wrap(line, max(1, width), break_on_hyphens=False) or [""]
    return wrapped


def _printable(line: str) -> str:
    """Replace invisible characters, as in a terminal escape sequence of a command line."""
    return "".join(letter if letter.isprintable() else "?" for letter in line.expandtabs(4))
