"""Draw phantom exams, chest CTs with and without emboli, in the competition's folder layout.

    phantom(folder, studies=300)
      1. `decide_findings`: the findings of every exam, with the requested share of positive exams
      2. `draw_study`, in several processes: a patient with these findings, slice by slice
      3. train.csv, from the rows that each process wrote

The random numbers of an exam depend only on the seed and the number of the exam. Therefore the
result does not depend on the number of processes.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

from tpukit.datasets import ResumableFolder, how_many, run_in_processes, whole_number
from tpukit.essentials.display import InvalidValueError
from tpukit.pe.ct import three_windows
from tpukit.pe.dicom import load_pydicom
from tpukit.pe.labels import COLUMNS
from tpukit.pe.phantoms.dicom_files import Place, write_dicom

SHORT = (2.0, 6.0)  # mm along the body: the shortest and longest embolus with short=True
RECIPE = 1  # increase this whenever the same arguments would draw other images
_PLACES = {  # probability of (left, right, central), about as in the competition
    (True, False, False): 0.18,
    (False, True, False): 0.22,
    (True, True, False): 0.28,
    # More central emboli than in the competition, because they are the easiest to see.
    (True, True, True): 0.22,
    (False, True, True): 0.06,
    (True, False, True): 0.04,
}


class PhantomFolder(ResumableFolder):
    """A folder that `phantom` writes."""

    kind = "phantom"
    version = 1
    manifest_name = "phantom.json"
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
    """Draw synthetic chest CTs with labels, for practice without the competition's data.

    A phantom shows no patient. The anatomy is a few hundred curves and ellipses, and the emboli are
    filling defects in the contrast. The labels are known because the emboli were drawn. A model
    that was trained on phantoms has learned nothing about medicine.

    `phantom` writes `<folder>/train.csv` and
    `<folder>/train-jpegs/<study>/<series>/<position>_<image>.jpg`, as in the competition's data and
    in the JPEG data set. DICOM files are `<folder>/train/<study>/<series>/<image>.dcm`. The same
    arguments give the same bytes. If the phantoms of these arguments are complete, the call returns
    at once; after an interruption, it draws everything again. It never replaces complete phantoms
    of other arguments: use another folder.

    Args:
        folder: an empty or new folder, or the folder of an earlier call.
        studies: the number of exams, 2 or more.
        slices: the number of images per exam, 2 or more, evenly spaced from the lung apices to
            below the diaphragm.
        seed: 0 or more; it determines everything that is drawn.
        size: height and width in pixels, 32 or more.
        positive: the share of the exams with an embolus, 0 to 1. A sixteenth of all exams is
            indeterminate, and the rest is negative.
        form: "jpeg" for images as in the JPEG data set; "dicom" for slices in Hounsfield units,
            uncompressed.
        masks: True to also write the pixels of each embolus, for `embolus_masks`, as
            `<folder>/masks/<study>/<series>/<image>.png`. The images do not change.
        short: True for emboli as short as many real ones: 2 to 6 mm from head to feet, or 2.2 times
            the distance between slices if that is more. In an exam of 150 slices, each embolus is
            on two to four slices. False for longer emboli: an exam then has them on about a third
            of its slices or more.
        workers: the number of processes that draw; None for one per CPU.
        progress: as for `tpukit.pack`.

    Returns:
        The folder.

    Raises:
        ValueError: a number is out of its range, or is not an integer.
        FileExistsError: the folder contains other phantoms, or other files.
        ModuleNotFoundError: `form` is "dicom", and pydicom is not installed.
    """
    whole_number("workers", workers, 1)
    recipe = {
        "recipe": RECIPE,
        "studies": whole_number("studies", studies, 2, is_optional=False),
        "slices": whole_number("slices", slices, 2, is_optional=False),
        "seed": whole_number("seed", seed, 0, is_optional=False),
        "size": whole_number("size", size, 32, is_optional=False),
        "positive": float(positive),  # JSON does not support numpy.float32
    }
    if form not in ("jpeg", "dicom"):
        raise ValueError(f'form must be "jpeg" or "dicom", got {form!r}')
    if not 0 <= positive <= 1:
        fact = f"positive must be a share of the exams, 0 to 1, got {positive}"
        raise InvalidValueError(fact, fix="positive=0.4")
    if form == "dicom":
        recipe["form"] = form
        load_pydicom()  # raises before anything is written
    if masks:
        recipe["masks"] = True
    if short:
        recipe["short"] = True
    target = PhantomFolder(Path(folder), recipe)
    if _is_complete(target):
        return target.folder
    with target.locked():
        if not _is_complete(target):  # another process may have finished before the lock
            _draw_all(target, how_many(studies, workers), progress)
    return target.folder


def _draw_all(target: PhantomFolder, workers: int, progress: str | None) -> None:
    recipe = target.plan
    # From scratch, because files of an interrupted call may be incomplete. 300 exams take only two
    # minutes.
    target.begin(from_scratch=True)
    run_in_processes(
        _draw_share,
        [[recipe, str(target.work), rank, workers] for rank in range(workers)],
        label="draw phantoms",
        total=recipe["studies"],
        done=lambda: len(list(target.work.glob("*.csv"))),
        folder=target.work,
        progress=progress,
    )
    tables = sorted(part.read_text() for part in target.work.glob("*.csv"))
    header = ",".join(COLUMNS) + "\n"
    (target.folder / "train.csv").write_text(header + "".join(tables))
    outputs = [_images(recipe)]
    if "masks" in recipe:
        outputs.append("masks")
    for name in outputs:
        (target.work / name).rename(target.folder / name)
    target.finish()


def decide_findings(recipe: dict) -> list:
    """Decide the findings of every exam; round the shares of the recipe to whole exams."""
    import numpy as np

    rng = np.random.default_rng([recipe["seed"], 0])
    studies = recipe["studies"]
    positive = round(studies * recipe["positive"])
    indeterminate = min(round(studies / 16), studies - positive)
    negative = studies - positive - indeterminate
    kinds = ["positive"] * positive
    kinds += ["indeterminate"] * indeterminate
    kinds += ["negative"] * negative
    exams = []
    # The numbers of each kind are exact, and only their order is random.
    for kind in rng.permutation(kinds):
        if kind == "positive":
            exams.append(_positive(rng, recipe))
        elif kind == "indeterminate":
            exams.append(_indeterminate(rng))
        else:
            exams.append(_negative(rng))
    return exams


def _positive(rng, recipe: dict):
    """Draw the findings of an exam with an embolus."""
    from tpukit.pe.phantoms.anatomy import Findings

    places = list(_PLACES)
    left, right, central = places[rng.choice(len(places), p=list(_PLACES.values()))]
    age = rng.random()
    # A larger clot strains the right heart more, and so is more likely to widen its ventricle.
    probability = 0.25
    if central:
        probability = 0.7
    elif left and right:
        probability = 0.4
    is_wide = rng.random() < probability
    findings = Findings(
        left=left,
        right=right,
        central=central,
        chronic=age > 0.76,
        acute=age < 0.9,
        rv_lv_ratio=rng.uniform(1.12, 1.5) if is_wide else rng.uniform(0.68, 0.88),
        flow_artifact=rng.random() < 0.06,
    )
    if "short" not in recipe:
        return findings
    # At least as long as two slices, because a shorter embolus might be on no slice of the exam.
    shortest = 2.2 * _apart(recipe["slices"])
    return replace(findings, extent=max(rng.uniform(*SHORT), shortest))


def _indeterminate(rng):
    """Draw the findings of an exam that cannot be read: poor contrast, motion, or both."""
    from tpukit.pe.phantoms.anatomy import Findings

    is_poor = rng.random() < 0.6
    return Findings(
        indeterminate=True,
        poor_contrast=is_poor,
        motion=not is_poor or rng.random() < 0.3,
        rv_lv_ratio=rng.uniform(0.68, 0.9),
    )


def _negative(rng):
    """Draw the findings of an exam without an embolus."""
    from tpukit.pe.phantoms.anatomy import Findings

    return Findings(
        rv_lv_ratio=rng.uniform(0.68, 0.92),
        flow_artifact=rng.random() < 0.1,
        defect_not_pe=rng.random() < 0.06,
    )


def _draw_share(job: list) -> None:
    """Draw the exams of one process; `run_in_processes` calls it."""
    recipe, work, rank, workers = job
    for number, findings in enumerate(decide_findings(recipe)):
        if number % workers == rank:
            draw_study(recipe, number, findings, work=Path(work))


def draw_study(recipe: dict, number: int, findings, *, work: Path) -> None:
    """Draw the images of an exam, and write its rows of train.csv.

    Args:
        recipe: the arguments of `phantom`.
        number: the number of the exam, from 0.
        findings: the `Findings` of the exam.
        work: the folder for the images and for `<number>.csv`.
    """
    import numpy as np
    from PIL import Image

    from tpukit.pe.phantoms.anatomy import make_patient
    from tpukit.pe.phantoms.scanner import scan

    seed = recipe["seed"]
    rng = np.random.default_rng([seed, 1, number])
    patient = make_patient(rng, findings)
    study = study_uid(seed, number)
    series = _uid(seed, number, "series")
    images = work / _images(recipe) / study / series
    images.mkdir(parents=True)
    masks = work / "masks" / study / series
    if "masks" in recipe:
        masks.mkdir(parents=True)
    rows = []
    for position in range(recipe["slices"]):
        z = height_of(position, recipe["slices"])
        hounsfield, embolus = scan(patient, z, recipe["size"], rng)
        image = _uid(seed, number, position)
        if "form" in recipe:
            place = _place(recipe, patient, position, uids=(study, series, image))
            write_dicom(images / f"{image}.dcm", hounsfield, place)
        else:
            picture = Image.fromarray(three_windows(hounsfield))
            picture.save(images / f"{position:03d}_{image}.jpg", quality=90)
        if "masks" in recipe and embolus.any():
            Image.fromarray(embolus).save(masks / f"{image}.png")
        labels = {"pe_present_on_image": int(embolus.any()), **findings.labels}
        rows.append([study, series, image, *(labels[name] for name in COLUMNS[3:])])
    # Sorted by identifier and not by position, as in the competition's table, so that code which
    # relies on the order of the rows fails here too.
    lines = [",".join(map(str, row)) + "\n" for row in sorted(rows)]
    (work / f"{number}.csv").write_text("".join(lines))


def _place(recipe: dict, patient, position: int, *, uids: tuple[str, str, str]) -> Place:
    """Return the identifiers and the position of a slice, for its DICOM file."""
    from tpukit.pe.phantoms.anatomy import HEIGHT

    slices = recipe["slices"]
    return Place(
        *uids,
        number=slices - position,
        z=HEIGHT - height_of(position, slices),
        pixel=patient.field_of_view / recipe["size"],
        apart=_apart(slices),
    )


def study_uid(seed: int, number: int) -> str:
    """Return the StudyInstanceUID of an exam."""
    return _uid(seed, number, "study")


def height_of(position: int, slices: int) -> float:
    """Return z of a slice in mm, in the axes of `anatomy`.

    Position 0 is below the diaphragm, and the last position at the shoulders, because the z axis of
    DICOM points to the head.
    """
    from tpukit.pe.phantoms.anatomy import HEIGHT

    return HEIGHT * (0.97 - 0.94 * position / (slices - 1))


def _apart(slices: int) -> float:
    """Return the distance between two slices in mm."""
    return height_of(0, slices) - height_of(1, slices)


def _is_complete(target: PhantomFolder) -> bool:
    """Return whether the folder contains all phantoms of the recipe.

    Raises:
        FileExistsError: the folder contains other phantoms, which another notebook may use.
    """
    try:
        made = target.read_manifest()["plan"]
    except (OSError, ValueError):
        return False
    others = target.differences(made)
    if others:
        raise others
    # Without hidden files, such as .DS_Store.
    images = len(list((target.folder / _images(target.plan)).rglob("[!.]*.*")))
    is_whole = images == target.plan["studies"] * target.plan["slices"]
    has_masks = "masks" not in target.plan or (target.folder / "masks").is_dir()
    return is_whole and has_masks and (target.folder / "train.csv").is_file()


def _images(recipe: dict) -> str:
    """Return the name of the folder of images, as in the competition or in the JPEG data set."""
    return "train" if "form" in recipe else "train-jpegs"


def _uid(*parts) -> str:
    """Return an identifier of twelve hexadecimal digits, like Kaggle's."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
