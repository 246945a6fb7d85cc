"""The error for cores that are out of sync: the difference, the cores, since when, and the fix.

core 0 has {"data": {"seed": 0}}, core 1 has {"data": {"seed": 1}}

    fact   the cores have different datasets (after the first step)
    found  data: seed: 0 on core 0, 1 on core 1
           found after the first step, at the first comparison
    fix    make the dataset in the notebook, ...

The fix is that of the first group that differs, because its difference explains later ones.
"""

from collections.abc import Mapping

from tpukit.essentials.display import TpukitError, first_few

# A difference in one group explains differences in the next: other data give other weights.
GROUPS = ("run", "data", "model", "settings", "weights", "buffers")
_CHECKSUMS = ("weights", "buffers")  # groups whose values are checksums, so only names are shown
_MOST_SHOWN = 5  # names per group
_LONGEST_VALUE = 200  # characters
_FACTS = {
    "run": "the cores do not run the same operations",
    "data": "the cores have different datasets",
    "model": "the cores hold different models",
    "settings": "the cores' optimizers or schedules have different settings",
    "weights": "the cores hold different weights, and would train different models",
    "buffers": "the cores hold different buffers",
}
# The most common cause comes first.
_FIXES = {
    "run": (
        "call it with the same arguments on every core\n"
        "if a folder is an argument: every core must see the same folder"
    ),
    "data": (
        "make the dataset in the notebook, or from values that are the same on all cores:\n"
        "torch.Generator().manual_seed(0), sorted(files), core.batches(..., seed=0)"
    ),
    "model": (
        "make the model in the notebook\n"
        "in the worker function, it must not depend on random choices, core.rank or the time"
    ),
    "settings": (
        "set the same numbers on every core: draw random numbers in the notebook\n"
        "if the scheduler follows a loss: scheduler.step(core.mean(loss))"
    ),
    "weights": (
        "call core.optimizer_step(optimizer) in every step\n"
        "weights drawn at random, or set from the first batch: make them before core.model\n"
        "Embedding(max_norm=...) changes weights on each core alone: leave max_norm out"
    ),
    "buffers": (
        "make the buffer a float tensor: tpukit averages float buffers over the cores\n"
        "if the buffer counts: core.all_reduce(counts) before you add the counts, so that every "
        "core adds the same\n"
        'if the buffer may differ: core.model(model, allow_different=["*counts"])'
    ),
}
_NOT_FROM_CORE_MODEL = (
    "model = core.model(model): every core then gets the weights of rank 0\n"
    "if the loss has parameters: loss = core.model(loss)"
)


class OutOfSyncError(TpukitError, ValueError):
    """The cores are out of sync; the message names the difference and the cores."""


def difference(
    when: str,
    everyone: list[dict],
    *,
    before: str | None = None,
    from_core: bool = True,
) -> OutOfSyncError:
    """Return the error for the states of all cores.

    Args:
        when: name of the check that found the difference, such as "after the first step".
        everyone: the state of each core, in order of rank: {group: {name: value}}.
        before: name of the last check at which the cores were in sync; None if there was none, ""
            if it is not known.
        from_core: whether the model came from `core.model`.
    """
    groups = [group for group in GROUPS if _differs(group, everyone)]
    if not groups:  # equal as dicts, so only their order differs
        groups = ["model"]
    first = groups[0]
    found = []
    for group in groups:
        found.append(_group_text(group, [state[group] for state in everyone]))
    since = f"found {when}"
    if before:
        since += f"; {before} the cores were in sync"
    elif before is None:
        since += ", at the first comparison"
    found.append(since)
    fix = _FIXES[first]
    if first == "weights" and not before and not from_core:
        fix = _NOT_FROM_CORE_MODEL
    return OutOfSyncError(f"{_FACTS[first]} ({when})", found="\n".join(found), fix=fix)


def _differs(group: str, everyone: list[dict]) -> bool:
    return any(state.get(group) != everyone[0].get(group) for state in everyone)


def _group_text(group: str, states: list[Mapping]) -> str:
    """Return the values of a group that differ, with the cores that have them."""
    rows = _different_rows(states)
    if not rows:
        return f"{group}: their order"
    more = ""
    if len(rows) > _MOST_SHOWN:
        more = f" and {len(rows) - _MOST_SHOWN} more"
    shown = list(rows)[:_MOST_SHOWN]
    # A checksum means nothing to a reader, so show only which cores have the same.
    if group in _CHECKSUMS:
        cores = [_cores(ranks) for ranks in _ranks_by_value(rows[shown[0]]).values()]
        return f"{group}: {', '.join(shown)}{more}; {' differs from '.join(cores)}"
    lines = [_row_text(name, rows[name]) for name in shown]
    return f"{group}: " + "\n".join(lines) + more


def _different_rows(states: list[Mapping]) -> dict[str, list[str]]:
    """Return the values that differ: {name: [value on each core]}, "none" for a missing one."""
    names = {}  # an ordered set
    for state in states:
        names |= dict.fromkeys(state)
    rows = {}
    for name in names:
        values = [str(state.get(name, "none")) for state in states]
        if len(set(values)) > 1:
            rows[name] = values
    return rows


def _row_text(name: str, values: list[str]) -> str:
    texts = []
    for value, ranks in _ranks_by_value(values).items():
        texts.append(f"{value[:_LONGEST_VALUE]} on {_cores(ranks)}")
    return f"{name}: {', '.join(texts)}"


def different_names(states: list[Mapping]) -> str:
    """Return a line per different value, such as "dog: a number on core 0, none on core 1"."""
    rows = _different_rows(states)
    lines = [_row_text(name, rows[name]) for name in list(rows)[:_MOST_SHOWN]]
    if len(rows) > _MOST_SHOWN:
        lines.append(f"and {len(rows) - _MOST_SHOWN} more")
    return "\n".join(lines)


def _ranks_by_value(values: list[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def _cores(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"core {ranks[0]}"
    return "cores " + first_few(ranks, 8)
