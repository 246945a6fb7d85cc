"""Make images of three adjacent slices as channels, as the challenge's best solutions did.

positions of a series    0  1  2  5        channels of the slice at 2    slices at 1, 2 and 5
                                           channels of the slice at 5    slices at 2, 5 and 5
"""

from tpukit.essentials.display import InvalidValueError
from tpukit.pe.ct import WINDOWS
from tpukit.pe.labels import IDS, IMAGE, SERIES, STUDY


class NeighbouringSlices:
    """Images whose channels are the slice below, the slice itself and the slice above.

    All three channels have the same window. The order of the images in the pack does not matter,
    because the positions in the table determine which slices are adjacent. At the ends of a series,
    the slice itself replaces the missing slice, as in `pack_dicom`. If slices are missing within a
    series, the next existing slice is used.

    `[i]` is `(image, labels)`: a (3, H, W) uint8 tensor, and the labels of `images[i]`.
    `core.batches` and Subset accept a NeighbouringSlices in place of `images`. On a busy machine,
    one thread read 13,000 images of 64 x 64 pixels per second from a cache, and 83,000 without
    neighbours. From a pack, each image needs three decoded slices, so build a cache.

    Args:
        images: `PackedImages` or `CachedImages` with three windows as channels.
        labels: the table that was packed, with `position`, as from `index_images`.
        window: "lung", "embolism" or "mediastinum".

    Attributes:
        shape: (height, width, 3).
        labels, names, rows, groups, group_names: those of `images`.

    Raises:
        ValueError: the window does not exist; `images` does not have three windows, or was packed
            from a longer table; `labels` has no positions, or one position twice in a series.
    """

    def __init__(self, images, labels, window: str = "embolism"):
        import numpy as np

        if window not in WINDOWS:
            raise ValueError(f"window must be one of {', '.join(WINDOWS)}, got {window!r}")
        is_pack = all(hasattr(images, name) for name in ("take", "rows", "shape"))
        has_neighbours = bool(getattr(images, "made", {}).get("window"))  # a pack of one window
        if not is_pack or images.shape[-1] != 3 or has_neighbours:
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
        # The channels of a packed image are the windows in this order.
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
        """Return the images with these indices, (n, H, W, 3) uint8, in the order of the indices.

        Args:
            indices: (n,) integers, 0 to N - 1.
            out: an array (n, H, W, 3) uint8 to write into; None for a new one.
        """
        import numpy as np

        # `unique`, so that a slice which several images need is read once.
        wanted, place = np.unique(self._three(indices), return_inverse=True)
        planes = self._images.take(wanted)[..., self._channel]
        return np.stack(list(planes[place.reshape(3, -1)]), axis=-1, out=out)

    def read_ahead(self, indices) -> None:
        """Ask a cache to read the slices of these images into memory, without waiting."""
        if hasattr(self._images, "read_ahead"):
            self._images.read_ahead(self._three(indices).reshape(-1))

    def _three(self, indices):
        """Return (3, n) indices: the slices below, these slices, and the slices above."""
        import numpy as np

        indices = np.asarray(indices, dtype=np.int64)
        return np.stack([self._below[indices], indices, self._above[indices]])


def _adjacent(table) -> tuple:
    """Return the rows with the slice below and the slice above each row, two (N,) arrays.

    At the ends of a series, it is the row itself.
    """
    import numpy as np
    import pandas as pd

    position = table["position"].to_numpy(np.float64)
    series, _ = pd.factorize(pd.MultiIndex.from_frame(table[[STUDY, SERIES]]))
    order = np.lexsort((position, series))
    # All pairs of rows that are adjacent in the order, including those of two series.
    lower = order[:-1]
    upper = order[1:]
    is_same_series = series[lower] == series[upper]
    is_shared = is_same_series & (position[lower] == position[upper])
    if is_shared.any():
        row = table.iloc[lower[int(is_shared.argmax())]]
        raise InvalidValueError(
            f"{int(is_shared.sum())} slices have the position of another slice of their series",
            found=f"{row[IMAGE]} of study {row[STUDY]} at {row.position}",
            fix="leave out the rows of the slices whose position is wrong",
        )
    # Begin with each row itself, which remains at the ends of a series.
    below = np.arange(len(table))
    above = np.arange(len(table))
    below[upper[is_same_series]] = lower[is_same_series]
    above[lower[is_same_series]] = upper[is_same_series]
    return below, above
