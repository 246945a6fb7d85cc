"""Pictures as OpenCV gives them, by Pillow."""

import numpy
from PIL import Image

IMREAD_COLOR, INTER_AREA, COLOR_BGR2RGB = 1, 3, 4


def imread(path, *_):
    """Return (H, W, 3) uint8, blue first."""
    return numpy.array(Image.open(path).convert("RGB"))[:, :, ::-1].copy()


def cvtColor(image, _):
    """Return it the other way round."""
    return image[:, :, ::-1].copy()


def resize(image, size, *_):
    """Return (H, W, 3) of another size."""
    return numpy.array(Image.fromarray(image).resize(size))
