"""Decode one image: the pixels Pillow would give, to the last bit, or faster ones."""

import functools
import io


def decode(data: bytes, size: int | None = None, *, exact: bool = True, out=None):
    """Decode a JPEG, PNG or other image Pillow knows into (H, W, 3) uint8 in [0, 255], red, green, blue.

    Exact is the whole image decoded, then Pillow's bilinear filter: bit for bit
    `Image.open(...).convert("RGB").resize((size, size), BILINEAR)`. Not exact lets the JPEG decoder shrink by eighths
    as it decodes, down to the least that is still `size`, and resizes only what is then not `size` yet: three times
    as fast, and about 1.6 grey levels away on average (256 to 128 pixels).

    Args:
        data: the bytes of the file.
        size: height and width in pixels, the aspect is not kept; None for the image's own.
        exact: False for speed.
        out: the contiguous uint8 array that the pixels go to; None for a new one.

    Raises:
        ValueError: not a whole image, or one of 16 bits, which would be clipped to white.
    """
    pixels = _decode_jpeg(data, size, exact, out)
    if pixels is None or (size is not None and pixels.shape != (size, size, 3)):
        import numpy
        from PIL import Image

        image = _decode_any(data) if pixels is None else Image.fromarray(pixels)
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
        print("simplejpeg is not installed: Pillow decodes, at about half the speed\n  fix: pip install simplejpeg")
        return None
    return simplejpeg


def _decode_jpeg(data: bytes, size: int | None, exact: bool, out):
    """Return the pixels of a JPEG, or of one that is shrunk to no less than `size`; None where Pillow has to look."""
    decoder = jpeg_decoder()
    if decoder is None or not decoder.is_jpeg(data):
        return None
    least = 0 if exact or size is None else size
    try:
        height, width, colors, _ = decoder.decode_jpeg_header(data, min_height=least, min_width=least)
        if colors == "CMYK":  # not rounded as Pillow rounds
            return None
        fits = out is not None and out.shape == (height, width, 3)
        pixels = decoder.decode_jpeg(data, "RGB", min_height=least, min_width=least, buffer=out if fits else None)
        return out if fits else pixels
    except ValueError:  # what one decoder calls damaged another may open: Pillow decides, on every machine
        return None


def _decode_any(data: bytes):
    """Return a Pillow image of three channels."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as file:
            if file.mode[0] in "IF":  # I, I;16, F
                raise ValueError(
                    f"a {file.format} of mode {file.mode} has more than 8 bits a pixel: RGB would be mostly white\n"
                    "  fix:   choose a window of its values and save that as 8 bits"
                )
            return file.convert("RGB")
    # SyntaxError from a broken PNG; a header that lies may ask for more pixels than Pillow grants.
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        why = str(error).partition(" file <")[0]  # Pillow names the buffer, which helps nobody
        raise ValueError(f"not a whole image: {why} ({len(data):,} bytes)") from error
