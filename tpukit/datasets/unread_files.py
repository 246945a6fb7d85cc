"""Recognise kinds of files that Pillow cannot open, and give the line that reads them.

    "II*", a directory of tags      a TIFF of 64 x 64 pixels, 13 channels    tifffile.imread(file)
    "\\x93NUMPY"                     an array of numpy                        numpy.load(file)
    784 bytes of no format          pixels without a header                  numpy.frombuffer(...)

If Pillow cannot open a file that begins like one of its formats, the file is damaged, except for a
complete TIFF. `unread_kind` returns None for a damaged file, which must be copied again.
"""

import io
import math
from typing import NamedTuple

from tpukit.essentials.display import InvalidValueError

_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # "+" for BigTIFF, of more than 4 GiB
_LEAST_SIDE = 8  # pixels; the size of a shorter file is often that of a small square by chance
_WIDTH, _HEIGHT, _CHANNELS = 256, 257, 277  # tags of a TIFF
_PIECES = ((273, 279), (324, 325))  # tags of offsets and lengths, of strips and of tiles


class UnreadKind(NamedTuple):
    """The name of a kind of file that Pillow cannot open, and the fix."""

    name: str
    fix: str


def _items(image: str) -> str:
    return f"pack([({image}, label) for file, label in zip(files, labels)], ...)"


def _opener(package: str, code: str) -> str:
    return f"%pip install {package}; then {code}, and call again"


_WINDOW = "options=tpukit.PackOptions(window=(low, high)) names the values of black and white"
_HEIC = UnreadKind(
    "HEIC", _opener("pillow-heif", "import pillow_heif; pillow_heif.register_heif_opener()")
)
_JPEG_XL = UnreadKind("JPEG XL", _opener("pillow-jxl-plugin", "import pillow_jxl"))


class _Start(NamedTuple):
    """The bytes that identify a kind of file."""

    place: int  # the offset of the first of these bytes in the file
    data: bytes
    kind: UnreadKind


_NUMPY = UnreadKind("an array of numpy", f"{_items('numpy.load(file)')}; {_WINDOW}")
_DICOM = UnreadKind(
    "DICOM",
    f"{_items('pydicom.dcmread(file).pixel_array')}; {_WINDOW}; "
    "tpukit.pe.pack_dicom packs CT exams",
)
_HDF5 = UnreadKind("HDF5", "pack(list(zip(h5py.File(file)['images'], labels)), ...)")
_ZIP = UnreadKind("a zip archive", "unpack it first: unzip")
_POINTER = UnreadKind("a pointer of Git LFS", "git lfs pull fetches it")
_STARTS = (
    _Start(0, b"\x93NUMPY", _NUMPY),
    _Start(128, b"DICM", _DICOM),  # after a preamble: DICOM PS3.10, section 7.1
    # The brand of the file, after the length of its first box: ISO/IEC 23008-12.
    _Start(4, b"ftyphei", _HEIC),
    _Start(4, b"ftyphev", _HEIC),
    _Start(4, b"ftypmif1", _HEIC),
    # A codestream alone, and one in a container: ISO/IEC 18181-1 and -2.
    _Start(0, b"\xff\x0a", _JPEG_XL),
    _Start(0, b"\0\0\0\x0cJXL ", _JPEG_XL),
    _Start(0, b"\x89HDF\r\n\x1a\n", _HDF5),
    _Start(0, b"PK\x03\x04", _ZIP),
    _Start(0, b"version https://git-lfs", _POINTER),
)


def unread_kind(data: bytes, *, is_opened: bool) -> UnreadKind | None:
    """Return the kind of a file that Pillow could not decode; None for a damaged image.

    Args:
        data: the bytes of the file.
        is_opened: True if Pillow has read the header of the file, and failed after that.
    """
    data = bytes(data)
    # In this order: the first bytes of a known kind are certain, and the guess by the contents is
    # the least certain.
    for start in _STARTS:
        if data.startswith(start.data, start.place):
            # If the plugin of such a kind is registered and has read the header, it is damaged.
            is_damaged = is_opened and start.kind in (_HEIC, _JPEG_XL)
            return None if is_damaged else start.kind
    if is_opened:
        return None
    if data.startswith(_TIFF_STARTS):
        return _kind_of_tiff(data)
    if _begins_as_image(data):
        return None
    return _kind_of_pixels(data)


def refuse_unread(data: bytes, *, is_opened: bool, error: Exception) -> None:
    """Raise ValueError if Pillow does not support the kind of an undecodable file.

    Args:
        data, is_opened: as for `unread_kind`.
        error: the error of Pillow, which becomes the cause.
    """
    kind = unread_kind(data, is_opened=is_opened)
    if kind is not None:
        raise InvalidValueError(
            f"Pillow does not open this kind of file: {kind.name}",
            found=f"{len(data):,} bytes, which begin {bytes(data[:8])!r}",
            fix=kind.fix,
        ) from error


def _begins_as_image(data: bytes) -> bool:
    """Return whether one of Pillow's formats begins with these bytes."""
    from PIL import Image

    Image.init()
    tests = [accept for _, accept in Image.OPEN.values() if accept is not None]
    start = data[:16].ljust(16, b"\0")  # some of these functions expect 16 bytes
    return any(accept(start) for accept in tests)


def _kind_of_tiff(data: bytes) -> UnreadKind | None:
    """Return the kind of a complete TIFF; None if a part is missing."""
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    try:
        is_large = data[2:3] == b"+" or data[3:4] == b"+"
        tags = ImageFileDirectory_v2(data[: 16 if is_large else 8])
        file = io.BytesIO(data)
        file.seek(tags.next)
        tags.load(file)
        places, lengths = next(piece for piece in _PIECES if piece[0] in tags)
        pieces = zip(tags[places], tags[lengths], strict=True)
        is_whole = all(place + length <= len(data) for place, length in pieces)
        pixels = f"{tags[_WIDTH]} x {tags[_HEIGHT]} pixels"
        channels = tags.get(_CHANNELS, 1)
    except Exception:  # Pillow raises many types of errors for damaged tags
        return None
    if not is_whole:
        return None
    image = "tifffile.imread(file)"
    if channels > 3:
        # An example for Sentinel-2, as in EuroSAT: bands 4, 3 and 2 are red, green and blue.
        image += "[..., [3, 2, 1]]"
    noun = "channel" if channels == 1 else "channels"
    fix = f"%pip install tifffile; {_items(image)}; {_WINDOW}"
    return UnreadKind(f"a TIFF of {pixels}, {channels} {noun}", fix)


def _kind_of_pixels(data: bytes) -> UnreadKind | None:
    """Return the kind of a file whose size is that of the pixels of a square image; else None."""
    for channels, shape in ((1, "{0}, {0}"), (3, "{0}, {0}, 3")):
        side = math.isqrt(len(data) // channels)
        is_square = channels * side * side == len(data)
        # A file of a single repeated value, such as zeros, is damaged.
        if side < _LEAST_SIDE or not is_square or len(set(data)) == 1:
            continue
        shape = shape.format(side)
        image = f"numpy.frombuffer(data, numpy.uint8).reshape({shape})"
        fix = f"pack([({image}, label) for data, label in source], ...)"
        return UnreadKind(f"({shape}) pixels without a header?", fix)
    return None
