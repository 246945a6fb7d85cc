"""Read a CT slice from a DICOM file with pydicom: the stored values, and their Hounsfield units.

    stored value 1024  ->  1024 * RescaleSlope + RescaleIntercept = 1024 * 1 - 1024 = 0 HU, water

A file has at most 65,536 different values, so `hounsfield_table` converts all of them once, and a
slice is a look-up in this table.

A faster reader is not used: dicomsdl 0.109.4 reads 2 to 4 times as many slices per second (6,268
against 1,667 uncompressed, 321 against 144 with JPEG Lossless), but a truncated file ends the
process (SIGSEGV, 7 of 7), and packing spends most of its time elsewhere.
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
from tpukit.pe.ct import see

AIR = -1000  # HU
# The first words of the reasons why a whole DICOM file is no CT slice in Hounsfield units.
OTHER_KINDS = (
    *("modality ", "localizers", "secondary captures", "reports", "RescaleType "),
    "colours ",
)
# RescaleType of Hounsfield units; US is "unspecified", which some scanners write for them.
_HOUNSFIELD = ("", "HU", "HU_MOD", "US")
_CT_IMAGES = ("1.2.840.10008.5.1.4.1.1.2", "1.2.840.10008.5.1.4.1.1.2.1")  # CT, and enhanced CT
_BIG_ENDIAN = "1.2.840.10008.1.2.2"
_SECONDARY_CAPTURE = "1.2.840.10008.5.1.4.1.1.7"
# The first bytes of a data set without preamble: group 2, or group 8 with its usual first elements.
_FIRST_ELEMENTS = (b"\2\0\0\0", b"\x08\0\0\0", b"\x08\0\5\0", b"\x08\0\x08\0", b"\x08\0\x16\0")
_PREAMBLE = 128  # bytes before the letters DICM
_DEFAULTS = {"RescaleSlope": 1.0, "RescaleIntercept": 0.0}  # of the DICOM standard

# The packages that decode a transfer syntax for pydicom, in addition to pydicom itself and Pillow
# (uncompressed, RLE, mostly JPEG 2000):
# https://pydicom.github.io/pydicom/stable/guides/plugin_table.html
# python-gdcm has a BSD licence. The other package for JPEG and JPEG-LS, pylibjpeg-libjpeg, is under
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
    """The Hounsfield units of stored values, for a scanner whose scale is not linear."""

    first: int  # the stored value of the first entry
    entries: tuple[int, ...]


@dataclass(frozen=True)
class Scale:
    """The meaning of the stored values of a slice; nearly always the same in a whole series."""

    signed: bool  # PixelRepresentation is 1
    bits: int  # BitsStored: the bits above may belong to an overlay
    slope: float
    intercept: float  # Hounsfield units are stored values times slope plus intercept
    padding: tuple[int, int] | None  # lowest and highest stored value of pixels not measured
    table: ModalityTable | None = None  # in the place of slope and intercept

    def units(self, values):
        """Return the float32 Hounsfield units of an array of stored values."""
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
    """A CT slice as it is stored."""

    codes: object  # (H, W) uint16, the stored values modulo 65,536
    scale: Scale
    orientation: tuple[float, ...] | None  # the directions of a row and of a column, six numbers


def read_dicom(path):
    """Read a CT slice from a DICOM file, in Hounsfield units.

    Hounsfield units are stored values times RescaleSlope plus RescaleIntercept, or are looked up in
    the Modality LUT. If the file lacks both, 1 and 0 are used, with a warning. A missing Modality
    causes a warning, too. Pixels that PixelPaddingValue marks as not measured are not denser than
    air.

    Args:
        path: the path of the file; it contains a single grey slice.

    Returns:
        (H, W) float32 Hounsfield units.

    Raises:
        ImportError: pydicom, or a package that decodes this file, is not installed.
        ValueError: the file is not DICOM, or not a single grey CT slice.
        OSError: the file is truncated or damaged, or cannot be read.
    """
    stored = read_slice(path, warn=True)
    return hounsfield_table(stored.scale)[stored.codes]


def read_slice(path, *, warn: bool = False) -> StoredSlice:
    """Read a CT slice as it is stored; raises as `read_dicom` does."""
    pydicom = load_pydicom()
    try:
        file = open_dataset(path)
        if "Modality" not in file and "Rows" not in file:
            # pydicom ignores everything in a compressed file that is truncated.
            raise EOFError("it ends too early, or has no header")
        check_decoder(file.file_meta.TransferSyntaxUID, path)
        scale, missing = find_scale(file, path)
        orientation = tuple(map(float, file.get("ImageOrientationPatient") or ()))
        pixels = pydicom.pixels.pixel_array(file, raw=True)
    except pydicom.errors.InvalidDicomError:
        raise InvalidValueError(
            f"{path} is not a DICOM file ({Path(path).stat().st_size} bytes)",
            fix="pass a .dcm file of the competition",
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
    """Return whether the content of a file is DICOM, with or without the 128 bytes of preamble."""
    with open(path, "rb") as file:
        start = file.read(_PREAMBLE + 4)
    return start[_PREAMBLE:] == b"DICM" or start.startswith(_FIRST_ELEMENTS)


def open_dataset(path, **options):
    """Read a data set; old consoles wrote files without preamble, or without meta information.

    Raises:
        pydicom.errors.InvalidDicomError: the content is not DICOM.
    """
    pydicom = load_pydicom()
    try:
        file = pydicom.dcmread(path, **options)
    except pydicom.errors.InvalidDicomError:  # it lacks the preamble, or is something else
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
    """Warn if a file lacks its modality, slope or intercept; the warning points to the caller."""
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
    """Return pydicom, version 3 or later.

    Raises:
        ImportError: it is not installed, or is too old; the fix installs it.
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
    """Raise ImportError unless an installed package decodes pixels of this transfer syntax."""
    name = undecodable(str(syntax))
    if name is None:
        return
    fix = "convert it with a program that reads it"
    if syntax in DECODERS:
        fix = f"%pip install {DECODERS[syntax]}"
    raise NotInstalledError(
        f"{path} is compressed, and no installed package decodes it",
        found=name,
        fix=f"{fix}, then restart the kernel",
    )


def found_in(error: Exception) -> str:
    """Return the evidence of an error of this module in one line, for another message."""
    return getattr(error, "found", "") or str(error).partition("\n")[0] or type(error).__name__


@functools.cache
def undecodable(syntax: str) -> str | None:
    """Return the name of a transfer syntax that no installed package decodes, else None."""
    pydicom = load_pydicom()
    uid = pydicom.uid.UID(syntax)
    if uid == pydicom.uid.DeflatedExplicitVRLittleEndian:
        return None
    try:
        is_available = pydicom.pixels.get_decoder(uid).is_available
        if uid == jpeg_12_bits.SYNTAX:  # Pillow would be available, and take 8 bits only
            is_available = jpeg_12_bits.has_gdcm()
        if is_available:
            return None
    except NotImplementedError:  # pydicom has no decoder for it at all
        pass
    return f"{uid.name} ({syntax}), pydicom {pydicom.__version__}"


def find_scale(file, path) -> tuple[Scale, list[str]]:
    """Return the scale of a file, and the names of slope and intercept that it lacks.

    Raises:
        ValueError: the file is not a CT, or its scale is not usable.
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
    if frames > 1:
        raise not_a_slice(
            path, f"an enhanced CT: {frames} frames; pe.split_enhanced(folder, to) makes slices"
        )


def _other_kind(file) -> str:
    """Return the kind of an image that has no Hounsfield units, in the words of `OTHER_KINDS`."""
    modality = file.get("Modality") or "CT"
    rescale_type = file.get("RescaleType") or ""
    if file.get("ModalityLUTSequence"):
        rescale_type = file.ModalityLUTSequence[0].get("ModalityLUTType") or ""
    if modality != "CT":  # PET has a RescaleSlope, too, to becquerels
        return f"modality {modality}"
    if "LOCALIZER" in (file.get("ImageType") or ()):
        return "localizers (ImageType LOCALIZER)"
    sop_class = file.get("SOPClassUID", _CT_IMAGES[0])
    if sop_class == _SECONDARY_CAPTURE:
        return "secondary captures"
    if "Rows" not in file and sop_class not in _CT_IMAGES:
        return "reports, without pixels"
    interpretation = file.get("PhotometricInterpretation") or "MONOCHROME2"
    if not interpretation.startswith("MONOCHROME"):  # a fusion, or an index into a palette
        return f"colours ({interpretation})"
    if rescale_type not in _HOUNSFIELD:  # an iodine map has milligrams per millilitre
        return f"RescaleType {rescale_type}"
    return ""


def _find_table(file) -> ModalityTable | None:
    """Return the Modality LUT of a file; None if it has a slope and an intercept instead."""
    if not file.get("ModalityLUTSequence"):
        return None
    item = file.ModalityLUTSequence[0]
    count, first, _ = item.LUTDescriptor
    count = count or 65536  # 16 bits cannot hold this number
    if file.get("PixelRepresentation") == 1 and first >= 32768:
        first -= 65536  # written without its sign
    entries = item.LUTData
    if isinstance(entries, bytes):
        order = ">" if file.file_meta.TransferSyntaxUID == _BIG_ENDIAN else "<"
        entries = struct.unpack(f"{order}{count}H", entries[: 2 * count])
    return ModalityTable(first, tuple(entries))


def _find_padding(file) -> tuple[int, int] | None:
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

    Looking the pixels up is faster than computing them.
    """
    import numpy as np

    codes = np.arange(65536, dtype=np.uint16)
    values = codes.view(np.int16) if scale.signed else codes
    spare = 16 - scale.bits
    if spare and not scale.padding:
        # Decoders leave an overlay in the bits above BitsStored, if the pixels are compressed.
        values = (codes << spare).view(values.dtype) >> spare
    units = scale.units(values)
    if scale.padding:
        # Files write -2000 also as 63536, in the header and in the pixels. Read as unsigned, it
        # would be denser than everything else in the picture.
        ends = np.array([end % 65536 for end in scale.padding], np.uint16).view(values.dtype)
        is_padding = (values >= ends.min()) & (values <= ends.max())
        as_signed = scale.units(codes.view(np.int16))
        units[is_padding] = np.minimum(units, np.minimum(as_signed, AIR))[is_padding]
    units.flags.writeable = False  # all slices of a series share it
    return units


@functools.lru_cache(maxsize=64)
def window_table(scale: Scale, level: float, width: float):
    """Return the windowed grey level of each 16-bit stored value, (65536,) uint8."""
    return see(hounsfield_table(scale), level, width)
