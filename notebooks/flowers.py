"""Flowers drawn for notebook 08: a folder per kind with the usual faults, masks, and a table."""

import shutil
from pathlib import Path

import numpy
import pandas
from PIL import Image

# Of each kind: the number of petals, how pointed they are, and the depth of the gaps between them.
KINDS = {
    "anemone": (8, 0.5, 0.45),
    "clematis": (6, 1.3, 0.75),
    "daisy": (15, 0.8, 0.6),
    "poppy": (4, 0.3, 0.35),
}
_COLOURS = numpy.array(
    [(240, 236, 228), (235, 120, 150), (150, 110, 210), (225, 75, 60), (245, 190, 70), (95, 140, 220)]
)
_STEM = numpy.array([130, 165, 70])
_MIDDLE = numpy.array([225, 180, 60])
_ORIENTATION = 0x0112  # of EXIF
_PER_PLANT = 4  # flowers


def draw_flowers(folder: Path, per_kind: int) -> pandas.DataFrame:
    """Draw flowers of every kind into a folder, which is emptied before; return their table.

    flowers/KIND/NUMBER.jpg   the pictures; those of "daisy" have four usual faults
    masks/KIND/NUMBER.png     1 for the flower, 0 for the meadow
    flowers.csv               the table: file_name, mask, species, kind, width, plant

    Args:
        folder: where they are written.
        per_kind: flowers of each kind, 1 or more.
    """
    shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for kind in KINDS:
        for part in ("flowers", "masks"):
            (folder / part / kind).mkdir(parents=True)
        for number in range(per_kind):
            picture, mask, width = flower(kind, number)
            file = f"flowers/{kind}/{number:03}.jpg"
            mask_file = f"masks/{kind}/{number:03}.png"
            picture.save(folder / file, quality=90)
            mask.save(folder / mask_file)
            row = {"file_name": file, "mask": mask_file, "species": kind, "kind": list(KINDS).index(kind)}
            rows.append({**row, "width": width, "plant": f"{kind}-{number // _PER_PLANT}"})
    _add_faults(folder / "flowers" / "daisy")
    table = pandas.DataFrame(rows)
    table.to_csv(folder / "flowers.csv", index=False)
    return table


def draw_new_flowers(folder: Path, count: int) -> list[str]:
    """Draw flowers without labels, saved as a phone does, and return the kind of each."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [list(KINDS)[number % len(KINDS)] for number in range(count)]
    for number, kind in enumerate(kinds):
        _save_on_its_side(kind, 1000 + number, folder / f"IMG_{number:04}.jpg")
    return kinds


def flower(kind: str, seed: int, size: int = 160) -> tuple:
    """Return a picture, the mask of its petals, and their width as a share of the picture's.

    The length of the petals in each direction is a formula of the angle.

    Args:
        kind: one of `KINDS`.
        seed: flowers of another seed are others.
        size: pixels.
    """
    random = numpy.random.default_rng([list(KINDS).index(kind), seed])
    petals, pointed, depth = KINDS[kind]
    y, x = numpy.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j] - random.uniform(-0.15, 0.15, (2, 1, 1))
    radius = numpy.hypot(x, y)
    angle = numpy.arctan2(y, x) + random.uniform(0, 2 * numpy.pi)
    width = random.uniform(0.45, 0.85)
    reach = width * (1 - depth + depth * abs(numpy.cos(petals * angle / 2)) ** pointed)
    noise = Image.fromarray(random.integers(0, 90, (9, 9), numpy.uint8))
    noise = noise.resize((size, size), Image.Resampling.BICUBIC)
    meadow = numpy.asarray(noise)[..., None] * [0.5, 1.0, 0.4] + [25, 60, 30]
    petal = (0.65 + 0.4 * radius / reach)[..., None] * _COLOURS[random.integers(len(_COLOURS))]
    drawn = _mix(meadow, _STEM, (0.04 - abs(x)) * size / 4 * (y > 0))
    drawn = _mix(drawn, petal, (reach - radius) * size / 4)
    drawn = _mix(drawn, _MIDDLE, (0.16 - radius) * size / 4)
    pixels = (drawn * random.uniform(0.75, 1.1)).clip(0, 255).astype(numpy.uint8)
    mask = numpy.uint8(radius < reach)
    return Image.fromarray(pixels), Image.fromarray(mask), round(width, 3)


def _mix(below, above, share):
    """Lay one picture over another, with a share from 0 to 1 per pixel."""
    return below + share.clip(0, 1)[..., None] * (above - below)


def _add_faults(folder: Path) -> None:
    """Add a picture on its side, a cut-out one, half a file, and a hidden folder with a copy."""
    _save_on_its_side("daisy", 900, folder / "phone.jpg")
    cut_out, mask, _ = flower("daisy", 901)
    cut_out.putalpha(mask.point(lambda value: 255 * value))
    cut_out.save(folder / "cut_out.png")
    whole = (folder / "000.jpg").read_bytes()
    (folder / "half.jpg").write_bytes(whole[:2000])
    hidden = folder.parent / ".ipynb_checkpoints"
    hidden.mkdir()
    shutil.copy(folder / "phone.jpg", hidden / "phone-checkpoint.jpg")


def _save_on_its_side(kind: str, seed: int, file: Path) -> None:
    """Save a flower as a phone does: turned, with the orientation in the file."""
    note = Image.Exif()
    note[_ORIENTATION] = 6  # turn it a quarter to the right before showing it
    picture = flower(kind, seed)[0]
    picture.rotate(90, expand=True).save(file, exif=note)
