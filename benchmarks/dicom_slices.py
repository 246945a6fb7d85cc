"""Measure how fast tpukit, pydicom, dicomsdl and GDCM make images of DICOM slices.

benchmarks/input.py runs this, too.

All make the same (256, 256, 3) uint8 of the same drawn slices of 512 x 512, stored in four transfer
syntaxes: reads the file, looks at it through the three windows, resizes it. The pixels are checked
to be equal. The figure is the processor time of one process with one thread. "pydicom" is the
shortest code with pydicom, NumPy and Pillow. tpukit decodes compressed slices with pydicom, which
takes most of its time.
"""

import importlib.util
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

SIZE = 256
STUDIES = 2
SLICES = 12


def measure_dicom(folder: Path, rounds: int) -> dict:
    """Print a table; return tpukit's slices per second, and its least speed-up over pydicom."""
    folders = prepare(folder)
    readers = {
        "tpukit": with_kit,
        "pydicom": with_pydicom,
        "dicomsdl": with_dicomsdl,
        "GDCM": with_gdcm,
    }
    needs = {"dicomsdl": "dicomsdl", "GDCM": "gdcm"}
    readers = {
        name: reader for name, reader in readers.items() if is_installed(needs.get(name, "pydicom"))
    }
    print(
        f"\n{'slices a second a core, medians':34}"
        + "".join(f"{name:>12}" for name in readers)
        + f"{'times pydicom':>25}"
    )
    times = {}
    for syntax, files in folders.items():
        check_equal(files[0], readers)
        measured = [run_round(files, readers, number) for number in range(rounds)]
        speeds = {name: statistics.median(speeds[name] for speeds in measured) for name in readers}
        ratios = [speeds["tpukit"] / speeds["pydicom"] for speeds in measured]
        times[syntax] = speeds["tpukit"], statistics.median(ratios)
        shown = f"{times[syntax][1]:.2f} [{min(ratios):.2f}..{max(ratios):.2f}]"
        print(
            f"{syntax:34}"
            + "".join(f"{speed:12,.0f}" for speed in speeds.values())
            + f"{shown:>25}",
            flush=True,
        )
    print(f"a slice takes {packed_bytes(folder)}")
    found = {
        "dicom_per_core": round(times["uncompressed"][0]),
        "dicom_vs_pydicom": min(ratio for _, ratio in times.values()),
    }
    print(f"{'DICOM, times pydicom alone':60}{found['dicom_vs_pydicom']:>10,.3g}   target >= 0.9")
    return {**found, "dicom_vs_pydicom": float(f"{found['dicom_vs_pydicom']:.3g}")}


def prepare(folder: Path) -> dict[str, list[Path]]:
    """Draw and compress the slices once; without GDCM only in the syntaxes that pydicom writes."""
    from tpukit.pe import phantom

    drawn = phantom(folder / "dicom", STUDIES, SLICES, size=512, form="dicom")
    files = sorted((drawn / "train").rglob("*.dcm"))
    found = {"uncompressed": files}
    for syntax, compress in (
        ("RLE", compress_rle),
        ("JPEG Lossless", compress_gdcm),
        ("JPEG 2000", compress_gdcm),
    ):
        if compress is compress_gdcm and not is_installed("gdcm"):
            print(f"python-gdcm is not installed: {syntax} is left out")
            continue
        into = folder / f"dicom-{syntax}"
        if not into.is_dir():
            work = folder / "unfinished-dicom"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            for file in files:
                compress(file, work / file.name, syntax)
            work.rename(into)
        found[syntax] = sorted(into.glob("*.dcm"))
    return found


def compress_rle(source: Path, to: Path, syntax: str) -> None:
    """Write a slice with run lengths, by pydicom."""
    import pydicom

    with pydicom.config.disable_value_validation():  # the identifiers are those of the competition
        file = pydicom.dcmread(source)
        file.compress(pydicom.uid.RLELossless, generate_instance_uid=False)
        file.save_as(to)


def compress_gdcm(source: Path, to: Path, syntax: str) -> None:
    """Write a slice as GDCM encodes it, without loss."""
    import gdcm

    name = {"JPEG Lossless": "JPEGLosslessProcess14_1", "JPEG 2000": "JPEG2000Lossless"}[syntax]
    reader = gdcm.ImageReader()
    changing = gdcm.ImageChangeTransferSyntax()
    writer = gdcm.ImageWriter()
    reader.SetFileName(str(source))
    changing.SetTransferSyntax(gdcm.TransferSyntax(getattr(gdcm.TransferSyntax, name)))
    writer.SetFileName(str(to))
    read = reader.Read()
    changing.SetInput(reader.GetImage())
    changed = changing.Change()
    writer.SetFile(reader.GetFile())
    writer.SetImage(changing.GetOutput())
    if not (read and changed and writer.Write()):
        raise RuntimeError(f"GDCM could not write {source} as {syntax}")


def with_kit(file: Path):
    """Read a slice as `pack_dicom` does."""
    import numpy

    from tpukit.pe.ct import WINDOWS
    from tpukit.pe.dicom_slices import to_windows

    return numpy.asarray(to_windows(file, SIZE, tuple(WINDOWS.values())))


def with_pydicom(file: Path):
    """Read a slice as pydicom's documentation shows."""
    import pydicom

    read = pydicom.dcmread(file)
    return through_windows(pydicom.pixels.apply_rescale(read.pixel_array, read))


def with_dicomsdl(file: Path):
    """Read a slice with dicomsdl."""
    import dicomsdl

    read = dicomsdl.open(str(file))
    return through_windows(
        read.pixelData(storedvalue=True) * read.RescaleSlope + read.RescaleIntercept
    )


def with_gdcm(file: Path):
    """Read a slice with GDCM."""
    import gdcm
    import numpy

    reader = gdcm.ImageReader()
    reader.SetFileName(str(file))
    reader.Read()
    image = reader.GetImage()
    stored = numpy.frombuffer(image.GetBuffer().encode("utf-8", "surrogateescape"), "<i2")
    columns = image.GetDimension(0)
    rows = image.GetDimension(1)
    return through_windows(stored.reshape(rows, columns) * image.GetSlope() + image.GetIntercept())


def through_windows(hounsfield):
    """Return Hounsfield units through the three windows, resized."""
    import numpy
    from PIL import Image

    from tpukit.pe import three_windows

    image = Image.fromarray(three_windows(hounsfield))
    return numpy.asarray(image.resize((SIZE, SIZE), Image.Resampling.BILINEAR))


def check_equal(file: Path, readers: dict[str, Callable]) -> None:
    """Raise unless all make the same pixels; this also imports what they need."""
    expected = with_pydicom(file)
    for name, reader in readers.items():
        if (reader(file) != expected).any():
            raise ValueError(
                f"{name} makes other pixels of {file} than pydicom\n  fix: it cannot be compared"
            )


def run_round(files: list[Path], readers: dict[str, Callable], number: int) -> dict[str, float]:
    """Return each reader's slices per second of processor time; the order changes in each round."""
    names = list(readers)
    speeds = {}
    for name in names[number % len(names) :] + names[: number % len(names)]:
        began = time.process_time()
        for file in files:
            readers[name](file)
        speeds[name] = len(files) / (time.process_time() - began)
    return speeds


def packed_bytes(folder: Path) -> str:
    """Print the size of a packed slice in each form, and of the competition's 1,790,594 slices."""
    from tpukit.pe import pack_dicom

    said = []
    for form in ("jpeg", "int16"):
        records = pack_dicom(
            folder / "dicom" / "train", folder / f"dicom-{form}", form=form, size=SIZE
        )
        mean = statistics.mean(map(len, records.read(range(len(records)))))
        said.append(
            f"{mean / 1000:.1f} KB as {form} "
            f"({mean * 1_790_594 / 1e9:.0f} GB for the competition's)"
        )
    return ", ".join(said)


def is_installed(package: str) -> bool:
    """Tell whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None
