"""Write the shards of a pack in several processes: each shard is either complete or absent.

    images 0 to 8191       packed/00000-of-00003.array_record    process 0
    images 8192 to 16383   packed/00001-of-00003.array_record    process 1
    images 16384 to ...    packed/00002-of-00003.array_record    process 0

The process of rank r packs the shards r, r + workers, r + 2 * workers and so on. For each shard it
writes a note into the folder `unfinished`: the damaged images, and facts about the other images for
the manifest. A shard is renamed to its final name last, so a shard with this name has a note.
"""

import errno
import functools
import glob
import json
import math
import os
import pickle
import re
import struct
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tpukit.datasets.array_records import Shards, write_shard
from tpukit.datasets.checked_files import write_file
from tpukit.datasets.decoding import decode, pixel_limit, set_pixel_limit
from tpukit.datasets.image_modes import NEARLY_BLACK, brightest, has_frames, refuse_window
from tpukit.datasets.items import Items, ReceivedItems, StoredItems
from tpukit.datasets.masks import is_masked, palette_of, parts_of
from tpukit.datasets.pack_sources import PackSource
from tpukit.datasets.pack_tables import line_that_reads
from tpukit.datasets.packed_images import PackFolder
from tpukit.datasets.pixel_form import PixelForm
from tpukit.datasets.processes import by_name, how_many, name_of, run_in_processes
from tpukit.datasets.source_files import Files, Names
from tpukit.essentials.data import run_ahead
from tpukit.essentials.display import SystemFailureError, TpukitError, kind_of
from tpukit.essentials.environment import part_of

# Threads per process that read files. On a network drive, it takes longer to open a file than to
# decode it.
_READ_AHEAD = 4
# Errors of the machine, not of an image: too many open files, or a network drive that disconnected.
NOT_DAMAGE = (errno.EMFILE, errno.ENFILE, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT)
_JPEG_START = b"\xff\xd8"


class _MissingShard(NamedTuple):
    """A shard that is not written yet."""

    file: Path
    rows: object  # (n,) of `row_type`


class Prepared(NamedTuple):
    """One image, ready to be stored; or the reason why it is damaged, and a fix."""

    payload: bytes = b""  # the bytes to store
    shape: tuple[int, ...] | None = None  # (H, W, C), with a mask (H, W, 4); None if damaged
    seen: "_Seen | None" = None
    why: str = ""  # the reason why the image is damaged
    advice: str = ""  # how to repair it; "" if only a new copy helps


class _Seen(NamedTuple):
    """Facts about one image for the manifest of its pack."""

    masks: list[int]  # the class numbers of its mask
    colours: dict[int, tuple]  # the colours of these classes in the palette of the mask
    dark: list[int]  # [brightest value] of a 16-bit image that is nearly black; else []
    frames: bool  # True if only the first of several pages or frames is packed


def write_shards(
    described: PackSource, target: PackFolder, *, skip: bool, workers: int | None, progress
) -> None:
    """Write the missing shards in several processes.

    Args:
        described: the images.
        target: the folder of the pack, in which rows.npy exists.
        skip: True to leave out damaged images; False to raise OSError for the first.
        workers: the number of processes; None for one per CPU.
        progress: as for `pack`.
    """
    import numpy

    count = len(numpy.load(target.work / "rows.npy", mmap_mode="r"))
    workers = how_many(len(shard_files(target, count)), workers)
    counts = target.work / "counts"  # 8 bytes per process: the number of images that it has packed
    counts.write_bytes(bytes(8 * workers))
    missing = [_missing(target, rank, workers) for rank in range(workers)]
    to_write = 0
    for shards in missing:
        to_write += sum(len(shard.rows) for shard in shards)
    written = count - to_write
    items = described.items
    size = target.plan["size"]
    is_received = items is not None and items.by_number
    job = {
        "folder": str(target.folder),
        "plan": target.plan,
        "root": described.root,
        "skip": skip,
        "pixel_limit": pixel_limit(),
        "reader": described.encoded and name_of(described.encoded.reader),
        "path_column": str(described.path_column),
        "table_file": described.table_file,
        "is_received": is_received,
        "workers": workers,
        "shape": None if items is None else items.shape(size),
    }
    feeds = ()
    if is_received:
        feeds = [_feed(items, shards, size, skip=skip) for shards in missing]
    run_in_processes(
        _work,
        [{**job, "rank": rank} for rank in range(workers)],
        label="pack images",
        total=count,
        done=lambda: written + int(numpy.fromfile(counts, "<i8").sum()),
        folder=target.work,
        progress=progress,
        feeds=feeds,
    )


def _missing(target: PackFolder, rank: int, workers: int) -> list[_MissingShard]:
    """Return the shards that the process of this rank still has to write."""
    import numpy

    rows = numpy.load(target.work / "rows.npy", mmap_mode="r")
    length = target.plan["shard"]
    missing = []
    for number, file in enumerate(shard_files(target, len(rows))):
        # The processes take turns, so that each has about as many shards.
        if number % workers == rank and not file.exists():
            missing.append(_MissingShard(file, rows[number * length : (number + 1) * length]))
    return missing


def _feed(items: Items, missing: list[_MissingShard], size, *, skip: bool) -> Iterator[bytes]:
    """Yield the pickled items of some shards, in their order, for `ReceivedItems`.

    The parent process reads all items, because a dataset may have an open file or another object
    that several processes cannot use at once. The other processes decode and write.
    """
    for shard in missing:
        for number in shard.rows["row"].tolist():
            yield pickle.dumps(items.read_one(number, size, skip=skip))


def read_shards_so_far(target: PackFolder) -> Shards:
    """Open those shards of an unfinished pack that are complete."""
    import numpy

    rows = numpy.load(target.work / "rows.npy")
    length = target.plan["shard"]
    files = []
    counts = []
    parts = [rows[:0]]
    for number, file in enumerate(shard_files(target, len(rows))):
        if not file.exists():  # several processes write shards, so any of them may be missing
            continue
        part = rows[number * length : (number + 1) * length]
        note = json.loads(note_of(target, file).read_bytes())
        skipped = [image["row"] for image in note["skipped"]]
        part = part[~numpy.isin(part["row"], skipped)]
        files.append(file)
        counts.append(len(part))
        parts.append(part)
    return Shards(files, counts, numpy.concatenate(parts), at_once=False)


def shard_files(target: PackFolder, count: int) -> list[Path]:
    """Return the paths of the shards of a pack of `count` images."""
    number = math.ceil(count / target.plan["shard"])
    return [target.folder / f"{k:05d}-of-{number:05d}.array_record" for k in range(number)]


def note_of(target: PackFolder, shard: Path) -> Path:
    """Return the path of the JSON file with the left-out images of a shard and other facts."""
    return target.work / f"{shard.stem}.json"


def contents_of(target: PackFolder, shard: Path):
    """Return two digests of each stored image, without and with its mask, (n, 2) uint64."""
    import numpy

    return numpy.fromfile(note_of(target, shard).with_suffix(".contents"), "<u8").reshape(-1, 2)


def labels_of(target: PackFolder, shard: Path):
    """Return the labels of all items of a shard, damaged ones included, (n * L,) float32."""
    import numpy

    return numpy.fromfile(note_of(target, shard).with_suffix(".labels"), "<f4")


def digest(stored) -> bytes:
    """Return the CRC-32 and Adler-32 of the stored bytes, eight bytes in all.

    With four bytes, two of 100,000 images would probably have the same checksum by chance. Both
    checksums together take a fifth of the time of blake2b.
    """
    return struct.pack("<II", zlib.crc32(stored), zlib.adler32(stored))


def _work(job: dict) -> None:
    """Write the missing shards of one process. `run_in_processes` calls this in each process."""
    set_pixel_limit(job["pixel_limit"])
    target = PackFolder(Path(job["folder"]), job["plan"])
    missing = _missing(target, job["rank"], job["workers"])
    source = _open_source(target, job)
    done = 0
    with open(target.work / "counts", "r+b", buffering=0) as counts:

        def count_image() -> None:
            nonlocal done
            done += 1
            # Each process writes its own eight bytes, so the processes need no lock.
            os.pwrite(counts.fileno(), done.to_bytes(8, "little"), 8 * job["rank"])

        for shard in missing:
            _write(target, shard, source, job=job, count_image=count_image)


def _open_source(target: PackFolder, job: dict) -> Files | StoredItems | ReceivedItems:
    """Return an object that reads the images of the job's source, by `object[number]`."""
    if job["reader"]:
        return by_name(job["reader"])(target.work, job["root"], target.plan)
    shape = None
    if job["shape"] is not None:
        shape = tuple(job["shape"])
    if job["is_received"]:
        return ReceivedItems(sys.stdin.buffer, shape)
    items = target.work / "items"
    if items.exists():
        return StoredItems(items, shape)
    masks = None
    if (target.work / "masks").exists():
        masks = Names(target.work / "masks")
    return Files(Names(target.work / "names"), job["root"], masks)


@dataclass
class _Note:
    """The facts about the images of a shard, collected while the shard is written."""

    skipped: list[dict] = field(default_factory=list)
    shapes: set[tuple] = field(default_factory=set)
    contents: list[bytes] = field(default_factory=list)
    dark: list[int] = field(default_factory=list)
    masks: set[int] = field(default_factory=set)
    frames: int = 0
    colours: dict[int, set] = field(default_factory=lambda: defaultdict(set))

    def add(self, prepared: Prepared) -> None:
        """Add the facts about an image that is stored."""
        payload, shape, seen, *_ = prepared
        whole = digest(payload)
        has_mask = shape[-1] == 4
        # Two digests, because the same image with two different masks is a contradiction, and the
        # same image with the same mask is only a copy.
        image = digest(_image_in(payload, shape)) if has_mask else whole
        self.contents.append(image + whole)
        self.shapes.add(shape)
        self.dark += seen.dark
        self.masks.update(seen.masks)
        self.frames += seen.frames
        for number, colour in seen.colours.items():
            self.colours[number].add(colour)

    def as_json(self, *, records: int, are_pixels: bool) -> bytes:
        """Return the note as JSON.

        Args:
            records: the number of images in the shard.
            are_pixels: True if pixels are stored; False for the bytes of files.
        """
        note = {
            "records": records,
            "pixels": are_pixels,
            "shapes": sorted(self.shapes),
            "skipped": self.skipped,
            "frames": self.frames,
            "dark": len(self.dark),
            "brightest": max(self.dark, default=0),
            "masks": sorted(self.masks),
            "colours": {number: sorted(seen)[:2] for number, seen in self.colours.items()},
        }
        return json.dumps(note).encode()


def _write(
    target: PackFolder, shard: _MissingShard, source, *, job: dict, count_image: Callable
) -> None:
    """Write a shard under a temporary name, then its note, then rename the shard."""
    size = target.plan["size"]
    form = PixelForm.of_plan(target.plan)
    file = shard.file
    rows = shard.rows.copy()
    note = _Note()
    is_received = isinstance(source, ReceivedItems)

    # `reads` yields calls that `run_ahead` starts in threads, and `records` uses the results in
    # their order. Received items are read from the pipe here, because a pipe has an order.
    def reads() -> Iterator[Callable]:
        for place, number in enumerate(rows["row"].tolist()):
            if is_received:
                item = source.receive(number)
                rows["labels"][place] = item.labels
                note.dark += item.dark
            yield functools.partial(prepare, source, number, size, form)

    def records() -> Iterator[bytes]:
        for row, prepared in zip(rows, run_ahead(reads(), _READ_AHEAD), strict=True):
            number = int(row["row"])
            if prepared.shape is not None:
                note.add(prepared)
                yield row.tobytes() + prepared.payload
            elif job["skip"]:
                name = source.name(number)
                note.skipped.append({"row": number, "name": name, "why": prepared.why})
            else:
                raise _cannot_pack(number, source, prepared, job)
            count_image()

    part = part_of(target.work / file.name)
    write_shard(part, records())
    are_pixels = size is not None or source.encoding == "uint8"
    path = note_of(target, file)
    write_file(path.with_suffix(".contents"), b"".join(note.contents))
    if is_received:
        write_file(path.with_suffix(".labels"), rows["labels"].tobytes())
    count = len(rows) - len(note.skipped)
    write_file(path, note.as_json(records=count, are_pixels=are_pixels))
    os.replace(part, file)


def _cannot_pack(number: int, source, prepared: Prepared, job: dict) -> SystemFailureError:
    """Return the error for a damaged image."""
    name = source.name(number)
    why = prepared.why
    fix = prepared.advice or "copy it again"
    if why in (os.strerror(errno.ENOENT), os.strerror(errno.EISDIR)):
        written = name
        if isinstance(source, Files):
            written = source.names[number]  # without the root
        fix = _right_path(written, f"table[{job['path_column']!r}]", root=job["root"])
        # The fix changes a column of the table. If the user passed a CSV file, there is no table in
        # the notebook yet, so the fix begins with the line that reads it.
        if job["table_file"] and "table[" in fix:
            words = [job["path_column"]]
            read = line_that_reads(job["table_file"], words, root=job["root"])
            fix = f"{read}; {fix}"
    return SystemFailureError(
        f"image {number} cannot be packed: {name}",
        found=why,
        fix=f'{fix}; or leave such images out, and list them: damaged="skip"',
    )


def _right_path(written: str, column: str, *, root: str) -> str:
    """Return the fix for a path without a file, derived from the files that exist.

    Args:
        written: the path that was not found, as in the column.
        column: the column of paths, as code.
        root: the folder to which the path is relative.
    """
    path = os.path.join(root, written)
    with_ending = glob.glob(glob.escape(path) + ".*")
    if with_ending:
        return f'add the ending: {column} + "{os.path.splitext(with_ending[0])[1]}"'
    for change, other in _other_spellings(written).items():
        if other != written and os.path.isfile(os.path.join(root, other)):
            return f"spell the path as the file does: {column}{change}"
    if "://" in path:
        return "download the files first, and pass their paths on the disk"
    if os.path.isabs(path):
        return "check the path"
    return f"check the path; the current folder is {os.getcwd()}"


def _other_spellings(path: str) -> dict[str, str]:
    """Return spellings of a path that a file on the disk may have.

    Returns:
        The spellings, by the code that changes a column of paths to this spelling.
    """
    spellings = {
        ".str.strip()": path.strip(),
        r'.str.replace("\\", "/")': path.replace("\\", "/"),
        ".str.lower()": path.lower(),
        ".str.upper()": path.upper(),
    }
    for part in ("[^.]*$", "[^/]*$"):  # the ending of the file, and its name
        for method in ("lower", "upper"):
            change = f'.str.replace("{part}", lambda found: found[0].{method}(), regex=True)'
            found = re.search(part, path)
            spellings[change] = path[: found.start()] + getattr(found[0], method)()
    return spellings


def prepare(
    source: Files | StoredItems | ReceivedItems, number: int, size, form: PixelForm
) -> Prepared:
    """Read and decode one image, and return what to store.

    A damaged image gives a `Prepared` with the reason. An error of the machine (`NOT_DAMAGE`) is
    raised.

    Args:
        source: `source[number]` returns the bytes of the image.
        number: the number of the image in the source.
        size: (height, width) or one number in pixels; None to store the bytes unchanged.
        form: the form of the pixels.
    """
    try:
        data = source[number]
        if source.shape is not None:  # pixels that are resized already, or images just encoded
            return Prepared(data, source.shape, _look(data, source.shape, form))
        image = decode_as_packed(data, size, form)
        seen = _look(image, image.shape, form, file=data)
    # Every other error counts as damage too. Otherwise the process would end, and no message would
    # name the image.
    except Exception as error:
        if getattr(error, "errno", None) in NOT_DAMAGE:
            raise
        if isinstance(error, TpukitError):
            why = "; ".join(filter(None, [error.fact, error.found]))
            return Prepared(why=why, advice=error.fix)
        why = getattr(error, "strerror", None) or str(error)
        if not isinstance(error, OSError | ValueError | MemoryError):
            why = f"{kind_of(error)}: {why}"
        return Prepared(why=why)
    stored = data if size is None else image.tobytes()
    return Prepared(stored, image.shape, seen)


def decode_as_packed(data: bytes, size, form: PixelForm):
    """Decode a file's bytes; raise ValueError for a file of 8 bits if the form has a window."""
    image = decode(data, size, form=form)
    if form.window is not None:
        refuse_window(parts_of(data)[0] if is_masked(data) else data)
    return image


def _image_in(payload: bytes, shape: tuple):
    """Return the stored image without its mask."""
    import numpy

    if is_masked(payload):
        return parts_of(payload)[0]
    pixels = numpy.frombuffer(payload, numpy.uint8).reshape(shape)
    return numpy.ascontiguousarray(pixels[..., :3])


def _look(pixels, shape: tuple, form: PixelForm, *, file: bytes = b"") -> _Seen:
    """Return the facts about one image for the manifest.

    Args:
        pixels: the decoded image, or its bytes.
        shape: the shape of the decoded image.
        form: the form of the pixels.
        file: the stored file; b"" for pixels.
    """
    import numpy

    palette = []
    if is_masked(file):
        file, mask = parts_of(file)
        palette = palette_of(mask)
    masks = []
    if shape[-1] == 4:
        mask_pixels = numpy.frombuffer(pixels, numpy.uint8).reshape(shape)[..., 3]
        masks = numpy.unique(mask_pixels).tolist()
    colours = {}
    if palette:
        colours = {number: tuple(palette[3 * number : 3 * number + 3]) for number in masks}
    dark = []
    can_have_16_bits = bool(file) and not file.startswith(_JPEG_START)
    is_scaled = form.window is None and form.mode != "I;16"  # by the whole range of 16 bits
    if is_scaled and can_have_16_bits and pixels[..., :3].max() < NEARLY_BLACK:
        value = brightest(file)
        dark = [value] if value else []
    return _Seen(masks, colours, dark, frames=has_frames(file))
