"""Save how the training images of a network were prepared, to prepare other images alike.

preparation = Preparation.of(images)         # at the end of training
json.dump(preparation.as_dict(), file)
Preparation.read(json.load(file)).pack(...)  # packs other slices with the same settings
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from tpukit.datasets import PackOptions
from tpukit.essentials.display import InvalidValueError
from tpukit.pe.dicom_packing import pack_dicom
from tpukit.pe.model import MEAN, STD

# Settings that no argument of tpukit changes. They are saved for other versions of tpukit.
_FIXED = {"orientation": "upright", "mean": MEAN, "std": STD}


@dataclass(frozen=True)
class Preparation:
    """All settings that, together with the slice, determine the pixels of an image.

    A network works only on images that are prepared like those in its training.

    Attributes:
        size, window, crop, form, quality: as for `pack_dicom`; the window as (level, width).
        image_size: the size in pixels to which the images of the pack are decoded: one number for
            square images, else (height, width).
        orientation: "upright", because `pack_dicom` turns images upright.
        mean, std: the constants of `normalize`, one number per channel.
    """

    size: int
    window: tuple[float, float] | None
    crop: str | None
    form: str
    quality: int | None
    image_size: int | tuple[int, int]
    orientation: str = _FIXED["orientation"]
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD

    @classmethod
    def of(cls, images) -> "Preparation":
        """Return the preparation of a pack that `pack_dicom` made, or of a cache of this pack.

        Raises:
            ValueError: `pack_dicom` did not make the images; or an earlier version of tpukit made
                the cache, and did not record the preparation.
        """
        made = getattr(images, "made", {})
        if not hasattr(images, "made"):
            raise InvalidValueError(
                f"a Preparation does not describe {type(images).__name__}",
                found="only PackedImages and CachedImages record how they were made",
                fix="pass the PackedImages or CachedImages from which your dataset reads",
            )
        if "pixels" not in made:  # only the packs of `pack_dicom` have this entry
            raise InvalidValueError(
                f"{images.folder} does not record how its images were made from DICOM slices",
                found=made
                or "no settings: the pack was made by `pack`, or by an earlier version of tpukit",
                fix="pass the PackedImages of pack_dicom; "
                "if you passed CachedImages, delete the cache and build it again",
            )
        window = made["window"]
        height, width, _ = images.shape
        return cls(
            size=made["pixels"],
            window=tuple(window) if window else window,
            crop=made.get("crop"),
            form=made.get("form"),
            quality=made.get("quality"),
            image_size=height if height == width else (height, width),
        )

    @classmethod
    def read(cls, values: Mapping) -> "Preparation":
        """Return the preparation with these values, which were saved with a network.

        Args:
            values: the result of `as_dict`, also after a round trip through JSON.

        Raises:
            ValueError: a name is unknown or missing, or this version of tpukit does not support a
                value.
        """
        names = [field.name for field in fields(cls)]
        unknown = [name for name in values if name not in names]
        missing = [name for name in names if name not in values]
        if unknown or missing:
            raise InvalidValueError(
                "these are not the settings of a Preparation",
                found=f"unknown: {_listed(unknown)}; missing: {_listed(missing)}",
                fix="read the settings with the version of tpukit that saved them",
            )
        read = {}
        for name, value in values.items():
            # JSON turns tuples into lists, which are not equal to the tuples of `_FIXED`.
            read[name] = tuple(value) if isinstance(value, list) else value
        # `pack` has no arguments for these settings, so other values are not supported.
        differences = _differences({name: read[name] for name in _FIXED}, _FIXED)
        if differences:
            raise InvalidValueError(
                "this version of tpukit does not support these settings of a Preparation",
                found=differences,
                fix="use the version of tpukit that wrote these settings",
            )
        return cls(**read)

    def as_dict(self) -> dict:
        """Return all fields as values that JSON supports, for `read`."""
        values = {}
        for name, value in asdict(self).items():
            values[name] = list(value) if isinstance(value, tuple) else value
        return values

    def pack(self, folder, to, labels=None, **options):
        """Pack other slices with these settings, to be read as `PackedImages(to, size=image_size)`.

        Args:
            folder, to, labels: as for `pack_dicom`.
            options: other arguments of `pack_dicom`; `quality` of its PackOptions is replaced.

        Returns:
            The `PackedImages` that `pack_dicom` returns, with images of the packed size.
        """
        prepared = {name: getattr(self, name) for name in ("size", "window", "crop", "form")}
        own = options.pop("options", PackOptions())
        prepared["options"] = replace(own, quality=self.quality)
        return pack_dicom(folder, to, labels, **prepared, **options)

    def check(self, images) -> None:
        """Raise ValueError with the differences if images were prepared in another way."""
        given = Preparation.of(images)
        differences = _differences(asdict(self), asdict(given))
        if differences:
            fix = "pack the DICOM files of these images again: preparation.pack(folder, to)"
            if replace(given, image_size=self.image_size) == self:
                fix = f"decode the pack to this size: PackedImages(folder, size={self.image_size})"
            raise InvalidValueError(
                f"the images of {images.folder} were prepared in another way than the images on "
                "which the network was trained",
                found=differences,
                fix=fix,
            )


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _differences(trained: Mapping, given: Mapping) -> str:
    """Return the differences of two preparations in words; "" if they are equal."""
    differing = [name for name in trained if trained[name] != given[name]]
    return "; ".join(f"{name} {trained[name]}, here {given[name]}" for name in differing)
