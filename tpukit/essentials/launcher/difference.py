"""What is said of something that differs between cores: what it is, on which, since when, and the most likely fix."""

from collections.abc import Mapping

from tpukit.essentials.display import TpukitError, first_few

# In the order in which one explains the other: of different data come different weights.
GROUPS = ("run", "data", "model", "settings", "weights", "buffers")
_MOST_SHOWN = 5
_FACTS = {
    "run": "the cores do not do the same",
    "data": "the cores have different datasets",
    "model": "the cores hold different models",
    "settings": "the cores' optimizers or schedules have different settings",
    "weights": "the cores hold different weights, and would train different models",
    "buffers": "the cores hold different buffers",
}
_CAUSES = {
    "run": "call it with the same arguments on every core, and give every core the same folder, one that all see",
    "data": (
        "make the dataset in the notebook, or from what all cores draw alike: torch.Generator().manual_seed(0), a "
        "sorted list of files, one seed= for core.batches"
    ),
    "model": "make the model in the notebook, or without what differs by core: random choices, core.rank, the time",
    "settings": (
        "the same numbers on every core: what is drawn at random in the notebook, what a schedule is stepped with as "
        "core.mean(loss)"
    ),
    "weights": (
        "core.optimizer_step(optimizer) in every step; and no weights that forward sets from this core's own batch "
        "(start values from the first batch: make them before core.model; Embedding(max_norm=...): leave max_norm "
        "out), nor any that are drawn at random after it"
    ),
    "buffers": (
        "a float buffer, which is averaged over the cores; or the same change on every core, with "
        'core.all_reduce(counts) before it is added; or core.model(model, allow_different=["*counts"])'
    ),
}
_UNLIKE = "model = core.model(model), and the same for a loss with parameters: every core gets rank 0's"


class OutOfSyncError(TpukitError, ValueError):
    """Something that may not differ between the cores does; the message names it, the cores, and since when."""


def difference(when: str, everyone: list[dict], *, before: str | None = None, from_core: bool = True) -> OutOfSyncError:
    """Make the error for what each core holds, by rank: by group, short values by name.

    Args:
        when: the name of the check that found it.
        before: the name of the last check that the same passed.
        from_core: whether it came from `core.model`.
    """
    groups = [group for group in GROUPS if any(one.get(group) != everyone[0].get(group) for one in everyone)]
    found = [_told(group, [one[group] for one in everyone]) for group in groups or ["model"]]
    found.append(f"found {when}" + (f"; {before} it was the same" if before else ", the first check of it"))
    first = (groups or ["model"])[0]
    fix = _CAUSES[first] if before or from_core or first != "weights" else _UNLIKE
    return OutOfSyncError(f"{_FACTS[first]} ({when})", found="\n".join(found), fix=fix)


def _told(group: str, held: list[Mapping]) -> str:
    names = list(dict.fromkeys(name for one in held for name in one))
    rows = {name: [str(one.get(name, "none")) for one in held] for name in names}
    rows = {name: values for name, values in rows.items() if len(set(values)) > 1}
    more = f" and {len(rows) - _MOST_SHOWN} more" if len(rows) > _MOST_SHOWN else ""
    if not rows:
        return f"{group}: their order"
    if group in ("weights", "buffers"):  # of which a checksum says nothing
        unlike = " unlike ".join(map(_cores, _by_value(next(iter(rows.values()))).values()))
        return f"{group}: {', '.join(list(rows)[:_MOST_SHOWN])}{more}; {unlike}"
    shown = [
        f"{name}: " + ", ".join(f"{value[:200]} on {_cores(ranks)}" for value, ranks in _by_value(values).items())
        for name, values in list(rows.items())[:_MOST_SHOWN]
    ]
    return f"{group}: " + "\n".join(shown) + more


def _by_value(values: list[str]) -> dict[str, list[int]]:
    return {one: [rank for rank, value in enumerate(values) if value == one] for one in dict.fromkeys(values)}


def _cores(ranks: list[int]) -> str:
    return f"core {ranks[0]}" if len(ranks) == 1 else "cores " + first_few(ranks, 8)
