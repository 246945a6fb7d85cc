import numpy
import pandas
from flowers import KINDS, draw_flowers, draw_new_flowers, flower
from PIL import Image, ImageOps

from tpukit.datasets import plan_pack


def test_a_flower_is_the_same_for_the_same_seed_and_its_mask_is_its_petals():
    picture, mask, width = flower("daisy", 1, size=64)
    again, *_ = flower("daisy", 1, size=64)
    other, *_ = flower("daisy", 2, size=64)
    assert (picture.size, picture.mode) == ((64, 64), "RGB")
    assert set(numpy.unique(mask)) == {0, 1}
    assert 0.45 <= width <= 0.85
    assert picture.tobytes() == again.tobytes() != other.tobytes()


def test_the_folder_has_every_flower_and_the_faults_that_pack_reports(tmp_path, capsys):
    table = draw_flowers(tmp_path / "data", 4)
    assert table.species.value_counts().to_dict() == dict.fromkeys(KINDS, 4)
    assert pandas.read_csv(tmp_path / "data/flowers.csv").equals(table)
    assert all((tmp_path / "data" / file).is_file() for file in [*table.file_name, *table["mask"]])
    assert table.groupby("plant").size().tolist() == [4] * len(KINDS)
    plan_pack(tmp_path / "data/flowers")
    printed = capsys.readouterr().out
    assert "half.jpg" in printed
    assert "classes     4: anemone 4, clematis 4, daisy 7, poppy 4" in printed
    assert len(draw_flowers(tmp_path / "data", 1)) == len(KINDS), "the folder is emptied before"


def test_new_flowers_are_upright_once_their_orientation_is_applied(tmp_path):
    kinds = draw_new_flowers(tmp_path, 5)
    assert kinds == [*KINDS, next(iter(KINDS))]
    with Image.open(tmp_path / "IMG_0001.jpg") as stored:
        upright = numpy.asarray(ImageOps.exif_transpose(stored).convert("RGB"), numpy.int16)
    drawn = numpy.asarray(flower(kinds[1], 1001)[0], numpy.int16)
    assert abs(upright - drawn).mean() < 5
