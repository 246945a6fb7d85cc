"""Decode one image: to exactly the pixels of Pillow, or faster to similar pixels.

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
    """Decode an image file to an array of pixels, (H, W, 3) uint8 RGB in [0, 255].

    The file is a JPEG, a PNG or of another kind that Pillow can open.
    The image is turned as its EXIF orientation says, transparent pixels become white, and only the
    first of several pages or frames is decoded. If `pack` stored a mask with the file, the result
    is (H, W, 4). The fourth channel has class numbers: the mask, resized by nearest neighbour.

    With `exact`, the pixels are equal to those of
    `exif_transpose(Image.open(...)).convert("RGB").resize((size, size), BILINEAR)`. Without
    `exact`, the JPEG decoder first scales height and width to n/8, with the smallest n for which
    both are at least `size`. Pillow's bilinear filter does the rest. This is three times as fast.
    The pixels differ from Pillow's by 1.6 grey levels on average (scaled from 256 to 128 pixels).

    `decode` raises ValueError if libjpeg warns of a damaged JPEG. Pillow alone overlooks such
    damage: it opened all of 101 JPEGs with 512 bytes set to zero.

    Args:
        data: the bytes of the file.
        size: height and width in pixels, one number for both or (height, width). None for the
            image's own size.
        exact: True for exactly Pillow's pixels; False for speed.
        out: a contiguous uint8 array of the result's shape, for the pixels; None for a new one.
        form: `PixelForm(mode, resize, window)`. With mode "L" the result is (H, W, 1) uint8. With
            "I;16" it is (H, W, 2) uint8, the low and the high byte of each value. The default is
            RGB, stretched to the size.

    Returns:
        The pixels; `out` if it is given.

    Raises:
        ValueError: the image is damaged; Pillow cannot open this kind of file; the image has more
            pixels than `PIL.Image.MAX_IMAGE_PIXELS`; `form` does not fit the image, see
            `to_form`; or `out` does not have the shape of the result.
    """
    sides = image_size(size)
    if is_masked(data):
        image = functools.partial(decode, exact=exact, form=form)
        pixels = decode_masked(data, sides, image, resize=form.resize, check=exact or sides is None)
    else:
        pixels = _decode_jpeg(data, sides, exact, out=out, mode=form.mode)
        # simplejpeg decodes only JPEGs, and scales them only by eighths. Pillow does the rest.
        if pixels is None or not _is_final(pixels, sides, form):
            pixels = _finish_with_pillow(data, pixels, sides, form)
    if out is None or pixels is out:
        return pixels
    if pixels.shape != out.shape:
        raise ValueError(f"the pixels have the shape {pixels.shape}, and out is {out.shape}")
    out[:] = pixels
    return out


def _is_final(pixels, size: tuple[int, int] | None, form: PixelForm) -> bool:
    """Return whether pixels have this size and the number of channels of the form."""
    height, width, channels = pixels.shape
    return size in (None, (height, width)) and channels == form.channels


def _finish_with_pillow(data: bytes, pixels, size: tuple[int, int] | None, form: PixelForm):
    """Return the pixels at `size`. If `pixels` is None, decode the image first."""
    if pixels is None:
        image = _decode_any(data, form)
    else:  # simplejpeg has scaled it to n/8 of its own size, at least `size`
        image = as_image(pixels)
    if form.mode == "L":
        image = image.convert("L")
    if size is not None:
        image = resized(image, size, form.resize)
    return as_pixels(image)


def jpeg_decoder():
    """Return simplejpeg; print a warning once and return None if it is not installed."""
    try:
        import simplejpeg
    except ImportError:
        _warn_slower()
        return None
    return simplejpeg


@functools.cache
def _warn_slower() -> None:
    slower = (
        "simplejpeg is not installed: Pillow decodes, at about half the speed, "
        "and does not notice all damage"
    )
    print(explain(slower, fix="pip install simplejpeg"))


def _decode_jpeg(data: bytes, size: tuple[int, int] | None, exact: bool, *, out, mode: str):
    """Return the pixels of a JPEG, scaled to `size` or more; None if Pillow must decode the file.

    Raises:
        ValueError: the JPEG is damaged or has too many pixels.
    """
    decoder = jpeg_decoder()
    # simplejpeg's is_jpeg also requires the end mark, so it would reject a truncated JPEG.
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
    # `width` and `height` may be scaled, to 1/8 at the smallest, which is 1/64 of the pixels.
    if 64 * width * height > pixel_limit():
        full_height, full_width, *_ = decoder.decode_jpeg_header(data)
        _check_pixels(full_width, full_height)
    # simplejpeg rounds CMYK differently from Pillow. So it only checks for damage here, and Pillow
    # decodes the file.
    as_cmyk = colors in ("CMYK", "YCCK")
    colorspace = "CMYK" if as_cmyk else "RGB"
    # For colour files, the grey of libjpeg and of Pillow differ by rounding.
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
    """Raise ValueError if an error of libjpeg reports damage, which Pillow might ignore."""
    if str(error).startswith(("Corrupt JPEG data", "Premature end of JPEG")):
        raise _not_whole(str(error), data) from error


def _is_a_remark(decoder, data: bytes, how: dict) -> bool:
    """Return whether simplejpeg decodes a refused file after all, with strict=False.

    If it does, the error was only a warning of libjpeg. Call `_raise_if_corrupt` first, because
    simplejpeg with strict=False also decodes truncated files.
    """
    try:
        decoder.decode_jpeg(data, strict=False, **how)
    except ValueError:
        return False
    return True


def _decode_any(data: bytes, form: PixelForm):
    """Decode any file by Pillow; return a Pillow image of the form's mode, not resized.

    Raises:
        ValueError: the image is damaged, too large, or of a kind that Pillow cannot open.
    """
    from PIL import Image

    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    is_opened = False
    try:
        with Image.open(io.BytesIO(data)) as file:
            is_opened = True
            _check_pixels(*file.size)
            if file.format == "GIF" and not _has_gif_blocks(data):
                raise _not_whole("the end of the GIF is missing, or a block is damaged", data)
            if file.format == "PNG" and not _has_png_checksums(data):
                raise _not_whole("the end of the PNG is missing, or a checksum is wrong", data)
            return to_form(file, form)
    except (TpukitError, _NotWholeError):
        raise
    except MemoryError as error:
        raise _not_whole(_NO_MEMORY, data) from error
    except bombs as error:
        raise _too_large(str(error)) from error
    # Pillow's decoders raise not only OSError and SyntaxError: AVIF raises RuntimeError, DDS and
    # BLP NotImplementedError. The bytes are in memory, so no error is one of the disk.
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
            elif data[at] == 0x2C:  # a frame: position and size, colour table, LZW code size
                at = _after_colours(data, at + 10, flags=data[at + 9]) + 1
            else:
                return False
            while data[at]:  # sub-blocks: a length of one byte, then the data; 0 ends them
                at += data[at] + 1
            at += 1
    except IndexError:
        return False
    return True


def _after_colours(data: bytes, at: int, *, flags: int) -> int:
    """Return the offset after the colour table at `at`; `at` if the flags say there is no table."""
    has_table = flags & 0b1000_0000
    if not has_table:
        return at
    colours = 2 ** ((flags & 0b111) + 1)
    return at + 3 * colours


def _has_png_checksums(data: bytes) -> bool:
    """Return True if the checksums of all chunks of a PNG match, up to the chunk IEND.

    Pillow does not check the chunks of pixels. A chunk is its length (4 bytes), its kind (4), its
    data, and the CRC-32 of kind and data (4): https://www.w3.org/TR/png/#5Chunk-layout
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
    """Return the most pixels that an image may have: `PIL.Image.MAX_IMAGE_PIXELS`.

    Pillow's default is 89,478,485 pixels, a quarter of a GiB as RGB. Without a limit, a file of
    3 kB with a wrong header could take gigabytes of memory.
    """
    from PIL import Image

    return math.inf if Image.MAX_IMAGE_PIXELS is None else Image.MAX_IMAGE_PIXELS


def set_pixel_limit(limit: float) -> None:
    """Set Pillow's pixel limit in a worker process to the limit of the notebook's process."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None if limit == math.inf else limit


def _check_pixels(width: int, height: int) -> None:
    if width * height > pixel_limit():
        raise _too_large(f"{width:,} x {height:,} pixels")


def _too_large(found: str) -> InvalidValueError:
    return InvalidValueError(
        f"its header claims more than {pixel_limit():,} pixels, the limit of Pillow",
        found=found,
        fix="leave the image out; or, if it is really that large, remove the limit and call again: "
        "PIL.Image.MAX_IMAGE_PIXELS = None",
    )
