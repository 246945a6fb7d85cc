"""A plan holds what `pack` would pack, and nothing is written for it."""

import os
import re
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pandas = pytest.importorskip("pandas")
Image = pytest.importorskip("PIL.Image")

from helpers.one_process import in_this_process  # noqa: E402
from helpers.pictures import folder_of, picture, table_of  # noqa: E402

from tpukit.datasets import PackOptions, plan_pack  # noqa: E402


def test_a_folder_has_classes_endings_sizes_and_formats(tmp_path, capsys):
    folder_of(tmp_path / "in", "cat/1.png", "cat/2.jpg", "dog/1.png", "dog/2.png")
    (tmp_path / "in/dog/notes.txt").write_text("")
    (tmp_path / "in/dog/2.png").write_bytes(b"no image")
    Image.new("L", (9, 30)).save(tmp_path / "in/dog/1.png")
    before = sorted(os.walk(tmp_path))
    plan = plan_pack(tmp_path / "in")
    assert sorted(os.walk(tmp_path)) == before
    assert plan.classes == {"cat": 2, "dog": 2}
    assert plan.left_out == {".txt": 1}
    assert plan.formats == {"PNG RGB": 1, "JPEG RGB": 1, "PNG L": 1}
    assert (plan.smallest, plan.largest) == ((16, 16), (30, 9))
    ((name, why),) = plan.damaged
    assert name.endswith("dog/2.png")
    assert why.startswith("not a whole image")
    printed = capsys.readouterr().out
    assert printed == f"{plan}\n"
    assert "pixels      from 16 x 16 to 9 x 30 (width x height)" in printed
    assert "left out    1 file by the ending: .txt 1" in printed


def test_a_table_has_labels_groups_and_masks(tmp_path):
    table = table_of(4, tmp_path, patient=["a", "a", "b", "b"], age=[1, 2, 3, 4])
    Image.new("L", (16, 16)).save(tmp_path / "mask.png")
    table["mask"] = "mask.png"
    plan = plan_pack(table, labels="age", groups="patient", masks="mask", root=tmp_path)
    assert (plan.kind, plan.images, plan.groups, plan.masks) == ("table", 4, 2, True)
    assert (plan.labels, plan.classes) == (("age",), {})


ITEMS = {
    "arrays": ([(np.zeros((8, 9, 3), np.uint8), number) for number in range(3)], 3, {"array": 3}),
    "images": ([(picture(number), number) for number in range(60)], 60, {"array": 30}),
}


@pytest.mark.parametrize("kind", ITEMS)
def test_items_are_looked_at_evenly_spread(kind):
    items, count, formats = ITEMS[kind]
    plan = plan_pack(items)
    assert (plan.kind, plan.images, plan.formats) == ("items", count, formats)


def test_a_plan_of_arrays_that_differ_in_size_has_their_sizes_because_pack_takes_a_size():
    items = [(np.zeros((8, 9 - number, 3), np.uint8), number) for number in range(3)]
    plan = plan_pack(items)
    assert (plan.smallest, plan.largest) == ((8, 7), (8, 9))


def test_an_iterable_is_looked_at_once_and_a_generator_is_refused():
    items = [(picture(number), number) for number in range(3)]

    class Stream:
        def __iter__(self):
            return iter(items)

    plan = plan_pack(Stream())
    assert (plan.images, plan.looked_at, plan.smallest) == (None, 1, (16, 16))
    with pytest.raises(ValueError, match="yields it only once"):
        plan_pack(iter(items))


def test_a_plan_stops_where_pack_does(tmp_path):
    folder_of(tmp_path / "in", "train/cat/1.png", "train/dog/1.png", "test/cat/1.png")
    with pytest.raises(ValueError, match="the classes lie deeper"):
        plan_pack(tmp_path / "in")


@pytest.mark.parametrize("kind", ["folder", "table", "items"])
def test_a_window_for_images_of_8_bits_is_damage_as_it_is_for_pack(kind, tmp_path):
    folder_of(tmp_path / "in", "cat/1.png", "dog/1.png")
    files = sorted((tmp_path / "in").glob("*/*"))
    sources = {
        "folder": tmp_path / "in",
        "table": pandas.DataFrame({"path": [file.read_bytes() for file in files]}),
        "items": [(file.read_bytes(), 0) for file in files],
    }
    plan = plan_pack(sources[kind], options=PackOptions(window=(0, 100)))
    assert len(plan.damaged) == 2
    assert all("window= is for images of more than 8 bits" in why for _, why in plan.damaged)


PAGE = Path(__file__).parents[2] / "docs" / "data_forms.md"
FILES = {
    "photos": ["cat/1.jpg", "cat/2.jpg", "dog/1.png"],
    "chest": [f"{part}/{kind}/1.png" for part in ("train", "test") for kind in ("a", "b")],
    "breast": [f"{patient}/{kind}/1.png" for patient in (8863, 8864) for kind in "01"],
    "cars": ["train/1.jpg", "train/2.jpg"],
}


def test_the_code_of_the_page_on_forms_of_data_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder, files in FILES.items():
        folder_of(tmp_path / folder, *files)
    Path("cars/train_masks").mkdir()
    for number in (1, 2):
        mask = Image.fromarray(np.full((16, 16), number, np.uint8))
        mask.save(f"cars/train_masks/{number}_mask.png")
    files = pandas.Series(FILES["photos"])
    table = {"file": files, "species": files.str[:3], "patient": ["p", "q", "q"]}
    pandas.DataFrame(table).to_csv("table.csv", index=False)
    session = {}
    with in_this_process():
        for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            exec(code, session)
    assert session["plan"].classes == {"cat": 2, "dog": 1}
    assert session["test"].classes == session["train"].classes == ["a", "b"]
    assert session["packed"].has_masks
    assert session["wide"].shape == (96, 160, 3)
    assert session["grey"].shape == (96, 96, 1)
    assert capsys.readouterr().out.startswith("folder: 3 images\n")
