"""Change the images of a batch at random, on the device: move, scale, rotate, change the brightness, flip.

A rotated image has to be interpolated between its pixels. `torch.nn.functional.grid_sample` does that, but torch_xla
2.9 has no lowering for it: each call copies the batch to the host and back (counter `aten::grid_sampler_2d`). Here all
rows are resampled first and then all columns, as Catmull and Smith rotated images in 1980 ("3-D transformations of
images in scanline order"); on a TPU each row is resampled by a product with its own matrix. The compiler computes these
matrices inside the product and stores none of them. For 128 images of 128 x 128 it estimates 0.94 M cycles, a sixteenth
of ResNet-34's step (libtpu 0.0.42, v5e; not yet compared with a chip). Gathering the pixels instead would be 25 million
reads of one number each. The compiler has no estimate for those; at one per cycle they take longer than that step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from tpukit.essentials.display import InvalidValueError

_RANGES = {
    "translate": (0.5, "a share of the image; 0.06 is up to 8 of 128 pixels"),
    "degrees": (45, "degrees to either side, for instance 10"),  # beyond 45, rows would have to be read as columns
    "brightness": (1, "a share of white; 0.1 is up to 26 of 255 grey levels"),
    "contrast": (1, "a share; 0.1 is 0.9 to 1.1 times as much"),
    "flip": (1, "a probability; 0.5 flips every second image on average"),
}


@dataclass(frozen=True)
class Augment:
    """Change every image of a batch by its own random numbers: `images, targets = augment(images, targets)`.

    Masks among the targets, (N, H, W) of the images' height and width, are moved, scaled, rotated and flipped with
    their images, to the nearest pixel; alone, or in a dict or tuple of targets.

    A flip exchanges left and right. Labels that name a side have to be exchanged as well: `swap_labels` says which. Without it
    such a label is wrong on every flipped image, and no error shows it; therefore `flip` is off by default.

    The names are those of torchvision's `RandomAffine` and `ColorJitter`. Two differ from it, as CT needs it:
    `brightness` adds instead of multiplying, and `contrast` turns about mid-grey, not about the mean of the image.

    Call it inside the step, on uint8 images, before they are normalised. The random numbers are uniform and drawn on
    the device, which `launch(seed=...)` seeds differently on each core. They do not change the graph, so it is
    compiled once.

    Attributes:
        translate: the largest shift, as a share of height and width, 0 (off) to 0.5. Both are drawn from
            [-translate, translate].
        scale: (smallest, largest) size, within 0.5 to 1.5: (0.9, 1.1) is 0.9 to 1.1 times as large. None is off.
        degrees: the largest rotation to either side, 0 (off) to 45. Drawn from [-degrees, degrees].
        brightness: the largest change of brightness, as a share of white, 0 (off) to 1: a number drawn from
            [-brightness, brightness] x white is added. It has the effect of another level of a CT window.
        contrast: the largest change of contrast, as a share, 0 (off) to 1: the difference from mid-grey is multiplied
            by a factor drawn from [1 - contrast, 1 + contrast]. It has the effect of another width of a CT window.
        flip: the probability of a left-right flip, 0 (off) to 1.
        fill: the class number that a mask has outside of the image; 0 is usually the background, 255 with
            `ignore_index=255` does not count. -256 to 255. Pixels of images outside are 0.
        swap_labels: pairs of labels that a flip exchanges: columns, or names if `names` is given. In a dict of targets those
            of "labels"; class numbers in a mask are not exchanged.
        names: the names of all labels, in the order of their columns.

    Raises:
        ValueError: a number is out of its range, or `swap_labels` does not consist of pairs of different labels.
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
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= most:
                raise InvalidValueError(f"{name} is 0 (off) to {most}, got {value!r}", fix=f"it is {meaning}")
        _check_scale(self.scale)
        if isinstance(self.fill, bool) or not isinstance(self.fill, int) or not -256 <= self.fill <= 255:
            raise InvalidValueError(f"fill is a class number, -256 to 255, got {self.fill!r}", fix="0, or 255")
        _opposites(self.swap_labels, self.names)

    def __call__(self, images, labels):
        """Return changed images and their targets; the arguments are not modified.

        Pixels from outside the image are 0, the value that a scanner writes outside its field of view. uint8 images are
        rounded and stay in [0, 255]; floats are not clamped. All is computed in float32, also under autocast; on a TPU
        the result is exact to within one grey level. No gradient is recorded.

        Args:
            images: (N, C, H, W) uint8 in [0, 255], or of a float dtype in [0, 1].
            labels: (N, L) of any dtype, (N, H, W) masks of whole numbers from -256 to 255, or a dict or tuple of both;
                anything else is returned as it is, if `swap_labels` is empty.

        Returns:
            A tuple of both, of the same shapes and dtypes, on the same device.

        Raises:
            ValueError: images or labels have another shape or dtype.
        """
        import torch

        _check(images)
        in_bytes, (height, width) = images.dtype == torch.uint8, images.shape[2:]
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            # All are drawn, even those not used: switching one change off does not alter the others.
            draws = torch.rand(7, len(images), dtype=torch.float32, device=images.device)
            turn, zoom, right, down, contrast, brightness = 2 * draws[:6] - 1
            flipped = draws[6] < self.flip
            smallest, largest = self.scale or (1, 1)
            moves = {
                "turn": math.radians(self.degrees) * turn,
                "zoom": (smallest + largest) / 2 + (largest - smallest) / 2 * zoom,
                "right": self.translate * width * right,
                "down": self.translate * height * down,
            }
            labels = self._change_targets(labels, images, flipped, moves)
            changed = self._move(images, flipped, moves)
            if (
                self.brightness or self.contrast
            ):  # last, so that black inside and outside of the image stays one grey level
                white = 255 if in_bytes else 1
                contrast = self.contrast * contrast.view(-1, 1, 1, 1)
                brightness = self.brightness * brightness.view(-1, 1, 1, 1)
                changed = (changed.float() - white / 2) * (1 + contrast) + white * (0.5 + brightness)
            if in_bytes and changed.is_floating_point():
                changed = changed.round().clamp(0, 255)
            return changed.to(images.dtype), labels

    def _move(self, images, flipped, moves: dict, *, nearest: bool = False):
        """Return (N, C, H, W) images flipped and warped."""
        import torch

        if self.flip:
            images = torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)
        changes_size = self.scale is not None and tuple(self.scale) != (1, 1)
        if self.translate or changes_size or self.degrees:
            return warp(images, **moves, nearest=nearest)
        return images

    def _change_targets(self, targets, images, flipped, moves: dict):
        """Return the targets: masks moved with their images, labels swapped where these are flipped."""
        from torch.utils import _pytree as tree

        changed = tree.tree_map(lambda target: self._change_mask(target, images, flipped, moves), targets)
        if self.flip and isinstance(changed, Mapping) and "labels" in changed:
            return {**changed, "labels": self._swapped(changed["labels"], flipped)}
        return self._swapped(changed, flipped) if self.flip else changed

    def _change_mask(self, target, images, flipped, moves: dict):
        shape = tuple(getattr(target, "shape", ()))
        if shape[-2:] != tuple(images.shape[2:]) or len(shape) not in (3, 4) or shape[0] != len(images):
            return target
        # Pixels from outside become 0, so `fill` is 0 for a moment.
        masks = (target.float() - self.fill).view(len(images), -1, *shape[-2:])
        return (self._move(masks, flipped, moves, nearest=True) + self.fill).to(target.dtype).view(shape)

    def _swapped(self, labels, flipped):
        """Return the labels, exchanged as `swap_labels` says in the rows of flipped images."""
        import torch

        opposites = _opposites(self.swap_labels, self.names)
        if not opposites:
            return labels
        shape = tuple(getattr(labels, "shape", ()))
        columns = len(self.names) or max([max(opposites) + 1, *shape[1:]])
        if shape != (len(flipped), columns):
            raise InvalidValueError(
                f"with swap_labels={self.swap_labels!r}, labels are (N, L), here ({len(flipped)}, {columns}), "
                f"got {type(labels).__name__} {shape}",
                fix="pass the labels of these images, one column per label; class numbers cannot be swapped",
            )
        # Columns, not labels[:, order]: the list of numbers would be copied to the device in every step.
        mirrored = torch.stack([labels[:, opposites.get(column, column)] for column in range(columns)], dim=1)
        return torch.where(flipped.view(-1, 1), mirrored, labels)


def warp(images, *, turn, zoom, right, down, nearest=False):
    """Rotate and scale every image about its centre and shift it, each by its own numbers.

    Interpolates linearly between pixels, along rows and then along columns; pixels from outside are 0. The result is as
    sharp as that of `grid_sample`. For rotations of up to 10 degrees it differs from it by 0.1 grey levels on average
    in smooth images, and by 1.6 in pure noise.

    Args:
        images: (N, C, H, W) of any dtype.
        turn: (N,) float32, radians, counter-clockwise, at most pi / 4 to either side.
        zoom: (N,) float32, above 0; 2 makes objects twice as large.
        right: (N,) float32, pixels.
        down: (N,) float32, pixels.
        nearest: take the nearest pixel, for class numbers, whole and from -256 to 256.

    Returns:
        (N, C, H, W) float32.
    """
    import torch

    turn, zoom, right, down = (number.view(-1, 1, 1) for number in (turn, zoom, right, down))
    height, width = images.shape[2:]
    rows = torch.arange(height, dtype=torch.float32, device=images.device) - (height - 1) / 2
    columns = torch.arange(width, dtype=torch.float32, device=images.device) - (width - 1) / 2
    x, y = columns - right, rows - down
    # The pixel at (x, y) shows the image at ((x cos - y sin) / zoom, (x sin + y cos) / zoom). Within one row of the
    # image the column depends on x alone, so every row can be resampled on its own, and then every column.
    images = _read(images.float(), x / (zoom * turn.cos()) - turn.tan() * rows.view(-1, 1), nearest)
    images = _read(images.transpose(2, 3), (y * turn.cos() + x.transpose(1, 2) * turn.sin()) / zoom, nearest)
    return images.transpose(2, 3)


def _read(rows, places, nearest=False):
    """Resample (N, C, R, S) rows at (N, R, T) places, counted from their centre, into (N, C, R, T)."""
    if nearest:
        places = (places + (rows.shape[3] - 1) / 2).round() - (rows.shape[3] - 1) / 2
    # A TPU rounds the factors of a product to bfloat16, which is exact for whole numbers up to 256 and for multiples of
    # 1/128 up to 1. So bytes and weights are exact, the weights sum to 1, and an image that does not move is unchanged.
    places = (places * 128).round() / 128 + (rows.shape[3] - 1) / 2
    return _multiply(rows, places) if rows.device.type == "xla" else _gather(rows, places)


def _multiply(rows, places):
    """Resample by one S x T matrix per row, with two weights in each column; affordable only if a compiler fuses it."""
    import torch

    pixels = torch.arange(rows.shape[3], dtype=torch.float32, device=rows.device)
    weights = (1 - (places.unsqueeze(2) - pixels.unsqueeze(1)).abs()).clamp(min=0)
    # In this order: with the weights on the left, the same product takes six times as many cycles.
    return (rows.transpose(1, 2) @ weights).transpose(1, 2)


def _gather(rows, places):
    """Interpolate between the two neighbours of every place: the same result, faster where gathering is cheap."""
    import torch

    size = rows.shape[3]
    rows = torch.nn.functional.pad(rows, (1, 1))  # a 0 on either side
    places = (places.clamp(-1, size) + 1).unsqueeze(1)
    left = places.floor().clamp(max=size)
    index = left.long().expand(-1, rows.shape[1], -1, -1)
    return torch.lerp(rows.gather(3, index), rows.gather(3, index + 1), places - left)


def _check_scale(scale) -> None:
    """Raise ValueError unless `scale` is None or the smallest and the largest size."""
    if scale is None:
        return
    is_pair = isinstance(scale, Sequence) and len(scale) == 2
    if is_pair and all(isinstance(end, Real) and not isinstance(end, bool) for end in scale):
        smallest, largest = scale
        if 0.5 <= smallest <= largest <= 1.5:
            return
    raise InvalidValueError(
        f"scale is (smallest, largest) from 0.5 to 1.5, or None (off), got {scale!r}",
        fix="scale=(0.9, 1.1) is 0.9 to 1.1 times as large",
    )


def _check(images) -> None:
    """Raise ValueError unless the images are an (N, C, H, W) batch of uint8 or floats."""
    import torch

    found = f"{type(images).__name__} {tuple(getattr(images, 'shape', ()))} {getattr(images, 'dtype', '')}"
    if not isinstance(images, torch.Tensor) or images.ndim != 4 or images.shape[3] <= 4 < images.shape[1]:
        raise InvalidValueError(
            f"augment takes (N, C, H, W) tensors, got {found}",
            fix="if the batch is (N, H, W, C), pass images.permute(0, 3, 1, 2)",
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise InvalidValueError(
            f"augment takes uint8 in [0, 255] or floats in [0, 1], got {found}",
            fix="pass images.to(torch.uint8), if they are in [0, 255]",
        )


def _opposites(swap_labels, names) -> dict[int, int]:
    """Map the column of every swapped label to that of its opposite; raise ValueError for an invalid `swap_labels`."""
    opposites = {}
    for pair in swap_labels:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise InvalidValueError(
                f"swap_labels is pairs of labels, got {swap_labels!r}",
                fix="swap_labels=((one, other),), with a comma after a single pair",
            )
        columns = [list(names).index(label) if label in names else label for label in pair]
        for label in columns:
            if isinstance(label, str) or not 0 <= label < (len(names) or math.inf):
                raise InvalidValueError(
                    f"swap_labels={swap_labels!r} has no column for {label!r}; names={names!r}",
                    fix="columns count from 0; for names, pass names= with all of them in the order of the columns",
                )
        one, other = columns
        if one == other or opposites.keys() & {one, other}:
            raise InvalidValueError(
                f"swap_labels={swap_labels!r} has a label twice", fix="every label is in one pair at most"
            )
        opposites |= {one: other, other: one}
    return opposites
