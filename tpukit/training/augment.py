"""Change the images of a batch at random, on the device: move, scale, rotate, flip, brightness.

A rotated image must be interpolated between its pixels. `torch.nn.functional.grid_sample` does
that, but torch_xla 2.9 has no lowering for it: each call copies the batch to the host and back
(counter `aten::grid_sampler_2d`). Here all rows are resampled first and then all columns, as
Catmull and Smith rotated images in 1980 ("3-D transformations of images in scanline order"):

    image    --  each row: shear and scale  -->    --  each column: the same  -->    rotated image

On a TPU, each row is resampled by a matrix product with a matrix of its own. The compiler computes
these matrices inside the product and stores none of them. For 128 images of 128 x 128, it estimates
0.94 M cycles, a sixteenth of ResNet-34's step (libtpu 0.0.42, v5e; not tested on hardware).
Gathering the pixels instead would need 25 million reads of one number each. The compiler has no
estimate for these reads; at one read per cycle, they would take longer than the step of the
ResNet-34.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import NamedTuple

from tpukit.essentials.display import InvalidValueError, names_in_order

_RANGES = {  # the largest value of each number, and an example with its meaning, for messages
    "translate": (0.5, "0.06, a share of the image: up to 8 of 128 pixels"),
    # Beyond 45 degrees rows would have to be read as columns.
    "degrees": (45, "10, for up to 10 degrees to either side"),
    "brightness": (1, "0.1, a share of white: up to 26 of 255 grey levels"),
    "contrast": (1, "0.1, for 0.9 to 1.1 times the contrast"),
    "flip": (1, "0.5, a probability: every second image on average"),
}
# A TPU rounds the factors of a product to bfloat16, which is exact for multiples of 1/128 up to 1.
_STEPS_PER_PIXEL = 128


@dataclass(frozen=True)
class Augment:
    """Change each image of a batch at random: `images, targets = augment(images, targets)`.

    If the targets contain masks, (N, H, W) with the images' height and width, each mask is moved,
    scaled, rotated and flipped with its image. Each pixel of the mask gets the class of the nearest
    pixel. The targets may be a mask, or a dict or tuple with masks.

    A flip exchanges left and right. If labels name a side, `swap_labels` must contain each pair,
    such as ("left lung", "right lung"). Otherwise both labels of a pair are wrong for every flipped
    image, without an error. Therefore `flip` is off by default.

    Call an `Augment` in the step, on uint8 images that are not normalised. The random numbers are
    uniform and are drawn on the device. `launch(seed=...)` seeds each core differently. New random
    numbers do not change the graph, so it is compiled only once.

    The arguments have the names of torchvision's `RandomAffine` and `ColorJitter`. Two changes
    differ from torchvision, because they imitate the window of a CT image: `brightness` is added
    and not multiplied, and `contrast` changes the distance from mid-grey, not from the image's
    mean.

    Attributes:
        translate: the largest shift, as a share of height and of width, 0 (off) to 0.5. Each shift
            is drawn from [-translate, translate].
        scale: (smallest, largest) size, within 0.5 to 1.5: (0.9, 1.1) is 0.9 to 1.1 times as large.
            None is off.
        degrees: the largest rotation in degrees, 0 (off) to 45. Each rotation is drawn from
            [-degrees, degrees].
        brightness: the largest change of brightness, as a share of white, 0 (off) to 1. Each change
            is drawn from [-brightness, brightness], and acts like another level of a CT window.
        contrast: the largest change of contrast, as a share, 0 (off) to 1. The distance from
            mid-grey is multiplied by a factor from [1 - contrast, 1 + contrast], as by another
            width of a CT window.
        flip: the probability of a left-right flip, 0 (off) to 1.
        fill: the class number, -256 to 255, of mask pixels that come from outside the image. 0 is
            usually the background. The loss ignores 255 if it has `ignore_index=255`. Image pixels
            from outside are 0 before brightness and contrast change.
        swap_labels: pairs of labels that a flip exchanges, as column numbers, or as names if
            `names` is given. If the targets are a dict, these are columns of the entry "labels".
            Class numbers in a mask are not exchanged.
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
        for name, (most, example) in _RANGES.items():
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= most:
                raise InvalidValueError(
                    f"{name} must be 0 (off) to {most}, got {value!r}", fix=f"{name}={example}"
                )
        _check_scale(self.scale)
        is_whole = isinstance(self.fill, int) and not isinstance(self.fill, bool)
        if not is_whole or not -256 <= self.fill <= 255:
            raise InvalidValueError(
                f"fill must be a whole number, -256 to 255, got {self.fill!r}",
                fix="fill=0, or fill=255 and a loss with ignore_index=255",
            )
        # Keep the pairs and the names, because an iterator such as zip could be read only once.
        object.__setattr__(self, "swap_labels", tuple(self.swap_labels))
        names = names_in_order(self.names, "names", words=False)
        object.__setattr__(self, "names", tuple(names))
        _opposites(self.swap_labels, self.names)

    def __call__(self, images, labels):
        """Return changed images and their targets; the arguments are not modified.

        Pixels from outside the image are 0, the value that a scanner writes outside its field of
        view. Then they change their brightness like all other pixels. uint8 images are rounded and
        stay in [0, 255]; floats are not clamped. All is computed in float32, also under autocast;
        on a TPU the result is exact to within one grey level. No gradient is recorded.

        Args:
            images: (N, C, H, W) uint8 in [0, 255], or of a float dtype in [0, 1].
            labels: the targets: labels (N, L) of any dtype, masks (N, H, W) of whole numbers that
                differ from `fill` by at most 256, or a dict or tuple of both. If `swap_labels` is
                empty, other targets are returned unchanged.

        Returns:
            (images, labels), with the same shapes and dtypes, on the same device.

        Raises:
            ValueError: the images have another shape or dtype; a mask cannot hold `fill`;
                or `flip` and `swap_labels` are given, and the labels are not (N, L).
        """
        import torch

        _check_images(images)
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            drawn = self._draw(images)
            labels = self._change_targets(labels, images, drawn)
            changed = self._move(images, drawn)
            # Change the brightness last, so that black of the border and of the image stay equal.
            changed = self._light(changed, drawn, is_uint8=images.dtype == torch.uint8)
            return changed.to(images.dtype), labels

    def _draw(self, images) -> "_Drawn":
        """Draw the random numbers of all images.

        They are drawn for changes that are off, too. So if one change is switched off, the random
        numbers of the other changes stay the same.
        """
        import torch

        height, width = images.shape[2:]
        draws = torch.rand(7, len(images), dtype=torch.float32, device=images.device)
        # Six numbers from -1 to 1. The seventh, for the flip, stays a number from 0 to 1.
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
        """Return images (N, C, H, W), flipped, rotated, scaled and moved."""
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
        import torch

        shape = tuple(getattr(target, "shape", ()))
        is_mask = len(shape) in (3, 4) and shape[0] == len(images)
        if not is_mask or shape[-2:] != tuple(images.shape[2:]):
            return target
        # `_move` fills the border with 0. So subtract `fill` before, and add it afterwards.
        # A tensor on the host, so nothing is copied from the device.
        kept = torch.tensor(self.fill, device="cpu").to(target.dtype).item()
        if kept != self.fill:
            kind = str(target.dtype).removeprefix("torch.")
            raise InvalidValueError(
                f"fill={self.fill} is no class number of {kind} masks: it would become {kept}",
                fix="pass masks.to(torch.int16), or another fill",
            )
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
        # Without names, the labels must at least have the largest column of `swap_labels`.
        if not columns:
            columns = max([max(opposites) + 1, *shape[1:]])
        if shape != (len(flipped), columns):
            raise InvalidValueError(
                f"with swap_labels={self.swap_labels!r}, the shape of the labels must be "
                f"({len(flipped)}, {columns}), got {type(labels).__name__} {shape}",
                fix="pass the labels of these images, one column per label; "
                "class numbers cannot be swapped",
            )
        # Not labels[:, order], because the list `order` would be copied to the device in each step.
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

    It interpolates linearly between pixels, first along rows and then along columns; pixels from
    outside the image are 0. The result is as sharp as that of `grid_sample`. For rotations of up to
    10 degrees, the two results differ by 0.1 grey levels on average in smooth images, and by 1.6 in
    pure noise.

    Args:
        images: (N, C, H, W) of any dtype.
        turn: (N,) float32, radians, counter-clockwise, -pi / 4 to pi / 4.
        zoom: (N,) float32, above 0; 2 makes objects twice as large.
        right: (N,) float32, shift to the right in pixels.
        down: (N,) float32, downward shift in pixels.
        nearest: True uses the nearest pixel, for whole class numbers from -256 to 256.

    Returns:
        (N, C, H, W) float32.
    """
    import torch

    turn, zoom, right, down = (number.view(-1, 1, 1) for number in (turn, zoom, right, down))
    height, width = images.shape[2:]
    # Coordinates of pixels, with 0 at the centre of the image.
    rows = torch.arange(height, dtype=torch.float32, device=images.device) - (height - 1) / 2
    columns = torch.arange(width, dtype=torch.float32, device=images.device) - (width - 1) / 2
    x = columns - right
    y = rows - down
    # The new pixel at (x, y) shows the image at ((x cos - y sin) / zoom, (x sin + y cos) / zoom).
    # In a given row of the image, the column to read depends on x alone. So first each row is
    # resampled with its own columns, and then each column of the result with its own rows.
    column_read = x / (zoom * turn.cos()) - turn.tan() * rows.view(-1, 1)
    row_read = (y * turn.cos() + x.transpose(1, 2) * turn.sin()) / zoom
    images = _read(images.float(), column_read, nearest)
    images = _read(images.transpose(2, 3), row_read, nearest)
    return images.transpose(2, 3)


def _read(rows, places, nearest=False):
    """Resample rows (N, C, R, S) at places (N, R, T); return (N, C, R, T).

    A place is a distance in pixels from the centre of a row. All channels use the same places.
    """
    centre = (rows.shape[3] - 1) / 2
    if nearest:
        places = (places + centre).round() - centre
    # Round places to 1/128 pixel. Then bytes and weights are exact in bfloat16 (whole numbers up to
    # 256, multiples of 1/128 up to 1), the weights sum to 1, and an unmoved image is unchanged.
    places = (places * _STEPS_PER_PIXEL).round() / _STEPS_PER_PIXEL + centre
    if rows.device.type == "xla":
        return _multiply(rows, places)
    return _gather(rows, places)


def _multiply(rows, places):
    """Resample each row by a product with its own matrix (S, T), which has two weights per column.

    This is fast only if a compiler computes the matrices inside the product, as XLA does on a TPU.
    """
    import torch

    pixels = torch.arange(rows.shape[3], dtype=torch.float32, device=rows.device)
    weights = (1 - (places.unsqueeze(2) - pixels.unsqueeze(1)).abs()).clamp(min=0)
    # Multiply by the weights from the right: from the left, the product takes six times the cycles.
    return (rows.transpose(1, 2) @ weights).transpose(1, 2)


def _gather(rows, places):
    """Resample rows like `_multiply`, but read only the two pixels next to each place."""
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
    """Raise ValueError unless `scale` is None or a valid pair (smallest, largest)."""
    if scale is None:
        return
    is_pair = isinstance(scale, Sequence) and len(scale) == 2
    if is_pair and all(map(_is_number, scale)):
        smallest, largest = scale
        if 0.5 <= smallest <= largest <= 1.5:
            return
    raise InvalidValueError(
        f"scale must be (smallest, largest) from 0.5 to 1.5, or None (off), got {scale!r}",
        fix="for images 0.9 to 1.1 times as large: scale=(0.9, 1.1)",
    )


def _check_images(images) -> None:
    """Raise ValueError unless the images are an (N, C, H, W) batch of uint8 or floats."""
    import torch

    kind = type(images).__name__
    shape = tuple(getattr(images, "shape", ()))
    found = f"{kind} {shape} {getattr(images, 'dtype', '')}"
    is_batch = isinstance(images, torch.Tensor) and images.ndim == 4
    # Images have at most 4 channels: (N, 224, 224, 3) has its channels in the wrong position.
    are_channels_last = is_batch and shape[3] <= 4 < shape[1]
    if not is_batch or are_channels_last:
        raise InvalidValueError(
            f"augment takes (N, C, H, W) tensors, got {found}",
            fix="if the batch is (N, H, W, C), pass images.permute(0, 3, 1, 2)",
        )
    # Two uint8 channels are the low and the high byte of 16-bit pixels. Interpolating the bytes
    # separately would give wrong values.
    if images.dtype == torch.uint8 and shape[1] == 2:
        raise InvalidValueError(
            "augment cannot interpolate pixels of two bytes: it would mix low and high bytes",
            found=f"{found}, as pack_dicom(form='int16') and PackOptions(mode='I;16') make them",
            fix="turn the bytes of a batch into values first; for form='int16': "
            "Augment(...)((pe.hounsfield(images) + 1024) / 4096, labels); for mode='I;16': "
            "Augment(...)(tpukit.datasets.uint16_values(images) / 65535, labels)",
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise InvalidValueError(
            f"augment takes uint8 in [0, 255] or floats in [0, 1], got {found}",
            fix="for values in [0, 255] pass images.to(torch.uint8); for values in [0, 4095] pass "
            "images / 4095",
        )


def _opposites(swap_labels, names) -> dict[int, int]:
    """Return {column: its opposite column} for the labels that a flip exchanges.

    For example, the result for ((6, 8),) is {6: 8, 8: 6}.

    Raises:
        ValueError: `swap_labels` does not consist of pairs of different labels, or `names` lacks a
            label.
    """
    opposites = {}
    for pair in swap_labels:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise InvalidValueError(
                f"swap_labels must be pairs of labels, got {swap_labels!r}",
                fix="swap_labels=((one, other),), with a comma after a single pair",
            )
        # Convert names to column numbers. A text that is left is not in `names`.
        columns = [names.index(label) if label in names else label for label in pair]
        for label in columns:
            if isinstance(label, str) or not 0 <= label < (len(names) or math.inf):
                raise InvalidValueError(
                    f"swap_labels={swap_labels!r}, but there is no label {label!r}; "
                    f"names={list(names)!r}",
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
