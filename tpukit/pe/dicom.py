"""DICOM files: one CT slice read with pydicom, as the values that are stored and what they mean.

pydicom and no faster reader: dicomsdl 0.109.4 reads 2 to 4 times as many slices a second (6,268 to 1,667 uncompressed,
321 to 144 of JPEG Lossless), but a file that is cut off ends the process (SIGSEGV, 7 of 7), and a pack spends most of
its time elsewhere.
"""

import functools
import math
import warnings
from dataclasses import dataclass
from pathlib import Path

from tpukit.essentials.show import Explained, NotInstalled, SystemFailed, WrongValue
from tpukit.pe.ct import see

AIR = -1000  # HU
_DEFAULTS = {"RescaleSlope": 1.0, "RescaleIntercept": 0.0}  # DICOM's
OTHER_MODALITY = "modality "  # begins why a file is no CT slice, where another kind of scanner made it

# What decodes each transfer syntax for pydicom, beside what comes with it and with Pillow (uncompressed, RLE, mostly
# JPEG 2000): https://pydicom.github.io/pydicom/stable/guides/plugin_table.html. python-gdcm is under BSD, the other
# package for JPEG and JPEG-LS, pylibjpeg-libjpeg, is under the GPL and half as fast.
_JPEG = "1.2.840.10008.1.2.4."
DECODERS = {
    **{f"{_JPEG}{number}": "python-gdcm" for number in (50, 51, 57, 70, 80, 81, 90, 91)},
    **{f"{_JPEG}{number}": "pylibjpeg pylibjpeg-openjpeg" for number in (201, 202, 203)},  # high-throughput JPEG 2000
}


@dataclass(frozen=True)
class Scale:
    """What the stored values of a slice mean; nearly always the same in a whole series."""

    signed: bool  # PixelRepresentation is 1
    slope: float
    intercept: float  # Hounsfield units are stored values times slope plus intercept
    padding: tuple[int, int] | None  # lowest and highest stored value that mark what was not measured, if any do


@dataclass(frozen=True)
class StoredSlice:
    """One CT slice as it is stored."""

    codes: object  # (H, W) uint16, the stored values modulo 65,536
    scale: Scale
    orientation: tuple[float, ...] | None  # the directions of a row and of a column, six numbers, if given


def read_dicom(path):
    """Read one CT slice from a DICOM file, as Hounsfield units.

    Returns:
        (H, W) float32 Hounsfield units: stored values times RescaleSlope plus RescaleIntercept, 1 and 0 where the file
        leaves them out, which a warning says, as it does where the Modality is missing. What PixelPaddingValue marks as
        not measured is no denser than air.

    Raises:
        ImportError: pydicom, or what it needs to decode this file, is not installed.
        ValueError: the file is not DICOM, or not a single grey CT slice.
        OSError: the file is cut off or damaged, or cannot be read.
    """
    stored = read_slice(path, warn=True)
    return hounsfield_table(stored.scale)[stored.codes]


def read_slice(path, *, warn: bool = False) -> StoredSlice:
    """Read one CT slice as it is stored; raises as `read_dicom` does."""
    pydicom = load_pydicom()
    try:
        file = pydicom.dcmread(path)
        if "Modality" not in file and "Rows" not in file:  # pydicom gives up all of a compressed file that is cut off
            raise EOFError("it ends too early, or has no header")
        check_decoder(file.file_meta.TransferSyntaxUID, path)
        scale, missing = find_scale(file, path)
        orientation = tuple(map(float, file.get("ImageOrientationPatient") or ())) or None
        pixels = pydicom.pixels.pixel_array(file, raw=True)
    except pydicom.errors.InvalidDicomError:
        raise WrongValue(
            f"{path} is not a DICOM file ({Path(path).stat().st_size} bytes)", fix="pass a .dcm file of the competition"
        ) from None
    except (ImportError, OSError, NotACTSlice):
        raise
    except Exception as error:  # whatever pydicom and the decoders behind it raise for a damaged file
        raise SystemFailed(
            f"{path} cannot be decoded ({Path(path).stat().st_size:,} bytes)",
            found=" ".join(str(error).split()) or type(error).__name__,
            fix="copy this file again, or leave it out",
        ) from error
    if pixels.ndim != 2 or pixels.dtype.itemsize > 2:
        raise not_a_slice(path, f"pixels of shape {pixels.shape} and dtype {pixels.dtype}")
    if warn and not file.get("Modality"):
        warnings.warn("a slice does not say its Modality: it is taken for CT", stacklevel=3)
    if warn and missing:
        taken = " and ".join(f"{_DEFAULTS[name]:g}" for name in missing)
        warnings.warn(f"a slice has no {' and no '.join(missing)}: {taken} is taken, DICOM's default", stacklevel=3)
    return StoredSlice(pixels.astype("uint16", copy=False), scale, orientation)


class NotACTSlice(Explained, ValueError):
    """A DICOM file that holds something else."""


def not_a_slice(path, found: str) -> NotACTSlice:
    """Return the error to raise for a DICOM file that holds something else."""
    return NotACTSlice(f"{path} is not a CT slice", found=found, fix="pass one slice of a CT series")


def load_pydicom():
    """Return pydicom; ImportError says how to install it, where there is none or one older than 3."""
    try:
        import pydicom
        import pydicom.pixels
    except ImportError:
        raise NotInstalled(
            "DICOM files need pydicom 3, which is not installed",
            fix="%pip install pydicom (compressed slices also need python-gdcm)",
        ) from None
    return pydicom


def check_decoder(syntax: str, path) -> None:
    """Raise ImportError unless something that is installed decodes pixels of this transfer syntax."""
    if found := undecodable(str(syntax)):
        fix = f"%pip install {DECODERS[syntax]}" if syntax in DECODERS else "convert it with a program that reads it"
        raise NotInstalled(
            f"{path} is compressed, and nothing that is installed decodes it",
            found=found,
            fix=f"{fix}, then restart the kernel",
        )


def found_in(error: Exception) -> str:
    """Return what an error of this module found, in one line, for a message that names the file and the fix itself."""
    return getattr(error, "found", "") or str(error).partition("\n")[0] or type(error).__name__


@functools.cache
def undecodable(syntax: str) -> str | None:
    """Return the name of a transfer syntax that nothing decodes which is installed."""
    pydicom = load_pydicom()
    uid = pydicom.uid.UID(syntax)
    try:
        if uid == pydicom.uid.DeflatedExplicitVRLittleEndian or pydicom.pixels.get_decoder(uid).is_available:
            return None
    except NotImplementedError:  # pydicom knows no decoder at all
        pass
    return f"{uid.name} ({syntax}), pydicom {pydicom.__version__}"


def find_scale(file, path) -> tuple[Scale, list[str]]:
    """Return what the stored values of a file mean, and which of slope and intercept it leaves out."""
    missing = [name for name in _DEFAULTS if file.get(name) in (None, "")]
    modality = file.get("Modality") or None
    if modality not in (None, "CT"):  # PET has a RescaleSlope, too, to becquerels
        raise not_a_slice(path, f"{OTHER_MODALITY}{modality}")
    if "RescaleSlope" in missing and modality is None:
        raise not_a_slice(path, "neither Modality nor RescaleSlope is given")
    given = {name: one if name in missing else float(file[name].value) for name, one in _DEFAULTS.items()}
    for name, value in given.items():
        if not math.isfinite(value) or (name, value) == ("RescaleSlope", 0):
            raise not_a_slice(path, f"{name} {value}")  # every pixel would be the same, or no number
    low, high = file.get("PixelPaddingValue"), file.get("PixelPaddingRangeLimit")
    padding = (low, high if isinstance(high, int) else low) if isinstance(low, int) else None
    return Scale(file.get("PixelRepresentation") == 1, *given.values(), padding), missing


@functools.lru_cache(maxsize=64)
def hounsfield_table(scale: Scale):
    """Return the Hounsfield units of every code, (65536,) float32: looking them up is faster than computing them."""
    import numpy as np

    codes = np.arange(65536, dtype=np.uint16)
    values = codes.view(np.int16) if scale.signed else codes
    units = values.astype(np.float32) * scale.slope + scale.intercept
    if scale.padding:
        # Files say -2000 also as 63536, and so do pixels: unsigned, it would be the densest thing in the picture.
        ends = np.array([end % 65536 for end in scale.padding], np.uint16).view(values.dtype)
        padded = (values >= ends.min()) & (values <= ends.max())
        as_signed = codes.view(np.int16).astype(np.float32) * scale.slope + scale.intercept
        units[padded] = np.minimum(units, np.minimum(as_signed, AIR))[padded]
    units.flags.writeable = False  # shared by all slices of a series
    return units


@functools.lru_cache(maxsize=64)
def window_table(scale: Scale, level: float, width: float):
    """Return every code seen through a window, (65536,) uint8."""
    return see(hounsfield_table(scale), level, width)
