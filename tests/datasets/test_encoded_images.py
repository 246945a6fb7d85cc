"""The bytes of an image are an image in every form in which people hold them; also in a column of a table."""

import io
import zipfile

import numpy as np
import pandas
import pytest
import torch
from helpers.one_process import in_this_process
from helpers.pictures import picture, quietly
from PIL import Image

from tpukit.datasets.encoded_images import file_bytes, is_image
from tpukit.datasets.pack_sources import describe_source


def png_of(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


PNG = png_of(picture(1))


@pytest.fixture(autouse=True)
def _in_this_process():
    with in_this_process():
        yield


def in_archive():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.png", PNG)
    return zipfile.ZipFile(file).open("a.png")


def read_to_its_end():
    file = io.BytesIO(PNG)
    file.read()
    return file


FORMS = {
    "bytes": lambda: PNG,
    "bytearray": lambda: bytearray(PNG),
    "memoryview": lambda: memoryview(PNG),
    "BytesIO": lambda: io.BytesIO(PNG),
    "BytesIO at its end": read_to_its_end,
    "a member of an archive": in_archive,
    "numpy.fromfile": lambda: np.frombuffer(PNG, np.uint8),
    "cv2.imencode": lambda: np.frombuffer(PNG, np.uint8)[:, None],
    "torchvision.io.read_file": lambda: torch.frombuffer(bytearray(PNG), dtype=torch.uint8),
    "numpy.void": lambda: np.void(PNG),
    "a dict of the hub": lambda: {"bytes": PNG, "path": None},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_bytes_are_an_image_in_every_form(form, tmp_path):
    assert file_bytes(form()) == PNG
    assert is_image(form())
    images = quietly([(form(), 0), (form(), 1)], tmp_path / "pack")
    assert images.read([0]) == [PNG]


def test_a_scalar_of_arrow_and_a_dict_with_a_path_are_images(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    assert file_bytes(pyarrow.scalar(PNG)) == PNG
    (tmp_path / "a.png").write_bytes(PNG)
    assert file_bytes({"bytes": None, "path": str(tmp_path / "a.png")}) == PNG


def test_pixels_and_paths_are_no_bytes_of_a_file():
    for pixels in (np.zeros((8, 8, 3), np.uint8), np.zeros(784, np.uint8), picture(1)):
        assert file_bytes(pixels) is pixels
    for path in ("a.png", b"folder/a.png", 7, None, np.str_("a.png"), float("nan")):
        assert not is_image(path)


class Response:
    def read(self):
        return PNG


@pytest.mark.parametrize("file", [Response(), io.StringIO("text")], ids=["once", "text"])
def test_a_file_that_cannot_be_read_again_is_refused(file, tmp_path):
    with pytest.raises(ValueError, match=r"fix:.*image\.read\(\)"):
        quietly([(file, 0)], tmp_path / "pack")


COLUMNS = {
    "bytes": lambda number: png_of(picture(number)),
    "dicts": lambda number: {"bytes": png_of(picture(number)), "path": f"{number}.png"},
    "Pillow images": picture,
    "arrays": lambda number: np.asarray(picture(number)),
}


@pytest.mark.parametrize("make", COLUMNS.values(), ids=COLUMNS)
def test_a_column_of_images_is_packed_with_labels_groups_and_rows(make, tmp_path):
    table = pandas.DataFrame({"image": [make(number) for number in range(6)]}, range(4, 10))
    table["label"] = list("abcabc")
    table["patient"] = [1, 1, 2, 2, 3, 3]
    options = {"path": "image", "labels": "label", "groups": "patient"}
    images = quietly(table, tmp_path / "pack", **options)
    assert images.classes == ["a", "b", "c"]
    assert images.group_names == ["1", "2", "3"]
    for index, row in enumerate(images.rows.tolist()):
        assert np.array_equal(images.take([index])[0], np.asarray(picture(row).convert("RGB")))
        assert images.labels[index] == row % 3
        assert images.groups[index] == row // 2
    images.labels = table.label.map({"a": 2, "b": 1, "c": 0})
    assert images.labels.tolist() == (2 - images.rows % 3).tolist()
    assert len(quietly(table, tmp_path / "pack", **options)) == 6  # the same pack
    table.loc[9, "label"] = "a"
    with pytest.raises(FileExistsError, match="another pack"):
        quietly(table, tmp_path / "pack", **options)


def test_the_column_that_holds_images_is_named():
    table = pandas.DataFrame({"label": [0], "image": [{"bytes": PNG, "path": None}]})
    with pytest.raises(ValueError, match="fix:   pass the column .* images: path='image'"):
        describe_source(table)


def test_a_column_of_images_has_several_labels_or_masks_or_none(tmp_path):
    table = pandas.DataFrame({"image": [png_of(picture(number)) for number in range(4)]})
    assert quietly(table, tmp_path / "a", path="image").labels.shape == (4, 0)
    several = table.assign(x=[0.5, 1, 2, 3], y=[1, 0, 1, 0])
    images = quietly(several, tmp_path / "b", path="image", labels=["x", "y"])
    assert images.labels[images.rows.argsort()].tolist() == [[0.5, 1], [1, 0], [2, 1], [3, 0]]
    side = picture(0).size[0]
    mask = np.full((side, side), 3, np.uint8)
    masked = table.assign(mask=[mask] * 4)
    images = quietly(masked, tmp_path / "c", path="image", masks="mask")
    assert (images.take([0])[..., 3] == 3).all()


@pytest.mark.parametrize("form", [bytes, io.BytesIO, lambda data: {"bytes": data, "path": None}])
def test_a_mask_beside_an_image_is_bytes_as_well(form, tmp_path):
    side = picture(0).size[0]
    mask = np.arange(side * side, dtype=np.uint8).reshape(side, side) % 3
    data = form(png_of(Image.fromarray(mask)))
    images = quietly([(form(PNG), data), (form(PNG), data)], tmp_path / "a")
    assert np.array_equal(images.take([0])[0, ..., 3], mask)
    labelled = quietly([(form(PNG), (data, 7))], tmp_path / "b")
    assert np.array_equal(labelled.take([0])[0, ..., 3], mask)
    assert labelled.labels.tolist() == [[7]]


def test_a_damaged_image_in_a_column_is_named_and_left_out_if_that_is_asked(tmp_path):
    column = [png_of(picture(number)) for number in range(4)]
    column[2] = column[2][:40]
    table = pandas.DataFrame({"image": column, "label": [0, 1, 2, 3]})
    with pytest.raises(OSError, match="item 2"):
        quietly(table, tmp_path / "a", path="image", labels="label")
    images = quietly(table, tmp_path / "b", path="image", labels="label", damaged=0.5)
    assert sorted(images.rows.tolist()) == [0, 1, 3]
    assert images.labels[:, 0].tolist() == images.rows.tolist()


def opened(folder, number, *, is_whole):
    """Return an image of `PIL.Image.open`, which reads its pixels later."""
    file = folder / f"{number}.png"
    data = png_of(picture(number))
    file.write_bytes(data if is_whole else data[: len(data) // 2])
    return Image.open(file)


def named(folder, number, *, is_whole):
    """Return a dict of the hub with a path alone."""
    file = folder / f"{number}.png"
    if is_whole:
        picture(number).save(file)
    return {"bytes": None, "path": str(file)}


@pytest.mark.parametrize("damaged", [0, 2])
@pytest.mark.parametrize("form", [opened, named])
def test_a_file_that_is_read_only_now_is_named_and_left_out_if_that_is_asked(
    tmp_path, form, damaged
):
    items = [(form(tmp_path, number, is_whole=number != damaged), number) for number in range(4)]
    with pytest.raises(OSError, match=f"item {damaged} of the source cannot be read"):
        quietly(items, tmp_path / "a")
    images = quietly(items, tmp_path / "b", damaged=0.5)
    assert sorted(images.labels[:, 0].tolist()) == [n for n in range(4) if n != damaged]
    with pytest.raises(OSError, match=f"item {damaged} of the source cannot be read"):
        quietly(iter(items), tmp_path / "c")
    for image, _ in items:
        if form is opened:
            image.close()
