"""Write the slices of a phantom as DICOM files, with the elements of real CT files."""

from dataclasses import dataclass
from pathlib import Path

_SAME_IN_ALL = {
    "PatientPosition": "HFS",  # head first, on the back
    "SamplesPerPixel": 1,
    "PhotometricInterpretation": "MONOCHROME2",
    "BitsAllocated": 16,
    "BitsStored": 16,
    "HighBit": 15,
    "PixelRepresentation": 1,  # signed
    "RescaleSlope": 1,
    "RescaleIntercept": -1024,
    "RescaleType": "HU",
    "WindowCenter": 40,  # for viewers; the network has its own windows
    "WindowWidth": 400,
}


@dataclass(frozen=True)
class Place:
    """The identifiers of a slice and its position in the body; lengths in mm."""

    study: str  # StudyInstanceUID
    series: str  # SeriesInstanceUID
    image: str  # SOPInstanceUID
    number: int  # InstanceNumber
    z: float  # the position along the body; it grows towards the head
    pixel: float  # width and height of a pixel
    apart: float = 1.0  # the distance to the next slice
    orientation: tuple[int, ...] = (1, 0, 0, 0, 1, 0)  # the directions of a row and of a column
    modality: str = "CT"


def write_dicom(path: Path, hounsfield, place: Place) -> None:
    """Write a slice of Hounsfield units, (H, W), as a DICOM CT image.

    The file is explicit VR little endian, with int16 values, slope 1 and intercept -1024.
    """
    import numpy as np
    import pydicom
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian

    stored = np.clip(np.round(hounsfield) + 1024, -32768, 32767).astype("<i2")
    rows, columns = stored.shape
    corner = round(-place.pixel * (rows - 1) / 2, 3)
    left, back = (place.orientation[axis] + place.orientation[3 + axis] for axis in (0, 1))
    # The identifiers are hexadecimal, as in the competition's files, so they are not valid UIDs.
    with pydicom.config.disable_value_validation():
        file = pydicom.Dataset()
        file.file_meta = pydicom.dataset.FileMetaDataset()
        file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        file.file_meta.MediaStorageSOPClassUID = CTImageStorage
        file.file_meta.MediaStorageSOPInstanceUID = place.image
        file.SOPClassUID = CTImageStorage
        file.SOPInstanceUID = place.image
        file.StudyInstanceUID = place.study
        file.SeriesInstanceUID = place.series
        file.InstanceNumber = place.number
        file.Modality = place.modality
        file.ImageOrientationPatient = list(place.orientation)
        file.ImagePositionPatient = [left * corner, back * corner, round(place.z, 3)]
        file.PixelSpacing = [round(place.pixel, 4)] * 2
        file.SliceLocation = round(place.z, 3)
        file.SliceThickness = round(place.apart, 3)
        file.Rows = rows
        file.Columns = columns
        for name, value in _SAME_IN_ALL.items():
            setattr(file, name, value)
        file.PixelData = stored.tobytes()
        file.save_as(path, enforce_file_format=True)
