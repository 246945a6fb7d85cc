"""Pack images into a few large files: in one random order, once, and on from where it stopped when it was ended."""

import errno
import functools
import io
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

from tpukit.data.prefetch import run_ahead
from tpukit.machine.resources import cpus
from tpukit.storage.array_records import FORMAT, load_array_record, part_of, seal, unseal, write_file, write_shard
from tpukit.storage.decoding import decode
from tpukit.storage.pack_sources import Files, Names, PackSource, look_at
from tpukit.storage.processes import lock_folder, run_in_processes
from tpukit.storage.spool import Spool, spool

UNFINISHED = "unfinished"  # the folder in the folder that holds what is needed until the manifest is there
_READ_AHEAD = 4  # threads a process: on a network drive opening a file takes longer than decoding it


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
    decoded once, so that a damaged one is found now. Ended at any moment, even by the machine, the same call goes on
    where it stopped; when all is packed it returns at once.

    Args:
        source: a folder of images, one sub-folder a class as for torchvision's ImageFolder (the label is the number
            of the class); or a DataFrame with a `path` column; or a map-style dataset or other iterable of
            `(image, labels)`, the image as the bytes of its file or (H, W, 3) uint8, the labels one number or several.
            Items are written twice, in their order and then in the random one, which takes the room twice meanwhile.
        folder: a new or empty folder, or one where the same pack was begun.
        labels: the columns that are labels, of a DataFrame; names of the labels, of items.
        groups: the column that says what belongs together, such as a patient, of a DataFrame; one value for each
            item, of items. `Records.split` has no group on both sides.
        size: None keeps the files as they are; a number stores pixels of that height and width, resized as `decode`
            does when exact: larger (49,152 bytes at 128), and many times as fast to read.
        seed: decides the order.
        shard: images a file.
        damaged: "raise", or "skip" to leave out what is no whole image; `Records.skipped` lists it.
        workers: processes that decode; None for one a CPU.
        progress: "widgets", "line", "text" or "off", as for `launch`; None decides by where this runs.

    Returns:
        The finished `Records`.

    Raises:
        ValueError: an argument or the source is not as above, or images have no labels of one length.
        OSError: an image is damaged or missing, named in the message; or the disk is full.
        FileExistsError: the folder holds another pack, or somebody's files.
        ModuleNotFoundError: array_record is not installed.
    """
    from tpukit.storage.records import Records

    load_array_record()  # before anything is written

    if damaged not in ("raise", "skip"):
        raise ValueError(f'damaged is "raise" or "skip", got {damaged!r}')
    for name, number in (("size", size), ("shard", shard), ("workers", workers)):
        if number is not None and number < 1:
            raise ValueError(f"{name} is 1 or more, got {number}")
    folder = Path(folder)
    found = look_at(source, labels, groups)
    plan = {"format": FORMAT, "source": found.fingerprint, "size": size, "seed": seed, "shard": shard}
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder):
        try:
            if _begin(folder, plan):
                _lay_out(found, folder / UNFINISHED, plan, progress)
                _write_shards(found, folder, plan, damaged, workers, progress)
                _finish(found, folder, plan)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise _full(folder) from error
            raise
        finally:
            for part in folder.rglob("*.part"):
                part.unlink(missing_ok=True)
        # Also what an earlier call had no time to remove.
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    records = Records(folder)
    if records.skipped and damaged == "raise":
        raise ValueError(
            f"{len(records.skipped)} damaged images were left out of this pack, for instance {records.skipped[0]}\n"
            '  fix:   pack(..., damaged="skip") agrees to that; or copy the images again and pack into a new folder'
        )
    return records


def _begin(folder: Path, plan: dict) -> bool:
    """Tell whether there is something to pack; refuse a folder that holds anything else."""
    manifest, work = folder / "manifest.json", folder / UNFINISHED
    there = None
    if manifest.exists():
        try:
            there = unseal(manifest.read_bytes())["plan"]
        except ValueError:
            return False  # damaged, which opening it tells
    elif list(folder.glob("*.array_record")) and (work / "plan.json").exists():
        there = json.loads((work / "plan.json").read_text())
    if there is not None and there != plan:
        other = "; ".join(f"{key} {there.get(key)}, not {plan[key]}" for key in plan if there.get(key) != plan[key])
        raise FileExistsError(
            f"{folder} holds {'another pack' if manifest.exists() else 'the beginning of another pack'}\n"
            f"  found: {other}\n  fix:   name a new folder, or delete this one"
        )
    if there is None:
        others = sorted(entry.name for entry in folder.iterdir() if entry.name != UNFINISHED)
        if others:
            raise FileExistsError(
                f"{folder} holds files that are not a pack's\n  found: {others[:4]}\n"
                "  fix:   name a new or empty folder"
            )
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        write_file(work / "plan.json", json.dumps(plan).encode())
    return not manifest.exists()


def _lay_out(found: PackSource, work: Path, plan: dict, progress: str | None) -> None:
    """Write the rows of all images in their random order, and where the images are."""
    import numpy

    if (work / "rows.npy").exists():
        return
    if found.items is None:
        rows = found.rows
        write_file(work / "names", Names.encode(found.names))
    else:
        rows = spool(found, work / "items", plan["size"], progress)
    order = numpy.random.default_rng(plan["seed"]).permutation(len(rows))
    write_file(work / "rows.npy", _npy(rows[order]))


def _write_shards(found: PackSource, folder: Path, plan: dict, damaged: str, workers, progress) -> None:
    """Have all shards written that are not there yet."""
    import numpy

    work = folder / UNFINISHED
    count = len(numpy.load(work / "rows.npy", mmap_mode="r"))
    workers = min(len(_shards(folder, count, plan)), workers or cpus())
    counts = work / "counts"  # 8 bytes a process: the images it is through with
    counts.write_bytes(bytes(8 * workers))
    job = {"folder": str(folder), "root": found.root, "damaged": damaged, "workers": workers}
    run_in_processes(
        "tpukit.storage.packing:_work",
        [{**job, "rank": rank} for rank in range(workers)],
        label="pack images",
        total=count,
        done=lambda: int(numpy.fromfile(counts, "<i8").sum()),
        folder=work,
        progress=progress,
    )


def _work(job: dict) -> None:
    """Write every `workers`th shard, in a process of its own."""
    import numpy

    folder = Path(job["folder"])
    work = folder / UNFINISHED
    plan = json.loads((work / "plan.json").read_text())
    rows = numpy.load(work / "rows.npy", mmap_mode="r")
    source = Spool(work / "items") if (work / "items").exists() else Files(work / "names", job["root"])
    done = 0
    with open(work / "counts", "r+b", buffering=0) as counts:

        def count(images: int) -> None:
            nonlocal done
            done += images
            os.pwrite(counts.fileno(), done.to_bytes(8, "little"), 8 * job["rank"])

        for number, file in enumerate(_shards(folder, len(rows), plan)):
            if number % job["workers"] == job["rank"]:
                mine = rows[number * plan["shard"] : (number + 1) * plan["shard"]]
                if file.exists():
                    count(len(mine))
                else:
                    _write(file, mine, source, plan["size"], job["damaged"], count)


def _write(file: Path, rows, source: Files | Spool, size: int | None, damaged: str, count) -> None:
    """Write a shard and, beside the plan, which rows are in it: whatever has its own name is whole."""
    kept, skipped, shapes = [], [], set()

    def records() -> Iterator[bytes]:
        reads = (functools.partial(_prepared, source, int(row["source"]), size) for row in rows)
        for row, (payload, shape) in zip(rows, run_ahead(reads, _READ_AHEAD), strict=True):
            if shape is not None:
                kept.append(row.tobytes())
                shapes.add(shape)
                yield kept[-1] + payload
            elif damaged == "skip":
                skipped.append({"source": int(row["source"]), "name": source.name(row["source"]), "why": payload})
            else:
                raise OSError(
                    f"image {row['source']} cannot be packed: {source.name(row['source'])}\n  found: {payload}\n"
                    '  fix:   copy it again; or pack(..., damaged="skip") leaves such images out and lists them'
                )
            count(1)

    part = part_of(file.parent / UNFINISHED / file.name)
    write_shard(part, records())
    pixels = size is not None or source.shape is not None
    notes = {"records": len(kept), "pixels": pixels, "shapes": sorted(shapes), "skipped": skipped}
    write_file(_notes(file, ".rows"), b"".join(kept))
    write_file(_notes(file, ".json"), json.dumps(notes).encode())
    os.replace(part, file)


def _prepared(source: Files | Spool, number: int, size: int | None) -> tuple:
    """Return what is to be stored and the shape of its image; of a damaged one, why and None."""
    try:
        data = source[number]
        if source.shape is not None:  # pixels, resized when they came
            return data, source.shape
        image = decode(data, size)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error), None
    return (data if size is None else image.tobytes()), image.shape


def _finish(found: PackSource, folder: Path, plan: dict) -> None:
    """Join what lies beside the shards to the index, and write the manifest last."""
    import numpy

    work = folder / UNFINISHED
    planned = numpy.load(work / "rows.npy", mmap_mode="r")
    files = _shards(folder, len(planned), plan)
    notes = [json.loads(_notes(file, ".json").read_text()) for file in files]
    skipped = sorted((image for note in notes for image in note["skipped"]), key=lambda image: image["source"])
    if len(skipped) == len(planned):
        raise ValueError(
            f"none of the {len(planned)} images can be decoded, for instance {skipped[0]}\n"
            "  fix:   check that these are images, and that the paths are right"
        )
    rows = numpy.frombuffer(b"".join(_notes(file, ".rows").read_bytes() for file in files), planned.dtype)
    index = {"index.npy": _npy(rows)}
    if (work / "names").exists():
        index["names"] = (work / "names").read_bytes()
    for name, data in index.items():
        write_file(folder / name, data)
    shapes = {tuple(shape) for note in notes for shape in note["shapes"]}
    manifest = {
        "plan": plan,
        "count": len(rows),
        "form": "uint8" if notes[0]["pixels"] else "jpeg",
        "shape": shapes.pop() if len(shapes) == 1 else None,
        "label_names": found.label_names,
        "classes": found.classes,
        "group_names": found.group_names,
        "skipped": skipped,
        "shards": [
            {"file": file.name, "bytes": file.stat().st_size, "records": note["records"]}
            for file, note in zip(files, notes, strict=True)
        ],
        "files": {name: {"bytes": len(data), "crc": zlib.crc32(data)} for name, data in index.items()},
    }
    write_file(folder / "manifest.json", seal(manifest))


def _shards(folder: Path, count: int, plan: dict) -> list[Path]:
    number = -(-count // plan["shard"])
    return [folder / f"{k:05d}-of-{number:05d}.array_record" for k in range(number)]


def _notes(file: Path, suffix: str) -> Path:
    return file.parent / UNFINISHED / (file.stem + suffix)


def _npy(array) -> bytes:
    import numpy

    held = io.BytesIO()
    numpy.save(held, array)
    return held.getvalue()


def _full(folder: Path) -> OSError:
    done = list(folder.glob("*.array_record"))
    packed, free = sum(file.stat().st_size for file in done), shutil.disk_usage(folder).free
    return OSError(
        errno.ENOSPC,
        f"the disk of {folder} is full\n"
        f"  found: {len(done)} files of {packed / 1e6:,.0f} MB are packed, {free / 1e6:,.0f} MB are free\n"
        "  fix:   make room and call pack again, it goes on from here; or pack onto a larger disk",
    )
