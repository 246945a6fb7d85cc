"""What a pack and a cache have in common: labels, groups and rows of N images, and the checks of what is asked for."""

import operator
from pathlib import Path

from tpukit.datasets.label_arrays import are_other_numbers
from tpukit.datasets.splitting import split_by_group
from tpukit.essentials.data import split_masks
from tpukit.essentials.display import (
    InvalidIndexError,
    InvalidTypeError,
    InvalidValueError,
    as_html,
    counted,
    first_few,
)


class StoredImages:
    """N images on disk as a map-style dataset, and as a source of whole batches.

    A subclass gives `shape`, `take`, and `_image`, which returns (H, W, 3 or 4) uint8 of one image, the caller's own;
    and in words `_form`, the shape of an image, or that they differ, and `_size`, how many files there are, how large.

    Attributes:
        folder: where they are.
        names: of the L labels, or of the classes: what `show_batch(names=...)` takes.
        labels: (N, L) float32; with classes (N,) int64, the number of each image's class. Read-only: other labels are
            put in place, `images.labels = ...`, one or one row for each image; of a pandas Series or DataFrame, in
            the order of the table, those of `rows`. A cache that is made afterwards has them, too.
        has_masks: True where each image has a mask; what is taken is then (H, W, 4), the fourth channel the mask.
        groups: (N,) int32, the number of each image's group; without groups each image is its own, with those of
            equal contents.
        group_names: what those numbers stand for; empty without groups.
        classes: what the class numbers stand for: sub-folders, words, a dataset's classes; empty without classes.
        rows: (N,) int64, the row of the table that each image was, or the number of the item or file, from 0:
            `table.fold.to_numpy()[images.rows]` is each image's fold.
        made: what decided the pixels when they were packed, such as size and window, by the names of the pack's plan;
            empty for a cache from before this was kept.
    """

    def __init__(self, folder: Path, index, manifest: dict):
        import numpy

        self.folder = folder
        self.names, self.classes, self.group_names = (manifest[key] for key in ("names", "classes", "group_names"))
        self.has_masks = manifest.get("masks", False)
        labels, self.groups, self.rows = (numpy.ascontiguousarray(index[name]) for name in ("labels", "group", "row"))
        if "groups.npy" in manifest["files"]:
            self.groups = numpy.load(folder / "groups.npy")
        if self.classes:
            self.names, labels = self.classes, labels[:, 0].astype(numpy.int64)
        self._labels = self._stored_labels = labels
        # What was changed in place would be lost where this is pickled, as for the processes of a DataLoader.
        for array in (labels, self.groups, self.rows):
            array.setflags(write=False)

    @property
    def labels(self):
        """The labels of all images."""
        return self._labels

    @labels.setter
    def labels(self, labels) -> None:
        import numpy

        if hasattr(labels, "iloc"):
            labels = self._of_the_table(labels)
        labels = numpy.array(labels)
        if self.classes and labels.shape[1:] == (1,):  # of a table's one column
            labels = labels[:, 0]
        if labels.shape[:1] != (len(self),):
            raise InvalidValueError(
                f"there are {len(self):,} images, and labels of shape {labels.shape}",
                fix="one label, or one row of them, for each: table.labels.to_numpy()[images.rows]",
            )
        if labels.dtype.kind not in "biuf" or (labels.dtype.kind == "f" and not numpy.isfinite(labels).all()):
            wrong = labels[~numpy.isfinite(labels)][0] if labels.dtype.kind == "f" else labels.reshape(-1)[0]
            fix = "leave such images out, or number them"
            if wrong in self.classes:
                fix = "the numbers of these classes: [images.classes.index(word) for word in words]"
            raise InvalidValueError("labels are finite numbers", found=repr(wrong), fix=fix)
        if self.classes and labels.ndim == 1:
            wrong = (labels < 0) | (labels >= len(self.classes)) | (labels % 1 != 0)
            if wrong.any():
                raise InvalidValueError(
                    f"label {labels[wrong][0]} is none of the {len(self.classes)} classes",
                    found=first_few(self.classes, 8),
                    fix="numbers from 0, in the order of .classes; for other classes pack again",
                )
            labels = labels.astype(numpy.int64)
            if are_other_numbers(self.classes):
                print(f"labels: numbers are places in .classes, from 0: 0 stands for {self.classes[0]!r}")
        labels.setflags(write=False)
        self._labels = labels

    def _of_the_table(self, labels):
        """Return the rows of a Series or DataFrame in the order of the images; it has to be in that of the table."""
        import numpy

        last = int(self.rows.max(initial=-1))
        if len(labels) <= last:
            raise InvalidValueError(
                f"the labels have {len(labels):,} rows, and the images were rows 0 to {last:,} of a table",
                fix="labels of all rows of that table; or labels.to_numpy() in the order of the images, see .rows",
            )
        # Of what was put in the order of the images, as by `.iloc[images.rows]`, the index shows it.
        back = labels.index[numpy.argsort(self.rows)] if len(labels) == len(self) else labels.index
        if back.is_monotonic_increasing and not labels.index.is_monotonic_increasing:
            raise InvalidValueError(
                "the labels seem to be in the order of the images already, and those of pandas in that of the table",
                found=f"index {first_few(labels.index.tolist(), 8)}",
                fix="labels.to_numpy() where that is so; where the table was shuffled, labels.reset_index(drop=True)",
            )
        return labels.iloc[self.rows]

    def _relabelled(self) -> dict | None:
        """Return what a pickle has to hold beside the path: labels that were put in place of the stored ones."""
        return None if self._labels is self._stored_labels else {"_labels": self._labels}

    def labelled_as(self, other: "StoredImages") -> "StoredImages":
        """Return these images with the labels that were put in place in others, of which they are another form."""
        self.__dict__.update(other._relabelled() or {})
        return self

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        each = self._form()
        return f"{type(self).__name__}({str(self.folder)!r}): {counted(len(self), 'image')}{each}, {self._size()}"

    def _repr_html_(self) -> str:
        rows = [("images", f"{len(self):,}{self._form()}"), ("folder", f"`{self.folder}`, {self._size()}")]
        if self.classes:
            rows.append((counted(len(self.classes), "class"), first_few(self.classes, 12)))
        elif self.names:
            rows.append((counted(len(self.names), "label"), first_few(self.names, 12)))
        if self.has_masks:
            rows.append(("masks", "a class number for every pixel"))
        if self.group_names:
            rows.append((counted(len(self.group_names), "group"), first_few(self.group_names, 12)))
        if skipped := getattr(self, "skipped", ()):
            rows.append(("left out", f"{counted(len(skipped), 'damaged image')}: `.skipped`"))
        return as_html(rows, title=type(self).__name__)

    def __getitem__(self, index: int):
        import numpy
        import torch

        try:
            index = operator.index(index)
        except TypeError:
            raise InvalidTypeError(
                f"one image is asked for by its number, got {index!r}",
                fix="images.take(indices) for several; torch.utils.data.Subset(images, indices) as a dataset",
            ) from None
        if not -len(self) <= index < len(self):
            raise self._no_such_image(index)
        index %= len(self)
        image = torch.from_numpy(self._image(index)).permute(2, 0, 1).contiguous()
        return split_masks(image, torch.from_numpy(numpy.array(self.labels[index])))

    def split(self, valid: float = 0.2, seed: int = 0, *, stratify: bool = False):
        """Return the images to train and to validate on, two int64 arrays; no group is on both sides.

        `stratify=True` gives both sides about the same share of each class, or of each label of zeros and ones. See
        `split_by_group`. A cache and the records it was made of give the same.
        """
        return split_by_group(self.groups, valid, seed, self.labels if stratify else None)

    def _indices(self, indices):
        """Return the indices of some images as an array, checked."""
        import numpy

        indices = numpy.asarray(indices)
        if not indices.size:
            return numpy.empty(0, numpy.int64)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":  # numpy would take True for 1
            raise InvalidValueError(
                f"indices are one list of whole numbers, got shape {indices.shape} of {indices.dtype}",
                fix="numpy.flatnonzero(mask), where this is a mask",
            )
        low, high = indices.min(), indices.max()
        if low < 0 or high >= len(self):
            raise self._no_such_image(high if high >= len(self) else low)
        return indices

    def _no_such_image(self, index) -> IndexError:
        fix = f"indices from 0 to {len(self) - 1:,}, such as split() gives"
        return InvalidIndexError(f"image {index} of {len(self):,} was asked for", fix=fix)

    def _check_out(self, out, count: int) -> None:
        """Raise unless `out` is an array that takes this many images."""
        if out.shape != (count, *self.shape) or out.dtype != "uint8":
            raise InvalidValueError(
                f"take writes {(count, *self.shape)} uint8, and out is {out.shape} {out.dtype}",
                fix=f"out=numpy.empty({(count, *self.shape)}, numpy.uint8), or leave it out",
            )
