"""Decode one image: the pixels Pillow would give, to the last bit, or faster ones."""

import contextlib
import functools
import io
import zlib

from tpukit.datasets.image_modes import orientation, to_rgb, turn
from tpukit.datasets.masks import decode_masked, is_masked
from tpukit.essentials.display import explain

# Where Pillow begins to warn: a quarter of a GiB as RGB. A file of 3 kB whose header lies would cost gigabytes.
PIXEL_LIMIT = 89_478_485


def decode(data: bytes, size: int | None = None, *, exact: bool = True, out=None, window=None):
    """Decode a JPEG, PNG or other image Pillow knows into (H, W, 3) uint8 in [0, 255], red, green, blue.

    It is turned as its EXIF says; what is transparent shows white; of several pages or frames it is the first. What is
    stored with a mask becomes (H, W, 4), the fourth channel the class numbers, resized to the nearest pixel.

    Exact is the whole image decoded, then Pillow's bilinear filter: bit for bit
    `exif_transpose(Image.open(...)).convert("RGB").resize((size, size), BILINEAR)`. Not exact lets the JPEG decoder
    shrink by eighths as it decodes, down to the least that is still `size`, and resizes only what is then not `size`
    yet: three times as fast, and about 1.6 grey levels away on average (256 to 128 pixels).

    A JPEG is whole when libjpeg has nothing to remark on. Pillow opens many that are not: of 101 with 512 bytes of
    zeros in their data, all.

    Args:
        data: the bytes of the file.
        size: height and width in pixels, the aspect is not kept; None for the image's own.
        exact: False for speed.
        out: the contiguous uint8 array that the pixels go to; None for a new one.
        window: of images of more than 8 bits, the values that become black and white; None for 0 and 65,535.

    Raises:
        ValueError: not a whole image, one of more than 89,478,485 pixels, or one of more than 16 bits without a window.
    """
    if is_masked(data):
        image = functools.partial(decode, exact=exact, window=window)
        pixels = decode_masked(data, size, image, check=exact or size is None)
    else:
        pixels = _decode_jpeg(data, size, exact, out)
    if pixels is None or (size is not None and pixels.shape[:2] != (size, size)):
        import numpy
        from PIL import Image

        image = _decode_any(data, window) if pixels is None else Image.fromarray(pixels)
        if size is not None and image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        pixels = numpy.array(image)
    if out is None or pixels is out:
        return pixels
    if pixels.shape != out.shape:
        raise ValueError(f"the image is {pixels.shape[1]} x {pixels.shape[0]} pixels, and out is {out.shape}")
    out[:] = pixels
    return out


@functools.cache
def jpeg_decoder():
    """Return simplejpeg, or None where it is missing, which is said once."""
    try:
        import simplejpeg
    except ImportError:
        slower = "simplejpeg is not installed: Pillow decodes, at about half the speed, and does not notice all damage"
        print(explain(slower, fix="pip install simplejpeg"))
        return None
    return simplejpeg


def _decode_jpeg(data: bytes, size: int | None, exact: bool, out):
    """Return the pixels of a JPEG, or of one that is shrunk to no less than `size`; None where Pillow has to decode."""
    decoder = jpeg_decoder()
    if decoder is None or bytes(data[:2]) != b"\xff\xd8":  # is_jpeg looks for an end as well
        return None
    least = 0 if exact or size is None else size
    try:
        height, width, colors, _ = decoder.decode_jpeg_header(data, min_height=least, min_width=least)
    except ValueError as error:
        _raise_if_corrupt(error, data)
        return None  # what one decoder cannot open another may: Pillow decides
    if 64 * width * height > PIXEL_LIMIT:  # it may be shrunk, by eight at most
        _check_pixels(*decoder.decode_jpeg_header(data)[1::-1], data)
    as_cmyk = colors in ("CMYK", "YCCK")  # not rounded as Pillow rounds, so only looked through here
    how_turned = orientation(data)
    fits = not as_cmyk and how_turned == 1 and out is not None and out.shape == (height, width, 3)
    how = {"min_height": least, "min_width": least, "buffer": out if fits else None}
    how["colorspace"] = "CMYK" if as_cmyk else "RGB"
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
    return out if fits else pixels if how_turned == 1 else turn(pixels, how_turned)


def _raise_if_corrupt(error: ValueError, data: bytes) -> None:
    """Raise where libjpeg has seen damage; Pillow might make pixels of it all the same."""
    if str(error).startswith(("Corrupt JPEG data", "Premature end of JPEG")):
        raise _not_whole(str(error), data) from error


def _is_a_remark(decoder, data: bytes, how: dict) -> bool:
    """Tell whether libjpeg decodes a file in spite of what it remarked on: it made up what was missing."""
    try:
        decoder.decode_jpeg(data, strict=False, **how)
    except ValueError:
        return False
    return True


def _decode_any(data: bytes, window):
    """Return a Pillow image of three channels."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as file:
            _check_pixels(*file.size, data)
            if file.format == "GIF" and not _has_gif_blocks(data):
                raise _not_whole("its blocks do not lead to the end of the GIF", data)
            if file.format == "PNG" and not _has_png_checksums(data):
                raise _not_whole("a checksum of the PNG is wrong, or its end is missing", data)
            return to_rgb(file, window)
    except MemoryError as error:
        raise _not_whole(_NO_MEMORY, data) from error
    # SyntaxError from a broken PNG; the others where a header asks for more pixels than Pillow grants.
    except (OSError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _not_whole(str(error).partition(" file <")[0], data) from error  # its buffer's name helps nobody


def _has_gif_blocks(data: bytes) -> bool:
    """Tell whether the blocks of a GIF follow each other up to its end; it has no checksum, and Pillow skips junk."""

    def after_table(at: int, flags: int) -> int:
        return at + (3 << (flags & 7) + 1 if flags & 128 else 0)

    with contextlib.suppress(IndexError):
        at = after_table(13, data[10])
        while data[at] != 0x3B:  # the trailer
            if data[at] == 0x21:  # an extension and its kind
                at += 2
            elif data[at] == 0x2C:  # a frame: its place, its colours, the size of its first codes
                at = after_table(at + 10, data[at + 9]) + 1
            else:
                return False
            while data[at]:  # blocks, each with its length before it
                at += data[at] + 1
            at += 1
        return True
    return False


def _has_png_checksums(data: bytes) -> bool:
    """Tell whether all parts of a PNG up to its end are as written; of the pixels' Pillow checks no checksum."""
    at, kind = 8, b""
    while kind != b"IEND":
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        end = at + 8 + size
        if zlib.crc32(memoryview(data)[at + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            return False
        if end + 4 > len(data):
            return False
        at = end + 4
    return True


_NO_MEMORY = "decoding it takes more memory than there is"


def _not_whole(why: str, data: bytes) -> ValueError:
    return ValueError(f"not a whole image: {why} ({len(data):,} bytes)")


def _check_pixels(width: int, height: int, data: bytes) -> None:
    if width * height > PIXEL_LIMIT:
        claim = f"it claims {width:,} x {height:,} pixels, and more than {PIXEL_LIMIT:,} are not decoded"
        raise _not_whole(claim, data)
