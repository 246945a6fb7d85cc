"""CT as hospitals export it is packed as the files say, or refused by name; never wrong in silence."""

import re
import subprocess
import sys

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


@pytest.mark.parametrize("name", ["enhanced_ct", "enhanced_ct_scale_per_frame"])
def test_frames_become_slices_as_the_refusal_says(name, tmp_path):
    case = CASES[name]
    truth = case.write(tmp_path / "inner" / "dicom")
    with pytest.raises(ValueError, match=r"pe\.split_enhanced\(folder, to\) makes slices"):
        pe.read_dicom(tmp_path / "inner" / "dicom" / "all.dcm")
    for _ in range(2):
        assert pe.split_enhanced(tmp_path / "inner", tmp_path / "slices") == 8
    found, printed = packed(tmp_path / "slices", tmp_path / "pack", options=SERIAL)
    assert "no RescaleSlope" not in printed
    (series,) = truth.images
    order = np.argsort(np.random.default_rng(5).permutation(8)) + 1
    assert found.images == {series: [f"{truth.images[series][0]}:{frame}" for frame in order]}
    assert abs(found.units[series] - truth.units[series]).max() <= case.tolerance


def test_an_enhanced_file_of_a_single_frame_is_read_with_the_scale_of_its_frame(tmp_path):
    import pydicom

    truth = CASES["enhanced_ct"].write(tmp_path / "dicom")
    path = tmp_path / "dicom" / "all.dcm"
    file = pydicom.dcmread(path)
    file.PixelData = file.PixelData[: len(file.PixelData) // file.NumberOfFrames]
    file.NumberOfFrames = 1
    file.PerFrameFunctionalGroupsSequence = file.PerFrameFunctionalGroupsSequence[:1]
    file.save_as(path)
    with pytest.raises(ValueError, match=r"pe\.split_enhanced\(folder, to\) makes slices"):
        pe.read_dicom(path)
    assert pe.split_enhanced(tmp_path / "dicom", tmp_path / "slices") == 1
    (slice_,) = (tmp_path / "slices").rglob("*.dcm")
    (units,) = truth.units.values()
    assert min(abs(pe.read_dicom(slice_) - one).max() for one in units) <= 0.5


def test_files_named_by_identifiers_without_an_ending_get_separate_folders(tmp_path):
    CASES["enhanced_ct"].write(tmp_path / "dicom")
    file = tmp_path / "dicom" / "all.dcm"
    for name in ("1.2.840.4", "1.2.840.5"):
        (tmp_path / "dicom" / name).write_bytes(file.read_bytes())
    file.rename(tmp_path / "dicom" / "last.DICOM")
    assert pe.split_enhanced(tmp_path / "dicom", tmp_path / "slices") == 24
    folders = [path.parent.name for path in sorted((tmp_path / "slices").rglob("00008.dcm"))]
    assert folders == ["1.2.840.4", "1.2.840.5", "last"]


def test_frames_that_are_no_ct_are_left_out(tmp_path):
    import pydicom

    CASES["enhanced_ct"].write(tmp_path / "dicom")
    file = pydicom.dcmread(tmp_path / "dicom" / "all.dcm")
    file.SOPClassUID = "1.2.840.10008.5.1.4.1.1.7.2"  # pictures of a screen
    del file.SharedFunctionalGroupsSequence, file.PerFrameFunctionalGroupsSequence
    file.save_as(tmp_path / "dicom" / "screens.dcm")
    assert pe.split_enhanced(tmp_path / "dicom", tmp_path / "slices") == 8


def test_a_frame_without_a_place_is_refused(tmp_path):
    import pydicom

    CASES["enhanced_ct"].write(tmp_path / "dicom")
    file = pydicom.dcmread(tmp_path / "dicom" / "all.dcm")
    del file.PerFrameFunctionalGroupsSequence[2].PlanePositionSequence
    file.save_as(tmp_path / "dicom" / "all.dcm")
    with pytest.raises(ValueError, match="frame 3 has no PlanePositionSequence"):
        pe.split_enhanced(tmp_path / "dicom", tmp_path / "slices")


def test_a_truncated_file_of_frames_is_named(tmp_path):
    CASES["enhanced_ct"].write(tmp_path / "dicom")
    file = tmp_path / "dicom" / "all.dcm"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(OSError, match=r"(?s)all.dcm cannot be decoded.*fix: +copy this file again"):
        pe.split_enhanced(tmp_path / "dicom", tmp_path / "slices")


@pytest.mark.parametrize(
    "damage", [(b"\x02\0\x10\0UI", b"\x02\0\x10\0UB"), (b"IS\2\x008 ", b"IS\2\x008\7")]
)
def test_a_file_of_frames_with_a_damaged_header_is_named(tmp_path, damage):
    CASES["enhanced_ct"].write(tmp_path / "dicom")
    file = tmp_path / "dicom" / "all.dcm"
    whole = file.read_bytes()
    assert damage[0] in whole
    file.write_bytes(whole.replace(*damage, 1))
    with pytest.raises(OSError, match=r"(?s)all.dcm cannot be decoded.*fix: +copy this file again"):
        pe.split_enhanced(tmp_path / "dicom", tmp_path / "slices")


def test_compressed_frames_become_slices(tmp_path):
    import pydicom

    truth = CASES["enhanced_ct"].write(tmp_path / "dicom")
    file = pydicom.dcmread(tmp_path / "dicom" / "all.dcm")
    file.compress(pydicom.uid.RLELossless, generate_instance_uid=False)
    file.save_as(tmp_path / "dicom" / "all.dcm")
    assert pe.split_enhanced(tmp_path / "dicom", tmp_path / "slices") == 8
    found, _ = packed(tmp_path / "slices", tmp_path / "pack", options=SERIAL)
    (series,) = truth.units
    assert abs(found.units[series] - truth.units[series]).max() <= 0.5


def test_a_jpeg_of_12_bits_still_needs_our_decoder(tmp_path):
    """Remove `jpeg_12_bits` when this fails: pydicom decodes such files by itself."""
    import pydicom

    CASES["jpeg_extended_12_bits"].write(tmp_path)
    file = pydicom.dcmread(tmp_path / "a00.dcm")
    with pytest.raises(RuntimeError, match="Unable to decode"):
        pydicom.pixels.pixel_array(file, raw=True, decoding_plugin="gdcm")


def test_threads_that_read_their_first_file_at_once_all_have_the_decoder():
    """Packing reads ahead with several threads, and an error in any of them ends it."""
    program = """
import sys, threading, pydicom.pixels
from tpukit.pe import jpeg_12_bits
sys.setswitchinterval(1e-6)
together, errors = threading.Barrier(16), []
def add():
    together.wait()
    try:
        jpeg_12_bits.add_decoder()
        assert pydicom.pixels.get_decoder(jpeg_12_bits.SYNTAX)
    except Exception as error:
        errors.append(error)
threads = [threading.Thread(target=add) for _ in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_table_of_optical_densities_is_no_hounsfield_units(tmp_path):
    import pydicom

    CASES["modality_lut"].write(tmp_path)
    file = pydicom.dcmread(tmp_path / "a00.dcm")
    file.ModalityLUTSequence[0].ModalityLUTType = "OD"
    file.save_as(tmp_path / "a00.dcm")
    with pytest.raises(ValueError, match="RescaleType OD"):
        pe.read_dicom(tmp_path / "a00.dcm")
