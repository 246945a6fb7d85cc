"""Neighbouring slices as channels: what the best solutions of the challenge showed their networks."""

from tpukit.essentials.show import WrongValue
from tpukit.pe.challenge import IMAGE, STUDY
from tpukit.pe.ct import WINDOWS
from tpukit.pe.labels import IDS


class NeighbouringSlices:
    """Images whose channels are the slice below, the slice itself and the one above, all through one window.

    Made of images that are packed or cached already, whatever their order: which slice lies beside which is read from
    the positions in the table. At the end of a series the slice stands for its neighbour, as in `pack_dicom`; where
    slices are missing, the next that is there counts. `core.batches` takes it as it takes what it is made of, and so
    does Subset. From a cache it is a sixth as fast (13,000 and 83,000 images/s of 64 pixels, one thread of a busy
    machine); from records three slices are decoded for each, so build a cache.

    Args:
        images: `Records` or a `Cache` of three windows as channels.
        labels: the table that was packed, with `position`, as `index_images` makes it.
        window: "lung", "embolism" or "mediastinum".

    Attributes:
        shape: (height, width, 3).
        labels, names, rows, groups, group_names: as of `images`.

    Raises:
        ValueError: there is no such window, the images are not of this table, the table has no positions, or two slices
            of a series are at the same one.
    """

    def __init__(self, images, labels, window: str = "embolism"):
        import numpy as np

        if window not in WINDOWS:
            raise ValueError(f"window is one of {', '.join(WINDOWS)}, got {window!r}")
        if not all(hasattr(images, name) for name in ("take", "rows", "shape")) or images.shape[-1] != 3:
            raise WrongValue(
                f"NeighbouringSlices is made of Records or a Cache of three windows, got {images!r}",
                fix="tpukit.cache_or_decode(tpukit.pack(labels, folder, ...), size=...)",
            )
        missing = [name for name in (*IDS, "position") if name not in labels.columns]
        if missing or images.rows.max(initial=-1) >= len(labels):
            raise WrongValue(
                f"the images are of another table{': no column ' + ', '.join(missing) if missing else ''}",
                found=f"{len(labels):,} rows; the images are of {images.rows.max(initial=-1) + 1:,} or more",
                fix="pass the table that was packed, as pe.index_images(labels, folder) made it",
            )
        self._images, self._channel, self.shape = images, list(WINDOWS).index(window), images.shape
        self.labels, self.names, self.rows = images.labels, images.names, images.rows
        self.groups, self.group_names = images.groups, images.group_names
        self.encoding = getattr(images, "encoding", None)
        self._beside = _beside(labels.iloc[np.asarray(images.rows)])

    def __len__(self) -> int:
        return len(self._images)

    def __repr__(self) -> str:
        return f"NeighbouringSlices of {self._images!r}"

    def __getitem__(self, index: int):
        import numpy as np
        import torch

        _, labels = self._images[index]  # refuses a number that there is not
        pixels = self.take([index % len(self)])[0]
        return torch.from_numpy(np.moveaxis(pixels, -1, 0).copy()), labels

    def take(self, indices, out=None):
        """Return (n, H, W, 3) uint8, the three slices of each; into `out` if it is given."""
        import numpy as np

        wanted, place = np.unique(self._three(indices), return_inverse=True)  # a neighbour of two is read once
        planes = self._images.take(wanted)[..., self._channel]
        return np.stack(list(planes[place.reshape(3, -1)]), axis=-1, out=out)

    def read_ahead(self, indices) -> None:
        """Let the images prepare to read these and their neighbours next, if they can."""
        if hasattr(self._images, "read_ahead"):
            self._images.read_ahead(self._three(indices).reshape(-1))

    def _three(self, indices):
        """Return (3, n) the numbers of the slices below, of these, and above."""
        import numpy as np

        indices = np.asarray(indices, dtype=np.int64)
        return np.stack([self._beside[0][indices], indices, self._beside[1][indices]])


def _beside(table):
    """Return (2, N) the number of the row below and above each row of a table, its own at the end of its series."""
    import numpy as np
    import pandas as pd

    position = table["position"].to_numpy(np.float64)
    series = pd.factorize(pd.MultiIndex.from_frame(table[[*IDS[:2]]]))[0]
    order = np.lexsort((position, series))
    same = series[order][1:] == series[order][:-1]
    if (twice := same & (np.diff(position[order]) == 0)).any():
        row = table.iloc[order[int(twice.argmax())]]
        raise WrongValue(
            f"{int(twice.sum())} slices are at the position of another one of their series",
            found=f"{row[IMAGE]} of study {row[STUDY]} at {row.position}",
            fix="leave out those that are wrong",
        )
    numbers = np.arange(len(table))
    below, above = numbers.copy(), numbers.copy()
    below[order[1:][same]], above[order[:-1][same]] = order[:-1][same], order[1:][same]
    return np.stack([below, above])
