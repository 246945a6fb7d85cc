"""CT slices as images: Hounsfield units through windows, the three of the JPEG set or any other."""

from tpukit.essentials.show import WrongValue

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
        raise WrongValue(
            f"three_windows takes one (H, W) slice in Hounsfield units, got shape {slice_.shape}",
            fix="pass one slice at a time, for instance three_windows(volume[i])",
        )
    return np.stack([see(slice_, *window) for window in WINDOWS.values()], axis=-1)


def see(hounsfield, level: float, width: float):
    """Return float32 Hounsfield units of any shape through one window, as uint8; see `three_windows`."""
    import numpy as np

    return np.round(np.clip((hounsfield - (level - width / 2)) / width, 0, 1) * 255).astype(np.uint8)


def hounsfield(images):
    """Convert what `pack_dicom(..., form="int16")` stored to Hounsfield units, on the device the images are on.

    Args:
        images: (N, 2, H, W) uint8 as `core.batches` yields them: the low byte of each int16, and the high one.

    Returns:
        (N, 1, H, W) float32 Hounsfield units.

    Raises:
        ValueError: the images are not (N, 2, H, W) uint8.
    """
    import torch

    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 2:
        raise WrongValue(
            f"hounsfield takes (N, 2, H, W) uint8, got {tuple(images.shape)} {images.dtype}",
            fix='pass a batch of pack_dicom(..., form="int16") as core.batches yields it',
        )
    low, high = images[:, :1].float(), images[:, 1:].float()
    return low + 256 * high - 65536 * (high >= 128)
