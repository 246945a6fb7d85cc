"""Reorder labels from a table's order to that of a pack's images, and predictions back.

table    index   label          pack           label
         1       cat            row 2          emu, of index 5
         2       dog            row 0          cat, of index 1
         5       emu            row 1          dog, of index 2

New labels in a Series or DataFrame must have the rows of the table that was packed. The index is
compared, because a user may have removed rows from the table before packing. In a column of the
whole table, the labels of the remaining rows are then at other positions.
"""

import hashlib
from dataclasses import dataclass

from tpukit.essentials.display import InvalidValueError, first_few


@dataclass(frozen=True)
class PackedRows:
    """The rows of the table, folder or dataset that was packed.

    Attributes:
        count: the number of rows, including the rows of images that were left out.
        index: a digest of the table's index; "" without a table, or for the index 0, 1, 2, ...
    """

    count: int
    index: str = ""


def rows_of(table) -> PackedRows:
    """Return the number of rows and the digest of the index of a DataFrame or Series."""
    index = table.index.tolist()
    digest = ""
    if index != list(range(len(index))):
        digest = hashlib.sha256(repr(index).encode()).hexdigest()
    return PackedRows(len(index), digest)


def in_image_order(labels, packed: PackedRows, rows):
    """Reorder the rows of a Series or DataFrame into the order of a pack's images.

    Args:
        labels: one row per row of the table that was packed, with the same index.
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
            fix="if `table` is the table that was packed: labels.loc[table.index]; "
            "or, if the labels are in the order of the images: labels.to_numpy()",
        )
    # The same number of rows in another order would give every image a wrong label.
    if given.index != packed.index:
        raise InvalidValueError(
            "the labels have another index than the table that was packed",
            found=f"index {first_few(labels.index.tolist(), 8)}",
            fix="if `table` is the table that was packed: labels.loc[table.index]; "
            "or, if the labels are in the order of its rows: labels.to_numpy()[images.rows]; "
            "or, if the labels are in the order of the images: labels.to_numpy()",
        )
    return labels.iloc[rows]


def in_table_order(values, rows, packed: PackedRows):
    """Reorder values of images into the order of the table; see `StoredImages.in_table_order`.

    Args:
        values: (n, ...) numbers, one value or row per image.
        rows: (n,) int, the number of the table's row to which each value belongs.
        packed: facts about the table, such as its number of rows.
    """
    import numpy

    values = numpy.asarray(values)
    if values.shape[:1] != rows.shape:
        raise InvalidValueError(
            f"there are {len(rows):,} images, and values of shape {values.shape}",
            fix="pass one value per image; or, if the values are those of a Subset, pass its "
            "indices, too: in_table_order(values, indices)",
        )
    is_taken = numpy.bincount(rows, minlength=packed.count)
    if is_taken.max(initial=0) > 1:
        raise InvalidValueError(
            "an image has more than one value",
            found=f"{is_taken.max()} values for row {is_taken.argmax()}",
            fix="pass one value per image, as predict returns them: predict(core, model, images)",
        )
    # Rows without an image become NaN, which booleans and integers cannot store.
    are_missing = is_taken == 0
    if are_missing.any() and values.dtype.kind in "biu":
        values = values.astype(float)
    ordered = numpy.zeros((packed.count, *values.shape[1:]), values.dtype)
    if are_missing.any():
        ordered[are_missing] = numpy.nan
    ordered[rows] = values
    return ordered
