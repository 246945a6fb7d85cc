"""Change the images of a batch at random, on the device: move, scale, rotate, flip, brightness.

A rotated image must be interpolated between its pixels. `torch.nn.functional.grid_sample` does
that, but torch_xla 2.9 has no lowering for it: each call copies the batch to the host and back
(counter `aten::grid_sampler_2d`). Here all rows are resampled first and then all columns, as
Catmull and Smith rotated images in 1980 ("3-D transformations of images in scanline order"):

    image    --  each row: shear and scale  -->    --  each column: the same  -->    rotated image

On a TPU each row is resampled by a product with its own matrix. The compiler computes these
matrices inside the product and stores none of them. For 128 images of 128 x 128 it estimates 0.94 M
cycles, a sixteenth of ResNet-34's step (libtpu 0.0.42, v5e; not tested on hardware). Gathering the
pixels instead would be 25 million reads of one number each. The compiler has no estimate for those;
at one per cycle they take longer than that step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

from tpukit.essentials.display import InvalidValueError, names_in_order

_RANGES = {  # the largest value of each number, and its meaning for messages
    "translate": (0.5, "a share of the image; 0.06 is up to 8 of 128 pixels"),
    # Beyond 45 degrees rows would have to be read as columns.
    "degrees": (45, "degrees to either side, for instance 10"),
    "brightness": (1, "a share of white; 0.1 is up to 26 of 255 grey levels"),
    "contrast": (1, "a share; 0.1 is 0.9 to 1.1 times as much"),
    "flip": (1, "a probability; 0.5 flips every second image on average"),
}
# A TPU rounds the factors of a product to bfloat16, which is exact for multiples of 1/128 up to 1.
_STEPS_PER_PIXEL = 128


@dataclass(frozen=True)
class Augment:
    """Change each image of a batch at random: `images, targets = augment(images, targets)`.

    Masks among the targets, (N, H, W) of the images' height and width, are moved, scaled, rotated
    and flipped with their images; each pixel takes the nearest class. Masks may be alone, or in a
    dict or tuple of targets.

    A flip exchanges left and right. If labels name a side, `swap_labels` must exchange them as
    well. Without it such a label is wrong on every flipped image, and no error shows it; therefore
    `flip` is off by default.

    Call it inside the step, on uint8 images, before they are normalised. The random numbers are
    uniform and drawn on the device, which `launch(seed=...)` seeds differently on each core. They
    do not change the graph, so it is compiled once.

    The names are those of torchvision's `RandomAffine` and `ColorJitter`. Two changes differ from
    torchvision, because they imitate the window of a CT image: `brightness` is added and not
    multiplied, and `contrast` changes the distance from mid-grey, not from the image's mean.

    Attributes:
        translate: the largest shift, as a share of height and of width, 0 (off) to 0.5. Each shift
            is drawn from [-translate, translate].
        scale: (smallest, largest) size, within 0.5 to 1.5: (0.9, 1.1) is 0.9 to 1.1 times as large.
            None is off.
        degrees: the largest rotation, 0 (off) to 45. Drawn from [-degrees, degrees].
        brightness: the largest change of brightness, as a share of white, 0 (off) to 1. A number
            from [-brightness, brightness] times white is added, as by another level of a CT window.
        contrast: the largest change of contrast, as a share, 0 (off) to 1. The distance from
            mid-grey is multiplied by a factor from [1 - contrast, 1 + contrast], as by another
            width of a CT window.
        flip: the probability of a left-right flip, 0 (off) to 1.
        fill: the class number of a mask outside of the image, -256 to 255. 0 is usually the
            background; 255 is ignored with `ignore_index=255`. Images are 0 outside.
        swap_labels: pairs of labels that a flip exchanges: columns, or names if `names` is given.
            In a dict of targets those of "labels". Class numbers in a mask are not exchanged.
        names: the names of all labels, in the order of their columns.

    Raises:
        ValueError: a number is out of its range, or `swap_labels` does not consist of pairs of
            different labels.
    """

    translate: float = 0.06
    scale: tuple[float, float] | None = (0.9, 1.1)
    degrees: float = 10.0
    brightness: float = 0.1
    contrast: float = 0.1
    flip: float = 0.0
    fill: int = 0
    swap_labels: Sequence[tuple[int | str, int | str]] = ()
    names: Sequence[str] = ()

    def __post_init__(self):
        for name, (most, meaning) in _RANGES.items():
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= most:
                raise InvalidValueError(
                    f"{name} must be 0 (off) to {most}, got {value!r}", fix=f"it is {meaning}"
                )
        _check_scale(self.scale)
        is_whole = isinstance(self.fill, int) and not isinstance(self.fill, bool)
        if not is_whole or not -256 <= self.fill <= 255:
            raise InvalidValueError(
                f"fill must be a class number, -256 to 255, got {self.fill!r}", fix="0, or 255"
            )
        _opposites(self.swap_labels, self.names)

    def __call__(self, images, labels):
        """Return changed images and their targets; the arguments are not modified.

        Pixels from outside the image are 0, the value that a scanner writes outside its field of
        view. uint8 images are rounded and stay in [0, 255]; floats are not clamped. All is computed
        in float32, also under autocast; on a TPU the result is exact to within one grey level. No
        gradient is recorded.

        Args:
            images: (N, C, H, W) uint8 in [0, 255], or of a float dtype in [0, 1].
            labels: (N, L) of any dtype, (N, H, W) masks of whole numbers from -256 to 255, or a
                dict or tuple of both; other objects are returned unchanged, if `swap_labels` is
                empty.

        Returns:
            A tuple of both, of the same shapes and dtypes, on the same device.

        Raises:
            ValueError: images or labels have another shape or dtype.
        """
        import torch

        _check_images(images)
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            drawn = self._draw(images)
            labels = self._change_targets(labels, images, drawn)
            changed = self._move(images, drawn)
            # Last, so that black inside and outside of the image stays the same grey level.
            changed = self._light(changed, drawn, is_uint8=images.dtype == torch.uint8)
            return changed.to(images.dtype), labels

    def _draw(self, images) -> "_Drawn":
        """Draw the random numbers of all images.

        Numbers of changes that are off are drawn, too, so that switching a change off does not
        alter the numbers of the others.
        """
        import torch

        height, width = images.shape[2:]
        draws = torch.rand(7, len(images), dtype=torch.float32, device=images.device)
        turn, zoom, right, down, contrast, brightness = 2 * draws[:6] - 1
        smallest, largest = self.scale or (1, 1)
        return _Drawn(
            flipped=draws[6] < self.flip,
            moves={
                "turn": math.radians(self.degrees) * turn,
                "zoom": (smallest + largest) / 2 + (largest - smallest) / 2 * zoom,
                "right": self.translate * width * right,
                "down": self.translate * height * down,
            },
            contrast=self.contrast * contrast.view(-1, 1, 1, 1),
            brightness=self.brightness * brightness.view(-1, 1, 1, 1),
        )

    def _move(self, images, drawn: "_Drawn", *, nearest: bool = False):
        """Return (N, C, H, W) images, flipped, rotated, scaled and moved."""
        import torch

        if self.flip:
            images = torch.where(drawn.flipped.view(-1, 1, 1, 1), images.flip(3), images)
        changes_size = self.scale is not None and tuple(self.scale) != (1, 1)
        if not self.translate and not changes_size and not self.degrees:
            return images
        return warp(images, **drawn.moves, nearest=nearest)

    def _light(self, images, drawn: "_Drawn", *, is_uint8: bool):
        """Return images with changed brightness and contrast; bytes are rounded and clamped."""
        if self.brightness or self.contrast:
            white = 255 if is_uint8 else 1
            grey = white / 2
            images = (images.float() - grey) * (1 + drawn.contrast)
            images = images + white * (0.5 + drawn.brightness)
        if is_uint8 and images.is_floating_point():
            images = images.round().clamp(0, 255)
        return images

    def _change_targets(self, targets, images, drawn: "_Drawn"):
        """Return the targets: masks moved with their images, labels swapped by a flip."""
        from torch.utils import _pytree as tree

        changed = tree.tree_map(lambda target: self._change_mask(target, images, drawn), targets)
        if not self.flip:
            return changed
        if isinstance(changed, Mapping) and "labels" in changed:
            return {**changed, "labels": self._swap(changed["labels"], drawn.flipped)}
        return self._swap(changed, drawn.flipped)

    def _change_mask(self, target, images, drawn: "_Drawn"):
        """Return a mask moved with its image; any other target unchanged."""
        shape = tuple(getattr(target, "shape", ()))
        is_mask = len(shape) in (3, 4) and shape[0] == len(images)
        if not is_mask or shape[-2:] != tuple(images.shape[2:]):
            return target
        # `_move` fills with 0, so `fill` is 0 for a moment.
        masks = (target.float() - self.fill).view(len(images), -1, *shape[-2:])
        moved = self._move(masks, drawn, nearest=True) + self.fill
        return moved.to(target.dtype).view(shape)

    def _swap(self, labels, flipped):
        """Return the labels with the pairs of `swap_labels` exchanged in flipped images."""
        import torch

        opposites = _opposites(self.swap_labels, self.names)
        if not opposites:
            return labels
        shape = tuple(getattr(labels, "shape", ()))
        columns = len(self.names)
        if not columns:
            columns = max([max(opposites) + 1, *shape[1:]])
        if shape != (len(flipped), columns):
            raise InvalidValueError(
                f"with swap_labels={self.swap_labels!r}, labels are (N, L), here "
                f"({len(flipped)}, {columns}), got {type(labels).__name__} {shape}",
                fix="pass the labels of these images, one column per label; "
                "class numbers cannot be swapped",
            )
        # Not labels[:, order]: the list of numbers would be copied to the device in every step.
        mirrored = [labels[:, opposites.get(column, column)] for column in range(columns)]
        return torch.where(flipped.view(-1, 1), torch.stack(mirrored, dim=1), labels)


class _Drawn(NamedTuple):
    """The random numbers of a batch, one per image."""

    flipped: object  # (N,) bool
    moves: dict  # the arguments of `warp`, (N,) float32 each
    contrast: object  # (N, 1, 1, 1) float32, the relative change
    brightness: object  # (N, 1, 1, 1) float32, the change as a share of white


def warp(images, *, turn, zoom, right, down, nearest=False):
    """Rotate and scale every image about its centre and shift it, each by its own numbers.

    Interpolates linearly between pixels, along rows and then along columns; pixels from outside are
    0. The result is as sharp as that of `grid_sample`. For rotations of up to 10 degrees it differs
    from it by 0.1 grey levels on average in smooth images, and by 1.6 in pure noise.

    Args:
        images: (N, C, H, W) of any dtype.
        turn: (N,) float32, radians, counter-clockwise, at most pi / 4 to either side.
        zoom: (N,) float32, above 0; 2 makes objects twice as large.
        right: (N,) float32, pixels.
        down: (N,) float32, pixels.
        nearest: True takes the nearest pixel, for whole class numbers from -256 to 256.

    Returns:
        (N, C, H, W) float32.
    """
    import torch

    turn, zoom, right, down = (number.view(-1, 1, 1) for number in (turn, zoom, right, down))
    height, width = images.shape[2:]
    # Both count from the centre of the image.
    rows = torch.arange(height, dtype=torch.float32, device=images.device) - (height - 1) / 2
    columns = torch.arange(width, dtype=torch.float32, device=images.device) - (width - 1) / 2
    x = columns - right
    y = rows - down
    # The pixel at (x, y) shows the image at ((x cos - y sin) / zoom, (x sin + y cos) / zoom).
    # Within one row of the image the column depends on x alone, so every row can be resampled on
    # its own, and then every column.
    column_read = x / (zoom * turn.cos()) - turn.tan() * rows.view(-1, 1)
    row_read = (y * turn.cos() + x.transpose(1, 2) * turn.sin()) / zoom
    images = _read(images.float(), column_read, nearest)
    images = _read(images.transpose(2, 3), row_read, nearest)
    return images.transpose(2, 3)


def _read(rows, places, nearest=False):
    """Resample (N, C, R, S) rows at (N, R, T) places from their centre, into (N, C, R, T)."""
    centre = (rows.shape[3] - 1) / 2
    if nearest:
        places = (places + centre).round() - centre
    # Bytes and weights are exact in bfloat16 (whole numbers up to 256, multiples of 1/128 up to 1),
    # so the weights sum to 1, and an image that does not move is unchanged.
    places = (places * _STEPS_PER_PIXEL).round() / _STEPS_PER_PIXEL + centre
    if rows.device.type == "xla":
        return _multiply(rows, places)
    return _gather(rows, places)


def _multiply(rows, places):
    """Resample by one S x T matrix per row, with two weights in each column.

    This is affordable only if a compiler computes the matrices inside the product.
    """
    import torch

    pixels = torch.arange(rows.shape[3], dtype=torch.float32, device=rows.device)
    weights = (1 - (places.unsqueeze(2) - pixels.unsqueeze(1)).abs()).clamp(min=0)
    # In this order: with the weights on the left, the product takes six times as many cycles.
    return (rows.transpose(1, 2) @ weights).transpose(1, 2)


def _gather(rows, places):
    """Interpolate between the two pixels next to every place: the same result without a product."""
    import torch

    size = rows.shape[3]
    rows = torch.nn.functional.pad(rows, (1, 1))  # a 0 on either side
    places = (places.clamp(-1, size) + 1).unsqueeze(1)
    left = places.floor().clamp(max=size)
    index = left.long().expand(-1, rows.shape[1], -1, -1)
    return torch.lerp(rows.gather(3, index), rows.gather(3, index + 1), places - left)


def _is_number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_scale(scale) -> None:
    """Raise ValueError unless `scale` is None or the smallest and the largest size."""
    if scale is None:
        return
    is_pair = isinstance(scale, Sequence) and len(scale) == 2
    if is_pair and all(map(_is_number, scale)):
        smallest, largest = scale
        if 0.5 <= smallest <= largest <= 1.5:
            return
    raise InvalidValueError(
        f"scale must be (smallest, largest) from 0.5 to 1.5, or None (off), got {scale!r}",
        fix="scale=(0.9, 1.1) is 0.9 to 1.1 times as large",
    )


def _check_images(images) -> None:
    """Raise ValueError unless the images are an (N, C, H, W) batch of uint8 or floats."""
    import torch

    kind = type(images).__name__
    shape = tuple(getattr(images, "shape", ()))
    found = f"{kind} {shape} {getattr(images, 'dtype', '')}"
    is_batch = isinstance(images, torch.Tensor) and images.ndim == 4
    are_channels_last = is_batch and shape[3] <= 4 < shape[1]
    if not is_batch or are_channels_last:
        raise InvalidValueError(
            f"augment takes (N, C, H, W) tensors, got {found}",
            fix="if the batch is (N, H, W, C), pass images.permute(0, 3, 1, 2)",
        )
    if images.dtype == torch.uint8 and shape[1] == 2:
        raise InvalidValueError(
            "augment cannot move images of two bytes per pixel: it would mix low and high bytes",
            found=f"{found}, as pack_dicom(form='int16') and PackOptions(mode='I;16') make them",
            fix="in the step, Augment(...)((pe.hounsfield(images) + 1024) / 4096, labels); of mode "
            "I;16, Augment(...)(tpukit.datasets.uint16_values(images) / 65535, labels)",
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise InvalidValueError(
            f"augment takes uint8 in [0, 255] or floats in [0, 1], got {found}",
            fix="pass images.to(torch.uint8), if they are in [0, 255]",
        )


def _opposites(swap_labels, names) -> dict[int, int]:
    """Return {column: column to swap with} of the labels that a flip exchanges.

    For example {6: 8, 8: 6} for ((6, 8),); ValueError for an invalid `swap_labels`.
    """
    names = names_in_order(names, "names", words=False)
    opposites = {}
    for pair in swap_labels:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise InvalidValueError(
                f"swap_labels must be pairs of labels, got {swap_labels!r}",
                fix="swap_labels=((one, other),), with a comma after a single pair",
            )
        columns = [names.index(label) if label in names else label for label in pair]
        for label in columns:
            if isinstance(label, str) or not 0 <= label < (len(names) or math.inf):
                raise InvalidValueError(
                    f"swap_labels={swap_labels!r} has no column for {label!r}; names={names!r}",
                    fix="count columns from 0; to use names, pass names= with the names of all "
                    "columns, in order",
                )
        one, other = columns
        if one == other or opposites.keys() & {one, other}:
            raise InvalidValueError(
                f"swap_labels={swap_labels!r} has a label twice",
                fix="name each label in one pair at most",
            )
        opposites[one] = other
        opposites[other] = one
    return opposites
