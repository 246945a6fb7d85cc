"""The inputs of figures: images, labels, masks, points, checked before anything is drawn.

Tensors are recognised by their `detach` method, so nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpukit.essentials.display.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    import numpy as np

# torchvision's weights expect (image - mean) / std with these numbers (documentation of its models).
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_COLUMNS = 20  # with a third of an inch for each image


def at_least_one(**counts: int) -> None:
    """Raise ValueError for a count below 1, with which nothing would be drawn."""
    for name, count in counts.items():
        if count < 1:
            raise InvalidValueError(f"{name} must be 1 or more, got {count}", fix=f"leave {name} out for its default")


def columns(asked: int | None, images: int) -> int:
    """Return how many images are drawn beside each other."""
    at_least_one(columns=4 if asked is None else asked)
    count = min(asked or 4, images)
    if count > _COLUMNS:
        raise InvalidValueError(
            f"columns is {_COLUMNS} at most, got {asked}", fix=f"columns={_COLUMNS}, and further rows"
        )
    return count


def pixels(images: Any, limit: int, who: str, channel: int | None = None) -> tuple[np.ndarray, str]:
    """Return up to `limit` images as matplotlib draws them, and a caption that says how their values were read.

    The result is `(n, H, W)` or `(n, H, W, 3)`, uint8 or floats in [0, 1]. `who` is the public function that error
    messages name. With `channel` it is that one of three, `(n, H, W)`, read as in an image of all three.
    """
    array, caption = _scaled(images, limit, who)
    if channel is None:
        return array, caption
    count = 3 if array.ndim == 4 else 1
    if channel not in range(count):
        fact = f"channel is one of 0 to {count - 1} for images of {count} channels, got {channel!r}"
        raise InvalidValueError(fact, fix="count from 0, or leave channel out for all of them")
    return (array[..., channel] if count == 3 else array), f"{caption}, channel {channel} alone, in grey"


def _scaled(images: Any, limit: int, who: str) -> tuple[np.ndarray, str]:
    import numpy as np

    if not hasattr(images, "shape") or not hasattr(images, "dtype"):
        fix = "pass one tensor or array; torch.stack(images) makes one of a list"
        if isinstance(images, (list, tuple)) and len(images) == 2:
            fix = f"if it is a batch of a loader: images, labels = batch, then {who}(images, labels)"
        raise InvalidTypeError(f"{who} draws a tensor or an array (N, C, H, W), got {type(images).__name__}", fix=fix)
    shape = tuple(images.shape)
    if len(shape) != 4 or shape[1] not in (1, 3) or 0 in shape:
        fact = f"{who} draws (N, C, H, W) with 1 or 3 channels, got {shape}"
        raise InvalidValueError(fact, fix=_shape_fix(shape, "permute" if hasattr(images, "permute") else "transpose"))

    array = as_array(images[:limit])
    kind = str(images.dtype).removeprefix("torch.")
    caption = f"{len(array)} of {shape[0]} images, {shape[1]} × {shape[2]} × {shape[3]} {kind}"
    array = np.moveaxis(array, 1, -1) if shape[1] == 3 else array[:, 0]
    if array.dtype.kind not in "biuf":
        fix = "pass a tensor of numbers; of complex ones, images.abs()"
        raise InvalidTypeError(f"{who} draws integers and floats, got {kind}", fix=fix)
    low, high = float(array.min()), float(array.max())
    if not np.isfinite([low, high]).all():
        bad = ~np.isfinite(array).reshape(len(array), -1)
        fix = "look at the code that computed them: often it divides by a deviation of zero or takes the log of zero"
        found = f"{bad.sum()} of {bad.size} values, the first in image {bad.any(axis=1).argmax()}"
        raise InvalidValueError(f"{who} draws finite values, got nan or infinity", found=found, fix=fix)

    if array.dtype.kind in "iu":
        if low < 0 or high > 255:
            fact = f"{who} draws integers in [0, 255], got {kind} in [{low:.0f}, {high:.0f}]"
            raise InvalidValueError(fact, fix="pass images / 1.0, and the range is stretched from black to white")
        return array.astype(np.uint8, copy=False), caption
    array = array.astype(np.float32, copy=False)
    if low >= 0 and high <= 1:
        return array, caption
    if shape[1] == 3 and low < -1:  # values in [-1, 1] may as well be (x - 0.5) / 0.5, which stretching undoes
        natural = array * np.float32(_IMAGENET_STD) + np.float32(_IMAGENET_MEAN)
        if natural.min() >= -0.01 and natural.max() <= 1.01:  # 0.01: bfloat16 rounds 2.64 by up to 0.008
            return natural.clip(0, 1), f"{caption}, ImageNet's normalisation undone"
    return (array - low) / ((high - low) or 1), f"{caption}, stretched: {low:.3g} is black, {high:.3g} is white"


def labels_and_masks(targets: Any) -> tuple[Any, Any]:
    """Return the labels and the masks of a batch's targets; None for what they do not have."""
    if isinstance(targets, Mapping):
        return targets.get("labels"), targets.get("masks")
    is_mask = len(getattr(targets, "shape", ())) == 3
    return (None, targets) if is_mask else (targets, None)


def under_masks(images: np.ndarray, masks: Any, count: int, colors: Sequence[str]) -> tuple[np.ndarray, str]:
    """Return what `pixels` returned as `(n, H, W, 3)` under the colours of masks, and which classes these have."""
    import numpy as np
    from matplotlib.colors import to_rgb

    shape = tuple(masks.shape)
    array = as_array(masks[: len(images)])
    if shape != (count, *images.shape[1:3]) or array.dtype.kind not in "biu":
        fact = f"masks are (N, H, W) class numbers, here {(count, *images.shape[1:3])}, got {shape} {array.dtype}"
        raise InvalidValueError(
            fact, fix="pass the masks of these images, of their height and width; .long() of floats"
        )
    below = images / np.float32(255 if images.dtype == "uint8" else 1)
    below = below if below.ndim == 4 else np.repeat(below[..., None], 3, axis=3)
    tints = np.float32([to_rgb(color) for color in colors])[(array.astype(int) - 1) % len(colors)]
    drawn = np.where(array[..., None] == 0, below, (below + tints) / 2)
    return drawn.astype(np.float32), ", ".join(map(str, np.unique(array)))


def points(places: Any, images: int) -> np.ndarray:
    """Return a place on each image, `(N, 2)` of x and y as shares of width and height; nan for none."""
    array = as_array(places)
    if array.shape != (images, 2) or array.dtype.kind != "f" or (array < 0).any() or (array > 1).any():
        fact = f"points are (N, 2), x and y in [0, 1] for each of {images} images, got {array.shape} {array.dtype}"
        raise InvalidValueError(fact, fix="divide columns by the width and rows by the height; nan for no point")
    return array


def titles(labels: Any, names: Sequence[str] | Mapping[str, str] | None, images: int) -> list[list[str]]:
    """Return, for each image, the names of its labels, given as `(N, L)` zeros and ones or `(N,)` class numbers."""
    array = label_array(labels, images)
    if array.ndim == 2:
        words = label_names(names, array.shape[1])
        return [[words[label] for label in row.nonzero()[0]] for row in array]
    if names is None:
        return [[str(label)] for label in array]
    last = int(array.max())
    if last >= len(names):
        fix = f"pass {last + 1} names or more; for one yes-or-no label per image, labels[:, None]"
        raise InvalidValueError(f"class {last} has no name: there are {len(names)}", fix=fix)
    words = label_names(names, len(names))
    return [[words[label]] for label in array]


def label_names(names: Sequence[str] | Mapping[str, str] | None, count: int) -> list[str]:
    """Return `count` names, with spaces for underscores: of a dict its values, and numbers where `names` is None."""
    names = list(names.values()) if isinstance(names, Mapping) else names
    words = [str(name).replace("_", " ") for name in (range(count) if names is None else names)]
    if len(words) != count:
        fact = f"there are {count} labels and {len(words)} names"
        raise InvalidValueError(fact, fix=f"pass {count} names, in the order of the labels' columns")
    return words


def label_array(labels: Any, images: int) -> np.ndarray:
    """Return labels as `(N, L)` zeros and ones or `(N,)` class numbers, integers; refuse what is neither."""
    import numpy as np

    array = as_array(labels)
    if array.ndim not in (1, 2) or len(array) != images or array.dtype.kind not in "biuf":
        fact = f"labels are (N, L) zeros and ones, or (N,) class numbers, for {images} images; got {array.shape}"
        found = "" if array.dtype.kind in "biuf" else f"dtype {array.dtype}"
        raise InvalidValueError(fact, found=found, fix="pass the labels of these images, one row per image")
    if array.ndim == 2:
        wrong = ~np.isin(array, (0, 1))
    else:  # nan is not at least 0, and infinity no int64
        wrong = ~((array >= 0) & (array < 2**63) & (array == np.trunc(array)))
    if wrong.any():
        values = array[np.isfinite(array)] if array.dtype.kind == "f" else array
        what, fix = "0 or 1", "if they are probabilities, pass labels > 0.5"
        if array.ndim == 1:
            what, fix = "class numbers from 0", "if it is one yes-or-no label per image, pass labels[:, None] > 0.5"
        if not np.isfinite(array[wrong][0]):
            fix = "look for what has no label in the table that they come from: table.isna().sum()"
        elif array.shape[1:] == (1,) and (values == np.trunc(values)).all() and (values >= 0).all():
            fix = "if they are class numbers, as a folder's, pass labels[:, 0]"
        found = f"row {np.argwhere(wrong)[0][0]}"
        raise InvalidValueError(f"labels must be {what}, got {array[wrong][0]:.4g}", found=found, fix=fix)
    return array.astype(int)


def as_array(values: Any) -> np.ndarray:
    """Return `values` as an array on the host, in a dtype that numpy can compute with."""
    import numpy as np

    if hasattr(values, "detach"):
        values = values.detach().cpu()
        short = values.is_floating_point() and values.element_size() < 4  # numpy has no bfloat16 and no float8
        return (values.float() if short else values).numpy()
    array = np.asarray(values)
    short = array.dtype.itemsize < 4 and array.dtype.name.startswith(("bfloat", "float"))
    return array.astype(np.float32) if short else array


def _shape_fix(shape: tuple[int, ...], permute: str) -> str:
    if 0 in shape:
        return "the batch is empty: look at what the dataset or the loader returned"
    if len(shape) == 4 and shape[3] in (1, 3):
        return f"if the batch is (N, H, W, C), pass images.{permute}(0, 3, 1, 2)"
    if len(shape) == 4:
        return "choose one or three channels, for example images[:, :3]"
    if len(shape) == 3 and shape[2] in (1, 3):
        return f"if it is one image (H, W, C), pass images.{permute}(2, 0, 1)[None]"
    if len(shape) == 3:
        return "if it is one image (C, H, W), pass images[None]; if grey images (N, H, W), images[:, None]"
    return "pass images.reshape(N, C, H, W)" if len(shape) != 2 else "if it is one grey image, pass images[None, None]"
