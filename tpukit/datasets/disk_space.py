"""Estimate, before the first image is packed, whether a pack fits on the disk.

    stored as        estimate in bytes
    files            count * (the mean size of 256 files + 2 standard errors + 60)
    pixels           count * height * width * the bytes per pixel; twice that for a stream
    DICOM slices     as for files, with the sizes of some encoded slices

If the disk is too small, the error suggests a smaller size, another disk, or fewer images.
"""

import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tpukit.datasets.pack_sources import PackSource
from tpukit.datasets.packed_images import PackFolder
from tpukit.datasets.pixel_form import PixelForm, image_size
from tpukit.datasets.source_files import look_at
from tpukit.essentials.display import TpukitError, human_size
from tpukit.essentials.environment import THIS_MACHINE, Machine

_SAMPLED = 256  # the number of files whose sizes are read for the mean
# Bytes. A pack of slices that is certainly smaller, and for which the disk has space, needs no
# sample.
_NOT_WORTH_A_SAMPLE = 4 << 30
_WORTH_A_LINE = 1 << 30  # bytes; `check` prints the space that a larger pack needs
_RECORD_BYTES = 60  # of one image: its row, and the overhead of the file format
_STEP = 16  # pixels; proposed sizes are multiples of this
_SMALLEST = 32  # pixels; a smaller size is not proposed


class DiskFullError(TpukitError, OSError):
    """The disk is too small for the data, or the folder cannot be written to."""


def existing(folder: Path) -> Path:
    """Return the folder if it exists, else its nearest parent folder that exists."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())


def is_writable(folder: Path) -> bool:
    """Return True if the folder can be made and written to."""
    return os.access(existing(folder), os.W_OK | os.X_OK)


def _device(folder: Path) -> int:
    return os.stat(existing(folder)).st_dev


def free_in(folder: Path) -> int:
    """Return the free bytes of the disk of a folder."""
    return shutil.disk_usage(existing(folder)).free


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` numbers from 0 to `count` - 1, evenly spread.

    For example the middles of three thirds: spread(9, 3) == [1, 4, 7].
    """
    if count <= most:
        return list(range(count))
    return [(2 * k + 1) * count // (2 * most) for k in range(most)]


class Room:
    """The disk space that a pack needs, and the choice of a folder with that much free space.

    Args:
        described: the images to pack.
        machine: the folders of a machine, for tests; None for this machine.
    """

    def __init__(self, described: PackSource, machine: Machine | None = None):
        self._described = described
        machine = machine or THIS_MACHINE
        # Folders whose files are deleted when the session ends; Kaggle does not save them.
        self._temporary = (machine.kaggle / "temp", Path(tempfile.gettempdir()))
        self._mean_sizes: dict[str, float | None] = {}  # bytes per image, by plan

    def choose(self, targets: Sequence[PackFolder]) -> PackFolder:
        """Return the folder to pack into, and print it if it is not the first.

        `choose` tries these rules in turn:
        1. A folder that has this pack already, finished or not.
        2. The first of `targets`, if it has a different pack. The caller then raises an error.
        3. A folder without another pack that can be written to and has enough free disk.
        4. The last of `targets`.

        Args:
            targets: the folders in the order of the user's preference; then the same folders again,
                for a smaller pack.
        """
        first = targets[0]
        begun = next(filter(_is_begun, targets), None)
        if len(targets) == 1 or (begun is None and _is_taken(first)):
            return first
        chosen = begun
        if chosen is None:
            chosen = next((target for target in targets if self._fits(target)), targets[-1])
        if chosen is not first:
            self._print_choice(chosen, first, is_begun=begun is not None)
        return chosen

    def _print_choice(self, chosen: PackFolder, first: PackFolder, *, is_begun: bool) -> None:
        why = f"the requested pack does not fit in {first.folder}"
        if is_begun:
            why = "an earlier call has begun this pack"
        elif not is_writable(first.folder):
            why = f"nothing can be written to {first.folder}"
        line = f"pack: {why}, so the pack is in {chosen.folder}"
        for name, value in chosen.plan.items():
            if value != first.plan.get(name):
                line += f" with {name} {value}"
        line += f"; {human_size(free_in(chosen.folder))} are free there"
        folder = chosen.folder.absolute()
        if any(folder.is_relative_to(place) for place in self._temporary):
            line += "; its files are deleted when the session ends"
        print(line)

    def check(self, target: PackFolder, *, stored: bool = False) -> None:
        """Raise DiskFullError if the disk is too small; print the space that a large pack needs.

        Args:
            target: the folder of the pack.
            stored: True if `pack` has stored the items of a stream on this disk, and needs space
                only for the packed copy.
        """
        if stored:
            written = _bytes_in(target.work / "items")
            needed = max(0, written - _bytes_of(target))
        else:
            needed = self._left(target)
        if needed is None:
            return
        free = free_in(target.folder)
        if needed > free:
            raise self._too_small(target, needed, free)
        if needed > _WORTH_A_LINE:
            print(
                f"pack: about {human_size(needed)} are needed, "
                f"{human_size(free)} are free in {target.folder}"
            )

    def _too_small(self, target: PackFolder, needed: int, free: int) -> DiskFullError:
        count = self._described.count
        images = "these images"
        if count:
            images = f"{count:,} images"
        settings = []
        for key, value in target.plan.items():
            if not isinstance(value, dict):
                settings.append(f"{key} {value}")
        ways = self._ways(target, needed, free)
        return DiskFullError(
            f"{images} need about {human_size(needed)}, "
            f"and {human_size(free)} are free in {target.folder}",
            found=", ".join(settings),
            fix="; or ".join([*ways, "make room on this disk, and call again"]),
        )

    def _fits(self, target: PackFolder) -> bool:
        if not is_writable(target.folder) or _is_taken(target):
            return False
        needed = self._left(target)
        return needed is None or needed <= free_in(target.folder)

    def _left(self, target: PackFolder) -> int | None:
        """Return the number of bytes still to be written; None if it is unknown."""
        needed = self._bytes(target.plan, enough=free_in(target.folder))
        if needed is None:
            return None
        return max(0, needed - _bytes_of(target) - _bytes_in(target.work / "items"))

    def _bytes(self, plan: dict, enough: float = 0) -> int | None:
        """Estimate the pack's size in bytes.

        The estimate for files and slices is more often too high than too low. That for pixels is
        too low by the index and the overhead of the file format.

        Args:
            plan: the settings of the pack.
            enough: the number of free bytes. An estimate for CT slices needs an encoded sample. If
                a small pack certainly needs fewer bytes than these, no sample is encoded.

        Returns:
            The bytes; 0 if a small pack certainly fits; None if the size is unknown.
        """
        described = self._described
        count = described.count
        size = plan["size"]
        if not count:
            return None
        if size is not None:
            height, width = image_size(size)
            return count * height * width * self._bytes_per_pixel(plan)
        if described.encoded:
            at_most = count * described.encoded.bytes_at_most(plan)
            if at_most < min(enough, _NOT_WORTH_A_SAMPLE):
                return 0
        key = repr(plan)
        if key not in self._mean_sizes:
            # To encode a sample of slices takes seconds, so `check` and the message reuse it.
            if described.encoded:
                sizes = described.encoded.sample_bytes(plan)
            else:
                sizes = self._sizes()
            self._mean_sizes[key] = _mean(sizes)
        mean = self._mean_sizes[key]
        if mean is None:
            return None
        return int(count * mean)

    def _bytes_per_pixel(self, plan: dict) -> int:
        """Return the bytes per pixel, with its mask. Every image of a stream counts twice.

        A stream is stored once as it arrives, and once in the random order of the pack.
        """
        channels = PixelForm.of_plan(plan).channels + self._described.has_masks
        copies = 2 if self._described.is_stream else 1
        return channels * copies

    def _sizes(self) -> list[int]:
        """Return the sizes in bytes of some images that are stored unchanged; [] for a stream."""
        described = self._described
        if described.items is not None:
            if described.is_stream:
                return []
            return described.items.sizes
        rows = spread(len(described.names), _SAMPLED)
        files = [described.names[row] for row in rows]
        masks = []
        if described.mask_names:
            masks = [described.mask_names[row] for row in rows]
        sizes = look_at(files, described.root, masks)["size"]
        return sizes[sizes >= 0].tolist()

    def _ways(self, target: PackFolder, needed: int, free: int) -> list[str]:
        """Return fixes for a disk that is too small: another size or folder, or fewer images."""
        described = self._described
        count = described.count
        ways = []
        if described.encoded:
            ways += self._smaller_forms(target.plan, free)
        elif count:
            pixels = free / count / self._bytes_per_pixel(target.plan)
            size = math.isqrt(int(pixels)) // _STEP * _STEP
            if size >= _SMALLEST:
                ways.append(f"size={size}, which stores pixels")
        for place in self._temporary:
            # On Kaggle, /kaggle/temp may not exist yet, but /kaggle does; elsewhere neither exists.
            can_exist = place.exists() or place.parent.exists()
            if not can_exist or not is_writable(place):
                continue
            is_other_disk = _device(place) != _device(target.folder)
            if is_other_disk and free_in(place) >= needed:
                ways.append(
                    f"a folder in {place}, where {human_size(free_in(place))} are free "
                    "until the session ends"
                )
        if count:
            ways.append(f"some of the images: {int(count * free / needed):,} fit")
        return ways

    def _smaller_forms(self, plan: dict, free: int) -> list[str]:
        """Return arguments of `pack_dicom`, as code, each of which makes the pack small enough.

        `EncodedSource.smaller` proposes several values of an argument. The result has the first
        that makes the pack small enough.
        """
        forms = {}
        for name, code, change in self._described.encoded.smaller(plan):
            if name not in forms and (self._bytes({**plan, **change}) or 0) <= free:
                forms[name] = code
        return list(forms.values())


def _bytes_of(target: PackFolder) -> int:
    return sum(file.stat().st_size for file in target.find_outputs())


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*") if file.is_file())


def _is_begun(target: PackFolder) -> bool:
    """Return True if the folder has this pack, finished or not."""
    if not target.folder.is_dir():
        return False
    if target.is_finished:
        found = target.read_manifest()["plan"]
    else:
        found = target.unfinished_plan()
    return bool(found) and not target.differences(found)


def _is_taken(target: PackFolder) -> bool:
    return target.is_finished or bool(target.find_outputs())


def _mean(sizes: list[int]) -> float | None:
    """Return the bytes per image: the mean of a sample, plus twice its standard error."""
    if not sizes:
        return None
    count = len(sizes)
    mean = sum(sizes) / count
    variance = sum((size - mean) ** 2 for size in sizes) / max(1, count - 1)
    standard_error = math.sqrt(variance) / math.sqrt(count)
    return mean + 2 * standard_error + _RECORD_BYTES
