"""Small generated images, folders of them, and the packs of both."""

import struct
import zlib

import numpy as np
import pandas
from PIL import Image

from tpukit.datasets import pack


def picture(*seed, side=16):
    """Return a square image of random colours."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8))


def folder_of(path, *files):
    """Write a picture to each file below a folder; return the folder."""
    for number, file in enumerate(files):
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path / file, {"jfif": "JPEG"}.get(file.rpartition(".")[2]))
    return path


def table_of(count, folder, **columns):
    """Return a table of so many pictures, which it writes into a folder."""
    names = [f"{number}.png" for number in range(count)]
    folder_of(folder, *names)
    return pandas.DataFrame({"path": names, **columns})


def png_of(width, height, bits, kind, rows):
    """Return a PNG that Pillow does not write, from its bits per channel, colours and rows."""

    def part(name, data):
        checksum = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)

    head = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    parts = part(b"IHDR", head) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def tiff_of(pixels):
    """Return a TIFF of (H, W, channels) uint16, of which Pillow opens none with 13 channels."""
    height, width, channels = pixels.shape
    rows = [(256, 4, width), (257, 4, height), (259, 3, 1), (262, 3, 1), (273, 4, 0)]
    rows += [(277, 3, channels), (278, 4, height), (279, 4, pixels.nbytes), (284, 3, 1)]
    start = 8 + 2 + 12 * len(rows) + 4
    directory = struct.pack("<H", len(rows))
    for tag, kind, value in rows:
        directory += struct.pack("<HHII", tag, kind, 1, start if tag == 273 else value)
    return b"II*\0" + struct.pack("<I", 8) + directory + bytes(4) + pixels.tobytes()


def quietly(source, folder, **options):
    """Make a pack without progress."""
    return pack(source, folder, progress="off", **options)
