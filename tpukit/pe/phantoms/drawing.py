"""Phantom studies: chest CTs with and without emboli, drawn from a seed, in the layout of Kaggle's JPEG set."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

from tpukit.essentials.show import WrongValue
from tpukit.packs import ResumableFolder, how_many, run_in_processes, whole_number
from tpukit.pe.ct import three_windows
from tpukit.pe.dicom import load_pydicom
from tpukit.pe.labels import COLUMNS
from tpukit.pe.phantoms.dicom_files import Place, write_dicom

SHORT = (2.0, 6.0)  # mm along the body
RECIPE = 1  # raise it whenever the same arguments would draw another picture


class PhantomFolder(ResumableFolder):
    """A folder that `phantom` writes."""

    kind, version, manifest_name = "phantom", 1, "phantom.json"
    outputs = ("train-jpegs", "train", "masks", "train.csv")
    make = "phantom(folder)"
    repair = "call it again with the same arguments: it draws everything again"


def phantom(
    folder,
    studies: int = 300,
    slices: int = 12,
    *,
    seed: int = 0,
    size: int = 256,
    positive: float = 0.4,
    form: str = "jpeg",
    masks: bool = False,
    short: bool = False,
    workers: int | None = None,
    progress: str | None = None,
) -> Path:
    """Draw synthetic chest-CT studies as JPEGs, with labels, for practice without the competition's data.

    They contain no patient: the anatomy is a few hundred curves and ellipses, the emboli are filling defects in the
    contrast, and the labels say what was drawn. A model trained on phantoms has learned nothing about medicine.

    Writes `<folder>/train.csv` and `<folder>/train-jpegs/<study>/<series>/<position>_<image>.jpg`, as in the
    competition's data and in the JPEG set; or, as DICOM, `<folder>/train/<study>/<series>/<image>.dcm`. Called again
    with the same arguments it returns at once, and after an interruption it makes the phantoms again. Finished ones are
    never replaced by others: name another folder for those. The same arguments give the same bytes.

    Args:
        folder: an empty or new folder, or one that an earlier call made.
        studies: exams; at least 2.
        slices: images per study, evenly spaced from the lung apices to below the diaphragm; at least 2.
        seed: determines everything that is drawn.
        size: height and width in pixels; at least 32.
        positive: share of the studies with an embolus, 0 to 1. A sixteenth of all is indeterminate, the rest negative.
        form: "jpeg" for images as in the JPEG set; "dicom" for slices in Hounsfield units, uncompressed.
        short: emboli of 2 to 6 mm along the body, which show on two or three slices of an exam of 150, as many real
            ones do; without it they span a third of an exam or more.
        masks: also keep where each embolus was drawn, `<folder>/masks/<study>/<series>/<image>.png` of the slices that
            show one, for `embolus_masks`; the images are the same with and without.
        workers, progress: as for `tpukit.pack`; the workers draw.

    Returns:
        The folder.

    Raises:
        ValueError: a number is out of its range, or not a whole one.
        FileExistsError: the folder holds other phantoms, or something that is no phantom.
        ImportError: form is "dicom", and pydicom is not installed.
    """
    whole_number("workers", workers, 1)
    numbers = {"studies": (studies, 2), "slices": (slices, 2), "seed": (seed, 0), "size": (size, 32)}
    recipe = {"recipe": RECIPE, **{name: whole_number(name, *given) for name, given in numbers.items()}}
    recipe["positive"] = positive
    if form not in ("jpeg", "dicom"):
        raise ValueError(f'form is "jpeg" or "dicom", got {form!r}')
    if None in recipe.values() or not 0 <= positive <= 1:
        raise WrongValue(
            "phantom draws 2 or more studies of 2 or more slices of 32 or more pixels, positive between 0 and 1; "
            f"got studies={studies}, slices={slices}, size={size}, positive={positive}",
            fix="phantom(folder, studies=300, slices=12) is enough to train on",
        )
    if form == "dicom":
        recipe["form"] = form
        load_pydicom()  # before anything is written
    if masks:
        recipe["masks"] = True
    if short:
        recipe["short"] = True
    target = PhantomFolder(Path(folder), recipe)
    if not _is_complete(target):
        with target.locked():
            if not _is_complete(target):  # else another process has made them meanwhile
                target.begin(from_scratch=True)  # what is there may be half written, and 300 studies take two minutes
                workers = how_many(studies, workers)
                run_in_processes(
                    "tpukit.pe.phantoms.drawing:_work",
                    [[recipe, str(target.work), rank, workers] for rank in range(workers)],
                    label="draw phantoms",
                    total=studies,
                    done=lambda: len(list(target.work.glob("*.csv"))),
                    folder=target.work,
                    progress=progress,
                )
                tables = sorted(part.read_text() for part in target.work.glob("*.csv"))
                (target.folder / "train.csv").write_text("".join([",".join(COLUMNS) + "\n", *tables]))
                for made in (_images(recipe), *(["masks"] if masks else [])):
                    (target.work / made).rename(target.folder / made)
                target.finish()
    return target.folder


def decide_findings(recipe: dict) -> list:
    """Decide the findings of every study, meeting the shares of the kinds of exam to the nearest study."""
    import numpy as np

    from tpukit.pe.phantoms.anatomy import Findings

    rng = np.random.default_rng([recipe["seed"], 0])
    studies = recipe["studies"]
    with_embolus = round(studies * recipe["positive"])
    unclear = min(round(studies / 16), studies - with_embolus)
    kinds = ["positive"] * with_embolus + ["indeterminate"] * unclear
    kinds += ["negative"] * (studies - len(kinds))
    # Location and age in about the competition's proportions, with more central emboli, which are the easiest to see.
    places = {(1, 0, 0): 0.18, (0, 1, 0): 0.22, (1, 1, 0): 0.28, (1, 1, 1): 0.22, (0, 1, 1): 0.06, (1, 0, 1): 0.04}
    exams = []
    for kind in rng.permutation(kinds):
        if kind == "positive":
            left, right, central = (
                bool(flag) for flag in list(places)[rng.choice(len(places), p=list(places.values()))]
            )
            age = rng.random()
            # The larger the clot, the more it strains the right heart: a wide right ventricle is likelier if central.
            wide = rng.random() < (0.7 if central else 0.4 if left and right else 0.25)
            ratio = rng.uniform(1.12, 1.5) if wide else rng.uniform(0.68, 0.88)
            found = Findings(
                left,
                right,
                central,
                chronic=age > 0.76,
                acute=age < 0.9,
                rv_lv_ratio=ratio,
                flow_artifact=rng.random() < 0.06,
            )
            if "short" in recipe:  # on two slices at least, or the exam would have none that shows it
                apart = height_of(0, recipe["slices"]) - height_of(1, recipe["slices"])
                found = replace(found, extent=max(rng.uniform(*SHORT), 2.2 * apart))
        elif kind == "indeterminate":
            poor = rng.random() < 0.6
            found = Findings(
                indeterminate=True,
                poor_contrast=poor,
                motion=not poor or rng.random() < 0.3,
                rv_lv_ratio=rng.uniform(0.68, 0.9),
            )
        else:
            found = Findings(
                rv_lv_ratio=rng.uniform(0.68, 0.92), flow_artifact=rng.random() < 0.1, defect_not_pe=rng.random() < 0.06
            )
        exams.append(found)
    return exams


def draw_study(recipe: dict, number: int, findings, work: Path) -> None:
    """Draw the images of one study into `work`, then write its rows of train.csv beside them."""
    import numpy as np
    from PIL import Image

    from tpukit.pe.phantoms.anatomy import HEIGHT, make_patient
    from tpukit.pe.phantoms.scanner import scan

    rng = np.random.default_rng([recipe["seed"], 1, number])
    patient = make_patient(rng, findings)
    study, series = study_uid(recipe["seed"], number), _uid(recipe["seed"], number, "series")
    into = work / _images(recipe) / study / series
    into.mkdir(parents=True)
    masks = work / "masks" / study / series
    if "masks" in recipe:
        masks.mkdir(parents=True)
    rows = []
    for position in range(recipe["slices"]):
        z = height_of(position, recipe["slices"])
        hounsfield, embolus = scan(patient, z, recipe["size"], rng)
        image = _uid(recipe["seed"], number, position)
        if "form" in recipe:
            mm = patient.field_of_view / recipe["size"]
            apart = height_of(0, recipe["slices"]) - height_of(1, recipe["slices"])
            instance = recipe["slices"] - position
            where = Place(study, series, image, number=instance, z=HEIGHT - z, pixel=mm, apart=apart)
            write_dicom(into / f"{image}.dcm", hounsfield, where)
        else:
            Image.fromarray(three_windows(hounsfield)).save(into / f"{position:03d}_{image}.jpg", quality=90)
        if "masks" in recipe and embolus.any():
            Image.fromarray(embolus).save(masks / f"{image}.png")
        row = {"pe_present_on_image": int(embolus.any()), **findings.labels}
        rows.append([study, series, image, *(row[name] for name in COLUMNS[3:])])
    # Not in the order of positions, as in the competition's table: code that relies on that order would fail there.
    text = "".join(",".join(map(str, row)) + "\n" for row in sorted(rows))
    (work / f"{number}.csv").write_text(text)


def study_uid(seed: int, number: int) -> str:
    """Return the identifier of a study."""
    return _uid(seed, number, "study")


def height_of(position: int, slices: int) -> float:
    """Return z of a slice in mm, as of `anatomy`: position 0 is below the diaphragm, the last one at the shoulders.

    DICOM's z axis points to the head, so a series starts at the feet.
    """
    from tpukit.pe.phantoms.anatomy import HEIGHT

    return HEIGHT * (0.97 - 0.94 * position / (slices - 1))


def _work(job: list) -> None:
    """Draw every `workers`th study, in one of the processes."""
    recipe, work, rank, workers = job
    for number, findings in enumerate(decide_findings(recipe)):
        if number % workers == rank:
            draw_study(recipe, number, findings, Path(work))


def _is_complete(target: PhantomFolder) -> bool:
    """Tell whether the folder holds all of these phantoms.

    FileExistsError where others are finished: whoever drew them, another notebook, say, reads them.
    """
    try:
        made = target.read_manifest()["plan"]
    except (OSError, ValueError):
        return False
    if others := target.differences(made):
        raise FileExistsError(others)
    drawn = sum(len(files) for _, _, files in os.walk(target.folder / _images(target.plan)))
    return drawn == target.plan["studies"] * target.plan["slices"] and (target.folder / "train.csv").is_file()


def _images(recipe: dict) -> str:
    """Name the folder of the images, as the competition or the JPEG set does."""
    return "train" if "form" in recipe else "train-jpegs"


def _uid(*parts) -> str:
    """Make an identifier of twelve hexadecimal digits, like Kaggle's."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
