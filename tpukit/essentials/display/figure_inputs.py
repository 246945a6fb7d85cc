"""The inputs of figures: images, labels, masks, points, checked before anything is drawn.

This module imports no torch: it recognises tensors by their `detach` method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpukit.essentials.display.class_names import names_in_order
from tpukit.essentials.display.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    import numpy as np

# torchvision's weights expect (image - mean) / std with these numbers (documentation of its
# models).
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_ROUNDING = 0.01  # bfloat16 rounds 2.64 by up to 0.008
_MOST_COLUMNS = 20  # an image is then a third of an inch wide
_NUMBERS = "biuf"  # numpy's kinds of dtypes: bool, int, unsigned int, float
_WHOLE_NUMBERS = "biu"


def at_least_one(**counts: int) -> None:
    """Raise an InvalidValueError for a count below 1, because nothing would be drawn."""
    for name, count in counts.items():
        if count < 1:
            fix = f"leave {name} out for its default"
            raise InvalidValueError(f"{name} must be 1 or more, got {count}", fix=fix)


def columns(asked: int | None, images: int) -> int:
    """Return the number of images per row, which is at most the number of images.

    Args:
        asked: the wanted number; None for four.
        images: the number of images.

    Raises:
        InvalidValueError: the result is less than 1 or more than 20.
    """
    asked = 4 if asked is None else asked
    at_least_one(columns=asked)
    count = min(asked, images)
    if count > _MOST_COLUMNS:
        raise InvalidValueError(
            f"columns must be at most {_MOST_COLUMNS}, got {asked}",
            fix=f"columns={_MOST_COLUMNS}: the figure then has more rows",
        )
    return count


def pixels(images: Any, limit: int, who: str, channel: int | None = None) -> tuple[np.ndarray, str]:
    """Return up to `limit` images in a form that matplotlib draws, and a caption.

    The caption states how the values were read.

    Args:
        images: (N, C, H, W), a tensor or an array.
        limit: the largest number of images to return.
        who: the public function that error messages name.
        channel: return only this channel, (n, H, W); None for all. Its values are scaled together
            with those of the other channels.

    Returns:
        (n, H, W) or (n, H, W, 3), uint8 or floats in [0, 1]; and the caption.

    Raises:
        InvalidTypeError: `images` is not an array, or has a dtype that cannot be drawn.
        InvalidValueError: the shape or the values of `images` cannot be drawn, or `channel` is out
            of range.
    """
    array, caption = _scaled(images, limit=limit, who=who)
    if channel is None:
        return array, caption
    count = 3 if array.ndim == 4 else 1
    if isinstance(channel, bool) or channel not in range(count):
        raise InvalidValueError(
            f"channel must be 0 to {count - 1} for images of {count} channels, got {channel!r}",
            fix="count from 0, or leave channel out for all of them",
        )
    if count == 3:
        array = array[..., channel]
    return array, f"{caption}, channel {channel} alone, in grey"


def _scaled(images: Any, *, limit: int, who: str) -> tuple[np.ndarray, str]:
    """Return images as uint8, or floats in [0, 1], and a caption."""
    import numpy as np

    _check_shape(images, who)
    shape = tuple(images.shape)
    array = as_array(images[:limit])
    kind = str(images.dtype).removeprefix("torch.")
    size = f"{shape[1]} × {shape[2]} × {shape[3]}"
    caption = f"{len(array)} of {shape[0]} images, {size} {kind}"
    if shape[1] == 3:
        array = np.moveaxis(array, 1, -1)
    else:
        array = array[:, 0]
    if array.dtype.kind not in _NUMBERS:
        fix = "pass a tensor of numbers; of complex ones, images.abs()"
        raise InvalidTypeError(f"{who} draws integers and floats, got {kind}", fix=fix)
    low = float(array.min())
    high = float(array.max())
    if not np.isfinite([low, high]).all():
        raise _not_finite(array, who)
    if array.dtype.kind in "iu":
        if low < 0 or high > 255:
            raise InvalidValueError(
                f"{who} draws integers in [0, 255], got {kind} in [{low:.0f}, {high:.0f}]",
                fix="pass images / 1.0: the lowest float is drawn black, the highest white",
            )
        return array.astype(np.uint8, copy=False), caption
    array = array.astype(np.float32, copy=False)
    if low >= 0 and high <= 1:
        return array, caption
    # Values in [-1, 1] probably come from (x - 0.5) / 0.5, which stretching undoes, too. Of
    # the usual normalisations, only ImageNet's gives values below -1.
    if shape[1] == 3 and low < -1:
        natural = array * np.float32(_IMAGENET_STD) + np.float32(_IMAGENET_MEAN)
        if natural.min() >= -_ROUNDING and natural.max() <= 1 + _ROUNDING:
            return natural.clip(0, 1), f"{caption}, ImageNet's normalisation undone"
    stretched = (array - low) / ((high - low) or 1)  # a constant image becomes black
    return stretched, f"{caption}, stretched: {low:.3g} is black, {high:.3g} is white"


def _check_shape(images: Any, who: str) -> None:
    if not hasattr(images, "shape") or not hasattr(images, "dtype"):
        fix = "pass one tensor or array; torch.stack(images) makes one of a list"
        # A DataLoader returns a list [images, labels].
        if isinstance(images, (list, tuple)) and len(images) == 2:
            unpacked = f"images, labels = batch, then {who}(images, labels)"
            fix = f"if it is a batch of a loader: {unpacked}"
        kind = type(images).__name__
        raise InvalidTypeError(
            f"{who} draws a tensor or an array (N, C, H, W), got {kind}", fix=fix
        )
    shape = tuple(images.shape)
    is_drawable = len(shape) == 4 and shape[1] in (1, 3) and 0 not in shape
    if not is_drawable:
        permute = "permute" if hasattr(images, "permute") else "transpose"
        raise InvalidValueError(
            f"{who} draws (N, C, H, W) with 1 or 3 channels, got {shape}",
            fix=_shape_fix(shape, permute),
        )


def _shape_fix(shape: tuple[int, ...], permute: str) -> str:
    # Each of these shapes comes from a usual mistake.
    if 0 in shape:
        return "check what the dataset or the loader returns, because this batch is empty"
    if len(shape) == 4 and shape[3] in (1, 3):
        return f"if the batch is (N, H, W, C), pass images.{permute}(0, 3, 1, 2)"
    if len(shape) == 4 and shape[1] == 2:
        return (
            "if the two channels are the bytes of 16-bit values, pass "
            "tpukit.datasets.uint16_values(images)"
        )
    if len(shape) == 4:
        return "choose one or three channels, for example images[:, :3]"
    if len(shape) == 3 and shape[2] in (1, 3):
        return f"if it is one image (H, W, C), pass images.{permute}(2, 0, 1)[None]"
    if len(shape) == 3:
        grey = "if grey images (N, H, W), images[:, None]"
        return f"if it is one image (C, H, W), pass images[None]; {grey}"
    if len(shape) == 2:
        return "if it is one grey image, pass images[None, None]"
    return "pass images.reshape(N, C, H, W)"


def _not_finite(array: np.ndarray, who: str) -> InvalidValueError:
    import numpy as np

    is_bad = ~np.isfinite(array).reshape(len(array), -1)
    first = is_bad.any(axis=1).argmax()
    return InvalidValueError(
        f"{who} draws finite values, got nan or infinity",
        found=f"{is_bad.sum()} of {is_bad.size} values, the first in image {first}",
        fix="look at the code that computed them: often it divides by a standard deviation of zero "
        "or takes the logarithm of zero",
    )


def labels_and_masks(targets: Any) -> tuple[Any, Any]:
    """Return the labels and the masks of a batch's targets; None for a part that is missing."""
    if isinstance(targets, Mapping):
        return targets.get("labels"), targets.get("masks")
    is_mask = len(getattr(targets, "shape", ())) == 3  # labels have one or two axes
    if is_mask:
        return (None, targets)
    return (targets, None)


def under_masks(
    images: np.ndarray, masks: Any, count: int, colors: Sequence[str]
) -> tuple[np.ndarray, str]:
    """Return images with their masks drawn over them, and the classes of these masks.

    Args:
        images: (n, H, W) or (n, H, W, 3), as `pixels` returns them.
        masks: (N, H, W) class numbers.
        count: N, the number of images in the batch.
        colors: the colours of the classes from 1 on, which repeat if there are more classes.

    Returns:
        (n, H, W, 3) float32 in [0, 1]; and the class numbers as text.

    Raises:
        InvalidValueError: the masks do not match the images, or are not integers.
    """
    import numpy as np
    from matplotlib.colors import to_rgb

    shape = tuple(masks.shape)
    expected = (count, *images.shape[1:3])
    array = as_array(masks[: len(images)])
    if shape != expected or array.dtype.kind not in _WHOLE_NUMBERS:
        raise InvalidValueError(
            f"masks must be class numbers of shape (N, H, W) = {expected}, "
            f"got {shape} {array.dtype}",
            fix="pass the masks of these images, with the same height and width; convert floats "
            "with .long()",
        )
    white = 255 if images.dtype == "uint8" else 1
    below = images / np.float32(white)
    if below.ndim == 3:
        below = np.repeat(below[..., None], 3, axis=3)
    rgb = np.float32([to_rgb(color) for color in colors])
    # Class 1 gets the first colour. Class 0 gets the last, which `where` then ignores.
    tints = rgb[(array.astype(int) - 1) % len(colors)]
    is_background = array[..., None] == 0
    drawn = np.where(is_background, below, (below + tints) / 2)
    return drawn.astype(np.float32), ", ".join(map(str, np.unique(array)))


def points(places: Any, images: int) -> np.ndarray:
    """Return a point per image as an array (N, 2) of floats; nan for no point.

    Args:
        places: (N, 2) floats in [0, 1], x and y as shares of width and height; nan for no point.
        images: N.

    Raises:
        InvalidValueError: `places` has another shape or dtype, or values outside of [0, 1].
    """
    array = as_array(places)
    is_float = array.dtype.kind == "f"
    if array.shape != (images, 2) or not is_float or (array < 0).any() or (array > 1).any():
        raise InvalidValueError(
            f"points must be (N, 2) floats, x and y in [0, 1] for each of {images} images, "
            f"got {array.shape} {array.dtype}",
            fix="divide x by the width of the image, and y by its height; for an image without a "
            "point, pass nan",
        )
    return array


def titles(labels: Any, names: Sequence[str] | Mapping | None, images: int) -> list[list[str]]:
    """Return the names of each image's labels.

    Args:
        labels: (N, L) zeros and ones, or (N,) class numbers.
        names: the names of the labels; None for numbers.
        images: N.

    Raises:
        InvalidValueError: labels or names do not match the images or each other.
    """
    array = label_array(labels, images)
    # Zeros and ones: the names of the ones in each row. Class numbers: the name of the class.
    if array.ndim == 2:
        words = label_names(names, array.shape[1])
        return [[words[label] for label in row.nonzero()[0]] for row in array]
    if names is None:
        return [[str(label)] for label in array]
    words = label_names(names)
    last = int(array.max())
    if last >= len(words):
        yes_or_no = "for one yes-or-no label per image, labels[:, None]"
        raise InvalidValueError(
            f"class {last} has no name: there are {len(words)} names",
            fix=f"pass {last + 1} names or more; {yes_or_no}",
        )
    return [[words[label]] for label in array]


def label_names(names: object, count: int | None = None) -> list[str]:
    """Return names in the order of their numbers, with spaces for underscores.

    Args:
        names: in any form that `names_in_order` reads. With None, the names are 0, 1, and so on.
        count: the number of labels; None to allow any number of names.

    Raises:
        InvalidValueError: there are more or fewer names than `count`, or their order is not known.
    """
    if names is None:
        names = range(count or 0)
    words = [name.replace("_", " ") for name in names_in_order(names, "names")]
    if count is not None and len(words) != count:
        raise InvalidValueError(
            f"there are {count} labels and {len(words)} names",
            fix=f"pass {count} names, in the order of the labels' columns",
        )
    return words


def label_array(labels: Any, images: int) -> np.ndarray:
    """Return labels as an integer array: (N, L) zeros and ones, or (N,) class numbers.

    Raises:
        InvalidValueError: `labels` has other values, or its length is not `images`.
    """
    import numpy as np

    array = as_array(labels)
    is_numeric = array.dtype.kind in _NUMBERS
    if array.ndim not in (1, 2) or len(array) != images or not is_numeric:
        raise InvalidValueError(
            f"labels must be (N, L) zeros and ones, or (N,) class numbers, for {images} images; "
            f"got {array.shape}",
            found="" if is_numeric else f"dtype {array.dtype}",
            fix="pass the labels of these images, one row per image",
        )
    if array.ndim == 2:
        is_wrong = ~np.isin(array, (0, 1))
    else:
        # The first condition is False for nan, the second for infinity, which int64 cannot store.
        is_class_number = (array >= 0) & (array < 2**63) & (array == np.trunc(array))
        is_wrong = ~is_class_number
    if is_wrong.any():
        raise _wrong_label(array, is_wrong)
    return array.astype(int)


def _wrong_label(array: np.ndarray, is_wrong: np.ndarray) -> InvalidValueError:
    """Return the error for labels with wrong values, with a fix for the likely mistake.

    Args:
        array: the labels.
        is_wrong: bool of the same shape, True for each wrong value.
    """
    import numpy as np

    wrong = array[is_wrong][0]
    values = array
    if array.dtype.kind == "f":
        values = array[np.isfinite(array)]
    expected = "0 or 1"
    fix = "if they are probabilities, pass labels > 0.5"
    if array.ndim == 1:
        expected = "class numbers from 0"
        fix = "if it is one yes-or-no label per image, pass labels[:, None] > 0.5"
    if not np.isfinite(wrong):
        fix = "look for missing labels in the table that they come from: table.isna().sum()"
    elif array.shape[1:] == (1,):
        # A single column may be class numbers with an axis too many.
        are_class_numbers = (values == np.trunc(values)).all() and (values >= 0).all()
        if are_class_numbers:
            fix = "if they are class numbers, as a folder's, pass labels[:, 0]"
    row = np.argwhere(is_wrong)[0][0]  # the first row with a wrong value
    return InvalidValueError(
        f"labels must be {expected}, got {wrong:.4g}", found=f"row {row}", fix=fix
    )


def as_array(values: Any) -> np.ndarray:
    """Return values as a numpy array on the host; bfloat16 and other short floats as float32."""
    import numpy as np

    if hasattr(values, "detach"):
        values = values.detach().cpu()
        # numpy has no bfloat16 and no float8.
        is_short = values.is_floating_point() and values.element_size() < 4
        return (values.float() if is_short else values).numpy()
    array = np.asarray(values)
    is_float = array.dtype.name.startswith(("bfloat", "float"))
    is_short = is_float and array.dtype.itemsize < 4
    if is_short:
        return array.astype(np.float32)
    return array
