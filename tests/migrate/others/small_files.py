"""Small files in place of a notebook's own."""

from pathlib import Path

import numpy
import pandas
from PIL import Image

INPUT = Path("../input")


def picture(path, size=32, number=0):
    """Write a picture of noise."""
    path = INPUT / path
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = numpy.random.default_rng(number).integers(0, 255, (size, size, 3), dtype=numpy.uint8)
    Image.fromarray(noise).save(path)


def table(path, **columns):
    """Write a CSV file."""
    path = INPUT / path
    path.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(columns).to_csv(path, index=False)
