"""Whether a pack will fit the disk: known before the first image is packed, from what a sample of them takes."""

import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tpukit.datasets.pack_sources import PackSource
from tpukit.datasets.packed_images import PackFolder
from tpukit.datasets.source_files import look_at
from tpukit.essentials.display import TpukitError, human_size
from tpukit.essentials.environment import THIS_MACHINE, Machine

_FILES = 256  # whose sizes are asked for
_NOT_WORTH_A_SAMPLE = 4 << 30  # bytes: a pack that is surely smaller, and fits, is begun at once
_SAID = 1 << 30  # bytes that a pack needs for that to be worth a line


class DiskFullError(TpukitError, OSError):
    """The disk has no room for what is to be written, or nothing can be written there."""


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest above it that there is."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def is_writable(folder: Path) -> bool:
    """Tell whether a folder can be made there, and written to."""
    return os.access(existing(folder), os.W_OK | os.X_OK)


def _device(folder: Path) -> int:
    return os.stat(existing(folder)).st_dev


def free_in(folder: Path) -> int:
    """Return the bytes that are free on its disk."""
    return shutil.disk_usage(existing(folder)).free


def spread(count: int, most: int) -> list[int]:
    """Return so many numbers below `count`, or all, evenly spread."""
    return [(2 * k + 1) * count // (2 * most) for k in range(most)] if count > most else list(range(count))


class Room:
    """What a pack of a source takes, by its plan, and where there is room for it."""

    def __init__(self, described: PackSource, machine: Machine | None = None):
        self._described = described
        # What lies there is gone with the session, and is not among what Kaggle saves.
        self._passing = ((machine or THIS_MACHINE).kaggle / "temp", Path(tempfile.gettempdir()))
        self._known: dict[str, float | None] = {}

    def choose(self, targets: Sequence[PackFolder]) -> PackFolder:
        """Return the first target that holds its pack already, else the first with room, else the last; say which."""
        begun = next(filter(_is_begun, targets), None)
        if len(targets) == 1 or (begun is None and _is_taken(targets[0])):
            return targets[0]  # where another pack is, that is said, and nothing is packed elsewhere
        chosen = begun or next((target for target in targets if self._fits(target)), targets[-1])
        if chosen is not targets[0]:
            first = targets[0].plan
            form = "".join(f" with {name} {value}" for name, value in chosen.plan.items() if value != first.get(name))
            why = "begun by an earlier call" if begun else f"no room in {targets[0].folder} for what was asked for"
            where = f"{chosen.folder}, {human_size(free_in(chosen.folder))} free"
            ends = any(chosen.folder.absolute().is_relative_to(place) for place in self._passing)
            print(f"pack: {why}: packed{form} in {where}" + ", which ends with the session" * ends)
        return chosen

    def check(self, target: PackFolder, *, stored: bool = False) -> None:
        """Raise DiskFullError where a pack cannot fit, with what would; say what a large one needs.

        `stored`: the items of a stream are written already, and their second copy is what needs room.
        """
        written = _bytes_in(target.work / "items")
        needed = max(0, written - _bytes_of(target)) if stored else self._left(target)
        free = free_in(target.folder)
        if needed is None:
            return
        if needed <= free:
            if needed > _SAID:
                print(f"pack: about {human_size(needed)} are needed, {human_size(free)} are free in {target.folder}")
            return
        count = self._described.count
        what = f"{count:,} images" if count else "these images"
        raise DiskFullError(
            f"{what} need about {human_size(needed)}, and {human_size(free)} are free in {target.folder}",
            found=", ".join(f"{key} {value}" for key, value in target.plan.items() if not isinstance(value, dict)),
            fix="; or ".join([*self._ways(target, needed, free), "make room on this disk, and call it again"]),
        )

    def _fits(self, target: PackFolder) -> bool:
        if not is_writable(target.folder) or _is_taken(target):
            return False
        needed = self._left(target)
        return needed is None or needed <= free_in(target.folder)

    def _left(self, target: PackFolder) -> int | None:
        """Return the bytes that are still to be written; None where nobody knows."""
        needed = self._bytes(target.plan, enough=free_in(target.folder))
        if needed is None:
            return None
        return max(0, needed - _bytes_of(target) - _bytes_in(target.work / "items"))

    def _bytes(self, plan: dict, enough: float = 0) -> int | None:
        """Return the bytes of all images, more rather than less; 0 where they surely fit into `enough`."""
        described, count, size = self._described, self._described.count, plan["size"]
        if not count:
            return None
        if size is not None:  # pixels; of a stream they are written twice
            return count * size * size * (3 + described.has_masks) * (1 + described.is_stream)
        if described.weight and count * described.weight.at_most(plan) < min(enough, _NOT_WORTH_A_SAMPLE):
            return 0
        key = repr(plan)
        if key not in self._known:
            self._known[key] = _mean(described.weight.sample(plan) if described.weight else self._sizes())
        mean = self._known[key]
        return None if mean is None else int(count * mean)

    def _sizes(self) -> list[int]:
        """Return the sizes of some images, which are stored as they are."""
        described = self._described
        if described.items is not None:
            return [] if described.is_stream else described.items.sizes
        rows = spread(len(described.names), _FILES)
        files, masks = ([names[row] for row in rows if names] for names in (described.names, described.mask_names))
        sizes = look_at(files, described.root, masks)["size"]
        return sizes[sizes >= 0].tolist()

    def _ways(self, target: PackFolder, needed: int, free: int) -> list[str]:
        """Say how it would fit: another form, another folder, or fewer images."""
        described, count, plan = self._described, self._described.count, target.plan
        ways, kinds = [], set()
        for name, value, change in described.weight.smaller(plan) if described.weight else []:
            if name not in kinds and (self._bytes({**plan, **change}) or 0) <= free:
                kinds.add(name)
                ways.append(f"{name}={value}")
        if not described.weight and count:
            each = (3 + described.has_masks) * (1 + described.is_stream)
            size = math.isqrt(int(free / count / each)) // 16 * 16
            ways += [f"size={size}, which stores pixels"] * (size >= 32)
        for place in self._passing:
            # /kaggle/temp is a folder to be made; without Kaggle there is none.
            room = (place.exists() or place.parent.exists()) and is_writable(place)
            if room and _device(place) != _device(target.folder) and free_in(place) >= needed:
                ways.append(f"a folder in {place}, where {human_size(free_in(place))} are free until the session ends")
        if count:
            ways.append(f"some of the images: {int(count * free / needed):,} fit")
        return ways


def _bytes_of(target: PackFolder) -> int:
    return sum(file.stat().st_size for file in target.find_outputs())


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*") if file.is_file())


def _is_begun(target: PackFolder) -> bool:
    """Tell whether a folder holds the very pack that is asked for, finished or not."""
    if not target.folder.is_dir():
        return False
    found = target.read_manifest()["plan"] if target.is_finished else target.unfinished_plan()
    return bool(found) and not target.differences(found)


def _is_taken(target: PackFolder) -> bool:
    return target.is_finished or bool(target.find_outputs())


def _mean(sizes: list[int]) -> float | None:
    """Return what an image takes: the mean of some, plus what it may be wrong by; None of none."""
    if not sizes:
        return None
    mean = sum(sizes) / len(sizes)
    spread_out = math.sqrt(sum((size - mean) ** 2 for size in sizes) / max(1, len(sizes) - 1))
    return mean + 2 * spread_out / math.sqrt(len(sizes)) + 60  # bytes of its row, and of the file's own around it
