"""Whether a pack fits the disk is known before it begins, and where and how it would."""

import re
import shutil
from collections import namedtuple

import numpy
import pytest

pytest.importorskip("array_record")

from tpukit import PackOptions, pack  # noqa: E402
from tpukit.datasets import DiskFullError, PackedImages, disk_space, spread  # noqa: E402
from tpukit.essentials.environment import Machine  # noqa: E402

QUIET = {"progress": "off"}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def items():
    random = numpy.random.default_rng(0)
    return [(random.integers(0, 255, (16, 16, 3), "uint8"), number % 2) for number in range(40)]


@pytest.fixture
def photos(tmp_path, items):
    from PIL import Image

    for number, (pixels, kind) in enumerate(items):
        file = tmp_path / "photos" / "ab"[kind] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    return tmp_path / "photos"


@pytest.fixture
def disks(monkeypatch):
    """The bytes that are free in folders, by the end of their names; others have plenty."""
    free = {}

    def usage(path):
        return Usage(
            0, 0, next((bytes for end, bytes in free.items() if end in str(path)), 1 << 50)
        )

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return free


@pytest.mark.parametrize(
    ("options", "needed", "fits"),
    [
        ({}, "3[0-9] KiB", "size=|some of the images: 1[0-9] fit"),
        ({"size": 32}, "120 KiB", "some of the images: 4 fit"),
    ],
)
def test_files_that_cannot_fit_are_refused_before_anything_is_packed(
    photos, tmp_path, disks, options, needed, fits
):
    disks["packed"] = 12_300
    with pytest.raises(
        DiskFullError, match=rf"40 images need about {needed}, and 12 KiB are free in .*packed"
    ) as refused:
        pack(photos, tmp_path / "packed", **options, **QUIET)
    assert not list(tmp_path.glob("packed/*.array_record"))
    assert re.search(f"fix: .*({fits})", str(refused.value))
    disks["packed"] = 200_000  # "make room"
    assert len(pack(photos, tmp_path / "packed", **options, **QUIET)) == 40


class Stream:
    """What can only be iterated, and says how much it yields."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        return iter(self.items)


@pytest.mark.parametrize(
    ("wrap", "options", "needed"),
    [
        (
            list,
            {"size": 16},
            "40 images need about 30 KiB, and 20 KiB",
        ),  # 16 x 16 x 3 x 40 are 30,720 bytes
        (list, {}, "40 images need about 3[0-9] KiB, and 20 KiB"),
        (Stream, {"size": 16}, "40 images need about 60 KiB, and 20 KiB"),
        (
            iter,
            {},
            "these images need about 3[0-9] KiB, and 20 KiB",
        ),  # the second copy, when the first is there
    ],
)
def test_items_need_room_once_and_a_stream_twice(items, tmp_path, disks, wrap, options, needed):
    disks["packed"] = 20_480
    with pytest.raises(DiskFullError, match=needed):
        pack(wrap(items), tmp_path / "packed", **options, **QUIET)


def test_of_several_folders_the_first_with_room_is_taken_and_found_again(
    photos, tmp_path, disks, capsys
):
    disks |= {"working": 1000, "temp": 500_000}
    places = [tmp_path / "working", tmp_path / "temp", tmp_path / "other"]
    for place in places[:2]:
        place.mkdir()
    first = pack(photos, places, **QUIET)
    assert first.folder == places[1]
    assert (
        f"the requested pack does not fit in {places[0]}, so the pack is in {places[1]}; "
        in capsys.readouterr().out
    )
    disks["temp"] = 10  # the pack itself has taken it
    again = pack(photos, places, **QUIET)
    assert again.folder == places[1]
    assert "an earlier call has begun this pack, so the pack is in" in capsys.readouterr().out
    assert not places[2].exists()
    with pytest.raises(FileExistsError, match="temp holds another pack"):
        pack(photos, places[1:], options=PackOptions(seed=1), **QUIET)


def test_a_folder_that_cannot_be_written_to_is_not_called_too_small(
    photos, tmp_path, monkeypatch, capsys
):
    places = [tmp_path / "input", tmp_path / "working"]
    monkeypatch.setattr(disk_space, "is_writable", lambda place: place != places[0])
    assert pack(photos, places, **QUIET).folder == places[1]
    assert f"pack: nothing can be written to {places[0]}" in capsys.readouterr().out


def test_on_kaggle_the_folder_that_has_room_is_named_and_what_survives_there(
    photos, tmp_path, disks, monkeypatch
):
    disks["working"] = 1000
    kaggle = Machine({}, kaggle=tmp_path / "kaggle")
    (kaggle.kaggle / "working").mkdir(parents=True)
    devices = {"working": 1, "temp": 2}
    monkeypatch.setattr(
        disk_space,
        "_device",
        lambda path: devices.get(path.name, 2 if path.name == "kaggle" else 3),
    )
    monkeypatch.setattr(disk_space, "THIS_MACHINE", kaggle)
    with pytest.raises(
        DiskFullError,
        match=rf"a folder in {kaggle.kaggle}/temp, where .* are free until the session ends",
    ):
        pack(photos, kaggle.kaggle / "working" / "packed", **QUIET)


def test_a_sample_is_spread_over_all():
    assert spread(1000, 4) == [125, 375, 625, 875]
    assert spread(3, 4) == [0, 1, 2]


def test_slices_are_weighed_before_the_first_is_packed_and_the_size_that_fits_is_taken(
    tmp_path, disks, monkeypatch
):
    pytest.importorskip("pydicom")
    from tpukit import pe

    scans = pe.phantom(tmp_path / "scans", 2, 6, size=64, form="dicom", **QUIET) / "train"
    whole = pe.pack_dicom(scans, tmp_path / "whole", size=96, **QUIET)
    bytes_whole = sum(map(len, whole.read(range(12))))
    disks["small"] = bytes_whole // 2
    monkeypatch.setattr(disk_space, "_NOT_WORTH_A_SAMPLE", 1)
    monkeypatch.setattr(
        "tpukit.pe.dicom_packing.read_headers", None
    )  # it is known before any header is read
    with pytest.raises(DiskFullError, match="12 images need about .* free") as refused:
        pe.pack_dicom(scans, tmp_path / "small", size=96, **QUIET)
    said = str(refused.value)
    assert "found: " in said
    assert "size=" in said
    size = int(said.partition("size=")[2].partition(";")[0])
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, bytes_whole // 2))
    monkeypatch.setattr(disk_space, "_NOT_WORTH_A_SAMPLE", 1)
    mended = pe.pack_dicom(scans, tmp_path / "small", size=size, **QUIET)  # the fix
    assert sum(map(len, mended.read(range(12)))) < bytes_whole // 2
    chosen = pe.pack_dicom(scans, [tmp_path / "either"], size=[96, size], **QUIET)
    assert PackedImages(chosen.folder).shape[0] == size


def test_what_is_said_to_be_needed_is_within_a_fifth_of_what_it_takes(tmp_path):
    pytest.importorskip("pydicom")
    from tpukit import pe
    from tpukit.datasets.disk_space import _mean
    from tpukit.pe.dicom_slices import sample_bytes
    from tpukit.pe.series import find_files

    scans = pe.phantom(tmp_path / "scans", 3, 10, size=64, form="dicom", **QUIET) / "train"
    for window in (None, "embolism"):
        records = pe.pack_dicom(scans, tmp_path / f"{window}", size=64, window=window, **QUIET)
        taken = sum(
            map(len, records.read(range(30)))
        )  # files of many are as long; each is filled up to 64 KiB
        plan = {"pixels": 64, "form": "jpeg", "quality": 85, "window": window and (100, 700)}
        said = 30 * _mean(sample_bytes(scans, find_files(scans), plan))
        assert 0.9 < said / taken < 1.2
