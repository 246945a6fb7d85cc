"""Any image that Pillow opens as three channels of 8 bits: turned upright, on white, in a window of its values."""

import struct

from tpukit.essentials.show import WrongValue

# Pillow's modes of one channel of 16 bits; "I" is what it made of 16 bits in a PNG or PGM before version 10.3.
_SIXTEEN = ("I;16", "I;16L", "I;16B", "I;16N")
_ORIENTATION = 0x0112  # the tag of EXIF
_EXIF = b"Exif\0\0"  # what its segment of a JPEG begins with


def to_rgb(image, window: tuple[float, float] | None = None):
    """Return a Pillow image as RGB; of several pages or frames, the first.

    It is turned as its EXIF says; what is transparent shows white; more than 8 bits become 8 by a window.

    Args:
        image: of any mode; not modified.
        window: the values that become black and white, those beyond them too; None for 0 and 65,535 of 16 bits, so
            that none is clipped.

    Raises:
        ValueError: the image has more than 16 bits, or is of floats, and there is no window; or Pillow cannot
            convert it.
    """
    from PIL import Image

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
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def upright(image):
    """Return a Pillow image turned as its EXIF says."""
    # Not ImageOps.exif_transpose: it reads and writes all other tags, too, and raises where one of them is damaged.
    exif = image.info.get("exif", b"").removeprefix(_EXIF)
    how = _of_tags(exif) if exif else 1  # a TIFF has none: Pillow turns it as it loads
    if how == 1:
        return image
    names = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"]
    from PIL import Image

    return image.transpose(Image.Transpose[names[how - 2]])


def apply_window(values, window: tuple[float, float]):
    """Return values of any dtype as uint8: those up to the window's first black, those from its second white."""
    import numpy

    low, high = window
    if values.dtype.kind == "f" and not numpy.isfinite(values).all():
        raise WrongValue("it holds nan or infinity", fix="give such pixels a number: numpy.nan_to_num(image)")
    scaled = (values.astype(numpy.float64) - low) * (255 / (high - low))
    return scaled.clip(0, 255).round().astype(numpy.uint8)


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
    """Return how the EXIF of a JPEG says to turn it, 1 (not) to 8, without opening it with Pillow."""
    # A search of what a header may fill takes 0.3 us of a small file, a walk through its segments 5 of the 20 in all.
    if _EXIF not in bytes(data[:65536]):
        return 1
    at = 2
    # Up to the scan, segment by segment; what is cut off here is no whole image, as its decoder says.
    while data[at : at + 1] == b"\xff" and data[at + 1 : at + 2] != b"\xda":
        length = int.from_bytes(data[at + 2 : at + 4])
        if data[at + 1 : at + 2] == b"\xe1" and data[at + 4 : at + 10] == _EXIF:
            return _of_tags(bytes(data[at + 10 : at + 2 + length]))
        at += 2 + length
    return 1


def _of_tags(exif: bytes) -> int:
    """Return the orientation that EXIF's tags hold, 1 where they hold none or are damaged."""
    order = "<" if exif[:2] == b"II" else ">"
    try:
        (at,) = struct.unpack_from(order + "I", exif, 4)
        (count,) = struct.unpack_from(order + "H", exif, at)
        for number in range(count):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", exif, at + 2 + 12 * number)
            if tag == _ORIENTATION:
                return value if kind == 3 and 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


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
