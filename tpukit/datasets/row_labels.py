"""Put labels of a table in the order of a pack's images, and predictions in that of the table.

table    index   label          pack           labels
         1       cat            row 2          those of index 5
         2       dog            row 0          those of index 1
         5       emu            row 1          those of index 2

A Series or DataFrame has a label for each row of the table that was packed. Its index shows whether
they are the same rows: if rows were left out before packing, a column of the whole table has its
labels at other positions.
"""

import hashlib
from dataclasses import dataclass

from tpukit.essentials.display import InvalidValueError, first_few


@dataclass(frozen=True)
class PackedRows:
    """The rows of the table, folder or dataset that was packed.

    Attributes:
        count: the number of rows; also those of images that were left out.
        index: a digest of the table's index; "" for 0, 1, 2, ...
    """

    count: int
    index: str = ""


def rows_of(table) -> PackedRows:
    """Return the rows of a DataFrame or Series."""
    index = table.index.tolist()
    digest = ""
    if index != list(range(len(index))):
        digest = hashlib.sha256(repr(index).encode()).hexdigest()
    return PackedRows(len(index), digest)


def in_image_order(labels, packed: PackedRows, rows):
    """Return a Series or DataFrame in the order of the images.

    Args:
        labels: one row per row of the table that was packed, with its index.
        packed: the rows of that table.
        rows: (N,) the row of each image.

    Raises:
        ValueError: the labels have another number of rows, or another index.
    """
    given = rows_of(labels)
    if given.count != packed.count:
        raise InvalidValueError(
            f"the labels have {given.count:,} rows, "
            f"and the table that was packed had {packed.count:,}",
            found=f"index {first_few(labels.index.tolist(), 8)}",
            fix="labels.loc[table.index], with the table that was packed; "
            "or labels.to_numpy() in the order of the images, see .rows",
        )
    if given.index != packed.index:
        raise InvalidValueError(
            "the labels have another index than the table that was packed",
            found=f"index {first_few(labels.index.tolist(), 8)}",
            fix="labels.loc[table.index], with the table that was packed; "
            "labels.to_numpy()[images.rows] if they are in the order of the table; "
            "labels.to_numpy() if they are in the order of the images",
        )
    return labels.iloc[rows]


def in_table_order(values, rows, packed: PackedRows):
    """Return values of images in the order of the table's rows; see `StoredImages.in_table_order`.

    Args:
        values: (n, ...) numbers.
        rows: (n,) the row of each.
        packed: the rows of the table.
    """
    import numpy

    values = numpy.asarray(values)
    if values.shape[:1] != rows.shape:
        raise InvalidValueError(
            f"there are {len(rows):,} images, and values of shape {values.shape}",
            fix="pass one value per image; for a part of the images in_table_order(values, "
            "indices), with the indices of their Subset",
        )
    is_taken = numpy.bincount(rows, minlength=packed.count)
    if is_taken.max(initial=0) > 1:
        raise InvalidValueError(
            "an image has more than one value",
            found=f"row {is_taken.argmax()} has {is_taken.max()}",
            fix="values of one epoch, with each image once: predict(core, model, images)",
        )
    are_missing = is_taken == 0
    if are_missing.any() and values.dtype.kind in "biu":
        values = values.astype(float)
    ordered = numpy.zeros((packed.count, *values.shape[1:]), values.dtype)
    if are_missing.any():
        ordered[are_missing] = numpy.nan
    ordered[rows] = values
    return ordered
