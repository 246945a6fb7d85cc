"""The common part of packs and caches: labels, groups and rows of N images, and their checks."""

import operator
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpukit.datasets.label_arrays import are_other_numbers
from tpukit.datasets.row_labels import PackedRows, in_image_order, in_table_order
from tpukit.datasets.splitting import folds_by_group, split_by_group
from tpukit.essentials.data import split_masks
from tpukit.essentials.display import (
    InvalidIndexError,
    InvalidTypeError,
    InvalidValueError,
    as_html,
    counted,
    first_few,
)

if TYPE_CHECKING:  # so that type checkers accept these images as datasets of torch
    from torch.utils.data import Dataset
else:  # torch, which is slow to import, is not needed at run time
    Dataset = object

_FEW = 12  # the most names in a row of the HTML table


class StoredImages(Dataset):
    """N images on disk, as a map-style dataset and as a source of whole batches.

    Attributes:
        folder: the folder of the images.
        names: the names of the L labels, or of the classes, for `show_batch(names=...)`.
        labels: (N, L) float32; with classes (N,) int64, the class number of each image. The array
            is read-only, but other labels can be assigned, `images.labels = ...`: an array with one
            label or one row per image, or a pandas Series or DataFrame with the rows and the index
            of the table that was packed. Assigned floats become float32, too; integers keep their
            dtype, but class numbers become int64. Assigned labels are not written to the disk;
            `cached_images` and pickle copy them.
        has_masks: True if each image has a mask; `take` then returns (n, H, W, 4), the fourth
            channel the mask.
        groups: (N,) int32, the number of each image's group. Without groups=, an image and its
            copies are a group.
        group_names: the name of each group number; empty without groups=.
        classes: the name of each class number, such as the name of a sub-folder; empty without
            classes.
        rows: (N,) int64, the row of each image in the table, or the number of its item or file,
            from 0: `table.fold.to_numpy()[images.rows]` is the fold of each image.
        source_rows: the number of rows of the table, and a digest of its index.
        made: the settings that determined the pixels, such as size and window, by their names in
            the plan of the pack; empty for caches of old versions of tpukit, which did not store
            them.
    """

    # A subclass has `shape`, `_shape` (None if images differ in size), `take`, and `_image`, which
    # returns one image as a new array, (H, W, C) uint8. For `repr`, its methods `_form` and `_size`
    # return texts: " of 64 x 64 x 3, uint8", and the size and number of the files.

    def __init__(self, folder: Path, index, manifest: dict):
        import numpy

        self.folder = folder
        self.names = manifest["names"]
        self.classes = manifest["classes"]
        self.group_names = manifest["group_names"]
        self.has_masks = manifest.get("masks", False)
        labels = numpy.ascontiguousarray(index["labels"])
        self.groups = numpy.ascontiguousarray(index["group"])
        self.rows = numpy.ascontiguousarray(index["row"])
        table = manifest.get("table", {"count": int(self.rows.max(initial=-1)) + 1})
        self.source_rows = PackedRows(**table)
        if "groups.npy" in manifest["files"]:  # copies of an image are in one group
            self.groups = numpy.load(folder / "groups.npy")
        if self.classes:
            self.names = self.classes
            labels = labels[:, 0].astype(numpy.int64)
        self._labels = self._stored_labels = labels
        # Read-only, because a pickle, as for the processes of a DataLoader, has only the folder and
        # the assigned labels, so it would lose changes in place.
        for array in (labels, self.groups, self.rows):
            array.setflags(write=False)

    def checkpoint_identity(self) -> dict[str, object]:
        """Return the facts by which a checkpoint recognises these images, in a pack or a cache."""
        names = ("made", "names", "labels", "rows", "groups", "group_names")
        # Not `shape`, which raises an error if the images of a pack differ in size.
        return {"shape": self._shape, **{name: getattr(self, name) for name in names}}

    @property
    def labels(self):
        """The labels of all images; see the class."""
        return self._labels

    @labels.setter
    def labels(self, labels) -> None:
        import numpy

        if hasattr(labels, "iloc"):
            labels = in_image_order(labels, self.source_rows, self.rows)
        labels = numpy.array(labels)
        if labels.dtype == object and all(isinstance(label, Real) for label in labels.flat):
            labels = numpy.array(labels.tolist())  # numbers of a column that also had other values
        if self.classes and labels.shape[1:] == (1,):  # the only column of a DataFrame
            labels = labels[:, 0]
        if labels.shape[:1] != (len(self),):
            raise InvalidValueError(
                f"there are {len(self):,} images, and labels of shape {labels.shape}",
                fix="one label, or one row of labels, per image; from a column of the packed "
                'table: table["label"].to_numpy()[images.rows]',
            )
        if labels.dtype.kind == "f":
            # pandas and numpy compute in float64, and a loss of float32 outputs refuses such labels
            # in `backward`. A number that is too large for float32 becomes infinite: it is refused.
            with numpy.errstate(over="ignore"):
                labels = labels.astype(numpy.float32)
        self._check_finite(labels)
        if self.classes and labels.ndim == 1:
            labels = self._as_classes(labels)
        labels.setflags(write=False)
        self._labels = labels

    def _check_finite(self, labels) -> None:
        """Raise ValueError unless the labels are finite numbers."""
        import numpy

        if labels.dtype.kind == "f":
            is_wrong = ~numpy.isfinite(labels)
            if not is_wrong.any():
                return
            wrong = labels[is_wrong][0]
        elif labels.dtype.kind in "biu":
            return
        else:
            others = (label for label in labels.flat if not isinstance(label, Real))
            wrong = next(others, labels.flat[0])
        fix = "leave images without a finite label out, or correct their labels"
        if wrong in self.classes:  # a name of a class in place of its number
            # A list in the order of the table would give every image a wrong label.
            fix = (
                "numbers of classes; for a column of the table: column.map(images.classes.index); "
                "for words in the order of the images: "
                "[images.classes.index(word) for word in words]"
            )
        raise InvalidValueError("labels must be finite numbers", found=repr(wrong), fix=fix)

    def _as_classes(self, labels):
        """Return (N,) class numbers as int64; ValueError for a number that is not a class."""
        import numpy

        wrong = (labels < 0) | (labels >= len(self.classes)) | (labels % 1 != 0)
        if wrong.any():
            raise InvalidValueError(
                f"label {labels[wrong][0]} is not one of the {len(self.classes)} classes",
                found=first_few(self.classes, 8),
                fix=f"use numbers from 0 to {len(self.classes) - 1}; for other classes, pack again",
            )
        if are_other_numbers(self.classes):
            print(
                "labels: numbers are positions in .classes, so the label 0 is the class "
                f"{self.classes[0]!r}"
            )
        return labels.astype(numpy.int64)

    def _relabelled(self) -> dict | None:
        """Return the assigned labels as the state of a pickle; None if none were assigned."""
        if self._labels is self._stored_labels:
            return None
        return {"_labels": self._labels}

    def labelled_as(self, other: "StoredImages") -> "StoredImages":
        """Copy the labels that were assigned to `other`, and return self.

        Both must have the same images, such as a pack and its cache.
        """
        self.__dict__.update(other._relabelled() or {})
        return self

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        name = type(self).__name__
        images = counted(len(self), "image")
        return f"{name}({str(self.folder)!r}): {images}{self._form()}, {self._size()}"

    def _repr_html_(self) -> str:
        rows = [
            ("images", f"{len(self):,}{self._form()}"),
            ("folder", f"`{self.folder}`, {self._size()}"),
        ]
        if self.classes:
            rows.append((counted(len(self.classes), "class"), first_few(self.classes, _FEW)))
        elif self.names:
            rows.append((counted(len(self.names), "label"), first_few(self.names, _FEW)))
        if self.has_masks:
            rows.append(("masks", "a class number for every pixel"))
        if self.group_names:
            groups = counted(len(self.group_names), "group")
            rows.append((groups, first_few(self.group_names, _FEW)))
        skipped = getattr(self, "skipped", ())
        if skipped:
            rows.append(("left out", f"{counted(len(skipped), 'damaged image')}: `.skipped`"))
        return as_html(rows, title=type(self).__name__)

    def __getitem__(self, index: int):
        import numpy
        import torch

        try:
            index = operator.index(index)
        except TypeError:
            raise InvalidTypeError(
                f"the index of an image must be one whole number, got {index!r}",
                fix="for an array of several images: images.take(indices); "
                "for a dataset of them: torch.utils.data.Subset(images, indices)",
            ) from None
        if not -len(self) <= index < len(self):
            raise self._no_such_image(index)
        index %= len(self)  # negative numbers count from the end
        image = torch.from_numpy(self._image(index)).permute(2, 0, 1).contiguous()
        # A copy, so that writing to the tensor cannot change the labels of the pack.
        labels = torch.from_numpy(numpy.array(self.labels[index]))
        return split_masks(image, labels)

    # Any, because torch's Subset is typed for sequences, which numpy's arrays are not.
    def split(self, valid: float = 0.2, seed: int = 0, *, stratify=False) -> tuple[Any, Any]:
        """Return the indices of the images to train on and to validate on; they share no group.

        The same seed splits a pack and its cache in the same way.

        Args:
            valid: the share of the images to validate on, between 0 and 1.
            seed: determines which groups are for validation.
            stratify: True for about the same share of each class, or of each label of zeros and
                ones, in both parts; False for any shares. To balance other classes, pass
                one value per image, (N,), such as `table.site.to_numpy()[images.rows]`; or pass
                a column of the packed table, such as `table.site`.

        Returns:
            Two int64 arrays of indices in ascending order.

        Raises:
            ValueError: as for `split_by_group`.
        """
        return split_by_group(self.groups, valid, seed, stratify=self._kinds(stratify))

    def folds(self, count: int = 5, seed: int = 0, *, stratify=False) -> list[tuple]:
        """Return the folds of a cross-validation; a group's images are in the same fold.

        The same seed divides a pack and its cache in the same way.

        Args:
            count: the number of folds, 2 or more.
            seed: determines which groups are in which fold.
            stratify: as for `split`.

        Returns:
            `count` pairs of int64 arrays of indices in ascending order: the images to train on, and
            the images to validate on.

        Raises:
            ValueError: as for `folds_by_group`.
        """
        return folds_by_group(self.groups, count, seed, stratify=self._kinds(stratify))

    def _kinds(self, stratify):
        """Return the classes that `stratify` names, in the order of the images; None for none."""
        if isinstance(stratify, bool) or stratify is None:
            return self.labels if stratify else None
        if hasattr(stratify, "iloc"):
            return in_image_order(stratify, self.source_rows, self.rows).to_numpy()
        return stratify

    def in_table_order(self, values, indices=None):
        """Return values of images, such as predictions, in the order of the table's rows.

        For a table that was packed: `table["probability"] = images.in_table_order(predictions)`.

        Args:
            values: (n, ...) numbers, one value or row per image; an array or a tensor on the CPU.
            indices: (n,) the index of each value's image, such as a part of `split`; None if
                `values` has one value for each of the N images.

        Returns:
            An array (rows, ...) with one entry for each row of the table, or for each item or file.
            Rows without an image or a value are nan. If there are such rows, integers become
            floats.

        Raises:
            ValueError: the number of values is not that of `indices`, by default N; or two values
                belong to one image.
        """
        return in_table_order(
            values, self.rows if indices is None else self.rows[indices], self.source_rows
        )

    def __add__(self, other):
        """Return torch's ConcatDataset of both; tpukit reads it as fast as a single pack."""
        from torch.utils.data import ConcatDataset

        return ConcatDataset([self, other])

    def _indices(self, indices):
        """Return indices as an (n,) array; IndexError or ValueError unless all are 0 to N - 1."""
        import numpy

        indices = numpy.asarray(indices)
        if not indices.size:
            return numpy.empty(0, numpy.int64)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":  # numpy would use True as 1
            raise InvalidValueError(
                "indices are one list of whole numbers, "
                f"got shape {indices.shape} of {indices.dtype}",
                fix="if this is a mask: numpy.flatnonzero(mask)",
            )
        highest = indices.max()
        if highest >= len(self):
            raise self._no_such_image(highest)
        lowest = indices.min()
        if lowest < 0:
            raise self._no_such_image(lowest)
        return indices

    def _no_such_image(self, index) -> IndexError:
        fix = f"indices from 0 to {len(self) - 1:,}, such as split() gives"
        return InvalidIndexError(
            f"index {index} is out of range: there are {len(self):,} images", fix=fix
        )

    def _check_out(self, out, count: int) -> None:
        """Raise ValueError unless `out` is an array for `count` images."""
        shape = (count, *self.shape)
        if out.shape != shape or out.dtype != "uint8":
            raise InvalidValueError(
                f"take writes {shape} uint8, and out is {out.shape} {out.dtype}",
                fix=f"out=numpy.empty({shape}, numpy.uint8), or leave it out",
            )
