"""Decode all images of a pack once, into one file, if disk and memory can hold it.

    packed/                       packed-cache-128/
      00000-of-00001...   -->       images.npy      (N, 128, 128, 3) uint8
      index.npy                     index.npy, manifest.json

`images.npy` is allocated first, so that a disk that is too small is found before the first image is
decoded. Several processes then fill blocks of 1,024 images, and note the checksum of each block
that they have written. The next call after an interruption continues with the blocks that have no
note, or whose bytes do not match it.
"""

import errno
import os
import re
import shutil
import tempfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from tpukit.datasets.checked_files import npy, size_and_checksum, whole_number, write_file
from tpukit.datasets.decoding import pixel_limit, set_pixel_limit
from tpukit.datasets.disk_space import DiskFullError, free_in, is_writable
from tpukit.datasets.packed_images import PackedImages
from tpukit.datasets.pixel_cache import CachedImages, CacheFolder, layout_of, map_file
from tpukit.datasets.pixel_form import size_in_plan, size_in_words
from tpukit.datasets.processes import run_in_processes
from tpukit.essentials.display import InvalidValueError, human_size
from tpukit.essentials.environment import available_memory, cpus

# A process decodes this many images before it writes them: 6 MB at 128 pixels, 100 MB at 512.
_PIECE = 128
# Bytes that stay free for checkpoints, logs and outputs. Jupyter cannot save a notebook on a full
# disk.
_SPARE_DISK = 4 * 2**30
# The share of the memory that stays free for the workers, which start later: each needs 0.7 GiB for
# torch, torch_xla and XLA's compiler. Less memory would mean a smaller page cache. A random read
# that misses the page cache is 200 times slower (772 images per second measured).
_SPARE_MEMORY = 1 / 4


@dataclass(frozen=True)
class Space:
    """The free bytes of disk and memory; None for the values of this machine."""

    disk: int | None = None
    memory: int | None = None


def cached_images(
    packed: PackedImages,
    *,
    size: int | tuple[int, int],
    folder=None,
    workers: int | None = None,
    progress: str | None = None,
    exact: bool = True,
) -> CachedImages | PackedImages:
    """Open or build a cache of decoded images, if memory and disk can hold it.

    To read an image from a cache is thirty times as fast as to decode it, so a cache saves time
    from the second epoch on. A cache takes height * width * channels bytes per image. If memory or
    disk is too small, the images are decoded in every epoch, and a printed line says why. The same
    pack gives a cache with the same bytes. If a call is interrupted, even by a reboot, repeat it to
    continue.

    Args:
        packed: the result of `pack`.
        size: height and width in pixels, one number for both or (height, width).
        folder: a new or empty folder, or one in which the same cache was begun or finished. If
            another cache was begun there, and not finished, the new one replaces it. None for the
            folder `<pack>-cache-<size>` next to the pack. If nothing can be written next
            to the pack, as in Kaggle's /kaggle/input, or the disk is too small, the cache is in the
            system's temporary folder. At least 4 GiB of the disk stay free.
        workers: the number of processes that decode; None for one per CPU.
        progress: as for `pack`.
        exact: True for exactly the pixels of Pillow; see `decode`.

    Returns:
        A `CachedImages`; or, if memory or disk is too small, a `PackedImages` of this size. The
        latter decodes without `exact`, so its pixels are not quite those of an exact cache.

    Raises:
        FileExistsError: the folder contains other files.
        ValueError: a number is out of range, or the folder has a finished cache of another pack,
            size or `exact`.
        OSError: an image, or an existing cache, is damaged; the message names it.
    """
    return choose_images(
        packed,
        Space(),
        size=size,
        folder=folder,
        workers=workers,
        progress=progress,
        exact=exact,
    )


def choose_images(
    packed: PackedImages, space: Space, *, size, folder, workers, progress, exact
) -> CachedImages | PackedImages:
    """Open or build a cache if `space` is enough, else return the pack; see `cached_images`."""
    plan = _plan(packed, size, exact)
    size = plan["size"]
    needed = layout_of(plan).bytes
    count = f"{len(packed):,} images at {size_in_words(size)} pixels"
    images = f"{count}, {human_size(needed)}"
    places = _places(packed, size) if folder is None else [Path(folder).expanduser()]
    reasons = []
    memory = available_memory() if space.memory is None else space.memory
    why_not = _lack_of_memory(needed, memory)
    if why_not:
        reasons.append(why_not)
        places = []
    # First any finished cache, then the first folder with enough disk for a new one.
    for place in places:
        target = CacheFolder(place, plan)
        if target.is_finished:
            cache = _open(target).labelled_as(packed)
            print(f"cache: {images}, found in {target.folder}")
            return cache
    for place in places:
        free = free_in(place) if space.disk is None else space.disk
        why_not = _lack_of_disk(place, needed, free)
        if why_not:
            reasons.append(why_not)
            continue
        print(
            f"cache: {images}, made in {place}: {human_size(free)} free, "
            f"{human_size(memory)} of memory"
        )
        try:
            return build_image_cache(
                packed, place, size=size, workers=workers, progress=progress, exact=exact
            )
        except DiskFullError as error:  # a quota can be smaller than the free space of the disk
            reasons.append(str(error).partition("\n")[0])
    print(
        f"no cache: {count} need {human_size(needed)}, but {'; '.join(reasons)}. "
        "Every epoch reads and decodes the packed images"
    )
    return PackedImages(packed.folder, size).labelled_as(packed)


def _lack_of_memory(needed: int, memory: int | None) -> str | None:
    """Return the reason why memory cannot hold a cache; None if it can."""
    if memory is None:
        return "this system does not report its available memory"
    if needed > memory * (1 - _SPARE_MEMORY):
        return f"{human_size(memory)} of memory is available, and a quarter of it stays free"
    return None


def _lack_of_disk(place: Path, needed: int, free: int) -> str | None:
    """Return the reason why a cache cannot be written to a folder; None if it can."""
    if not is_writable(place):
        return f"nothing can be written to {place}"
    if needed - _allocated(place) > free - _SPARE_DISK:
        return f"{human_size(free)} of disk is free for {place}, and 4 GiB of it stay free"
    return None


def _allocated(folder: Path) -> int:
    """Return the bytes of disk that an interrupted call has already allocated."""
    file = CacheFolder(folder).work / "images.npy"
    if not file.exists():
        return 0
    return getattr(file.stat(), "st_blocks", 0) * 512  # POSIX counts blocks of 512 bytes


def build_image_cache(
    packed: PackedImages,
    folder=None,
    *,
    size: int | tuple[int, int],
    workers: int | None = None,
    progress: str | None = None,
    exact: bool = True,
) -> CachedImages:
    """Build a cache, or open a finished one, even if it is larger than the machine's memory.

    Args:
        packed: the result of `pack`.
        folder, size, workers, progress, exact: as for `cached_images`.

    Returns:
        The `CachedImages`.

    Raises:
        DiskFullError: the disk is too small, or nothing can be written to the folder.
        FileExistsError, ValueError, OSError: as for `cached_images`.
    """
    workers = whole_number("workers", workers, 1)
    plan = _plan(packed, size, exact)
    if folder is None:
        folder = _default_folder(packed, size)
    target = CacheFolder(Path(folder).expanduser(), plan)
    if target.is_finished:
        return _open(target).labelled_as(packed)
    if not is_writable(target.folder):
        raise DiskFullError(
            f"nothing can be written to {folder}", fix="pass a folder on another disk"
        )
    with target.locked():
        if target.is_finished:  # another process has built it meanwhile
            return _open(target).labelled_as(packed)
        try:
            _build(target, packed, workers or cpus(), progress)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _full(target) from error
            raise
        # verify=False, because the checksums were computed from the bytes just written.
        return CachedImages(folder, verify=False).labelled_as(packed)


def _plan(packed: PackedImages, size, exact: bool) -> dict:
    """Return all settings that a cache depends on; ValueError if no cache can be made."""
    if not isinstance(packed, PackedImages):
        raise _no_pack(packed)
    try:
        size = size_in_plan(size or 0)
    except ValueError:
        raise InvalidValueError(
            f"size must be the height and width in pixels, got {size!r}", fix="size=128"
        ) from None
    # `PackedImages` raises if the pack has pixels of another size.
    *_, channels = PackedImages(packed.folder, size).shape
    plan = {
        "pack": {"words": f"pack {packed.folder}", "digest": packed.digest},
        "count": len(packed),
        "size": size,
        "exact": exact,
    }
    if channels != 3:  # with masks, grey, or 16 bits as pairs of bytes
        plan["channels"] = channels
    return plan


def _no_pack(packed) -> InvalidValueError:
    """Return the error for an argument that is not a pack."""
    fix = "the PackedImages that pack returned"
    if isinstance(packed, str | os.PathLike):
        fix = "PackedImages(folder)"
    inner = getattr(packed, "dataset", None)
    if isinstance(inner, PackedImages):
        fix = (
            f"cache all {len(inner):,} images of the PackedImages, and take the Subset of the cache"
        )
    return InvalidValueError(
        f"a cache is made of PackedImages, got {type(packed).__name__}", fix=fix
    )


def _open(target: CacheFolder) -> CachedImages:
    """Open a finished cache; ValueError if it is a cache of other images."""
    cache = CachedImages(target.folder)
    another = target.differences(cache.plan, kind=InvalidValueError)
    if another:
        raise another
    return cache


def _places(packed: PackedImages, size) -> list[Path]:
    """Return the default folders of a cache, best first.

    The first is next to the pack, not inside, because packs are copied and attached without their
    caches. The second is in the temporary folder, for a pack in a read-only folder. It is not in
    /kaggle/working, which has only 20 GB and is saved with the notebook. Packs in different folders
    may have the same name, so the name in the temporary folder has a part of the digest.
    """
    name = f"{packed.folder.name}-cache-{size_in_words(size).replace(' ', '')}"
    return [
        packed.folder.with_name(name),
        Path(tempfile.gettempdir(), f"{name}-{packed.digest[:8]}"),
    ]


def _default_folder(packed: PackedImages, size) -> Path:
    """Return the first default folder that has a cache or is writable."""
    places = _places(packed, size)
    for place in places:
        if CacheFolder(place).is_finished or is_writable(place):
            return place
    return places[0]


def _full(target: CacheFolder) -> DiskFullError:
    plan = target.plan
    free = shutil.disk_usage(target.folder).free
    return DiskFullError(
        f"the disk of {target.folder} is full: a cache of {plan['count']:,} images "
        f"at {size_in_words(plan['size'])} pixels takes {human_size(layout_of(plan).bytes)}",
        found=f"{human_size(free)} free",
        fix="make room, and call again; or pass a folder on a larger disk, or a smaller size; or "
        "let tpukit decode in every epoch if the disk is too small: cached_images(...)",
    )


def _build(target: CacheFolder, packed: PackedImages, workers: int, progress: str | None) -> None:
    """Decode the images that no earlier call has decoded, and write the manifest."""
    work = target.work
    layout = layout_of(target.plan)
    target.begin()
    _allocate(target)
    # A power cut may lose blocks whose checksums are noted already, so compare the bytes.
    whole = layout.intact(map_file(work / "images.npy"), _noted(work))
    left = sorted(set(range(layout.blocks)) - whole)
    workers = min(workers, len(left))
    job = {
        "pack": str(packed.folder),
        "work": str(work),
        "plan": target.plan,
        "pixel_limit": pixel_limit(),
    }
    jobs = []
    for rank in range(workers):
        jobs.append({**job, "note": f"done-{rank}.txt", "blocks": left[rank::workers]})
    if left:
        run_in_processes(
            _work,
            jobs,
            label=f"decode images at {size_in_words(target.plan['size'])} pixels",
            total=layout.count,
            done=lambda: sum(len(layout.images(block)) for block in _noted(work)),
            folder=work,
            progress=progress,
        )
    _publish(target, packed)


def _allocate(target: CacheFolder) -> None:
    """Allocate the disk that all images need, so that a full disk is found before decoding."""
    images = target.work / "images.npy"
    published = target.folder / "images.npy"
    layout = layout_of(target.plan)
    if published.exists():  # an earlier call ended between the last image and the manifest
        published.replace(images)
    with open(images, "ab") as handle:
        try:
            # `truncate` alone makes a sparse file, which takes no disk until it is written.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle.fileno(), 0, layout.bytes)
            handle.truncate(layout.bytes)
        except OSError:
            images.unlink()
            raise
    with open(images, "r+b") as handle:
        handle.write(layout.header)


def _work(job: dict) -> None:
    """Decode the blocks of one process, and note the checksum of each block that is written."""
    import numpy

    set_pixel_limit(job["pixel_limit"])
    work = Path(job["work"])
    layout = layout_of(job["plan"])
    packed = PackedImages(job["pack"], job["plan"]["size"], exact=job["plan"]["exact"])
    buffer = numpy.empty((_PIECE, *layout.shape), numpy.uint8)
    # Written, not mapped: on a full disk a write raises an error, but a mapped page ends the
    # process with SIGBUS.
    with open(work / "images.npy", "r+b") as images, open(work / job["note"], "a") as note:
        for block in job["blocks"]:
            checksum = 0
            in_block = layout.images(block)
            images.seek(layout.start(in_block.start))
            for first in in_block[::_PIECE]:
                indices = numpy.arange(first, min(in_block.stop, first + _PIECE))
                piece = packed.take(indices, out=buffer[: len(indices)])
                checksum = zlib.crc32(piece, checksum)
                images.write(piece)
            images.flush()
            # If this process ends in the middle of the line, `_noted` does not count the block.
            note.write(f"\n{block} {checksum};")
            note.flush()


def _noted(work: Path) -> dict[int, int]:
    """Return the noted checksum of each decoded block, by the block's number."""
    text = "".join(note.read_text(errors="replace") for note in work.glob("done-*.txt"))
    lines = re.findall(r"^(\d+) (\d+);$", text, re.MULTILINE)
    return {int(block): int(checksum) for block, checksum in lines}


def _publish(target: CacheFolder, packed: PackedImages) -> None:
    """Move the finished files into the folder of the cache, and write the manifest last."""
    written = {"index.npy": npy(packed.index)}
    if "groups.npy" in packed.files:
        written["groups.npy"] = npy(packed.groups)
    files = {"images.npy": {"bytes": layout_of(target.plan).bytes}}
    for name, data in written.items():
        write_file(target.folder / name, data)
        files[name] = size_and_checksum(data)
    # The pixels must be on the disk before the manifest names them. After a power cut, a manifest
    # could otherwise exist for a file with gaps.
    with open(target.work / "images.npy", "r+b") as images:
        os.fsync(images.fileno())
    (target.work / "images.npy").replace(target.folder / "images.npy")
    target.finish(
        names=packed.names,
        classes=packed.classes,
        group_names=packed.group_names,
        table=asdict(packed.source_rows),
        masks=packed.has_masks,
        made=packed.made,
        files=files,
        blocks=[checksum for _, checksum in sorted(_noted(target.work).items())],
    )
