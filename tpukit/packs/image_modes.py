"""Any image that Pillow opens as three channels of 8 bits: turned upright, on white, in a window of its values."""

import contextlib
import io

from tpukit.essentials.show import WrongValue

# Pillow's modes of one channel of 16 bits; "I" is what it made of 16 bits in a PNG or PGM before version 10.3.
_SIXTEEN = ("I;16", "I;16L", "I;16B", "I;16N")
NEARLY_BLACK = 64  # of 255: an image of 16 bits that uses 14 of them is
_ORIENTATION = 0x0112  # the tag of EXIF
_NOTES = (b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0")  # how EXIF and XMP begin in a JPEG


def to_rgb(image, window: tuple[float, float] | None = None):
    """Return a Pillow image as RGB; of several pages or frames, the first.

    Of a file it is turned as its EXIF says, and what a note beside the pixels calls transparent shows white. An image
    that is no file's any more, as after `convert`, is its pixels. More than 8 bits become 8 by a window.

    Args:
        image: of any mode; not modified.
        window: the values that become black and white, those beyond them too; None for 0 and 65,535 of 16 bits, so
            that none is clipped.

    Raises:
        ValueError: the image has more than 16 bits, or is of floats, and there is no window; it has 16 bits in several
            channels, and there is one; or Pillow cannot convert it.
    """
    from PIL import Image

    if window is not None and image.mode[0] not in "IF" and any("16" in str(part[-1]) for part in coded(image)):
        raise WrongValue(
            f"window= is for one channel of 16 bits, and this {image.format} has {len(image.getbands())}",
            found="Pillow opens those with 8 bits",
            fix="pack uint16 arrays, (image, label) of tifffile.imread(file); or leave window= out",
        )
    has_note = image.format is not None and "transparency" in image.info
    image = upright(image)
    if image.mode[0] in "IF":
        import numpy

        if window is None and (image.mode in _SIXTEEN or (image.mode == "I" and image.format in ("PNG", "PPM"))):
            window = (0, 65535)
        if window is None:
            raise WrongValue(
                f"a {image.format or 'Pillow image'} of mode {image.mode} has a range of values that nothing says: "
                "which are black and white?",
                fix="pack(..., window=(low, high))",
            )
        return Image.fromarray(apply_window(numpy.asarray(image), window)).convert("RGB")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or has_note:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def coded(image) -> list:
    """Return how the parts of a file that was opened, and not read yet, are stored."""
    return getattr(image, "tile", None) or []


def upright(image):
    """Return a Pillow image turned as its file says: by EXIF wherever it stands, or XMP; one in memory as it is."""
    how = turn_of(image)
    if how == 1:
        return image
    names = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"]
    from PIL import Image

    return image.transpose(Image.Transpose[names[how - 2]])


def turn_of(image) -> int:
    """Return how the file of a Pillow image says to turn it, 1 (not) to 8."""
    if image.format is None:  # whoever changed it has turned it, or has drawn a mask over it as it is
        return 1
    image.load()  # a PNG may have its EXIF behind the pixels; a TIFF is turned by that
    return _noted_turn(image)


def _noted_turn(image) -> int:
    """Return what the EXIF of an open file says, or else its XMP, as Pillow reads them; 1 where they are damaged."""
    # Not ImageOps.exif_transpose: it writes all other tags, too, and raises where one of them is damaged.
    with contextlib.suppress(Exception):
        how = image.getexif().get(_ORIENTATION, 1)
        return how if how in range(1, 9) else 1
    return 1


def apply_window(values, window: tuple[float, float]):
    """Return values of any dtype as uint8: those up to the window's first black, those from its second white."""
    import numpy

    low, high = window
    if values.dtype.kind == "f" and not numpy.isfinite(values).all():
        raise WrongValue("it holds nan or infinity", fix="give such pixels a number: numpy.nan_to_num(image)")
    scaled = (values.astype(numpy.float64) - low) * (255 / (high - low))
    return scaled.clip(0, 255).round().astype(numpy.uint8)


def brightest(image) -> int:
    """Return the largest value of an image of 16 bits, or of one in the bytes of its file; 0 of any other."""
    import numpy
    from PIL import Image

    if "float" in str(getattr(image, "dtype", "")):
        return 0
    if isinstance(image, bytes):
        with Image.open(io.BytesIO(image)) as opened:
            return brightest(opened)
    if hasattr(image, "getbands") and image.mode not in (*_SIXTEEN, "I"):
        in_16 = any("16" in str(part[-1]) for part in coded(image))  # of which Pillow keeps the upper 8
        return 256 * max(high for _, high in image.getextrema()) + 255 if in_16 and len(image.getbands()) > 1 else 0
    values = image.detach().cpu().numpy() if hasattr(image, "detach") else numpy.asarray(image)
    return int(values.max()) if values.dtype.kind in "iu" and values.dtype.itemsize > 1 else 0


def has_frames(data: bytes) -> bool:
    """Tell whether the bytes of an image hold several pages or frames; a JPEG may hold others, but has one."""
    from PIL import Image

    is_png = data[:4] == b"\x89PNG" and b"acTL" in data[:65536]
    if is_png or data[:4] in (b"GIF8", b"RIFF", b"II*\0", b"MM\0*"):
        with contextlib.suppress(Exception), Image.open(io.BytesIO(data)) as image:  # the first one is whole
            return getattr(image, "n_frames", 1) > 1
    return False


def check_window(window) -> tuple[float, float] | None:
    """Return the window as two floats, or None; ValueError unless it is two numbers, the lower one first."""
    if window is None:
        return None
    try:
        low, high = map(float, window)
        fits = low < high and high - low < float("inf")
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise WrongValue(
            f"window is the values that become black and white, the lower one first, got {window!r}",
            fix="window=(0, 4095) for 12 bits, (-160, 240) for soft tissue in Hounsfield units",
        )
    return low, high


def orientation(data) -> int:
    """Return how a JPEG says to turn it, 1 (not) to 8, by EXIF or else XMP."""
    data = bytes(data)
    if not any(note in data for note in _NOTES):  # 30 us for 20 KB, where opening takes 70
        return 1
    from PIL import Image

    with contextlib.suppress(Exception), Image.open(io.BytesIO(data)) as image:
        return _noted_turn(image)
    return 1  # what is no whole image its decoder says


def turn(pixels, how: int):
    """Return (H, W, C) pixels turned as EXIF's orientation says, contiguous: what Pillow's `exif_transpose` returns."""
    import numpy

    if how >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if how in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if how in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return numpy.ascontiguousarray(pixels)
