"""Adjacent slices as channels, as the best solutions of the challenge used them.

positions of a series    0  1  2  5        channels of the slice at 2    those at 1, 2 and 5
                                           channels of the slice at 5    those at 2, 5 and 5
"""

from tpukit.essentials.display import InvalidValueError
from tpukit.pe.challenge import IMAGE, STUDY
from tpukit.pe.ct import WINDOWS
from tpukit.pe.labels import IDS, SERIES


class NeighbouringSlices:
    """Images whose channels are the slice below, the slice itself and the slice above.

    All three are seen through one window. The images are packed or cached before, in any order: the
    positions in the table decide which slices are adjacent. At the end of a series the slice itself
    takes the place of the missing one, as in `pack_dicom`. If slices are missing, the next existing
    slice is used.

    `core.batches` and Subset take it as they take `images`. From a cache it reads a sixth as fast
    as the images alone (13,000 against 83,000 images per second of 64 pixels, one thread of a busy
    machine). From a pack, it decodes three slices per image, so build a cache.

    Args:
        images: `PackedImages` or a `CachedImages` with three windows as channels.
        labels: the table that was packed, with `position`, as `index_images` makes it.
        window: "lung", "embolism" or "mediastinum".

    Attributes:
        shape: (height, width, 3).
        labels, names, rows, groups, group_names: of `images`.

    Raises:
        ValueError: there is no such window, the images are not of this table, the table has no
            positions, or two slices of a series have the same position.
    """

    def __init__(self, images, labels, window: str = "embolism"):
        import numpy as np

        if window not in WINDOWS:
            raise ValueError(f"window must be one of {', '.join(WINDOWS)}, got {window!r}")
        is_pack = all(hasattr(images, name) for name in ("take", "rows", "shape"))
        if not is_pack or images.shape[-1] != 3:
            kinds = "PackedImages or a CachedImages of three windows"
            raise InvalidValueError(
                f"NeighbouringSlices needs {kinds}, got {images!r}",
                fix="tpukit.cached_images(tpukit.pack(labels, folder, ...), size=...)",
            )
        missing = [name for name in (*IDS, "position") if name not in labels.columns]
        least = images.rows.max(initial=-1) + 1
        if missing or least > len(labels):
            reason = f": no column {', '.join(missing)}" if missing else ""
            raise InvalidValueError(
                f"the images belong to another table{reason}",
                found=f"{len(labels):,} rows; the images need {least:,} or more",
                fix="pass the table that was packed, as pe.index_images(labels, folder) made it",
            )
        self._images = images
        # The windows are the channels of a packed image, in this order.
        self._channel = list(WINDOWS).index(window)
        self.shape = images.shape
        self.labels = images.labels
        self.names = images.names
        self.rows = images.rows
        self.groups = images.groups
        self.group_names = images.group_names
        self.encoding = getattr(images, "encoding", None)
        self._below, self._above = _adjacent(labels.iloc[np.asarray(images.rows)])

    def __len__(self) -> int:
        return len(self._images)

    def __repr__(self) -> str:
        return f"NeighbouringSlices of {self._images!r}"

    def __getitem__(self, index: int):
        import numpy as np
        import torch

        _, labels = self._images[index]  # raises IndexError for an index out of range
        pixels = self.take([index % len(self)])[0]
        return torch.from_numpy(np.moveaxis(pixels, -1, 0).copy()), labels

    def take(self, indices, out=None):
        """Return (n, H, W, 3) uint8, the three slices of each index; in `out` if it is given."""
        import numpy as np

        # A slice that several images need is read once.
        wanted, place = np.unique(self._three(indices), return_inverse=True)
        planes = self._images.take(wanted)[..., self._channel]
        return np.stack(list(planes[place.reshape(3, -1)]), axis=-1, out=out)

    def read_ahead(self, indices) -> None:
        """Let the images prepare to read these indices and the adjacent ones, if they can."""

        if hasattr(self._images, "read_ahead"):
            self._images.read_ahead(self._three(indices).reshape(-1))

    def _three(self, indices):
        """Return (3, n) indices: the slices below, these slices, and the slices above."""
        import numpy as np

        indices = np.asarray(indices, dtype=np.int64)
        return np.stack([self._below[indices], indices, self._above[indices]])


def _adjacent(table) -> tuple:
    """Return two arrays (N,): for each row, the number of the row with the slice below, and above.

    At the end of a series it is the row's own number.
    """
    import numpy as np
    import pandas as pd

    position = table["position"].to_numpy(np.float64)
    series, _ = pd.factorize(pd.MultiIndex.from_frame(table[[STUDY, SERIES]]))
    order = np.lexsort((position, series))
    # Pairs of rows that follow each other in the order; some are of two series.
    lower = order[:-1]
    upper = order[1:]
    is_same_series = series[lower] == series[upper]
    is_shared = is_same_series & (position[lower] == position[upper])
    if is_shared.any():
        row = table.iloc[lower[int(is_shared.argmax())]]
        raise InvalidValueError(
            f"{int(is_shared.sum())} slices have the position of another slice of their series",
            found=f"{row[IMAGE]} of study {row[STUDY]} at {row.position}",
            fix="leave out those that are wrong",
        )
    # First each row itself, which stays so at the ends of a series.
    below = np.arange(len(table))
    above = np.arange(len(table))
    below[upper[is_same_series]] = lower[is_same_series]
    above[lower[is_same_series]] = upper[is_same_series]
    return below, above
