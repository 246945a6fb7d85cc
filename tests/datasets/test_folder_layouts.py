"""Sub-folders that are splits, masks or patients are refused; all others are classes."""

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
    "a mask in a name": ["cat/1_mask.png", "dog/2.png"],
    "splits in each": [f"{kind}/{part}/1.png" for kind in "abc" for part in ("train", "test")],
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
    "BUSI": (["benign/1.png", "benign/1_mask.png", "normal/2.png"], "'_mask' not in file"),
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
        ValueError, match="would give the classes|like patients|masks beside"
    ) as error:
        find_images(tmp_path)
    assert line in error.value.fix
    names = sorted({file.partition("/")[0] for file in files})
    assert find_images(tmp_path, names).classes == names
