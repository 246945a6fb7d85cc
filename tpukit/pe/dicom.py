"""Read a CT slice from a DICOM file with pydicom: the stored values, and their Hounsfield units.

    stored value 1024  ->  1024 * RescaleSlope + RescaleIntercept = 1024 * 1 - 1024 = 0 HU, water

Stored values have 16 bits. `hounsfield_table` converts all 65,536 values once, and each pixel is
looked up in this table.

dicomsdl 0.109.4 would read 2 to 4 times as many slices per second (6,268 instead of 1,667
uncompressed, 321 instead of 144 with JPEG Lossless). It is not used, because it ends the process at
a truncated file (SIGSEGV, 7 of 7), and packing spends most of its time elsewhere.
"""

import functools
import math
import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tpukit.essentials.display import (
    InvalidValueError,
    NotInstalledError,
    SystemFailureError,
    TpukitError,
)
from tpukit.pe import jpeg_12_bits
from tpukit.pe.ct import to_grey

AIR = -1000  # HU
# An undamaged DICOM file may be something other than a CT slice in Hounsfield units. The reason in
# `_other_kind` then begins with one of these words.
OTHER_KINDS = (
    *("modality ", "localizers", "secondary captures", "reports", "RescaleType "),
    "colours ",
)
# Values of RescaleType for Hounsfield units. Some scanners write US, "unspecified".
_HOUNSFIELD = ("", "HU", "HU_MOD", "US")
CT_IMAGE = "1.2.840.10008.5.1.4.1.1.2"
ENHANCED = (f"{CT_IMAGE}.1", f"{CT_IMAGE}.2")  # enhanced CT, and legacy converted enhanced CT
_BIG_ENDIAN = "1.2.840.10008.1.2.2"
_SECONDARY_CAPTURE = "1.2.840.10008.5.1.4.1.1.7"
# The first bytes of a data set without preamble: a tag of group 2, or a usual first tag of group 8.
_FIRST_ELEMENTS = (b"\2\0\0\0", b"\x08\0\0\0", b"\x08\0\5\0", b"\x08\0\x08\0", b"\x08\0\x16\0")
_PREAMBLE = 128  # bytes before the letters DICM
_DEFAULTS = {"RescaleSlope": 1.0, "RescaleIntercept": 0.0}  # used if the elements are missing

# The packages to install for each transfer syntax. pydicom and Pillow decode only uncompressed
# pixels, RLE, JPEG of 8 bits, and most of JPEG 2000:
# https://pydicom.github.io/pydicom/stable/guides/plugin_table.html
# For JPEG and JPEG-LS, python-gdcm has a BSD licence. The alternative, pylibjpeg-libjpeg, is under
# the GPL and takes twice as long.
_JPEG = "1.2.840.10008.1.2.4."
_GDCM = (50, 51, 57, 70, 80, 81, 90, 91)
_HIGH_THROUGHPUT_JPEG_2000 = (201, 202, 203)
DECODERS = {
    **dict.fromkeys([f"{_JPEG}{number}" for number in _GDCM], "python-gdcm"),
    **dict.fromkeys(
        [f"{_JPEG}{number}" for number in _HIGH_THROUGHPUT_JPEG_2000],
        "pylibjpeg pylibjpeg-openjpeg",
    ),
}


class ModalityTable(NamedTuple):
    """A Modality LUT: the Hounsfield units of stored values if their scale is not linear."""

    first: int  # the stored value of the first entry
    entries: tuple[int, ...]  # the Hounsfield units of first, first + 1, ...


@dataclass(frozen=True)
class Scale:
    """The conversion of a slice's stored values to Hounsfield units.

    Nearly always, all slices of a series have the same scale.
    """

    signed: bool  # True if PixelRepresentation is 1
    bits: int  # BitsStored; higher bits may be those of an overlay
    slope: float
    intercept: float  # Hounsfield units are stored values times slope plus intercept
    padding: tuple[int, int] | None  # the two ends of the range of values that mean "not measured"
    table: ModalityTable | None = None  # replaces slope and intercept

    def units(self, values):
        """Return the Hounsfield units of an array of stored values, float32 of the same shape."""
        import numpy as np

        if self.table is None:
            return values.astype(np.float32) * self.slope + self.intercept
        pydicom = load_pydicom()
        item = pydicom.Dataset()
        item.add_new("LUTDescriptor", "SS", [len(self.table.entries), self.table.first, 16])
        item.add_new("LUTData", "US", list(self.table.entries))
        file = pydicom.Dataset()
        file.ModalityLUTSequence = [item]
        return pydicom.pixels.apply_modality_lut(values.astype(int), file).astype(np.float32)


@dataclass(frozen=True)
class StoredSlice:
    """The stored values of a CT slice, with its scale in Hounsfield units and its orientation."""

    codes: object  # (H, W) uint16, the stored values modulo 65,536
    scale: Scale
    orientation: tuple[float, ...] | None  # six numbers, the directions of a row and of a column


def read_dicom(path):
    """Read a CT slice from a DICOM file, in Hounsfield units.

    Hounsfield units are stored values times RescaleSlope plus RescaleIntercept, or are looked up in
    the Modality LUT. If the file has no LUT and lacks one of these elements, `read_dicom`
    takes slope 1 or intercept 0, and warns. If only Modality is missing, `read_dicom` warns too; if
    both Modality and RescaleSlope are missing, it raises ValueError. Pixels that PixelPaddingValue
    marks as not measured get at most the value of air.

    Args:
        path: the path of a file with a single grey slice.

    Returns:
        (H, W) float32 Hounsfield units.

    Raises:
        ModuleNotFoundError: pydicom, or a package that decodes this file, is not installed.
        ValueError: the file is not DICOM, or not a single grey CT slice.
        OSError: the file is truncated or damaged, or cannot be read.
    """
    stored = read_slice(path, warn=True)
    return hounsfield_table(stored.scale)[stored.codes]


def read_slice(path, *, warn: bool = False) -> StoredSlice:
    """Read the stored values of a CT slice; errors are those of `read_dicom`.

    Args:
        path: the path of the file.
        warn: True to warn about defaults for missing elements.
    """
    pydicom = load_pydicom()
    try:
        file = open_dataset(path)
        if "Modality" not in file and "Rows" not in file:
            # pydicom returns an empty data set for a truncated file with deflate compression.
            raise EOFError("the file ends too early, or has no header")
        check_decoder(file.file_meta.TransferSyntaxUID, path)
        scale, missing = find_scale(file, path)
        orientation = tuple(map(float, file.get("ImageOrientationPatient") or ()))
        pixels = pydicom.pixels.pixel_array(file, raw=True)
    except pydicom.errors.InvalidDicomError:
        raise InvalidValueError(
            f"{path} is not a DICOM file ({Path(path).stat().st_size} bytes)",
            fix="pass the path of a DICOM file, such as slice.dcm",
        ) from None
    except (ImportError, OSError, NotACTSliceError):
        raise
    except Exception as error:  # pydicom and its decoders raise many types for a damaged file
        raise not_decoded(path, error) from error
    if pixels.ndim != 2 or pixels.dtype.itemsize > 2:
        raise not_a_slice(path, f"pixels of shape {pixels.shape} and dtype {pixels.dtype}")
    if warn:
        _warn_of_defaults(file, missing)
    return StoredSlice(pixels.astype("uint16", copy=False), scale, orientation or None)


def not_decoded(path, error: Exception) -> SystemFailureError:
    """Return the error to raise for a DICOM file that pydicom cannot decode."""
    return SystemFailureError(
        f"{path} cannot be decoded ({Path(path).stat().st_size:,} bytes)",
        found=" ".join(str(error).split()) or type(error).__name__,
        fix="copy this file again, or leave it out",
    )


def is_dicom(path) -> bool:
    """Return whether the first bytes of a file are those of DICOM, with or without a preamble."""
    with open(path, "rb") as file:
        start = file.read(_PREAMBLE + 4)
    return start[_PREAMBLE:] == b"DICM" or start.startswith(_FIRST_ELEMENTS)


def open_dataset(path, **options):
    """Read a DICOM file, also an old one without a preamble or file meta information.

    Args:
        path: the path of the file.
        options: arguments of `pydicom.dcmread`.

    Raises:
        pydicom.errors.InvalidDicomError: the content is not DICOM.
    """
    pydicom = load_pydicom()
    try:
        file = pydicom.dcmread(path, **options)
    except pydicom.errors.InvalidDicomError:  # there is no preamble, or the file is not DICOM
        if not is_dicom(path):
            raise
        file = pydicom.dcmread(path, force=True, **options)
    if "TransferSyntaxUID" not in file.file_meta:
        is_implicit, _ = file.original_encoding
        uids = pydicom.uid
        syntax = uids.ImplicitVRLittleEndian if is_implicit else uids.ExplicitVRLittleEndian
        file.file_meta.TransferSyntaxUID = syntax
    return file


def _warn_of_defaults(file, missing: list[str]) -> None:
    """Warn if a file has no modality, slope or intercept."""
    # stacklevel 4 is the caller of `read_dicom`.
    if not file.get("Modality"):
        warnings.warn("a slice has no Modality; it is treated as CT", stacklevel=4)
    if missing:
        names = " and no ".join(missing)
        values = " and ".join(f"{_DEFAULTS[name]:g}" for name in missing)
        warnings.warn(
            f"a slice has no {names}: {values} is used, DICOM's default",
            stacklevel=4,
        )


class NotACTSliceError(TpukitError, ValueError):
    """A DICOM file that is not a CT slice."""


def not_a_slice(path, found: str) -> NotACTSliceError:
    """Return the error to raise for a DICOM file that is not a CT slice."""
    return NotACTSliceError(
        f"{path} is not a CT slice",
        found=found,
        fix="pass one slice of a CT series",
    )


def load_pydicom():
    """Import pydicom, version 3 or later, and return the module.

    Raises:
        ModuleNotFoundError: pydicom is not installed, or is too old.
    """
    try:
        import pydicom
        import pydicom.pixels
    except ImportError:
        raise NotInstalledError(
            "DICOM files need pydicom 3, which is not installed",
            fix="%pip install pydicom (compressed slices also need python-gdcm)",
        ) from None
    jpeg_12_bits.add_decoder()
    return pydicom


def check_decoder(syntax: str, path) -> None:
    """Raise ModuleNotFoundError unless an installed package decodes this transfer syntax.

    Args:
        syntax: the UID of the transfer syntax.
        path: a file that uses it, for the message.
    """
    name = undecodable(str(syntax))
    if name is None:
        return
    fix = "convert it with a program that reads it"
    if syntax in DECODERS:
        fix = f"%pip install {DECODERS[syntax]}, then restart the kernel"
    raise NotInstalledError(
        f"{path} is compressed, and no installed package decodes it",
        found=name,
        fix=fix,
    )


def found_in(error: Exception) -> str:
    """Return one line that describes an error of this module, for another message."""
    return getattr(error, "found", "") or str(error).partition("\n")[0] or type(error).__name__


@functools.cache
def undecodable(syntax: str) -> str | None:
    """Return the name of a transfer syntax if no installed package decodes it; else None."""
    pydicom = load_pydicom()
    uid = pydicom.uid.UID(syntax)
    if uid == pydicom.uid.DeflatedExplicitVRLittleEndian:
        return None
    try:
        is_available = pydicom.pixels.get_decoder(uid).is_available
        if uid == jpeg_12_bits.SYNTAX:  # pydicom reports Pillow, which decodes only 8 bits
            is_available = jpeg_12_bits.has_gdcm()
        if is_available:
            return None
    except NotImplementedError:  # pydicom has no decoder for it at all
        pass
    return f"{uid.name} ({syntax}), pydicom {pydicom.__version__}"


def find_scale(file, path) -> tuple[Scale, list[str]]:
    """Return the scale of a file, and which of RescaleSlope and RescaleIntercept the file lacks.

    Raises:
        ValueError: the file is not a CT slice, its slope is 0, or its slope or intercept is not
            finite.
    """
    table = _find_table(file)
    missing = []
    if table is None:
        missing = [name for name in _DEFAULTS if file.get(name) in (None, "")]
    _refuse_other_kind(file, missing, path)
    values = dict(_DEFAULTS)
    if table is None:
        values |= {name: float(file[name].value) for name in _DEFAULTS if name not in missing}
    for name, value in values.items():
        is_zero_slope = name == "RescaleSlope" and value == 0
        if is_zero_slope or not math.isfinite(value):
            raise not_a_slice(path, f"{name} {value}")  # all pixels would be equal, or not numbers
    scale = Scale(
        signed=file.get("PixelRepresentation") == 1,
        bits=int(file.get("BitsStored") or 16),
        slope=values["RescaleSlope"],
        intercept=values["RescaleIntercept"],
        padding=_find_padding(file),
        table=table,
    )
    return scale, missing


def _refuse_other_kind(file, missing: list[str], path) -> None:
    """Raise ValueError for a file that is not one slice of a CT."""
    other_kind = _other_kind(file)
    if other_kind:
        raise not_a_slice(path, other_kind)
    if "RescaleSlope" in missing and not file.get("Modality"):
        raise not_a_slice(path, "neither Modality nor RescaleSlope is given")
    frames = int(file.get("NumberOfFrames") or 1)
    # An enhanced CT has the scale in its functional groups, even with a single frame.
    if frames > 1 or ("RescaleSlope" in missing and file.get("SOPClassUID") in ENHANCED):
        raise not_a_slice(
            path, f"an enhanced CT: {frames} frames; pe.split_enhanced(folder, to) makes slices"
        )


def _other_kind(file) -> str:
    """Return the kind of a file without Hounsfield units, in words of `OTHER_KINDS`; "" for CT."""
    modality = file.get("Modality") or "CT"
    rescale_type = file.get("RescaleType") or ""
    if file.get("ModalityLUTSequence"):
        rescale_type = file.ModalityLUTSequence[0].get("ModalityLUTType") or ""
    if modality != "CT":  # PET has a RescaleSlope, too, to becquerels
        return f"modality {modality}"
    if "LOCALIZER" in (file.get("ImageType") or ()):
        return "localizers (ImageType LOCALIZER)"
    sop_class = file.get("SOPClassUID", CT_IMAGE)
    if sop_class == _SECONDARY_CAPTURE:
        return "secondary captures"
    if "Rows" not in file and sop_class not in (CT_IMAGE, *ENHANCED):
        return "reports, without pixels"
    interpretation = file.get("PhotometricInterpretation") or "MONOCHROME2"
    if not interpretation.startswith("MONOCHROME"):  # a fusion, or an index into a palette
        return f"colours ({interpretation})"
    if rescale_type not in _HOUNSFIELD:  # an iodine map has milligrams per millilitre
        return f"RescaleType {rescale_type}"
    return ""


def _find_table(file) -> ModalityTable | None:
    """Return the Modality LUT of a file; None if the file has no such table."""
    if not file.get("ModalityLUTSequence"):
        return None
    item = file.ModalityLUTSequence[0]
    count, first, _ = item.LUTDescriptor
    count = count or 65536  # DICOM writes 0 for 65,536 entries: PS3.3, section C.11.1.1.1
    if file.get("PixelRepresentation") == 1 and first >= 32768:
        first -= 65536  # a signed value that the file declares as unsigned
    entries = item.LUTData
    if isinstance(entries, bytes):
        order = ">" if file.file_meta.TransferSyntaxUID == _BIG_ENDIAN else "<"
        entries = struct.unpack(f"{order}{count}H", entries[: 2 * count])
    return ModalityTable(first, tuple(entries))


def _find_padding(file) -> tuple[int, int] | None:
    """Return the two ends of the range of padding values; None without PixelPaddingValue."""
    first = file.get("PixelPaddingValue")
    if not isinstance(first, int):
        return None
    last = file.get("PixelPaddingRangeLimit")
    if not isinstance(last, int):
        return first, first
    return first, last


@functools.lru_cache(maxsize=64)
def hounsfield_table(scale: Scale):
    """Return the Hounsfield units of every stored value, (65536,) float32, read-only.

    To look each pixel up in this table is faster than to compute its value.
    """
    import numpy as np

    codes = np.arange(65536, dtype=np.uint16)
    values = codes.view(np.int16) if scale.signed else codes
    spare = 16 - scale.bits
    if spare and not scale.padding:  # padding values may need all 16 bits
        # The bits above BitsStored may have an overlay, which decoders do not remove from
        # compressed pixels. Two shifts remove these bits and extend the sign.
        values = (codes << spare).view(values.dtype) >> spare
    units = scale.units(values)
    if scale.padding:
        # Some files write -2000 as 63536, in the header and in the pixels. As an unsigned value, it
        # would be denser than everything else in the image.
        ends = np.array([end % 65536 for end in scale.padding], np.uint16).view(values.dtype)
        is_padding = (values >= ends.min()) & (values <= ends.max())
        as_signed = scale.units(codes.view(np.int16))
        units[is_padding] = np.minimum(units, np.minimum(as_signed, AIR))[is_padding]
    units.flags.writeable = False  # the cache returns the same array for all slices of a series
    return units


@functools.lru_cache(maxsize=64)
def window_table(scale: Scale, level: float, width: float):
    """Return the grey levels that a window gives to all stored values, (65536,) uint8.

    Args:
        scale: the scale of the slice.
        level, width: the window in Hounsfield units.
    """
    return to_grey(hounsfield_table(scale), level, width)
