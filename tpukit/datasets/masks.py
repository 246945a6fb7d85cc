"""Masks: the class number of every pixel, stored losslessly with the image.

`join` makes one item of the image's file and the mask's file, and `decode_masked` returns the mask
as a fourth channel:

    stored     "tpukit image + mask", length of the image, image.jpg, mask.png
    decoded    (H, W, 4) uint8: red, green, blue, class number

So a batch is a single uint8 array, which is cached, shared between processes and sent to the device
like a batch without masks. On the device, `tpukit.essentials.data.sources.split_masks` separates
images and masks.
"""

import io
from typing import NamedTuple

from tpukit.datasets.image_modes import coded, orientation, turn, turn_of, upright
from tpukit.datasets.pixel_form import as_image, as_pixels, resized
from tpukit.datasets.unread_files import refuse_unread
from tpukit.essentials.display import InvalidValueError, TpukitError, first_few

_MASKED = b"tpukit image + mask\0"  # no image format begins with these bytes
_LENGTH = 8  # the number of bytes after `_MASKED`, which encode the length of the image's file
_PNG = b"\x89PNG"
_PNG_NOTES = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # chunks that may contain an orientation
_UPRIGHT = 1  # EXIF's orientation of an image that is not turned
# Pillow scales the values of grey files with 2 or 4 bits up to 255, so class 3 becomes 255 or 51.
# The factors are 255 / 3 and 255 / 15.
_GREY_STEPS = {"L;2": 85, "L;4": 17}


class _Parts(NamedTuple):
    """The bytes of two files."""

    image: bytes
    mask: bytes


def is_masked(data) -> bool:
    """Return whether these are the bytes of an image and its mask."""
    return data[: len(_MASKED)] == _MASKED


def join(image: bytes, mask: bytes) -> bytes:
    """Return the files of an image and its mask as one item.

    The decoder turns the image by its EXIF orientation. A mask without EXIF must be turned in the
    same way. `join` turns the mask if its shape is that of the image before turning.

    Raises:
        ValueError: the EXIF data turn the image, and its shape does not show whether the mask is
            turned already.
    """
    from PIL import Image

    how = orientation(image) if image[:2] == b"\xff\xd8" else _turn_of_other(image)
    if how != _UPRIGHT and _opened(mask, turn_of, otherwise=_UPRIGHT) == _UPRIGHT:
        with Image.open(io.BytesIO(image)) as file:
            size = file.size
        mask = encode_mask(_turned_with(open_mask(mask), size, how))
    length = len(image).to_bytes(_LENGTH, "little")
    return b"".join([_MASKED, length, image, mask])


def _turn_of_other(image: bytes) -> int:
    """Return the EXIF orientation, 1 to 8, of an image file that is not a JPEG.

    A PNG without the chunks that may have an orientation is not opened, to save time.
    """
    if image[:4] == _PNG and not any(note in image for note in _PNG_NOTES):
        return _UPRIGHT
    return _opened(image, turn_of, otherwise=_UPRIGHT)


def parts_of(data: bytes) -> tuple:
    """Return the bytes of the image's file and of the mask's file, from the result of `join`."""
    start = len(_MASKED) + _LENGTH
    end = start + int.from_bytes(data[len(_MASKED) : start], "little")
    return _Parts(data[start:end], data[end:])


def palette_of(mask: bytes) -> list[int]:
    """Return the palette of a mask's file as [red, green, blue, red, ...]; [] without a palette."""
    palette = _opened(mask, lambda image: image.getpalette(), otherwise=None)
    return palette or []


def _opened(data: bytes, ask, *, otherwise):
    """Open the image in a file's bytes and return `ask(image)`, or `otherwise` after an error."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as file:
            return ask(file)
    except Exception:
        return otherwise  # the decoder reports the damage


def _turned_with(mask, size: tuple[int, int], how: int):
    """Turn a mask by the EXIF orientation of its image if it has the shape of the unturned image.

    Raises:
        ValueError: the turned image has the same shape, so the shape of the mask shows nothing.
    """
    width, height = size  # of the image as stored
    as_stored = (height, width)
    # EXIF orientations 5 to 8 exchange height and width.
    as_turned = (width, height) if how >= 5 else as_stored
    if as_stored == as_turned:
        raise InvalidValueError(
            "the EXIF data turn the image, and it is not known whether the mask is already turned",
            found=f"orientation {how}, {width} x {height} pixels",
            fix="save the image upright: ImageOps.exif_transpose(image).save(file)",
        )
    if mask.shape != as_stored:
        return mask
    return turn(mask[:, :, None], how)[:, :, 0]


def decode_masked(data, size: tuple[int, int] | None, decode, *, resize: str, check: bool):
    """Return the image in channels 0 to 2 and its mask in channel 3, (H, W, 4) uint8.

    Args:
        data: the result of `join`.
        size: (height, width) in pixels; None keeps the size of the image.
        decode: a function; `decode(data, size)` must return the pixels of the image, (H, W, 3).
        resize: as for `PixelForm`.
        check: True to raise ValueError if image and mask differ in size. With True, the image is
            decoded at its full size, which takes longer.
    """
    parts = parts_of(data)
    mask = open_mask(parts.mask)
    image = decode(parts.image, None if check else size)
    if check:
        check_alike(image, mask)
    return stack(resize_pixels(image, size, resize), mask, resize)


def stack(image, mask, resize: str = "stretch"):
    """Return an image (H, W, 3) with a mask of any size as its fourth channel, (H, W, 4) uint8."""
    import numpy
    from PIL import Image

    if mask.shape != image.shape[:2]:
        mask = resized(Image.fromarray(mask), image.shape[:2], resize, nearest=True)
    return numpy.concatenate([image, numpy.asarray(mask)[:, :, None]], axis=2)


def resize_pixels(pixels, size: tuple[int, int] | None, resize: str):
    """Resize (H, W, C) uint8: channels 0 to 2 bilinearly, channel 3 by nearest neighbour."""
    import numpy

    if size in (None, pixels.shape[:2]):
        return pixels
    image = as_pixels(resized(as_image(pixels[:, :, :3]), size, resize))
    if pixels.shape[2] < 4:
        return image
    return stack(image, numpy.ascontiguousarray(pixels[:, :, 3]), resize)


def check_alike(image, mask) -> None:
    """Raise ValueError unless an image and its mask have the same height and width."""
    if image.shape[:2] == mask.shape:
        return
    sizes = [f"{array.shape[1]} x {array.shape[0]}" for array in (image, mask)]
    resized = "mask.resize(image.size, PIL.Image.Resampling.NEAREST)"
    raise InvalidValueError(
        f"the image has {sizes[0]} pixels, and its mask {sizes[1]}",
        fix=f"save the mask at the size of its image: {resized}",
    )


def open_mask(data):
    """Return the mask in a file's bytes as (H, W) uint8; raise ValueError if it is not a mask."""
    from PIL import Image

    is_opened = False
    try:
        with Image.open(io.BytesIO(data)) as file:
            is_opened = True
            return read_mask(file)
    except TpukitError:
        raise
    except Exception as error:  # see `decoding`: decoders raise errors of many kinds
        refuse_unread(data, is_opened=is_opened, error=error)
        reason = str(error).partition(" file <")[0]
        raise ValueError(f"its mask is not a whole image: {reason}") from error


def read_mask(mask):
    """Return a mask as (H, W) uint8 class numbers.

    If the mask is a palette image, the class numbers are the indices in the palette.

    Args:
        mask: a Pillow image of one channel, or an array or tensor (H, W), (1, H, W) or (H, W, 1) of
            integers from 0 to 255.

    Raises:
        ValueError: the mask is a JPEG, is a colour image, has another shape, or has values that are
            not integers from 0 to 255.
    """
    import numpy

    if hasattr(mask, "getbands"):
        mask = _numbers_of_image(mask)
    if hasattr(mask, "detach"):  # a tensor, without importing torch to find out
        mask = mask.detach().cpu().numpy()
    mask = numpy.asarray(mask)
    if mask.ndim == 3 and mask.shape[0] == 1:
        mask = mask[0]
    elif mask.ndim == 3 and mask.shape[2] == 1:
        mask = mask[:, :, 0]
    if mask.ndim != 2 or not mask.size:
        of_colours = "sum(k * (mask == colour).all(-1) for k, colour in enumerate(colours))"
        of_channels = "mask.argmax(0), or, if the channels are last, mask.argmax(-1)"
        shape = mask.shape
        raise InvalidValueError(
            "a mask is (H, W), one class number for each pixel, but this one has the shape "
            f"{shape}",
            fix=f"if it has a colour per class: {of_colours};\n"
            f"if it has a channel per class: {of_channels}",
        )
    if mask.dtype == bool or mask.dtype == numpy.uint8:
        return numpy.ascontiguousarray(mask, numpy.uint8)
    # Every comparison with NaN is false, so NaN is wrong too.
    wrong = ~((mask >= 0) & (mask <= 255) & (mask == numpy.floor(mask)))
    if wrong.any():
        first = mask[wrong][0]
        raise InvalidValueError(
            "a mask holds class numbers, whole and from 0 to 255, but this one holds "
            f"{first} ({mask.dtype})",
            fix="make `values`, the sorted list of the values in all your masks, and pass "
            "numpy.searchsorted(values, mask);\n"
            "or, if negative values mark pixels that do not count, pass ignore_index=255 to the "
            "loss, and replace them: numpy.where(mask < 0, 255, mask)",
        )
    return mask.astype(numpy.uint8)


def _numbers_of_image(mask):
    """Return the class numbers of a Pillow image of one channel as (H, W)."""
    import numpy

    if mask.format in ("JPEG", "MPO"):
        two_classes = "PIL.Image.fromarray(numpy.asarray(mask) > 127)"
        raise InvalidValueError(
            "the mask is a JPEG, which blurs class numbers",
            fix="draw the mask again, and save it as PNG; or, if it has two classes, round its "
            f"values: {two_classes}",
        )
    if len(mask.getbands()) > 1:
        colours = [colour for _, colour in mask.getcolors(mask.width * mask.height)]
        raise InvalidValueError(
            f"a mask is one class number for each pixel, and this is an image of mode {mask.mode}",
            found=f"colours {first_few(colours, 4)}",
            fix="collect the colours of all classes in a list, colours, and number them in every "
            "mask: sum(k * (numpy.asarray(mask) == colour).all(-1) "
            "for k, colour in enumerate(colours));\n"
            "or, if the mask is grey, take one channel: mask.getchannel(0)",
        )
    # The division below undoes Pillow's scaling of grey files with 2 or 4 bits.
    storage = str(coded(mask))
    step = 1
    for mode, factor in _GREY_STEPS.items():
        if mode in storage:
            step = factor
            break
    return numpy.asarray(upright(mask)) // step


def encode_mask(mask) -> bytes:
    """Return (H, W) uint8 as the bytes of a PNG."""
    from PIL import Image

    file = io.BytesIO()
    # Level 1 is the fastest. Masks have large areas of one value, so higher levels save little.
    # `compress_level` does not change the pixels.
    Image.fromarray(mask).save(file, "PNG", compress_level=1)
    return file.getvalue()
