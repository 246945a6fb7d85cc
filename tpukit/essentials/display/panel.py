"""The live panel as HTML: a line of status, a row for each loop, one for each core where cores differ, and curves.

Inline styles only, no script, and colours that are legible on white and on dark: every notebook shows it as it is, and
a saved notebook keeps it. Where a run is over its curves are images, which a notebook that is not trusted keeps, too.
"""

import html
from collections.abc import Sequence

from tpukit.essentials.display.bars import Bar
from tpukit.essentials.display.curves import Points, charts_html

_MOST_ROWS = 5  # of loops that are over; those that run are all shown
# Mid-tones with a contrast of 3:1 or more on white and on #111 (WCAG 2.1, 1.4.11); words keep the notebook's colour.
_RUNNING, _DONE, _WAITING, _FAILED = "#3b78c2", "#2f9e5f", "#c77d0a", "#dc4c4c"
_DOTS = {"running": _RUNNING, "busy": _WAITING, "done": _DONE, "interrupted": _WAITING, "failed": _FAILED}
_OVER = ("done", "interrupted", "failed")
_ROW = "background:none;border:none;"
_CELL = "border:none;text-align:left;vertical-align:middle;white-space:nowrap;padding:2px 16px 2px 0;"
_NUMBER = _CELL + "text-align:right;font-variant-numeric:tabular-nums;"
_QUIET = "opacity:.7;"


def panel_html(
    bars: Sequence[Bar], curves: dict[str, Points], state: str, status: str, cores: Sequence[tuple[str, str]] = ()
) -> str:
    """Draw the panel.

    Args:
        bars: of the loops, the outer before the inner.
        state: "running", "busy" where that needs a word, "done", "interrupted" or "failed".
        status: what the run does now, in words.
        cores: (core, what it does) where cores differ.
    """
    dot = f'<span style="color:{_DOTS[state]}">&#9679;</span>'
    parts = [f'<div style="min-height:1.6em;font-variant-numeric:tabular-nums">{dot}&nbsp; {html.escape(status)}</div>']
    shown = shown_bars(bars)
    rows = [_row(bar) for bar in shown]
    if hidden := len(bars) - len(shown):
        what = f"{hidden} more {'loops are' if hidden > 1 else 'loop is'} over"
        rows.insert(0, f'<tr style="{_ROW}"><td colspan="4" style="{_CELL}{_QUIET}">{what}</td></tr>')
    rows += [
        f'<tr style="{_ROW}"><td style="{_CELL}">{html.escape(core)}</td>'
        f'<td colspan="3" style="{_CELL}{_QUIET}font-variant-numeric:tabular-nums">{html.escape(what)}</td></tr>'
        for core, what in cores
    ]
    if rows:
        style = "border-collapse:collapse;border:none;background:none;color:inherit;font:inherit;margin:2px 0 0"
        parts.append(f'<table style="{style}">{"".join(rows)}</table>')
    if curves:
        parts.append(f'<div style="margin-top:10px">{charts_html(curves, as_images=state in _OVER)}</div>')
    return f'<div style="font-size:13px;line-height:1.5;color:inherit;padding:2px 0 6px 5px">{"".join(parts)}</div>'


def shown_bars(bars: Sequence[Bar]) -> list[Bar]:
    """Return the bars that run, and the last few that do not, so that a hundred loops are no wall of bars."""
    over = [bar for bar in bars if not bar.running]
    hidden = {id(bar) for bar in over[: max(0, len(over) - _MOST_ROWS)]}
    return [bar for bar in bars if id(bar) not in hidden]


def _row(bar: Bar) -> str:
    details = "  ·  ".join(part for part in (bar.rate(), bar.time(), bar.note) if part)
    count = f"{bar.done:,} / {bar.total:,}" if bar.total else f"{bar.done:,}"
    return (
        f'<tr style="{_ROW}"><td style="{_CELL}">{html.escape(bar.label)}</td>'
        f'<td style="{_CELL}">{_track(bar)}</td><td style="{_NUMBER}">{count}</td>'
        f'<td style="{_CELL}{_QUIET}font-variant-numeric:tabular-nums">{html.escape(details)}</td></tr>'
    )


def _track(bar: Bar) -> str:
    color = _DONE if bar.finished else _RUNNING if bar.running else _WAITING
    share = bar.share()
    filled = f"width:{100 * share:.1f}%;background:{color}" if share is not None else "width:0"
    return (
        '<div style="width:220px;height:7px;border-radius:4px;background:rgba(128,128,128,.25);overflow:hidden">'
        f'<div style="height:7px;border-radius:4px;{filled}"></div></div>'
    )
