"""Images that Pillow writes, in every format and mode, have Pillow's pixels after `pack` and `decode`.

A file belongs to the suite if Pillow opens it again. Transparent images are on white, and images
of 16 bits or floats go through a window: Pillow's own `convert` would make them black or clip them.
"""

import functools
import io

import numpy as np
import pandas
import pytest
from helpers.pictures import quietly
from PIL import Image, ImageOps

from tpukit.datasets import PackedImages, PackOptions, PixelForm, decode

SIZE = 20
WINDOW = (0, 65_535)
MODES = ("1", "L", "P", "LA", "La", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV")
DEEP_MODES = ("LAB", "I", "F", "I;16", "I;16L", "I;16B")
ORIENTATIONS = (1, 2, 6, 7)  # as it is, mirrored, turned, both
ORIENTATION = 0x0112  # the tag of EXIF


def picture(mode):
    """Return an image of 24 x 16 random colours and, in the modes that have it, transparency."""
    values = np.random.default_rng(0).integers(0, 256, (16, 24, 4), np.uint8)
    colours = Image.fromarray(values, "RGBA")
    if mode in ("La", "PA"):
        return colours.convert("LA").convert(mode)
    if mode in ("I;16", "I;16L", "I;16B"):
        deep = Image.fromarray(values[:, :, 0].astype(np.uint16) * 257)
        return deep.convert("I").convert(mode)
    if mode in ("LAB", "HSV", "CMYK", "YCbCr"):
        return colours.convert("RGB").convert(mode)
    return colours.convert(mode)


def written(kind, mode, orientation):
    """Return the bytes of a file, or None if Pillow does not write it or does not open it again."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    file = io.BytesIO()
    try:
        picture(mode).save(file, kind, exif=exif)
        Image.open(file).load()
    except Exception:  # each format raises errors of its own
        return None
    return file.getvalue()


def by_pillow(data):
    """Return the image in RGB, turned by its EXIF."""
    image = Image.open(io.BytesIO(data))
    image = ImageOps.exif_transpose(image)
    if image.mode[0] in "IF":
        low, high = WINDOW
        values = np.asarray(image).astype(np.float64)
        scaled = (values - low) * (255 / (high - low))
        return Image.fromarray(scaled.clip(0, 255).round().astype(np.uint8)).convert("RGB")
    # An ICNS may have mode "P" without a palette, in which Pillow's own attribute fails.
    has_palette = image.mode != "P" or image.palette is not None
    if has_palette and image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def all_files():
    Image.init()
    for kind in sorted(Image.SAVE):
        for mode in (*MODES, *DEEP_MODES):
            for orientation in ORIENTATIONS:
                yield f"{kind}-{mode.replace(';', '')}-{orientation}", (kind, mode, orientation)


@functools.cache
def files():
    """Return the bytes of each file, by name; once, if its format has no orientation."""
    found = {}
    for name, how in all_files():
        data = written(*how)
        if data is not None and data not in found.values():
            found[name] = data
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted({name.partition("-")[0] for name in files()}))
def test_a_format_is_decoded_as_pillow_converts_it(kind):
    mine = {name: data for name, data in files().items() if name.partition("-")[0] == kind}
    for name, data in mine.items():
        pixels = decode(data, form=PixelForm(window=WINDOW))
        assert np.array_equal(pixels, np.asarray(by_pillow(data))), name


def is_deep(data):
    with Image.open(io.BytesIO(data)) as image:
        return image.mode[0] in "IF"


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Return the pack of all files as {name: (SIZE, SIZE, 3) pixels}."""
    folder = tmp_path_factory.mktemp("files")
    for name, data in files().items():
        (folder / name).write_bytes(data)
    found = {}
    for window in (None, WINDOW):  # images of 8 bits have no window
        names = [name for name, data in files().items() if is_deep(data) == (window is not None)]
        how = {"root": folder, "options": PackOptions(window=window)}
        table = pandas.DataFrame({"path": names})
        made = quietly(table, tmp_path_factory.mktemp("pack"), **how)
        images = PackedImages(made.folder, SIZE)
        for number, (image, _) in enumerate(images):
            found[images.name(number)] = image.permute(1, 2, 0).numpy()
    return found


@pytest.mark.parametrize("name", files())
def test_a_file_has_its_pixels_in_a_pack(name, packed):
    expected = by_pillow(files()[name]).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    assert np.array_equal(packed[name], np.asarray(expected))
