"""Convert any image that Pillow opens to RGB, to grey, or to one channel of 16 bits.

    JPEG with EXIF orientation 6    is turned by 90 degrees
    PNG with transparency           gets a white background
    PNG of 16 bits, no window       value / 65,535 x 255
    TIFF of floats, window (0, 2)   0 and less becomes black, 2 and more white

`orientation` opens a JPEG with Pillow only if the file has EXIF or XMP, to save time.
"""

import contextlib
import io
import re

from tpukit.datasets.pixel_form import PixelForm
from tpukit.essentials.display import InvalidValueError

# Pillow's modes of one channel of 16 bits. Pillow before 10.3 opens a PNG or PGM of 16 bits as "I".
_SIXTEEN = ("I;16", "I;16L", "I;16B", "I;16N")
# Matches Pillow's raw modes with 16 bits per channel, but not "BGR;16", which has 16 bits for all
# three channels together.
_IS_16_BITS = re.compile(r"I;16|;16[BLN]")
_HAS_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
# An image of 16 bits is nearly black if all its values are below this after scaling to 255: it uses
# at most 14 of its 16 bits.
NEARLY_BLACK = 64
# How files begin that may have several frames, except for PNG: GIF, WebP, TIFF, and BigTIFF.
_OF_FRAMES = (b"GIF8", b"RIFF", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_DEFAULT = PixelForm()
_ORIENTATION = 0x0112  # the EXIF tag
_NOTES = (b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0")  # how EXIF and XMP begin in a JPEG
_TRANSPOSITIONS = {  # by EXIF's orientation
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def to_form(image, form: PixelForm = _DEFAULT):
    """Convert a Pillow image, or its first frame, to the mode of a form.

    An image that was opened from a file is turned by its EXIF orientation, and its transparent
    pixels become white. An image in memory, as after `convert`, is not turned, and only its
    alpha channel counts as transparency.

    Args:
        image: a Pillow image of any mode; not modified.
        form: the mode and the window. For the mode "RGB" or "L", a window (low, high) converts an
            image of more than 8 bits to 8: values up to `low` become black, and values from `high`
            on become white. If the window is None, an image of 16 bits has the window (0, 65535),
            so that no value is clipped. For an image of 8 bits, `to_form` ignores the window. A
            caller that does not allow this uses `refuse_window` or `no_window`.

    Returns:
        A Pillow image of mode RGB or L; for the mode "I;16", one of mode F (floats).

    Raises:
        ValueError: `form` has no window, and the image has floats or more than 16 bits; `form` has
            a window, and the image has several channels of 16 bits; the mode is "I;16", and the
            image is not one channel of whole numbers from 0 to 65,535; or Pillow cannot convert
            the image.
    """
    from PIL import Image

    if form.mode == "I;16":
        return _with_16_bits(image)
    window = form.window
    has_16_bits = _has_16_bits(image)
    image.load()  # before this, an ICNS does not have the mode of its pixels
    is_numeric = image.mode[0] in "IF"  # integers of more than 8 bits, or floats
    if window is not None and not is_numeric and has_16_bits:
        channels = len(image.getbands())
        raise InvalidValueError(
            f"window= is for one channel of 16 bits, and this {image.format} has {channels} "
            "channels",
            found="Pillow opens such images with 8 bits",
            fix="leave window= out; or pack items whose images are uint16 arrays: "
            "(tifffile.imread(file), label)",
        )
    has_transparency = image.format is not None and _has_transparency(image)
    file_format = image.format  # an image that `upright` has turned has no format
    image = upright(image)
    if is_numeric:
        return _from_numbers(image, window, file_format=file_format).convert(form.mode)
    if image.mode in _HAS_ALPHA or has_transparency:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert(form.mode)


def _with_16_bits(image):
    """Convert an image of one 16-bit channel to mode F (floats), which Pillow can resize."""
    import numpy
    from PIL import Image

    kind = f"{image.format or 'Pillow image'} of mode {image.mode}"
    if image.mode not in (*_SIXTEEN, "I"):
        window = ", window=(low, high)" if image.mode == "F" else ""  # floats have no known range
        raise InvalidValueError(
            f'mode="I;16" is for one channel of 16 bits, and this is a {kind}',
            fix=f"pack images of mode {image.mode} into a separate pack: "
            f'pack(..., options=tpukit.PackOptions(mode="L"{window}))',
        )
    values = numpy.asarray(upright(image))
    check_16_bits(values)
    # float32 stores every whole number up to 2**24, so no value of 16 bits changes.
    return Image.fromarray(values.astype(numpy.float32))


def check_16_bits(values) -> None:
    """Raise ValueError unless all values of an array are whole numbers from 0 to 65,535."""
    if values.dtype.kind not in "iu" or values.min() < 0 or values.max() > 65535:
        raise InvalidValueError(
            'mode="I;16" stores whole numbers from 0 to 65,535',
            found=f"{values.dtype} from {values.min():g} to {values.max():g}",
            fix='subtract the lowest value of all images: image.astype("int32") - lowest; '
            'or options=tpukit.PackOptions(mode="L", window=(low, high))',
        )


def refuse_window(data: bytes) -> None:
    """Raise ValueError for a file of 8 bits, for which a window is not supported."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        if image.mode[0] not in "IF":
            raise no_window(f"{image.format} of mode {image.mode}")


def no_window(kind: str) -> InvalidValueError:
    """Return the error for an image of 8 bits, for which a window is not supported."""
    return InvalidValueError(
        f"window= is for images of more than 8 bits, and this image has 8 bits: {kind}",
        fix="pack images of 8 bits into a separate pack, without window=",
    )


def _from_numbers(image, window: tuple[float, float] | None, *, file_format: str | None):
    """Convert a Pillow image of more than 8 bits to mode L by a window.

    Args:
        image: a Pillow image.
        window: as for `to_form`.
        file_format: the format of the image's file; None for an image in memory.
    """
    import numpy
    from PIL import Image

    # Older versions of Pillow open PNG and PPM files of 16 bits in mode I, which has 32.
    is_old_16_bits = image.mode == "I" and file_format in ("PNG", "PPM")
    if window is None and (image.mode in _SIXTEEN or is_old_16_bits):
        window = (0, 65535)
    if window is None:
        kind = file_format or "Pillow image"
        mode = image.mode
        raise InvalidValueError(
            f"a {kind} of mode {mode} has no known range, so the values of black and white are "
            "not known",
            fix="pack(..., options=tpukit.PackOptions(window=(low, high)))",
        )
    return Image.fromarray(apply_window(numpy.asarray(image), window))


def coded(image) -> list:
    """Return Pillow's `tile` list of an image's file; [] for an image in memory.

    An entry is (decoder, box, offset, arguments); the arguments begin with the raw mode. Pillow
    empties `tile` when it reads the pixels. The first call must come before that: it stores the
    list in the image for later calls.
    """
    if getattr(image, "tile", None):
        image.tile_before_load = image.tile
    return getattr(image, "tile_before_load", [])


def _has_16_bits(image) -> bool:
    """Return whether an image's file stores 16 bits per channel. Call it before `image.load`."""
    return any(_IS_16_BITS.search(_raw_mode(part)) for part in coded(image))


def _raw_mode(part) -> str:
    """Return the raw mode of an entry of `coded`, such as "RGB;16B"; "" without one."""
    arguments = part[-1]
    if isinstance(arguments, tuple):  # such as ("RGB;16B", 0, 1)
        (arguments, *_) = arguments
    return arguments if isinstance(arguments, str) else ""


def _has_transparency(image) -> bool:
    """Return whether the metadata or the palette of an image declares a colour as transparent."""
    if "transparency" in image.info:
        return True
    # A TGA may have alpha in its palette. An ICNS may have no palette at all.
    return image.palette is not None and image.palette.mode.endswith("A")


def upright(image):
    """Return a Pillow image turned as the EXIF or XMP of its file says.

    An image that was not read from a file is returned unchanged.
    """
    how = turn_of(image)
    if how == 1:
        return image
    from PIL import Image

    return image.transpose(Image.Transpose[_TRANSPOSITIONS[how]])


def turn_of(image) -> int:
    """Return a Pillow image's EXIF orientation, 1 (upright) to 8; 1 for an image in memory."""
    if image.format is None:
        # The code that made this image has turned it already, or has drawn a mask over it unturned.
        return 1
    coded(image)  # before `load`, so that `read_mask` can call it later
    image.load()  # a PNG may have its EXIF after the pixels; loading turns a TIFF
    return _orientation_of(image)


def _orientation_of(image) -> int:
    """Return an open image's orientation from EXIF or else XMP; 1 if both are damaged."""
    # Not ImageOps.exif_transpose: it also rewrites all other tags, and raises if one is damaged.
    with contextlib.suppress(Exception):
        how = image.getexif().get(_ORIENTATION, 1)
        return how if how in range(1, 9) else 1
    return 1


def apply_window(values, window: tuple[float, float]):
    """Convert values to uint8, linearly: the window's first value to 0, its second to 255.

    Args:
        values: an array of any shape and numeric dtype.
        window: (low, high); values outside are clipped.

    Raises:
        ValueError: a value is nan or infinite.
    """
    import numpy

    low, high = window
    if values.dtype.kind == "f" and not numpy.isfinite(values).all():
        raise InvalidValueError(
            "the image holds nan or infinity",
            fix="give such pixels a number: numpy.nan_to_num(image)",
        )
    scaled = (values.astype(numpy.float64) - low) * (255 / (high - low))
    return scaled.clip(0, 255).round().astype(numpy.uint8)


def brightest(image) -> int:
    """Return the largest value of an image of more than 8 bits; 0 for 8 bits or floats.

    The alpha channel of a file does not count. Of several channels of 16 bits, Pillow reads only
    the upper 8 bits. The result then has ones as its lower 8 bits, so it is up to 255 too high.

    Args:
        image: a Pillow image, an array, a tensor, or the bytes of a file.
    """
    import numpy
    from PIL import Image

    if "float" in str(getattr(image, "dtype", "")):
        return 0
    if isinstance(image, bytes):
        with Image.open(io.BytesIO(image)) as opened:
            return brightest(opened)
    if hasattr(image, "getbands") and image.mode not in (*_SIXTEEN, "I"):
        if len(image.getbands()) < 2 or not _has_16_bits(image):
            return 0
        ranges = zip(image.getbands(), image.getextrema(), strict=True)
        highest = max(high for band, (_, high) in ranges if band != "A")
        return 256 * highest + 255  # Pillow has discarded the lower 8 bits
    if hasattr(image, "detach"):
        image = image.detach().cpu().numpy()
    values = numpy.asarray(image)
    has_16_bits = values.dtype.kind in "iu" and values.dtype.itemsize > 1
    return int(values.max()) if has_16_bits else 0


def has_frames(data: bytes) -> bool:
    """Return whether a PNG, GIF, WebP or TIFF has several pages or frames.

    For other kinds of files the result is False. Other images may be attached to a JPEG, but these
    are not frames.
    """
    from PIL import Image

    # An animated PNG has a chunk acTL before its pixels.
    is_animated_png = data[:4] == b"\x89PNG" and b"acTL" in data[:65536]
    if is_animated_png or data.startswith(_OF_FRAMES):
        # Errors are suppressed, because damage in a later frame does not matter: only the first
        # frame is packed, and `decode` has checked it.
        with contextlib.suppress(Exception), Image.open(io.BytesIO(data)) as image:
            return getattr(image, "n_frames", 1) > 1
    return False


def check_window(window) -> tuple[float, float] | None:
    """Return the window as two floats, or None.

    Raises:
        ValueError: the window is not two finite numbers, the lower one first.
    """
    if window is None:
        return None
    try:
        low, high = map(float, window)
        fits = low < high and high - low < float("inf")
    except (TypeError, ValueError):
        fits = False
    if not fits:
        given = repr(window)
        raise InvalidValueError(
            "window must be the two values that become black and white, the lower one first, "
            f"got {given}",
            fix="window=(0, 4095) for 12 bits, (-160, 240) for soft tissue in Hounsfield units",
        )
    return low, high


def orientation(data) -> int:
    """Return a JPEG file's orientation from EXIF or else XMP: 1 (upright) to 8."""
    data = bytes(data)
    if not any(note in data for note in _NOTES):  # 30 us for 20 KB; `Image.open` takes 70 us
        return 1
    from PIL import Image

    with contextlib.suppress(Exception), Image.open(io.BytesIO(data)) as image:
        return _orientation_of(image)
    return 1  # the decoder reports the damage


def turn(pixels, how: int):
    """Turn (H, W, C) pixels by an EXIF orientation, as Pillow's `exif_transpose` does.

    Args:
        pixels: an array (H, W, C).
        how: the EXIF orientation, 1 to 8.

    Returns:
        A contiguous array, (W, H, C) for orientations 5 to 8.
    """
    import numpy

    if how >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if how in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if how in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return numpy.ascontiguousarray(pixels)
