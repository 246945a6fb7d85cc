"""Decode JPEG Extended of 12 bits with GDCM, for pydicom.

pydicom 3.0.2 has two decoders for this transfer syntax: Pillow takes 8 bits only, and pydicom's own
use of GDCM refuses more than 8, although GDCM decodes them. A test fails when pydicom decodes them
without this module.
"""

import contextlib
import functools
import importlib.util

# JPEG Extended, process 2 and 4 (DICOM PS3.6, annex A).
SYNTAX = "1.2.840.10008.1.2.4.51"
DECODER_DEPENDENCIES = {SYNTAX: ("gdcm>=3.0.10",)}  # pydicom reads it of each module with a decoder
_LABEL = "gdcm_12_bits"


@functools.cache
def add_decoder() -> None:
    """Add this module to pydicom's decoders, once per process; any number of threads may call."""
    from pydicom.pixels import get_decoder
    from pydicom.uid import UID

    # `functools.cache` lets in all threads that call before the first has returned. pydicom refuses
    # a label that it has, so that the others find the decoder of the first.
    with contextlib.suppress(ValueError):
        get_decoder(UID(SYNTAX)).add_plugin(_LABEL, (__name__, "decode"))


def is_available(uid: str) -> bool:
    """Return whether `decode` takes this transfer syntax; pydicom calls it."""
    return uid in DECODER_DEPENDENCIES and has_gdcm()


def has_gdcm() -> bool:
    """Return whether python-gdcm is installed."""
    try:
        return importlib.util.find_spec("gdcm") is not None
    except ValueError:  # a test puts None in the place of the module
        return False


def decode(source: bytes, runner) -> bytes:
    """Return the pixels of a frame as little-endian bytes; pydicom calls it.

    Args:
        source: the JPEG.
        runner: pydicom's `DecodeRunner`, with the size and the bits of the frame.
    """
    import gdcm

    fragment = gdcm.Fragment()
    fragment.SetByteStringValue(source)
    fragments = gdcm.SequenceOfFragments.New()
    fragments.AddFragment(fragment)
    pixels = gdcm.DataElement(gdcm.Tag(0x7FE0, 0x0010))
    pixels.SetValue(fragments.__ref__())
    grey = gdcm.PhotometricInterpretation(gdcm.PhotometricInterpretation.MONOCHROME2)
    bits = runner.bits_stored
    image = gdcm.Image()
    image.SetNumberOfDimensions(2)
    image.SetDimensions((runner.columns, runner.rows, 1))
    image.SetDataElement(pixels)
    image.SetPhotometricInterpretation(grey)
    image.SetTransferSyntax(gdcm.TransferSyntax(gdcm.TransferSyntax.JPEGExtendedProcess2_4))
    image.SetPixelFormat(gdcm.PixelFormat(1, 16, bits, bits - 1, runner.pixel_representation))
    return image.GetBuffer().encode("utf-8", "surrogateescape")
