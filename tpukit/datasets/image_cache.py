"""Decode all images once, where disk and memory have room for it; an interrupted call continues where it stopped."""

import errno
import os
import re
import shutil
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from tpukit.datasets.checked_files import npy, size_and_checksum, whole_number, write_file
from tpukit.datasets.disk_space import DiskFullError, free_in, is_writable
from tpukit.datasets.packed_images import PackedImages
from tpukit.datasets.pixel_cache import CachedImages, CacheFolder, layout_of, map_file
from tpukit.datasets.processes import run_in_processes
from tpukit.essentials.display import InvalidValueError, human_size
from tpukit.essentials.environment import available_memory, cpus

_PIECE = 128  # images that a process holds while it decodes: 6 MB at 128 pixels, 100 MB at 512
_SPARE_DISK = 4 * 2**30  # for checkpoints, logs and outputs: with a full disk a notebook cannot even be saved
# The workers come after the choice, 0.7 GiB each with torch and torch_xla loaded, then XLA's compiler. They take it
# from the page cache, and a random read that misses that is 200 times slower: 772 images/s were measured.
_SPARE_MEMORY = 1 / 4


def build_image_cache(
    records: PackedImages,
    folder=None,
    *,
    size: int,
    workers: int | None = None,
    progress: str | None = None,
    exact: bool = True,
) -> CachedImages:
    """Decode all records once, into a file that is read thirty times as fast as they are decoded.

    It takes size * size * 3 bytes of disk per image, and is fast only where memory can hold them all:
    `cached_images`, the public way, checks both first. The same records give the same bytes. Interrupted at any moment, even by the
    machine, the same call continues where it stopped; when all is there it opens the cache.

    Args:
        records: what `pack` returned.
        folder: a new or empty folder, or one where the same cache was begun; None for `<records>-cache-<size>` beside
            the records or, where nothing can be written (Kaggle's /kaggle/input), in the system's temporary folder.
        size: height and width in pixels.
        workers, progress: as for `pack`.
        exact: True for Pillow's pixels to the last bit; see `decode`.

    Returns:
        The `CachedImages`.

    Raises:
        DiskFullError: the disk is too small; that is known before the first image is decoded, as all of it is allocated first.
        FileExistsError: the folder holds somebody's files.
        ValueError: a number is out of range, or the folder holds a cache of other records or of another size.
        OSError: a record, or the cache that is there, is damaged; the message names it.
    """
    workers = whole_number("workers", workers, 1)
    plan = _plan(records, size, exact)
    if folder is None:
        places = _places(records, size)
        folder = next((place for place in places if CacheFolder(place).is_finished or is_writable(place)), places[0])
    target = CacheFolder(Path(folder), plan)
    if not target.is_finished:
        if not is_writable(target.folder):
            raise DiskFullError(f"nothing can be written to {folder}", fix="name a folder on another disk")
        with target.locked():
            if not target.is_finished:  # else another process has built it meanwhile
                try:
                    _build(target, records, workers or cpus(), progress)
                except OSError as error:
                    if error.errno in (errno.ENOSPC, errno.EDQUOT):
                        raise _full(target) from error
                    raise
                # The checksums are of what was written just now.
                return CachedImages(folder, verify=False).labelled_as(records)
    return _open(target).labelled_as(records)


def cached_images(
    records: PackedImages,
    *,
    size: int,
    folder=None,
    workers: int | None = None,
    progress: str | None = None,
    exact: bool = True,
) -> CachedImages | PackedImages:
    """Open or build a cache where memory and disk have room for it, else decode in every epoch; print which and why.

    A cache saves time from the second epoch on.

    Args:
        records: what `pack` returned.
        size: height and width in pixels.
        folder: a new or empty folder, or one where the same cache was begun or is; None for `<pack>-cache-<size>` beside
            the pack or, where nothing can be written (Kaggle's /kaggle/input), in the system's temporary folder.
            4 GiB of its disk stay free.
        workers: processes that decode; None for one per CPU.
        progress: as for `pack`.
        exact: True for Pillow's pixels to the last bit; see `decode`.

    Returns:
        A `CachedImages`; or `PackedImages(folder, size)`, where the JPEG decoder scales: pixels near those of an exact cache.

    Raises:
        FileExistsError: the folder holds somebody's files.
        ValueError: a number is out of range, or the folder holds a cache of other images or of another size.
        OSError: an image, or the cache that is there, is damaged; the message names it.
    """
    return choose_images(records, Space(), size=size, folder=folder, workers=workers, progress=progress, exact=exact)


@dataclass(frozen=True)
class Space:
    """The bytes of the machine that a cache may fill; None asks the machine."""

    disk: int | None = None
    memory: int | None = None


def choose_images(records: PackedImages, space: Space, *, size, folder, workers, progress, exact):
    """Open or build a cache if it fits into the space, else return the pack; see `cached_images`."""
    plan = _plan(records, size, exact)
    size, needed = plan["size"], layout_of(plan).bytes
    what = f"{len(records):,} images at {size} pixels, {human_size(needed)}"
    memory = available_memory() if space.memory is None else space.memory
    places = [Path(folder)] if folder is not None else _places(records, size)
    reasons = []
    if memory is None:
        reasons.append("how much memory is available is not known on this system")
    elif needed > memory * (1 - _SPARE_MEMORY):
        reasons.append(f"{human_size(memory)} of memory is available, and a quarter of it stays free")
    else:
        for target in (CacheFolder(place, plan) for place in places):
            if target.is_finished:
                cache = _open(target).labelled_as(records)
                print(f"cache: {what}, found in {target.folder}")
                return cache
        for place in places:
            disk = free_in(place) if space.disk is None else space.disk
            if not is_writable(place):
                reasons.append(f"nothing can be written to {place}")
            elif needed - _taken(place) > disk - _SPARE_DISK:
                reasons.append(f"{human_size(disk)} of disk is free for {place}, and 4 GiB of it stay free")
            else:
                print(f"cache: {what}, made in {place}: {human_size(disk)} free, {human_size(memory)} of memory")
                try:
                    return build_image_cache(records, place, size=size, workers=workers, progress=progress, exact=exact)
                except DiskFullError as error:  # a quota, of which the disk's free space says nothing
                    reasons.append(error.fact)
    print(f"no cache: {what}, but {'; '.join(reasons)}. Every epoch reads and decodes the records")
    return PackedImages(records.folder, size).labelled_as(records)


def _plan(records: PackedImages, size: int, exact: bool) -> dict:
    """Return all that decides the bytes of a cache; ValueError where none can be made so."""
    if not isinstance(records, PackedImages):
        fix = (
            "PackedImages(folder)" if isinstance(records, str | os.PathLike) else "the PackedImages that pack returned"
        )
        if isinstance(inner := getattr(records, "dataset", None), PackedImages):
            fix = f"cache all {len(inner):,} images of the PackedImages, and take the Subset of the cache"
        raise InvalidValueError(f"a cache is made of PackedImages, got {type(records).__name__}", fix=fix)
    try:
        size = whole_number("size", size or 0, 1)
    except ValueError:
        raise InvalidValueError(f"size is the height and width in pixels, got {size!r}", fix="size=128") from None
    PackedImages(records.folder, size)  # raises for pixels of another size
    made_of = {"words": f"records {records.folder}", "digest": records.digest}
    channels = {"channels": 4} if records.has_masks else {}
    return {"records": made_of, "count": len(records), "size": size, "exact": exact, **channels}


def _open(target: CacheFolder) -> CachedImages:
    """Open a finished cache, if it is the one that was asked for."""
    cache = CachedImages(target.folder)
    if another := target.differences(cache.plan):
        raise ValueError(another)
    return cache


def _places(records: PackedImages, size: int) -> list[Path]:
    """Return where a cache lies by default, best first.

    Beside the records, not inside: they are copied and attached without their cache. The temporary folder is for
    records in a folder that cannot be written to; /kaggle/working has 20 GB, which are saved with the notebook. PackedImages
    in different places may have the same name, so its name there has a part of their digest.
    """
    name = f"{records.folder.name}-cache-{size}"
    return [records.folder.with_name(name), Path(tempfile.gettempdir(), f"{name}-{records.digest[:8]}")]


def _taken(folder: Path) -> int:
    """Return the bytes of disk that an interrupted call has taken already."""
    file = CacheFolder(folder).work / "images.npy"
    return getattr(file.stat(), "st_blocks", 0) * 512 if file.exists() else 0


def _full(target: CacheFolder) -> DiskFullError:
    plan, free = target.plan, shutil.disk_usage(target.folder).free
    return DiskFullError(
        f"the disk of {target.folder} is full: a cache of {plan['count']:,} images at {plan['size']} pixels takes "
        f"{human_size(layout_of(plan).bytes)}",
        found=f"{human_size(free)} free",
        fix="make room and call it again; or a folder on a larger disk, a smaller size, or cached_images(...)",
    )


def _build(target: CacheFolder, records: PackedImages, workers: int, progress: str | None) -> None:
    """Decode what no earlier call has decoded, and give the folder its manifest."""
    work, layout = target.work, layout_of(target.plan)
    target.begin()
    _allocate(target)
    # Of the blocks that an earlier call has noted, those that can be read back: a power cut may have lost the others.
    kept = layout.intact(map_file(work / "images.npy"), _noted(work))
    left = sorted(set(range(layout.blocks)) - kept)
    job = {"records": str(records.folder), "work": str(work), "plan": target.plan}
    workers = min(workers, len(left))
    if left:
        run_in_processes(
            "tpukit.datasets.image_cache:_work",
            [{**job, "note": f"done-{rank}.txt", "blocks": left[rank::workers]} for rank in range(workers)],
            label=f"decode images at {target.plan['size']} pixels",
            total=layout.count,
            done=lambda: sum(len(layout.images(block)) for block in _noted(work)),
            folder=work,
            progress=progress,
        )
    _publish(target, records)


def _allocate(target: CacheFolder) -> None:
    """Take the disk that all images need: now, not after half an hour of decoding, or when others have taken it."""
    images, published = target.work / "images.npy", target.folder / "images.npy"
    layout = layout_of(target.plan)
    if published.exists():  # ended after the last image and before the manifest
        published.replace(images)
    with open(images, "ab") as handle:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle.fileno(), 0, layout.bytes)
            handle.truncate(layout.bytes)
        except OSError:
            images.unlink()
            raise
    with open(images, "r+b") as handle:
        handle.write(layout.header)


def _work(job: dict) -> None:
    """Decode some blocks, in one of the processes; note the checksum of each when it is written."""
    import numpy

    work, layout = Path(job["work"]), layout_of(job["plan"])
    records = PackedImages(job["records"], job["plan"]["size"], exact=job["plan"]["exact"])
    buffer = numpy.empty((_PIECE, *layout.shape), numpy.uint8)
    # Written, not mapped: where the disk is full that is an error, where a mapped page finds no room it is a SIGBUS.
    with open(work / "images.npy", "r+b") as images, open(work / job["note"], "a") as note:
        for block in job["blocks"]:
            checksum, inside = 0, layout.images(block)
            images.seek(layout.start(inside.start))
            for first in inside[::_PIECE]:
                indices = numpy.arange(first, min(inside.stop, first + _PIECE))
                piece = records.take(indices, out=buffer[: len(indices)])
                checksum = zlib.crc32(piece, checksum)
                images.write(piece)
            images.flush()
            note.write(f"\n{block} {checksum};")  # a whole line or, if this process ends in the middle, none
            note.flush()


def _noted(work: Path) -> dict[int, int]:
    """Return the checksum of every block that is done."""
    text = "".join(note.read_text(errors="replace") for note in work.glob("done-*.txt"))
    return {int(block): int(checksum) for block, checksum in re.findall(r"^(\d+) (\d+);$", text, re.MULTILINE)}


def _publish(target: CacheFolder, records: PackedImages) -> None:
    """Bring all of the cache to the disk, the manifest last."""
    written = {"index.npy": npy(records.index)}
    if "groups.npy" in records.files:
        written["groups.npy"] = npy(records.groups)
    for name, data in written.items():
        write_file(target.folder / name, data)
    with open(target.work / "images.npy", "r+b") as images:
        os.fsync(images.fileno())
    (target.work / "images.npy").replace(target.folder / "images.npy")
    target.finish(
        names=records.names,
        classes=records.classes,
        group_names=records.group_names,
        masks=records.has_masks,
        made=records.made,
        files={
            "images.npy": {"bytes": layout_of(target.plan).bytes},
            **{name: size_and_checksum(data) for name, data in written.items()},
        },
        blocks=[checksum for _, checksum in sorted(_noted(target.work).items())],
    )
