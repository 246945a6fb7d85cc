"""Pack images into a few large files: in one random order, once; an interrupted call continues where it stopped."""

import errno
import functools
import importlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tpukit.data.prefetch import run_ahead
from tpukit.machine.resources import cpus
from tpukit.storage.array_records import load_array_record, write_shard
from tpukit.storage.decoding import decode
from tpukit.storage.files import npy, part_of, size_and_checksum, write_file
from tpukit.storage.pack_sources import Files, Names, PackSource, StoredItems, describe_source, store_items
from tpukit.storage.processes import run_in_processes
from tpukit.storage.records import PackFolder, Records

_READ_AHEAD = 4  # threads per process: on a network drive opening a file takes longer than decoding it


def pack(
    source,
    folder,
    *,
    labels=None,
    groups=None,
    size: int | None = None,
    seed: int = 0,
    shard: int = 8192,
    damaged: str = "raise",
    workers: int | None = None,
    progress: str | None = None,
):
    """Pack images and labels into a few large files that are read at random, fast and checked.

    The order is a random one, fixed by the seed: neighbours in a file are no neighbours in the source. Every image is
    decoded once, so that a damaged one is found now. Interrupted at any moment, even by the machine, the same call goes
    on where it stopped; when all is packed it returns at once. One pack is enough for all folds: `Records.rows` says
    which row of the table each image was.

    Args:
        source: a folder of images, one sub-folder per class as for torchvision's ImageFolder (the label is the
            number of the class); or a DataFrame with a `path` column; or a map-style dataset or other iterable of
            `(image, labels)`, the image as the bytes of its file or (H, W, 3) uint8, the labels one number or several.
            Items are written twice, in their order and then in the random one, so until the end they take twice the
            disk.
        folder: a new or empty folder, or one where the same pack was begun.
        labels: the columns that are labels, of a DataFrame; names of the labels, of items.
        groups: the column that says what belongs together, such as a patient, of a DataFrame; one value for each
            item, of items. `Records.split` has no group on both sides.
        size: None keeps the files as they are; a number stores pixels of that height and width, resized as `decode`
            does when exact: larger (49,152 bytes at 128 pixels), and many times as fast to read.
        seed: decides the order.
        shard: images per file.
        damaged: "raise", or "skip" to leave out what is no whole image; `Records.skipped` lists it.
        workers: processes that decode; None for one per CPU.
        progress: "widgets", "line", "text" or "off", as for `launch`; None decides by where this runs.

    Returns:
        The finished `Records`.

    Raises:
        ValueError: an argument or the source is not as above, or images have no labels of one length.
        OSError: an image is damaged or missing, named in the message; or the disk is full.
        FileExistsError: the folder holds another pack, or somebody's files.
        ModuleNotFoundError: array_record is not installed.
    """
    check_arguments(damaged, size=size, shard=shard, workers=workers)
    described = describe_source(source, labels, groups)
    return pack_described(
        described, folder, size=size, seed=seed, shard=shard, damaged=damaged, workers=workers, progress=progress
    )


def check_arguments(damaged: str, **numbers: int | None) -> None:
    """Raise for what no pack can be made with, before anything is read or written."""
    load_array_record()
    if damaged not in ("raise", "skip"):
        raise ValueError(f'damaged is "raise" or "skip", got {damaged!r}')
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} is 1 or more, got {number}")


def pack_described(described: PackSource, folder, *, size, seed, shard, damaged, workers, progress) -> Records:
    """Pack what a PackSource describes; everything else is as for `pack`."""
    plan = {"source": described.fingerprint, "size": size, "seed": seed, "shard": shard, **described.settings}
    target = PackFolder(Path(folder), plan)
    with target.locked():
        if target.is_finished:
            if another := target.differences(target.read_manifest()["plan"]):
                raise FileExistsError(another)
            target.remove_work()  # which an earlier call had no time for
        else:
            _fill(target, described, damaged, workers, progress)
    records = Records(target.folder)
    if records.skipped and damaged == "raise":
        raise ValueError(
            f"{len(records.skipped)} damaged images were left out of this pack, for instance {records.skipped[0]}\n"
            '  fix:   pack(..., damaged="skip") agrees to that; or copy the images again and pack into a new folder'
        )
    return records


def _fill(target: PackFolder, described: PackSource, damaged: str, workers: int | None, progress) -> None:
    """Pack what no earlier call has packed."""
    begun = target.unfinished_plan()
    if begun and target.find_outputs() and (another := target.differences(begun)):
        raise FileExistsError(another)  # not cleared: it may be hours of work
    # Items that were stored may have changed since; headers of files that have the same names have not.
    target.begin(from_scratch=not target.find_outputs() and not described.look)
    try:
        if described.look:
            described = described.look(target.work)
        _lay_out(described, target, progress)
        _write_shards(described, target, damaged, workers, progress)
        _finish(described, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(target.folder) from error
        raise
    finally:
        target.remove_parts()


def _lay_out(described: PackSource, target: PackFolder, progress: str | None) -> None:
    """Write the rows of all images in their random order, and where the images are."""
    import numpy

    work, plan = target.work, target.plan
    if (work / "rows.npy").exists():
        return
    if described.items is None:
        rows = described.rows
        write_file(work / "names", Names.encode(described.names))
    else:
        rows = store_items(described, work / "items", plan["size"], progress)
    if described.shuffled:
        rows = rows[numpy.random.default_rng(plan["seed"]).permutation(len(rows))]
    write_file(work / "rows.npy", npy(rows))


def _write_shards(described: PackSource, target: PackFolder, damaged: str, workers, progress) -> None:
    """Write the shards that are not there yet, in several processes."""
    import numpy

    count = len(numpy.load(target.work / "rows.npy", mmap_mode="r"))
    workers = min(len(_shards(target, count)), workers or cpus())
    counts = target.work / "counts"  # 8 bytes per process: how many images it has packed
    counts.write_bytes(bytes(8 * workers))
    job = {"folder": str(target.folder), "plan": target.plan, "root": described.root, "damaged": damaged}
    job["reader"] = described.reader
    run_in_processes(
        "tpukit.storage.packing:_work",
        [{**job, "workers": workers, "rank": rank} for rank in range(workers)],
        label="pack images",
        total=count,
        done=lambda: int(numpy.fromfile(counts, "<i8").sum()),
        folder=target.work,
        progress=progress,
    )


def _finish(described: PackSource, target: PackFolder) -> None:
    """Join what was noted beside the shards to the index, and write the manifest last."""
    import numpy

    planned = numpy.load(target.work / "rows.npy")
    files = _shards(target, len(planned))
    notes = [json.loads(_note(target, file).read_bytes()) for file in files]
    skipped = sorted((image for note in notes for image in note["skipped"]), key=lambda image: image["row"])
    if len(skipped) == len(planned):
        raise ValueError(
            f"none of the {len(planned)} images can be decoded, for instance {skipped[0]}\n"
            "  fix:   check that these are images, and that the paths are right"
        )
    packed = ~numpy.isin(planned["row"], [image["row"] for image in skipped])
    index = {"index.npy": npy(planned[packed])}
    if (target.work / "names").exists():
        index["names"] = (target.work / "names").read_bytes()
    for name, data in index.items():
        write_file(target.folder / name, data)
    shapes = {tuple(shape) for note in notes for shape in note["shapes"]}
    target.finish(
        encoding="uint8" if notes[0]["pixels"] else "jpeg",
        shape=shapes.pop() if len(shapes) == 1 else None,
        names=described.label_names,
        classes=described.classes,
        group_names=described.group_names,
        skipped=skipped,
        shards=[
            {"file": file.name, "bytes": file.stat().st_size, "records": note["records"]}
            for file, note in zip(files, notes, strict=True)
        ],
        files={name: size_and_checksum(data) for name, data in index.items()},
    )


def _shards(target: PackFolder, count: int) -> list[Path]:
    number = -(-count // target.plan["shard"])
    return [target.folder / f"{k:05d}-of-{number:05d}.array_record" for k in range(number)]


def _note(target: PackFolder, shard: Path) -> Path:
    """Name the file that lists the images left out of a shard, and the shapes of the others."""
    return target.work / f"{shard.stem}.json"


def _full(folder: Path) -> OSError:
    done = list(folder.glob("*.array_record"))
    packed, free = sum(file.stat().st_size for file in done), shutil.disk_usage(folder).free
    return OSError(
        errno.ENOSPC,
        f"the disk of {folder} is full\n"
        f"  found: {len(done)} files of {packed / 1e6:,.0f} MB are packed, {free / 1e6:,.0f} MB are free\n"
        "  fix:   make room and call pack again, it continues from here; or pack onto a larger disk",
    )


# ---- in the processes ----------------------------------------------------------------------------------------------


def _work(job: dict) -> None:
    """Write every `workers`th shard."""
    import numpy

    target = PackFolder(Path(job["folder"]), job["plan"])
    rows = numpy.load(target.work / "rows.npy", mmap_mode="r")
    items = target.work / "items"
    if job["reader"]:
        module, reader = job["reader"].split(":")
        source = getattr(importlib.import_module(module), reader)(target.work, job["root"], target.plan)
    else:
        source = StoredItems(items) if items.exists() else Files(target.work / "names", job["root"])
    done = 0
    with open(target.work / "counts", "r+b", buffering=0) as counts:

        def count(images: int) -> None:
            nonlocal done
            done += images
            os.pwrite(counts.fileno(), done.to_bytes(8, "little"), 8 * job["rank"])

        for number, file in enumerate(_shards(target, len(rows))):
            if number % job["workers"] == job["rank"]:
                mine = rows[number * target.plan["shard"] : (number + 1) * target.plan["shard"]]
                if file.exists():
                    count(len(mine))
                else:
                    _write(target, file, mine, source, job["damaged"], count)


def _write(target: PackFolder, file: Path, rows, source: Files | StoredItems, damaged: str, count) -> None:
    """Write a shard, and the note on it before the shard gets its name: a file under its own name is whole."""
    size, skipped, shapes = target.plan["size"], [], set()

    def records() -> Iterator[bytes]:
        reads = (functools.partial(_prepared, source, int(row["row"]), size) for row in rows)
        for row, (payload, shape) in zip(rows, run_ahead(reads, _READ_AHEAD), strict=True):
            number = int(row["row"])
            if shape is not None:
                shapes.add(shape)
                yield row.tobytes() + payload
            elif damaged == "skip":
                skipped.append({"row": number, "name": source.name(number), "why": payload})
            else:
                raise OSError(
                    f"image {number} cannot be packed: {source.name(number)}\n  found: {payload}\n"
                    '  fix:   copy it again; or pack(..., damaged="skip") leaves such images out and lists them'
                )
            count(1)

    part = part_of(target.work / file.name)
    write_shard(part, records())
    pixels = size is not None or source.encoding == "uint8"
    note = {"records": len(rows) - len(skipped), "pixels": pixels, "shapes": sorted(shapes), "skipped": skipped}
    write_file(_note(target, file), json.dumps(note).encode())
    os.replace(part, file)


def _prepared(source: Files | StoredItems, number: int, size: int | None) -> tuple:
    """Return what is to be stored and the shape of its image; of a damaged one, why and None."""
    try:
        data = source[number]
        if source.shape is not None:  # pixels, resized when they were stored, or images that were just encoded
            return data, source.shape
        image = decode(data, size)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error), None
    return (data if size is None else image.tobytes()), image.shape
