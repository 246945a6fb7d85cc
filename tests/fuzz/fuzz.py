"""Damaged, odd and lying files through decode, pack and cache: none may give wrong pixels or labels without an error.

    python tests/fuzz/fuzz.py [--files 2000] [--meanings 300] [--seed 0] [--only png]

And ordinary collections whose truth is known, see `meaning.py`: none may come out with another class, side or mask.

Every file is read in a process of its own, with a limit of memory and of time. What comes of it:

- an error: whatever it is, nobody trains on such a file;
- right: the pixels and labels of the file before it was damaged;
- untold: others, but no decoder could know. Either an independent one (libpng, libwebp and libjpeg-turbo through
  torchvision; Python's csv) makes the very same of the damaged bytes without an error, as of a bit that flips in a
  JPEG's coefficients; or there is none (BMP, TIFF, DICOM; GIF, of which giflib shows no transparency) and the format
  has no checksum that the damage breaks;
- wrong: any other pixels or labels; a process that crashes counts here;
- hung: no answer within 30 s.

Nothing is ever untold where the format can reveal it: any damage inside PNG, TFRecord, packs and caches, whose
checksums cover all bytes; a file of any format that was cut. (A TFRecord cut between two records is shorter, not wrong;
of a text table cut between two lines the same is true.)

Prints a table and, last, one line of JSON; exits with 1 if anything is wrong or hung. Such files are kept in runs/fuzz.
"""

import argparse
import collections
import csv
import io
import itertools
import json
import os
import pickle
import random
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import layouts
import meaning
import numpy as np
from PIL import Image, ImageOps

SECONDS, MEMORY = (
    120,
    2 << 30,
)  # for each file; bytes of address space beyond what the process has at its start
VERDICTS = ("error", "right", "untold", "wrong", "hung")
SIDE = 24  # of images in packs and caches


@dataclass
class Subject:
    """A whole file, and what has to come of it.

    Attributes:
        kind: its row in the table.
        data: its bytes.
        read: from bytes and an empty folder to what tpukit makes of them.
        truth: what `read` returns for `data`.
        other: the same by an independent reader, if there is one.
        reveals: the damages that the format can reveal, so that nothing else than `truth` may come.
        lie: changes what the header says, if known.
    """

    kind: str
    data: bytes
    read: Callable[[bytes, Path], object]
    truth: object
    other: Callable[[bytes], object] | None = None
    reveals: tuple[str, ...] = ("cut",)
    lie: Callable[[bytes, random.Random], bytes] | None = None


EVERYTHING = ("flip", "zero", "cut", "insert", "remove", "swap")


def flip(data: bytes, draw: random.Random) -> bytes:
    """Flip one to three bits, half of the time near the beginning, where the structure is."""
    out, end = bytearray(data), draw.choice([len(data), min(len(data), 64)])
    for _ in range(draw.randint(1, 3)):
        out[draw.randrange(end)] ^= 1 << draw.randrange(8)
    return bytes(out)


def zero(data: bytes, draw: random.Random) -> bytes:
    """Write zeros or ones over a stretch, as a bad block does."""
    start, length = draw.randrange(len(data)), draw.choice([1, 4, 16, 64, 512])
    return (
        data[:start]
        + draw.choice([b"\0", b"\xff"]) * len(data[start : start + length])
        + data[start + length :]
    )


def cut(data: bytes, draw: random.Random) -> bytes:
    """Cut the end off."""
    return data[: draw.choice([draw.randrange(len(data)), max(0, len(data) - draw.randint(1, 40))])]


def insert(data: bytes, draw: random.Random) -> bytes:
    """Put bytes in."""
    start = draw.randrange(len(data) + 1)
    return data[:start] + draw.randbytes(draw.choice([1, 2, 7, 100])) + data[start:]


def remove(data: bytes, draw: random.Random) -> bytes:
    """Take bytes out of the middle."""
    start = draw.randrange(max(1, len(data) - 1))
    return data[:start] + data[start + draw.choice([1, 2, 7, 100]) :]


def swap(data: bytes, draw: random.Random) -> bytes:
    """Exchange two stretches."""
    length = max(1, min(64, len(data) // 4))
    one, two = sorted((draw.randrange(len(data) // 2), draw.randrange(len(data) // 2, len(data))))
    a, b = data[one : one + length], data[two : two + length]
    return (
        data[:one] + b + data[one + len(a) : two] + a + data[two + len(b) :]
        if one + length <= two
        else data[::-1]
    )


DAMAGE = {"flip": flip, "zero": zero, "cut": cut, "insert": insert, "remove": remove, "swap": swap}


def png_lie(data: bytes, draw: random.Random) -> bytes:
    """Write another size into a PNG, with the right checksum."""
    size = struct.pack(">II", *(draw.choice([1, 8, 33, 100, 30_000, 2**31 - 1]) for _ in range(2)))
    header = b"IHDR" + size + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def jpeg_lie(data: bytes, draw: random.Random) -> bytes:
    """Write another size into a JPEG."""
    at = next(
        (
            data.find(b"\xff" + bytes([code]))
            for code in (0xC0, 0xC2)
            if b"\xff" + bytes([code]) in data
        ),
        0,
    )
    size = struct.pack(">HH", *(draw.choice([1, 8, 33, 100, 30_000, 65_500]) for _ in range(2)))
    return data[: at + 5] + size + data[at + 9 :]


def lie_at(at: int, code: str) -> Callable:
    """Write another size where a format keeps it."""

    def lie(data: bytes, draw: random.Random) -> bytes:
        size = struct.pack(code, *(draw.choice([1, 8, 33, 100, 30_000]) for _ in range(2)))
        return data[:at] + size + data[at + len(size) :]

    return lie


MODES = {
    "jpeg": ("RGB", "RGB", "L", "CMYK", "progressive", "exif"),
    "png": ("RGB", "L", "P", "RGBA", "LA", "1", "I;16"),
    "tiff": ("raw", "lzw", "deflate", "packbits", "jpeg", "L", "RGBA", "CMYK", "1", "pages"),
    "gif": ("P", "L", "frames"),
    "bmp": ("RGB", "L", "P", "1", "RGBA"),
    "webp": ("lossless", "lossy", "RGBA"),
}
LIES = {"jpeg": jpeg_lie, "png": png_lie, "gif": lie_at(6, "<HH"), "bmp": lie_at(18, "<ii")}


def drawn(draw: random.Random) -> Image.Image:
    """Return a picture with edges and gradients, of odd sides."""
    random_ = np.random.default_rng(draw.randrange(2**32))
    height, width = random_.integers(17, 60, 2)
    y, x = np.mgrid[:height, :width]
    pixels = np.stack([x * 255 / width, y * 255 / height, (x // 5 + y // 7) % 2 * 200], axis=-1)
    return Image.fromarray(
        np.clip(pixels + random_.normal(0, 8, pixels.shape), 0, 255).astype(np.uint8)
    )


def encoded(kind: str, how: str, draw: random.Random) -> bytes:
    """Return a file of a kind."""
    image, options = drawn(draw), {}
    if how == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    elif how in ("L", "P", "RGBA", "LA", "1", "CMYK"):
        image = image.convert(how)
    if how == "progressive":
        options["progressive"] = True
    elif how == "exif":
        exif = Image.Exif()
        exif[0x0112] = 6
        options["exif"] = exif
    elif how in ("frames", "pages"):
        options |= {"save_all": True, "append_images": [drawn(draw)]}
    elif kind == "tiff" and how in ("lzw", "deflate", "packbits", "jpeg"):
        options["compression"] = {"lzw": "tiff_lzw", "deflate": "tiff_adobe_deflate"}.get(how, how)
    elif kind == "webp":
        options["lossless"] = how == "lossless"
    file = io.BytesIO()
    image.save(file, kind.upper(), **options)
    return file.getvalue()


def by_kit(data: bytes, folder: Path) -> np.ndarray:
    """Decode as tpukit does."""
    from tpukit.datasets.decoding import decode

    return decode(data)


def by_pillow(data: bytes) -> np.ndarray:
    """Decode as Pillow does, turned by EXIF, on white, 16 bits fitted into 8: of a whole file that is the truth."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode == "I;16":
        image = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return np.asarray(image.convert("RGB"))


def by_torchvision(data: bytes) -> np.ndarray:
    """Decode with torchvision's own libraries."""
    import torch
    from torchvision import io as vision

    turned = (
        0x0112 in Image.open(io.BytesIO(data)).getexif()
    )  # torchvision sees EXIF where its marker is damaged, too
    data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    image = vision.decode_image(data, vision.ImageReadMode.RGB, apply_exif_orientation=turned)
    return (image if image.ndim == 3 else image[0]).permute(1, 2, 0).numpy()


def image_subject(kind: str, draw: random.Random) -> Subject:
    """Return an image that is decoded, or, one in eight, packed and cached between two others."""
    how = draw.choice(MODES[kind])
    data = encoded(kind, how, draw)
    other = None if kind in ("tiff", "bmp", "gif") else by_torchvision
    reveals = EVERYTHING if kind == "png" else ("cut",)
    if draw.random() > 1 / 8:
        return Subject(kind, data, by_kit, by_pillow(data), other, reveals, LIES.get(kind))
    read = lambda data, folder: through_pack(data, kind, folder)  # noqa: E731
    resized = (lambda data: expected(by_torchvision(data))) if other else None
    return Subject(
        f"{kind}, packed", data, read, expected(by_pillow(data)), resized, reveals, LIES.get(kind)
    )


NEIGHBOURS = [Image.fromarray(np.full((30, 20, 3), grey, np.uint8)) for grey in (60, 200)]


def expected(pixels: np.ndarray) -> tuple:
    """Return what `through_pack` has to: the cached pixels of all three images, and their labels."""
    images = [NEIGHBOURS[0], Image.fromarray(pixels), NEIGHBOURS[1]]
    small = [np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)) for image in images]
    return np.stack(small), np.array([0, 1, 2])


def through_pack(data: bytes, kind: str, folder: Path) -> tuple:
    """Pack an image between two others, cache them; return the pixels and labels in the order of the table."""
    import pandas

    from tpukit.datasets.image_cache import build_image_cache
    from tpukit.datasets.packing import pack

    paths = [folder / "0.png", folder / f"1.{kind}", folder / "2.png"]
    NEIGHBOURS[0].save(paths[0])
    paths[1].write_bytes(data)
    NEIGHBOURS[1].save(paths[2])
    table = pandas.DataFrame({"path": list(map(str, paths)), "label": [0, 1, 2]})
    records = pack(table, folder / "records", labels=["label"], progress="off")
    cache = build_image_cache(records, folder / "cache", size=SIDE, workers=1, progress="off")
    order = np.argsort(cache.rows)
    return cache.take(order), np.asarray(cache.labels)[order, 0]


def dicom_subject(draw: random.Random) -> Subject:
    """Return pydicom's real CT slice, through the three windows."""
    import pydicom.data

    data = Path(pydicom.data.get_testdata_file("CT_small.dcm", download=False)).read_bytes()

    def read(data: bytes, folder: Path) -> np.ndarray:
        from tpukit.pe import read_dicom, three_windows

        (folder / "slice.dcm").write_bytes(data)
        return three_windows(read_dicom(folder / "slice.dcm"))

    return Subject("dicom", data, read, _once(read, data))


def tfrecord_subject(draw: random.Random) -> Subject:
    """Return a TFRecord file of a few examples, written here."""
    import google_crc32c

    def masked(part: bytes) -> bytes:
        value = google_crc32c.value(part)
        return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) % 2**32)

    def field(number: int, part: bytes) -> bytes:
        size, length = len(part), b""
        while size > 127:
            size, length = size >> 7, length + bytes([size & 127 | 128])
        return bytes([number << 3 | 2]) + length + bytes([size]) + part

    def example(image: bytes, label: int) -> bytes:
        features = {
            b"image": field(1, field(1, image)),
            b"target": field(3, field(1, bytes([label]))),
        }
        return field(
            1,
            b"".join(
                field(1, field(1, name) + field(2, value)) for name, value in features.items()
            ),
        )

    payloads = [
        example(draw.randbytes(draw.randint(1, 300)), draw.randrange(100)) for _ in range(6)
    ]
    lengths = [struct.pack("<Q", len(payload)) for payload in payloads]
    pairs = zip(lengths, payloads, strict=True)
    data = b"".join(size + masked(size) + payload + masked(payload) for size, payload in pairs)

    def read(data: bytes, folder: Path) -> list:
        from tpukit.datasets.tfrecords import read_tfrecords

        (folder / "a.tfrec").write_bytes(data)
        return [(image, labels.tolist()) for image, labels in read_tfrecords(folder / "a.tfrec")]

    return Subject("tfrecord", data, read, _once(read, data), None, EVERYTHING)


def stored_subject(kind: str, made: Path, draw: random.Random) -> Subject:
    """Return one file of a pack or a cache, among its others."""
    whole = made / kind
    name = draw.choice(
        sorted(path.name for path in whole.iterdir() if path.is_file() and path.stat().st_size)
    )

    def read(data: bytes, folder: Path) -> tuple:
        from tpukit.datasets.packed_images import PackedImages
        from tpukit.datasets.pixel_cache import CachedImages

        shutil.copytree(whole, folder / kind)
        (folder / kind / name).write_bytes(data)
        opened = PackedImages(folder / kind) if kind == "pack" else CachedImages(folder / kind)
        order = np.argsort(opened.rows)
        return opened.take(order), np.asarray(opened.labels)[order]

    data = (whole / name).read_bytes()
    return Subject(kind, data, read, _once(read, data), None, EVERYTHING)


def make_stored(folder: Path) -> None:
    """Make the pack and the cache that are damaged."""
    from tpukit.datasets.image_cache import build_image_cache
    from tpukit.datasets.packing import PackOptions, pack

    draw = random.Random(0)
    items = [(np.asarray(drawn(draw).resize((SIDE, SIDE))), [number, 7]) for number in range(20)]
    records = pack(
        items, folder / "pack", options=PackOptions(shard_size=8, workers=1), progress="off"
    )
    build_image_cache(records, folder / "cache", size=SIDE, workers=1, progress="off")


def csv_subject(made: Path, draw: random.Random) -> Subject:
    """Return the competition's table of labels, damaged as bytes."""
    from tpukit.pe import LABELS

    data = (made / "phantom" / "train.csv").read_bytes()

    def read(data: bytes, folder: Path) -> list:
        from tpukit.pe import read_labels

        (folder / "train.csv").write_bytes(data)
        table = read_labels(folder)
        return [
            (row["SOPInstanceUID"], [int(row[name]) for name in LABELS])
            for row in table.to_dict("records")
        ]

    def other(data: bytes) -> list:
        rows = csv.DictReader(io.StringIO(data.decode(), newline=""), strict=True)
        return [(row["SOPInstanceUID"], [int(float(row[name])) for name in LABELS]) for row in rows]

    return Subject("train.csv", data, read, _once(read, data), other, ())


ODD = [
    0,
    1,
    -1,
    0.5,
    2**24,
    2**24 + 1,
    1e300,
    1e-300,
    float("nan"),
    float("inf"),
    None,
    True,
    "1",
    "cat",
    b"1",
    "",
    "1e3",
]


def table_subject(draw: random.Random) -> Subject:
    """Return a table with odd labels: what is packed has the values of the column, or it is refused."""
    values = [
        draw.choice(ODD) if draw.random() < 0.3 else draw.choice([0, 1, 0.25]) for _ in range(4)
    ]

    def read(data: bytes, folder: Path) -> list:
        import pandas

        from tpukit.datasets.packing import pack

        values = pickle.loads(data)
        for number in range(len(values)):
            NEIGHBOURS[number % 2].save(folder / f"{number}.png")
        paths = [str(folder / f"{number}.png") for number in range(len(values))]
        table = pandas.DataFrame({"path": paths, "label": values})
        records = pack(table, folder / "records", labels=["label"], progress="off")
        return np.asarray(records.labels)[np.argsort(records.rows)].ravel().tolist()

    truth = [float(value) if isinstance(value, int | float) else value for value in values]
    return Subject("odd labels", pickle.dumps(values), read, truth, None, EVERYTHING)


def _once(read: Callable, data: bytes) -> object:
    with tempfile.TemporaryDirectory() as folder:
        return read(data, Path(folder))


def subjects(made: Path, draw: random.Random, only: str | None) -> "itertools.cycle":
    """Yield one subject after another, of every kind in turn."""
    makers = {kind: (lambda kind=kind: image_subject(kind, draw)) for kind in MODES}
    makers["dicom"] = lambda: dicom_subject(draw)
    makers["tfrecord"] = lambda: tfrecord_subject(draw)
    makers["pack"], makers["cache"] = (
        lambda k=k: stored_subject(k, made, draw) for k in ("pack", "cache")
    )
    makers["train.csv"], makers["odd labels"] = (
        lambda: csv_subject(made, draw),
        lambda: table_subject(draw),
    )
    for kind in itertools.cycle([only] if only else makers):
        yield makers[kind]()


def damaged(subject: Subject, draw: random.Random) -> tuple[str, bytes]:
    """Return what was done to a subject, and its bytes then."""
    ways = ["none", *DAMAGE, *DAMAGE, *["lie"] * bool(subject.lie), "junk"]
    way = "none" if subject.kind == "odd labels" else draw.choice(ways)
    if way == "junk":
        return way, draw.choice(
            [b"", draw.randbytes(200), subject.data[:12] + draw.randbytes(500), subject.data * 2]
        )
    if way == "lie":
        return way, subject.lie(subject.data, draw)
    return way, subject.data if way == "none" else DAMAGE[way](subject.data, draw)


def judge(subject: Subject, way: str, data: bytes, folder: Path) -> str:
    """Return the verdict on one file; in a process that may crash."""
    try:
        found = subject.read(data, folder)
    except Exception:
        return "error"
    if same(found, subject.truth):
        return "right"
    if isinstance(found, list) and way == "cut" and found == subject.truth[: len(found)]:
        return "untold"
    if way in ("none", *subject.reveals):
        return "wrong"
    if subject.other is None:
        return "untold"
    try:
        return "untold" if same(found, subject.other(data)) else "wrong"
    except Exception:
        return "wrong"


def same(one: object, two: object) -> bool:
    """Tell whether two results are equal, arrays to the last bit."""
    if isinstance(one, tuple):
        return all(itertools.starmap(same, zip(one, two, strict=True)))
    return np.array_equal(one, two) if isinstance(one, np.ndarray) else one == two


def in_a_process(subject: Subject, way: str, data: bytes) -> str:
    """Judge in a process of its own, with limits of memory and time."""
    folder = Path(tempfile.mkdtemp(prefix="tpukit-fuzz-"))
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(receive)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1), os.dup2(quiet, 2)
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY,) * 2)
            os.write(send, judge(subject, way, data, folder).encode())
        finally:
            os._exit(0)
    os.close(send)
    ready, _, _ = select.select([receive], [], [], SECONDS)
    verdict = os.read(receive, 100).decode() if ready else "hung"
    os.close(receive)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    shutil.rmtree(folder, ignore_errors=True)
    return verdict or "wrong"  # it crashed


def main() -> int:
    """Read all files, print the table and the line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--meanings", type=int, default=300)
    parser.add_argument("--layouts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one kind")
    parser.add_argument(
        "--keep", type=Path, default=Path("runs/fuzz"), help="where files that are wrong are kept"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import torch
    import torchvision  # noqa: F401

    torch.set_num_threads(1)  # a fork of a process with threads would hang
    began, draw = time.perf_counter(), random.Random(options.seed)
    table: dict[str, collections.Counter] = {}
    with tempfile.TemporaryDirectory() as made:
        prepare(Path(made))
        for number, subject in zip(
            range(options.files), subjects(Path(made), draw, options.only), strict=False
        ):
            way, data = damaged(subject, draw)
            verdict = in_a_process(subject, way, data)
            table.setdefault(subject.kind, collections.Counter())[verdict] += 1
            if verdict in ("wrong", "hung"):
                options.keep.mkdir(parents=True, exist_ok=True)
                file = (
                    options.keep
                    / f"{options.seed}-{number}-{subject.kind.replace(', ', '-')}-{way}"
                )
                file.write_bytes(data)
                print(f"{verdict}: {subject.kind}, {way}, file {number}: {file}", flush=True)
    print(f"\n{'':16}" + "".join(f"{verdict:>8}" for verdict in VERDICTS))
    for kind, counts in sorted(table.items()):
        print(f"{kind:16}" + "".join(f"{counts[verdict]:>8,}" for verdict in VERDICTS))
    totals = sum(table.values(), collections.Counter())
    print(f"{'all':16}" + "".join(f"{totals[verdict]:>8,}" for verdict in VERDICTS))
    with tempfile.TemporaryDirectory() as folder:
        meanings = meaning.judge_many(options.meanings, options.seed, Path(folder), options.keep)
    with tempfile.TemporaryDirectory() as folder:
        odd = layouts.judge_many(options.layouts, options.seed, Path(folder))
    wrong = totals["wrong"]
    for title, found in (("collections", meanings), ("layouts", odd)):
        print(f"\n{title:16}" + "".join(f"{verdict:>8}" for verdict in meaning.VERDICTS))
        for way, counts in sorted(found.items()):
            print(f"{way:16}" + "".join(f"{counts[verdict]:>8,}" for verdict in meaning.VERDICTS))
            wrong += counts["wrong"]
    print(f"\n{time.perf_counter() - began:.0f} s")
    last = {
        "files": totals.total(),
        "meanings": options.meanings,
        "layouts": options.layouts,
        "wrong": wrong,
        "hung": totals["hung"],
    }
    print(json.dumps(last))
    return int(wrong + totals["hung"] > 0)


def prepare(made: Path) -> None:
    """Make what several subjects are taken from."""
    from tpukit.pe import phantom

    make_stored(made)
    phantom(made / "phantom", studies=3, slices=3, size=32, workers=1, progress="off")


if __name__ == "__main__":
    sys.exit(main())
