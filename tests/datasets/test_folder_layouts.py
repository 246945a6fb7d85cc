"""Sub-folders that are splits, masks or patients are refused; all others are classes."""

import glob
import os
import re

import pytest

pytest.importorskip("PIL.Image")

from helpers.pictures import folder_of  # noqa: E402

from tpukit.datasets.image_folders import find_images  # noqa: E402

KINDS = ("NORMAL", "PNEUMONIA")
CLASSES = {
    "of torchvision": ["cat/1.png", "dog/1.png"],
    "folders inside of one class": ["cat/old/1.png", "cat/new/1.png", "dog/1.png"],
    "a train is a class": ["bus/1.png", "car/1.png", "train/1.png"],
    "a word of a split within a word": ["trainer/1.png", "testament/1.png", "valley/1.png"],
    "numbers": ["0/1.png", "1/1.png"],
    "numbered words": ["Sample001/1.png", "Sample002/1.png"],
    "names of two words": ["left lung/1.png", "right lung/1.png", "heart/1.png"],
    "a mask as a class": ["mask/1.png", "no_mask/2.png", "worn_badly/3.png"],
    "masks as a class of numbered images": ["mask/1.png", "no mask/1.png"],
    "a mask in a name": ["cat/1_mask.png", "dog/2.png"],
    "splits in each": [f"{kind}/{part}/1.png" for kind in "abc" for part in ("train", "test")],
    "names of places": ["beach/1.png", "train_interior/1.png", "train_station/1.png"],
    "results of a test": ["positive_test/1.png", "negative_test/1.png"],
    "numbered labels": ["label_0/1.png", "label_1/1.png"],
    "patients in each": [f"{kind}/patient{n}/1.png" for kind in KINDS for n in (1, 2)],
    "other folders in each": ["animals/cat/1.png", "animals/dog/1.png", "cars/bus/1.png"],
}
OTHERS = {
    "chest-xray-pneumonia": (
        [
            f"{top}{part}/{kind}/1.png"
            for top in ("", "chest_xray/")
            for part in ("train", "test", "val")
            for kind in KINDS
        ],
        "/train', ...), one folder deeper",
    ),
    "Intel": (
        [
            f"seg_{part}/seg_{part}/{kind}/1.png"
            for part in ("train", "test")
            for kind in ("sea", "forest")
        ]
        + ["seg_pred/seg_pred/1.png"],
        "/seg_train/seg_train', ...), one folder deeper",
    ),
    "APTOS": (
        ["train_images/1.png", "test_images/2.png"],
        "pass a table with the label of each image",
    ),
    "Carvana": (["train/1.jpg", "train_masks/1_mask.gif"], 'masks="mask"'),
    "mmseg": (["img_dir/train/1.jpg", "ann_dir/train/1.png"], 'masks="mask"'),
    "VOC": (["JPEGImages/1.png", "SegmentationClass/1.png"], 'masks="mask"'),
    "COCO": (["train2017/1.png", "val2017/2.png"], "pass a table with the label of each image"),
    "brain tumors": (
        ["Training/a/1.png", "Training/b/1.png", "Testing/a/2.png"],
        "/Training', ...)",
    ),
    "breast-histopathology": (
        [f"{patient}/{kind}/1.png" for patient in range(8863, 8868) for kind in "01"]
        + ["8869/0/1.png", "IDC_regular/8863/0/1.png"],
        'groups="patient"',
    ),
    "BUSI": (
        ["benign/1.png", "benign/1_mask.png", "normal/2.png"],
        "'_mask' not in os.path.basename(file)",
    ),
    "images and masks in each class": (
        [f"{kind}/{part}/1.png" for kind in "abcd" for part in ("images", "masks")],
        "/*/images/*",
    ),
    "images and masks in two classes": (
        [f"{kind}/{part}/1.png" for kind in KINDS for part in ("images", "masks")],
        "/*/images/*",
    ),
    "HAM10000": (
        ["HAM10000_images_part_1/1.png", "HAM10000_images_part_2/2.png"],
        "pass a table with the label of each image",
    ),
    "a folder of splits": (
        [f"chest_xray/{part}/{kind}/1.png" for part in ("train", "test") for kind in KINDS],
        "/chest_xray', ...), one folder deeper",
    ),
    "brain MRI": (
        ["no/1.png", "yes/1.png", "brain_tumor_dataset/no/1.png", "brain_tumor_dataset/yes/1.png"],
        "/brain_tumor_dataset', ...)",
    ),
    "patients": (["Patient_01/1.png", "Patient_02/1.png"], 'groups="patient"'),
}


@pytest.mark.parametrize("layout", CLASSES)
def test_sub_folders_are_classes(tmp_path, layout):
    files = CLASSES[layout]
    folder_of(tmp_path, *files)
    assert set(find_images(tmp_path).classes) == {file.partition("/")[0] for file in files}


@pytest.mark.parametrize("layout", OTHERS)
def test_sub_folders_that_are_no_classes_are_refused_with_the_line_to_write(tmp_path, layout):
    files, line = OTHERS[layout]
    folder_of(tmp_path, *files)
    with pytest.raises(
        ValueError,
        match="would give the classes|like patients|not look like a class|would take|masks in each class|named like",
    ) as error:
        find_images(tmp_path)
    assert line in error.value.fix
    names = sorted({file.partition("/")[0] for file in files})
    assert find_images(tmp_path, names).classes == names


def packed_by(fix, **names):
    """Run the line of a fix; return the table and the arguments with which it calls `pack`."""
    calls = []
    names |= {"pack": lambda *given, **named: calls.append((*given, named))}
    lines = re.split("\nor, |; or, |; or classes=", fix)[0]
    lines = lines.removeprefix("to pack the images without the masks: ")
    exec(lines.replace(", ..., ", ", "), names)
    ((table, arguments),) = calls
    return table, arguments


def refusal_of(folder, files, tables):
    folder_of(folder, *files)
    for name, text in tables.items():
        (folder / name).write_text(text)
    with pytest.raises(ValueError, match="sub-folders|would give|masks") as error:
        find_images(folder)
    return error.value.fix


IDS = "id,label\n1,cat\n2,dog\n"


@pytest.mark.parametrize(
    ("files", "table"),
    [
        (["test/1.png", "test/2.png", "train/1.png", "train/2.png"], "train.csv"),
        (["images_001/a/1.png", "images_002/a/2.png"], "labels.csv"),
        (["images_001/a/1.png", "images_002/a/2.png", "images_003/b/3.png"], "labels.csv"),
    ],
)
def test_the_line_with_a_table_finds_the_image_of_each_row(tmp_path, files, table):
    pandas = pytest.importorskip("pandas")
    fix = refusal_of(tmp_path, files, {table: IDS})
    table, arguments = packed_by(fix, pandas=pandas, glob=glob, os=os)
    paths = [os.path.join(arguments.get("root", ""), path) for path in table["path"]]
    found = [os.path.relpath(path, tmp_path) for path in paths]
    assert found == [file for file in files if file[0] != "t" or file[:5] == "train"][:2]


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + IDS,  # as Excel saves "CSV UTF-8"
        ",id,label\n0,1,cat\n1,2,dog\n",  # DataFrame.to_csv writes an index without a name
        ",id,label\n1,2,cat\n2,1,dog\n",  # an index that looks like the names of images
        ",label\n1,cat\n2,dog\n",  # an index with the names of images
    ],
)
def test_the_line_reads_a_table_with_a_byte_order_mark_or_an_index(tmp_path, text):
    pandas = pytest.importorskip("pandas")
    fix = refusal_of(tmp_path, ["train/1.png", "test/2.png"], {"labels.csv": text})
    table, arguments = packed_by(fix, pandas=pandas, glob=glob, os=os)
    names = ["2.png", "1.png"] if ",2,cat" in text else ["1.png", "2.png"]
    assert [os.path.basename(path) for path in table["path"]] == names
    assert arguments["labels"] == "label"


@pytest.mark.parametrize("top", ["photos", "photos[1]", "photos_mask"])
def test_the_lines_find_the_images_in_a_folder_of_any_name(tmp_path, top):
    pandas = pytest.importorskip("pandas")
    for name, files in {
        "patients": [f"{patient}/{kind}/1.png" for patient in "567" for kind in "01"],
        "beside": ["benign/1.png", "benign/1_mask.png", "normal/2.png"],
        "inside": [f"{kind}/{part}/1.png" for kind in "abcd" for part in ("images", "masks")],
        "two": ["images/1.png", "masks/1.png"],
    }.items():
        fix = refusal_of(tmp_path / top / name, files, {})
        table, _ = packed_by(fix, pandas=pandas, glob=glob, os=os)
        images = [file for file in files if "mask" not in file]
        paths = [os.path.relpath(path, tmp_path / top / name) for path in table["path"]]
        assert paths == images


def test_the_line_for_patients_leaves_out_an_image_beside_them(tmp_path):
    pandas = pytest.importorskip("pandas")
    files = [f"{patient}/{kind}/1.png" for patient in "567" for kind in "01"]
    fix = refusal_of(tmp_path, [*files, "montage.png"], {})
    table, _ = packed_by(fix, pandas=pandas, glob=glob, os=os)
    assert [os.path.relpath(path, tmp_path) for path in table["path"]] == files


def test_the_line_with_all_classes_has_no_files_and_no_hidden_folders(tmp_path):
    classes = [f"patient_{number}" for number in range(20)]
    files = [f"{name}/{kind}/1.png" for name in classes for kind in "01"]
    fix = refusal_of(tmp_path, files, {"labels.csv": "a,b\n"})
    (tmp_path / ".ipynb_checkpoints").mkdir()
    named = fix.rpartition("classes=")[2].removesuffix(")")
    named = eval(named, {"os": os, "glob": glob, "folder": tmp_path})
    assert sorted(named) == sorted(classes)


def test_a_table_that_cannot_be_read_is_no_fix(tmp_path):
    long = "id,pixels\n1," + "0 " * 100_000
    fix = refusal_of(tmp_path, ["train/1.png", "test/2.png"], {"train.csv": long})
    assert "pass a table with the label of each image" in fix


def test_folders_without_images_beside_splits_are_no_classes(tmp_path):
    folder_of(tmp_path, "train2017/1.png", "val2017/2.png")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "instances.json").write_text("{}")
    with pytest.raises(ValueError, match="would give the classes train2017, val2017"):
        find_images(tmp_path)
