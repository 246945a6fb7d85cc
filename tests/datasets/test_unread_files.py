"""Files that are whole and that Pillow does not open are named; damaged images stay damaged."""

import io

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("PIL.Image")

from helpers.pictures import tiff_of  # noqa: E402
from PIL import Image, ImageFile  # noqa: E402

from tpukit.datasets.decoding import decode  # noqa: E402


def saved(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


RANDOM = np.random.default_rng(0).integers(1, 255, 28 * 28 * 39, np.uint8)
BANDS = tiff_of(RANDOM[: 28 * 28 * 26].view(np.uint16).reshape(28, 28, 13))
UNREAD = {
    "a TIFF of 28 x 28 pixels, 13 channels": BANDS,
    "an array of numpy": saved(RANDOM),
    "DICOM": bytes(128) + b"DICM" + bytes(900),
    "HEIC": b"\0\0\0\x18ftypheic" + bytes(900),
    "JPEG XL": b"\xff\x0a" + bytes(900),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(900),
    "a pointer of Git LFS": b"version https://git-lfs\noid sha256:4d7a",
    "(28, 28) pixels without a header?": RANDOM[: 28 * 28].tobytes(),
    "(28, 28, 3) pixels without a header?": RANDOM[: 28 * 28 * 3].tobytes(),
}


@pytest.mark.parametrize("kind", UNREAD)
def test_a_whole_file_of_a_kind_that_pillow_does_not_open_is_named_and_not_called_damaged(kind):
    with pytest.raises(ValueError, match="Pillow does not open this kind of file: ") as error:
        decode(UNREAD[kind])
    assert error.value.fact.endswith(kind)
    assert "copy it again" not in error.value.fix


@pytest.mark.parametrize("length", [40, 200, len(BANDS) - 1])
def test_a_tiff_whose_end_is_missing_is_damaged_whatever_its_channels(length):
    with pytest.raises(ValueError, match="not a whole image"):
        decode(BANDS[:length])


@pytest.mark.parametrize("data", [bytes(28 * 28), b"\xff\xd8\xff" + bytes(781)])
def test_zeros_and_the_start_of_an_image_are_no_pixels_without_a_header(data):
    with pytest.raises(ValueError, match="not a whole image"):
        decode(data)


def test_a_damaged_file_of_a_plugin_that_is_registered_is_damaged(monkeypatch):
    class Heif(ImageFile.ImageFile):
        format = "HEIF"

        def _open(self):
            self._size = (8, 8)
            self._mode = "RGB"

        def load(self):
            raise OSError("the end is missing")

    monkeypatch.setitem(Image.OPEN, "HEIF", (Heif, lambda start: start[4:12] == b"ftypheic"))
    monkeypatch.setattr(Image, "ID", [*Image.ID, "HEIF"])
    with pytest.raises(ValueError, match="not a whole image: the end is missing"):
        decode(UNREAD["HEIC"])


def test_the_fix_for_jpeg_xl_imports_the_module_of_its_package():
    with pytest.raises(ValueError, match="JPEG XL") as error:
        decode(UNREAD["JPEG XL"])
    fix = "%pip install pillow-jxl-plugin; then import pillow_jxl, and call again"
    assert error.value.fix == fix
    with pytest.raises(ValueError, match="HEIC") as error:
        decode(UNREAD["HEIC"])
    assert "then import pillow_heif; pillow_heif.register_heif_opener(), and" in error.value.fix
