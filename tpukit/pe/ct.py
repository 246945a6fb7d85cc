"""CT slices as images: the three windows of the JPEG set, and a reader for DICOM files."""

from pathlib import Path

# Level and width in Hounsfield units of the red, green and blue channel, as in Kaggle's 256-pixel JPEG set.
WINDOWS = {"lung": (-600, 1500), "embolism": (100, 700), "mediastinum": (40, 400)}


def three_windows(hounsfield):
    """Convert a slice to red, green and blue through the lung, embolism and mediastinal windows.

    Args:
        hounsfield: (H, W) array in Hounsfield units, as `read_dicom` returns it; air is -1000, water 0.

    Returns:
        (H, W, 3) uint8: 0 at and below level - width / 2, 255 at and above level + width / 2.

    Raises:
        ValueError: the array is not (H, W).
    """
    import numpy as np

    slice_ = np.asarray(hounsfield, dtype=np.float32)
    if slice_.ndim != 2:
        raise ValueError(
            f"three_windows takes one (H, W) slice in Hounsfield units, got shape {slice_.shape}\n"
            "  fix: pass one slice at a time, for instance three_windows(volume[i])"
        )
    channels = [(slice_ - (level - width / 2)) / width for level, width in WINDOWS.values()]
    return np.round(np.clip(np.stack(channels, axis=-1), 0, 1) * 255).astype(np.uint8)


def read_dicom(path):
    """Read one CT slice from a DICOM file, as Hounsfield units.

    Returns:
        (H, W) float32 Hounsfield units: stored values times RescaleSlope plus RescaleIntercept.

    Raises:
        ImportError: pydicom is not installed.
        ValueError: the file is not DICOM, or not a single grey CT slice.
    """
    try:
        import pydicom
    except ImportError:
        raise ImportError(
            "read_dicom needs pydicom, which is not installed\n"
            "  fix: %pip install pydicom (compressed slices also need pylibjpeg)"
        ) from None
    try:
        file = pydicom.dcmread(path)
    except pydicom.errors.InvalidDicomError:
        raise ValueError(
            f"{path} is not a DICOM file ({Path(path).stat().st_size} bytes)\n"
            "  fix: pass a .dcm file of the competition"
        ) from None
    if "RescaleSlope" not in file or file.pixel_array.ndim != 2:
        raise ValueError(
            f"{path} is not a CT slice\n  found: modality {file.get('Modality', 'not given')}, "
            f"RescaleSlope {file.get('RescaleSlope', 'not given')}\n  fix:   pass one slice of a CT series"
        )
    return file.pixel_array.astype("float32") * float(file.RescaleSlope) + float(file.RescaleIntercept)
