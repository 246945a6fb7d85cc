"""How slices became the images that a network was trained on: a part of the network, kept with its weights."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from tpukit.essentials.show import WrongValue
from tpukit.pe.dicom_packing import pack_dicom
from tpukit.pe.model import MEAN, STD

_OURS = {"orientation": "upright", "mean": MEAN, "std": STD}  # what this kit does; no argument changes them


@dataclass(frozen=True)
class Preparation:
    """What decides the pixels that a network sees, beside the slice: as much a part of it as its weights.

    Kept with the weights as JSON, `preparation.as_dict()`; `Preparation.read(values)` gives it back.

    Attributes:
        size, window, crop, form, quality: as for `pack_dicom`; a window by its level and width.
        image_size: height and width in pixels at which the pack is decoded.
        orientation: "upright", as `pack_dicom` turns images.
        mean, std: of `normalize`.
    """

    size: int
    window: tuple[float, float] | None
    crop: str | None
    form: str
    quality: int | None
    image_size: int
    orientation: str = _OURS["orientation"]
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD

    @classmethod
    def of(cls, images) -> "Preparation":
        """Say how images were prepared: `Records` of `pack_dicom`, or their `Cache`.

        Raises:
            ValueError: they are of another pack, or of a cache from before this was kept.
        """
        made = images.made
        if "pixels" not in made:
            raise WrongValue(
                f"{images.folder} does not say how its images were made of DICOM slices",
                found=made or "nothing: it is of another pack, or a cache from before this was kept",
                fix="pass the Records of pack_dicom; or delete the cache, and build it again",
            )
        window = made["window"] and tuple(made["window"])
        rest = {name: made.get(name) for name in ("crop", "form", "quality")}
        return cls(size=made["pixels"], window=window, **rest, image_size=images.shape[0])

    @classmethod
    def read(cls, values: Mapping) -> "Preparation":
        """Return what was kept with a network.

        Raises:
            ValueError: a value is unknown, is missing, or is one that this kit does not prepare images by.
        """
        known = [field.name for field in fields(cls)]
        unknown, missing = [key for key in values if key not in known], [key for key in known if key not in values]
        if unknown or missing:
            raise WrongValue(
                "these are not the settings that this kit prepares images by",
                found=f"unknown: {', '.join(unknown) or 'none'}; missing: {', '.join(missing) or 'none'}",
                fix="take the settings.json that was written with these weights, and the kit that wrote it",
            )
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        if other := _differences({key: values[key] for key in _OURS}, _OURS):
            raise WrongValue(
                "the network was trained on images that this kit does not prepare so",
                found=other,
                fix="take the kit that wrote these settings",
            )
        return cls(**values)

    def as_dict(self) -> dict:
        """Return all of it, as JSON can carry it."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def pack(self, folder, to, labels=None, **options):
        """Pack other slices in the same way: `pack_dicom`, with what else it takes in `options`."""
        asked = {name: getattr(self, name) for name in ("size", "window", "crop", "form")}
        asked |= {} if self.quality is None else {"quality": self.quality}
        return pack_dicom(folder, to, labels, **asked, **options)

    def check(self, images) -> None:
        """Raise ValueError where images were prepared otherwise, and say in what."""
        if other := _differences(asdict(self), asdict(Preparation.of(images))):
            raise WrongValue(
                f"the network was trained on images that were prepared otherwise than those of {images.folder}",
                found=other,
                fix="pack them with Preparation.pack, as the network knows them; or train the network anew",
            )


def _differences(trained: Mapping, given: Mapping) -> str:
    """Say in what two preparations differ, "" where in nothing."""
    differ = [key for key in trained if trained[key] != given[key]]
    return "; ".join(f"{key} {trained[key]}, here {given[key]}" for key in differ)
