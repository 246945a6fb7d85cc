"""The DICOM files of a set, found by their headers: which file is which image, and where in the body it lies."""

import os
import tempfile
from pathlib import Path

from tpukit.essentials.show import WrongValue
from tpukit.pe.dicom import undecodable
from tpukit.pe.labels import IDS
from tpukit.pe.missing_images import as_in_headers, check_missing, match_headers
from tpukit.pe.series import (
    TURNED,
    UNNAMED,
    UNSCALED,
    find_files,
    find_places,
    of_other_modalities,
    read_headers,
    without_others,
)

_AGAIN = "copy them again, if they are slices"
_TOLD = {  # of what `find_places` notices; slices that lack, or share, a place are found by position
    TURNED: "nothing",
    UNSCALED: "look at one: without slope and intercept the greys may mean something else",
    UNNAMED: "look at one: another scanner's numbers are no Hounsfield units",
}


def index_dicom(labels, folder, *, missing: str = "raise", workers: int | None = None, progress: str | None = None):
    """Add two columns to the labels: the `path` of each image, and its `position` along the body, in mm.

    The headers say what a file is, so its name does not matter. Along the body is from the feet to the head, by
    ImagePositionPatient, whichever way the slices were numbered. Files without a row, and of another modality than CT,
    are ignored; a printed line says how many. `check_exams` puts all that is odd into one table.

    Args:
        labels: as `read_labels` returns them, or the competition's test.csv: only the three identifiers are read.
        folder: train, the folder that contains the study folders.
        missing: "raise" if a row has no file, or "drop" such rows and print how many; or "keep" all rows, whatever is
            odd about their images: a column `odd` says what, "" where nothing is.
        workers, progress: as for `pack_dicom`.

    Returns:
        A copy of the labels with a new index, `path` (str) and `position` (float), ordered by study, series, position;
        of an odd image they are "" and NaN. `pack_dicom` takes it as labels, and reads no header again.

    Raises:
        FileNotFoundError: the folder does not exist or contains no DICOM file, or a row has none.
        ValueError: two files are of one image, an image has no place, or lies in another study than the labels say.
        ImportError: pydicom is not installed.
    """
    import numpy as np

    check_missing(missing, "keep")
    names, keep = find_files(folder), missing == "keep"
    with tempfile.TemporaryDirectory() as work:
        headers, others = read_headers(folder, names, Path(work), workers, progress, decoders=not keep)
    why = {Path(names[number]).stem: words for number, words in others}
    noticed = [[*fact, "nothing: only CT is read"] for fact in of_other_modalities(names, others)]
    if others := without_others(folder, names, others):
        noticed.append([f"{len(others):,} files are no CT slices", f"{names[others[0][0]]}: {others[0][1]}", _AGAIN])
        print(f"{len(others)} files in {folder} are no CT slices, for instance {names[others[0][0]]}: {others[0][1]}")
    headers = headers[headers["image"].argsort(kind="stable")]
    if keep:
        headers = headers[np.unique(headers["image"], return_index=True)[1]]
    else:
        _check_once(headers, names)
    headers, rows = match_headers(headers, labels, missing, folder=folder, call="index_dicom(labels, folder")
    position, told = find_places(headers, np.unique(headers["series"], return_inverse=True)[1])
    for what in filter(told.get, _TOLD):
        count, first = told[what]
        noticed.append([f"{count:,} {what}", f"series {first}", _TOLD[what]])
    paths = [os.path.join(folder, names[file]) for file in headers["file"].tolist()]
    if keep:
        table = _with_the_odd(labels, rows, headers, position, paths, why)
    else:
        _check_identifiers(labels.iloc[rows], headers, names)
        _check_places(position, headers, names)
        table = labels.iloc[rows].assign(path=paths, position=position)
    table = table.sort_values([*IDS[:2], "position"], kind="stable").reset_index(drop=True)
    table.attrs["noticed"] = noticed
    return table


def _with_the_odd(labels, rows, headers, position, paths: list[str], why: dict):
    """Return all rows of the labels, with the place of the images that have one, and what is odd about the others."""
    import numpy as np

    odd = [f"its file is no CT slice: {why[uid]}" if uid in why else "it has no file" for uid in labels[IDS[2]]]
    odd, at, path = np.array(odd, object), np.full(len(labels), np.nan), np.full(len(labels), "", object)
    odd[rows], at[rows], path[rows] = "", position, paths
    found, unscaled = labels.iloc[rows], headers["unscaled"]
    compressed = [one for one in np.unique(headers["syntax"]) if undecodable(one.decode())]
    # Without a scale in a series that has one: DICOM's default is not theirs.
    alone = unscaled & np.isin(headers["series"], headers["series"][~unscaled])
    for wrong, words in (
        (~np.isfinite(position), "it has no place in the body"),
        (np.isin(headers["syntax"], compressed), "it is compressed, and nothing that is installed decodes it"),
        (_elsewhere(found, headers, 0), "its file says that it is of another study"),
        (_elsewhere(found, headers, 1), "its file says that it is of another series"),
        (alone, "it lacks RescaleSlope or RescaleIntercept, which others of its series have"),
    ):
        odd[rows[wrong]], at[rows[wrong]], path[rows[wrong]] = words, np.nan, ""
    return labels.assign(path=path, position=at, odd=odd)


def _elsewhere(labels, headers, which: int):
    """Return (N,) bool of the images that have another study (0), or series (1), in their file than in the labels."""
    return as_in_headers(labels[IDS[which]]) != headers[("study", "series")[which]]


def _check_once(headers, names: list[str]) -> None:
    again = headers["image"][1:] == headers["image"][:-1]
    if again.any():
        first = int(again.argmax())
        both = " and ".join(names[file] for file in headers["file"][first : first + 2])
        raise WrongValue(f"two files are of one image: {both}", fix="delete one of them")


def _check_identifiers(labels, headers, names: list[str]) -> None:
    for which, field in enumerate(("study", "series")):
        if (other := _elsewhere(labels, headers, which)).any():
            first = int(other.argmax())
            file = f"{headers[field][first].decode()} in {names[headers['file'][first]]}"
            raise WrongValue(
                f"{int(other.sum()):,} images have another {IDS[which]} in their file than in the labels",
                found=f"{file}, {labels[IDS[which]].iloc[first]} in the labels",
                fix="copy the files again, or correct these rows",
            )


def _check_places(position, headers, names: list[str]) -> None:
    import numpy as np

    nowhere = np.flatnonzero(~np.isfinite(position))
    if len(nowhere):
        raise WrongValue(
            f"{len(nowhere):,} images have no place in the body",
            found=f"no ImagePositionPatient along its series in {names[headers['file'][nowhere[0]]]}",
            fix="leave their rows out of the labels: a localizer is no slice of the exam",
        )
