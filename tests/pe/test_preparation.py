"""How images were prepared stays with the network: kept, read back, and asked for again."""

import json

import pytest

pytest.importorskip("pydicom")
pytest.importorskip("array_record")

import tpukit  # noqa: E402
from tpukit import pe  # noqa: E402
from tpukit.datasets import CachedImages, PackedImages  # noqa: E402

QUIET = {"progress": "off"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with slices, and a pack of them with everything other than by default."""
    folder = pe.phantom(tmp_path_factory.mktemp("drawn"), 2, 3, size=48, form="dicom", **QUIET)
    options = {
        "size": 32,
        "window": "embolism",
        "crop": "lungs",
        "options": tpukit.PackOptions(quality=70),
    }
    return folder, pe.pack_dicom(folder / "train", folder / "records", **options, **QUIET)


def test_all_that_decides_the_pixels_is_kept_and_packs_other_slices_the_same(made, tmp_path):
    folder, records = made
    kept = pe.Preparation.of(PackedImages(records.folder, size=16))
    assert (kept.size, kept.window, kept.crop, kept.form, kept.quality) == (
        32,
        (100, 700),
        "lungs",
        "jpeg",
        70,
    )
    assert (kept.image_size, kept.orientation, len(kept.mean)) == (16, "upright", 3)
    again = pe.Preparation.read(json.loads(json.dumps(kept.as_dict())))
    assert again == kept
    other = again.pack(folder / "train", tmp_path / "other", **QUIET)
    assert other.read(range(6)) == records.read(range(6))
    again.check(PackedImages(other.folder, size=16))


def test_images_that_are_not_square_keep_height_and_width(made):
    records = made[1]
    kept = pe.Preparation.of(PackedImages(records.folder, size=(16, 24)))
    assert kept.image_size == (16, 24)
    assert pe.Preparation.read(json.loads(json.dumps(kept.as_dict()))) == kept
    with pytest.raises(ValueError, match=r"image_size \(16, 24\), here 16\n.* size=\(16, 24\)\)"):
        kept.check(PackedImages(records.folder, size=16))
    kept.check(PackedImages(records.folder, size=(16, 24)))  # the fix


def test_a_cache_says_what_its_records_say(made, tmp_path):
    records = made[1]
    cache = tpukit.cached_images(records, folder=tmp_path / "cache", size=16, **QUIET)
    assert pe.Preparation.of(cache) == pe.Preparation.of(PackedImages(records.folder, size=16))
    assert pe.Preparation.of(CachedImages(cache.folder)) == pe.Preparation.of(cache)


def test_a_network_that_is_asked_about_images_prepared_otherwise_refuses(made, tmp_path):
    folder, records = made
    whole = pe.pack_dicom(
        folder / "train",
        tmp_path / "whole",
        size=32,
        window="embolism",
        options=tpukit.PackOptions(quality=70),
        **QUIET,
    )
    trained = pe.Preparation.of(PackedImages(records.folder, size=16))
    with pytest.raises(
        ValueError,
        match=r"prepared in another way than .*\n  found: crop lungs, here None\n  fix: .*again: ",
    ):
        trained.check(PackedImages(whole.folder, size=16))
    with pytest.raises(ValueError, match=r"found: image_size 16, here 32\n.* size=16\)"):
        trained.check(records)
    trained.check(
        PackedImages(trained.pack(folder / "train", tmp_path / "mended", **QUIET).folder, size=16)
    )  # the fix


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"gamma": 2}, "unknown: gamma; missing: none"),
        ({"crop": ...}, "unknown: none; missing: crop"),
        ({"orientation": "as stored"}, "orientation as stored, here upright"),
        ({"mean": [0.5, 0.5, 0.5]}, "mean .0.5, 0.5, 0.5., here .0.485"),
    ],
)
def test_settings_that_this_kit_cannot_follow_are_refused(made, change, found):
    values = {**pe.Preparation.of(made[1]).as_dict(), **change}
    with pytest.raises(ValueError, match=f"found: {found}"):
        pe.Preparation.read({key: value for key, value in values.items() if value is not ...})


def test_images_of_another_pack_have_no_preparation(tmp_path):
    import numpy

    from tpukit import pack

    records = pack(
        [(numpy.zeros((8, 8, 3), "uint8"), 0), (numpy.ones((8, 8, 3), "uint8"), 1)],
        tmp_path / "p",
        **QUIET,
    )
    with pytest.raises(
        ValueError, match="does not record how its images were made from DICOM slices"
    ):
        pe.Preparation.of(records)


def test_images_that_are_put_together_are_no_preparation():
    with pytest.raises(ValueError, match="does not describe object"):
        pe.Preparation.of(object())
