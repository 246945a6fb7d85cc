"""Add a decoder of 12-bit JPEG Extended to pydicom, by GDCM.

pydicom 3.0.2 has three decoders for this transfer syntax. Pillow supports only 8 bits. The plugin
for GDCM rejects more than 8 bits, although GDCM can decode them. pylibjpeg-libjpeg is under the
GPL. A test fails as soon as pydicom decodes 12 bits without this module.
"""

import contextlib
import functools
import importlib.util

# JPEG Extended, process 2 and 4 (DICOM PS3.6, annex A).
SYNTAX = "1.2.840.10008.1.2.4.51"
DECODER_DEPENDENCIES = {SYNTAX: ("gdcm>=3.0.10",)}  # pydicom reads this name from each plugin
_LABEL = "gdcm_12_bits"


@functools.cache
def add_decoder() -> None:
    """Add this module to pydicom's decoders once per process. Several threads may call this."""
    from pydicom.pixels import get_decoder
    from pydicom.uid import UID

    # If threads call this function at once, `functools.cache` runs it in each. pydicom raises
    # ValueError for a label that exists, so only the first thread adds the decoder.
    with contextlib.suppress(ValueError):
        get_decoder(UID(SYNTAX)).add_plugin(_LABEL, (__name__, "decode"))


def is_available(uid: str) -> bool:
    """Tell pydicom whether `decode` supports a transfer syntax."""
    return uid in DECODER_DEPENDENCIES and has_gdcm()


def has_gdcm() -> bool:
    """Return whether python-gdcm is installed."""
    try:
        return importlib.util.find_spec("gdcm") is not None
    except ValueError:  # raised if sys.modules has None for the module, as in a test
        return False


def decode(source: bytes, runner) -> bytes:
    """Decode a frame for pydicom, and return its pixels as little-endian bytes.

    Args:
        source: the bytes of the JPEG.
        runner: pydicom's `DecodeRunner`, which has the size and the number of bits of the frame.
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
    # GDCM's Python binding returns the buffer as a str with surrogates for non-UTF-8 bytes.
    return image.GetBuffer().encode("utf-8", "surrogateescape")
