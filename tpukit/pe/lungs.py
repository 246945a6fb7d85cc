"""Find the box around the lungs; slices that are cut to it have a higher resolution.

On phantoms the box has 236 x 151 of 256 x 256 pixels on average. The gain was measured with a
ResNet-18 from random weights, as the log loss for the embolism on a slice:

    cut to the box, resized to 96 x 96                   0.146
    cut to a square, which preserves the aspect ratio    0.182
    whole slices                                         0.211

These are means of three seeds, which differ by 0.02, on 100 exams outside of the training set. At
256 pixels the gain should be smaller. It was not measured on patients.
"""

from collections.abc import Iterable

from tpukit.essentials.display import InvalidValueError

_COARSE = 128  # pixels; the shorter side is reduced to 128 to 255, which is enough for a box
_AIR = -400  # HU; the values of lungs are lower
_SMALLEST = 0.006  # share of a slice; a smaller area of air, such as the windpipe, is not a lung
_MARGIN = 1 / 64  # share of the slice's side; added around the box
_NARROWEST = 0.5  # share of the slice's width; a narrower box may be that of a single lung


def lung_box(slices: Iterable) -> tuple[float, float, float, float] | None:
    """Find one box around the lungs in all slices of a series.

    Large areas of air that do not touch the edge of the slice count as lungs. So air in the bowel
    may enlarge the box.

    Args:
        slices: (H, W) arrays in Hounsfield units, as `read_dicom` returns them; a dozen slices
            along the body are enough.

    Returns:
        left, top, right and bottom as shares of the slice's width and height, 0 to 1, with a margin
        of 1/64. None if there are no lungs, or if the box is narrower than half of the slice.

    Raises:
        ValueError: a slice is not (H, W).
    """
    import numpy as np

    boxes = [_box(np.asarray(slice_)) for slice_ in slices]
    boxes = [box for box in boxes if box is not None]
    if not boxes:
        return None
    left, top = np.min(boxes, axis=0)[:2] - _MARGIN
    right, bottom = np.max(boxes, axis=0)[2:] + _MARGIN
    if right - left < _NARROWEST:
        return None
    start = (max(0.0, float(left)), max(0.0, float(top)))
    return *start, min(1.0, float(right)), min(1.0, float(bottom))


def _box(hounsfield) -> tuple | None:
    """Return the box around the lungs in one slice, without a margin; None without lungs."""
    import numpy as np
    from scipy import ndimage

    if hounsfield.ndim != 2:
        raise InvalidValueError(
            f"lung_box takes (H, W) slices in Hounsfield units, got shape {hounsfield.shape}",
            fix="pass a list of slices, or a volume (slices, H, W)",
        )
    step = max(1, min(hounsfield.shape) // _COARSE)
    is_air = ndimage.binary_opening(hounsfield[::step, ::step] < _AIR)
    pieces, _ = ndimage.label(is_air)
    areas = np.bincount(pieces.reshape(-1))
    edges = np.concatenate([pieces[0], pieces[-1], pieces[:, 0], pieces[:, -1]])
    # The air around the patient touches an edge.
    areas[np.unique(edges)] = 0
    areas[0] = 0  # label 0 is everything that is not air
    # Whether each label is a lung; `[pieces]` gives this to all pixels of the label.
    lungs = (areas > _SMALLEST * pieces.size)[pieces]
    if not lungs.any():
        return None
    top, bottom = np.flatnonzero(lungs.any(1))[[0, -1]]
    left, right = np.flatnonzero(lungs.any(0))[[0, -1]]
    height, width = lungs.shape
    return left / width, top / height, (right + 1) / width, (bottom + 1) / height
