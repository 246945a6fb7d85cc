"""Ordinary collections whose truth is known, through pack, cache and batch: every image has its class, sides and mask.

Each image is one colour, which says its number, with a bright corner, which says how it lies. So what a batch holds can
be compared with what was made, whatever the way: a folder of classes, a table, a list, a torch dataset or several that
are joined; names that are words, numbers or look like something else; formats, modes, notes of how to turn; masks;
files that come twice or are damaged; labels put in place by hand; packs made again beside their cache.

A refusal is right only where its words are those that the collection foresees, and wrong where nothing is amiss.
"""

import contextlib
import functools
import io
import pickle
import random
import re
import shutil
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[1]))
from helpers.one_process import in_this_process

SIDE = 24
WIDE = SIDE + 8  # wider than high, so that an image that lies on its side is another
COUNT = 9  # different images of a collection
VERDICTS = ("right", "refused", "wrong")
NAMES = {
    "words": ["cat", "dog", "emu"],
    "numbers": ["0", "1", "2"],
    "numbers from one": ["1", "2", "3"],
    "numbers beyond ten": ["2", "10", "33"],
    "with zeros before": ["002", "010", "033"],
    "words and numbers": ["site 2", "site 10", "site 33"],
    "accents": ["Bär", "élan", "Ñandu"],
    "true and false": ["True", "False"],
    "like nothing": ["None", "NA", "cat"],
}
FORMS = {
    "png": "PNG",
    "jpg": "JPEG",
    "jfif": "JPEG",
    "bmp": "BMP",
    "webp": "WEBP",
    "gif": "GIF",
    "tif": "TIFF",
}
MODES = {
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "I;16"),
    "TIFF": ("RGB", "RGBA", "L", "CMYK", "I;16"),
    "WEBP": ("RGB", "RGBA"),
}
BACK = {  # what lies so that the note turns it back, by EXIF's numbers
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
LEFT_BEHIND = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"  # by a loader that has turned


@dataclass
class Collection:
    """What is packed, and the truth of it.

    Attributes:
        way: folder, table, list, dataset or joined.
        source, options: what `pack` gets.
        numbers: which image each row of the source is; of a folder, its files say it.
        names: the class of each image, by its number.
        tone: what is added to the colours.
        masked: True where each image has a mask of its corner.
        others: how many files there are that are no images of a class.
        broken: the image that is damaged, and may be left out.
        refusals: words of which a refusal may have some.
    """

    way: str
    source: object
    options: dict
    numbers: list[int]
    names: dict[int, str]
    tone: int = 0
    masked: bool = False
    others: int = 0
    broken: int | None = None
    refusals: list[str] = field(default_factory=list)


def drawn(number: int, tone: int = 0) -> np.ndarray:
    """Return (SIDE, WIDE, 3): the colour of a number, with a white corner, higher than wide, at the upper left."""
    pixels = np.full((SIDE, WIDE, 3), 20 + 20 * number + tone, np.uint8)
    pixels[: SIDE // 2, : WIDE // 4] = 255
    return pixels


def corner() -> np.ndarray:
    """Return the mask of the white corner."""
    return (drawn(0)[..., 0] == 255).astype(np.uint8)


@functools.cache
def expected(number: int, tone: int) -> np.ndarray:
    """Return the pixels of an image in a cache."""
    return np.asarray(
        Image.fromarray(drawn(number, tone)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    ).astype(int)


def in_mode(pixels: np.ndarray, mode: str) -> Image.Image:
    """Return an image in a mode; where that has an opacity, the white corner is black, and cannot be seen."""
    if mode == "I;16":
        return Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    image = Image.fromarray(pixels)
    if mode in ("RGBA", "LA"):
        white = Image.fromarray((pixels[..., 0] == 255).astype(np.uint8) * 255)
        image.paste((0, 0, 0), mask=white)
        image.putalpha(white.point(lambda value: 255 - value))
    return image.quantize() if mode == "P" else image.convert(mode)


def with_note(data: bytes, how: int, draw: random.Random) -> bytes:
    """Put EXIF into a JPEG: as a short or long number, in either order of bytes, perhaps behind a long profile."""
    order, (kind, code) = draw.choice("<>"), draw.choice([(3, "H"), (4, "I")])
    note = struct.pack(order + "HIHHHI", 42, 8, 1, 0x0112, kind, 1) + struct.pack(
        order + code, how
    ).ljust(4, b"\0")
    parts = [(0xE1, b"Exif\0\0" + (b"II" if order == "<" else b"MM") + note + bytes(4))]
    if draw.random() < 0.3:
        parts = [(0xE2, bytes(60_000))] * 2 + parts
    inside = b"".join(
        b"\xff" + bytes([kind]) + (len(part) + 2).to_bytes(2, "big") + part for kind, part in parts
    )
    return data[:2] + inside + data[2:]


def encoded(number: int, form: str, draw: random.Random, tone: int, turn: bool = True) -> bytes:
    """Return the bytes of an image's file in some mode, perhaps turned with a note that says so."""
    mode = draw.choice(MODES.get(form, ("RGB",)))
    how = draw.choice([1, *BACK]) if turn and form in ("PNG", "JPEG", "WEBP") else 1
    image = in_mode(drawn(number, tone), mode)
    image = image.transpose(BACK[how]) if how > 1 else image
    options = (
        {"quality": 95, "subsampling": 0}
        if form == "JPEG"
        else {"lossless": True}
        if form == "WEBP"
        else {}
    )
    if how > 1 and form != "JPEG":
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = how
    stored = io.BytesIO()
    image.save(stored, form, **options)
    return (
        with_note(stored.getvalue(), how, draw) if how > 1 and form == "JPEG" else stored.getvalue()
    )


def write(file: Path, *args, **options) -> None:
    """Write an image's file, in the format of its name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(encoded(args[0], FORMS[file.suffix[1:]], *args[1:], **options))


def made(folder: Path, draw: random.Random, tone: int = 0, shift: int = 0) -> Collection:
    """Make a collection of some kind; the same draws with another tone, or classes shifted, give it mended."""
    names = NAMES[draw.choice(list(NAMES))][: draw.choice([2, 3])]
    way = draw.choice(list(WAYS))
    of = {number: draw.choice(names) for number in range(COUNT)}
    of |= dict(enumerate(names))  # each has at least one
    of = {number: names[(names.index(name) + shift) % len(names)] for number, name in of.items()}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    one = WAYS[way](folder, draw, names, of, tone)
    one.way, one.names, one.tone = way, of, tone
    return one


def a_folder(
    folder: Path, draw: random.Random, names: list[str], of: dict, tone: int
) -> Collection:
    def place(number: int) -> Path:
        return folder / of[number] / draw.choice(["", "", "more", f"patient {number}"])

    for number in of:
        write(place(number) / f"{number}.{draw.choice(list(FORMS))}", number, draw, tone)
    one = Collection("", folder, {}, [], of)
    if draw.random() < 0.3:  # a copy of a file, under another name
        file = next(file for file in sorted(folder.rglob("0.*")))
        shutil.copy(file, file.with_stem("0 again"))
    if draw.random() < 0.3:
        (folder / names[0] / "notes.txt").write_text("no image")
        one.others += 1
    if draw.random() < 0.2:
        write(folder / "5.png", 5, draw, tone)  # beside the classes
        one.others += 1
    if draw.random() < 0.2:
        one.broken = max(of)
        next(folder.rglob(f"{one.broken}.*")).write_bytes(b"no image")
        one.options["damaged"] = 0.3
    if draw.random() < 0.3:
        one.options["classes"] = draw.sample(names, len(names))
    return one


def a_table(folder: Path, draw: random.Random, names: list[str], of: dict, tone: int) -> Collection:
    masked, rows, form = draw.random() < 0.4, [], draw.choice(list(FORMS))
    numbers = draw.sample(range(COUNT), COUNT) + draw.sample(
        range(COUNT), draw.choice([0, 0, 2])
    )  # some twice
    how = draw.choice([1, *BACK])
    for place, number in enumerate(numbers):
        name = f"{number}.{form}"
        if place < COUNT:
            write(folder / name, number, draw, tone, turn=not masked)
            if masked and form in (
                "jpg",
                "jfif",
            ):  # turned by its note, and its mask stored as it is seen or is not
                plain = encoded(number, "JPEG", draw, tone, turn=False)
                lying = Image.open(io.BytesIO(plain))
                stored = io.BytesIO()
                (lying.transpose(BACK[how]) if how > 1 else lying).save(
                    stored, "JPEG", quality=95, subsampling=0
                )
                (folder / name).write_bytes(with_note(stored.getvalue(), how, draw))
        elif draw.random() < 0.5:
            name = f"{number} again.{form}"
            shutil.copy(folder / f"{number}.{form}", folder / name)
        rows.append(
            {
                "path": name,
                "mask": f"mask-{place}.png",
                "kind": of[number],
                "patient": f"p{number % 4}",
            }
        )
        marks = mask_image(draw)
        is_stored = draw.random() < 0.5 and form in ("jpg", "jfif") and how in (5, 6, 7, 8)
        marks = marks.transpose(BACK[how]) if is_stored else marks
        marks.save(folder / f"mask-{place}.png")
    table = pandas.DataFrame(rows)
    options = {"labels": "kind", "root": str(folder)} | ({"masks": "mask"} if masked else {})
    one = Collection("", table, options, numbers, of, masked=masked)
    if masked and form in ("jpg", "jfif") and how in (2, 3, 4):
        one.refusals.append("not known whether the mask is already turned")
    if draw.random() < 0.3:
        options["groups"] = "patient"
    if draw.random() < 0.5:
        options["classes"] = draw.sample(names, len(names))
    kind = draw.choice(["as it is", "as numbers", "categorical", *FILES])
    are_numbers = all(name.isdecimal() for name in names)
    if kind == "as numbers" and (are_numbers or names[0] == "True"):
        table["kind"] = table.kind.astype(int) if are_numbers else table.kind == "True"
    if kind == "categorical":
        table["kind"] = pandas.Categorical(table.kind, draw.sample(names, len(names)))
    if kind in FILES:
        one.source = folder / f"table.{kind}"
        FILES[kind](table, one.source)
    if kind in FILES and "None" in names:
        one.refusals.append("label 'kind' of row [0-9]+ is missing")
    if (
        kind in ("as it is", "parquet", "feather") and are_numbers
    ):  # a column that was read wrongly?
        one.refusals.append("labels must be numbers, but")
    is_truth = names[0] == "True" and kind in ("as numbers", "csv", "tsv", "csv.gz", "csv.zip")
    if is_truth and "classes" not in options:  # a quantity
        of.update({number: str(float(name == "True")) for number, name in of.items()})
    return one


def mask_image(draw: random.Random) -> Image.Image:
    """Return the mask of the corner, in one of the ways in which a file may hold it."""
    kind = draw.choice(["L", "P", "1"])
    image = Image.fromarray(corner())
    if kind == "P":
        image.putpalette([9, 9, 9, 200, 0, 0])
    return image if kind != "1" else Image.fromarray(corner().astype(bool))


FILES: dict[str, Callable] = {
    "csv": lambda table, file: table.to_csv(file, index=False),
    "tsv": lambda table, file: table.to_csv(file, index=False, sep="\t"),
    "csv.gz": lambda table, file: table.to_csv(file, index=False),
    "csv.zip": lambda table, file: table.to_csv(file, index=False),
    "parquet": lambda table, file: table.to_parquet(file),
    "feather": lambda table, file: table.to_feather(file),
    "jsonl": lambda table, file: table.to_json(file, orient="records", lines=True),
}


class Pictures:
    """A dataset as torchvision's: images in memory, class numbers, the names of the classes."""

    def __init__(self, of: dict, classes: list[str], numbers: list[int], tone: int):
        self.classes, self.of, self.numbers, self.tone = classes, of, numbers, tone
        self.targets = [classes.index(of[number]) for number in numbers]
        self.target_transform = None

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, place):
        image = Image.fromarray(drawn(self.numbers[place], self.tone))
        image.info["exif"] = LEFT_BEHIND
        target = self.targets[place]
        return image, self.target_transform(target) if self.target_transform else target


def a_list(folder: Path, draw: random.Random, names: list[str], of: dict, tone: int) -> Collection:
    import torch

    masked, kind = (
        draw.random() < 0.5,
        draw.choice(["pillow", "array", "tensor", "floats", "16 bits", "file"]),
    )
    labelled = draw.choice([int, np.int64, float, torch.tensor, lambda number: names[number]])
    numbers = [*of, *draw.sample(list(of), draw.choice([0, 2]))]
    seed = draw.randrange(2**30)  # the same image has the same file

    def image(number: int):
        pixels = drawn(number, tone)
        return {
            "pillow": lambda: Image.fromarray(pixels),
            "array": lambda: pixels,
            "tensor": lambda: torch.from_numpy(pixels).permute(2, 0, 1),
            "floats": lambda: pixels / np.float32(255),
            "16 bits": lambda: pixels.astype(np.uint16) * 257,
            "file": lambda: encoded(
                number, "PNG", random.Random(seed + number), tone, turn=not masked
            ),
        }[kind]()

    def mask():
        return draw.choice(
            [mask_image(draw), corner(), torch.from_numpy(corner()), corner().astype(np.int64)]
        )

    items = [
        (image(n), *([mask()] if masked else []), labelled(names.index(of[n]))) for n in numbers
    ]
    if draw.random() < 0.4:
        keys = ("image", *(["marks"] if masked else []), "label")
        items = [dict(zip(keys, item, strict=True)) for item in items]
    options = {"classes": names, "size": SIDE} | (
        {"masks": "marks"} if masked and isinstance(items[0], dict) else {}
    )
    return Collection("", items, options, numbers, of, masked=masked)


def a_dataset(
    folder: Path, draw: random.Random, names: list[str], of: dict, tone: int
) -> Collection:
    from torch.utils.data import Subset

    dataset = Pictures(of, draw.sample(names, len(names)), list(of), tone)
    numbers, kind = list(of), draw.choice(["plain", "subset", "numbered", "transformed", "wrapped"])
    source = dataset
    if kind == "subset":
        numbers = draw.sample(numbers, COUNT - 2)
        source = Subset(Subset(dataset, numbers), range(len(numbers)))
    elif kind == "numbered":
        dataset.class_to_idx = {name: number for number, name in enumerate(dataset.classes)}
        dataset.classes = draw.sample(names, len(names))
    elif kind == "transformed":
        dataset.target_transform = lambda target: 2 * target + 1
        of.update(
            {
                number: str(2 * target + 1)
                for number, target in zip(numbers, dataset.targets, strict=True)
            }
        )
    elif kind == "wrapped":

        class Wrapped:
            def __init__(self, dataset):
                self.dataset = dataset

            def __len__(self):
                return len(self.dataset)

            def __getitem__(self, place):
                return self.dataset[place]

        source = Wrapped(dataset)  # nothing says that its labels are still those of the names
        of.update(
            {number: str(target) for number, target in zip(numbers, dataset.targets, strict=True)}
        )
    options = {"size": SIDE}
    if kind in ("plain", "subset", "numbered") and draw.random() < 0.5:
        options["classes"] = draw.sample(
            names, len(names)
        )  # which a dataset's numbers are matched to by its own names
    return Collection("", source, options, numbers, of)


def joined(folder: Path, draw: random.Random, names: list[str], of: dict, tone: int) -> Collection:
    from torch.utils.data import ConcatDataset, Subset

    orders = [names, names if draw.random() < 0.5 else draw.sample(names, len(names))]
    numbers = [list(of)[part::2] for part in range(2)]
    parts = [Pictures(of, order, mine, tone) for order, mine in zip(orders, numbers, strict=True)]
    if draw.random() < 0.5:
        parts[1], numbers[1] = Subset(parts[1], [1, 0]), [numbers[1][1], numbers[1][0]]
    refusals = ["number their classes differently"] if orders[0] != orders[1] else []
    return Collection(
        "", ConcatDataset(parts), {"size": SIDE}, sum(numbers, []), of, refusals=refusals
    )


WAYS = {
    "folder": a_folder,
    "table": a_table,
    "list": a_list,
    "dataset": a_dataset,
    "joined": joined,
}


def packed(one: Collection, folder: Path):
    """Pack a collection; where a table in another file is refused, as the fix says."""
    import tpukit

    said, options = io.StringIO(), {"progress": "off", **one.options}
    with contextlib.redirect_stdout(said):
        try:
            records = tpukit.pack(one.source, folder / "pack", **options)
        except ValueError as error:
            call = re.search(r"pandas\.read_\w+\(.*?\)", str(error))
            if (
                call is None
                or not isinstance(one.source, Path)
                or "is a file, and pack reads" not in str(error)
            ):
                raise
            records = tpukit.pack(eval(call[0]), folder / "pack", **options)
    left_out = sum(int(n) for n in re.findall(r"no images of a class: (\d+)", said.getvalue()))
    if left_out != one.others:
        raise AssertionError(
            f"{left_out} files are said to be left out, and there are {one.others}"
        )
    return records


def cached(records):
    """Return the cache of a pack, beside it."""
    import tpukit

    with contextlib.redirect_stdout(io.StringIO()):
        return tpukit.cached_images(records, size=SIDE, workers=1, progress="off")


def relabel(images, one: Collection, draw: random.Random) -> None:
    """Put other labels in place, in some form, and note them as the truth."""
    old = images.labels if images.classes else images.labels[:, 0]
    new = (old + 1) % len(images.classes) if images.classes else old + 1
    of_rows = pandas.Series(0.0, range(images.source_rows.count))
    of_rows[images.rows] = new
    if isinstance(one.source, pandas.DataFrame):
        of_rows.index = one.source.index
    form = draw.choice(["array", "floats", "series", "shuffled series", "taken series"])
    if form in ("taken series", "shuffled series"):
        one.refusals += ["than the table that was packed", "the table that was packed had"]
    put = {
        "array": lambda: new,
        "floats": lambda: new.astype(float).tolist(),
        "series": lambda: of_rows,
        "shuffled series": lambda: of_rows.set_axis(draw.sample(range(len(of_rows)), len(of_rows))),
        "taken series": lambda: of_rows.iloc[images.rows],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        images.labels = put[form]()
    names = dict(enumerate(images.classes))
    for index, label in enumerate(new.tolist()):
        one.names[number_of(one, images, index)] = names[int(label)] if names else str(label)


def number_of(one: Collection, images, index: int) -> int:
    """Return which image is at an index, by the table; of a folder, by the file's name."""
    if one.way != "folder":
        return one.numbers[int(images.rows[index])]
    return int(re.match(r"\d+", Path(images.name(index)).name)[0])


def faults(images, one: Collection, names: dict[int, int]) -> list[str]:
    """Say what is wrong with images, batch by batch, and with their split; `names` has the number of each index."""
    from tpukit.essentials.data import Batches

    found = []
    batches = Batches(images, batch_size=4)
    for samples, (pixels, targets) in batches.with_samples():
        labels, masks = (
            (targets["labels"], targets["masks"]) if one.masked else (targets, [None] * 4)
        )
        for index, image, label, mask in zip(samples.tolist(), pixels, labels, masks, strict=True):
            number, image = names[index], image.permute(1, 2, 0).numpy().astype(int)
            far = np.abs(image - expected(number, one.tone)).mean()
            if far > 4:
                found.append(f"image {number} is {far:.0f} grey levels away")
            name = images.classes[int(label)] if images.classes else str(float(label))
            if not alike(name, one.names[number]):
                found.append(f"image {number} is called {name!r}, not {one.names[number]!r}")
            if mask is not None and np.abs(mask.numpy() - small_mask()).mean() > 0.02:
                found.append(f"the mask of image {number} lies elsewhere")
    for seed in range(3):
        sides = [{names[int(index)] for index in part} for part in images.split(0.4, seed)]
        if "groups" in one.options:
            sides = [{number % 4 for number in side} for side in sides]
        if sides[0] & sides[1]:
            found.append(f"{sides[0] & sides[1]} are on both sides of a split")
    return found


@functools.cache
def small_mask() -> np.ndarray:
    """Return the mask of the corner in a cache."""
    return np.asarray(
        Image.fromarray(corner()).resize((SIDE, SIDE), Image.Resampling.NEAREST)
    ).astype(int)


def alike(name: str, truth: str) -> bool:
    """Tell whether two names are one; numbers by their value."""
    with contextlib.suppress(ValueError):
        return name == truth or float(name) == float(truth)
    return name == truth


def judge(make: Callable, folder: Path, draw: random.Random) -> tuple[str, str]:
    """Pack a collection, perhaps mend it, and compare what comes back with the truth; return a verdict, and why."""
    one, after = (
        make(),
        draw.choice(["", "", "", "labels", "labels of the cache", "made again", "mended"]),
    )
    changed = draw.choice([{"tone": 7}, {"shift": 1}])
    try:
        records = packed(one, folder)
        if after in ("made again", "mended"):
            cached(records)
            one = make(**changed)
            if after == "made again":
                shutil.rmtree(folder / "pack")
            records = again(lambda: packed(one, folder), "holds another pack")
            again(lambda: cached(records), "holds another cache")
        if after == "labels":
            relabel(records, one, draw)
        images = cached(records)
        numbers = {index: number_of(one, records, index) for index in range(len(records))}
        if after == "labels of the cache" and one.way != "folder":
            relabel(images, one, draw)
        if draw.random() < 0.3:
            images = pickle.loads(pickle.dumps(images))
        count = len(one.numbers) if one.way != "folder" else len(list(files_of(one)))
        if len(images) != count - (one.broken is not None):
            return "wrong", f"{len(images)} images of {count}"
        found = faults(images, one, numbers)
    except (ValueError, OSError, TypeError) as error:
        words = str(error)
        foreseen = "fix:" in words and any(re.search(refusal, words) for refusal in one.refusals)
        return ("refused" if foreseen else "wrong"), f"after {after!r}: {words}"
    except Exception:  # a bare one is a fault, too
        return "wrong", f"after {after!r}: {traceback.format_exc()}"
    return ("wrong" if found else "right"), f"after {after!r}: " + "; ".join(found[:4])


def again(call: Callable, refusal: str):
    """Make a call; where it is refused with these words, do what its fix says and call again."""
    try:
        return call()
    except (ValueError, OSError) as error:
        if refusal not in str(error):
            raise
        eval(re.search(r"shutil\.rmtree\(.*?\)", str(error))[0])
        return call()


def files_of(one: Collection):
    """Yield the images of a folder."""
    for file in one.source.rglob("*"):
        if file.suffix[1:] in FORMS and file.parent != one.source:
            yield file


def judge_many(count: int, seed: int, folder: Path, keep: Path) -> dict:
    """Judge so many collections; return how often each verdict came, by way. What is wrong stays in `keep`."""
    table = {}
    with in_this_process():
        for number in range(count):
            place, name = folder / str(number), f"{seed} {number}"
            place.mkdir(parents=True)

            def make(place: Path = place, name: str = name, **changed) -> Collection:
                return made(place / "made", random.Random(name), **changed)

            verdict, why = judge(make, place, random.Random(f"{name} judged"))
            one = make()
            counts = table.setdefault(one.way, dict.fromkeys(VERDICTS, 0))
            counts[verdict] += 1
            if verdict == "wrong":
                print(
                    f"wrong: {one.way}, collection {number}, {why}\n  {one.options}, {one.names}",
                    flush=True,
                )
                shutil.copytree(place, keep / f"meaning-{seed}-{number}", dirs_exist_ok=True)
            shutil.rmtree(place)
    return table
