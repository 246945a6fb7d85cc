"""Pack images into a few large files: in one random order, once; an interrupted call continues where it stopped."""

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpukit.datasets.array_records import Shards, load_array_record
from tpukit.datasets.checked_files import find_fault, npy, size_and_checksum, whole_number, write_file
from tpukit.datasets.decoding import jpeg_decoder
from tpukit.datasets.disk_space import Room
from tpukit.datasets.item_parts import Columns
from tpukit.datasets.items import store_items
from tpukit.datasets.pack_shards import (
    contents_of,
    labels_of,
    note_of,
    prepare,
    read_shards_so_far,
    shard_files,
    write_shards,
)
from tpukit.datasets.pack_sources import PackSource, describe_source, make_rows
from tpukit.datasets.packed_images import PackedImages, PackFolder
from tpukit.datasets.source_files import Files, Names, find_changed, look_at
from tpukit.essentials.display import InvalidValueError, NotInstalledError, SystemFailureError

_SHARD_SIZE = 8192  # images per file
_FEW = 0.1  # of the images may be left out; more are rather a wrong path than damage


@dataclass(frozen=True)
class PackOptions:
    """Set what few packs need: `pack(..., options=PackOptions(window=(0, 4095)))`.

    Attributes:
        image: the key of the image in items that are dicts; None for the first of image, img, pixel_values.
        window: (low, high), the values that become black and white in images of more than 8 bits, such as (0, 4095).
            None for 0 and 65,535 of 16 bits, and 0 and 1 of floats in arrays: nothing is clipped. Kept with the pack.
        seed: decides the random order, 0 or more.
        shard_size: images per file, 1 or more; 8,192 by default, 4,096 for `tpukit.pe.pack_dicom`.
        workers: processes that decode, 1 or more; None for one per CPU.
    """

    image: str | None = None
    window: tuple[float, float] | None = None
    seed: int = 0
    shard_size: int | None = None
    workers: int | None = None


_DEFAULTS = PackOptions()


def pack(
    source,
    folder,
    *,
    labels=None,
    groups=None,
    classes: Sequence[str] | None = None,
    path: str | None = None,
    root=None,
    masks: str | None = None,
    size: int | None = None,
    damaged: str | float = "raise",
    progress: str | None = None,
    options: PackOptions = _DEFAULTS,
):
    """Pack images and labels into a few large files that are read at random, fast and checked.

    The order is a random one, fixed by the seed: neighbours in a file are no neighbours in the source. Every image is
    decoded once, so that a damaged one is found now: one that its decoder remarks on, or of more than 89,478,485
    pixels. Images are turned as their EXIF says, what is transparent shows white, grey ones have three equal channels,
    and of several pages or frames the first is taken. An image in memory is its pixels. Interrupted at any moment, even
    by the machine, the same call goes on where it stopped; when all is packed it returns at once. One pack is enough
    for all folds: `PackedImages.rows` says which row of the table each image was.

    A folder that holds a pack of something else is left alone. Names, labels and groups are compared, and the sizes of
    the files, 20,000 of them where there are more; where times or places differ, up to a hundred files with what was
    packed. Of a list all items are compared, of a dataset a hundred and all of its labels (`targets`, `labels`,
    `_labels`, `samples`, `tensors`), of what can only be iterated the first.

    Args:
        source: a folder of images that Pillow opens, one sub-folder per class as for torchvision's ImageFolder (hidden
            files and folders, `__MACOSX`, packs and caches are left out); a DataFrame, or the path of a CSV or TSV
            file, with a column of paths; or a map-style dataset, such as torchvision's and Hugging Face's, or other
            iterable of `(image, labels)`, `(image, mask)`, `(image, labels, mask)` or dicts.
            The image is the bytes of its file, which are stored as they are; a Pillow image of any mode, or an array
            (H, W, C) or tensor (C, H, W) of 1 or 3 channels, uint8, bool, uint16 or floats in [0, 1], stored as
            pixels. Labels are one number or several.
            A dataset with numbers is read in the random order, by this process, and written once; interrupted, the
            files of `shard_size` images that are finished are kept. What can only be iterated is stored first, in its own
            order, so until the end it takes twice the disk; interrupted, it is read from its start again.
        folder: a new or empty folder, or one where the same pack was begun; or several, of which the first is taken
            that holds this pack or has room for it, which is said.
        labels: the columns that are labels, of a table; of items their names, which are the keys of dicts (None:
            the first of label, labels, fine_label, target, targets; [] for none). Stored as float32. A single column
            of words is stored as classes.
        groups: the column that says what belongs together, such as a patient, of a table; one value for each
            item, of items. `PackedImages.split` has no group on both sides.
        classes: what the numbers of a single label stand for, in their order, such as `train.classes`; None for a
            folder's sub-folders or a column's words, sorted, or what a dataset says (`dataset.classes`,
            `features["label"].names`). With classes, `PackedImages.labels` is (N,) int64. () for none.
        path: the column of a table that names the image files; None for "path".
        root: the folder that paths in a table begin at; None for the current one, or that of the CSV file.
        masks: the column of a table, or the key in dicts, of each image's mask: a file or image of one channel, of its
            height and width, whose values (with a palette, whose numbers) are the class of each pixel, 0 to 255. In
            batches masks are the targets, (N, H, W) int64; beside labels, {"labels": ..., "masks": ...}.
        size: None keeps the files as they are; a number stores pixels of that height and width, resized as `decode`
            does when exact: larger (49,152 bytes at 128 pixels), and many times as fast to read.
        damaged: "raise"; or "skip" to leave out what is no whole image, up to a tenth of all, or the share that may
            be left out, as 0.5. How many and why is printed; `PackedImages.skipped` lists them.
        progress: "panel", "line", "text" or "off", as for `launch`; None decides by where this runs.
        options: `PackOptions(image, window, seed, shard_size, workers)`.

    Returns:
        The finished `PackedImages`. What they hold is printed: how many images each class has, which files of a folder were
        left out, how many images are there more than once, some with other labels, and what rarely is meant: 16 bits
        that are nearly black, masks of nothing but 0 and 255.

    Raises:
        ValueError: an argument or the source is not as above, images have no labels of one length, a label would not
            be the same as float32, or more images are damaged than may be left out.
        DiskFullError: the disk is too small, which is known before the first image is packed, and what would fit.
        OSError: an image is damaged or missing, named in the message; or the disk is full.
        FileExistsError: the folder holds another pack, or somebody's files.
        ModuleNotFoundError: array_record or simplejpeg is not installed.
    """
    check_arguments(damaged, options, size=size)
    if jpeg_decoder() is None:
        raise NotInstalledError(
            "pack looks for damage with simplejpeg, and it is not installed: Pillow takes half a JPEG for a whole one",
            fix="%pip install simplejpeg, then run this cell again",
        )
    columns = Columns(path, root, options.image, masks=masks, window=options.window)
    described = describe_source(source, labels, groups, classes, columns, without=_folders(folder)[0])
    return pack_described(described, folder, size=size, damaged=damaged, progress=progress, options=options)


def check_arguments(damaged: str | float, options: PackOptions, *, size: int | None) -> None:
    """Raise for arguments that no pack can be made with, before anything is read or written."""
    load_array_record()
    share_of(damaged)
    whole_number("size", size, 1)
    if not isinstance(options, PackOptions):
        raise InvalidValueError(
            f"options is a PackOptions, got {options!r}", fix="options=tpukit.PackOptions(shard_size=1024)"
        )
    whole_number("seed", options.seed, 0)
    whole_number("shard_size", options.shard_size, 1)
    whole_number("workers", options.workers, 1)


def share_of(damaged: str | float) -> float:
    """Return the share of the images that may be left out."""
    if isinstance(damaged, str):
        damaged = {"raise": 0.0, "skip": _FEW}.get(damaged, damaged)
    if isinstance(damaged, bool) or not isinstance(damaged, int | float) or not 0 <= damaged <= 1:
        raise InvalidValueError(
            f'damaged is "raise", "skip", or a share from 0 to 1, got {damaged!r}', fix='damaged="skip"'
        )
    return damaged


def _folders(folder) -> list[Path]:
    return [Path(folder)] if isinstance(folder, str | os.PathLike) else [Path(one) for one in folder]


def pack_described(
    described: PackSource, folder, *, size, damaged, progress, options: PackOptions, otherwise: Sequence[dict] = ()
) -> PackedImages:
    """Pack what a PackSource describes; everything else is as for `pack`.

    `otherwise` are settings in place of the source's own, the first of which is taken that fits the disk.
    """
    workers = whole_number("workers", options.workers, 1)
    numbers = {
        "size": whole_number("size", size, 1),
        "seed": whole_number("seed", options.seed, 0),
        "shard": whole_number("shard_size", options.shard_size, 1) or _SHARD_SIZE,
    }
    plans = [{**described.facts, **numbers, **settings} for settings in (described.settings, *otherwise)]
    room, share = Room(described), share_of(damaged)
    target = room.choose([PackFolder(one, plan) for plan in plans for one in _folders(folder)])
    with target.locked():
        if target.is_finished:
            if another := target.differences(target.read_manifest()["plan"]):
                raise FileExistsError(another)
            records = PackedImages(target.folder)
            if described.items is None:
                for name in ("names", "looks.npy"):
                    if fault := find_fault(target.folder / name, records.files[name]):
                        raise target.damaged(fault)
                _compare_files(described, target, target.folder, records.shards)
            elif described.is_stream:
                print(f"pack: {target.folder} is finished; of a source without numbers only the first was compared")
            target.remove_work()  # which an earlier call had no time for
        else:
            room.check(target)
            _fill(target, described, share, workers, progress, room)
            records = PackedImages(target.folder)
    print(f"pack: {records.report}")
    if records.skipped:
        left_out = f"{len(records.skipped):,} of {len(records.skipped) + len(records):,} images were left out"
        if share == 0:
            raise InvalidValueError(
                f"{left_out} of this pack as damaged",
                found=_reasons(records.skipped),
                fix='pack(..., damaged="skip") agrees to that; or copy the images again and pack into a new folder',
            )
        print(f"pack: {left_out}: {_reasons(records.skipped)}; PackedImages.skipped lists them")
    return records


def _fill(target: PackFolder, described: PackSource, share: float, workers: int | None, progress, room: Room) -> None:
    """Pack what no earlier call has packed."""
    begun = target.unfinished_plan()
    if begun and target.find_outputs() and (another := target.differences(begun)):
        raise FileExistsError(another)  # not cleared: it may be hours of work
    # A stream may have changed behind its first item; headers of the same files have not.
    target.begin(from_scratch=described.is_stream and not target.find_outputs())
    try:
        if described.look:
            described = described.look(target.work)
        _lay_out(described, target, progress)
        if described.is_stream:
            room.check(target, stored=True)
        write_shards(described, target, share > 0, workers, progress)
        _finish(described, target, share)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(target.folder) from error
        raise
    finally:
        target.remove_parts()


def _lay_out(described: PackSource, target: PackFolder, progress: str | None) -> None:
    """Write the rows of all images in the order they are packed in, and where the images are."""
    import numpy

    work, plan = target.work, target.plan
    laid_out = (work / "rows.npy").exists()
    if described.items is None:
        if laid_out:
            _compare_files(described, target, work, read_shards_so_far(target))
        else:
            write_file(work / "names", Names.encode(described.names))
            if described.mask_names:
                write_file(work / "masks", Names.encode(described.mask_names))
        looks = look_at(Names(work / "names"), described.root, described.mask_names)
        write_file(work / "looks.npy", npy(looks))  # also where all is laid out: a mended file is another
    if laid_out:
        return
    rows = described.rows
    if described.items is not None:
        items = described.items
        if items.by_number:  # their labels are known when they have been read
            values = numpy.zeros((items.length, items.labels), numpy.float32)
        else:
            values = store_items(items, work / "items", plan["size"], progress=progress)
        rows = make_rows(values, described.groups)
    if described.shuffled:
        rows = rows[numpy.random.default_rng(plan["seed"]).permutation(len(rows))]
    write_file(work / "rows.npy", npy(rows))


def _compare_files(described: PackSource, target: PackFolder, noted: Path, packed: Shards) -> None:
    """Raise FileExistsError if files that are in a pack are not those of the source, by what was noted in a folder."""
    import numpy

    names, masks = Names(noted / "names"), described.mask_names
    before, now = numpy.load(noted / "looks.npy"), look_at(names, described.root, masks)
    mine = numpy.isin(before["row"], packed.rows["row"])
    files = Files(names, described.root, masks)
    size, window, head = target.plan["size"], target.plan.get("window"), packed.rows.dtype.itemsize

    def is_packed(row: int) -> bool:
        record = packed.read(numpy.flatnonzero(packed.rows["row"] == row))[0]
        return prepare(files, row, size, window)[0] == record[head:]

    if found := find_changed(before[mine], now[mine], files, None if described.reader else is_packed):
        raise FileExistsError(target.another(found))


def _finish(described: PackSource, target: PackFolder, share: float) -> None:
    """Join what was noted beside the shards to the index, and write the manifest last."""
    import numpy

    planned = numpy.load(target.work / "rows.npy")
    files = shard_files(target, len(planned))
    if described.items is not None and described.items.by_number:
        labels = numpy.concatenate([labels_of(target, file) for file in files])
        planned["labels"] = labels.reshape(planned["labels"].shape)
    notes = [json.loads(note_of(target, file).read_bytes()) for file in files]
    skipped = sorted((image for note in notes for image in note["skipped"]), key=lambda image: image["row"])
    if len(skipped) == len(planned):
        raise InvalidValueError(
            f"none of the {len(planned)} images can be decoded, for instance {skipped[0]}",
            fix="check that these are images, and that the paths are right",
        )
    if share and len(skipped) / len(planned) > share:  # not a product: 0.29 * 100 < 29
        for file, note in zip(files, notes, strict=True):
            if note["skipped"]:
                file.unlink()  # so that images that are put in their place are packed
        raise InvalidValueError(
            f"{len(skipped):,} of {len(planned):,} images are damaged or missing, and {share:.0%} may be left out",
            found=_reasons(skipped),
            fix=f"check the paths, and call again; or damaged={math.ceil(100 * len(skipped) / len(planned)) / 100}",
        )
    packed = ~numpy.isin(planned["row"], [image["row"] for image in skipped])
    index = {"index.npy": npy(planned[packed])}
    contents = numpy.concatenate([contents_of(target, file) for file in files])
    _, first, same = numpy.unique(contents[:, 0], return_index=True, return_inverse=True)
    repeated, labels = len(contents) - len(first), planned["labels"][packed]
    if repeated and not described.group_names:  # one picture on both sides of a split is one that was learned
        index["groups.npy"] = npy(planned["group"][packed][first[same]])
    for name in ("names", "looks.npy"):
        if (target.work / name).exists():
            index[name] = (target.work / name).read_bytes()
    for name, data in index.items():
        write_file(target.folder / name, data)
    in_memory = described.items.dark if described.items is not None else []
    shapes = {tuple(shape) for note in notes for shape in note["shapes"]}
    target.finish(
        encoding="uint8" if notes[0]["pixels"] else "jpeg",
        shape=shapes.pop() if len(shapes) == 1 else None,
        names=described.label_names,
        classes=described.classes,
        group_names=described.group_names,
        masks=described.has_masks,
        skipped=skipped,
        contents=hashlib.sha256(contents.tobytes()).hexdigest(),
        repeated=repeated,
        relabelled=int((labels != labels[first[same]]).any(axis=1).sum()),
        dark=len(in_memory) + sum(note["dark"] for note in notes),
        brightest=max([*in_memory, *(note["brightest"] for note in notes)]),
        mask_colours=_several_colours(notes),
        mask_values=sorted({value for note in notes for value in note["masks"]}),
        left_out=described.left_out,
        frames=sum(note["frames"] for note in notes),
        shards=[
            {"file": file.name, "bytes": file.stat().st_size, "records": note["records"]}
            for file, note in zip(files, notes, strict=True)
        ],
        files={name: size_and_checksum(data) for name, data in index.items()},
    )


def _several_colours(notes: list[dict]) -> dict:
    """Return the colours of those numbers of masks which have several, by their palettes."""
    colours = {}
    for note in notes:
        for number, mine in note["colours"].items():
            colours.setdefault(number, set()).update(map(tuple, mine))
    return {number: sorted(mine)[:2] for number, mine in colours.items() if len(mine) > 1}


def _reasons(skipped: list[dict]) -> str:
    """Say why images were left out, the most frequent reasons with an example each."""
    # Counted without the numbers in them: how many bytes, how many of them extraneous.
    kinds = [re.sub(r"\d[\d,]*", "", image["why"]) for image in skipped]
    examples = dict(zip(reversed(kinds), reversed(skipped), strict=True))
    counts = Counter(kinds).most_common()
    few = "; ".join(f"{n:,} x {examples[kind]['why']}, as {examples[kind]['name']}" for kind, n in counts[:3])
    few = few.encode(errors="backslashreplace").decode()  # a name that is no UTF-8 can be a file's, and not be printed
    return few + ("; and others" if len(counts) > 3 else "")


def _full(folder: Path) -> OSError:
    done = list(folder.glob("*.array_record"))
    packed, free = sum(file.stat().st_size for file in done), shutil.disk_usage(folder).free
    return SystemFailureError(
        f"the disk of {folder} is full",
        found=f"{len(done)} files of {packed / 1e6:,.0f} MB are packed, {free / 1e6:,.0f} MB are free",
        fix="make room and call pack again, it continues from here; or pack onto a larger disk",
        errno=errno.ENOSPC,
    )
