"""Hounsfield units to pictures: the three windows of the JPEG set, and a reader for DICOM slices."""

from pathlib import Path

# Level and width in Hounsfield units of the red, green and blue channel, as in Kaggle's 256-pixel JPEG set.
WINDOWS = {"lung": (-600, 1500), "embolism": (100, 700), "mediastinum": (40, 400)}


def three_windows(hounsfield):
    """Show a slice through the lung, embolism and mediastinal windows, as red, green and blue.

    Args:
        hounsfield: (H, W) array in Hounsfield units, as `read_dicom` gives; air is -1000, water 0.

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
