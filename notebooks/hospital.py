"""Phantoms for notebook 07, exported as a hospital exports exams: several series, a report, a table."""

import shutil
from pathlib import Path

import numpy
import pandas
import pydicom

from tpukit import pe

NOISE = {"soft": 0, "sharp": 60}  # of each kernel, in Hounsfield units per pixel
_ENDINGS = {"soft": ".IMA", "sharp": ""}
_AGAIN = 8  # every so many exams, a patient comes a second time


def export_phantoms(folder: Path, studies: int, slices: int, *, size: int, label: str) -> tuple[Path, Path]:
    """Draw phantoms and export them; return the folder of the exams and the table of labels.

    drawn/                  the phantoms as `pe.phantom` writes them
    export/CT_0000/         two series of each exam, a localizer and a report
    labels.csv              the columns "exam", its AccessionNumber, and `label`, 0 or 1

    Args:
        folder: where they are written; an export that is there is replaced.
        studies: exams.
        slices: images in each.
        size: pixels.
        label: the name of the label's column.
    """
    drawn = pe.phantom(folder / "drawn", studies, slices, size=size, form="dicom")
    shutil.rmtree(folder / "export", ignore_errors=True)
    table = pe.index_dicom(pe.read_labels(drawn), drawn / "train")
    rows = []
    with pydicom.config.disable_value_validation():
        for number, (_, exam) in enumerate(table.groupby("StudyInstanceUID")):
            is_second = number % _AGAIN == _AGAIN - 1
            patient = number - 1 if is_second else number
            attributes = {"PatientID": f"P{patient:04}", "AccessionNumber": f"{number:06}"}
            _export_exam(exam.path, folder / "export" / f"CT_{number:04}", attributes)
            rows.append({"exam": attributes["AccessionNumber"], label: exam.pe_present_on_image.max()})
    pandas.DataFrame(rows).to_csv(folder / "labels.csv", index=False)
    return folder / "export", folder / "labels.csv"


def _export_exam(paths, folder: Path, attributes: dict) -> None:
    """Write the slices of an exam as two series, with a localizer and a report."""
    folder.mkdir(parents=True)
    (folder / "report.txt").write_text("CTPA")
    random = numpy.random.default_rng(0)
    fronts = []
    for number, path in enumerate(paths):
        for kernel, noise in NOISE.items():
            file = pydicom.dcmread(path)
            pixels = file.pixel_array
            noisy = pixels + random.normal(0, noise, pixels.shape)
            _write(file, noisy, folder / f"{kernel}{number:03}{_ENDINGS[kernel]}", kernel, attributes)
        fronts.append(pixels.max(axis=0))
    file.ImageType = ["ORIGINAL", "PRIMARY", "LOCALIZER"]
    _write(file, numpy.stack(fronts), folder / "overview", "topogram", attributes)


def _write(file, pixels, path: Path, kernel: str, attributes: dict) -> None:
    """Write a data set with these pixels as an image of another series."""
    file.PixelData = numpy.round(pixels).astype("<i2").tobytes()
    file.Rows, file.Columns = pixels.shape
    file.SeriesDescription = f"CTPA 1.0 {kernel}"
    file.SeriesInstanceUID += f"-{kernel}"
    file.SOPInstanceUID += f"-{kernel}"
    for name, value in attributes.items():
        setattr(file, name, value)
    file.save_as(path)
