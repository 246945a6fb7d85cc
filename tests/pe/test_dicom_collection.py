"""read_dicom and SimpleITK find the same values in each grey image that comes with pydicom.

pydicom has images of other modalities, too; each is read here as if it were a CT slice.
"""

from pathlib import Path

import pytest

pydicom = pytest.importorskip("pydicom")
pytest.importorskip("gdcm")
pytest.importorskip("SimpleITK")

from helpers.dicom_collection import REFUSED, assert_values_are_simpleitks, images  # noqa: E402

from tpukit import pe  # noqa: E402

FOLDER = Path(pydicom.data.__file__).parent / "test_files"
KINDS = images(FOLDER)
IMAGES = [path for path, kind in KINDS.items() if kind == "grey"]
OTHERS = [path for path, kind in KINDS.items() if kind != "grey"]


def test_the_collection_has_its_images():
    assert len(IMAGES) >= 50
    assert {path.name for path in IMAGES} >= REFUSED.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", IMAGES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_an_independent_reader_finds_the_same_values(path, tmp_path):
    assert_values_are_simpleitks(path, tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_an_image_with_colours_or_several_frames_is_refused(path):
    with pytest.raises((ValueError, OSError), match="fix:"):
        pe.read_dicom(path)
