"""The shards of a pack, written by several processes: each of them is whole, or not there."""

import errno
import functools
import glob
import importlib
import json
import os
import pickle
import struct
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from tpukit.datasets.array_records import Shards, write_shard
from tpukit.datasets.checked_files import write_file
from tpukit.datasets.decoding import decode
from tpukit.datasets.image_modes import NEARLY_BLACK, brightest, has_frames
from tpukit.datasets.items import Items, ReceivedItems, StoredItems
from tpukit.datasets.masks import is_masked, palette_of, parts_of
from tpukit.datasets.pack_sources import PackSource
from tpukit.datasets.packed_images import PackFolder
from tpukit.datasets.processes import how_many, run_in_processes
from tpukit.datasets.source_files import Files, Names
from tpukit.essentials.data import run_ahead
from tpukit.essentials.display import SystemFailureError, TpukitError
from tpukit.essentials.environment import part_of

_READ_AHEAD = 4  # threads per process: on a network drive opening a file takes longer than decoding it
# The machine's fault, not the image's: too many open files, a network drive that is gone.
NOT_DAMAGE = (errno.EMFILE, errno.ENFILE, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT)


def write_shards(described: PackSource, target: PackFolder, skip: bool, workers, progress) -> None:
    """Write the shards that are not there yet, in several processes."""
    import numpy

    count = len(numpy.load(target.work / "rows.npy", mmap_mode="r"))
    workers = how_many(len(shard_files(target, count)), workers)
    counts = target.work / "counts"  # 8 bytes per process: how many images it has packed
    counts.write_bytes(bytes(8 * workers))
    missing = [_missing(target, rank, workers) for rank in range(workers)]
    written = count - sum(len(rows) for mine in missing for _, rows in mine)
    items, size = described.items, target.plan["size"]
    is_received = items is not None and items.by_number
    job = {"folder": str(target.folder), "plan": target.plan, "root": described.root, "skip": skip}
    job |= {"reader": described.reader, "is_received": is_received, "workers": workers}
    job["shape"] = None if items is None else items.shape(size)
    run_in_processes(
        "tpukit.datasets.pack_shards:_work",
        [{**job, "rank": rank} for rank in range(workers)],
        label="pack images",
        total=count,
        done=lambda: written + int(numpy.fromfile(counts, "<i8").sum()),
        folder=target.work,
        progress=progress,
        feeds=[_feed(items, mine, size, skip=skip) for mine in missing] if is_received else (),
    )


def _missing(target: PackFolder, rank: int, workers: int) -> list[tuple]:
    """Return file and rows of each shard that is not written yet, of every `workers`th."""
    import numpy

    rows = numpy.load(target.work / "rows.npy", mmap_mode="r")
    length = target.plan["shard"]
    missing = []
    for number, file in enumerate(shard_files(target, len(rows))):
        if number % workers == rank and not file.exists():
            missing.append((file, rows[number * length : (number + 1) * length]))
    return missing


def _feed(items: Items, missing: list[tuple], size: int | None, *, skip: bool) -> Iterator[bytes]:
    """Read the items of some shards, in their order, for `ReceivedItems` in the process that packs them.

    This process reads them, one after the other: a dataset may hold what no other process can use at the same time,
    such as an open file. Those processes decode and write meanwhile.
    """
    for _, rows in missing:
        for number in rows["row"].tolist():
            yield pickle.dumps(items.read_one(number, size, skip=skip))


def read_shards_so_far(target: PackFolder) -> Shards:
    """Open the shards that are written."""
    import numpy

    rows = numpy.load(target.work / "rows.npy")
    files, parts = [], [rows[:0]]
    for number, file in enumerate(shard_files(target, len(rows))):
        if file.exists():
            part = rows[number * target.plan["shard"] : (number + 1) * target.plan["shard"]]
            skipped = [image["row"] for image in json.loads(note_of(target, file).read_bytes())["skipped"]]
            files.append(file)
            parts.append(part[~numpy.isin(part["row"], skipped)])
    return Shards(files, [len(part) for part in parts[1:]], numpy.concatenate(parts), at_once=False)


def shard_files(target: PackFolder, count: int) -> list[Path]:
    """Name the shards of a pack of so many images."""
    number = -(-count // target.plan["shard"])
    return [target.folder / f"{k:05d}-of-{number:05d}.array_record" for k in range(number)]


def note_of(target: PackFolder, shard: Path) -> Path:
    """Name the file that lists the images left out of a shard, and what was seen of the others."""
    return target.work / f"{shard.stem}.json"


def contents_of(target: PackFolder, shard: Path):
    """Return the digests of each image of a shard, and of the image with its mask, (n, 2) uint64."""
    import numpy

    return numpy.fromfile(note_of(target, shard).with_suffix(".contents"), "<u8").reshape(-1, 2)


def digest(stored) -> bytes:
    """Return eight bytes that are the same where what is stored is the same.

    Of four bytes, two of 100,000 images would be. zlib's two sums take a fifth of the time of blake2b.
    """
    return struct.pack("<II", zlib.crc32(stored), zlib.adler32(stored))


def labels_of(target: PackFolder, shard: Path):
    """Return the labels of a shard of received items, which were read with their images, all in one row."""
    import numpy

    return numpy.fromfile(note_of(target, shard).with_suffix(".labels"), "<f4")


def _work(job: dict) -> None:
    """Write every `workers`th shard."""
    target = PackFolder(Path(job["folder"]), job["plan"])
    missing = _missing(target, job["rank"], job["workers"])
    source, done = _open_source(target, job), 0
    with open(target.work / "counts", "r+b", buffering=0) as counts:

        def count(images: int) -> None:
            nonlocal done
            done += images
            os.pwrite(counts.fileno(), done.to_bytes(8, "little"), 8 * job["rank"])

        for file, rows in missing:
            _write(target, file, rows.copy(), source, job["skip"], count)


def _open_source(target: PackFolder, job: dict) -> Files | StoredItems | ReceivedItems:
    """Return what reads the images by their numbers."""
    if job["reader"]:
        module, reader = job["reader"].split(":")
        return getattr(importlib.import_module(module), reader)(target.work, job["root"], target.plan)
    shape = job["shape"] and tuple(job["shape"])
    if job["is_received"]:
        return ReceivedItems(sys.stdin.buffer, shape)
    items = target.work / "items"
    if items.exists():
        return StoredItems(items, shape)
    masks = Names(target.work / "masks") if (target.work / "masks").exists() else None
    return Files(Names(target.work / "names"), job["root"], masks)


def _write(target: PackFolder, file: Path, rows, source, skip: bool, count) -> None:
    """Write a shard, and the note on it before the shard gets its name: a file under its own name is whole."""
    size, window, skipped, shapes = target.plan["size"], target.plan.get("window"), [], set()
    contents, dark, classes, frames, colours = [], [], set(), 0, defaultdict(set)

    def reads() -> Iterator[Callable]:
        for place, number in enumerate(rows["row"].tolist()):
            if isinstance(source, ReceivedItems):
                item = source.receive(number)
                rows["labels"][place] = item.labels
                dark.extend(item.dark)
            yield functools.partial(prepare, source, number, size, window)

    def records() -> Iterator[bytes]:
        nonlocal frames
        for row, (payload, shape, seen) in zip(rows, run_ahead(reads(), _READ_AHEAD), strict=True):
            number = int(row["row"])
            if shape is not None:
                shapes.add(shape)
                whole = digest(payload)
                contents.append((digest(_image_in(payload, shape)) if shape[-1] == 4 else whole) + whole)
                dark.extend(seen["dark"])
                classes.update(seen["masks"])
                for number, colour in seen["colours"].items():
                    colours[number].add(colour)
                frames += seen["frames"]
                yield row.tobytes() + payload
            elif skip:
                skipped.append({"row": number, "name": source.name(number), "why": payload})
            else:
                mend = seen or "copy it again"
                if payload in (os.strerror(errno.ENOENT), os.strerror(errno.EISDIR)):
                    mend = _right_path(source.name(number))
                raise SystemFailureError(
                    f"image {number} cannot be packed: {source.name(number)}",
                    found=payload,
                    fix=f'{mend}; or pack(..., damaged="skip") leaves such images out and lists them',
                )
            count(1)

    part = part_of(target.work / file.name)
    write_shard(part, records())
    pixels = size is not None or source.encoding == "uint8"
    note = {"records": len(rows) - len(skipped), "pixels": pixels, "shapes": sorted(shapes), "skipped": skipped}
    note |= {"frames": frames, "dark": len(dark), "brightest": max(dark, default=0), "masks": sorted(classes)}
    note["colours"] = {number: sorted(mine)[:2] for number, mine in colours.items()}
    write_file(note_of(target, file).with_suffix(".contents"), b"".join(contents))
    if isinstance(source, ReceivedItems):
        write_file(note_of(target, file).with_suffix(".labels"), rows["labels"].tobytes())
    write_file(note_of(target, file), json.dumps(note).encode())
    os.replace(part, file)


def _right_path(path: str) -> str:
    """Say how to mend a path at which there is no file, by what is there."""
    if there := glob.glob(glob.escape(path) + ".*"):
        return f'add the ending: table["path"] + "{os.path.splitext(there[0])[1]}"'
    folder, name = os.path.split(path)
    others = {
        ".str.strip()": path.strip(),
        r'.str.replace("\\", "/")': path.replace("\\", "/"),
        ".str.lower()": os.path.join(folder, name.lower()),
        ".str.upper()": os.path.join(folder, name.upper()),
    }
    if found := next((change for change, other in others.items() if other != path and os.path.isfile(other)), None):
        return f'write it as the file is called: table["path"]{found}'
    if "://" in path:
        return "fetch the files first, and name them as they lie on the disk"
    return f"check the path{'' if os.path.isabs(path) else f', from {os.getcwd()}'}"


def prepare(source: Files | StoredItems | ReceivedItems, number: int, size: int | None, window=None) -> tuple:
    """Return what is to be stored, the shape of its image, what `_look` saw; of a damaged one why, None and its fix."""
    try:
        data = source[number]
        if source.shape is not None:  # pixels, resized when they were stored, or images that were just encoded
            return data, source.shape, _look(data, source.shape)
        image = decode(data, size, window=window)
        seen = _look(image, image.shape, data, window)
    except (OSError, ValueError, MemoryError) as error:
        if getattr(error, "errno", None) in NOT_DAMAGE:
            raise
        if isinstance(error, TpukitError):
            return "; ".join(filter(None, [error.fact, error.found])), None, error.fix
        return getattr(error, "strerror", None) or str(error), None, ""
    return (data if size is None else image.tobytes()), image.shape, seen


def _image_in(payload: bytes, shape: tuple):
    """Return what is stored of an image that has a mask."""
    import numpy

    if is_masked(payload):
        return parts_of(payload)[0]
    return numpy.ascontiguousarray(numpy.frombuffer(payload, numpy.uint8).reshape(shape)[..., :3])


def _look(pixels, shape: tuple, file: bytes = b"", window=None) -> dict:
    """Return the values of a mask and their colours; whether a file has frames; its brightest value if nearly black."""
    import numpy

    masks, dark, palette = [], [], []
    if is_masked(file):
        file, mask = parts_of(file)
        palette = palette_of(mask)
    if shape[-1] == 4:
        masks = numpy.unique(numpy.frombuffer(pixels, numpy.uint8).reshape(shape)[..., 3]).tolist()
    colours = {number: tuple(palette[3 * number : 3 * number + 3]) for number in masks if palette}
    if window is None and file and file[:2] != b"\xff\xd8" and pixels[..., :3].max() < NEARLY_BLACK:
        dark = [value for value in [brightest(file)] if value]
    return {"masks": masks, "colours": colours, "dark": dark, "frames": has_frames(file)}
