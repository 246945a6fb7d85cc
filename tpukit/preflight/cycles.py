"""The step of a training: what runs on the device from one step of its optimisers to the next, and what differs."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 16  # steps of others for which an optimiser is waited for: the critic of a GAN steps five times, or more
SETTLED = 2  # cycles: the first creates the optimiser's state, so the second has other graphs
_TIMES = 3  # a cycle that came so often is the training's
# PJRT_Buffer_Type, by number, in torch's words.
_TYPES = (
    *("", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128"),
)

Shape = tuple[tuple[int, ...], str]  # of a tensor, and its dtype


@dataclass(frozen=True)
class Ran:
    """A program that ran.

    Attributes:
        program: its number.
        beside: bytes on the device that were none of its arguments.
        taken: what it took from the host that no program had taken before.
    """

    program: int
    beside: int = 0
    taken: tuple[Shape, ...] = ()


@dataclass(frozen=True)
class Cycle:
    """What ran in a step of the training: all graphs up to the one in which the last of its optimisers steps."""

    runs: tuple[Ran, ...]
    compiled: tuple[int, ...] = ()  # programs that were new in it
    syncs: int = 1  # times that the loop handed its work over, with core.step()

    @property
    def programs(self) -> tuple[int, ...]:
        """The numbers of its programs, in order."""
        return tuple(one.program for one in self.runs)

    @property
    def taken(self) -> tuple[Shape, ...]:
        """What it took from the host."""
        return tuple(shape for one in self.runs for shape in one.taken)


@dataclass(frozen=True)
class Mark:
    """The end of a step of one or more optimisers: how long the log was then, and core.step()s since the last."""

    at: int
    optimizers: frozenset[int]
    syncs: int = 1


def read_log(file: Path) -> list[int | Ran]:
    """Return what the stand-in has written (record.c): the number of a program compiled, or a `Ran`."""
    if not file.is_file():
        return []
    lines = file.read_text().split("\n")[:-1]  # the last may be half there
    return [_entry(*line.split()) for line in lines]


def _entry(word: str, number: str, beside: str = "0", *taken: str) -> int | Ran:
    if word == "compile":
        return int(number)
    shapes = ((*one.partition(":")[::2],) for one in taken)
    read = tuple((tuple(map(int, size.split(","))), _TYPES[int(kind)]) for kind, size in shapes)
    return Ran(int(number), int(beside), read)


def cycles(log: Sequence[int | Ran], marks: Iterable[Mark]) -> list[Cycle]:
    """Return the steps of the training: of a GAN all networks', of added-up gradients all batches.

    A cycle ends once every optimiser that is still in use has stepped in it.
    """
    steps, start = [], 0
    for mark in marks:
        if any(isinstance(one, Ran) for one in log[start : mark.at]):
            steps.append((mark, log[start : mark.at]))
            start = mark.at
    in_use = frozenset().union(*(mark.optimizers for mark, _ in steps[-PATIENCE:]))
    found, entries, stepped, syncs = [], [], set(), 0
    for mark, more in steps:
        entries, stepped, syncs = [*entries, *more], stepped | mark.optimizers, syncs + mark.syncs
        if in_use <= stepped:
            runs = tuple(one for one in entries if isinstance(one, Ran))
            found.append(Cycle(runs, tuple(one for one in entries if not isinstance(one, Ran)), syncs))
            entries, stepped, syncs = [], set(), 0
    return found


def is_steady(found: Sequence[Cycle]) -> bool:
    """Return whether the last cycle has come back often enough."""
    return bool(found) and sum(one.programs == found[-1].programs for one in found) >= _TIMES


def came_back(found: Sequence[Cycle]) -> bool:
    """Return whether any cycle has."""
    return any(is_steady(found[:count]) for count in range(len(found) + 1))


def main_cycle(found: Sequence[Cycle]) -> Cycle | None:
    """Return the cycle that came most often, of batches of several shapes that of the largest; None without any."""
    shapes = _by_shape(found)
    return max(shapes, key=lambda one: group_bytes(one.taken)) if shapes else None


def other_shapes(found: Sequence[Cycle]) -> list[Cycle]:
    """Return a cycle for each other shape of batches, where they have a few, as with buckets."""
    main = main_cycle(found)
    return [one for one in _by_shape(found) if one.programs != main.programs]


def _by_shape(found: Sequence[Cycle]) -> list[Cycle]:
    """Return the most frequent cycle, and those that differ from it in nothing but the shapes of what they take."""
    settled = found[SETTLED:] or found[-1:]
    counts = Counter(one.programs for one in settled)
    first = {one.programs: one for one in reversed(settled)}
    ordered = [first[programs] for programs, _ in counts.most_common()]
    main = ordered[0]
    for one in ordered:  # an evaluation after each second step is no part of the step
        main = one if counts[one.programs] > 1 and _has_more(main, one) else main
    same_kind = [one for one in ordered if _kinds(one) == _kinds(main)]
    same_kind.sort(key=lambda one: one is not main)
    by_shape = {}
    for one in same_kind:
        by_shape.setdefault(tuple(sorted(one.taken)), one)
    few = len(by_shape) <= max(1, len(settled) // 2)  # else each batch has a shape of its own
    return list(by_shape.values()) if few else [main]


def _kinds(cycle: Cycle) -> tuple:
    return len(cycle.runs), sorted((len(shape), dtype) for shape, dtype in cycle.taken)


def _bytes(shape: Shape) -> int:
    return math.prod(shape[0]) * _width(shape[1])


def group_bytes(group: Iterable[Shape]) -> int:
    """Return the bytes of what is sent in one transfer."""
    return sum(map(_bytes, group))


def _width(dtype: str) -> int:
    """Return the bytes of a number of this type."""
    if dtype == "bool":
        return 1
    return int("".join(letter for letter in dtype if letter.isdigit())) // 8


def recompiled(found: Sequence[Cycle]) -> list[tuple[Cycle, Cycle]]:
    """Return the cycles after the second that compiled something new, each with the cycle to compare it with.

    Left out are the first of each shape that comes back, and work that is done between steps, as an evaluation.
    """
    shapes = _by_shape(found)
    if not shapes:
        return []
    expected = Counter(tuple(sorted(one.taken)) for one in shapes) if len(shapes) > 1 else Counter()
    again = []
    for before, one in zip(found[SETTLED - 1 :], found[SETTLED:], strict=False):
        shape = tuple(sorted(one.taken))
        if not one.compiled or any(_has_more(one, step) for step in shapes):
            continue
        if expected[shape] and one.programs in [step.programs for step in shapes]:
            expected[shape] = 0
            continue
        again.append((before, one))
    return again


def _has_more(one: Cycle, step: Cycle) -> bool:
    """Return whether a cycle has all that another has, and more."""
    return len(one.runs) > len(step.runs) and not Counter(step.programs) - Counter(one.programs)


def grouped(taken: Iterable[Shape], sent: Iterable[tuple[Shape, ...]]) -> tuple[tuple[Shape, ...], ...]:
    """Return what was taken as the transfers in which it came, without what no program took, as a mask it may not need.

    Where the loop sends nothing by `core`, each tensor counts by itself; else what is left is no batch: Adam's numbers.
    """
    left, groups = Counter(taken), []
    for group in sorted(set(sent), key=lambda group: -group_bytes(group)):
        while left[max(group, key=_bytes)]:
            found = Counter(group) & left
            left -= found
            groups.append(tuple(shape for shape in group if shape in found))
    return tuple(groups) or tuple((one,) for one in left.elements())


def samples(groups: Iterable[tuple[Shape, ...]]) -> int | None:
    """Return the samples of a step: of the kind of transfers that is most of its bytes; None if nothing was sent."""
    kinds: dict[tuple, list] = {}
    for group in groups:
        kinds.setdefault(tuple((len(shape), dtype) for shape, dtype in group), []).append(group)
    if not kinds:
        return None
    most = max(kinds.values(), key=lambda groups: sum(map(group_bytes, groups)))
    return sum(group[0][0][0] for group in most)
