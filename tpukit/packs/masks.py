"""Masks: the class number of every pixel, stored losslessly beside its image, and decoded as its fourth channel.

So a batch is still one array of bytes, taken, cached, shared between processes and sent to the device like any other;
`tpukit.essentials.data.sources.split_masks` takes it apart there.
"""

import io

from tpukit.packs.image_modes import upright

_MASKED = b"tpukit image + mask\0"  # no image format begins so; then the length of the image's file, 8 bytes


def is_masked(data) -> bool:
    """Tell whether these are the bytes of an image and its mask."""
    return data[: len(_MASKED)] == _MASKED


def join(image: bytes, mask: bytes) -> bytes:
    """Return an image and its mask, both the bytes of files, as one."""
    return b"".join([_MASKED, len(image).to_bytes(8, "little"), image, mask])


def decode_masked(data, size: int | None, decode, *, check: bool):
    """Return (H, W, 4) uint8: the image that `decode(data, size)` gives, and its mask.

    Args:
        data: what `join` has returned.
        size: height and width in pixels; None for the image's own.
        decode: of the image.
        check: compare their heights and widths, for which the image is decoded whole: when it is packed.
    """
    start = len(_MASKED) + 8
    middle = start + int.from_bytes(data[len(_MASKED) : start], "little")
    mask = open_mask(data[middle:])
    image = decode(data[start:middle], None if check else size)
    if check:
        check_alike(image, mask)
    return stack(resize(image, size), mask)


def stack(image, mask):
    """Return an image (H, W, 3) and a mask of any size as (H, W, 4)."""
    import numpy
    from PIL import Image

    height, width = image.shape[:2]
    if mask.shape != (height, width):
        mask = numpy.asarray(Image.fromarray(mask).resize((width, height), Image.Resampling.NEAREST))
    return numpy.concatenate([image, mask[:, :, None]], axis=2)


def resize(pixels, size: int | None):
    """Return (H, W, 3) or, with a mask, (H, W, 4) at a size: the image bilinear, the mask nearest."""
    import numpy
    from PIL import Image

    if size is None or pixels.shape[:2] == (size, size):
        return pixels
    image = Image.fromarray(numpy.ascontiguousarray(pixels[:, :, :3])).resize((size, size), Image.Resampling.BILINEAR)
    image = numpy.asarray(image)
    return image if pixels.shape[2] == 3 else stack(image, numpy.ascontiguousarray(pixels[:, :, 3]))


def check_alike(image, mask) -> None:
    """Raise ValueError unless an image and its mask have the same height and width."""
    if image.shape[:2] != mask.shape:
        sizes = [f"{one.shape[1]} x {one.shape[0]}" for one in (image, mask)]
        raise ValueError(f"the image has {sizes[0]} pixels, and its mask {sizes[1]}")


def open_mask(data):
    """Return the mask in the bytes of a file, (H, W) uint8; ValueError says why it is none."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as file:
            if file.format == "JPEG":
                raise ValueError("the mask is a JPEG, which blurs class numbers: save masks as PNG")
            return read_mask(file)
    except (OSError, SyntaxError, MemoryError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"its mask is not a whole image: {str(error).partition(' file <')[0]}") from error


def read_mask(mask):
    """Return a mask as (H, W) uint8: of a Pillow image with a palette the numbers of its colours.

    Args:
        mask: a Pillow image of one channel, or an array or tensor (H, W) or (1, H, W) of whole numbers from 0 to 255.
    """
    import numpy

    if hasattr(mask, "getbands"):
        if len(mask.getbands()) > 1:
            raise ValueError(
                f"a mask is one class number for each pixel, and this is an image of mode {mask.mode}: "
                "map its colours to numbers, or mask.convert('L') where it is grey"
            )
        mask = numpy.asarray(upright(mask))
    mask = mask.detach().cpu().numpy() if hasattr(mask, "detach") else numpy.asarray(mask)
    mask = mask[0] if mask.ndim == 3 and mask.shape[0] == 1 else mask
    if mask.ndim != 2 or not mask.size:
        raise ValueError(f"a mask is (H, W), one class number for each pixel, and this has the shape {mask.shape}")
    if mask.dtype == bool or mask.dtype == numpy.uint8:
        return numpy.ascontiguousarray(mask, numpy.uint8)
    wrong = ~((mask >= 0) & (mask <= 255) & (mask == numpy.floor(mask)))
    if wrong.any():
        raise ValueError(
            f"a mask holds class numbers, whole and from 0 to 255, and this {mask[wrong][0]} ({mask.dtype}): "
            "number the classes from 0; 255 may stand for pixels that do not count, with ignore_index=255"
        )
    return mask.astype(numpy.uint8)


def encode_mask(mask) -> bytes:
    """Return (H, W) uint8 as the bytes of a PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(mask).save(file, "PNG", compress_level=1)  # masks are flat: higher levels win little
    return file.getvalue()
