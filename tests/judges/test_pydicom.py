"""Every image of pydicom and pydicom-data: the values of SimpleITK, or a refusal with its reason."""

from pathlib import Path

import pydicom
import pytest
from helpers.dicom_collection import assert_values_are_simpleitks, images

from tpukit import pe

data_store = pytest.importorskip("data_store", reason="of pydicom-data")
pytestmark = [pytest.mark.judges, pytest.mark.filterwarnings("ignore")]

FOLDERS = (Path(pydicom.data.__file__).parent / "test_files", Path(*data_store.__path__) / "data")
IMAGES = {path: kind for folder in FOLDERS for path, kind in images(folder).items()}


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image(path, tmp_path):
    if IMAGES[path] == "grey":
        assert_values_are_simpleitks(path, tmp_path)
        return
    with pytest.raises((ValueError, OSError), match="fix:"):
        pe.read_dicom(path)
    pytest.skip(f"not offered: images with {IMAGES[path]}; read_dicom reads one grey slice")
