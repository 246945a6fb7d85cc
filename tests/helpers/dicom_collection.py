"""Images of pydicom, each as if it were a CT slice, with the values of another reader."""

import warnings
from pathlib import Path

import numpy as np
import pydicom
import pytest

from tpukit import pe

# The errors of grey images that `read_dicom` refuses.
REFUSED = {
    "JPEG2000-embedded-sequence-delimiter.dcm": "cannot be decoded",
    "MR_truncated.dcm": "bytes of pixel data is less than expected",
    # Doses, of 32 bits.
    "rtdose_1frame.dcm": "is not a CT slice",
    "rtdose_expb_1frame.dcm": "is not a CT slice",
    "rtdose_rle_1frame.dcm": "is not a CT slice",
}


def header(path):
    """Return the header of a DICOM file with an image; None for another file."""
    try:
        file = pydicom.dcmread(path, stop_before_pixels=True)
    except (pydicom.errors.InvalidDicomError, OSError):
        return None
    return file if "Rows" in file else None


def kind_of(path):
    """Return "grey", "colours" or "several frames"; None for a file without an image."""
    file = header(path)
    if file is None:
        return None
    if str(file.get("NumberOfFrames") or 1) != "1":
        return "several frames"
    has_palette = file.get("PhotometricInterpretation") == "PALETTE COLOR"
    return "grey" if file.get("SamplesPerPixel") == 1 and not has_palette else "colours"


def images(folder: Path) -> dict[Path, str]:
    """Return the kind of each image in a folder."""
    with warnings.catch_warnings(action="ignore"):  # of files that are odd on purpose
        kinds = {path: kind_of(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    return {path: kind for path, kind in kinds.items() if kind}


def as_a_ct_slice(path, folder):
    file = pydicom.dcmread(path)
    file.Modality = "CT"
    file.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
    file.SOPClassUID = pydicom.uid.CTImageStorage
    for name in ("RescaleType", "PixelPaddingValue"):
        if name in file:
            delattr(file, name)
    file.save_as(folder / "slice.dcm")
    return folder / "slice.dcm"


def assert_values_are_simpleitks(path, folder):
    """Check a grey image of the collection; a copy in the folder becomes a CT slice."""
    import SimpleITK

    made = as_a_ct_slice(path, folder)
    if path.name in REFUSED:
        with pytest.raises((ValueError, OSError), match=REFUSED[path.name]):
            pe.read_dicom(made)
        return
    file = pydicom.dcmread(made)
    (other,) = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(made)).astype(np.float32)
    if file.PhotometricInterpretation == "MONOCHROME1":  # which SimpleITK inverts
        other = file.pixel_array * np.float32(file.get("RescaleSlope", 1))
        other = other + np.float32(file.get("RescaleIntercept", 0))
    if "ModalityLUTSequence" in file:  # which SimpleITK does not apply
        other = pydicom.pixels.apply_modality_lut(file.pixel_array, file)
    if file.BitsAllocated == 1:  # SimpleITK writes 255 for 1
        other = other / 255
    # SimpleITK computes in float64, so the last bit may differ.
    np.testing.assert_array_max_ulp(pe.read_dicom(made), other.astype(np.float32), maxulp=1)
