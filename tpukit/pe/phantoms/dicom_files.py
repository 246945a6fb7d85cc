"""Slices of a phantom as DICOM files, with what a reader of real ones needs to find."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Where a slice belongs: three identifiers, its number in the series; z, its pixels and the next slice in mm.

    `orientation` is how it is stored: the directions of a row and of a column.
    """

    study: str
    series: str
    image: str
    number: int
    z: float
    pixel: float
    apart: float = 1.0
    orientation: tuple[int, ...] = (1, 0, 0, 0, 1, 0)
    modality: str = "CT"


def write_dicom(path: Path, hounsfield, place: Place) -> None:
    """Write (H, W) Hounsfield units as a CT image, explicit VR little endian: int16, slope 1, intercept -1024."""
    import numpy as np
    import pydicom
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian

    stored = np.clip(np.round(hounsfield) + 1024, -32768, 32767).astype("<i2")
    # The identifiers are hexadecimal, as in the competition's files, and not what the standard wants.
    with pydicom.config.disable_value_validation():
        file = pydicom.Dataset()
        file.file_meta = pydicom.dataset.FileMetaDataset()
        file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        file.file_meta.MediaStorageSOPClassUID = file.SOPClassUID = CTImageStorage
        file.file_meta.MediaStorageSOPInstanceUID = file.SOPInstanceUID = place.image
        file.StudyInstanceUID, file.SeriesInstanceUID = place.study, place.series
        file.Modality, file.PatientPosition, file.InstanceNumber = place.modality, "HFS", place.number
        file.ImageOrientationPatient = list(place.orientation)
        corner = round(-place.pixel * (stored.shape[0] - 1) / 2, 3)
        across, back = (place.orientation[axis] + place.orientation[3 + axis] for axis in (0, 1))
        file.ImagePositionPatient = [across * corner, back * corner, round(place.z, 3)]
        file.PixelSpacing = [round(place.pixel, 4)] * 2
        file.SliceLocation, file.SliceThickness = round(place.z, 3), round(place.apart, 3)
        file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
        file.Rows, file.Columns = stored.shape
        file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = 16, 16, 15, 1
        file.RescaleSlope, file.RescaleIntercept, file.RescaleType = 1, -1024, "HU"
        file.WindowCenter, file.WindowWidth = 40, 400  # what a viewer shows first; the network has windows of its own
        file.PixelData = stored.tobytes()
        file.save_as(path, enforce_file_format=True)
