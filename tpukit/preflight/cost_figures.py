"""A picture of a preflight: where the memory of a core and the time of a step go."""

from tpukit.essentials.show import house_style as look

_GIB = 2**30


def preflight_figure(found):
    """Return a figure: the memory of a core as one bar, and the most expensive operations as ten."""
    with look.style():
        rows = [cost for cost in found.operations if cost.cycles]
        figure = look.new_figure(9, 1.7 + 0.28 * len(rows), layout="constrained")
        if rows:
            memory, time = figure.subplots(2, 1, height_ratios=[1, max(3, len(rows)) * 0.55])
            _draw_time(time, found, rows)
        else:  # it does not fit, and nothing is known of its time
            memory = figure.subplots()
        _draw_memory(memory, found)
        verdict = "fits" if found.fits else "does not fit"
        first = f"; most time in {rows[0].module or rows[0].operation.opcode}, {rows[0].share:.0%}" if rows else ""
        look.describe(figure, f"{found.subject}: it {verdict}, {found.hbm_bytes / _GIB:.2f} GiB a core{first}.")
    return figure


def _draw_memory(axes, found) -> None:
    left = 0.0
    if found.compiled:
        one = max(found.compiled, key=lambda one: one.hbm_bytes)
        kept = one.argument_bytes + one.output_bytes - one.alias_bytes
        parts = [("arguments", kept), ("temporaries", one.temporary_bytes), ("code", one.code_bytes)]
    else:
        parts = [("needed", found.hbm_bytes)]
    for (name, size), color in zip(parts, look.COLORS, strict=False):
        axes.barh([0], [size / _GIB], left=left, color=color, height=0.6, label=f"{name} {size / _GIB:.2f} GiB")
        left += size / _GIB
    limit = found.chip.hbm / _GIB
    axes.axvline(limit, color=look.INK, linewidth=1)
    axes.set_xlim(0, max(limit, left) * 1.05)
    axes.set_yticks([])
    axes.set_xlabel(f"HBM of a {found.chip.generation} core, GiB; the line is what it has")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(parts), borderaxespad=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)


def _draw_time(axes, found, rows) -> None:
    colors = {"forward": look.COLORS[0], "backward": look.COLORS[1], "optimizer": look.COLORS[2]}
    names = [f"{cost.module or cost.operation.opcode}" for cost in rows]
    axes.barh(
        range(len(rows)), [cost.share * 100 for cost in rows], color=[colors.get(c.direction, look.RULE) for c in rows]
    )
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    for direction in dict.fromkeys(cost.direction for cost in rows):
        axes.barh([0], [0], color=colors.get(direction, look.RULE), label=direction or "no module")
    axes.legend(loc="lower right")
    axes.set_xlabel(f"% of the step's {found.cycles:,} estimated cycles (not compared with a chip)")
