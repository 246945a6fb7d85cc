"""Convert images to arrays of pixels: their mode, their window, and their resizing.

    mode "RGB"     (H, W, 3) uint8
    mode "L"       (H, W, 1) uint8, grey
    mode "I;16"    (H, W, 2) uint8, the low and the high byte of 16 bits

    400 x 300 to 64 x 64 by resize    "stretch"      all pixels, and the aspect changes
                                      "crop"         the middle 300 x 300 pixels
                                      "letterbox"    64 x 48, black above and below

torch_xla 2.9 cannot send uint16 to a device. So batches have two uint8 channels per 16-bit value,
and `uint16_values` joins them on the device.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tpukit.datasets.checked_files import whole_number
from tpukit.essentials.display import InvalidValueError

_CHANNELS = {"RGB": 3, "L": 1, "I;16": 2}  # modes of Pillow, and bytes per pixel
_RESIZES = ("stretch", "crop", "letterbox")


@dataclass(frozen=True)
class PixelForm:
    """The settings that, together with a size, determine the pixels of an image.

    Attributes:
        mode: "RGB", "L" or "I;16".
        resize: "stretch", "crop" or "letterbox".
        window: (low, high), the values that become black and white; None for the whole range.
    """

    mode: str = "RGB"
    resize: str = "stretch"
    window: tuple[float, float] | None = None

    def __post_init__(self):
        for name, known in (("mode", tuple(_CHANNELS)), ("resize", _RESIZES)):
            value = getattr(self, name)
            if value not in known:
                raise InvalidValueError(
                    f"{name} is one of {', '.join(map(repr, known))}, got {value!r}",
                    fix=f"options=tpukit.PackOptions({name}={known[1]!r})",
                )
        if self.mode == "I;16" and self.window is not None:
            raise InvalidValueError(
                'mode="I;16" stores all 16 bits, and a window makes 8 bits of them',
                fix='leave window out; or pass mode="L"',
            )

    @classmethod
    def of_plan(cls, plan: dict) -> "PixelForm":
        """Return the form that the plan of a pack has stored."""
        given = {name: plan[name] for name in ("mode", "resize") if plan.get(name)}
        window = plan.get("window")
        return cls(**given, window=tuple(window) if window else None)

    def plan(self) -> dict:
        """Return the settings that are not the default, as entries of a pack's plan."""
        default = asdict(PixelForm())
        settings = {}
        for name, value in asdict(self).items():
            if value != default[name]:
                settings[name] = list(value) if name == "window" else value
        return settings

    @property
    def channels(self) -> int:
        """Bytes per pixel."""
        return _CHANNELS[self.mode]


def image_size(size) -> tuple[int, int] | None:
    """Return the argument size= as (height, width), or None if it is None.

    Args:
        size: one number for both, or (height, width), in pixels.

    Raises:
        ValueError: `size` is something else, or a number is below 1.
    """
    if size is None:
        return None
    if not isinstance(size, Sequence) or isinstance(size, str):
        side = whole_number("size", size, 1)
        return side, side
    if len(size) != 2:
        raise InvalidValueError(
            f"size is one number, or (height, width), got {size!r}", fix="size=(256, 512)"
        )
    height, width = (whole_number("size", side, 1, is_optional=False) for side in size)
    return height, width


def size_in_plan(size) -> int | list[int] | None:
    """Return a size for a plan in JSON: one number, or [height, width] if they differ."""
    sides = image_size(size)
    if sides is None:
        return None
    height, width = sides
    return height if height == width else [height, width]


def size_in_words(size) -> str:
    """Return a size as text: "128" for a square, else "64 x 128" for height x width."""
    height, width = image_size(size)
    return str(height) if height == width else f"{height} x {width}"


def resized(image, size: tuple[int, int], resize: str, *, nearest: bool = False):
    """Resize a Pillow image to (height, width).

    Args:
        image: a Pillow image of mode RGB, L or F.
        size: height and width in pixels.
        resize: "stretch" changes the aspect ratio. "crop" preserves it, and cuts two sides off.
            "letterbox" preserves it, and adds black, or class 0, at two sides.
        nearest: True for the nearest pixel, as masks need; False for bilinear interpolation.
    """
    from PIL import Image, ImageOps

    height, width = size
    if image.size == (width, height):
        return image
    how = Image.Resampling.NEAREST if nearest else Image.Resampling.BILINEAR
    if resize == "crop":
        return ImageOps.fit(image, (width, height), how)
    if resize == "stretch":
        return image.resize((width, height), how)
    scale = min(width / image.width, height / image.height)
    inner_width = max(1, round(image.width * scale))
    inner_height = max(1, round(image.height * scale))
    inner = image.resize((inner_width, inner_height), how)
    boxed = Image.new(image.mode, (width, height))
    # The same as ImageOps.pad, which fails if a side becomes 0 pixels.
    left = round((width - inner_width) / 2)
    boxed.paste(inner, (left, round((height - inner_height) / 2)))
    return boxed


def as_pixels(image):
    """Return a Pillow image as (H, W, C) uint8: C is 3 for RGB, 1 for L, and 2 for F.

    Each value of mode F is rounded to 16 bits; its low and its high byte are the two channels.
    """
    import numpy

    array = numpy.array(image)
    if image.mode == "RGB":
        return array
    if image.mode == "L":
        return array[:, :, None]
    return byte_pairs(array.round().clip(0, 65535).astype("<u2"))


def as_image(pixels):
    """Return (H, W, C) uint8 pixels as a Pillow image, the inverse of `as_pixels`."""
    import numpy
    from PIL import Image

    pixels = numpy.ascontiguousarray(pixels)
    channels = pixels.shape[2]
    if channels == 3:
        return Image.fromarray(pixels)
    if channels == 1:
        return Image.fromarray(pixels[:, :, 0])
    # Floats, because Pillow can resize "I;16" only by nearest neighbour.
    return Image.fromarray(pixels.view("<u2")[:, :, 0].astype(numpy.float32))


def byte_pairs(values):
    """Return 16-bit values, (H, W), as their bytes, (H, W, 2) uint8, the low byte first."""
    import numpy

    little = numpy.ascontiguousarray(values, "<u2")
    return little.view(numpy.uint8).reshape(*values.shape, 2)


def uint16_values(images):
    """Convert images of `PackOptions(mode="I;16")` to their values, on their device.

    Call it in the step, or as `preprocess=` of `fit`: `uint16_values(images) / 65535`.

    Args:
        images: (N, 2, H, W) uint8 as `core.batches` yields them, or (2, H, W): the low byte of each
            value, then the high byte.

    Returns:
        (N, 1, H, W) or (1, H, W) float32, whole numbers from 0 to 65,535.

    Raises:
        ValueError: the images do not have two channels of uint8.
    """
    import torch

    if images.dtype != torch.uint8 or images.ndim < 3 or images.shape[-3] != 2:
        raise InvalidValueError(
            f"uint16_values takes (N, 2, H, W) uint8, got {tuple(images.shape)} {images.dtype}",
            fix="pass the images that core.batches yields for a pack that was made with "
            'PackOptions(mode="I;16")',
        )
    low, high = images.float().split(1, dim=-3)
    return low + 256 * high
