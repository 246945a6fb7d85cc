"""read_dicom and SimpleITK find the same values in each grey image that comes with pydicom.

pydicom has images of other modalities, too; each is read here as if it were a CT slice.
"""

import warnings
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pydicom = pytest.importorskip("pydicom")
pytest.importorskip("gdcm")
SimpleITK = pytest.importorskip("SimpleITK")

from tpukit import pe  # noqa: E402

FOLDER = Path(pydicom.data.__file__).parent / "test_files"
REFUSED = {
    "JPEG2000-embedded-sequence-delimiter.dcm": "cannot be decoded",
    "MR_truncated.dcm": "bytes of pixel data is less than expected",
    "examples_palette.dcm": r"colours \(PALETTE COLOR\)",
    # Doses, of 32 bits.
    "rtdose_1frame.dcm": "is not a CT slice",
    "rtdose_expb_1frame.dcm": "is not a CT slice",
    "rtdose_rle_1frame.dcm": "is not a CT slice",
}


def is_grey_image(path):
    try:
        file = pydicom.dcmread(path, stop_before_pixels=True)
    except (pydicom.errors.InvalidDicomError, OSError):
        return False
    is_single = str(file.get("NumberOfFrames") or 1) == "1"
    return is_single and file.get("SamplesPerPixel") == 1 and "Rows" in file


with warnings.catch_warnings(action="ignore"):  # of files that are odd on purpose
    IMAGES = [path for path in sorted(FOLDER.rglob("*")) if path.is_file() and is_grey_image(path)]


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


def test_the_collection_has_its_images():
    assert len(IMAGES) >= 50
    assert {path.name for path in IMAGES} >= REFUSED.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", IMAGES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_an_independent_reader_finds_the_same_values(path, tmp_path):
    made = as_a_ct_slice(path, tmp_path)
    if path.name in REFUSED:
        with pytest.raises((ValueError, OSError), match=REFUSED[path.name]):
            pe.read_dicom(made)
        return
    file = pydicom.dcmread(made)
    (other,) = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(made)).astype(np.float32)
    if file.PhotometricInterpretation == "MONOCHROME1":  # which SimpleITK inverts
        other = file.pixel_array * np.float32(file.get("RescaleSlope", 1))
        other = other + np.float32(file.get("RescaleIntercept", 0))
    if file.BitsAllocated == 1:  # SimpleITK writes 255 for 1
        other = other / 255
    np.testing.assert_array_equal(pe.read_dicom(made), other)
