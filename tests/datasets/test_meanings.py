"""What people bring is what a pack holds: images, classes and labels, or a refusal whose fix works when it is done."""

import io
import re
import struct
import tracemalloc
import zipfile
import zlib

import numpy as np
import pandas
import pytest
import torch
from helpers.one_process import in_this_process
from helpers.pictures import folder_of, picture, png_of, quietly, table_of
from PIL import Image, ImageOps
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import tpukit
from tpukit.datasets import PackedImages, PackOptions, pack_shards
from tpukit.datasets.decoding import decode
from tpukit.datasets.image_cache import Space, build_image_cache, choose_images
from tpukit.datasets.image_modes import orientation, to_form
from tpukit.datasets.items import _all_labels
from tpukit.datasets.masks import open_mask
from tpukit.datasets.splitting import folds_by_group, split_by_group


@pytest.fixture(autouse=True)
def _no_processes():
    with in_this_process():
        yield


def note(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def test_numbers_in_a_table_are_names_where_classes_are_numbers_and_2_comes_before_10(tmp_path):
    train = quietly(folder_of(tmp_path / "train", "0/a.png", "2/a.png", "10/a.png"), tmp_path / "a")
    assert train.classes == ["0", "2", "10"]
    table = table_of(2, tmp_path, kind=[10, 2])
    valid = quietly(table, tmp_path / "b", root=tmp_path, labels="kind", classes=train.classes)
    assert dict(zip(valid.rows.tolist(), valid.labels.tolist(), strict=True)) == {0: 2, 1: 1}
    grades = quietly(table, tmp_path / "c", root=tmp_path, labels="kind", classes=range(1, 11))
    assert [grades.classes[label] for label in grades.labels[np.argsort(grades.rows)]] == [
        "10",
        "2",
    ]
    as_text = quietly(
        table.assign(kind=["010", "2"]),
        tmp_path / "d",
        root=tmp_path,
        labels="kind",
        classes=range(11),
    )
    assert [as_text.classes[label] for label in as_text.labels[np.argsort(as_text.rows)]] == [
        "10",
        "2",
    ]
    with pytest.raises(ValueError, match="'kind' of row 0 is not one of the classes\n  found: 10"):
        quietly(table, tmp_path / "e", root=tmp_path, labels="kind", classes=range(10))


ALIKE = [["dog", "Dog "], ["\u00e9", "e\u0301"], ["a", "A"], ["1", "01", "x"]]


@pytest.mark.parametrize("classes", ALIKE)
def test_classes_that_look_alike_are_refused_unless_they_are_named(tmp_path, classes):
    table = table_of(len(classes), tmp_path, kind=classes)
    options = {"root": tmp_path, "labels": "kind"}
    with pytest.raises(ValueError, match="look like one"):
        quietly(table, tmp_path / "pack", **options)
    made = quietly(table, tmp_path / "pack", classes=classes, **options)
    assert made.classes == classes
    assert made.labels[np.argsort(made.rows)].tolist() == list(range(len(classes)))


@pytest.mark.parametrize("classes", [["1", "01"], ["cat", "cat"]])
def test_a_class_that_is_named_twice_is_refused(tmp_path, classes):
    table = table_of(2, tmp_path, kind=classes)
    with pytest.raises(ValueError, match="names a class twice"):
        quietly(table, tmp_path / "pack", root=tmp_path, labels="kind", classes=classes)


def test_folders_that_differ_in_case_are_two_classes_if_they_are_named(tmp_path):
    folder_of(tmp_path / "in", "a/0.png", "A/1.png", "01/2.png", "1/3.png")
    with pytest.raises(ValueError, match=r"two classes look like one[^$]*classes=\[") as error:
        quietly(tmp_path / "in", tmp_path / "pack")
    classes = eval(str(error.value).rpartition("classes=")[2])
    made = quietly(tmp_path / "in", tmp_path / "pack", classes=classes)
    assert sorted(made.classes) == sorted(["a", "A", "01", "1"])


CLASSES = {
    "a list": ["cat", "dog"],
    "number to name": {1: "dog", 0: "cat"},
    "numbers as text": {"1": "dog", "0": "cat"},
    "name to number": {"dog": 1, "cat": 0},
    "numbers of numpy": {np.int64(1): "dog", np.int64(0): "cat"},
    "a series": pandas.Series(["cat", "dog"]),
}


@pytest.mark.parametrize("classes", CLASSES.values(), ids=CLASSES)
def test_classes_are_names_in_any_form(tmp_path, classes):
    made = quietly([(grey(k), k % 2) for k in range(4)], tmp_path / "pack", classes=classes)
    assert made.classes == ["cat", "dog"]


def test_a_categorical_column_has_classes_and_whole_numbers_are_asked_about(tmp_path, capsys):
    table = table_of(6, tmp_path, grade=[0, 1, 2] * 2)
    categorical = table.assign(grade=table.grade.astype("category"))
    assert quietly(categorical, tmp_path / "a", root=tmp_path, labels="grade").classes == [
        "0",
        "1",
        "2",
    ]
    assert not quietly(table, tmp_path / "b", root=tmp_path, labels="grade").classes
    call = re.search(r"classes=range\(\d\)", capsys.readouterr().out)[0]
    assert eval(
        f"quietly(table, tmp_path / 'c', root=tmp_path, labels='grade', {call})"
    ).classes == ["0", "1", "2"]


class Pictures(torch.utils.data.Dataset):
    def __init__(self, classes=("cat", "dog"), targets=(0, 1, 0, 1), seed=0):
        self.classes, self.targets, self.seed = list(classes), list(targets), seed

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return picture(self.seed, index), self.targets[index]


def test_joined_datasets_keep_their_classes_and_are_refused_where_those_differ(tmp_path):
    joined = quietly(
        ConcatDataset([Pictures(seed=1), Subset(Pictures(seed=2), [0, 1])]), tmp_path / "a"
    )
    assert joined.classes == ["cat", "dog"]
    with pytest.raises(
        ValueError, match="number their classes differently\n  found: cat, dog; and dog, cat"
    ):
        quietly(ConcatDataset([Pictures(), Pictures(["dog", "cat"])]), tmp_path / "b")


def test_a_target_transform_takes_the_names_with_it(tmp_path):
    dataset = Pictures()
    dataset.target_transform = lambda label: 1 - label
    assert quietly(dataset, tmp_path / "a").classes == []


def called(records):
    """Return what each row of the table is called in a pack."""
    return [records.classes[label] for label in records.labels[np.argsort(records.rows)]]


@pytest.mark.parametrize("kind", ["column", "categorical"])
def test_true_and_false_are_called_so_whatever_the_order_of_the_classes(tmp_path, kind):
    table = table_of(2, tmp_path, ill=[True, False])
    options = {"root": tmp_path, "labels": "ill"}
    if kind == "column":
        options["classes"] = ["True", "False"]
        assert called(quietly(table, tmp_path / "b", **options | {"classes": ["no", "yes"]})) == [
            "yes",
            "no",
        ]  # places
    else:
        table["ill"] = pandas.Categorical(table.ill, categories=[True, False])
    assert called(quietly(table, tmp_path / "a", **options)) == ["True", "False"]


def test_a_column_of_intervals_has_them_as_classes(tmp_path):
    table = table_of(2, tmp_path, age=pandas.cut([70, 20], [0, 50, 90]))
    assert called(quietly(table, tmp_path / "a", root=tmp_path, labels="age")) == [
        "(50, 90]",
        "(0, 50]",
    ]


def test_names_that_a_dataset_numbers_otherwise_are_in_the_order_of_the_numbers(tmp_path):
    dataset = Pictures()
    dataset.class_to_idx = {"dog": 0, "cat": 1}
    assert quietly(dataset, tmp_path / "a").classes == ["dog", "cat"]
    dataset.class_to_idx = {"dog": 1, "cat": 3}
    with pytest.raises(
        ValueError, match=r"class_to_idx of the dataset contradict each other(.|\n)*classes="
    ):
        quietly(dataset, tmp_path / "b")


def test_joined_packs_of_other_classes_are_no_training(tmp_path):
    from tpukit.training.checks import check_classes, remember_classes

    one, two = (
        quietly(Pictures(names), tmp_path / names[0]) for names in (["cat", "dog"], ["dog", "emu"])
    )
    batches, model = (
        [tpukit.essentials.data.Batches(data, batch_size=2) for data in (one, two)],
        torch.nn.Identity(),
    )
    remember_classes(model, tpukit.essentials.data.Batches(ConcatDataset([one, one]), batch_size=2))
    check_classes(model, batches[0], "validation")
    with pytest.raises(ValueError, match="class 0 is 'cat' in the training data, 'dog' in"):
        check_classes(model, batches[1], "validation")
    with pytest.raises(ValueError, match="number their classes or labels differently"):
        remember_classes(
            model, tpukit.essentials.data.Batches(ConcatDataset([one, two]), batch_size=2)
        )


def names_of(records):
    """Return what each image, known by its first pixel, is called in a pack."""
    return {int(image[0, 0, 0]): records.classes[label] for image, label in records}


def grey(value):
    return Image.new("RGB", (16, 16), (value,) * 3)


class Greys(Pictures):
    def __getitem__(self, index):
        return grey(10 * index), self.targets[index]


@pytest.mark.parametrize(
    "classes",
    [["emu", "dog", "cat"], {"emu": 0, "dog": 1, "cat": 2}, {2: "cat", 0: "emu", 1: "dog"}],
)
def test_classes_in_another_order_than_the_datasets_are_matched_by_name(tmp_path, classes):
    for number, source in enumerate(
        [Greys(["cat", "emu"], [0, 1]), Subset(Greys(["cat", "emu"], [0, 1]), [0, 1])]
    ):
        made = quietly(source, tmp_path / str(number), classes=classes)
        assert (made.classes, names_of(made)) == (["emu", "dog", "cat"], {0: "cat", 10: "emu"})
    assert names_of(
        quietly(Greys(["n1", "n2", "n3"], [2, 0]), tmp_path / "c", classes=classes)
    ) == {
        0: "cat",
        10: "emu",
    }


def test_classes_do_not_join_datasets_that_number_them_differently(tmp_path):
    joined = ConcatDataset([Greys(["cat", "dog"], [0, 1]), Greys(["dog", "emu"], [0, 1])])
    with pytest.raises(ValueError, match="number their classes differently"):
        quietly(joined, tmp_path / "a", classes=["cat", "dog"])


def test_a_set_of_classes_has_no_order(tmp_path):
    with pytest.raises(ValueError, match=r"classes=\['cat', 'dog'\]"):
        quietly(Greys(["cat", "dog"], [0, 1]), tmp_path / "a", classes={"dog", "cat"})


class Pets(Pictures):
    """As torchvision's OxfordIIITPet, whose classes are breeds, whatever its targets are."""

    def __init__(self, target_types="category"):
        super().__init__(["Abyssinian", "beagle", "Bengal"])
        self._target_types = [target_types]


def test_names_of_breeds_are_not_those_of_cats_and_dogs(tmp_path):
    assert quietly(Pets(), tmp_path / "a").classes == ["Abyssinian", "beagle", "Bengal"]
    assert quietly(Pets("binary-category"), tmp_path / "b").classes == []
    made = quietly(Pets("binary-category"), tmp_path / "c", classes=["cat", "dog"])
    assert made.classes == ["cat", "dog"]


def test_synonyms_of_a_class_are_one_name(tmp_path):
    dataset = Pictures([("tench", "Tinca tinca"), ("goldfish", "Carassius auratus")])
    assert quietly(dataset, tmp_path / "a").classes[0] == "tench, Tinca tinca"


def test_numbers_that_are_places_among_other_numbers_are_said(tmp_path, capsys):
    made = quietly(
        [(grey(number), number) for number in range(5)], tmp_path / "a", classes=range(1, 6)
    )
    assert (
        "the labels of items are read as positions in classes=, so the label 0 is the class '1'"
        in capsys.readouterr().out
    )
    made.labels = [0, 1, 2, 3, 4]
    assert (
        "numbers are positions in .classes, so the label 0 is the class '1'"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "names", [["dog", "d\u200bog"], ["dog", "dog\ufeff"], ["big dog", "big  dog"], ["1", "01", "x"]]
)
def test_classes_that_differ_by_what_nobody_sees_are_refused(tmp_path, names):
    table = table_of(len(names), tmp_path, kind=names)
    with pytest.raises(ValueError, match="look like one"):
        quietly(table, tmp_path / "a", root=tmp_path, labels="kind")


def test_words_with_a_line_are_no_numbers(tmp_path):
    folder_of(tmp_path, "1_2/a.png", "12/a.png")  # Python reads 1_2 as 12
    assert quietly(tmp_path, tmp_path / "pack").classes == ["1_2", "12"]


def test_groups_that_look_like_one_are_said_and_a_blank_is_none(tmp_path, capsys):
    folder_of(tmp_path, "0.png", "1.png")
    table = pandas.DataFrame({"path": ["0.png", "1.png"], "patient": ["P1", "p1"]})
    quietly(table, tmp_path / "a", root=tmp_path, groups="patient")
    assert (
        "the groups 'P1' and 'p1' look like one group, but count as two" in capsys.readouterr().out
    )
    with pytest.raises(ValueError, match="images without a group: 1; the first is image 1"):
        quietly(table.assign(patient=["P1", " "]), tmp_path / "b", root=tmp_path, groups="patient")


def test_of_two_groups_the_smaller_is_the_one_to_validate_on():
    groups, classes = np.array([0] * 9 + [1]), np.array([0] * 9 + [1])
    for seed in range(4):
        assert [len(part) for part in split_by_group(groups, 0.2, seed, classes)] == [9, 1]


def test_a_pack_made_again_of_mended_images_finds_no_old_cache(tmp_path):
    import shutil

    images = np.zeros((2, 16, 16, 3), np.uint8)
    build_image_cache(
        quietly([(images[0], 0), (images[1], 1)], tmp_path / "a"), tmp_path / "cache", size=16
    )
    shutil.rmtree(tmp_path / "a")
    again = quietly([(images[0] + 255, 0), (images[1], 1)], tmp_path / "a")
    with pytest.raises(ValueError, match="holds another cache"):
        build_image_cache(again, tmp_path / "cache", size=16)


def test_labels_that_were_mended_in_a_dataset_make_it_another(tmp_path):
    dataset = Pictures(targets=[0, 1] * 500)
    quietly(dataset, tmp_path / "a")
    dataset.targets[3] = 0  # none of the hundred items that are read
    with pytest.raises(FileExistsError, match="another pack"):
        quietly(dataset, tmp_path / "a")


def test_labels_that_were_put_in_place_go_into_a_cache_and_through_a_pickle(tmp_path):
    import pickle

    records = quietly(Pictures(), tmp_path / "a")
    records.labels = np.ones(4, np.int64)
    cached = build_image_cache(records, tmp_path / "cache", size=16)
    decoded = choose_images(
        records,
        Space(memory=0),
        size=16,
        folder=tmp_path / "none",
        workers=1,
        progress="off",
        exact=True,
    )
    for images in (records, cached, decoded, pickle.loads(pickle.dumps(cached))):
        assert images.labels.tolist() == [1] * 4
    table = pandas.Series([0, 1, 0, 1])
    records.labels = table
    assert records.labels.tolist() == table[records.rows].tolist()


@pytest.mark.parametrize("where", ["targets", "_labels", "samples", "tensors"])
def test_labels_that_were_mended_are_seen_wherever_a_dataset_keeps_them(tmp_path, where):
    if where == "tensors":
        dataset = TensorDataset(torch.zeros(300, 3, 4, 4, dtype=torch.uint8), torch.zeros(300))
        labels, mended = dataset.tensors[1], 1
    else:

        class Other:
            def __len__(self):
                return 300

            def __getitem__(self, index):
                kept = getattr(self, where)[index]
                return np.zeros((4, 4, 3), np.uint8), kept[1] if where == "samples" else kept

        dataset, labels = Other(), [("a.png", 0)] * 300 if where == "samples" else [0] * 300
        setattr(dataset, where, labels)
        mended = ("a.png", 1) if where == "samples" else 1
    quietly(dataset, tmp_path / "a", labels="label")
    quietly(dataset, tmp_path / "a", labels="label")
    labels[1] = mended  # none of the hundred items that are read
    with pytest.raises(FileExistsError, match="another pack"):
        quietly(dataset, tmp_path / "a", labels="label")


def test_labels_that_were_mended_in_a_column_of_hugging_face_are_seen(tmp_path):
    datasets = pytest.importorskip("datasets")
    stored = io.BytesIO()
    picture(1, side=4).save(stored, "PNG")
    images = [{"bytes": stored.getvalue(), "path": None}] * 300
    dataset = datasets.Dataset.from_dict({"image": images, "label": [0] * 300})
    quietly(dataset, tmp_path / "a")
    quietly(dataset, tmp_path / "a")
    mended = datasets.Dataset.from_dict({"image": images, "label": [0, 1] + [0] * 298})
    with pytest.raises(FileExistsError, match="another pack"):
        quietly(mended, tmp_path / "a")


def test_labels_of_any_kind_are_the_same_when_they_are_read_again():
    class Boxes:
        def __init__(self):
            self.targets = [{"label": 1, "boxes": torch.ones(2)}, {"label": 2, "boxes": None}]

    assert _all_labels(Boxes()) == _all_labels(Boxes()) != b""  # not by where they lie in memory
    Boxes.tensors = {"image": torch.ones(2)}
    assert _all_labels(Boxes()) == _all_labels(Boxes())
    held = Boxes()
    held.targets = [object(), object()]
    assert _all_labels(held) == b""  # nothing that would be the same tomorrow


def test_a_series_in_the_order_of_the_images_is_not_put_in_order_once_more(tmp_path):
    folder_of(tmp_path, *(f"{number}.png" for number in range(8)))
    table = pandas.DataFrame(
        {"path": [f"{number}.png" for number in range(8)], "kind": list("ababaabb")}, range(8, 16)
    )
    records = quietly(table, tmp_path / "a", root=tmp_path, labels="kind")
    new = pandas.Series([0, 1, 1, 1, 0, 0, 0, 1], table.index)
    for taken in (new.iloc[records.rows], new.to_frame().iloc[records.rows]):
        with pytest.raises(ValueError, match=r"another index than the table(.|\n)*to_numpy"):
            records.labels = taken
    records.labels = new.iloc[records.rows].to_numpy()  # as the fix says
    by_hand = records.labels.tolist()
    records.labels = new
    assert records.labels.tolist() == by_hand == new.to_numpy()[records.rows].tolist()


def test_a_series_of_other_rows_than_the_tables_is_refused(tmp_path):
    folder_of(tmp_path, *(f"{number}.png" for number in range(8)))
    (tmp_path / "3.png").write_text("no image")
    table = pandas.DataFrame(
        {"path": [f"{number}.png" for number in range(8)], "kind": list("ababaabb")}
    )
    records = quietly(table, tmp_path / "a", root=tmp_path, labels="kind", damaged=0.5)
    with pytest.raises(ValueError, match=r"7 rows, and the table that was packed had 8"):
        records.labels = table.kind.drop(index=3).map({"a": 1, "b": 0})


def test_labels_of_pandas_are_those_of_the_table_that_was_packed(tmp_path):
    folder_of(tmp_path, *(f"{number}.png" for number in range(12)))
    table = pandas.DataFrame({"path": [f"{number}.png" for number in range(12)]})
    table["label"] = np.arange(12) % 3
    table["fold"] = [0, 1, 2] * 4
    train = table[table.fold != 0]
    records = quietly(train, tmp_path / "a", root=tmp_path, labels="label", classes=range(3))
    cached = build_image_cache(records, tmp_path / "cache", size=8)
    stored = records.labels.tolist()
    others = table.label, table[table.fold != 1].label, train.label.reset_index(drop=True)
    for images in (records, cached, PackedImages(records.folder)):
        for other in (*others, train.label.sample(frac=1, random_state=0)):
            with pytest.raises(ValueError, match="the table that was packed"):
                images.labels = other
        images.labels = 2 - train.label
        assert images.labels.tolist() == [2 - label for label in stored]


def test_numbers_in_a_column_of_objects_are_labels_and_a_missing_one_is_named(tmp_path):
    images = quietly([(picture(number), number % 2) for number in range(4)], tmp_path / "out")
    column = pandas.Series([3, 1, 4, 1], dtype=object)
    images.labels = column
    assert images.labels.tolist() == column[images.rows].tolist()
    assert images.labels.dtype == np.int64
    with pytest.raises(ValueError, match="labels must be finite numbers\n  found: None"):
        images.labels = column.where(column > 1, None)


def test_groups_in_a_tensor_have_the_names_of_its_numbers(tmp_path):
    items = [(picture(number), number % 2) for number in range(4)]
    images = quietly(items, tmp_path / "out", groups=torch.tensor([7, 7, 8, 8]))
    assert images.group_names == ["7", "8"]


def test_labels_of_a_folder_and_of_items_have_one_row_per_file_or_item(tmp_path):
    folder_of(tmp_path / "in", "a/0.png", "a/1.png", "b/2.png")
    for number, source in enumerate((tmp_path / "in", Pictures(targets=[0, 0, 1]))):
        records = quietly(source, tmp_path / f"pack-{number}")
        with pytest.raises(ValueError, match="4 rows, and the table that was packed had 3"):
            records.labels = pandas.Series([0, 0, 1, 1])
        records.labels = pandas.Series([1, 1, 0])
        assert sorted(zip(records.rows.tolist(), records.labels.tolist(), strict=True)) == [
            (0, 1),
            (1, 1),
            (2, 0),
        ]


def test_predictions_go_back_to_the_rows_of_the_table(tmp_path):
    folder_of(tmp_path, *(f"{number}.png" for number in range(8)))
    (tmp_path / "3.png").write_text("no image")
    table = pandas.DataFrame({"path": [f"{number}.png" for number in range(8)]}, range(20, 28))
    table["label"] = np.arange(8) / 8
    images = quietly(table, tmp_path / "a", root=tmp_path, labels="label", damaged=0.5)
    table["again"] = images.in_table_order(torch.from_numpy(images.labels[:, 0].copy()))
    assert table.again[table.again.notna()].equals(table.label.drop(23).astype("float32"))
    assert table.again.isna().tolist() == [row == 3 for row in range(8)]
    train, valid = images.split(0.3)
    some = images.in_table_order(np.stack([valid, -valid], axis=1), valid)
    assert some.shape == (8, 2)
    assert np.flatnonzero(~np.isnan(some[:, 0])).tolist() == sorted(images.rows[valid].tolist())
    assert (some[images.rows[valid], 1] == -valid).all()
    numbers = images.in_table_order(np.arange(7), None)
    assert numbers[images.rows].tolist() == list(range(7))
    whole = quietly(table.drop(23), tmp_path / "b", root=tmp_path, labels="label")
    classes = whole.in_table_order(np.arange(7))
    assert (classes.dtype.kind, classes[whole.rows].tolist()) == ("i", list(range(7)))
    with pytest.raises(ValueError, match="there are 7 images"):
        images.in_table_order(np.zeros(8))
    with pytest.raises(ValueError, match="more than one value"):
        images.in_table_order(np.zeros(2), [0, 0])


def test_a_split_is_stratified_by_any_classes_of_the_images(tmp_path):
    sites = np.array(["a", "b"])[np.arange(200) % 10 // 9]
    table = pandas.DataFrame({"site": sites}, range(100, 300))
    images = quietly([(picture(number, side=4), 0) for number in range(200)], tmp_path / "pack")
    of_images = table.site.to_numpy()[images.rows]
    for kinds in (of_images, of_images.tolist(), table.site.reset_index(drop=True)):
        train, valid = images.split(0.25, stratify=kinds)
        assert (of_images[valid] == "b").sum() == 5
        for train, valid in images.folds(4, stratify=kinds):
            assert (of_images[valid] == "b").sum() == 5
            assert len(valid) == 50
            assert sorted([*train, *valid]) == list(range(200))
    with pytest.raises(ValueError, match="another index than the table"):
        images.split(stratify=table.site)
    with pytest.raises(ValueError, match=r"stratify= has the shape \(3,\)"):
        images.split(stratify=["a", "b", "a"])


GROUPED = {
    "single images": (np.arange(103), None),
    "patients": (np.arange(500) // 7, None),
    "patients of many sizes": (np.repeat(np.arange(40), np.arange(40) % 9 + 1), None),
    "classes": (np.arange(300), np.arange(300) % 3),
    "classes of patients": (np.arange(600) // 6, np.arange(600) // 6 % 4),
    "several labels": (
        np.arange(400) // 4,
        np.stack([np.arange(400) % 4 == 0, np.arange(400) < 80], 1),
    ),
    "as many groups as folds": (np.arange(50) // 10, None),
}


@pytest.mark.parametrize("case", GROUPED)
def test_folds_hold_each_group_once_and_are_alike(case):
    groups, kinds = GROUPED[case]
    folds = folds_by_group(groups, 5, seed=3, stratify=kinds)
    largest = np.bincount(groups).max()
    assert np.array_equal(
        np.sort(np.concatenate([valid for _, valid in folds])), np.arange(len(groups))
    )
    for train, valid in folds:
        assert not set(groups[train]) & set(groups[valid])
        assert sorted([*train, *valid]) == list(range(len(groups)))
        assert abs(len(valid) - len(groups) / 5) <= largest
        if kinds is not None:
            rows = kinds if kinds.ndim == 2 else np.eye(4)[kinds]
            difference = rows[valid].sum(0) - rows.sum(0) / 5
            assert (abs(difference) <= largest).all()
    again = folds_by_group(groups, 5, seed=3, stratify=kinds)
    assert all(np.array_equal(one[1], other[1]) for one, other in zip(folds, again, strict=True))
    if case != "as many groups as folds":
        others = folds_by_group(groups, 5, seed=4, stratify=kinds)
        assert any(not np.array_equal(a[1], b[1]) for a, b in zip(folds, others, strict=True))


@pytest.mark.parametrize("copies", [0, 1])
def test_folds_of_many_classes_take_little_memory(copies):
    groups = np.append(np.arange(8000), np.arange(copies))
    tracemalloc.start()
    folds_by_group(groups, stratify=np.arange(8000 + copies) % 1000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < len(groups) * 1000  # bytes: of one byte for each image and class


def test_folds_that_cannot_be_made_are_refused():
    with pytest.raises(
        ValueError, match=r"3 groups cannot be divided into 5 folds\n  fix:   count=3"
    ):
        folds_by_group([0, 0, 1, 2])
    with pytest.raises(ValueError, match="count must be at least 2, got 1"):
        folds_by_group([0, 0, 1, 2], 1)


def test_packs_are_joined_by_plus(tmp_path):
    one, other = (quietly(Pictures(seed=seed), tmp_path / str(seed)) for seed in range(2))
    assert [image.shape for image, _ in one + other] == [(3, 16, 16)] * 8


def test_labels_put_in_place_of_classes_are_numbers_of_classes(tmp_path):
    records = quietly(Pictures(), tmp_path / "a")
    records.labels = [1.0, 0.0, 1.0, 0.0]
    assert records.labels.dtype == np.int64
    with pytest.raises(ValueError, match=r"label 0\.5 is not one of the 2 classes"):
        records.labels = [0.5, 0, 1, 0]
    records.labels = pandas.DataFrame({"label": [0, 1, 1, 0]})
    assert records.labels.tolist() == np.array([0, 1, 1, 0])[records.rows].tolist()


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([1, 0], "there are 4 images"),
        ([0, 1, 0, np.nan], "finite numbers"),
        ([0, 1, 2, 0], "not one of the 2 classes"),
    ],
)
def test_labels_that_do_not_fit_are_not_put_in_place(tmp_path, labels, words):
    records = quietly(Pictures(), tmp_path / "a")
    before = records.labels.tolist()
    with pytest.raises(ValueError, match=words):
        records.labels = labels
    assert records.labels.tolist() == before


def test_a_dataset_that_is_random_now_and_then_is_refused(tmp_path):
    class Flipped(Pictures):
        def __getitem__(self, index):
            image = picture(index)
            return image if index % 3 == 0 or self.draw.random() < 0.5 else ImageOps.mirror(
                image
            ), 0

    for seed in range(20):
        dataset = Flipped(targets=range(60))
        dataset.draw = np.random.default_rng(seed)
        with pytest.raises(ValueError, match="differs each time it is read"):
            quietly(dataset, tmp_path / "a", classes=())


def test_equal_images_are_on_one_side_of_a_split(tmp_path, capsys):
    folder_of(tmp_path, *(f"{number}.png" for number in range(10)))
    (tmp_path / "copy.png").write_bytes((tmp_path / "3.png").read_bytes())
    paths = [*(f"{number}.png" for number in range(10)), "copy.png", *["5.png"] * 4]
    table = pandas.DataFrame({"path": paths, "kind": ["a", "b", "a"] * 5})
    records = quietly(table, tmp_path / "pack", root=tmp_path, labels="kind")
    said = "copies of other images: 5; copies with other labels: 2; `split` puts an image and its copies"
    assert said in capsys.readouterr().out
    cached = build_image_cache(records, tmp_path / "cache", size=16)
    for images in (records, cached):
        for seed in range(5):
            sides = [{paths[row] for row in images.rows[part]} for part in images.split(0.4, seed)]
            assert not sides[0] & sides[1]
            assert not any(
                {"3.png", "copy.png"} <= sides[0] | {"x"} and "copy.png" in sides[1] for _ in [0]
            )


def test_an_image_with_two_masks_is_on_one_side_of_a_split(tmp_path):
    folder_of(tmp_path, *(f"{number}.png" for number in range(6)))
    for number in range(12):
        Image.fromarray(np.full((16, 16), number, np.uint8)).save(tmp_path / f"mask-{number}.png")
    paths = [f"{number % 6}.png" for number in range(12)]
    table = pandas.DataFrame(
        {"path": paths, "mask": [f"mask-{number}.png" for number in range(12)]}
    )
    files = quietly(table, tmp_path / "a", root=tmp_path, masks="mask")
    pixels = quietly(
        [(np.asarray(picture(k % 6)), np.full((16, 16), k)) for k in range(12)], tmp_path / "b"
    )
    for records in (files, pixels):
        for seed in range(3):
            sides = [
                {paths[row] for row in records.rows[part]} for part in records.split(0.4, seed)
            ]
            assert not sides[0] & sides[1]


def test_one_picture_with_two_labels_is_said(tmp_path, capsys):
    items = [(picture(1), 0), (picture(2), 0), (picture(1), 1), (picture(2), 0)]
    quietly(items, tmp_path / "a", classes=["cat", "dog"])
    assert (
        "copies of other images: 2; copies with other labels: 1; `split` puts"
        in capsys.readouterr().out
    )


def test_images_of_one_checksum_are_told_apart():
    # Of one length, two of 100,000 images have the same CRC-32; all do that differ by its polynomial.
    black, other = bytes(48), bytes.fromhex("410671db01").ljust(48, b"\0")
    assert zlib.crc32(black) == zlib.crc32(other)
    assert pack_shards.digest(black) != pack_shards.digest(other)


def test_notes_of_a_file_count_for_the_file_alone():
    stored = io.BytesIO()
    half = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    half.save(stored, "PNG", exif=note(6))
    opened = Image.open(stored)
    assert np.array_equal(np.asarray(to_form(opened)), np.rot90(np.asarray(half), -1))
    for changed in (opened.convert("RGB"), opened.copy()):
        assert "exif" in changed.info
        assert np.array_equal(np.asarray(to_form(changed)), np.asarray(half))
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    stored = io.BytesIO()
    palette.save(stored, "PNG", transparency=1)
    opened = Image.open(stored)
    assert np.asarray(to_form(opened)).min() == 255  # transparent, on white
    assert np.asarray(to_form(opened.convert("RGB"))).max() == 9


def test_a_note_is_found_wherever_pillow_finds_it():
    stored = io.BytesIO()
    xmp = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta tiff:Orientation="8"/>'
    picture(1).save(stored, "JPEG")
    data = stored.getvalue()
    data = data[:2] + b"\xff\xe1" + (len(xmp) + 2).to_bytes(2, "big") + xmp + data[2:]
    opened = Image.open(io.BytesIO(data))
    assert orientation(data) == opened.getexif().get(0x0112, 8) == 8


def with_segments(*segments):
    """Return a JPEG, wider than high, with segments in front: a kind and what it holds."""
    stored = io.BytesIO()
    Image.fromarray(np.arange(24 * 16 * 3, dtype=np.uint8).reshape(16, 24, 3)).save(stored, "JPEG")
    data = b"".join(
        b"\xff" + bytes([kind]) + (len(part) + 2).to_bytes(2) + part for kind, part in segments
    )
    return stored.getvalue()[:2] + data + stored.getvalue()[2:]


def exif_of(kind, code, order="<"):
    head = struct.pack(order + "HIHHHI", 42, 8, 1, 0x0112, kind, 1) + struct.pack(
        order + code, 6
    ).ljust(4, b"\0")
    return b"Exif\0\0" + (b"II" if order == "<" else b"MM") + head + bytes(4)


LONG = (0xE2, bytes(60_000))  # as of a profile of colours: two of them are more than 64 KB
XMP = (0xE1, b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta tiff:Orientation="6"/>')


@pytest.mark.parametrize(
    "segments",
    [
        [LONG, LONG, (0xE1, exif_of(3, "H"))],
        [LONG, LONG, XMP],
        [(0xE1, exif_of(4, "I"))],
        [(0xE1, exif_of(4, "I", ">"))],
        [(0xE1, exif_of(1, "B"))],
    ],
)
def test_a_jpeg_is_turned_as_pillow_turns_it_wherever_and_however_that_is_noted(segments):
    data = with_segments(*segments)
    opened = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert decode(data).shape == np.asarray(opened).shape


def test_a_grey_mask_of_four_bits_holds_its_numbers(tmp_path):
    for bits in (2, 4):
        rows = (b"\0" + bytes([0b00011011] * 2) + bytes(2 * bits - 2)) * 16
        (tmp_path / f"{bits}.png").write_bytes(png_of(16, 16, bits=bits, kind=0, rows=rows))
    first = [[0, 1, 2, 3], [1, 11, 1, 11]]  # the same bytes, two and four bits at a time
    assert [
        open_mask((tmp_path / f"{bits}.png").read_bytes())[0, :4].tolist() for bits in (2, 4)
    ] == first
    folder_of(tmp_path, "x.png")
    table = pandas.DataFrame({"path": ["x.png"], "mask": ["2.png"]})
    assert set(
        np.unique(quietly(table, tmp_path / "a", root=tmp_path, masks="mask").take([0])[..., 3])
    ) == {0, 1, 2, 3}


def test_a_grey_mask_of_two_bits_holds_its_numbers_however_often_pillow_has_read_it(tmp_path):
    rows = (b"\0" + bytes([0b00011011] * 4)) * 16
    masks = [Image.open(io.BytesIO(png_of(16, 16, bits=2, kind=0, rows=rows))) for _ in range(3)]
    images = [picture(number) for number in range(3)]
    for number, kind in enumerate((Image.Image.copy, np.asarray, np.asarray)):
        items = [(kind(image), mask) for image, mask in zip(images, masks, strict=True)]
        packed = quietly(items, tmp_path / f"{number}")
        assert set(np.unique(packed.take(range(3))[..., 3])) == {0, 1, 2, 3}


def test_a_mask_lies_where_its_image_does(tmp_path):
    wide = np.zeros((8, 12, 3), np.uint8)
    wide[:3, :4] = 255
    mask = Image.fromarray((wide[..., 0] > 0).astype(np.uint8))
    Image.fromarray(wide).save(tmp_path / "wide.png", exif=note(6))
    mask.save(tmp_path / "stored.png")
    mask.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "turned.png")
    table = pandas.DataFrame({"path": ["wide.png"] * 2, "mask": ["stored.png", "turned.png"]})
    for image, marks in quietly(table, tmp_path / "a", root=tmp_path, masks="mask"):
        assert torch.equal(image[0] > 0, marks.bool())
    opened = Image.open(tmp_path / "wide.png")
    image, marks = quietly([(opened, np.asarray(mask))], tmp_path / "b")[0]
    assert torch.equal(image[0] > 0, marks.bool())
    Image.fromarray(wide[:8, :8]).save(tmp_path / "square.png", exif=note(6))
    mask.crop((0, 0, 8, 8)).save(tmp_path / "square-mask.png")
    table = pandas.DataFrame({"path": ["square.png"], "mask": ["square-mask.png"]})
    with pytest.raises(OSError, match=r"EXIF data turn the image(.|\n)*"):
        quietly(table, tmp_path / "c", root=tmp_path, masks="mask")


@pytest.mark.parametrize("shape", [(16, 16, 1), (1, 16, 16)])
def test_a_mask_of_one_channel_is_taken_wherever_that_stands(tmp_path, shape):
    mask = np.eye(16, dtype=np.uint8)
    taken = quietly([(picture(1), mask.reshape(shape))], tmp_path / "a").take([0])[0, ..., 3]
    assert np.array_equal(taken, mask)


def test_the_values_of_masks_and_that_there_are_no_labels_are_said(tmp_path, capsys):
    quietly([(picture(1), np.eye(16, dtype=np.uint8) * 3)], tmp_path / "a")
    assert "masks hold 2 values: 0, 3" in capsys.readouterr().out
    folder_of(tmp_path, "0.png")
    quietly(pandas.DataFrame({"path": ["0.png"], "label": [1]}), tmp_path / "b", root=tmp_path)
    assert "1 image, no labels" in capsys.readouterr().out


def test_colours_of_16_bits_that_are_nearly_black_are_said(tmp_path, capsys):
    rows = (b"\0" + np.full((4, 3), 4000, ">u2").tobytes()) * 4
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "x.png").write_bytes(png_of(4, 4, bits=16, kind=2, rows=rows))
    quietly(tmp_path / "in", tmp_path / "a")
    assert (
        "images of 16 bits that are nearly black: 1, with values up to 4,095;"
        in capsys.readouterr().out
    )
    rows = (b"\0" + np.full((4, 4), [4000, 4000, 4000, 65535], ">u2").tobytes()) * 4  # opaque
    (tmp_path / "in" / "a" / "x.png").write_bytes(png_of(4, 4, bits=16, kind=6, rows=rows))
    quietly(tmp_path / "in", tmp_path / "b")
    assert (
        "images of 16 bits that are nearly black: 1, with values up to 4,095;"
        in capsys.readouterr().out
    )


def test_tensors_of_bfloat16_are_images(tmp_path):
    images = [torch.full((3, 8, 8), value / 255).bfloat16() for value in (0, 255)]
    assert {
        image.max()
        for image in quietly([(image, 0) for image in images], tmp_path / "a").take([0, 1])
    } == {0, 255}


def test_what_pillow_opens_is_taken_and_all_else_is_counted(tmp_path, capsys):
    source = folder_of(tmp_path / "in", "cat/a.jpg", "cat/b.gif", "dog/a.jfif", "dog/b.webp")
    for other in ("cat/notes.txt", "labels.csv", "dog/c.txt"):
        (source / other).write_text("no image")
    records = quietly(source, tmp_path / "pack")
    assert len(records) == 4
    said = capsys.readouterr().out
    assert "4 images of 2 classes: cat 2, dog 2" in said
    assert (
        "files left out, because they are no images of a class: 3 (.txt 2, .csv beside the classes 1)"
        in said
    )
    assert "first page" not in said
    for file in ("stack.tif", "moving.png", "moving.webp", "moving.gif"):
        picture(1).save(
            source / "cat" / file, save_all=True, append_images=[picture(2), picture(3)]
        )
    pages = {"save_all": True, "append_images": [picture(4)]}
    picture(3).save(source / "cat" / "large.tif", big_tiff=True, **pages)
    quietly(source, tmp_path / "moving")
    said = "files with several pages or frames: 5; only the first page or frame of each is used"
    assert said in capsys.readouterr().out
    (source / "emu").mkdir()
    (source / "emu" / "a.heic").write_text("no image")
    with pytest.raises(ValueError, match=r"'emu' holds no image that pack can read(.|\n)*\.heic 1"):
        quietly(source, tmp_path / "other")


def test_classes_one_folder_deeper_are_named(tmp_path):
    source = folder_of(
        tmp_path / "in", "train/cat/a.png", "train/dog/a.png", "valid/cat/a.png", "valid/dog/a.png"
    )
    with pytest.raises(
        ValueError,
        match="classes train, valid, and the classes lie deeper\n  found: in .*/train lie cat, dog",
    ):
        quietly(source, tmp_path / "a")
    assert quietly(source / "train", tmp_path / "b").classes == ["cat", "dog"]  # as the fix says
    divided = folder_of(
        tmp_path / "divided",
        "cat/train/a.png",
        "cat/valid/a.png",
        "dog/train/a.png",
        "dog/valid/a.png",
    )
    assert quietly(divided, tmp_path / "c").classes == ["cat", "dog"]


def test_a_glance_at_the_last_lines_finds_what_is_rarely_meant(tmp_path, capsys):
    (tmp_path / "in" / "a").mkdir(parents=True)
    values = np.linspace(0, 4095, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "in" / "a" / "x.png")
    quietly(tmp_path / "in", tmp_path / "a")
    assert (
        "images of 16 bits that are nearly black: 1, with values up to 4,095; if they have one channel, pass "
        "options=tpukit.PackOptions(window=(0, 4095)): 4,095 becomes white"
        in capsys.readouterr().out
    )
    assert (
        quietly(tmp_path / "in", tmp_path / "b", options=PackOptions(window=(0, 4095)))
        .take([0])
        .max()
        == 255
    )
    capsys.readouterr()
    quietly([(picture(1), Image.fromarray(np.eye(16, dtype=np.uint8) * 255))], tmp_path / "c")
    assert "masks hold only the values 0 and 255: if 255 is a class" in capsys.readouterr().out
    for number, image in enumerate((values, Image.fromarray(values))):
        quietly([(image, 0)], tmp_path / f"d{number}")
        assert (
            "images of 16 bits that are nearly black: 1, with values up to 4,095; if they have one channel, pass "
            "options=tpukit.PackOptions(window=(0, 4095)): 4,095 becomes white"
            in capsys.readouterr().out
        )
    rows = []
    for number, colours in enumerate([[0, 0, 0, 255, 0, 0], [0, 0, 0, 0, 255, 0]]):
        mask = Image.fromarray(np.eye(16, dtype=np.uint8))
        mask.putpalette(colours)
        mask.save(tmp_path / f"mask-{number}.png")
        picture(number).save(tmp_path / f"{number}.png")
        rows.append({"path": f"{number}.png", "mask": f"mask-{number}.png"})
    capsys.readouterr()
    quietly(pandas.DataFrame(rows), tmp_path / "f", root=tmp_path, masks="mask")
    said = (
        "masks show class 1 in several colours, (0, 255, 0) and (255, 0, 0): "
        "check that a class has the same number in all palettes"
    )
    assert said in capsys.readouterr().out
    quietly(pandas.DataFrame(rows[:1] * 2), tmp_path / "g", root=tmp_path, masks="mask")
    assert "several colours" not in capsys.readouterr().out
    picture(1).save(tmp_path / "in" / "loose.png")
    quietly(tmp_path / "in", tmp_path / "e")
    assert (
        "files left out, because they are no images of a class: 1 (.png beside the classes 1)"
        in capsys.readouterr().out
    )


@pytest.fixture
def table(tmp_path):
    return table_of(4, tmp_path, kind=["cat", "dog"] * 2)


def test_a_zipped_table_is_read(tmp_path, table):
    with zipfile.ZipFile(tmp_path / "table.csv.zip", "w") as file:
        file.writestr("table.csv", table.to_csv(index=False))
    assert quietly(tmp_path / "table.csv.zip", tmp_path / "a", labels="kind").classes == [
        "cat",
        "dog",
    ]


def test_a_pad_that_its_part_cannot_hold_is_refused():
    for dtype, pad in ((torch.uint8, -100), (torch.int64, 0.5), (torch.bool, -1)):
        buckets = tpukit.Buckets((8,), pad={0: pad})
        with pytest.raises(ValueError, match="cannot represent"):
            buckets.collate([(torch.ones(5, dtype=dtype), 1)], [0], 8)
