"""The live panel as HTML: a line of status, a row per loop, a row per core if cores differ, curves.

The HTML has inline styles only, no script, and colours that are legible on white and on dark. So
every notebook shows it in the same way, also a saved notebook. When a run has ended, its curves
become images, which Jupyter shows even in a notebook that is not trusted.
"""

import html
from collections.abc import Sequence

from tpukit.essentials.display.bars import Bar
from tpukit.essentials.display.curves import Points, charts_html

_MOST_ROWS = 5  # loops that are over; all running loops are shown
# Mid-tones with a contrast of 3:1 or more on white and on #111 (WCAG 2.1, 1.4.11). Text has the
# notebook's own colour.
_RUNNING = "#3b78c2"
_DONE = "#2f9e5f"
_WAITING = "#c77d0a"
_FAILED = "#dc4c4c"
_DOTS = {
    "running": _RUNNING,
    "busy": _WAITING,
    "done": _DONE,
    "interrupted": _WAITING,
    "failed": _FAILED,
}
_OVER = ("done", "interrupted", "failed")
_FIGURES = "font-variant-numeric:tabular-nums"
_ROW = "background:none;border:none;"
_CELL = (
    "border:none;text-align:left;vertical-align:middle;white-space:nowrap;padding:2px 16px 2px 0;"
)
_NUMBER = f"{_CELL}text-align:right;{_FIGURES};"
_QUIET = "opacity:.7;"
_TABLE = (
    "border-collapse:collapse;border:none;background:none;color:inherit;font:inherit;margin:2px 0 0"
)


def panel_html(
    bars: Sequence[Bar],
    curves: dict[str, Points],
    state: str,
    status: str,
    cores: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the panel as HTML.

    Args:
        bars: the loops, the outer before the inner.
        curves: logged numbers by name.
        state: "running", "busy" if the run waits or compiles, "done", "interrupted" or "failed".
        status: the state in words.
        cores: (core, activity in words) of each core if their activities differ; otherwise empty.
    """
    dot = f'<span style="color:{_DOTS[state]}">&#9679;</span>'
    line = f'<div style="min-height:1.6em;{_FIGURES}">{dot}&nbsp; {html.escape(status)}</div>'
    parts = [line]
    rows = _rows(bars, cores)
    if rows:
        parts.append(f'<table style="{_TABLE}">{"".join(rows)}</table>')
    if curves:
        charts = charts_html(curves, as_images=state in _OVER)
        parts.append(f'<div style="margin-top:10px">{charts}</div>')
    style = "font-size:13px;line-height:1.5;color:inherit;padding:2px 0 6px 5px"
    return f'<div style="{style}">{"".join(parts)}</div>'


def _rows(bars: Sequence[Bar], cores: Sequence[tuple[str, str]]) -> list[str]:
    shown = shown_bars(bars)
    rows = []
    # A line for all older loops, so that the panel does not grow during a long run.
    if hidden := len(bars) - len(shown):
        text = "1 more loop is over"
        if hidden > 1:
            text = f"{hidden} more loops are over"
        rows.append(f'<tr style="{_ROW}"><td colspan="4" style="{_CELL}{_QUIET}">{text}</td></tr>')
    rows += [_row(bar) for bar in shown]
    for core, text in cores:
        rows.append(
            f'<tr style="{_ROW}"><td style="{_CELL}">{html.escape(core)}</td>'
            f'<td colspan="3" style="{_CELL}{_QUIET}{_FIGURES}">{html.escape(text)}</td></tr>'
        )
    return rows


def shown_bars(bars: Sequence[Bar]) -> list[Bar]:
    """Return the running bars, and the last five of the bars that are over."""
    over = [bar for bar in bars if not bar.running]
    hidden = {id(bar) for bar in over[:-_MOST_ROWS]}
    return [bar for bar in bars if id(bar) not in hidden]


def _row(bar: Bar) -> str:
    details = "  ·  ".join(filter(None, (bar.rate(), bar.time(), bar.note)))
    count = f"{bar.done:,}"
    if bar.total:
        count = f"{bar.done:,} / {bar.total:,}"
    return (
        f'<tr style="{_ROW}"><td style="{_CELL}">{html.escape(bar.label)}</td>'
        f'<td style="{_CELL}">{_track(bar)}</td><td style="{_NUMBER}">{count}</td>'
        f'<td style="{_CELL}{_QUIET}{_FIGURES}">{html.escape(details)}</td></tr>'
    )


def _track(bar: Bar) -> str:
    color = _WAITING
    if bar.finished:
        color = _DONE
    elif bar.running:
        color = _RUNNING
    share = bar.share()  # None without a total: the track is then empty
    filled = "width:0" if share is None else f"width:{100 * share:.1f}%;background:{color}"
    track = "width:220px;height:7px;border-radius:4px;overflow:hidden"
    return (
        f'<div style="{track};background:rgba(128,128,128,.25)">'
        f'<div style="height:7px;border-radius:4px;{filled}"></div></div>'
    )
