"""Decode all images once, where disk and memory have room for them; on from where it stopped when it was ended."""

import errno
import io
import json
import os
import re
import shutil
import tempfile
import zlib
from pathlib import Path

from tpukit.display.tables import human_size
from tpukit.machine.resources import available_memory, cpus
from tpukit.storage.array_records import seal, write_file
from tpukit.storage.blocks import Layout, map_file
from tpukit.storage.processes import lock_folder, run_in_processes
from tpukit.storage.records import Records

FORMAT = "tpukit cache 1"
UNFINISHED = "unfinished"  # the folder in the folder, where images are decoded until the manifest is there
_FILES = ("images.npy", "labels.npy", "groups.npy")
_PIECE = 128  # images that a process holds while it decodes: 6 MB at 128 pixels, 100 MB at 512
_SPARE_DISK = 4 * 2**30  # for checkpoints, logs and outputs: with a full disk a notebook cannot even be saved
# The workers come after the choice, 0.7 GiB each with torch and torch_xla loaded, then XLA's compiler. They take it
# from the page cache, and a random read that misses that is 200 times slower: 772 images/s were measured.
_SPARE_MEMORY = 1 / 4


class NoRoom(OSError):
    """The disk has no room for a cache, or nothing can be written there."""


def build_cache(
    records: Records,
    folder=None,
    *,
    size: int,
    workers: int | None = None,
    progress: str | None = None,
    exact: bool = True,
):
    """Decode all records once, into a file that is read thirty times as fast as they are decoded.

    It takes size * size * 3 bytes of disk an image, and is fast only where memory can hold them all: `cache_or_decode`
    looks at both first. The same records give the same bytes. Ended at any moment, even by the machine, the same call
    goes on where it stopped; when all is there it opens it.

    Args:
        records: what `pack` returned.
        folder: a new or empty folder, or one where the same cache was begun; None for `<records>-cache-<size>` beside
            the records or, where nothing can be written (Kaggle's /kaggle/input), in the system's temporary folder.
        size: height and width in pixels.
        workers: processes that decode; None for one a CPU.
        progress: "widgets", "line", "text" or "off", as for `launch`; None decides by where this runs.
        exact: True for Pillow's pixels to the last bit; see `decode`.

    Returns:
        The `Cache`.

    Raises:
        NoRoom: the disk is too small, which is known before the first image is decoded: the room is taken at once.
        FileExistsError: the folder holds somebody's files.
        ValueError: a number is out of range, or the folder holds a cache of other records or of another size.
        OSError: a record, or the cache that is there, is damaged; the message names it.
    """
    from tpukit.storage.pixel_cache import Cache

    if workers is not None and workers < 1:
        raise ValueError(f"workers is 1 or more, got {workers}")
    plan = _plan(records, size, exact)
    if folder is None:
        places = _places(records, size)
        folder = next((place for place in places if _is_finished(place) or _is_writable(place)), places[0])
    folder = Path(folder)
    if not _is_finished(folder):
        if not _is_writable(folder):
            raise NoRoom(f"nothing can be written to {folder}\n  fix:   name a folder on another disk")
        folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(folder):
            if not _is_finished(folder):  # else another process has built it meanwhile
                try:
                    _build(folder, plan, records, workers or cpus(), progress)
                except OSError as error:
                    if error.errno in (errno.ENOSPC, errno.EDQUOT):
                        raise _full(folder, plan) from error
                    raise
                return Cache(folder, verify=False)  # the checksums are of what was written just now
    return _the_same(Cache(folder), plan)


def cache_or_decode(
    records: Records,
    *,
    size: int,
    folder=None,
    workers: int | None = None,
    progress: str | None = None,
    exact: bool = True,
    free: int | None = None,
    available: int | None = None,
):
    """Open or build a cache where memory and disk have room for it, else decode in every epoch; print which and why.

    A cache pays from the second epoch on.

    Args:
        records: what `pack` returned.
        size: height and width in pixels.
        folder: as for `build_cache`; None looks beside the records, then in the system's temporary folder.
        workers: as for `build_cache`.
        progress: as for `build_cache`.
        exact: as for `build_cache`.
        free: bytes of disk that are free, of which 4 GiB stay so; None asks the disk.
        available: bytes of memory that files may fill, of which a quarter stays free; None for `available_memory()`.

    Returns:
        A `Cache`; or `Records(folder, size)`, where the JPEG decoder scales: pixels near those of an exact cache.

    Raises:
        ValueError: a number is out of range, or the folder holds a cache of other records or of another size.
        OSError: a record, or the cache that is there, is damaged; the message names it.
    """
    from tpukit.storage.pixel_cache import Cache

    plan = _plan(records, size, exact)
    needed = layout_of(plan).bytes
    what = f"{len(records):,} images at {size} pixels, {human_size(needed)}"
    memory = available_memory() if available is None else available
    places = [Path(folder)] if folder is not None else _places(records, size)
    reasons = []
    if memory is None:
        reasons.append("how much memory is available is not known here, and available= was not given")
    elif needed > memory * (1 - _SPARE_MEMORY):
        reasons.append(f"{human_size(memory)} of memory is available, and a quarter of it stays free")
    else:
        for place in filter(_is_finished, places):
            cache = _the_same(Cache(place), plan)
            print(f"cache: {what}, found in {place}")
            return cache
        for place in places:
            disk = shutil.disk_usage(_existing(place)).free if free is None else free
            if not _is_writable(place):
                reasons.append(f"nothing can be written to {place}")
            elif needed - _taken(place) > disk - _SPARE_DISK:
                reasons.append(f"{human_size(disk)} of disk is free for {place}, and 4 GiB of it stay free")
            else:
                print(f"cache: {what}, made in {place}: {human_size(disk)} free, {human_size(memory)} of memory")
                try:
                    return build_cache(records, place, size=size, workers=workers, progress=progress, exact=exact)
                except NoRoom as error:  # a quota, of which the disk's free space says nothing
                    reasons.append(str(error).partition("\n")[0])
    print(f"no cache: {what}, but {'; '.join(reasons)}. Every epoch reads and decodes the records")
    return Records(records.folder, size)


def layout_of(plan: dict) -> Layout:
    """Say how the file of images of such a cache is laid out."""
    return Layout(plan["count"], (plan["size"], plan["size"], 3))


# ---- which and where -----------------------------------------------------------------------------------------------


def _plan(records: Records, size: int, exact: bool) -> dict:
    """Say all that decides the bytes of a cache, and refuse what cannot be one."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"size is the height and width in pixels, got {size!r}\n  fix:   size=128")
    Records(records.folder, size)  # raises for pixels of another size
    return {"records": records.digest, "count": len(records), "size": size, "exact": exact}


def _the_same(cache, plan: dict):
    """Return the cache, if it is what was asked for."""
    other = [f"{key} {cache.plan[key]}, asked for {plan[key]}" for key in plan if cache.plan[key] != plan[key]]
    if other:
        raise ValueError(
            f"{cache.folder} holds another cache\n"
            f"  found: {'; '.join(other)}\n"
            f"  fix:   name another folder, or delete this one: shutil.rmtree({str(cache.folder)!r})"
        )
    return cache


def _places(records: Records, size: int) -> list[Path]:
    """Return where a cache lies by default, best first.

    Beside the records, not in them: those are copied and attached without it. The temporary folder is for records where
    nothing can be written; /kaggle/working has 20 GB, which are kept with the notebook. There are records of one name
    from several places, so a part of the digest is in the name.
    """
    name = f"{records.folder.name}-cache-{size}"
    return [records.folder.with_name(name), Path(tempfile.gettempdir(), f"{name}-{records.digest[:8]}")]


def _is_finished(folder: Path) -> bool:
    return (folder / "manifest.json").is_file()


def _existing(folder: Path) -> Path:
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def _is_writable(folder: Path) -> bool:
    return os.access(_existing(folder), os.W_OK | os.X_OK)


def _taken(folder: Path) -> int:
    """Return the bytes of disk that an interrupted call has taken already."""
    file = folder / UNFINISHED / "images.npy"
    return getattr(file.stat(), "st_blocks", 0) * 512 if file.exists() else 0


def _full(folder: Path, plan: dict) -> NoRoom:
    free = shutil.disk_usage(folder).free
    return NoRoom(
        f"the disk of {folder} is full: a cache of {plan['count']:,} images at {plan['size']} pixels takes "
        f"{human_size(layout_of(plan).bytes)}\n"
        f"  found: {human_size(free)} free\n"
        "  fix:   make room and call it again; or a folder on a larger disk, a smaller size, or cache_or_decode(...)"
    )


# ---- building ------------------------------------------------------------------------------------------------------


def _build(folder: Path, plan: dict, records: Records, workers: int, progress: str | None) -> None:
    """Decode what no earlier call has decoded, and give the folder its manifest."""
    work, layout = folder / UNFINISHED, layout_of(plan)
    _prepare(folder, plan)
    # What an earlier call has noted counts as far as it can be read back: a power cut may have lost the rest.
    kept = layout.intact(map_file(work / "images.npy"), _noted(work))
    left = sorted(set(range(layout.blocks)) - kept)
    job = {"records": str(records.folder), "work": str(work), "plan": plan}
    workers = min(workers, len(left))
    if left:
        run_in_processes(
            "tpukit.storage.build_pixel_cache:_work",
            [{**job, "note": f"done-{rank}.txt", "blocks": left[rank::workers]} for rank in range(workers)],
            label=f"decode images at {plan['size']} pixels",
            total=layout.count,
            done=lambda: sum(len(layout.images(block)) for block in _noted(work)),
            folder=work,
            progress=progress,
        )
    _publish(folder, plan, records)


def _prepare(folder: Path, plan: dict) -> None:
    """Take the room that all images need; what an interrupted call of the same plan has left is kept."""
    work = folder / UNFINISHED
    images, begun = work / "images.npy", work / "plan.json"
    before = json.loads(begun.read_bytes()) if begun.is_file() else None
    told = {"format": FORMAT, **plan}
    ours = {UNFINISHED, *_FILES} if before else {UNFINISHED}
    strange = [name for name in sorted(os.listdir(folder)) if name not in ours and not (before and _is_part(name))]
    if strange:
        raise FileExistsError(
            f"{folder} holds files that are not a cache's\n  found: {strange[:4]}\n  fix:   name a new or empty folder"
        )
    if before != told:
        for old in _FILES if before else ():
            (folder / old).unlink(missing_ok=True)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        write_file(begun, json.dumps(told).encode())
    if (folder / images.name).exists():  # ended after the last image and before the manifest
        (folder / images.name).replace(images)
    layout = layout_of(plan)
    with open(images, "ab") as handle:
        try:
            # Now, not after half an hour of decoding, and so that nobody else takes it meanwhile.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle.fileno(), 0, layout.bytes)
            handle.truncate(layout.bytes)
        except OSError:
            images.unlink()
            raise
    with open(images, "r+b") as handle:
        handle.write(layout.header)


def _work(job: dict) -> None:
    """Decode some blocks, in a process of its own; note the checksum of each when it is written."""
    import numpy

    work, layout = Path(job["work"]), layout_of(job["plan"])
    records = Records(job["records"], job["plan"]["size"], exact=job["plan"]["exact"])
    buffer = numpy.empty((_PIECE, *layout.shape), numpy.uint8)
    begin = len(layout.header)
    # Written, not mapped: where the disk is full that is an error, where a mapped page finds no room it is a SIGBUS.
    with open(work / "images.npy", "r+b") as images, open(work / job["note"], "a") as note:
        for block in job["blocks"]:
            checksum, inside = 0, layout.images(block)
            images.seek(begin + inside.start * layout.each)
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


def _publish(folder: Path, plan: dict, records: Records) -> None:
    """Bring all of the cache to the disk, the manifest last."""
    import numpy

    work, layout = folder / UNFINISHED, layout_of(plan)
    files = {"images.npy": {"bytes": layout.bytes}}
    for name, array in (("labels.npy", records.labels), ("groups.npy", records.groups)):
        written = io.BytesIO()
        numpy.save(written, array, allow_pickle=False)
        write_file(folder / name, written.getvalue())
        files[name] = {"bytes": len(written.getvalue()), "crc": zlib.crc32(written.getvalue())}
    with open(work / "images.npy", "r+b") as images:
        os.fsync(images.fileno())
    (work / "images.npy").replace(folder / "images.npy")
    manifest = {
        "format": FORMAT,
        "plan": plan,
        "names": records.names,
        "classes": records.classes,
        "group_names": records.group_names,
        "files": files,
        "blocks": [checksum for _, checksum in sorted(_noted(work).items())],
    }
    for part in filter(_is_part, os.listdir(folder)):  # of calls that were ended
        (folder / part).unlink()
    write_file(folder / "manifest.json", seal(manifest))
    shutil.rmtree(work, ignore_errors=True)


def _is_part(name: str) -> bool:
    return name.endswith(".part")
