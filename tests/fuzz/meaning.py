"""Ordinary collections whose truth is known, through pack and cache: every image has its class, its sides and its mask.

Each image is one colour, which says its number, with a bright corner, which says how it lies. So what a pack holds can
be compared with what was made, whatever the way: a folder of classes, a table, a list, a torch dataset or several that
are joined; names that are words or numbers; formats, modes, notes of how to turn; masks. A refusal is no fault.
"""

import contextlib
import io
import random
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas
from PIL import Image

SIDE = 24
COUNT = 9  # images of a collection
VERDICTS = ("right", "refused", "wrong")
NAMES = {
    "words": lambda n: ["cat", "dog", "emu"][:n],
    "numbers": lambda n: [str(k) for k in range(n)],
    "numbers from one": lambda n: [str(k + 1) for k in range(n)],
    "numbers beyond ten": lambda n: [str(k) for k in (2, 10, 33)][:n],
    "with zeros before": lambda n: [f"{k:03}" for k in (2, 10, 33)][:n],
    "words and numbers": lambda n: [f"site {k}" for k in (2, 10, 33)][:n],
    "accents": lambda n: ["Bär", "élan", "Ñandu"][:n],
}
FORMS = {"png": "PNG", "jpg": "JPEG", "jfif": "JPEG", "bmp": "BMP", "webp": "WEBP", "gif": "GIF", "tif": "TIFF"}
MODES = ("RGB", "RGBA", "L", "P")
TURNED = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}


@dataclass
class Collection:
    """What is packed, and the truth of it.

    Attributes:
        way: folder, table, list, dataset or joined.
        source, options: what `pack` gets.
        names: the class of each image, by its number.
        masked: True where each image has a mask of its corner.
    """

    way: str
    source: object
    options: dict = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    masked: bool = False


def drawn(number: int) -> Image.Image:
    """Return an image of the colour of its number, with a white corner at the upper left."""
    pixels = np.full((SIDE, SIDE + 8, 3), 20 + 20 * number, np.uint8)
    pixels[: SIDE // 3, : SIDE // 3] = 255
    return Image.fromarray(pixels)


def corner() -> Image.Image:
    """Return the mask of the white corner."""
    mask = np.zeros((SIDE, SIDE + 8), np.uint8)
    mask[: SIDE // 3, : SIDE // 3] = 1
    return Image.fromarray(mask)


def save(image: Image.Image, file: Path, draw: random.Random) -> None:
    """Save an image in some mode, perhaps turned with a note that says so."""
    form = FORMS[file.suffix[1:]]
    mode = draw.choice(MODES) if form in ("PNG", "WEBP", "TIFF") else "RGB"
    turned = draw.choice(list(TURNED)) if form in ("PNG", "JPEG", "WEBP") else 1
    image = image.transpose(TURNED[turned]) if turned > 1 else image
    note = Image.Exif()
    note[0x0112] = turned
    options = {"exif": note} if turned > 1 else {}
    options |= {"quality": 95} if form == "JPEG" else {"lossless": True} if form == "WEBP" else {}
    image.convert("RGB" if form == "WEBP" and mode == "P" else mode).save(file, form, **options)


def made(folder: Path, draw: random.Random) -> Collection:
    """Make a collection of some kind."""
    names = NAMES[draw.choice(list(NAMES))](draw.choice([2, 3]))
    way = draw.choice(["folder", "table", "list", "dataset", "joined"])
    of = {number: draw.choice(names) for number in range(COUNT)}
    of |= dict(enumerate(names))  # each has at least one
    return WAYS[way](folder, draw, names, of)


def a_folder(folder: Path, draw: random.Random, names: list[str], of: dict) -> Collection:
    for number, name in of.items():
        nested = draw.choice(["", "", "more", f"patient {number}"])
        (folder / name / nested).mkdir(parents=True, exist_ok=True)
        save(drawn(number), folder / name / nested / f"{number}.{draw.choice(list(FORMS))}", draw)
    if draw.random() < 0.3:
        (folder / names[0] / "notes.txt").write_text("no image")
    return Collection("folder", folder, {}, of)


def a_table(folder: Path, draw: random.Random, names: list[str], of: dict) -> Collection:
    rows = []
    masked = draw.random() < 0.3
    folder.mkdir(parents=True)
    for number, name in of.items():
        file = folder / f"{number}.{'png' if masked else draw.choice(list(FORMS))}"
        drawn(number).save(file) if masked else save(drawn(number), file, draw)
        corner().save(folder / f"{number}-mask.png")
        rows.append({"path": file.name, "mask": f"{number}-mask.png", "kind": name})
    table = pandas.DataFrame(rows).sample(frac=1, random_state=draw.randrange(99))
    options = {"labels": "kind", "root": str(folder)} | ({"masks": "mask"} if masked else {})
    kind = draw.choice(["as it is", "as numbers", "categorical", "a file"])
    if kind == "as numbers" and all(name.isdecimal() for name in names):
        table["kind"] = table.kind.astype(int)
        options["classes"] = names
    if kind == "categorical":
        table["kind"] = table.kind.astype("category")
    if draw.random() < 0.5:
        options["classes"] = draw.sample(names, len(names))
    if kind != "a file":
        return Collection("table", table, options, of, masked)
    table.to_csv(folder / "table.csv", index=False)
    return Collection("table", folder / "table.csv", options, of, masked)


class Pictures:
    """A dataset as torchvision's: images in memory, class numbers, the names of the classes."""

    def __init__(self, of: dict, classes: list[str], numbers: list[int]):
        self.classes, self.of, self.numbers = classes, of, numbers
        self.targets = [classes.index(of[number]) for number in numbers]

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, place):
        image = drawn(self.numbers[place])
        image.info["exif"] = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"  # left behind
        return image, self.targets[place]


def a_list(folder: Path, draw: random.Random, names: list[str], of: dict) -> Collection:
    masked = draw.random() < 0.5
    items = [(drawn(n), *([corner()] if masked else []), names.index(name)) for n, name in of.items()]
    return Collection("list", items, {"classes": names, "size": SIDE}, of, masked)


def a_dataset(folder: Path, draw: random.Random, names: list[str], of: dict) -> Collection:
    return Collection("dataset", Pictures(of, draw.sample(names, len(names)), list(of)), {"size": SIDE}, of)


def joined(folder: Path, draw: random.Random, names: list[str], of: dict) -> Collection:
    from torch.utils.data import ConcatDataset

    orders = [names, names if draw.random() < 0.5 else draw.sample(names, len(names))]
    parts = [Pictures(of, order, list(of)[part::2]) for part, order in enumerate(orders)]
    return Collection("joined", ConcatDataset(parts), {"size": SIDE}, of)


WAYS = {"folder": a_folder, "table": a_table, "list": a_list, "dataset": a_dataset, "joined": joined}


def judge(one: Collection, folder: Path) -> str:
    """Pack a collection, and compare what comes back with the truth."""
    import tpukit

    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            records = tpukit.pack(one.source, folder / "pack", workers=1, progress="off", **one.options)
            images = tpukit.cache_or_decode(records, size=SIDE, workers=1, progress="off", free=2**40, available=2**40)
    except (ValueError, OSError, TypeError) as error:
        return "refused" if "fix:" in str(error) else "wrong"
    left_out = sum(int(n) for n in re.findall(r"left out: (\d+)", said.getvalue()))
    txt = len(list(folder.rglob("notes.txt")))
    if len(records) != len(one.names) or left_out != txt:
        return "wrong"
    for at in range(len(images)):
        image, target = images[at]
        label, mask = (target["labels"], target["masks"]) if one.masked else (target, None)
        number = round((float(image[0, -4:, -4:].float().mean()) - 20) / 20)
        name = images.classes[int(label)] if images.classes else f"{float(label):g}"  # a quantity
        bright = image[:, 1:6, 1:4].float().min() > 200
        marks = mask is None or (bool(mask[1:6, 1:4].all()) and int(mask[-6:].sum()) == 0)
        if name.lstrip("0") != one.names.get(number, "no such image").lstrip("0") or not bright or not marks:
            return "wrong"
    return "right"


def judge_many(count: int, seed: int, folder: Path, keep: Path) -> dict:
    """Judge so many collections; return how often each verdict came, by way. What is wrong stays in `keep`."""
    table = {}
    for number in range(count):
        draw, place = random.Random(f"{seed} {number}"), folder / str(number)
        one = made(place / "made", draw)
        place.mkdir(parents=True, exist_ok=True)
        verdict = judge(one, place)
        counts = table.setdefault(one.way, dict.fromkeys(VERDICTS, 0))
        counts[verdict] += 1
        if verdict == "wrong":
            print(f"wrong: {one.way}, collection {number}: {one.options}, {one.names}", flush=True)
            shutil.copytree(place, keep / f"meaning-{seed}-{number}", dirs_exist_ok=True)
        shutil.rmtree(place)
    return table
