"""Masks: the class number of every pixel, stored losslessly beside its image, and decoded as its fourth channel.

So a batch is still one array of bytes, taken, cached, shared between processes and sent to the device like any other;
`tpukit.essentials.data.sources.split_masks` takes it apart there.
"""

import io

from tpukit.essentials.show import WrongValue, first_few
from tpukit.packs.image_modes import coded, orientation, turn, turn_of, upright

_MASKED = b"tpukit image + mask\0"  # no image format begins so; then the length of the image's file, 8 bytes


def is_masked(data) -> bool:
    """Tell whether these are the bytes of an image and its mask."""
    return data[: len(_MASKED)] == _MASKED


def join(image: bytes, mask: bytes) -> bytes:
    """Return an image and its mask, both the bytes of files, as one; the mask turned with an image that will be."""
    how = orientation(image) if image[:2] == b"\xff\xd8" else _turn_of_other(image)
    if how != 1 and _opened(mask, turn_of) == 1:
        mask = encode_mask(_turned_with(open_mask(mask), _opened(image, lambda file: file.size), how))
    return b"".join([_MASKED, len(image).to_bytes(8, "little"), image, mask])


def _turn_of_other(image: bytes) -> int:
    """Return how an image that is no JPEG says to turn it; most PNGs need not be decoded for that."""
    if image[:4] == b"\x89PNG" and not any(note in image for note in (b"eXIf", b"tEXt", b"zTXt", b"iTXt")):
        return 1
    return _opened(image, turn_of)


def parts_of(data: bytes) -> tuple:
    """Return the bytes of the image and those of its mask, of what `join` has returned."""
    start = len(_MASKED) + 8
    middle = start + int.from_bytes(data[len(_MASKED) : start], "little")
    return data[start:middle], data[middle:]


def palette_of(mask: bytes) -> list[int]:
    """Return the palette of a mask in the bytes of a file, red, green, blue of each number; [] without one."""
    palette = _opened(mask, lambda mask: mask.mode == "P" and mask.getpalette())
    return palette if isinstance(palette, list) else []


def _opened(data: bytes, ask):
    """Return what a question to the image in the bytes of a file gives; 1, "not turned", where it is none."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as file:
            return ask(file)
    except (OSError, SyntaxError, ValueError, MemoryError, Image.DecompressionBombError):
        return 1  # its decoder says what is wrong


def _turned_with(mask, size: tuple[int, int], how: int):
    """Return a mask as it lies on its image once that is turned: where the image is not square its shape tells."""
    width, height = size  # as the image is stored
    as_stored, as_turned = (height, width), (width, height) if how >= 5 else (height, width)
    if as_stored == as_turned:
        raise WrongValue(
            "the EXIF of the image says to turn it, and nothing says whether its mask is turned already",
            found=f"orientation {how}, {width} x {height} pixels",
            fix="save the image as it is to be seen: ImageOps.exif_transpose(image).save(file)",
        )
    return turn(mask[:, :, None], how)[:, :, 0] if mask.shape == as_stored else mask


def decode_masked(data, size: int | None, decode, *, check: bool):
    """Return (H, W, 4) uint8 of what `join` has returned: the image that `decode(data, size)` gives, and its mask.

    `check` compares their heights and widths, for which the image is decoded whole: when it is packed.
    """
    image, mask = parts_of(data)
    mask = open_mask(mask)
    image = decode(image, None if check else size)
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
        raise WrongValue(
            f"the image has {sizes[0]} pixels, and its mask {sizes[1]}",
            fix="save the mask at the size of its image: mask.resize(image.size, PIL.Image.Resampling.NEAREST)",
        )


def open_mask(data):
    """Return the mask in the bytes of a file, (H, W) uint8; ValueError says why it is none."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as file:
            return read_mask(file)
    except (OSError, SyntaxError, MemoryError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"its mask is not a whole image: {str(error).partition(' file <')[0]}") from error


def read_mask(mask):
    """Return a mask as (H, W) uint8: of a Pillow image with a palette the numbers of its colours.

    Args:
        mask: a Pillow image of one channel, or an array or tensor (H, W), (1, H, W) or (H, W, 1) of whole numbers from
            0 to 255.
    """
    import numpy

    if hasattr(mask, "getbands"):
        if mask.format in ("JPEG", "MPO"):
            raise WrongValue(
                "the mask is a JPEG, which blurs class numbers",
                fix="draw it again, and save it as PNG; of two classes PIL.Image.fromarray(numpy.asarray(mask) > 127)",
            )
        if len(mask.getbands()) > 1:
            raise WrongValue(
                f"a mask is one class number for each pixel, and this is an image of mode {mask.mode}",
                found=f"colours {first_few([colour for _, colour in mask.getcolors(mask.width * mask.height)], 4)}",
                fix="sum(k * (numpy.asarray(mask) == colour).all(-1) for k, colour in enumerate(colours)), the same "
                "for all masks; of a grey one mask.getchannel(0)",
            )
        # Pillow makes 8 bits of 2 or 4 in a grey file, so that the brightest is white: of class 3 it makes 255 or 51.
        step = next((by for how, by in (("L;2", 85), ("L;4", 17)) if how in str(coded(mask))), 1)
        mask = numpy.asarray(upright(mask)) // step
    mask = mask.detach().cpu().numpy() if hasattr(mask, "detach") else numpy.asarray(mask)
    if mask.ndim == 3 and 1 in (mask.shape[0], mask.shape[2]):
        mask = mask[0] if mask.shape[0] == 1 else mask[:, :, 0]
    if mask.ndim != 2 or not mask.size:
        raise WrongValue(
            f"a mask is (H, W), one class number for each pixel, and this has the shape {mask.shape}",
            fix="of colours, sum(k * (mask == colour).all(-1) for k, colour in enumerate(colours)); of a channel for "
            "each class, mask.argmax(0), or mask.argmax(-1) where they are last",
        )
    if mask.dtype == bool or mask.dtype == numpy.uint8:
        return numpy.ascontiguousarray(mask, numpy.uint8)
    wrong = ~((mask >= 0) & (mask <= 255) & (mask == numpy.floor(mask)))
    if wrong.any():
        raise WrongValue(
            f"a mask holds class numbers, whole and from 0 to 255, and this {mask[wrong][0]} ({mask.dtype})",
            fix="numpy.searchsorted(values, mask), where values are those of all masks, sorted; 255 may stand for "
            "pixels that do not count, numpy.where(mask < 0, 255, mask), with ignore_index=255",
        )
    return mask.astype(numpy.uint8)


def encode_mask(mask) -> bytes:
    """Return (H, W) uint8 as the bytes of a PNG."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(mask).save(file, "PNG", compress_level=1)  # masks are flat: higher levels win little
    return file.getvalue()
