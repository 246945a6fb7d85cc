"""Change the images of a batch at random, on the device: moved, scaled, turned, in another light, mirrored.

A turned image is read between its pixels. `torch.nn.functional.grid_sample` does that, but torch_xla 2.9 cannot lower
it: each call brings the batch to the host and back (its counter `aten::grid_sampler_2d`). Here every row is read along
itself and then every column, as Catmull and Smith turned images in 1980 ("3-D transformations of images in scanline
order"), and on a TPU each is read by a product with a matrix of its own. The compiler works these matrices out inside
the product and stores none. For 128 images of 128 x 128 it estimates 0.94 M cycles, a sixteenth of ResNet-34's step
(libtpu 0.0.42, v5e; not yet compared with a chip). Gathering the pixels would be 25 million reads of one number each,
for which it has no estimate: at one a cycle, more than that whole step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

_RANGES = {
    "shift": (0.5, "a share of the image, 0.06 is up to 8 of 128 pixels"),
    "scale": (0.5, "a share, 0.1 is 0.9 to 1.1 times as large"),
    "rotate": (45, "degrees to either side, 10 for instance"),  # read along rows: beyond 45 they lie too steep
    "intensity": (1, "a share, 0.1 is up to 10 % more or less"),
    "flip": (1, "a chance, 0.5 flips every other image"),
}


@dataclass(frozen=True)
class Augment:
    """Change every image of a batch by numbers of its own: `images, labels = augment(images, labels)`.

    A flip makes left right, in the labels too where `swap` says which. Without it, a label that names a side is wrong
    on every flipped image, and nothing can tell: so `flip` is off until it is asked for.

    Call it inside the step, on bytes, before they are normalised. The numbers are uniform, drawn on the device, which
    `launch(seed=...)` seeds, each core with its own; nothing in the graph changes, so it is compiled once.

    Attributes:
        shift: how far the picture moves, as a share of its height and width, 0 (off) to 0.5.
        scale: how much larger or smaller it gets, as a share, 0 (off) to 0.5.
        rotate: how far it turns to either side, in degrees, 0 (off) to 45.
        intensity: how much brightness changes, as a share of white, and contrast about mid-grey, as a share of itself,
            0 (off) to 1. It is what another level and width of a CT window do.
        flip: the chance of a left-right flip, 0 (off) to 1.
        swap: pairs of labels that change places in a flip: columns, or names if `names` are given.
        names: of the labels, in the order of their columns.

    Raises:
        ValueError: a number is out of its range, or `swap` is no pairs of different labels.
    """

    shift: float = 0.06
    scale: float = 0.1
    rotate: float = 10.0
    intensity: float = 0.1
    flip: float = 0.0
    swap: Sequence[tuple[int | str, int | str]] = ()
    names: Sequence[str] = ()

    def __post_init__(self):
        for name, (most, meaning) in _RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= most:
                raise ValueError(f"{name} is 0 (off) to {most}, got {value!r}\n  fix: it is {meaning}")
        _opposites(self.swap, self.names)

    def __call__(self, images, labels):
        """Return the images and their labels, changed; the given ones stay as they are.

        What comes into the picture from outside is 0, which is what a scanner writes outside its field of view. Bytes
        are rounded and stay in [0, 255]; floats are not clamped. It is computed in float32 whatever autocast says, on
        a TPU to within a grey level, and no gradient is recorded.

        Args:
            images: (N, C, H, W) uint8 in [0, 255], or of a float dtype in [0, 1].
            labels: (N, L) of any dtype; where nothing is swapped, anything.

        Returns:
            A tuple of both, of the same shapes and dtypes, on the same device.

        Raises:
            ValueError: images or labels have another shape or dtype.
        """
        import torch

        _check(images)
        in_bytes, (height, width) = images.dtype == torch.uint8, images.shape[2:]
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            # All are drawn, used or not: to switch one off leaves the others as they were.
            draws = torch.rand(7, len(images), dtype=torch.float32, device=images.device)
            turn, zoom, right, down, contrast, brightness = 2 * draws[:6] - 1
            flipped = draws[6] < self.flip
            if self.flip:
                labels = self._swapped(labels, flipped)
                images = torch.where(flipped.view(-1, 1, 1, 1), images.flip(3), images)
            changed = images
            if self.shift or self.scale or self.rotate:
                changed = warp(
                    images,
                    turn=math.radians(self.rotate) * turn,
                    zoom=1 + self.scale * zoom,
                    right=self.shift * width * right,
                    down=self.shift * height * down,
                )
            if self.intensity:  # last: outside and the image's own black stay the same grey
                white = 255 if in_bytes else 1
                contrast, brightness = (self.intensity * draw.view(-1, 1, 1, 1) for draw in (contrast, brightness))
                changed = (changed.float() - white / 2) * (1 + contrast) + white * (0.5 + brightness)
            if in_bytes and changed.is_floating_point():
                changed = changed.round().clamp(0, 255)
            return changed.to(images.dtype), labels

    def _swapped(self, labels, flipped):
        """Return the labels with sides exchanged in the rows that are flipped."""
        import torch

        opposites = _opposites(self.swap, self.names)
        if not opposites:
            return labels
        shape = tuple(getattr(labels, "shape", ()))
        columns = len(self.names) or max([max(opposites) + 1, *shape[1:]])
        if shape != (len(flipped), columns):
            raise ValueError(
                f"labels that swap={self.swap!r} changes are (N, L), here ({len(flipped)}, {columns}), "
                f"got {type(labels).__name__} {shape}\n"
                "  fix: pass the labels of these images, one column a label; class numbers cannot be swapped"
            )
        # Columns and not labels[:, order]: a list of numbers would be sent to the device in every step.
        mirrored = torch.stack([labels[:, opposites.get(column, column)] for column in range(columns)], dim=1)
        return torch.where(flipped.view(-1, 1), mirrored, labels)


def warp(images, *, turn, zoom, right, down):
    """Turn, scale and move every image about its middle, by numbers of its own.

    Linear between pixels, along rows and then along columns, and 0 outside. As sharp as what `grid_sample` makes of it
    and, at turns of up to 10 degrees, off it by 0.1 grey levels in the mean of smooth images, by 1.6 of pure noise.

    Args:
        images: (N, C, H, W) of any dtype.
        turn: (N,) float32, radians, counter-clockwise, within a quarter of pi.
        zoom: (N,) float32, above 0; 2 makes objects twice as large.
        right: (N,) float32, pixels.
        down: (N,) float32, pixels.

    Returns:
        (N, C, H, W) float32.
    """
    import torch

    turn, zoom, right, down = (number.view(-1, 1, 1) for number in (turn, zoom, right, down))
    height, width = images.shape[2:]
    rows = torch.arange(height, dtype=torch.float32, device=images.device) - (height - 1) / 2
    columns = torch.arange(width, dtype=torch.float32, device=images.device) - (width - 1) / 2
    x, y = columns - right, rows - down
    # The pixel at (x, y) shows the image at ((x cos - y sin) / zoom, (x sin + y cos) / zoom). Given that row of the
    # image, the column is a matter of x alone: so every row can be read for itself, and then every column.
    images = _read(images.float(), x / (zoom * turn.cos()) - turn.tan() * rows.view(-1, 1))
    images = _read(images.transpose(2, 3), (y * turn.cos() + x.transpose(1, 2) * turn.sin()) / zoom)
    return images.transpose(2, 3)


def _read(rows, places):
    """Read (N, C, R, S) rows at (N, R, T) places, counted from their middle: (N, C, R, T)."""
    # A TPU rounds the factors of a product to bfloat16. It holds whole numbers to 256 and 128ths to 1: bytes are read
    # with exact weights whose sum is 1, and what does not move stays the same to the last bit.
    places = (places * 128).round() / 128 + (rows.shape[3] - 1) / 2
    return _multiply(rows, places) if rows.device.type == "xla" else _gather(rows, places)


def _multiply(rows, places):
    """Read by a matrix a row: S x T weights of which a column has two; only a compiler can afford it."""
    import torch

    pixels = torch.arange(rows.shape[3], dtype=torch.float32, device=rows.device)
    weights = (1 - (places.unsqueeze(2) - pixels.unsqueeze(1)).abs()).clamp(min=0)
    # In this order: weights on the left, the same product takes six times as many cycles.
    return (rows.transpose(1, 2) @ weights).transpose(1, 2)


def _gather(rows, places):
    """Read the two neighbours of every place: the same numbers, with less work where gathering is cheap."""
    import torch

    size = rows.shape[3]
    rows = torch.nn.functional.pad(rows, (1, 1))  # the 0 on either side
    places = (places.clamp(-1, size) + 1).unsqueeze(1)
    left = places.floor().clamp(max=size)
    index = left.long().expand(-1, rows.shape[1], -1, -1)
    return torch.lerp(rows.gather(3, index), rows.gather(3, index + 1), places - left)


def _check(images) -> None:
    """Raise ValueError if the images are no (N, C, H, W) batch of bytes or floats."""
    import torch

    found = f"{type(images).__name__} {tuple(getattr(images, 'shape', ()))} {getattr(images, 'dtype', '')}"
    if not isinstance(images, torch.Tensor) or images.ndim != 4 or images.shape[3] <= 4 < images.shape[1]:
        raise ValueError(
            f"augment takes (N, C, H, W) tensors, got {found}\n"
            "  fix: if the batch is (N, H, W, C), pass images.permute(0, 3, 1, 2)"
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise ValueError(
            f"augment takes uint8 in [0, 255] or floats in [0, 1], got {found}\n"
            "  fix: pass images.to(torch.uint8), if they are bytes"
        )


def _opposites(swap, names) -> dict[int, int]:
    """Map the column of every label that is swapped to that of its opposite; ValueError if `swap` is no such pairs."""
    opposites = {}
    for pair in swap:
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise ValueError(
                f"swap is pairs of labels, got {swap!r}\n  fix: swap=((one, other),), with a comma after a single pair"
            )
        columns = [list(names).index(label) if label in names else label for label in pair]
        for label in columns:
            if isinstance(label, str) or not 0 <= label < (len(names) or math.inf):
                raise ValueError(
                    f"swap={swap!r} has no column for {label!r}; names={names!r}\n"
                    "  fix: columns count from 0; for labels by name pass names=, all, in the order of the columns"
                )
        one, other = columns
        if one == other or opposites.keys() & {one, other}:
            raise ValueError(f"swap={swap!r} has a label twice\n  fix: every label is in one pair at most")
        opposites |= {one: other, other: one}
    return opposites
