"""Folders whose layout is odd, with the truth of each: splits, patients and masks are no classes.

A layout is drawn from the ways in which people lay out images: the names of splits and their spelling, folders
beside them, folders that wrap others, masks, patients. `pack` must refuse it, and its fix, done as it says, must give
the labels that were drawn. A layout of plain classes, whose names only remind of these, must be packed as it is.
"""

import glob
import os
import random
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pandas
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[1]))
from helpers.one_process import in_this_process

VERDICTS = ("right", "refused", "wrong")
TRAIN = (
    "train",
    "Train",
    "training",
    "TRAIN",
    "train_images",
    "seg_train",
    "train2017",
    "stage1_train",
)
OTHERS = (
    "test",
    "Testing",
    "val",
    "valid",
    "validation",
    "test_set",
    "seg_test",
    "val2017",
    "stage1_test",
)
CLASSES = (
    "cat",
    "dog",
    "NORMAL",
    "covid-19",
    "0",
    "1",
    "left lung",
    "trainer",
    "no mask",
    "n02085620-Chihuahua",
)
BESIDE = ("extra", "seg_pred", "chest_xray", "unlabelled")
MASKS = {"images": "masks", "train": "train_masks", "img_dir": "ann_dir", "Images": "Labels"}


def picture(file: Path, number: int) -> None:
    """Write an image of one colour."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), number % 256, np.uint8)).save(file)


def classes(folder: Path, draw: random.Random) -> Counter:
    """Draw a folder of plain classes; return the images of each."""
    counts = Counter()
    for name in draw.sample(CLASSES, draw.randint(2, 4)):
        counts[name] = draw.randint(1, 3)
        for number in range(counts[name]):
            picture(folder / name / draw.choice(["", "more"]) / f"{number}.png", number)
    return counts


def splits(folder: Path, draw: random.Random) -> Counter:
    """Draw splits, each with the same classes; the truth is that of training."""
    names = draw.sample(CLASSES, draw.randint(2, 4))
    wrap = draw.random() < 0.3
    counts = Counter()
    first = draw.choice(TRAIN)
    for part in (first, *draw.sample(OTHERS, draw.randint(1, 2))):
        for name in names:
            count = draw.randint(1, 3)
            if part == first:
                counts[name] = count
            place = folder / part / part if wrap else folder / part
            for number in range(count):
                picture(place / name / f"{number}.png", number)
    if draw.random() < 0.4:
        picture(folder / draw.choice(BESIDE) / "1.png", 1)
    return counts


def patients(folder: Path, draw: random.Random) -> Counter:
    """Draw a folder per patient, with the classes in each."""
    names = draw.sample(CLASSES, draw.randint(2, 3))
    counts = Counter()
    for patient in draw.sample(range(1000, 9999), draw.randint(4, 9)):
        for name in names:
            for number in range(draw.randint(1, 2)):
                picture(folder / str(patient) / name / f"{number}.png", patient)
                counts[name] += 1
    if draw.random() < 0.4:  # a copy of all of them, as in breast-histopathology
        for file in sorted(folder.rglob("*.png")):
            copy = folder / "IDC_regular" / file.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    return counts


def masks(folder: Path, draw: random.Random) -> Counter:
    """Draw a folder of images and one of their masks."""
    images = draw.choice(list(MASKS))
    ending = draw.choice(["", "_mask"])
    count = draw.randint(2, 5)
    for number in range(count):
        picture(folder / images / f"{number}.png", number)
        mask = folder / MASKS[images] / f"{number}{ending}.png"
        mask.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(mask)
    return Counter(masks=count)


def masks_among(folder: Path, draw: random.Random) -> Counter:
    """Draw classes whose images have their masks beside them."""
    counts = classes(folder, draw)
    first = sorted(folder.rglob("*.png"))[0]
    shutil.copy(first, first.with_stem(f"{first.stem}_mask"))
    return counts


def table(folder: Path, draw: random.Random) -> Counter:
    """Draw splits without classes, beside a table of those of training."""
    images, ending = draw.choice(TRAIN), draw.choice(["", ".png"])
    rows = []
    for number in range(draw.randint(3, 6)):
        picture(folder / images / f"{number:03d}.png", number)
        rows.append({"id_code": f"{number:03d}{ending}", "diagnosis": number % 3})
    picture(folder / draw.choice(OTHERS) / "x.png", 1)
    pandas.DataFrame(rows).to_csv(folder / "train.csv", index=False)
    return Counter(str(row["diagnosis"]) for row in rows)


WAYS = {
    "classes": classes,
    "splits": splits,
    "patients": patients,
    "masks": masks,
    "masks among": masks_among,
    "table": table,
}


def done(fix: str, to: Path):
    """Do the lines of a fix up to its "or", and return the pack."""
    from tpukit.datasets import pack

    cell = {"glob": glob, "os": os, "pandas": pandas, "pack": pack, "to": to}
    fix = fix.removeprefix("to pack the images without the masks: ")
    *before, call = re.split(r"; or\b|\n *or, |, one folder", fix)[0].split("; ")
    for line in before:
        exec(line, cell)
    return eval(call.replace("...", "to, progress='off'", 1), cell)


def found_in(packed) -> Counter:
    """Return the images of each class, as the functions above do."""
    if packed.has_masks:
        images = packed.take(range(len(packed)))
        are_alike = bool((images[..., 0] == images[..., 3]).all())
        return Counter(masks=len(packed) if are_alike else 0)
    if packed.classes:
        return Counter(packed.classes[int(label)] for label in packed.labels.reshape(-1))
    return Counter(f"{label:.0f}" for label in packed.labels.reshape(-1))


def judge(way: str, folder: Path, draw: random.Random) -> str:
    """Pack a layout; return "" if its labels are the truth, else what is wrong."""
    from tpukit.datasets import pack

    truth = WAYS[way](folder / "in", draw)
    try:
        packed = pack(folder / "in", folder / "out", progress="off")
        if way != "classes":
            return f"packed as {packed.classes}"
    except ValueError as error:
        if way == "classes":
            return f"refused: {error}"
        try:
            packed = done(error.fix, folder / "fixed")
        except Exception as failed:
            return f"{error}\n  and its fix: {type(failed).__name__}: {failed}"
    found = found_in(packed)
    return "" if found == truth else f"{dict(found)}, where {dict(truth)} was drawn"


def judge_many(count: int, seed: int, folder: Path) -> dict:
    """Judge so many layouts; return how often each verdict came, by way."""
    verdicts = {}
    with in_this_process():
        for number in range(count):
            draw = random.Random(f"{seed} layout {number}")
            way = list(WAYS)[number % len(WAYS)]
            place = folder / f"layout-{number}"
            place.mkdir(parents=True)
            why = judge(way, place, draw)
            counts = verdicts.setdefault(way, dict.fromkeys(VERDICTS, 0))
            counts["wrong" if why else "right"] += 1
            if why:
                files = sorted(
                    str(file.relative_to(place / "in")) for file in place.rglob("in/**/*.*")
                )
                print(f"wrong: {way}, layout {number}: {why}\n  {files[:12]}", flush=True)
            shutil.rmtree(place)
    return verdicts
