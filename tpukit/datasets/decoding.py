"""Decode one image: to exactly the pixels of Pillow, or faster to pixels close to them.

simplejpeg (libjpeg) decodes JPEGs; Pillow decodes everything else, and JPEGs in CMYK. Both decoders
accept damaged files, so this module checks more than they do: every warning of libjpeg, the
checksums of a PNG, the blocks of a GIF, and the number of pixels before they are decoded.
"""

import functools
import io
import math
import zlib

from tpukit.datasets.image_modes import orientation, to_form, turn
from tpukit.datasets.masks import decode_masked, is_masked
from tpukit.datasets.pixel_form import PixelForm, as_image, as_pixels, image_size, resized
from tpukit.datasets.unread_files import refuse_unread
from tpukit.essentials.display import InvalidValueError, TpukitError, explain, kind_of

_DEFAULT = PixelForm()


def decode(data: bytes, size=None, *, exact: bool = True, out=None, form: PixelForm = _DEFAULT):
    """Decode a JPEG, PNG or other image of Pillow into (H, W, 3) uint8 RGB in [0, 255].

    The image is turned as its EXIF says, transparent pixels become white, and only the first of
    several pages or frames is decoded. An image that is stored with a mask becomes (H, W, 4); the
    fourth channel is the class numbers, resized to the nearest pixel.

    With `exact` the whole image is decoded and then resized by Pillow's bilinear filter, bit for
    bit as `exif_transpose(Image.open(...)).convert("RGB").resize((size, size), BILINEAR)`. Without
    `exact` the JPEG decoder reduces the image by eighths while it decodes it, and the filter does
    the rest. This is three times as fast, and differs by 1.6 grey levels on average (256 to 128
    pixels).

    A JPEG is damaged if libjpeg warns. Pillow opens many damaged files, for example all of 101
    JPEGs with 512 bytes of zeros in their data.

    Args:
        data: the bytes of the file.
        size: height and width in pixels, one number for both or (height, width). None for the
            image's own size.
        exact: False for speed.
        out: a contiguous uint8 array for the pixels; None for a new one.
        form: `PixelForm(mode, resize, window)`. With mode "L" the result is (H, W, 1) uint8, with
            "I;16" (H, W, 2), the low byte of each value and the high byte. The default stretches
            images to the size.

    Returns:
        The pixels; `out` if it is given.

    Raises:
        ValueError: the image is damaged; Pillow does not open this kind of file; it has more pixels
            than `PIL.Image.MAX_IMAGE_PIXELS`; or more than 16 bits and no window is given.
    """
    sides = image_size(size)
    if is_masked(data):
        image = functools.partial(decode, exact=exact, form=form)
        pixels = decode_masked(data, sides, image, resize=form.resize, check=exact or sides is None)
    else:
        pixels = _decode_jpeg(data, sides, exact, out=out, mode=form.mode)
        if pixels is None or not _is_final(pixels, sides, form):
            pixels = _finish_with_pillow(data, pixels, sides, form)
    if out is None or pixels is out:
        return pixels
    if pixels.shape != out.shape:
        height, width = pixels.shape[:2]
        raise ValueError(f"the image is {width} x {height} pixels, and out is {out.shape}")
    out[:] = pixels
    return out


def _is_final(pixels, size: tuple[int, int] | None, form: PixelForm) -> bool:
    """Return whether pixels have this size, and the channels of the form."""
    height, width, channels = pixels.shape
    return size in (None, (height, width)) and channels == form.channels


def _finish_with_pillow(data: bytes, pixels, size: tuple[int, int] | None, form: PixelForm):
    """Return the pixels at `size`; decode the image if `pixels` is None."""
    if pixels is None:
        image = _decode_any(data, form)
    else:  # simplejpeg has shrunk it to the next eighth above `size`
        image = as_image(pixels)
    if form.mode == "L":
        image = image.convert("L")
    if size is not None:
        image = resized(image, size, form.resize)
    return as_pixels(image)


@functools.cache
def jpeg_decoder():
    """Return simplejpeg; None if it is not installed, with a warning that is printed once."""
    try:
        import simplejpeg
    except ImportError:
        slower = (
            "simplejpeg is not installed: Pillow decodes, at about half the speed, "
            "and does not notice all damage"
        )
        print(explain(slower, fix="pip install simplejpeg"))
        return None
    return simplejpeg


def _decode_jpeg(data: bytes, size: tuple[int, int] | None, exact: bool, *, out, mode: str):
    """Return the pixels of a JPEG, shrunk to no less than `size`; None if Pillow must decode it."""
    decoder = jpeg_decoder()
    # Not simplejpeg's is_jpeg, which also looks for the end of the file.
    if decoder is None or bytes(data[:2]) != b"\xff\xd8" or mode == "I;16":
        return None
    how_turned = orientation(data)
    min_height, min_width = (0, 0) if exact or size is None else size
    if how_turned >= 5:  # height and width are exchanged
        min_height, min_width = min_width, min_height
    least = {"min_height": min_height, "min_width": min_width}
    try:
        height, width, colors, _ = decoder.decode_jpeg_header(data, **least)
    except ValueError as error:
        _raise_if_corrupt(error, data)
        return None  # Pillow may still be able to open it
    if 64 * width * height > pixel_limit():  # these sizes may be shrunk, by eight at most
        full_height, full_width, *_ = decoder.decode_jpeg_header(data)
        _check_pixels(full_width, full_height)
    # simplejpeg rounds CMYK in another way than Pillow, so here it only looks for damage.
    as_cmyk = colors in ("CMYK", "YCCK")
    colorspace = "CMYK" if as_cmyk else "RGB"
    # libjpeg's grey differs from that of Pillow by rounding, unless the file is grey.
    if mode == "L" and not as_cmyk and (not exact or colors == "Gray"):
        colorspace = "GRAY"
    channels = 1 if colorspace == "GRAY" else 3
    is_final = not as_cmyk and how_turned == 1
    fits = is_final and out is not None and out.shape == (height, width, channels)
    how = {**least, "buffer": out if fits else None, "colorspace": colorspace}
    try:
        pixels = decoder.decode_jpeg(data, **how)
    except MemoryError as error:
        raise _not_whole(_NO_MEMORY, data) from error
    except ValueError as error:
        _raise_if_corrupt(error, data)
        if _is_a_remark(decoder, data, how):
            raise _not_whole(str(error), data) from error
        return None
    if as_cmyk:
        return None
    if fits:
        return out
    if how_turned == 1:
        return pixels
    return turn(pixels, how_turned)


def _raise_if_corrupt(error: ValueError, data: bytes) -> None:
    """Raise ValueError if libjpeg has found damage; Pillow might decode such a file."""
    if str(error).startswith(("Corrupt JPEG data", "Premature end of JPEG")):
        raise _not_whole(str(error), data) from error


def _is_a_remark(decoder, data: bytes, how: dict) -> bool:
    """Return whether libjpeg decodes a file in spite of its warning.

    Call it after `_raise_if_corrupt`, because libjpeg also decodes files with missing data.
    """
    try:
        decoder.decode_jpeg(data, strict=False, **how)
    except ValueError:
        return False
    return True


def _decode_any(data: bytes, form: PixelForm):
    """Return a Pillow image of the form's mode, at its own size."""
    from PIL import Image

    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    is_opened = False
    try:
        with Image.open(io.BytesIO(data)) as file:
            is_opened = True
            _check_pixels(*file.size)
            if file.format == "GIF" and not _has_gif_blocks(data):
                raise _not_whole("its blocks do not lead to the end of the GIF", data)
            if file.format == "PNG" and not _has_png_checksums(data):
                raise _not_whole("a checksum of the PNG is wrong, or its end is missing", data)
            return to_form(file, form)
    except (TpukitError, _NotWholeError):
        raise
    except MemoryError as error:
        raise _not_whole(_NO_MEMORY, data) from error
    except bombs as error:
        raise _too_large(str(error)) from error
    # Pillow's decoders raise more than OSError and SyntaxError: that of AVIF RuntimeError, those of
    # DDS and BLP NotImplementedError. The bytes are in memory, so none of it is the disk's fault.
    except Exception as error:
        refuse_unread(data, is_opened=is_opened, error=error)
        why = str(error).partition(" file <")[0]  # without the address of the buffer
        if not isinstance(error, OSError | SyntaxError | ValueError):
            why = f"{kind_of(error)}: {why}"
        raise _not_whole(why, data) from error


def _has_gif_blocks(data: bytes) -> bool:
    """Return True if the blocks of a GIF follow each other up to its end.

    A GIF has no checksum, and Pillow skips bytes that it does not understand. The format is that of
    the GIF89a specification: https://www.w3.org/Graphics/GIF/spec-gif89a.txt
    """
    try:
        at = _after_colours(data, 13, flags=data[10])
        while data[at] != 0x3B:  # the trailer
            if data[at] == 0x21:  # an extension and its kind
                at += 2
            elif data[at] == 0x2C:  # a frame: its place, its colours, the size of its first codes
                at = _after_colours(data, at + 10, flags=data[at + 9]) + 1
            else:
                return False
            while data[at]:  # blocks, each after its length
                at += data[at] + 1
            at += 1
    except IndexError:
        return False
    return True


def _after_colours(data: bytes, at: int, *, flags: int) -> int:
    """Return the first byte after a table of colours, if the flags say that one begins at `at`."""
    has_table = flags & 0b1000_0000
    if not has_table:
        return at
    colours = 2 ** ((flags & 0b111) + 1)
    return at + 3 * colours


def _has_png_checksums(data: bytes) -> bool:
    """Return True if every chunk of a PNG has its checksum; Pillow does not check those of pixels.

    A chunk is its length (4 bytes), its kind (4), its data and the checksum of kind and data (4).
    """
    at = 8  # after the signature
    kind = b""
    while kind != b"IEND":
        length = int.from_bytes(data[at : at + 4], "big")
        kind = data[at + 4 : at + 8]
        end = at + 8 + length
        if end + 4 > len(data):
            return False
        checksum = int.from_bytes(data[end : end + 4], "big")
        if zlib.crc32(memoryview(data)[at + 4 : end]) != checksum:
            return False
        at = end + 4
    return True


_NO_MEMORY = "decoding it takes more memory than there is"


class _NotWholeError(ValueError):
    """The bytes of an image are damaged, or a part of them is missing."""


def _not_whole(why: str, data: bytes) -> _NotWholeError:
    return _NotWholeError(f"not a whole image: {why} ({len(data):,} bytes)")


def pixel_limit() -> float:
    """Return the largest number of pixels of an image: `PIL.Image.MAX_IMAGE_PIXELS`.

    Its default is 89,478,485, a quarter of a GiB as RGB. Without a limit a file of 3 kB with a
    wrong header would take gigabytes.
    """
    from PIL import Image

    return math.inf if Image.MAX_IMAGE_PIXELS is None else Image.MAX_IMAGE_PIXELS


def set_pixel_limit(limit: float) -> None:
    """Set the largest number of pixels per image in this process, as in the notebook."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None if limit == math.inf else limit


def _check_pixels(width: int, height: int) -> None:
    if width * height > pixel_limit():
        raise _too_large(f"{width:,} x {height:,} pixels")


def _too_large(found: str) -> InvalidValueError:
    return InvalidValueError(
        f"its header claims more than the {pixel_limit():,} pixels that are decoded",
        found=found,
        fix="if that is right, PIL.Image.MAX_IMAGE_PIXELS = None, then the same call; "
        "else leave it out",
    )
