"""Small tables for everything that tpukit shows: aligned text in a terminal, plain HTML in a notebook."""

import html as _html
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence

_NARROWEST = 8  # characters; no column is made narrower than this

# Mid-tones: each has a contrast of 3:1 or more on white and on #111 (WCAG 2.1, 1.4.11). Only the dot is coloured; the
# words inherit the notebook's own colour, so they are legible in any theme.
_DOTS = {"ok": "#2f9e5f", "info": "#3b7dd8", "warning": "#c77d0a", "failure": "#dc4c4c"}


class Table:
    """What shows itself as a table: text when it is printed, HTML in a notebook.

    A subclass has `rows()`, which returns the cells of each row, and may have a `title`.
    """

    title = ""

    def __str__(self) -> str:
        return "\n\n".join(part for part in (self.title, as_text(self.rows())) if part)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(self.rows(), title=self.title)


def as_text(rows: Sequence[Sequence[str]], *, width: int | None = None) -> str:
    """Draw rows as aligned columns, two spaces apart; long cells are wrapped.

    A line break in a cell starts a new line in that cell. `width` is in characters; None takes the terminal's width,
    at most 120, and 100 where there is no terminal.
    """
    if not rows:
        return ""
    width = width or min(shutil.get_terminal_size((100, 0)).columns, 120)
    cells = [[[_printable(line) for line in str(cell).splitlines()] or [""] for cell in row] for row in rows]
    widths = [max(len(line) for cell in column for line in cell) for column in zip(*cells, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in cells:
        wrapped = [_wrap(cell, columns) for cell, columns in zip(row, widths, strict=True)]
        for i in range(max(map(len, wrapped))):
            parts = [(cell[i] if i < len(cell) else "").ljust(size) for cell, size in zip(wrapped, widths, strict=True)]
            lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def as_html(rows: Sequence[Sequence[str]], *, title: str = "") -> str:
    """Draw rows as an HTML table without a background, in the notebook's own text colour.

    Cells are escaped. A line break is kept, text between backticks is shown as code, and a cell that is exactly ok,
    warning or failure gets a dot in the colour of that state.
    """
    # JupyterLab stripes the rows and aligns cells to the right, Colab draws borders: inline styles override both.
    cell_style = "padding:4px 18px 4px 0;text-align:left;vertical-align:top;white-space:normal;overflow-wrap:anywhere;"
    first, rest = cell_style + "border:none;white-space:nowrap;", cell_style + "border:none;max-width:48em;"
    body = "".join(
        '<tr style="background:none;border:none;border-top:1px solid rgba(128,128,128,.3)">'
        + "".join(f'<td style="{rest if i else first}">{_cell(str(cell))}</td>' for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    heading = f'<div style="padding:0 0 4px;font-weight:600">{_html.escape(title)}</div>' if title else ""
    table = "border-collapse:collapse;border:none;background:none;color:inherit;font:inherit;margin:0"
    return f'<div style="font-size:13px;line-height:1.45">{heading}<table style="{table}">{body}</table></div>'


def counted(number: int, one: str) -> str:
    """Write how many there are of something: 1 file, 2 files."""
    return f"{number:,} {one if number == 1 else plural(one)}"


def first_few(values: Iterable, limit: int = 3) -> str:
    """List the first values, and how many more there are: a, b, c and 12 more."""
    words = [str(value) for value in values]
    return ", ".join(words[:limit]) + f" and {len(words) - limit:,} more" * (len(words) > limit)


def plural(one: str) -> str:
    """Write the plural of a word: files, classes, studies."""
    return f"{one[:-1]}ies" if one.endswith("y") else f"{one}es" if one.endswith("s") else f"{one}s"


def human_size(size: int | None) -> str:
    """Write a number of bytes as KiB, MiB or GiB; "unknown" for None."""
    if size is None:
        return "unknown"
    if 0 < size < 2**20:
        return f"{size / 2**10:.0f} KiB"
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"


def _cell(text: str) -> str:
    if text in _DOTS:
        return f'<span style="color:{_DOTS[text]}">&#9679;</span>&nbsp;{text}'
    text = _html.escape("\n".join(_printable(line) for line in text.splitlines())).replace("\n", "<br>")
    code = '<code style="background:none;color:inherit;font-size:inherit;padding:0;white-space:pre-wrap">'
    return re.sub(r"`([^`]+)`", rf"{code}\1</code>", text)


def _wrap(cell: list[str], width: int) -> list[str]:
    # Hyphens are not break points: `--no-deps` and `v5e-1` stay whole.
    return [part for line in cell for part in textwrap.wrap(line, width, break_on_hyphens=False) or [""]]


def _printable(line: str) -> str:
    """Replace control characters: the command line of a process may contain a terminal escape sequence."""
    return "".join(character if character.isprintable() else "?" for character in line.expandtabs(4))
