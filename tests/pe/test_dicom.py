"""read_dicom: what a file leaves out, pads, compresses or has lost is read right, or named with its fix."""

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pydicom = pytest.importorskip("pydicom")

from pydicom import uid  # noqa: E402
from pydicom.encaps import encapsulate  # noqa: E402

from tpukit.pe import read_dicom, three_windows  # noqa: E402
from tpukit.pe.phantoms.dicom_files import Place, write_dicom  # noqa: E402

ROOT = Path(__file__).parents[2]
UNITS = np.linspace(-1000, 1500, 64 * 48).round().reshape(64, 48)


def slice_file(folder, change=None, units=UNITS):
    """Write a slice, changed by `change(dataset)`, and return its path."""
    path = folder / "slice.dcm"
    write_dicom(path, units, Place("1.2", "1.2.3", "1.2.3.4", number=1, z=5.0, pixel=0.7))
    if change:
        file = pydicom.dcmread(path)
        change(file)
        file.save_as(path, enforce_file_format=True)
    return path


def read_quietly(path):
    """Read a slice without pydicom's own warnings and logs about what is broken in it."""
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_dicom(path)


def as_unsigned(padding):
    """Return a change: the two columns on the left are padding, all is stored unsigned."""

    def change(file):
        stored = file.pixel_array.astype(np.uint16)
        stored[:, :2] = padding % 65536
        file.PixelData, file.PixelRepresentation = stored.tobytes(), 0
        file.add_new("PixelPaddingValue", "US", padding % 65536)

    return change


def test_what_is_written_is_read(tmp_path):
    units = read_dicom(slice_file(tmp_path))
    assert units.dtype == np.float32
    assert np.array_equal(units, UNITS)


@pytest.mark.parametrize("padding", [-2000, 65535, 40000])
def test_padding_that_is_stored_unsigned_is_black_in_every_window(tmp_path, padding):
    units = read_dicom(slice_file(tmp_path, as_unsigned(padding)))
    assert np.array_equal(units[:, 2:], UNITS[:, 2:])
    assert (units[:, :2] <= -1000).all()
    assert not three_windows(units)[:, :2, 1:].any()


def test_padding_that_reads_as_air_is_left_as_it_is(tmp_path):
    assert (read_dicom(slice_file(tmp_path, as_unsigned(0)))[:, :2] == -1024).all()


def test_a_range_of_padding_is_padding(tmp_path):
    def change(file):
        as_unsigned(-2000)(file)
        file.add_new("PixelPaddingRangeLimit", "US", 65535)
        file.PixelData = file.pixel_array.clip(max=63600).tobytes()

    assert (read_dicom(slice_file(tmp_path, change))[:, :2] == -3024).all()


def delete(*names):
    return lambda file: [delattr(file, name) for name in names]


def empty(*names):
    return lambda file: [setattr(file, name, None) for name in names]


@pytest.mark.parametrize(
    ("change", "expected", "said"),
    [
        (delete("RescaleIntercept"), UNITS + 1024, "no RescaleIntercept: 0 is used"),
        (empty("RescaleIntercept"), UNITS + 1024, "no RescaleIntercept: 0 is used"),
        (empty("RescaleSlope"), UNITS, "no RescaleSlope: 1 is used"),
        (
            delete("RescaleSlope", "RescaleIntercept"),
            UNITS + 1024,
            "no RescaleSlope and no RescaleIntercept: 1 and 0 is used",
        ),
    ],
)
def test_what_is_left_out_is_dicoms_default_and_said(tmp_path, change, expected, said):
    with pytest.warns(UserWarning, match=said):
        units = read_dicom(slice_file(tmp_path, change))
    assert np.array_equal(units, expected)


@pytest.mark.parametrize(("modality", "slope"), [("MR", None), ("MR", 1), ("PT", 1.7)])
def test_another_modality_is_no_ct_even_with_a_slope(tmp_path, modality, slope):
    def change(file):
        file.Modality, file.RescaleSlope = modality, slope

    with pytest.raises(
        ValueError, match=rf"is not a CT slice\n  found: modality {modality}\n  fix:"
    ):
        read_dicom(slice_file(tmp_path, change))


@pytest.mark.parametrize(
    ("name", "value"), [("Slope", "nan"), ("Slope", "inf"), ("Slope", 0), ("Intercept", "nan")]
)
def test_a_scale_that_gives_every_pixel_one_value_or_none_is_refused(tmp_path, name, value):
    with pydicom.config.disable_value_validation():
        file = slice_file(tmp_path, lambda file: setattr(file, f"Rescale{name}", value))
        with pytest.raises(
            ValueError, match=f"is not a CT slice\n  found: Rescale{name} {float(value)}\n  fix:"
        ):
            read_dicom(file)


def test_a_slice_that_does_not_say_its_modality_is_taken_for_ct_with_a_word(tmp_path):
    with pytest.warns(UserWarning, match="has no Modality; it is treated as CT"):
        units = read_dicom(slice_file(tmp_path, delete("Modality")))
    assert np.array_equal(units, UNITS)
    with pytest.raises(ValueError, match="neither Modality nor RescaleSlope is given"):
        read_dicom(
            slice_file(
                tmp_path, lambda file: [delete("Modality")(file), delete("RescaleSlope")(file)]
            )
        )


@pytest.mark.parametrize(
    ("syntax", "package"),
    [
        (uid.JPEGLosslessSV1, "python-gdcm"),
        (uid.JPEGLSLossless, "python-gdcm"),
        (uid.HTJ2KLossless, "pylibjpeg pylibjpeg-openjpeg"),
        (uid.MPEG2MPML, "convert it"),
    ],
)
def test_a_missing_decoder_is_named_with_the_package_that_has_it(tmp_path, syntax, package):
    def change(file):
        file.PixelData = encapsulate([b"not looked at"])
        file.file_meta.TransferSyntaxUID = syntax

    path = slice_file(tmp_path, change)
    # A process without the packages: None in sys.modules is what an import finds where nothing is installed.
    program = f"""import sys
sys.modules.update(dict.fromkeys(["gdcm", "libjpeg", "openjpeg", "pylibjpeg", "jpeg_ls"]))
from tpukit.pe import read_dicom
try:
    read_dicom({str(path)!r})
except ImportError as error:
    print(error)"""
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert printed.startswith(f"{path} is compressed")
    assert f"found: {syntax.name} ({syntax})" in printed
    assert package in printed.splitlines()[-1]


@pytest.mark.parametrize("kept", [0.05, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_that_is_cut_off_is_named(tmp_path, kept, compressed):
    path = slice_file(
        tmp_path, (lambda file: file.compress(uid.RLELossless)) if compressed else None
    )
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(OSError, match=f"{path} cannot be decoded .*\n  found: .*\n  fix:"):
        read_quietly(path)


def test_no_change_of_a_byte_gets_past_with_another_error(tmp_path):
    data = slice_file(tmp_path, lambda file: file.compress(uid.RLELossless)).read_bytes()
    rng, messages = np.random.default_rng(0), []
    for _ in range(150):
        broken = bytearray(data)
        broken[rng.integers(132, 1400)] = rng.integers(256)
        (tmp_path / "broken.dcm").write_bytes(broken)
        try:
            read_quietly(tmp_path / "broken.dcm")
        except (OSError, ValueError, ImportError) as error:
            messages.append(str(error))
    assert messages
    assert [message for message in messages if "broken.dcm" not in message] == []


def test_a_file_that_is_not_there_is_not_called_damaged(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_dicom(tmp_path / "nothing.dcm")
