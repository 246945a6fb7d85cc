"""Draw rooms with one object in them, and with each the object's mask and the depth of every pixel."""

import math

_NEAR, _FAR = 1.0, 6.0  # metres from the camera: the lower edge of the image, and the wall


class Scenes:
    """A dataset of drawn scenes, the same for the same seed; nothing is stored, each scene is drawn when asked for.

    A floor runs from the camera to a wall, and one object (a ball, a box or a cone) stands on it: the farther away, the
    smaller and the higher in the image. So the depth can be told from one image, as in a photograph.

    An item is `(image, {"mask": mask, "depth": depth})`: (3, size, size) uint8 in [0, 255]; (1, size, size) uint8, 1
    where the object is; (1, size, size) uint8, 0 at the camera's feet and 255 at the wall.

    Args:
        count: scenes; at least 1.
        size: pixels, a multiple of 32 for `ResNetUNet`.
        seed: scenes of another seed are others.

    Raises:
        ValueError: count or size is out of range.
    """

    def __init__(self, count: int, *, size: int = 96, seed: int = 0):
        if count < 1 or size < 32:
            raise ValueError(
                f"Scenes draws at least one scene of at least 32 pixels, got {count=} and {size=}\n"
                "  fix:   Scenes(1000, size=96)"
            )
        self.count, self.size, self.seed = count, size, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple:
        import numpy
        import torch

        if not 0 <= index < self.count:
            raise IndexError(f"scene {index} of {self.count}")
        image, mask, depth = draw(numpy.random.default_rng((self.seed, int(index))), self.size)
        targets = {"mask": torch.from_numpy(mask[None]), "depth": torch.from_numpy(depth[None])}
        return torch.from_numpy(image), targets


def draw(random, size: int) -> tuple:
    """Return the image (3, size, size), the mask and the depth (size, size) of one scene, all uint8.

    Args:
        random: a numpy.random.Generator.
        size: pixels.
    """
    import numpy

    y, x = numpy.mgrid[0:size, 0:size].astype("float32") / size
    horizon = random.uniform(0.25, 0.45)  # where floor and wall meet
    # On a floor the depth falls as 1 / (height in the image): set so that it is _FAR at the wall and _NEAR below.
    vanishing = (_FAR * horizon - _NEAR) / (_FAR - _NEAR)
    floor = (horizon - vanishing) * _FAR / numpy.maximum(y - vanishing, 1e-6)
    depth = numpy.minimum(floor, _FAR)
    tiles = numpy.floor(4 * depth) + numpy.floor(4 * (x - 0.5) * depth)
    below = y > horizon
    pattern = numpy.where(below, tiles % 2, numpy.floor(x * random.integers(4, 12)) % 2)
    colours = random.uniform(60, 200, (3, 3)).astype("float32")  # floor, wall, object
    image = numpy.where(below, colours[0, :, None, None], colours[1, :, None, None]) + 18 * pattern

    far = random.uniform(1.2, 4.0)  # metres
    foot = vanishing + (horizon - vanishing) * _FAR / far
    height, width = random.uniform(0.5, 0.9) / far, random.uniform(0.45, 0.8) / far
    middle = random.uniform(0.2, 0.8)
    across, up = (x - middle) / (width / 2), (foot - y) / height  # -1 to 1 over its width, 0 to 1 from foot to top
    shadow = ((x - middle - 0.2 * width) / (0.7 * width)) ** 2 + ((y - foot) / (0.15 * height)) ** 2 < 1
    image = image * numpy.where(shadow & below, 0.55, 1.0)
    shape = random.integers(3)
    if shape == 0:
        inside = across**2 + (2 * up - 1) ** 2 < 1
    elif shape == 1:
        inside = (abs(across) < 0.9) & (up > 0) & (up < 1)
    else:
        inside = (abs(across) < 1 - up) & (up > 0)
    light = 1.15 - 0.45 * (across + 1) / 2 + 0.1 * numpy.sin(random.uniform(4, 20) * math.pi * up)
    image = numpy.where(inside, colours[2, :, None, None] * light, image)
    depth = numpy.where(inside, far, depth)

    noise = random.normal(0, 6, image.shape)
    nearness = 255 * (depth - _NEAR) / (_FAR - _NEAR)
    return tuple(numpy.clip(part, 0, 255).astype("uint8") for part in (image + noise, inside, nearness))
