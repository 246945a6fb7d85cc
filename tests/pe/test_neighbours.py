"""Neighbouring slices as channels, of packs and caches whose greys say which slice they are."""

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import tpukit
from tpukit import pe

HEIGHTS = {"a": [0, 1, 2, 3, 5, 6], "b": [0, 2, 4]}  # of study a one slice is missing


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Return the table of two studies in no order, its records and its cache; green is 40 x study + 6 x place."""
    folder = tmp_path_factory.mktemp("neighbours")
    rows = [
        (study, "s", f"{study}{place}", place)
        for study, places in HEIGHTS.items()
        for place in places
    ]
    table = pd.DataFrame(
        rows, columns=["StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "position"]
    )
    table = table.sample(frac=1, random_state=3).reset_index(drop=True)
    table["path"] = [str(folder / f"{name}.png") for name in table.SOPInstanceUID]
    for row in table.itertuples():
        pixels = np.full((16, 16, 3), 200, np.uint8)
        pixels[..., 1] = grey(row.StudyInstanceUID, row.position)
        Image.fromarray(pixels).save(row.path)
    records = tpukit.pack(table, folder / "records", progress="off")
    records = tpukit.PackedImages(folder / "records", size=16)
    return (
        table,
        records,
        tpukit.cached_images(records, folder=folder / "cache", size=16, progress="off"),
    )


def grey(study, place):
    return 40 * (1 + "ab".index(study)) + 6 * place


def expected(table, records):
    """Return (N, 3) the greys below, of the slice and above, worked out slice by slice."""
    found = []
    for row in records.rows:
        study, place = table.StudyInstanceUID[row], table.position[row]
        places = HEIGHTS[study]
        at = places.index(place)
        found.append(
            [grey(study, places[min(max(k, 0), len(places) - 1)]) for k in (at - 1, at, at + 1)]
        )
    return np.array(found)


@pytest.mark.parametrize("kind", ["records", "cache"])
def test_channels_are_the_slice_below_the_slice_and_the_one_above(packed, kind):
    table, records, cache = packed
    images = pe.NeighbouringSlices({"records": records, "cache": cache}[kind], table)
    numbers = [7, 2, 2, 0, 8, 5]
    pixels = images.take(numbers)
    assert pixels.shape == (6, 16, 16, 3)
    assert pixels.mean((1, 2)) == pytest.approx(expected(table, records)[numbers], abs=2)
    out = np.empty((6, 16, 16, 3), np.uint8)
    images.take(numbers, out)
    assert (out == pixels).all()
    one, labels = images[7]
    assert one.shape == (3, 16, 16)
    assert (np.moveaxis(one.numpy(), 0, -1) == pixels[0]).all()
    with pytest.raises(IndexError):
        images[9]


def work(core, images):
    return torch.cat([batch for batch, _ in core.batches(images, batch_size=2)])


def test_batches_of_a_subset_come_from_it(packed):
    table, records, cache = packed
    images = pe.NeighbouringSlices(cache, table)
    run = tpukit.launch(
        work, torch.utils.data.Subset(images, [8, 1, 4, 6]), cores=1, progress="off"
    )
    greys = run.results[0].float().mean((2, 3)).numpy()
    assert greys == pytest.approx(expected(table, records)[[8, 1, 4, 6]], abs=2)


def test_it_is_what_pack_dicom_stores_with_one_window(tmp_path):
    """The same phantoms once as DICOM packed with neighbours, once as JPEGs of three windows."""
    options = {"studies": 2, "slices": 4, "size": 64, "progress": "off", "workers": 1}
    dicom, jpeg = (pe.phantom(tmp_path / form, form=form, **options) for form in ("dicom", "jpeg"))
    labels = pe.read_labels(dicom)
    direct = pe.pack_dicom(
        dicom / "train", tmp_path / "direct", labels, window="embolism", size=64, progress="off"
    )
    table = pe.index_images(pe.read_labels(jpeg), jpeg / "train-jpegs")
    tpukit.pack(table, tmp_path / "windows", labels=list(pe.LABELS), progress="off")
    images = pe.NeighbouringSlices(tpukit.PackedImages(tmp_path / "windows", size=64), table)
    one, other = np.empty((8, 64, 64, 3)), np.empty((8, 64, 64, 3))
    one[direct.rows], other[images.rows] = direct.take(np.arange(8)), images.take(np.arange(8))
    with pytest.raises(ValueError, match="of three windows, got PackedImages"):
        pe.NeighbouringSlices(direct, pe.index_dicom(labels, dicom / "train", progress="off"))
    ids = labels.SOPInstanceUID.tolist()
    assert ids == table.SOPInstanceUID.tolist()
    assert abs(one - other).mean() < 6, "JPEG twice, of other colours"
    assert abs(one - other[..., ::-1]).mean() > 2 * abs(one - other).mean(), (
        "above and below are not exchanged"
    )


def test_what_cannot_have_neighbours_is_refused(packed):
    table, records, _ = packed
    for change, message in (
        (
            lambda: pe.NeighbouringSlices(records, table.drop(columns="position")),
            "no column position",
        ),
        (
            lambda: pe.NeighbouringSlices(records, table[:4]),
            "found: 4 rows; the images need 9 or more",
        ),
        (
            lambda: pe.NeighbouringSlices(records, table.assign(position=1)),
            "7 slices have the position of another",
        ),
        (
            lambda: pe.NeighbouringSlices(records, table, "bone"),
            "window must be one of lung, embolism, mediastinum",
        ),
        (
            lambda: pe.NeighbouringSlices([1, 2], table),
            "NeighbouringSlices needs PackedImages or a CachedImages",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            change()
