"""Find the positions and the masks of emboli in phantoms, to show them in figures.

They are unknown for data of patients.
"""

from pathlib import Path

from tpukit.essentials.display import PathNotFoundError
from tpukit.pe.phantoms.drawing import PhantomFolder, decide_findings, height_of, study_uid


def embolus_places(folder, table):
    """Return the position of the largest embolus on each slice of phantoms.

    Args:
        folder: the folder that `phantom` wrote.
        table: rows of the folder's labels, as from `index_images` or `index_dicom`.

    Returns:
        (N, 2) float array of x and y, as shares of the slice's width and height from its upper left
        corner. They are nan if a slice has no embolus, or belongs to no phantom in the folder.
    """
    import numpy as np

    places = np.full((len(table), 2), np.nan)
    try:
        recipe = PhantomFolder(Path(folder)).read_manifest()["plan"]
    except (OSError, ValueError):
        return places
    numbers = {study_uid(recipe["seed"], number): number for number in range(recipe["studies"])}
    for study, rows in table.reset_index(drop=True).groupby("StudyInstanceUID"):
        if study not in numbers:
            continue
        patient = _patient(recipe, numbers[study])
        for index, row in rows[rows.pe_present_on_image == 1].iterrows():
            places[index] = _largest(patient, row.position, recipe)
    return places


def embolus_masks(folder, table, size: int | None = None):
    """Return masks of the emboli in phantoms, one per row of a table.

    Args:
        folder: the folder that `phantom(..., masks=True)` wrote.
        table: rows of the folder's labels; only the identifiers of study, series and image are
            necessary.
        size: height and width in pixels, to which masks are resized by nearest neighbour; None for
            the size of the phantoms.

    Returns:
        (N, size, size) bool, all False for a slice without an embolus or without a file.

    Raises:
        FileNotFoundError: the folder contains no masks.
    """
    import numpy as np
    from PIL import Image

    folder = Path(folder)
    if not (folder / "masks").is_dir():
        fix = "draw phantoms with pe.phantom(another folder, ..., masks=True)"
        raise PathNotFoundError(
            f"{folder} holds no masks of emboli",
            fix=f"{fix}; there are no masks for patients",
        )
    size = size or PhantomFolder(folder).read_manifest()["plan"]["size"]
    masks = np.zeros((len(table), size, size), bool)
    keys = zip(table.StudyInstanceUID, table.SeriesInstanceUID, table.SOPInstanceUID, strict=True)
    for mask, (study, series, image) in zip(masks, keys, strict=True):
        path = folder / "masks" / study / series / f"{image}.png"
        if path.exists():
            with Image.open(path) as file:
                mask[:] = file.resize((size, size), Image.Resampling.NEAREST)
    return masks


def _patient(recipe: dict, number: int):
    """Draw the patient of an exam again from the seed."""
    import numpy as np

    from tpukit.pe.phantoms.anatomy import make_patient

    rng = np.random.default_rng([recipe["seed"], 1, number])
    return make_patient(rng, decide_findings(recipe)[number])


def _largest(patient, position: float, recipe: dict) -> tuple[float, float]:
    """Return a point inside the largest clot on a slice, as shares of its width and height."""
    import numpy as np
    from scipy import ndimage

    from tpukit.pe.phantoms.anatomy import HEIGHT
    from tpukit.pe.phantoms.scanner import Canvas

    size = recipe["size"]
    # The positions of DICOM files are in mm.
    z = HEIGHT - position if "form" in recipe else height_of(position, recipe["slices"])
    canvas = Canvas(patient, z, size)
    canvas.hu[:] = 0  # used for the coverage here, 1 inside a clot, instead of Hounsfield units
    for embolus in patient.emboli:
        if not embolus.at(canvas.z):
            continue
        canvas.tubes(embolus.clot, 1.0)
        if embolus.lumen is not None:  # blood flows past an old clot
            canvas.tubes(embolus.lumen, 0.0)
    parts, count = ndimage.label(canvas.hu > 0.5)
    if not count:
        return np.nan, np.nan
    areas = ndimage.sum_labels(np.ones_like(parts), parts, range(1, count + 1))
    largest = 1 + int(np.argmax(areas))
    # The point farthest from the edge is inside the clot even if it is a crescent.
    depth = ndimage.distance_transform_edt(parts == largest)
    row, column = np.unravel_index(depth.argmax(), depth.shape)
    return (column + 0.5) / size, (row + 0.5) / size
