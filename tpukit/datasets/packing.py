"""Pack images into a few large files in random order, so that random access is fast.

    photos/cat/a.jpg                    packed/00000-of-00002.array_record   shard_size images
    photos/dog/b.jpg    -- pack -->     packed/00001-of-00002.array_record
    ...                                 packed/index.npy, names, looks.npy   rows, names, file times
                                        packed/groups.npy                    groups with copies
                                        packed/manifest.json                 written last

`pack_described` works in four steps, each of which an interrupted call can repeat: choose a folder
with enough free disk, write the rows of all images in the packed order (`_lay_out`), write the
shards in several processes (`write_shards`), and join the notes on the shards (`_finish`).
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Real
from pathlib import Path

from tpukit.datasets.array_records import Shards, load_array_record
from tpukit.datasets.checked_files import (
    find_fault,
    npy,
    size_and_checksum,
    whole_number,
    write_file,
)
from tpukit.datasets.decoding import jpeg_decoder
from tpukit.datasets.disk_space import Room
from tpukit.datasets.gone_sources import arguments_of, find_outlived
from tpukit.datasets.image_modes import check_window
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
from tpukit.datasets.pack_sources import PackSource, as_names, describe_source, make_rows
from tpukit.datasets.packed_images import PackedImages, PackFolder
from tpukit.datasets.pixel_form import PixelForm, image_size, size_in_plan
from tpukit.datasets.row_labels import PackedRows
from tpukit.datasets.source_files import COMPARED, Files, Names, find_changed, look_at, printable
from tpukit.essentials.display import (
    InvalidValueError,
    NotInstalledError,
    SystemFailureError,
)

_SHARD_SIZE = 8192  # images per file
# The largest share of the images that damaged="skip" leaves out. If more images cannot be read, the
# path is probably wrong.
_SKIPPED_SHARE = 0.1


@dataclass(frozen=True)
class PackOptions:
    """Rare options of `pack`: `pack(..., options=PackOptions(window=(0, 4095)))`.

    Attributes:
        image: the key of the image in items that are dicts; None for the first of image, img and
            pixel_values that exists.
        window: (low, high), the values that become black and white in images of more than 8 bits,
            such as (0, 4095). None for (0, 65535) with 16 bits and (0, 1) with arrays of floats, so
            that nothing is clipped. The pack stores the window. A window is not supported for
            images of 8 bits.
        mode: Pillow's name of the pixels' format. "RGB", the default. "L" for grey images, (1, H,
            W) uint8, a third of the bytes. "I;16" for all bits of images of 16 bits: a batch has
            their low and high bytes, (2, H, W) uint8, and `datasets.uint16_values` joins these on
            the device. "I;16" is not supported for images of 8 bits or several channels.
        resize: how an image gets a size of another aspect ratio. "stretch" changes the ratio,
            "crop" cuts two sides off, and "letterbox" adds black at two sides, where a mask
            gets class 0. The pack stores this option, and its cache uses it too.
        seed: determines the random order, 0 or more.
        shard_size: images per file, 1 or more; None for 8,192, or 4,096 in `pe.pack_dicom`.
        workers: processes that decode, 1 or more; None for one per CPU.
        quality: the quality of the JPEGs of `pe.pack_dicom`, 1 to 95; None for 85. `pack` does not
            support `quality`, because `pack` stores files unchanged.
    """

    image: str | None = None
    window: tuple[float, float] | None = None
    mode: str = "RGB"
    resize: str = "stretch"
    seed: int = 0
    shard_size: int | None = None
    workers: int | None = None
    quality: int | None = None


_DEFAULTS = PackOptions()


def pack(
    source,
    folder,
    *,
    labels=None,
    groups=None,
    classes: Sequence[str] | Mapping | None = None,
    path: str | None = None,
    root=None,
    masks: str | None = None,
    size: int | tuple[int, int] | None = None,
    damaged: str | float = "raise",
    progress: str | None = None,
    options: PackOptions = _DEFAULTS,
):
    """Pack images and labels into a few large files with checksums and fast random access.

    The order is random and determined by the seed, so each file has images of all classes. `pack`
    decodes every image once, so that it finds damaged images before the training. An image counts
    as damaged even if its decoder only warns, or if it has more than `PIL.Image.MAX_IMAGE_PIXELS`
    pixels (89,478,485 by default). If Pillow cannot open a kind of file, such
    as a TIFF of 13 channels, the error says so and has a line of code that reads the file.

    `pack` turns images as their EXIF orientation says. Transparent pixels become white, grey images
    get three equal channels, and only the first of several pages or frames is packed.

    If a call is interrupted, even by a reboot, repeat it to continue. If the pack is finished, the
    call returns it at once, even if the source's folder or CSV file no longer exists. Without the
    source, `pack` compares only the arguments and the paths, and cannot notice changed labels.

    One pack is enough for all folds of a cross-validation. `PackedImages.rows[i]` is the row of
    image i in your table, so you can choose the images of a fold by a column of the table.

    `pack` does not replace the pack of another source. To tell sources apart, it compares names,
    labels, groups, and the sizes of at most 20,000 files. If modification times or paths differ, it
    also compares the contents of up to a hundred files. Of a list, it compares all items. Of a
    dataset, it compares a hundred items and all labels (`targets`, `labels`, `_labels`, `samples`,
    `tensors`). Of another iterable, it compares the first item.

    Args:
        source: a folder, a table or items.
            A folder has one sub-folder of images per class, as for torchvision's ImageFolder.
            Hidden files and folders, `__MACOSX`, packs and caches are left out.
            A table is a DataFrame, or the path of a CSV or TSV file. One column has paths of
            images, or the images, as in a parquet file of the Hugging Face hub.
            Items are `(image, labels)`, `(image, mask)`, `(image, labels, mask)` or dicts, in a
            map-style dataset, such as torchvision's and Hugging Face's, or in another iterable.
            The image of an item is an encoded file or pixels. Pass a file, which is stored as it
            is, as bytes, as an open file, or as a uint8 array (N,) or (N, 1). Pixels are a Pillow
            image of any mode, an array (H, W, C) or a tensor (C, H, W). Arrays and tensors have 1
            or 3 channels of uint8, bool, uint16 or floats in [0, 1]. Labels are one number or
            several.
            The process that calls `pack` reads a map-style dataset itself, in the random order of
            the pack. If the call is interrupted, the finished files of `shard_size` images remain.
            An iterable is first stored in its own order, which takes twice the disk space until the
            end. If the call is interrupted, the next call reads the iterable from its start.
        folder: a new or empty folder, or one in which the same pack was begun. Or several folders:
            `pack` uses the first that contains this pack or has enough free disk, and prints it.
        labels: for a table, the names of the columns that are labels; None for no labels. For items
            that are dicts, the keys of labels; None for the first of label, labels, fine_label,
            target and targets that exists, [] for no labels. For items that are tuples, a name for
            each label. Labels are stored as float32, which rounds fractions. These labels are
            errors: an integer beyond 2**24, a whole number in a column of floats if float32 would
            round the number, and a number too large or too small for float32. A single column of
            words becomes classes.
        groups: for a table, the column with the group of each image, such as its patient. For
            TFRecord files, the name of a feature. For other items, one value per item.
            `PackedImages.split` puts all images of a group into the same part. None for no groups.
        classes: if the label is a class number, the name of each class. A list whose item i is the
            name of class i, such as `train.classes`; or a dict from number to name or from name to
            number. The numbers may be text. Names that differ only in case are two classes. None
            for a folder's sub-folders or a column's words, sorted, or the names that a dataset has
            (`dataset.classes`, `features["label"].names`). With classes, `PackedImages.labels` is
            (N,) int64. () for none.
        path: the column of a table with the paths of the image files, or with the images: bytes,
            dicts {"bytes": ..., "path": ...}, Pillow images or arrays. None for "path".
        root: the folder at which relative paths in a table begin; None for the current folder, or
            the folder of the CSV file.
        masks: the column of a table, or the key in dicts, of each image's mask: a file or image of
            one channel, as high and wide as the image. The value of each pixel is its class, 0 to
            255; in an image with a palette, the class is the index in the palette. In batches masks
            are the targets, (N, H, W) int64; with labels, {"labels": ..., "masks": ...}.
        size: None stores the files unchanged. A number, or (height, width), stores pixels of that
            height and width, resized as by `decode(..., exact=True)`. For images of another
            aspect ratio, see `PackOptions(resize=)`. Pixels take more disk than files (49,152 bytes
            per image at 128 pixels) and are many times as fast to read.
        damaged: "raise" for an OSError at the first damaged image; "skip" to leave out damaged
            images, up to a tenth of all; or the share that may be left out, such as 0.5. If a
            finished pack has left out more, the call raises ValueError. `pack` prints their number
            and the reasons, and `PackedImages.skipped` lists them.
        progress: "panel", "line", "text" or "off", as for `launch`; None chooses by the
            environment.
        options: rare options, `PackOptions(image, window, mode, resize, seed, ...)`.

    Returns:
        The finished `PackedImages`. `pack` prints how many images each class has, how many files it
        left out, how many images are copies, and how many copies have different labels. It also
        prints signs of mistakes, such as images of 16 bits that are nearly black.

    Raises:
        ValueError: an argument or the source is not as above, the images have different numbers of
            labels, a label is missing or float32 cannot hold it, or too many images are damaged.
        DiskFullError: the disk is too small for the pack. `pack` checks that before the first
            image, and the message has the number of images for which there is space.
        OSError: an image is damaged or missing, and the message names it; or the disk became full.
        FileExistsError: the folder contains another pack or other files; or the source no longer
            exists, and the pack was made with other arguments.
        FileNotFoundError: the source does not exist, and no folder has a pack of it.
        ModuleNotFoundError: array_record or simplejpeg is not installed.
    """
    check_arguments(damaged, options, size=size)
    folder = _folders(folder)
    labels = _as_list(labels)
    classes = _as_list(classes)
    if options.quality is not None:
        raise InvalidValueError(
            "pack does not support PackOptions(quality=...)",
            found=f"{options.quality!r}; pack stores files unchanged, or pixels",
            fix="leave quality out",
        )
    if jpeg_decoder() is None:
        raise NotInstalledError(
            "simplejpeg is not installed, and pack needs it to find damaged JPEGs, because Pillow "
            "does not notice all damage",
            fix="%pip install simplejpeg, then run this cell again",
        )
    columns = Columns(path, root, options.image, masks=masks, form=form_of(options))
    arguments = None
    if isinstance(source, str | os.PathLike):
        arguments = arguments_of(source, as_names(labels), groups, classes, columns)
    # First, because the description of a source reads the source, and it may be deleted by now.
    if arguments and not os.path.exists(source):
        plan = _numbers_in_plan(size, options)
        plan |= {"window": None, "mode": None, "resize": None, **columns.form.plan()}
        outlived = find_outlived(source, folder, root=root, plan=plan, arguments=arguments)
        if outlived is not None:
            print(f"pack: {outlived.report}")
            _report_skipped(outlived, share_of(damaged))
            return outlived
    described = describe_source(source, labels, groups, classes, columns, without=folder[0])
    if arguments:
        described = replace(described, arguments=arguments)
    return pack_described(
        described,
        folder,
        [columns.form.plan()],
        size=size,
        damaged=damaged,
        progress=progress,
        options=options,
    )


def _as_list(names):
    """Return an iterator as a list, because `pack` reads it twice; else return `names`."""
    return list(names) if isinstance(names, Iterator) else names


def form_of(options: PackOptions) -> PixelForm:
    """Return the `PixelForm` of the options."""
    return PixelForm(options.mode, options.resize, check_window(options.window))


def check_arguments(damaged: str | float, options: PackOptions, *, size) -> None:
    """Check the arguments of `pack` that do not depend on the source.

    Raises:
        ValueError: an argument is out of its range, or `options` is not a `PackOptions`.
        ModuleNotFoundError: array_record is not installed.
    """
    load_array_record()
    share_of(damaged)
    image_size(size)
    if not isinstance(options, PackOptions):
        raise InvalidValueError(
            f"options must be a PackOptions, got {options!r}",
            fix="options=tpukit.PackOptions(shard_size=1024)",
        )
    # With None, each call would have another order, and could not continue an earlier one.
    whole_number("seed", options.seed, 0, is_optional=False)
    whole_number("shard_size", options.shard_size, 1)
    whole_number("workers", options.workers, 1)
    whole_number("quality", options.quality, 1)


def share_of(damaged: str | float) -> float:
    """Return the share of the images that `damaged` allows to leave out, 0 to 1."""
    share = damaged
    if damaged == "raise":
        share = 0.0
    elif damaged == "skip":
        share = _SKIPPED_SHARE
    # In Python True is the number 1, and damaged=True would allow that all images are left out.
    is_number = isinstance(share, Real) and not isinstance(share, bool)
    if not is_number or not 0 <= share <= 1:
        raise InvalidValueError(
            f'damaged must be "raise", "skip", or a share from 0 to 1, got {damaged!r}',
            fix='damaged="skip"',
        )
    return float(share)


def pack_described(
    described: PackSource,
    folder,
    settings: Sequence[dict],
    *,
    size,
    damaged: str | float,
    progress: str | None,
    options: PackOptions,
) -> PackedImages:
    """Pack the images that a PackSource describes.

    Args:
        described: the images, their labels and their order.
        folder, size, damaged, progress, options: as for `pack`.
        settings: one or more dicts with the other entries of the plan, besides `described.facts`.
            If the pack of the first dict is too large for the disk, `pack_described` tries the
            next.

    Returns:
        The finished `PackedImages`.
    """
    workers = whole_number("workers", options.workers, 1)
    numbers = _numbers_in_plan(size, options)
    places = _folders(folder)
    targets = []
    for entries in settings:
        plan = {**described.facts, **numbers, **entries}
        targets += [PackFolder(place, plan) for place in places]
    room = Room(described)
    share = share_of(damaged)
    target = room.choose(targets)
    # Another process may pack into the same folder. The lock makes this one wait, and then the pack
    # is finished.
    with target.locked():
        if target.is_finished:
            packed = _reopen(described, target)
        else:
            room.check(target)
            _fill(target, described, share, workers=workers, progress=progress, room=room)
            packed = PackedImages(target.folder)
    print(f"pack: {packed.report}")
    _report_skipped(packed, share)
    return packed


def _folders(folder) -> list[Path]:
    folders = [folder] if isinstance(folder, str | os.PathLike) else list(folder)
    if not folders:
        raise InvalidValueError("folder= names no folder", fix='pack(source, "packed")')
    for each in folders:
        # As a path, a URL would create a folder "gs:" here.
        if "://" in os.fspath(each):
            raise InvalidValueError(
                f"pack writes to a folder of this machine, got the URL {os.fspath(each)}",
                fix='pass a folder of this machine or of a mounted drive: pack(source, "packed")',
            )
    return [Path(each).expanduser() for each in folders]


def _numbers_in_plan(size, options: PackOptions) -> dict:
    """Return the entries of a plan that are arguments and do not depend on the source."""
    return {
        "size": size_in_plan(size),
        "seed": whole_number("seed", options.seed, 0),
        "shard": whole_number("shard_size", options.shard_size, 1) or _SHARD_SIZE,
    }


def _reopen(described: PackSource, target: PackFolder) -> PackedImages:
    """Open a finished pack; FileExistsError if it was made from other images."""
    another = target.differences(target.read_manifest()["plan"])
    if another:
        raise another
    packed = PackedImages(target.folder)
    if described.items is None:
        for name in ("names", "looks.npy"):
            fault = find_fault(target.folder / name, packed.files[name])
            if fault:
                raise target.damaged(fault)
        _compare_files(described, target, noted=target.folder, packed=packed.shards)
        repaired = _repaired(described, target, packed.skipped, noted=target.folder)
        if repaired:
            raise target.another(
                "it lacks images that were damaged when it was packed, but are intact now, such as "
                f"{repaired}"
            )
    elif described.is_stream:
        print(
            f"pack: {target.folder} is finished; the source has no indices, so only its first "
            "item was compared"
        )
    target.remove_work()  # an earlier call may have ended between the manifest and this line
    return packed


def _report_skipped(packed: PackedImages, share: float) -> None:
    """Print the number of images left out as damaged; ValueError if they are more than `share`."""
    if not packed.skipped:
        return
    count = len(packed.skipped)
    total = count + len(packed)
    left_out = f"{count:,} of {total:,} images were left out"
    if count / total > share:
        needed = math.ceil(100 * count / total) / 100
        raise InvalidValueError(
            f"{left_out} of this pack as damaged",
            found=_reasons(packed.skipped),
            fix="copy the images again, and pack into a new folder; "
            f"or let `pack` accept this share of damaged images: damaged={needed}",
        )
    print(f"pack: {left_out}: {_reasons(packed.skipped)}; PackedImages.skipped lists them")


def _fill(
    target: PackFolder, described: PackSource, share: float, *, workers, progress, room: Room
) -> None:
    """Pack the images that no earlier call has packed."""
    begun = target.unfinished_plan()
    if begun and target.find_outputs():
        another = target.differences(begun)
        if another:
            raise another  # the finished shards stay, because they may be hours of work
    # The plan has a digest of a stream's first item only, so items that an earlier call stored may
    # differ from this call's. Begin again, unless shards are finished.
    target.begin(from_scratch=described.is_stream and not target.find_outputs())
    try:
        if described.encoded:  # a DICOM source reads the headers of its files first
            described = described.encoded.find(target.work)
        _lay_out(described, target, progress)
        if described.is_stream:
            room.check(target, stored=True)
        write_shards(described, target, skip=share > 0, workers=workers, progress=progress)
        _finish(described, target, share)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(target.folder) from error
        raise
    finally:
        target.remove_parts()


def _lay_out(described: PackSource, target: PackFolder, progress: str | None) -> None:
    """Write the rows of all images in the packed order, and the names of their files."""
    work = target.work
    is_laid_out = (work / "rows.npy").exists()
    if described.items is None:
        if is_laid_out:
            _compare_files(described, target, noted=work, packed=read_shards_so_far(target))
            _forget_repaired(described, target)
        else:
            write_file(work / "names", Names.encode(described.names))
            if described.mask_names:
                write_file(work / "masks", Names.encode(described.mask_names))
        # Also if an earlier call did this, because a damaged file may have been replaced since.
        looks = look_at(Names(work / "names"), described.root, described.mask_names)
        write_file(work / "looks.npy", npy(looks))
    if not is_laid_out:
        write_file(work / "rows.npy", npy(_packed_rows(described, target, progress)))


def _packed_rows(described: PackSource, target: PackFolder, progress: str | None):
    """Return the rows of all images in the packed order; store the items of a stream."""
    import numpy

    rows = described.rows
    items = described.items
    if items is not None:
        # `_finish` inserts the labels of a dataset, whose items are read while they are packed.
        if items.by_number:
            labels = numpy.zeros((items.length, items.labels), numpy.float32)
        else:
            size = target.plan["size"]
            labels = store_items(items, target.work / "items", size, progress=progress)
        rows = make_rows(labels, described.groups)
    if not described.encoded:
        random = numpy.random.default_rng(target.plan["seed"])
        rows = rows[random.permutation(len(rows))]
    return rows


def _compare_files(
    described: PackSource, target: PackFolder, *, noted: Path, packed: Shards
) -> None:
    """Raise FileExistsError if a file has changed since `pack` packed it.

    Args:
        described: the source.
        target: the pack.
        noted: the folder with "names" and "looks.npy": names, sizes and times of the packed files.
        packed: the finished shards.
    """
    import numpy

    names = Names(noted / "names")
    masks = described.mask_names
    before = numpy.load(noted / "looks.npy")
    now = look_at(names, described.root, masks)
    is_written = numpy.isin(before["row"], packed.rows["row"])
    files = Files(names, described.root, masks)
    size = target.plan["size"]
    form = PixelForm.of_plan(target.plan)
    head = packed.rows.dtype.itemsize  # the bytes of a record before its image

    def is_packed(row: int) -> bool:
        record = packed.read(numpy.flatnonzero(packed.rows["row"] == row))[0]
        return prepare(files, row, size, form).payload == record[head:]

    # Encoded images are not the bytes of their files, so these cannot be compared.
    compare = None if described.encoded else is_packed
    found = find_changed(before[is_written], now[is_written], files, compare)
    if found:
        raise target.another(found)


def _repaired(
    described: PackSource, target: PackFolder, skipped: list[dict], *, noted: Path
) -> str | None:
    """Return the name of an image that was left out as damaged and is intact now; or None.

    At most a hundred of the images that were left out are decoded, evenly spread.
    """
    if described.encoded or described.items is not None:
        return None
    files = Files(Names(noted / "names"), described.root, described.mask_names)
    form = PixelForm.of_plan(target.plan)
    step = math.ceil(len(skipped) / COMPARED) or 1
    for image in skipped[::step]:
        number = image["row"]
        prepared = prepare(files, number, target.plan["size"], form)
        if prepared.shape is not None:
            return files.name(number)
    return None


def _forget_repaired(described: PackSource, target: PackFolder) -> None:
    """Remove each shard that lacks an image which was damaged and is intact now."""
    import numpy

    count = len(numpy.load(target.work / "rows.npy", mmap_mode="r"))
    for file in shard_files(target, count):
        if not file.exists():
            continue
        note = json.loads(note_of(target, file).read_bytes())
        # A shard cannot be extended, so it is written again as a whole.
        if _repaired(described, target, note["skipped"], noted=target.work):
            file.unlink()


def _finish(described: PackSource, target: PackFolder, share: float) -> None:
    """Write the index from the notes of all shards, then the manifest."""
    import numpy

    planned = numpy.load(target.work / "rows.npy")
    files = shard_files(target, len(planned))
    notes = [json.loads(note_of(target, file).read_bytes()) for file in files]
    skipped = _skipped(notes)
    _refuse_damage(skipped, len(planned), share, files=files, notes=notes)
    if described.items is not None and described.items.by_number:
        labels = numpy.concatenate([labels_of(target, file) for file in files])
        planned["labels"] = labels.reshape(planned["labels"].shape)
    is_whole = ~numpy.isin(planned["row"], [image["row"] for image in skipped])
    rows = planned[is_whole]
    contents = numpy.concatenate([contents_of(target, file) for file in files])
    # `contents[:, 0]` is a digest of each image's stored bytes, without its mask.
    _, first, same = numpy.unique(contents[:, 0], return_index=True, return_inverse=True)
    first_copy = first[same]  # for each image the index of the first image with the same bytes
    repeated = len(contents) - len(first)
    groups = None
    if repeated and not described.group_names:
        # An image and its copies are one group, so that a split puts all into the same part.
        groups = rows["group"][first_copy]
    index = _write_index(target, rows, groups)
    has_other_labels = (rows["labels"] != rows["labels"][first_copy]).any(axis=1)
    target.finish(
        **_seen_in(described, notes),
        names=described.label_names,
        classes=described.classes,
        arguments=described.arguments,
        first_mask=described.mask_names[0] if described.mask_names else None,
        group_names=described.group_names,
        table=asdict(described.table or PackedRows(len(planned))),
        masks=described.has_masks,
        skipped=skipped,
        contents=hashlib.sha256(contents.tobytes()).hexdigest(),
        repeated=repeated,
        relabelled=int(has_other_labels.sum()),
        left_out=described.left_out,
        shards=[
            {"file": file.name, "bytes": file.stat().st_size, "records": note["records"]}
            for file, note in zip(files, notes, strict=True)
        ],
        files={name: size_and_checksum(data) for name, data in index.items()},
    )


def _write_index(target: PackFolder, rows, groups) -> dict[str, bytes]:
    """Write the small files of a pack; return their contents by name.

    Args:
        target: the folder of the pack.
        rows: (N,) of `row_type`.
        groups: (N,) int32 if copies of images change the groups of the rows; else None.
    """
    index = {"index.npy": npy(rows)}
    if groups is not None:
        index["groups.npy"] = npy(groups)
    for name in ("names", "looks.npy"):  # a source without files has none of them
        if (target.work / name).exists():
            index[name] = (target.work / name).read_bytes()
    for name, data in index.items():
        write_file(target.folder / name, data)
    return index


def _skipped(notes: list[dict]) -> list[dict]:
    """Return the images that are missing in any shard, because they were left out as damaged.

    They are in the order of the source.
    """
    skipped = []
    for note in notes:
        skipped += note["skipped"]
    return sorted(skipped, key=lambda image: image["row"])


def _refuse_damage(skipped: list[dict], count: int, share: float, *, files, notes) -> None:
    """Raise ValueError if too many images are damaged."""
    if len(skipped) == count:
        raise InvalidValueError(
            f"none of the {count:,} images can be decoded",
            found=_reasons(skipped),
            fix="check that these are images, and that the paths are right",
        )
    damaged = len(skipped) / count  # not a product: 0.29 * 100 < 29
    if share and damaged > share:
        for file, note in zip(files, notes, strict=True):
            if note["skipped"]:
                file.unlink()  # the next call packs the images that replace the damaged ones
        raise InvalidValueError(
            f"{len(skipped):,} of {count:,} images are damaged or missing, and damaged= allows "
            f"{100 * share:.4g}%",
            found=_reasons(skipped),
            fix="check the paths, and call again; or, to leave these images out: "
            f"damaged={math.ceil(100 * len(skipped) / count) / 100}",
        )


def _seen_in(described: PackSource, notes: list[dict]) -> dict:
    """Return the manifest's entries that summarise the properties of all images."""
    shapes = set()
    mask_values = set()
    for note in notes:
        shapes |= {tuple(shape) for shape in note["shapes"]}
        mask_values |= set(note["masks"])
    dark_items = described.items.dark if described.items is not None else []
    return {
        "encoding": "uint8" if notes[0]["pixels"] else "jpeg",
        "shape": shapes.pop() if len(shapes) == 1 else None,
        "dark": len(dark_items) + sum(note["dark"] for note in notes),
        "brightest": max([*dark_items, *(note["brightest"] for note in notes)]),
        "mask_colours": _several_colours(notes),
        "mask_values": sorted(mask_values),
        "frames": sum(note["frames"] for note in notes),
    }


def _several_colours(notes: list[dict]) -> dict:
    """Find class numbers that have different colours in the palettes of different masks.

    Returns:
        Two of the colours, by class number.
    """
    colours = {}
    for note in notes:
        for number, seen in note["colours"].items():
            colours.setdefault(number, set()).update(map(tuple, seen))
    return {number: sorted(seen)[:2] for number, seen in colours.items() if len(seen) > 1}


def _reasons(skipped: list[dict]) -> str:
    """Return the three most frequent reasons why images were left out, with an example each."""
    counts = Counter()
    examples = {}
    for image in skipped:
        # Without numbers, because "3 bytes are missing" and "5 bytes are missing" are one reason.
        kind = re.sub(r"\d[\d,]*", "", image["why"])
        counts[kind] += 1
        examples.setdefault(kind, image)
    reasons = []
    for kind, count in counts.most_common(3):
        reasons.append(f"{count:,} x {examples[kind]['why']}, as {examples[kind]['name']}")
    if len(counts) > 3:
        reasons.append("and others")
    return printable("; ".join(reasons))


def _full(folder: Path) -> OSError:
    files = list(folder.glob("*.array_record"))
    packed = sum(file.stat().st_size for file in files)
    free = shutil.disk_usage(folder).free
    return SystemFailureError(
        f"the disk of {folder} is full",
        found=f"{len(files)} files of {packed / 1e6:,.0f} MB are packed, "
        f"{free / 1e6:,.0f} MB are free",
        fix="make room and call pack again: it continues from here; or pack onto a larger disk",
        errno=errno.ENOSPC,
    )
