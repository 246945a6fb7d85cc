"""Convert CT slices to images by windows, and int16 pixels back to Hounsfield units.

A window has a level and a width in Hounsfield units (HU). With level 40 and width 400, values from
-160 to 240 HU become 0 to 255; lower values become black, higher values white.
"""

from tpukit.datasets import uint16_values
from tpukit.essentials.display import InvalidValueError

# Level and width of each window in HU, in the order red, green, blue, as in Kaggle's JPEG data set
# of 256 pixels.
WINDOWS = {"lung": (-600, 1500), "embolism": (100, 700), "mediastinum": (40, 400)}


def three_windows(hounsfield):
    """Convert a slice to RGB: the lung window in red, embolism in green, mediastinum in blue.

    Args:
        hounsfield: (H, W) array in Hounsfield units, as `read_dicom` returns it; air is -1000,
            water 0.

    Returns:
        (H, W, 3) uint8. The lower end of a window, level - width / 2, becomes 0, and its upper end,
        level + width / 2, becomes 255. Values outside the window become 0 or 255.

    Raises:
        ValueError: the array is not (H, W).
    """
    import numpy as np

    slice_ = np.asarray(hounsfield, dtype=np.float32)
    if slice_.ndim != 2:
        shape = slice_.shape
        raise InvalidValueError(
            f"three_windows takes one (H, W) slice in Hounsfield units, got shape {shape}",
            fix="pass one slice at a time, for instance three_windows(volume[i])",
        )
    channels = [to_grey(slice_, level, width) for level, width in WINDOWS.values()]
    return np.stack(channels, axis=-1)


def to_grey(hounsfield, level: float, width: float):
    """Convert float32 Hounsfield units of any shape to uint8; level and width are in HU."""
    import numpy as np

    lowest = level - width / 2
    shares = np.clip((hounsfield - lowest) / width, 0, 1)
    return np.round(shares * 255).astype(np.uint8)


def hounsfield(images):
    """Convert images of `pack_dicom(..., form="int16")` to Hounsfield units, on their device.

    Args:
        images: (N, 2, H, W) uint8 as `core.batches` yields them: the low byte of each int16, then
            the high byte.

    Returns:
        (N, 1, H, W) float32 Hounsfield units.

    Raises:
        ValueError: the images are not (N, 2, H, W) uint8.
    """
    import torch

    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 2:
        raise InvalidValueError(
            "hounsfield takes int16 as two bytes, (N, 2, H, W) uint8, "
            f"got {tuple(images.shape)} {images.dtype}",
            fix='pass a batch of pack_dicom(..., form="int16") as core.batches yields it',
        )
    values = uint16_values(images)
    return values - 65536 * (values >= 32768)  # the values are those of two's complement
