"""Write the frames of enhanced CT files as classic CT files, which `tpukit.pe` can read.

    all.dcm, 300 frames    ->    all/00001.dcm, all/00002.dcm, ...    one slice per file

pydicom reads the frames. Position, orientation, spacing and scale of a frame are in its functional
groups. highdicom is not used: by default it applies real-world value maps and inverts MONOCHROME1,
which is wrong for Hounsfield units.
"""

import copy
import os
from pathlib import Path

from tpukit.pe.dicom import (
    CT_IMAGE,
    ENHANCED,
    NotACTSliceError,
    check_decoder,
    load_pydicom,
    not_a_slice,
    not_decoded,
    open_dataset,
)
from tpukit.pe.series import find_files, without_ending

# The functional groups of a frame, which may also be shared by all frames. The first two are
# required.
_GROUPS = (
    "PlanePositionSequence",
    "PlaneOrientationSequence",
    "PixelMeasuresSequence",
    "PixelValueTransformationSequence",
)


def split_enhanced(folder, to) -> int:
    """Write each frame of the enhanced CT files in a folder as a CT file of one slice.

    The new files are not compressed: 512 KB for a slice of 512 x 512 pixels. The SOPInstanceUID of
    a slice is that of its file, a colon, and the number of the frame from 1, such as "1.2.3:1".
    Files that are not enhanced CT are skipped. A second call writes the same files again.

    Args:
        folder: a folder with DICOM files, also in its sub-folders.
        to: the folder for the slices, outside of `folder`; it is created if it does not exist.

    Returns:
        The number of slices.

    Raises:
        ValueError: a frame has no position or orientation.
        FileNotFoundError: there is no DICOM file in the folder.
        OSError: a file is damaged, or the disk is full.
        ModuleNotFoundError: pydicom, or a decoder that these files need, is not installed.
    """
    pydicom = load_pydicom()
    count = 0
    for name in find_files(folder):
        path = os.path.join(folder, name)
        try:
            # By the standard, "1.2.3:1" is not a valid identifier, but only `tpukit.pe` reads it.
            with pydicom.config.disable_value_validation():
                count += _split(path, Path(to, without_ending(name)))
        except pydicom.errors.InvalidDicomError:
            continue
        except (ImportError, OSError, NotACTSliceError):
            raise
        except Exception as error:  # pydicom and its decoders raise many types for a damaged file
            raise not_decoded(path, error) from error
    return count


def _split(path: str, folder: Path) -> int:
    """Write each frame of an enhanced CT as a slice; return their number, 0 for other files."""
    import pydicom

    head = open_dataset(path, stop_before_pixels=True, specific_tags=["SOPClassUID"])
    # Files of other kinds, such as pictures of a screen, may have frames too.
    if head.get("SOPClassUID") not in ENHANCED:
        return 0
    file = open_dataset(path)
    check_decoder(file.file_meta.TransferSyntaxUID, path)
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for number, pixels in enumerate(pydicom.pixels.iter_pixels(file, raw=True), start=1):
        slice_ = _slice_of(file, number, pixels, path)
        slice_.save_as(folder / f"{number:05d}.dcm", enforce_file_format=True)
    return number


def _slice_of(file, number: int, pixels, path):
    """Return a frame as a DICOM data set of one slice.

    Args:
        file: the data set of the enhanced CT.
        number: the number of the frame, from 1.
        pixels: (H, W), the stored values of the frame.
        path: the path of the file, for messages.
    """
    import pydicom

    slice_ = pydicom.Dataset()
    for element in file:
        if element.VR != "SQ" and element.keyword not in ("PixelData", "NumberOfFrames"):
            slice_.add(copy.copy(element))
    # What is equal for all frames is in the shared groups, everything else in those of the frame.
    shared = file.SharedFunctionalGroupsSequence[0]
    frame = file.PerFrameFunctionalGroupsSequence[number - 1]
    for name in _GROUPS:
        group = frame.get(name) or shared.get(name)
        if group:
            slice_.update(group[0])
        elif name in _GROUPS[:2]:
            raise not_a_slice(path, f"frame {number} has no {name}")
    slice_.SOPClassUID = CT_IMAGE
    # All frames share the identifier of the file, and each slice needs its own.
    slice_.SOPInstanceUID = f"{file.SOPInstanceUID}:{number}"
    slice_.InstanceNumber = number
    slice_.BitsAllocated = 8 * pixels.dtype.itemsize
    slice_.PixelData = pixels.astype(pixels.dtype.newbyteorder("<")).tobytes()
    slice_.file_meta = pydicom.dataset.FileMetaDataset()
    slice_.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    return slice_
