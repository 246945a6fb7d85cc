"""Convert each type that may contain the bytes of an image file to bytes.

    b"\\xff\\xd8...", bytearray, memoryview               bytes
    {"bytes": b"...", "path": "a.jpg"}                   an image of the Hugging Face hub
    io.BytesIO, an open file, a member of an archive     file objects that can be read again
    (N,), (N, 1) or (1, N) uint8                         from cv2.imencode, torchvision, h5py
    a binary scalar of pyarrow, numpy.void               from tables and HDF5 files

Pillow images and arrays of pixels are not converted.
"""

import io
import math
from collections.abc import Mapping
from pathlib import Path

from tpukit.essentials.display import InvalidTypeError

_LONGEST_PATH = 4096  # bytes, PATH_MAX of Linux


def file_bytes(image):
    """Return the bytes of an image's file; return anything else, such as pixels, unchanged.

    Raises:
        TypeError: a file object cannot be read again, or is opened for text.
        OSError: the file at the path in a dict cannot be read.
    """
    if hasattr(image, "as_py"):  # a scalar of pyarrow
        image = image.as_py()
    if _is_of_the_hub(image):
        image = _bytes_of_the_hub(image)
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if hasattr(image, "getbands"):  # a Pillow image, which may have `read` as well
        return image
    if hasattr(image, "read"):
        return _read(image)
    if _is_row_of_bytes(image):
        return _bytes_of_row(image)
    return image


def is_image(value) -> bool:
    """Return True for an image in a table's cell; False for a path, even if stored as bytes."""
    if isinstance(value, bytes):
        # A path may be bytes too. POSIX allows any byte in a path except NUL.
        return len(value) > _LONGEST_PATH or b"\0" in value or _is_opened(value)
    if isinstance(value, Mapping):
        return _is_of_the_hub(value)
    is_object = any(hasattr(value, name) for name in ("getbands", "read", "as_py"))
    is_array = getattr(value, "ndim", 0) > 0 or _is_row_of_bytes(value)
    return isinstance(value, bytearray | memoryview) or is_object or is_array


def _is_of_the_hub(value) -> bool:
    """Return whether a value is an undecoded image of Hugging Face, a dict of bytes and path."""
    return isinstance(value, Mapping) and set() < value.keys() <= {"bytes", "path"}


def _bytes_of_the_hub(image: Mapping):
    # As from datasets.Image(decode=False). An image in a file has a path, and its bytes are None.
    contents = image.get("bytes")
    if contents is None:
        contents = Path(image["path"]).read_bytes()
    return contents


def _bytes_of_row(row):
    """Return an array as bytes if it contains an image file; else return it unchanged."""
    array = row
    if hasattr(row, "detach"):  # a tensor
        array = row.detach().cpu().numpy()
    data = array.tobytes()
    # A row of uint8 may also be pixels. It is a file if Pillow recognises its beginning.
    if array.dtype.kind == "V" or _is_opened(data):
        return data
    return row


def _read(file) -> bytes:
    """Return all bytes of a file object, independent of its current position.

    Raises:
        TypeError: the file is opened for text, or its position cannot be moved.
    """
    can_seek = hasattr(file, "seekable") and file.seekable()
    if not can_seek or isinstance(file, io.TextIOBase):
        raise InvalidTypeError(
            f"a {type(file).__name__} cannot be rewound, or is opened as text",
            fix="pass its bytes, before other code reads it: image.read(); "
            'for a file opened as text: open(path, "rb").read()',
        )
    file.seek(0)  # other code, such as PIL.Image.open, may have moved the position
    return file.read()


def _is_row_of_bytes(image) -> bool:
    """Return whether an array or tensor may contain the bytes of a file instead of pixels."""
    dtype = str(getattr(image, "dtype", "")).removeprefix("torch.")
    if dtype.startswith(("void", "|V")):  # numpy.void: raw bytes, as h5py returns them
        return getattr(image, "ndim", 1) == 0
    shape = tuple(getattr(image, "shape", ()))
    if dtype != "uint8" or len(shape) not in (1, 2):
        return False
    return math.prod(shape) == max(shape)  # one side has all the elements


def _is_opened(data: bytes) -> bool:
    """Return whether Pillow, with its plugins, recognises the beginning of a file."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)):
            return True
    except Exception:  # decoders raise errors of many kinds
        return False
