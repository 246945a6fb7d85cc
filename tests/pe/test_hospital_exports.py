"""CT as hospitals export it is packed as the files say, or refused by name; never wrong in silence."""

import re

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("pydicom")
pytest.importorskip("gdcm")
pytest.importorskip("array_record")

from helpers.hospital_exports import CASES, packed  # noqa: E402

from tpukit import pe  # noqa: E402
from tpukit.datasets import PackOptions  # noqa: E402

AIR = -1000
SERIAL = PackOptions(workers=1)


def test_there_are_54_cases():
    assert len(CASES) == 54


@pytest.mark.parametrize("name", CASES)
def test_an_export_is_packed_as_its_files_say_or_refused_by_name(name, tmp_path):
    case = CASES[name]
    truth = case.write(tmp_path / "dicom")
    if case.refused:
        with pytest.raises((ValueError, OSError), match=case.refused):
            packed(tmp_path / "dicom", tmp_path / "pack", options=SERIAL)
        return
    found, printed = packed(tmp_path / "dicom", tmp_path / "pack", options=SERIAL)
    assert found.images == truth.images
    for series, units in truth.units.items():
        # Padding is stored as -3024 HU, or anything else below air.
        difference = np.maximum(found.units[series], AIR) - np.maximum(units, AIR)
        assert abs(difference).max() <= case.tolerance
    assert re.search(case.says, printed)


def test_a_jpeg_of_12_bits_still_needs_our_decoder(tmp_path):
    """Remove `jpeg_12_bits` when this fails: pydicom decodes such files by itself."""
    import pydicom

    CASES["jpeg_extended_12_bits"].write(tmp_path)
    file = pydicom.dcmread(tmp_path / "a00.dcm")
    with pytest.raises(RuntimeError, match="Unable to decode"):
        pydicom.pixels.pixel_array(file, raw=True, decoding_plugin="gdcm")


def test_a_table_of_optical_densities_is_no_hounsfield_units(tmp_path):
    import pydicom

    CASES["modality_lut"].write(tmp_path)
    file = pydicom.dcmread(tmp_path / "a00.dcm")
    file.ModalityLUTSequence[0].ModalityLUTType = "OD"
    file.save_as(tmp_path / "a00.dcm")
    with pytest.raises(ValueError, match="RescaleType OD"):
        pe.read_dicom(tmp_path / "a00.dcm")
