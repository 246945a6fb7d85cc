"""Split an item of a dataset into image, mask and labels, in the form in which `pack` stores them.

    item                             stored image             stored labels
    (picture, 2)                     (H, W, 3) uint8          [2.0]
    (picture, mask)                  (H, W, 4) uint8          []
    (picture, (mask, [0, 1]))        (H, W, 4) uint8          [0.0, 1.0]
    {"image": file, "label": "dog"}  the bytes of the file    [1.0], with classes=["cat", "dog"]

A picture is a Pillow image, an array or a tensor. The bytes of a file are stored unchanged; they
may also be an open file, an array of bytes, or a dict of the Hugging Face hub: see `file_bytes`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tpukit.datasets.encoded_images import file_bytes, is_image
from tpukit.datasets.image_modes import (
    apply_window,
    brightest,
    check_16_bits,
    no_window,
    to_form,
    turn_of,
)
from tpukit.datasets.label_arrays import as_labels
from tpukit.datasets.masks import check_alike, encode_mask, join, open_mask, read_mask, stack
from tpukit.datasets.pixel_form import PixelForm, as_image, as_pixels, byte_pairs
from tpukit.essentials.display import InvalidTypeError, InvalidValueError, parts_of

_IMAGES = ("image", "img", "pixel_values")
_LABELS = ("label", "labels", "fine_label", "target", "targets")
_CHANNELS = (1, 3, 4)
_SHOWN = 4  # the most classes in a message
_FIX = (
    "give (image, label), or a dict: the image as bytes of a file, Pillow image or uint8 array; "
    "() for no labels"
)


@dataclass(frozen=True)
class Columns:
    """The columns of a table, or the keys of dicts, that have images, labels and masks.

    `form` is the form of the pixels, and `own` has the dataset's own names of the classes. The
    other fields are arguments of `pack` or of `PackOptions`.
    """

    path: object = None
    root: object = None
    image: str | None = None
    labels: Sequence[str] | None = None
    masks: object = None
    form: PixelForm = PixelForm()
    classes: Sequence[str] = ()  # names of the classes, in the order in which they are stored
    own: Sequence[str] = ()  # the dataset's names in its own order, if `classes` has them all


class _Parts(NamedTuple):
    image: object
    mask: object | None
    labels: list


def check_item(item, number: int, columns: Columns) -> tuple:
    """Return an item's image and labels in the form of the pack; the labels are float32.

    Raises:
        ValueError: the item is not an image with labels of the supported kinds.
    """
    try:
        parts = _split(item, columns)
        data = _stored_image(parts, columns.form)
    except (TypeError, ValueError) as error:
        parts = parts_of(error)
        raise InvalidValueError(
            f"pack cannot read item {number} as (image, labels)",
            found=f"{type(item).__name__}: {parts.fact}",
            fix=parts.fix or _FIX,
        ) from error
    return data, _stored_labels(parts.labels, number, columns)


def brightest_of(item, columns: Columns) -> int:
    """Return the largest value of a 16-bit image in memory; 0 for any other image."""
    image = _split(item, columns).image
    if isinstance(image, bytes):  # the process that decodes the file finds its brightest value
        return 0
    return brightest(image)


def label_keys_of(item, asked: Sequence[str] | None) -> list[str] | None:
    """Return the keys of the labels if the item is a dict, else None."""
    if not isinstance(item, Mapping):
        return None
    if asked is not None:
        return list(asked)
    return [name for name in _LABELS if name in item][:1]


def _split(item, columns: Columns) -> _Parts:
    is_dict = isinstance(item, Mapping)
    parts = _split_dict(item, columns) if is_dict else _split_tuple(item)
    return parts._replace(image=file_bytes(parts.image), mask=file_bytes(parts.mask))


def _split_dict(item: Mapping, columns: Columns) -> _Parts:
    keys = ", ".join(map(repr, item))
    image_names = _IMAGES if columns.image is None else [columns.image]
    image_name = next((name for name in image_names if name in item), None)
    label_names = label_keys_of(item, columns.labels)
    wanted = list(label_names)
    if columns.masks is not None:
        wanted.append(columns.masks)
    missing = [name for name in wanted if name not in item]
    if image_name is None:
        missing.append(" or ".join(map(repr, image_names)))
    if missing:
        raise InvalidValueError(
            f"keys {keys}, none of which is {missing[0]}",
            fix='name them: pack(..., labels="species", masks="segmentation", '
            'options=tpukit.PackOptions(image="photo"))',
        )
    # A key that is neither image nor mask may be the label, so the caller must decide.
    has_other_keys = len(item) > 1 + len(wanted)
    if has_other_keys and not label_names and columns.labels is None:
        raise InvalidValueError(
            f"none of the keys {keys} is a usual name of a label",
            fix='name the key of the label: pack(..., labels="species"); or, if there is no label: '
            "labels=[]",
        )
    labels = [item[name] for name in label_names]
    return _Parts(item[image_name], mask=item.get(columns.masks), labels=labels)


def _split_tuple(item) -> _Parts:
    if isinstance(item, str | os.PathLike):
        raise _no_paths(item)
    if item is None:
        raise InvalidTypeError(
            "None, which some datasets return for a damaged image",
            fix="raise an error in __getitem__ instead of returning None, and skip such items: "
            'pack(..., damaged="skip")',
        )
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise TypeError("no tuple of two parts")
    image, *targets = item
    is_nested = len(targets) == 1 and isinstance(targets[0], tuple | list)
    if is_nested and any(map(_is_mask, targets[0])):
        targets = targets[0]  # (image, (mask, label))
    masks = [target for target in targets if _is_mask(target)]
    labels = [target for target in targets if not _is_mask(target)]
    for mask in masks:
        _check_mask(mask, image)
    if len(masks) > 1 or len(labels) > 1:
        raise TypeError(
            f"{len(masks)} masks and {len(labels)} parts with labels, but pack reads one of each"
        )
    return _Parts(image, mask=next(iter(masks), None), labels=labels)


def _is_pillow(value) -> bool:
    return hasattr(value, "getbands")


def _is_mask(target) -> bool:
    """Return whether a target is an image of class numbers: labels have at most one dimension."""
    if isinstance(target, bytes | Mapping) or hasattr(target, "read"):
        return is_image(target)
    return _is_pillow(target) or getattr(target, "ndim", 0) >= 2


def _check_mask(mask, image) -> None:
    """Raise if a two-dimensional array is not a mask but boxes, points or one-hot labels."""
    if getattr(mask, "ndim", 0) != 2:
        return
    # 2, 4 or 5 columns are points, boxes or boxes with a class, unless the image is that narrow.
    sides = getattr(image, "shape", getattr(image, "size", None))  # Pillow's images have a size
    width = mask.shape[1]
    are_rows = sides is not None and width in (2, 4, 5) and width not in sides
    if are_rows or 1 in mask.shape:
        raise InvalidValueError(
            f"the array of shape {tuple(mask.shape)} beside the image is not a mask, but may be "
            "boxes, points or one-hot labels",
            fix="if all images have the same number of boxes or points, return them as one row: "
            "boxes.reshape(-1); for one-hot labels, return the class: one_hot.argmax()",
        )


def _stored_labels(labels: list, number: int, columns: Columns):
    """Return an item's labels, (L,) float32; for a class, its position in `columns.classes`."""
    import numpy

    names = columns.own or columns.classes
    values = []
    for label in labels:
        values += _numbers(label, number, names)
    if not values:
        return numpy.empty(0, numpy.float32)
    positions = [str(position) for position in range(len(values))]
    values = as_labels(numpy.array([values]), positions, first_row=number, what="item")[0]
    if not names or len(values) > 1:
        return values
    if values[0] not in range(len(names)):
        more = ", ..." if len(names) > _SHOWN else ""
        raise InvalidValueError(
            f"label {values[0]:g} of item {number} is not one of the {len(names)} classes",
            found=f"classes 0 to {len(names) - 1}: {', '.join(names[:_SHOWN])}{more}",
            fix="leave such items out; or, to store the numbers as they are: classes=()",
        )
    if columns.own:  # the dataset's number becomes the position of the same name in classes=
        name = columns.own[int(values[0])]
        values[0] = columns.classes.index(name)
    return values


def _numbers(label, number: int, classes: Sequence[str]) -> list:
    """Return a label (a number, a row of numbers or a class name) as a list of numbers."""
    import numpy

    if isinstance(label, Mapping):
        raise InvalidValueError(
            f"item {number} has a dict for its label: {', '.join(map(repr, label))}",
            fix="return one number or one row of numbers per image, for example with the dataset's "
            "argument target_transform=",
        )
    try:
        shape = numpy.shape(label)
    except ValueError:  # rows of different lengths
        shape = (len(label), "?")
    if len(shape) > 1:
        raise InvalidValueError(
            f"item {number} has labels of shape {shape}, which is not one row of numbers",
            fix="return one number or one row of numbers per image; return a mask as a Pillow "
            "image or an array",
        )
    if isinstance(label, bytes):  # of webdataset and TFRecord files
        label = label.decode(errors="backslashreplace")
    if isinstance(label, str):
        if label not in classes:
            fix = 'classes=["cat", "dog"]; for Hugging Face, dataset.class_encode_column("label")'
            if label.strip().isdecimal():
                fix = "for numbers in text, [(image, int(label)) for image, label in source]"
            raise InvalidValueError(
                f"item {number} has the label {label!r}, and labels that are words need classes=",
                found=f"classes {classes}" if classes else "no classes=",
                fix=fix,
            )
        return [list(classes).index(label)]
    values = numpy.atleast_1d(numpy.asarray(label)).tolist()
    word = next((value for value in values if isinstance(value, str)), None)
    if word:
        raise InvalidValueError(
            f"item {number} has the word {word!r} among its labels",
            fix='one number per class: [float(name in words) for name in ("cat", "dog")]',
        )
    return values


def _stored_image(parts: _Parts, form: PixelForm):
    """Return the image, with its mask if there is one, as bytes or as pixels.

    Bytes are those of the image file; those of a mask file follow. Pixels are uint8: (H, W, 3),
    (H, W, 4) with a mask, (H, W, 1) for mode "L", and (H, W, 2) for "I;16".
    """
    image, mask, _ = parts
    if mask is None:
        return read_image(image, form)
    refuse_masks(form)
    if _is_pillow(image):
        mask_is_turned = _is_pillow(mask) and turn_of(mask) != 1
        if not mask_is_turned:
            # The mask was drawn over the pixels as they are. A copy has no `format`, so `turn_of`
            # does not turn it, though it still has the EXIF data.
            image = image.copy()
    data = read_image(image, form)
    if isinstance(data, bytes):
        return join(data, mask if isinstance(mask, bytes) else encode_mask(read_mask(mask)))
    pixels = open_mask(mask) if isinstance(mask, bytes) else read_mask(mask)
    check_alike(data, pixels)
    return stack(data, pixels)


def refuse_masks(form: PixelForm) -> None:
    """Raise ValueError if the mode is not RGB, because a mask is stored as a fourth channel."""
    if form.mode != "RGB":
        raise InvalidValueError(
            f"mode={form.mode!r} is not supported for images with masks",
            fix="leave mode out; grey images get three equal channels",
        )


def read_image(image, form: PixelForm):
    """Return an image as the bytes of its file or as pixels, (H, W, C) uint8.

    C is 3; 1 for mode "L", and 2 for "I;16".

    Args:
        image: the result of `file_bytes`: bytes, a Pillow image, an array or a tensor.
        form: the form of the pixels; bytes are returned unchanged.
    """
    import numpy

    if isinstance(image, bytes):
        return image
    if isinstance(image, str | os.PathLike):
        raise _no_paths(image)
    if _is_pillow(image):
        pixels = as_pixels(to_form(image, form))
        if form.window is not None and image.mode[0] not in "IF":
            raise no_window(f"a Pillow image of mode {image.mode}")
        return pixels
    is_torch = hasattr(image, "detach")
    if is_torch:
        if "bfloat16" in str(image.dtype):
            image = image.float()  # numpy has no bfloat16
        image = image.detach().cpu().numpy()
    array = _channels_last(numpy.asarray(image), prefer_first=is_torch)
    if form.mode == "I;16":
        return _sixteen_bits(array)
    return numpy.ascontiguousarray(_with_channels(_eight_bits(array, form.window), form.mode))


def _no_paths(path) -> InvalidTypeError:
    return InvalidTypeError(
        f"the path {os.fspath(path)!r}",
        fix="pass a table of the paths: "
        'pandas.DataFrame({"path": paths, "label": labels}), labels="label"',
    )


def _channels_last(array, prefer_first: bool):
    """Return (H, W, C): torch's images usually have the channels first, other arrays last."""
    if array.ndim == 2 and array.size:
        return array[:, :, None]
    if array.ndim == 3 and array.size:
        # An image of 3 rows, or of 3 columns, could be both.
        can_be_first = array.shape[0] in _CHANNELS
        can_be_last = array.shape[2] in _CHANNELS
        if can_be_first and (prefer_first or not can_be_last):
            return array.transpose(1, 2, 0)
        if can_be_last:
            return array
    raise ValueError(f"an image of shape {array.shape} and dtype {array.dtype}")


def _sixteen_bits(array):
    """Return whole numbers, (H, W, 1), as their low and high bytes, (H, W, 2) uint8."""
    if array.shape[2] != 1 or array.dtype == "uint8":
        raise InvalidValueError(
            f'mode="I;16" is for one channel of 16 bits, not for {array.shape} {array.dtype}',
            fix='options=tpukit.PackOptions(mode="L"); or, if the image is uint16, pass one '
            "channel: image[..., :1]",
        )
    check_16_bits(array)
    return byte_pairs(array[:, :, 0])


def _eight_bits(array, window: tuple[float, float] | None):
    if window is not None and array.dtype in ("uint8", "bool"):
        raise no_window(f"an array of {array.dtype}")
    if array.dtype == "uint8":
        return array
    if array.dtype == bool:
        return array.astype("uint8") * 255
    is_number = array.dtype.kind in "iuf"
    # Without window=, only uint16 and floats in [0, 1] have a known range.
    if window is None and array.dtype == "uint16":
        window = (0, 65535)
    if window is None and _is_fraction(array):
        window = (0, 1)
    if window is None or not is_number:
        values = f", from {array.min():g} to {array.max():g}" if is_number else ""
        raise InvalidValueError(
            f"an image of shape {array.shape} and dtype {array.dtype}{values}",
            fix="pass uint8, or floats in [0, 1] that are not normalised yet; or name the values "
            "that become black and white: "
            "pack(..., options=tpukit.PackOptions(window=(low, high)))",
        )
    return apply_window(array, window)


def _is_fraction(array) -> bool:
    return array.dtype.kind == "f" and array.min() >= 0 and array.max() <= 1


def _with_channels(array, mode: str):
    """Return (H, W, C) uint8 with the channels of a mode."""
    if array.shape[2] == 4:
        raise InvalidValueError(
            f"an array of shape {array.shape}, whose fourth channel has no known meaning",
            fix="leave the fourth channel out: image[..., :3]; or, if it is opacity: "
            'PIL.Image.fromarray(image, "RGBA")',
        )
    if mode == "L":
        return as_pixels(as_image(array).convert("L"))
    if array.shape[2] == 1:
        array = array.repeat(3, axis=2)
    return array
