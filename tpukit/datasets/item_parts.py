"""An item of a dataset taken apart: its image as bytes or pixels, its mask, its labels."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tpukit.datasets.image_modes import apply_window, brightest, to_rgb, turn_of
from tpukit.datasets.label_arrays import as_labels
from tpukit.datasets.masks import check_alike, encode_mask, join, open_mask, read_mask, stack
from tpukit.essentials.display import InvalidTypeError, InvalidValueError, TpukitError

_IMAGES = ("image", "img", "pixel_values")
_LABELS = ("label", "labels", "fine_label", "target", "targets")
_FIX = "give (image, label), or a dict: the image as bytes of a file, Pillow image or uint8 array; () for no labels"


@dataclass(frozen=True)
class Columns:
    """Which parts of a table, or of items that are dicts, are packed, by the names of `pack`'s arguments.

    Attributes:
        own: what the numbers of a label stand for in the dataset itself, where it orders the classes otherwise.
    """

    path: object = None
    root: object = None
    image: str | None = None
    labels: Sequence[str] | None = None
    masks: object = None
    window: tuple[float, float] | None = None
    classes: Sequence[str] = ()
    own: Sequence[str] = ()


def check_item(item, number: int, columns: Columns) -> tuple:
    """Return the image of one item, bytes or (H, W, 3) uint8, (H, W, 4) with a mask; and its labels, (L,) float32."""
    try:
        image, mask, labels = _of_dict(item, columns) if isinstance(item, Mapping) else _of_tuple(item)
        if mask is not None and hasattr(image, "getbands") and not (hasattr(mask, "getbands") and turn_of(mask) != 1):
            image = image.copy()  # its pixels, without the notes of its file: so the mask was drawn over it
        data = read_image(image, columns.window)
        if mask is not None:
            data = _with_mask(data, mask)
    except (TypeError, ValueError) as error:
        why, fix = (error.fact, error.fix) if isinstance(error, TpukitError) else (str(error), "")
        raise InvalidValueError(
            f"item {number} is not (image, labels) as pack reads them",
            found=f"{type(item).__name__}: {why}",
            fix=fix or _FIX,
        ) from error
    names = columns.own or columns.classes
    values = _labels(labels, number, names)
    if names and len(values) == 1 and values[0] not in range(len(names)):
        raise InvalidValueError(
            f"label {values[0]:g} of item {number} is none of the {len(names)} classes",
            found=f"classes 0 to {len(names) - 1}: {', '.join(names[:4])}, ...",
            fix="leave such items out; or classes=() stores the numbers as they are",
        )
    if columns.own and len(values) == 1:  # the same class, by its name
        values[0] = columns.classes.index(columns.own[int(values[0])])
    return data, values


def brightest_of(item, columns: Columns) -> int:
    """Return the largest value of the image of an item that has 16 bits, in memory; 0 of any other."""
    image, *_ = _of_dict(item, columns) if isinstance(item, Mapping) else _of_tuple(item)
    return 0 if isinstance(image, bytes | Mapping) else brightest(image)


def label_columns(item, asked: Sequence[str] | None) -> list[str] | None:
    """Return the keys of the labels of an item that is a dict; None of any other."""
    if not isinstance(item, Mapping):
        return None
    return list(asked) if asked is not None else [name for name in _LABELS if name in item][:1]


def _of_dict(item: Mapping, columns: Columns) -> tuple:
    names = [columns.image] if columns.image is not None else _IMAGES
    image = next((name for name in names if name in item), None)
    labels = label_columns(item, columns.labels)
    wanted = [*labels, *([columns.masks] if columns.masks is not None else [])]
    if image is None or any(name not in item for name in wanted):
        missing = next((name for name in wanted if name not in item), " or ".join(map(repr, names)))
        raise InvalidValueError(
            f"keys {', '.join(map(repr, item))}, and none is {missing}",
            fix='name them: pack(..., labels="species", masks="segmentation", options=tpukit.PackOptions(image="photo"))',
        )
    if not labels and columns.labels is None and len(item) > 1 + len(wanted):
        raise InvalidValueError(
            f"keys {', '.join(map(repr, item))}, and none of the others is a label by its name",
            fix='pack(..., labels="species") names it; labels=[] for none, as with masks="mask" alone',
        )
    return item[image], item[columns.masks] if columns.masks is not None else None, [item[name] for name in labels]


def _of_tuple(item) -> tuple:
    if isinstance(item, str | os.PathLike):
        raise _no_paths(item)
    if item is None:
        raise InvalidTypeError(
            "nothing, as where an image is damaged",
            fix='let __getitem__ raise what went wrong: pack(..., damaged="skip") leaves such items out and lists them',
        )
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise TypeError("no tuple of two parts")
    image, *targets = item
    if len(targets) == 1 and isinstance(targets[0], tuple | list) and any(map(_is_mask, targets[0])):
        targets = targets[0]
    masks = [target for target in targets if _is_mask(target)]
    for mask in masks:
        if getattr(mask, "ndim", 0) == 2 and (1 in mask.shape or _are_rows(mask, image)):
            raise InvalidValueError(
                f"an array of shape {tuple(mask.shape)} beside the image is no mask of it: boxes, points, one-hot?",
                fix="labels of an image are one row, of one length for all: boxes.reshape(-1), one_hot.argmax()",
            )
    labels = [target for target in targets if not _is_mask(target)]
    if len(masks) > 1 or len(labels) > 1:
        raise TypeError(f"{len(masks)} masks and {len(labels)} parts with labels, where one of each is read")
    return image, masks[0] if masks else None, labels


def _is_mask(target) -> bool:
    """Tell whether a target is an image of class numbers: labels are numbers, or one row of them."""
    return hasattr(target, "getbands") or getattr(target, "ndim", 0) >= 2


def _are_rows(mask, image) -> bool:
    """Tell whether an array beside an image is rows of boxes (n, 4 or 5) or points (n, 2), by the image's sides."""
    sides = getattr(image, "size", None) if hasattr(image, "getbands") else getattr(image, "shape", None)
    return sides is not None and mask.shape[1] in (2, 4, 5) and mask.shape[1] not in sides


def _labels(labels: list, number: int, classes: Sequence[str]):
    """Return labels, each one number or one row of them, or the word of a class, as (L,) float32."""
    import numpy

    values = []
    for label in labels:
        if isinstance(label, Mapping):
            raise InvalidValueError(
                f"item {number} has a dict for its label: {', '.join(map(repr, label))}",
                fix="one number or several for each image; target_transform= of the dataset may choose them",
            )
        try:
            shape = numpy.shape(label)
        except ValueError:  # rows of different lengths
            shape = (len(label), "?")
        if len(shape) > 1:
            raise InvalidValueError(
                f"item {number} has labels of shape {shape}, which are rows of rows",
                fix="one number or several for each image; a mask is a Pillow image or an array",
            )
        if isinstance(label, str):
            if label not in classes:
                raise InvalidValueError(
                    f"item {number} has the word {label!r} for its label, and words are numbered by classes=",
                    found=f"{f'classes {classes}' if classes else 'no classes='}",
                    fix='classes=["cat", "dog"]; of Hugging Face, dataset.class_encode_column("label")',
                )
            label = list(classes).index(label)
        values += numpy.atleast_1d(numpy.asarray(label)).tolist()
        if word := next((value for value in values if isinstance(value, str)), None):
            raise InvalidValueError(
                f"item {number} has the word {word!r} among its labels",
                fix='a number for each class there is: [float(name in words) for name in ("cat", "dog")]',
            )
    if not values:
        return numpy.empty(0, numpy.float32)
    names = [str(name) for name in range(len(values))]
    return as_labels(numpy.array([values]), names, first_row=number, what="item")[0]


def _with_mask(data, mask):
    if isinstance(data, bytes):
        return join(data, mask if isinstance(mask, bytes) else encode_mask(read_mask(mask)))
    mask = open_mask(mask) if isinstance(mask, bytes) else read_mask(mask)
    check_alike(data, mask)
    return stack(data, mask)


def read_image(image, window: tuple[float, float] | None):
    """Return an image, of any kind that `pack` takes, as the bytes of its file, or (H, W, 3) uint8."""
    import numpy

    if isinstance(image, Mapping) and image.keys() <= {"bytes", "path"}:  # as Hugging Face's Image(decode=False) gives
        if image.get("bytes") is None:
            with open(image["path"], "rb") as file:
                return file.read()
        image = image["bytes"]
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | os.PathLike):
        raise _no_paths(image)
    if hasattr(image, "getbands"):
        return numpy.asarray(to_rgb(image, window))
    first = hasattr(image, "detach")  # torch's images have their channels first
    if first:
        image = image.float() if "bfloat16" in str(image.dtype) else image  # which numpy has not
        image = image.detach().cpu().numpy()
    array = numpy.asarray(image)
    return _three_channels(_eight_bits(_channels_last(array, first), window))


def _no_paths(path) -> InvalidTypeError:
    return InvalidTypeError(
        f"the path {os.fspath(path)!r}",
        fix='pass a table of the paths: pandas.DataFrame({"path": paths, "label": labels}), labels="label"',
    )


def _channels_last(array, first: bool):
    if array.ndim == 2 and array.size:
        return array[:, :, None]
    if array.ndim == 3 and array.size:
        for channels_first in (first, not first):
            if array.shape[0 if channels_first else 2] in (1, 3, 4):
                return array.transpose(1, 2, 0) if channels_first else array
    raise ValueError(f"an image of shape {array.shape} and dtype {array.dtype}")


def _eight_bits(array, window: tuple[float, float] | None):
    import numpy

    if array.dtype == numpy.uint8:
        return array
    if array.dtype == bool:
        return array * numpy.uint8(255)
    if window is None and array.dtype.kind == "f" and array.min() >= 0 and array.max() <= 1:
        window = (0, 1)
    if window is None and array.dtype == numpy.uint16:
        window = (0, 65535)
    if window is None or array.dtype.kind not in "iuf":
        values = f", from {array.min():g} to {array.max():g}" if array.dtype.kind in "iuf" else ""
        raise InvalidValueError(
            f"an image of shape {array.shape} and dtype {array.dtype}{values}",
            fix="uint8, or floats in [0, 1] before they are normalised; or pack(..., options=tpukit.PackOptions(window=(low, high))) with the "
            "values that become black and white",
        )
    return apply_window(array, window)


def _three_channels(array):
    import numpy

    if array.shape[2] == 4:
        raise InvalidValueError(
            f"an array of four channels, {array.shape}, and nothing says what the fourth is",
            fix='image[..., :3] leaves it out; PIL.Image.fromarray(image, "RGBA") where it is how opaque a pixel is',
        )
    return numpy.ascontiguousarray(array if array.shape[2] == 3 else array.repeat(3, axis=2))
