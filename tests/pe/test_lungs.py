"""The box around the lungs, and slices that are packed as what is in it."""

import shutil

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")
pydicom = pytest.importorskip("pydicom")
pytest.importorskip("scipy")
pytest.importorskip("array_record")

from tpukit.datasets import PackOptions  # noqa: E402
from tpukit.pe import hounsfield, lung_box, pack_dicom, phantom, read_dicom  # noqa: E402

QUIET = {"progress": "off"}
MARGIN = 1 / 64


def chest(height=100, width=80, lungs=((20, 60, 10, 35), (30, 70, 45, 70)), windpipe=True):
    """A body of water in air, with lungs as (top, bottom, left, right), and a windpipe."""
    slice_ = np.full((height, width), -1000.0)
    slice_[10:-10, 5:-5] = 40
    for top, bottom, left, right in lungs:
        slice_[top:bottom, left:right] = -800
    if windpipe:
        slice_[12:17, 38:43] = -1000
    return slice_


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three studies of five slices of 64 pixels."""
    return phantom(
        tmp_path_factory.mktemp("phantom"), 3, 5, size=64, form="dicom", workers=2, progress="off"
    )


def units(records):
    return hounsfield(torch.stack([image for image, _ in records]))[:, 0].numpy()


def expected(folder, records):
    """What each record should hold: its slice, cut to the box of its series."""
    paths = [folder / records.name(number) for number in range(len(records))]
    series = {path.parent for path in paths}
    boxes = {one: lung_box([read_dicom(path) for path in sorted(one.iterdir())]) for one in series}
    assert all(box and box[2] - box[0] > 0.5 and box[3] - box[1] < 0.9 for box in boxes.values())
    pixels = [np.multiply(boxes[path.parent], 64).tolist() for path in paths]
    cut = [
        Image.fromarray(read_dicom(path)).resize((32, 32), Image.Resampling.BILINEAR, box=box)
        for path, box in zip(paths, pixels, strict=True)
    ]
    return np.rint(np.stack(cut))


def test_it_holds_the_lungs_of_all_slices_and_not_the_windpipe_or_the_air_outside():
    above = chest(lungs=[(40, 80, 15, 35), (40, 60, 45, 65)])
    assert lung_box([chest(), above]) == pytest.approx(
        (10 / 80 - MARGIN, 0.2 - MARGIN, 70 / 80 + MARGIN, 0.8 + MARGIN)
    )
    large = [
        np.kron(slice_, np.ones((6, 6))) for slice_ in (chest(), above)
    ]  # looked at in every fourth pixel
    assert lung_box(np.stack(large)) == pytest.approx(lung_box([chest(), above]), abs=0.02)


@pytest.mark.parametrize(
    "slices",
    [
        [],
        [chest(lungs=[])],
        [chest(lungs=[(20, 60, 10, 35)])],
        [np.full((64, 64), -1000.0)],
        [np.full((64, 64), 40.0)],
    ],
    ids=["no slice", "a windpipe alone", "one lung", "air alone", "no air"],
)
def test_where_no_two_lungs_are_there_is_no_box(slices):
    assert lung_box(slices) is None


def test_what_is_no_slice_is_refused():
    with pytest.raises(
        ValueError, match=r"takes \(H, W\) slices in Hounsfield units, got shape \(64,\)\n  fix:"
    ):
        lung_box(chest()[:64, :64])


def test_every_slice_of_a_series_is_cut_to_the_one_box_of_its_series(made, tmp_path):
    records = pack_dicom(
        made / "train", tmp_path / "records", form="int16", size=32, crop="lungs", **QUIET
    )
    assert np.array_equal(units(records), expected(made / "train", records))
    windows = pack_dicom(
        made / "train",
        tmp_path / "windows",
        size=32,
        crop="lungs",
        options=PackOptions(quality=95),
        **QUIET,
    )
    whole = pack_dicom(
        made / "train", tmp_path / "whole", size=32, options=PackOptions(quality=95), **QUIET
    )
    lungs = [np.mean([image[0].float().mean() for image, _ in one]) for one in (windows, whole)]
    assert (
        lungs[0] > 1.15 * lungs[1]
    )  # in the lung window there is less of the black air around the body
    neighbours = pack_dicom(
        made / "train", tmp_path / "beside", size=32, crop="lungs", window="lung", **QUIET
    )
    apart = [
        abs(neighbours[7][0][1].float() - image[0].float()).mean() for image, _ in windows
    ]  # each is a JPEG
    assert np.argmin(apart) == 7


def test_images_that_are_stored_turned_are_cut_at_the_same_place(made, tmp_path):
    upright = pack_dicom(
        made / "train", tmp_path / "upright", form="int16", size=32, crop="lungs", **QUIET
    )
    folder = shutil.copytree(made / "train", tmp_path / "train")
    for path in folder.rglob("*.dcm"):
        file = pydicom.dcmread(path)
        file.PixelData = file.pixel_array[::-1, ::-1].tobytes()
        file.ImageOrientationPatient = [-1, 0, 0, 0, -1, 0]
        file.save_as(path)
    turned = pack_dicom(folder, tmp_path / "turned", form="int16", size=32, crop="lungs", **QUIET)
    assert abs(units(turned) - units(upright)).max() <= 1


def test_a_damaged_slice_is_left_out_of_the_box_and_said_as_ever(made, tmp_path):
    folder = shutil.copytree(made / "train", tmp_path / "train")
    whole = pack_dicom(folder, tmp_path / "whole", form="int16", size=32, crop="lungs", **QUIET)
    path = folder / whole.name(2)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(OSError, match=r"image 2 cannot be packed"):
        pack_dicom(folder, tmp_path / "rest", form="int16", size=32, crop="lungs", **QUIET)
    rest = pack_dicom(
        folder, tmp_path / "rest", form="int16", size=32, crop="lungs", damaged="skip", **QUIET
    )
    path.unlink()
    assert np.array_equal(units(rest), expected(folder, rest))


def test_a_pack_of_whole_slices_is_another_one(made, tmp_path):
    pack_dicom(made / "train", tmp_path / "records", size=16, **QUIET)
    with pytest.raises(FileExistsError, match="crop"):
        pack_dicom(made / "train", tmp_path / "records", size=16, crop="lungs", **QUIET)
    with pytest.raises(ValueError, match="crop must be None or \"lungs\", got 'lung'"):
        pack_dicom(made / "train", tmp_path / "other", size=16, crop="lung", **QUIET)
