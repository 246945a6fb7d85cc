"""Convert any image that Pillow opens to RGB, to grey, or to one channel of 16 bits.

    JPEG with EXIF orientation 6    turned by 90 degrees
    PNG with transparency           on white
    PNG of 16 bits, no window       value / 65,535 x 255
    TIFF of floats, window (0, 2)   0 and less is black, 2 and more is white

The orientation of a JPEG is read by Pillow, if the file has EXIF or XMP at all.
"""

import contextlib
import io
import re

from tpukit.datasets.pixel_form import PixelForm
from tpukit.essentials.display import InvalidValueError

# Pillow's modes of one channel of 16 bits. Before version 10.3 it opened such a PNG or PGM as "I".
_SIXTEEN = ("I;16", "I;16L", "I;16B", "I;16N")
# Of the layouts of stored pixels; "BGR;16" has 16 bits for all three channels together.
_IS_16_BITS = re.compile(r"I;16|;16[BLN]")
_HAS_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
NEARLY_BLACK = 64  # of 255: the largest value of an image that uses 14 of 16 bits
_DEFAULT = PixelForm()
_ORIENTATION = 0x0112  # the tag of EXIF
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
    """Return a Pillow image as RGB, L, or F for 16 bits; of several pages or frames, the first.

    An image of a file is turned by its EXIF, and pixels that its metadata declare transparent
    become white. An image without a file, as after `convert`, is taken as it is. More than 8 bits
    become 8 by a window.

    Args:
        image: a Pillow image of any mode; not modified.
        form: the mode, and the window: values up to its first number become black, values from its
            second on white. None for 0 and 65,535 with 16 bits, so that no value is clipped.

    Raises:
        ValueError: without a window, the image has more than 16 bits or floats; with a window, it
            has 16 bits in several channels; with mode "I;16", it has 8 bits; or Pillow cannot
            convert it.
    """
    from PIL import Image

    if form.mode == "I;16":
        return _with_16_bits(image)
    window = form.window
    has_16_bits = _has_16_bits(image)
    image.load()  # an ICNS has the mode of its pixels only now
    is_numeric = image.mode[0] in "IF"  # integers of more than 8 bits, or floats
    if window is not None and not is_numeric and has_16_bits:
        channels = len(image.getbands())
        raise InvalidValueError(
            f"window= is for one channel of 16 bits, and this {image.format} has {channels}",
            found="Pillow opens such images with 8 bits",
            fix="pack items (tifffile.imread(file), label), whose images are uint16 arrays; or "
            "leave window= out",
        )
    has_transparency = image.format is not None and _has_transparency(image)
    image = upright(image)
    if is_numeric:
        return _from_numbers(image, window).convert(form.mode)
    if image.mode in _HAS_ALPHA or has_transparency:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert(form.mode)


def _with_16_bits(image):
    """Return an image of 16 bits as one of floats, which Pillow can resize."""
    import numpy
    from PIL import Image

    kind = f"{image.format or 'Pillow image'} of mode {image.mode}"
    if image.mode not in (*_SIXTEEN, "I"):
        raise InvalidValueError(
            f'mode="I;16" is for one channel of 16 bits, and this is a {kind}',
            fix='options=tpukit.PackOptions(mode="L"), and pack such images by themselves',
        )
    values = numpy.asarray(upright(image))
    check_16_bits(values)
    return Image.fromarray(values.astype(numpy.float32))


def check_16_bits(values) -> None:
    """Raise ValueError unless an array holds whole numbers from 0 to 65,535."""
    if values.dtype.kind not in "iu" or values.min() < 0 or values.max() > 65535:
        raise InvalidValueError(
            'mode="I;16" stores whole numbers from 0 to 65,535',
            found=f"{values.dtype} from {values.min():g} to {values.max():g}",
            fix="add the lowest value: image - image.min(); "
            'or options=tpukit.PackOptions(mode="L", window=(low, high))',
        )


def refuse_window(data: bytes) -> None:
    """Raise ValueError for a file of 8 bits, which no window can change."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        if image.mode[0] not in "IF":
            raise no_window(f"{image.format} of mode {image.mode}")


def no_window(kind: str) -> InvalidValueError:
    """Return the error for a window and an image of 8 bits."""
    return InvalidValueError(
        f"window= is for images of more than 8 bits, and this is one of 8: {kind}",
        fix="leave window out, and pack images of 8 bits by themselves",
    )


def _from_numbers(image, window: tuple[float, float] | None):
    """Return a Pillow image of more than 8 bits as L."""
    import numpy
    from PIL import Image

    is_old_16_bits = image.mode == "I" and image.format in ("PNG", "PPM")
    if window is None and (image.mode in _SIXTEEN or is_old_16_bits):
        window = (0, 65535)
    if window is None:
        kind = image.format or "Pillow image"
        mode = image.mode
        raise InvalidValueError(
            f"a {kind} of mode {mode} has no known range, so the values of black and white are "
            "not known",
            fix="pack(..., options=tpukit.PackOptions(window=(low, high)))",
        )
    return Image.fromarray(apply_window(numpy.asarray(image), window))


def coded(image) -> list:
    """Return Pillow's description of the stored parts of a file that is open but not read yet."""
    return getattr(image, "tile", None) or []


def _has_16_bits(image) -> bool:
    """Return whether the file of an image, which is not read yet, stores 16 bits per channel."""
    return any(_IS_16_BITS.search(_raw_mode(part)) for part in coded(image))


def _raw_mode(part) -> str:
    """Return Pillow's name for the layout of stored pixels, such as "RGB;16B"; "" without one."""
    arguments = part[-1]
    if isinstance(arguments, tuple):  # such as ("RGB;16B", 0, 1)
        (arguments, *_) = arguments
    return arguments if isinstance(arguments, str) else ""


def _has_transparency(image) -> bool:
    """Return whether a colour of an image, or of its palette, is declared transparent."""
    if "transparency" in image.info:
        return True
    # A TGA may have alpha in its palette; the palette of an ICNS is missing.
    return image.palette is not None and image.palette.mode.endswith("A")


def upright(image):
    """Return a Pillow image turned by its file's EXIF or XMP; an image without a file as it is."""
    how = turn_of(image)
    if how == 1:
        return image
    from PIL import Image

    return image.transpose(Image.Transpose[_TRANSPOSITIONS[how]])


def turn_of(image) -> int:
    """Return the orientation in the file of a Pillow image, 1 (upright) to 8."""
    if image.format is None:
        # The program that changed it has turned it, or has drawn a mask over it as it is.
        return 1
    image.load()  # a PNG may have its EXIF after the pixels; loading turns a TIFF
    return _orientation_of(image)


def _orientation_of(image) -> int:
    """Return the orientation of an open image by EXIF, else by XMP; 1 if both are damaged."""
    # ImageOps.exif_transpose also writes all other tags, and raises if one of them is damaged.
    with contextlib.suppress(Exception):
        how = image.getexif().get(_ORIENTATION, 1)
        return how if how in range(1, 9) else 1
    return 1


def apply_window(values, window: tuple[float, float]):
    """Convert values of any dtype to uint8: the window's first value to 0, its second to 255."""
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
    """Return the largest value of an image of 16 bits, 0 for any other image.

    Args:
        image: a Pillow image, an array or tensor, or the bytes of a file.
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
        highest = max(high for _, high in image.getextrema())
        return 256 * highest + 255  # Pillow keeps the upper 8 bits
    if hasattr(image, "detach"):
        image = image.detach().cpu().numpy()
    values = numpy.asarray(image)
    has_16_bits = values.dtype.kind in "iu" and values.dtype.itemsize > 1
    return int(values.max()) if has_16_bits else 0


def has_frames(data: bytes) -> bool:
    """Return whether the bytes of an image contain several pages or frames.

    The answer for a JPEG is no: others may be attached to it, but they are not its frames.
    """
    from PIL import Image

    is_animated_png = data[:4] == b"\x89PNG" and b"acTL" in data[:65536]
    if is_animated_png or data[:4] in (b"GIF8", b"RIFF", b"II*\0", b"MM\0*"):
        # If only a later frame is damaged, the image is still whole: its first frame is used.
        with contextlib.suppress(Exception), Image.open(io.BytesIO(data)) as image:
            return getattr(image, "n_frames", 1) > 1
    return False


def check_window(window) -> tuple[float, float] | None:
    """Return the window as two floats, or None.

    Raises:
        ValueError: it is not two finite numbers, the lower one first.
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
    """Return the orientation of a JPEG by EXIF, else by XMP, 1 (upright) to 8."""
    data = bytes(data)
    if not any(note in data for note in _NOTES):  # 30 us for 20 KB; opening it takes 70 us
        return 1
    from PIL import Image

    with contextlib.suppress(Exception), Image.open(io.BytesIO(data)) as image:
        return _orientation_of(image)
    return 1  # the decoder reports the damage


def turn(pixels, how: int):
    """Return (H, W, C) pixels turned by EXIF's orientation, contiguous.

    The result equals that of Pillow's `exif_transpose`.
    """
    import numpy

    if how >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if how in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if how in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return numpy.ascontiguousarray(pixels)
