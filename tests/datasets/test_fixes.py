"""Each fix of the subpackage for packs, carried out as it says: the same call then passes."""

import builtins
import errno
import glob
import io
import itertools
import os
import re
import resource
import shutil
import sys
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pandas
import PIL.Image
import PIL.ImageFile
import pytest
import torch
from helpers import pictures
from helpers.fixes import Fixes
from helpers.one_process import in_this_process
from helpers.pictures import folder_of, picture, png_of, tiff_of
from helpers.tfrecords import example, write
from PIL import Image, ImageOps
from torch.utils.data import ConcatDataset, Subset

import tpukit
from tpukit.datasets import (
    CachedImages,
    PackedImages,
    PackOptions,
    cached_images,
    decode,
    decoding,
    disk_space,
    image_cache,
    pack,
    packed_images,
    packing,
    plan_pack,
    read_tfrecords,
    uint16_values,
)
from tpukit.datasets.image_cache import build_image_cache
from tpukit.datasets.splitting import folds_by_group, split_by_group

FULL = OSError(errno.ENOSPC, "full")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with in_this_process():
        yield


def quietly(source, folder=None, **options):
    """Make a pack in the folder of the call that was refused before, or in a new one."""
    return pictures.quietly(source, folder or next_folder(), **options)


def next_folder():
    names = (f"pack-{number}" for number in itertools.count())
    return next(name for name in names if not Path(name, "manifest.json").exists())


NAMES = {
    "CachedImages": CachedImages,
    "PIL": PIL,
    "Path": Path,
    "PackedImages": PackedImages,
    "folder": ".",
    "numpy": np,
    "pack": pack,
    "pandas": pandas,
    "quietly": quietly,
    "shutil": shutil,
    "torch": torch,
    "tpukit": tpukit,
    "zlib": zlib,
}
fixes = Fixes("datasets/*.py", names=NAMES)


def done(fix, call, *source, names=(), **options):
    """Do the call of pack in a fix, with the source, a folder and the options for its dots."""
    call = re.search(r"pack\(.*\)", call)[0]
    call = call.replace("...", "*source, next_folder(), progress='off', **options", 1)
    more = {"source": source, "next_folder": next_folder, "options": options, **dict(names)}
    return fix.run(call, **more)


def with_option(fix, option, source, **names):
    """Pack a source with an option as the fix writes it."""
    return fix.run(f"quietly(source, {option})", source=source, **names)


def table_of(count=4, **columns):
    """Return a table of pictures in this folder."""
    return pictures.table_of(count, Path(), **columns)


def items(count=4):
    return [(picture(number), number % 2) for number in range(count)]


def png(*seed):
    file = io.BytesIO()
    picture(*seed).save(file, "PNG")
    return file.getvalue()


class Pictures:
    def __init__(self, classes=("cat", "dog"), targets=(0, 1)):
        self.classes, self.targets = list(classes), list(targets)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return picture(index), self.targets[index]


# Packages and the disk


def test_the_fixes_work_for_packages_that_are_missing():
    with (
        fixes("array_records: a pack is made of array_record files, and ...") as fix,
        mock.patch.dict(sys.modules, {"array_record.python": None}),
    ):
        quietly(items())
    assert "%pip install array_record" in fix
    assert not Path("pack-0").exists()
    quietly(items())

    with (
        fixes("packing: simplejpeg is not installed, and pack needs it to ...") as fix,
        mock.patch.dict(sys.modules, {"simplejpeg": None}),
    ):
        quietly(items())
    assert "%pip install simplejpeg" in fix
    quietly(items())


def test_the_fix_works_for_no_folder():
    with fixes("packing: folder= names no folder") as fix:
        pack(items(), [], progress="off")
    assert len(pack(items(), re.search('"(.*)"', fix.text)[1], progress="off"))


def test_the_fixes_work_for_a_decoder_that_is_missing():
    def prints(**modules):
        decoding._warn_slower.cache_clear()
        with mock.patch.dict(sys.modules, modules), mock.patch.object(builtins, "print") as printed:
            decoding.jpeg_decoder()
        decoding._warn_slower.cache_clear()
        return printed.call_args[0][0] if printed.called else ""

    with fixes("decoding: {}") as fix:
        print(prints(simplejpeg=None))
    assert fix.text == "pip install simplejpeg"
    assert not prints()


def test_the_fixes_work_for_a_full_disk():
    made = quietly(items())
    with (
        fixes("image_cache: the disk of {} is full: a cache of {} images at ..."),
        mock.patch.object(image_cache, "_allocate", side_effect=FULL),
    ):
        build_image_cache(made, "cache", size=16)
    build_image_cache(made, "cache", size=16)
    cached_images(made, size=16, folder="other")

    with (
        fixes("packing: the disk of {} is full"),
        mock.patch.object(packing, "write_shards", side_effect=FULL),
    ):
        quietly(items())
    quietly(items())

    with (
        fixes("image_cache: nothing can be written to {}"),
        mock.patch.object(image_cache, "is_writable", return_value=False),
    ):
        build_image_cache(made, "read-only", size=16)
    build_image_cache(made, "another", size=16)


def test_the_fixes_work_for_a_disk_with_less_room_than_the_pack_needs():
    table = table_of()
    for name in table.path:
        picture(1, side=64).save(name)
    with mock.patch.object(disk_space, "free_in", return_value=20_000):
        with fixes("disk_space: {} need about {}, and {} are free in {}") as fix:
            quietly(table)
        quietly(table, "small", size=fix.code(r"(?<=size=)\d+"))
        quietly(table.head(fix.code(r"(?<=some of the images: )\d+(?= fit)")), "some")
    quietly(table)  # when there is room


# Packs


def test_the_fixes_work_for_a_shard_that_cannot_be_read():
    made = quietly([(picture(number, side=64), number % 2) for number in range(4)], "pack")
    file = made.shards.files[0]
    whole = file.read_bytes()
    at = whole.find(bytes(np.asarray(picture(int(made.rows[0]), side=64)).tobytes()[:64]))
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with fixes("array_records: record {} of {} cannot be read") as fix:
        PackedImages("pack").take(range(4))
    image = fix.code(r"(?<=leave image )\d+(?= out)")
    PackedImages("pack").take([number for number in range(4) if number != image])
    file.write_bytes(whole)  # copied again from where it is whole
    PackedImages("pack").take(range(4))


def test_the_fixes_work_for_a_shard_that_cannot_be_opened():
    quietly(items(), "pack").take([0])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fresh = PackedImages("pack")
    with fixes("array_records: {} cannot be opened"):
        taken = os.open("/", os.O_RDONLY)
        os.close(taken)
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken, hard))  # no more than there are
        try:
            fresh.take([0])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fresh.take([0])


def test_the_fixes_work_for_images_that_cannot_be_decoded_into_a_batch():
    table = table_of()
    made = quietly(table)
    bad = made.read([0])[0]

    def fails(data, *rest, **options):
        if bytes(data) == bad:
            raise ValueError("not a whole image")
        return decode(data, *rest, **options)

    with mock.patch.object(packed_images, "decode", fails):
        with fixes("packed_images: image {} of {} cannot be decoded: {}") as fix:
            made.take([0])
        subset = fix.code(r"torch.*", packed=made)
        assert len([subset[number] for number in range(3)]) == 3

    picture(9, side=24).save("1.png")
    made = quietly(table, "pack")
    with fixes(
        "packed_images: the images in {} differ in size, so they do not fit into ..."
    ) as fix:
        made.take([0, 1])
    fix.code(r"(?<=: ).*", folder="pack").take([0, 1])


def test_the_fixes_work_for_pixels_of_another_size():
    quietly(items(), "pack")
    with fixes("packed_images: {} holds pixels of {} x {}, not of {} x {}") as fix:
        PackedImages("pack", 8)
    fix.code(r"(?<=: )PackedImages.*?(?=; )", folder="pack")
    quietly(items(), "other", size=fix.code(r"(?<=size=)\d+"))
    PackedImages("other", 8)


def test_the_fixes_work_for_folders_that_are_damaged():
    made = quietly(items(), "pack")
    build_image_cache(made, "cache", size=16)
    Path("cache/images.npy").write_bytes(b"")
    with fixes("resumable: the {} in {} is damaged") as fix:
        CachedImages("cache")
    fix.code(r"shutil\.rmtree\(.*?\)")
    build_image_cache(made, "cache", size=16)
    CachedImages("cache")

    shutil.copytree("pack", "whole")
    Path("pack/index.npy").unlink()
    with fixes("resumable: the {} in {} is damaged") as fix:
        PackedImages("pack")
    assert "copy it again from where it is whole, or pack the images again into a new folder" in fix
    shutil.copytree("whole", "pack", dirs_exist_ok=True)
    PackedImages("pack")
    quietly(items(), "new")


def test_the_fixes_work_for_folders_of_something_else():
    Path("mine").mkdir()
    Path("mine/mine.txt").write_text("")
    with fixes("resumable: {}"):
        quietly(items(), "mine")
    quietly(items(), "new")
    Path("empty").mkdir()
    quietly(items(), "empty")

    Path("file.txt").write_text("")
    for folder in ("file.txt", "file.txt/pack"):
        with fixes("resumable: {} cannot be created, because it or a part of its path is a file"):
            quietly(items(), folder)
    quietly(items(), "a-new-folder")
    with fixes("resumable: {} holds another {}{}") as fix:
        quietly(items(6), "empty")
    quietly(items(6), "other")
    fix.code(r"shutil\.rmtree\(.*?\)")
    made = quietly(items(6), "empty")

    build_image_cache(made, "cache", size=16)
    with fixes("resumable: {} holds no {} that this tpukit can read") as fix:
        PackedImages("cache")
    fix.code(r"[^:]*$", folder="cache")
    with fixes("resumable: {} holds no {} that this tpukit can read") as fix:
        CachedImages("empty")
    one, other = fix.text.partition(": ")[2].split(" or ")
    fix.run(one, folder="empty")
    fix.run(other.replace("...", "size=16"), folder="empty")


def test_the_fixes_work_for_folders_of_no_finished_pack():
    with fixes("resumable: {} holds no finished {}") as fix:
        with (
            mock.patch.object(packing, "_finish", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            quietly(items(), "pack")
        PackedImages("pack")
    assert fix.text == "call pack(source, folder) as before: it continues where it was interrupted"
    quietly(items(), "pack")
    PackedImages("pack")

    with fixes("resumable: {} holds no finished {}"):
        PackedImages(".")
    PackedImages("pack")


# Caches


def test_the_fixes_work_for_caches():
    made = quietly(items(), "pack")
    with fixes("image_cache: a cache is made of PackedImages, got {}") as fix:
        build_image_cache(Subset(made, [0]), size=16)
    assert "take the Subset of the cache" in fix
    assert len(Subset(build_image_cache(made, size=16, progress="off"), [0])) == 1

    with fixes("image_cache: a cache is made of PackedImages, got {}") as fix:
        build_image_cache("pack", size=16)
    build_image_cache(fix.code(".*", folder="pack"), size=16)

    for size in (0, -1, 12.5, True, None):
        with fixes("image_cache: size must be the height and width in pixels, got {}") as fix:
            build_image_cache(made, size=size)
    small = quietly(items(), size=128)
    fix.run(f"tpukit.cached_images(made, {fix.text}, folder='small')", made=small)

    with fixes("checked_files: {} must be a whole number, {} or more, got {}") as fix:
        build_image_cache(made, "few", size=16, workers=0, progress="off")
    build_image_cache(made, "few", size=16, progress="off", **fix.run(f"dict({fix.text})"))


# Folders of images


def test_the_fixes_work_for_folders_of_images_without_a_class():
    with fixes("image_folders: there is no folder {}"):
        quietly("in")
    folder_of(Path("in"), "cat/a.png")
    quietly("in")

    shutil.copytree("in", "moved")
    quietly("moved", "of-moved")
    shutil.move("moved", "elsewhere")
    with fixes("gone_sources: there is no {}") as fix:
        quietly("elsewhere-by-mistake", "of-moved")
    assert len(fix.code(r"tpukit\.\S+\)")) == 1
    with fixes("gone_sources: {} holds another pack, and {} is gone") as fix:
        quietly("moved", "of-moved", size=8)
    assert len(fix.code(r"tpukit\.\S+\)")) == 1

    Path("in/dog").mkdir()
    Path("in/dog/a.heic").write_text("")
    with fixes("image_folders: the folder {} holds no image that pack can read, ..."):
        quietly("in")
    shutil.copytree("in", "again")
    picture(1).save("again/dog/a.png")
    quietly("again")
    shutil.move("in/dog", "away")
    quietly("in")

    with fixes("image_folders: {} holds no image in a sub-folder"):
        quietly("in/cat")
    quietly(pandas.DataFrame({"path": ["in/cat/a.png"]}))

    folder_of(Path("in"), "dog/a.png")
    with fixes("image_folders: {} holds {} folders that are not in classes="):
        quietly("in", classes=["cat"])
    quietly("in", classes=["cat", "dog"])
    shutil.move("in/dog", "dogs")
    quietly("in", classes=["cat"])


def test_the_fixes_work_for_a_folder_that_may_not_be_read():
    source = folder_of(Path("my photos"), "cat/a.png")
    source.chmod(0o000)
    look = os.scandir

    def scandir(path):
        if not os.stat(path).st_mode & 0o500 == 0o500:
            raise PermissionError(errno.EACCES, "Permission denied")  # root is never refused
        return look(path)

    with mock.patch.object(os, "scandir", scandir):
        with fixes("image_folders: {} cannot be read, so its images would be missing") as fix:
            quietly(source)
        os.system(fix.text.partition(",")[0])
        quietly(source)


ALIKE = ["a/cat/1.png", "a/dog/1.png", "b/cat/1.png", "b/dog/1.png"]
PARTS = [f"{part}/{kind}/1.png" for part in ("train", "valid") for kind in ("cat", "dog")]
DEEPER = {
    "two like each other": (ALIKE, ["a", "b"]),
    "train and valid": ([*PARTS, "train/emu/1.png"], ["train", "valid"]),
    "train alone": (["train/cat/1.png", "train/dog/1.png", "test/1.png"], ["test", "train"]),
}


@pytest.mark.parametrize("case", DEEPER)
def test_the_fixes_work_for_classes_that_lie_one_folder_deeper(case):
    files, parts = DEEPER[case]
    folder_of(Path("in"), *files)
    with fixes("folder_layouts: {} would give the classes {}, and the classes lie deeper") as fix:
        quietly("in")
    assert done(fix, fix.text).classes[:2] == ["cat", "dog"]
    assert with_option(fix, fix.text.rpartition("or ")[2], "in").classes == parts


ROLES = [("train/cat.0.jpg", "train/dog.0.jpg"), ("images/0.png", "labels/1.png", "masks/0.png")]


@pytest.mark.parametrize("files", ROLES)
def test_the_fixes_work_for_folders_whose_names_are_roles_and_no_classes(files):
    folder_of(Path("in"), *files)
    with fixes("folder_layouts: {} would give the classes {}, which do not ...") as fix:
        quietly("in")
    assert with_option(fix, fix.text.rpartition("or ")[2], "in").classes
    if len(files) == 2:
        names = {"files": list(files), "labels": ["a", "b"]}
        call = re.search(r"pack\(.*labels=\"label\"\)", fix.text)[0]
        assert done(fix, call, names=names, root="in").classes == ["a", "b"]


def written(fix):
    """Do the lines of a fix up to its "or", as a cell of the user's notebook."""
    lines = re.match(r"(?s)(.*)(?:; or|\n *or, )", fix.text)[1]
    cell = dict(NAMES, glob=glob, os=os, quietly=quietly)
    *before, call = lines.removeprefix("to pack the images without the masks: ").split("; ")
    for line in before:
        exec(line, cell)
    return eval(call.replace("pack(", "quietly(", 1).replace(" ...,", ""), cell)


def test_the_fixes_work_for_folders_of_images_and_masks():
    folder_of(Path("carvana"), "train/0.png", "train/1.png")
    (Path("carvana") / "train_masks").mkdir()
    for number in range(2):
        mask = Image.fromarray(np.full((16, 16), number, np.uint8))
        mask.save(f"carvana/train_masks/{number}_mask.png")
    with fixes("folder_layouts: {} would give the classes {}, which do not ...") as fix:
        quietly("carvana")
    assert written(fix).take([0, 1]).shape == (2, 16, 16, 4)

    folder_of(Path("busi"), "benign/0.png", "benign/0_mask.png", "malignant/1.png")
    with fixes(
        "folder_layouts: {} has masks beside {} of its images, and pack would take the ..."
    ) as fix:
        quietly("busi")
    made = written(fix)
    assert (len(made), made.classes) == (2, ["benign", "malignant"])
    assert len(with_option(fix, fix.text.rpartition("pack(..., ")[2].rstrip(")"), "busi")) == 3


def test_the_fixes_work_for_folders_of_masks_in_each_class():
    files = [f"{kind}/{part}/1.png" for kind in ("ill", "well") for part in ("images", "masks")]
    folder_of(Path("covid"), *files)
    with fixes(
        "folder_layouts: {} has masks in each class, and pack would store them as images ..."
    ) as fix:
        quietly("covid")
    made = written(fix)
    assert (len(made), made.classes) == (2, ["ill", "well"])
    assert len(with_option(fix, fix.text.rpartition("pack(..., ")[2].rstrip(")"), "covid")) == 4


def test_the_fixes_work_for_a_copy_of_the_classes_among_them():
    folder_of(Path("brain"), "no/1.png", "yes/1.png", "all/no/1.png", "all/yes/1.png")
    with fixes(
        "folder_layouts: {} does not look like a class: its sub-folders have the names ..."
    ) as fix:
        quietly("brain")
    assert done(fix, fix.text).classes == ["no", "yes"]
    assert len(with_option(fix, fix.text.rpartition("or ")[2], "brain")) == 4


@pytest.mark.parametrize("ending", ["", ".png"])
def test_the_fixes_work_for_splits_beside_a_table(ending):
    folder_of(Path("aptos"), "train_images/01.png", "train_images/02.png", "test_images/03.png")
    for file, row in (("sample_submission", "03"), ("train", "02")):
        text = f"id_code,diagnosis\n{row}{ending},2\n01{ending},0\n"
        Path(f"aptos/{file}.csv").write_text(text)
    with fixes("folder_layouts: {} would give the classes {}, which do not ...") as fix:
        quietly("aptos")
    made = written(fix)
    assert (made.names, sorted(made.labels[:, 0].tolist())) == (["diagnosis"], [0, 2])


def test_the_fixes_work_for_patients_in_the_place_of_classes():
    folder_of(
        Path("breast"),
        *[f"{patient}/{kind}/{patient}.png" for patient in (8863, 8864, 8865) for kind in "01"],
    )
    with fixes(
        "folder_layouts: the {} sub-folders of {} look like patients and not like ..."
    ) as fix:
        quietly("breast")
    made = written(fix)
    assert (made.classes, made.group_names) == (["0", "1"], ["8863", "8864", "8865"])
    option = fix.text.rpartition("pack(..., ")[2].removesuffix(")")
    assert len(with_option(fix, option, "breast").classes) == 3

    folder_of(Path("in"), "patient_1/0.png", "patient_2/0.png")
    with fixes(
        "folder_layouts: the sub-folders of {} are named like patients and not like ..."
    ) as fix:
        quietly("in")
    names = {"files": sorted(glob.glob("in/*/*")), "labels": ["a", "b"], "patients": [1, 2]}
    call = re.search(r"pack\(.*\"patient\"\)", fix.text)[0]
    assert done(fix, call, names=names).group_names == ["1", "2"]
    assert len(with_option(fix, fix.text.rpartition("or ")[2], "in").classes) == 2


# Items


def test_the_fixes_work_for_arrays_that_are_no_image_yet():
    image = np.full((8, 8, 3), np.nan, np.float32)
    with fixes("image_modes: the image holds nan or infinity") as fix:
        quietly([(image, 0)], options=PackOptions(window=(0, 1)))
    quietly([(fix.code(r"(?<=: ).*", image=image), 0)], options=PackOptions(window=(0, 1)))

    image = np.arange(64, dtype=np.uint16).reshape(8, 8)
    with fixes("image_modes: window must be the two values that become black and ...") as fix:
        quietly([(image, 0)], options=PackOptions(window=(9, 0)))
    for window in re.findall(r"\(-?\d+, \d+\)", fix.text):
        quietly([(image, 0)], options=PackOptions(window=fix.run(window)))

    image = np.zeros((8, 8, 4), np.uint8)
    with fixes("item_parts: an array of shape {}, whose fourth channel has no known ...") as fix:
        quietly([(image, 0)])
    for call in (r"image\[.*?\]", r"PIL\.\S+ \S+\)"):
        quietly([(fix.code(call, image=image), 0)])

    image = np.full((8, 8, 3), 200)
    for other in (np.zeros((5, 5, 2), np.uint8), np.full((4, 4, 3), 1.5), image):
        with fixes("item_parts: an image of shape {} and dtype {}{}") as fix:
            quietly([(other, 0)])
    quietly([(image.astype(np.uint8), 0)])
    quietly([(image / 255, 0)])
    done(fix, fix.text.replace("(low, high)", "(0, 255)"), [(image, 0)])


def test_the_fixes_work_for_files_of_other_modes():
    Path("in/a").mkdir(parents=True)
    Image.fromarray(np.eye(8, dtype=np.float32)).save("in/a/x.tif")
    with fixes("image_modes: a {} of mode {} has no known range, ...") as fix:
        quietly("in")
    done(fix, fix.text.partition("; or")[0].replace("(low, high)", "(0, 1)"), "in")

    Path("colours/a").mkdir(parents=True)
    Path("colours/a/x.png").write_bytes(png_of(4, 4, bits=16, kind=2, rows=bytes(25 * 4)))
    with fixes("image_modes: window= is for one channel of 16 bits, and this {} has {} channels"):
        quietly("colours", options=PackOptions(window=(0, 4095)))
    quietly([(np.zeros((4, 4, 3), np.uint16), 0)], "arrays", options=PackOptions(window=(0, 4095)))
    quietly("colours")


def test_the_fixes_work_for_the_form_of_pixels():
    deep = np.full((8, 8), 300, np.uint16)
    grey = deep.astype(np.uint8)
    sixteen = PackOptions(mode="I;16")
    for options in (PackOptions(mode="grey"), PackOptions(resize="pad")):
        with fixes("pixel_form: {} is one of {}, got {}") as fix:
            quietly([(grey, 0)], options=options)
        with_option(fix, fix.text, [(grey, 0)])
    with fixes('pixel_form: mode="I;16" stores all 16 bits, and a window makes 8 bits of them'):
        quietly([(deep, 0)], options=PackOptions(mode="I;16", window=(0, 400)))
    quietly([(deep, 0)], options=sixteen)
    quietly([(deep, 0)], options=PackOptions(mode="L", window=(0, 400)))
    with fixes("pixel_form: size is one number, or (height, width), got {}") as fix:
        quietly([(grey, 0)], size=(8, 8, 3))
    with_option(fix, fix.text, [(grey, 0)])
    with fixes("pixel_form: uint16_values takes (N, 2, H, W) uint8, got {} {}") as fix:
        uint16_values(torch.zeros(2, 1, 8, 8))
    assert 'PackOptions(mode="I;16")' in fix
    uint16_values(quietly([(deep, 0)], options=sixteen)[0][0])

    with fixes('image_modes: mode="I;16" is for one channel of 16 bits, and this is a {}') as fix:
        quietly([(Image.fromarray(grey), 0)], options=sixteen)
    done(fix, fix.text, [(Image.fromarray(grey), 0)])
    floats = Image.fromarray(np.full((8, 8), 0.5, np.float32))
    with fixes('image_modes: mode="I;16" is for one channel of 16 bits, and this is a {}') as fix:
        quietly([(floats, 0)], options=sixteen)
    done(fix, fix.text.replace("(low, high)", "(0, 1)"), [(floats, 0)])
    negative = deep.astype(np.int32) - 400
    with fixes('image_modes: mode="I;16" stores whole numbers from 0 to 65,535') as fix:
        quietly([(negative, 0)], options=sixteen)
    lowest = negative.min()
    moved = fix.code(r"image\.astype.*? - lowest", image=negative, lowest=lowest)
    quietly([(moved, 0)], options=sixteen)
    with_option(
        fix, fix.text.partition("or ")[2].replace("(low, high)", "(-400, 0)"), [(negative, 0)]
    )
    with fixes('item_parts: mode="I;16" is for one channel of 16 bits, not for {} {}') as fix:
        quietly([(np.stack([deep] * 3, axis=2), 0)], options=sixteen)
    quietly([(fix.code(r"image\[.*\]", image=deep[:, :, None]), 0)], options=sixteen)
    with_option(fix, fix.text.partition("; or")[0], [(np.stack([deep] * 3, axis=2), 0)])

    with fixes(
        "image_modes: window= is for images of more than 8 bits, and this image has 8 bits: {}"
    ):
        quietly([(grey, 0)], options=PackOptions(window=(0, 100)))
    quietly([(grey, 0)])
    with fixes("item_parts: mode={} is not supported for images with masks") as fix:
        quietly([(grey, grey)], options=PackOptions(mode="L"))
    assert "leave mode out" in fix
    quietly([(grey, grey)])


def test_the_fixes_work_for_items_that_are_no_image_and_labels():
    with fixes("item_parts: pack cannot read item {} as (image, labels)"):
        quietly([5])
    for item in ((png(1), 0), {"image": picture(1), "label": 0}, (np.asarray(picture(1)), ())):
        quietly([item])

    with fixes("items: pack cannot read a {}"):
        quietly(5)
    quietly(items())

    parts = {"train": items()}
    with fixes("items: pack cannot read a {}") as fix:
        quietly(parts)
    quietly(fix.code(r"[^:]*$", source=parts))

    source = {"path": table_of().path.tolist(), "kind": ["a", "b"] * 2}
    with fixes("items: pack cannot read a {}") as fix:
        quietly(source)
    fix.run(f"quietly({fix.text}, labels='kind')", source=source)


def test_the_fixes_work_for_mappings_whose_keys_say_too_little():
    item = {"photo": picture(1), "species": 1, "segmentation": np.zeros((16, 16), np.uint8)}
    with fixes("item_parts: keys {}, none of which is {}") as fix:
        quietly([item])
    done(fix, fix.text, [item])

    item = {"image": picture(1), "species": 1}
    with fixes("item_parts: none of the keys {} is a usual name of a label") as fix:
        quietly([item])
    done(fix, fix.text, [item])
    quietly([item], labels=[])


def test_the_fixes_work_for_labels_that_are_no_numbers_and_no_word():
    class Boxes(Pictures):
        target_transform = None

        def __getitem__(self, index):
            target = {"label": self.targets[index], "box": [1, 2]}
            if self.target_transform is not None:
                target = self.target_transform(target)
            return picture(index), target

    dataset = Boxes()
    with fixes("item_parts: item {} has a dict for its label: {}"):
        quietly(dataset)
    dataset.target_transform = lambda target: target["label"]
    quietly(dataset)

    with fixes("item_parts: item {} has labels of shape {}, which is not one row of numbers"):
        quietly([(picture(1), [[1, 2], [3, 4]])])
    quietly([(picture(1), [1, 2])])
    quietly([(picture(1), np.zeros((16, 16), np.uint8))])

    boxes, one_hot = np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), np.array([[0, 1, 0]])
    for rows in (boxes, one_hot):
        with fixes("item_parts: the array of shape {} beside the image is not a mask ...") as fix:
            quietly([(picture(1), rows)])
    for call in re.findall(r"\w+\.\w+\(-?\d*\)", fix.text):
        quietly([(picture(1), fix.run(call, boxes=boxes, one_hot=one_hot))])


def test_the_fixes_work_for_words_as_labels_of_items():
    words = [(picture(0), "cat"), (picture(1), "dog")]
    with fixes("item_parts: item {} has the label {}, and labels that are words ...") as fix:
        quietly(words)
    assert with_option(fix, fix.text.partition(";")[0], words).classes == ["cat", "dog"]
    datasets = pytest.importorskip("datasets")
    images = [{"bytes": png(number), "path": None} for number in range(2)]
    dataset = datasets.Dataset.from_dict({"image": images, "label": ["cat", "dog"]})
    assert quietly(fix.code(r"[^,]*$", dataset=dataset)).classes == ["cat", "dog"]

    of_webdataset = [(picture(0), b"0"), (picture(1), b"1")]
    with fixes("item_parts: item {} has the label {}, and labels that are words ...") as fix:
        quietly(of_webdataset)
    assert "table" not in fix
    made = quietly(fix.code(r"\[\(.*\]", source=of_webdataset))
    assert sorted(made.labels[:, 0].tolist()) == [0, 1]
    assert quietly(of_webdataset, classes=["0", "1"]).classes == ["0", "1"]

    several = ["dog", "emu"]
    with fixes("item_parts: item {} has the word {} among its labels") as fix:
        quietly([(picture(1), several)])
    quietly([(picture(1), fix.code(r"(?<=: ).*", words=several))])


def test_the_fixes_work_for_bytes_of_images():
    class Response:
        def read(self):
            return png(1)

    image = Response()
    with fixes("encoded_images: a {} cannot be rewound, or is opened as text") as fix:
        quietly([(image, 0)])
    quietly([(fix.code(r"image\.read\(\)", image=image), 0)])

    table = pandas.DataFrame({"image": [png(1), None, png(2)]})
    with fixes("pack_tables: {} rows of the column {} hold no image") as fix:
        quietly(table, path="image")
    quietly(fix.code(r"table\.dropna.*", table=table), path="image")


def test_the_fixes_work_for_a_plugin_of_the_notebook():
    class Own(PIL.ImageFile.ImageFile):
        format = "OWN"

    opened, endings, names = dict(Image.OPEN), dict(Image.EXTENSION), list(Image.ID)
    try:
        Image.register_open("OWN", Own)
        Image.register_extension("OWN", ".own")
        file = folder_of(Path("in"), "cat/a.png") / "cat" / "a.own"
        file.write_bytes(b"own")
        with fixes("kernel_state: {} needs a plugin that this notebook defines, ...") as fix:
            quietly("in")
    finally:
        Image.OPEN.clear()
        Image.OPEN.update(opened)
        Image.EXTENSION.clear()
        Image.EXTENSION.update(endings)
        Image.ID[:] = names
    # A plugin in a module is packed in test_processes.py.
    assert "%%writefile plugin.py" in fix


def test_the_fixes_work_for_classes_of_items():
    with fixes("item_parts: label {} of item {} is not one of the {} classes"):
        quietly(Pictures(targets=[7, 0]))
    quietly(Subset(Pictures(targets=[0, 7]), [0]))
    quietly(Pictures(targets=[7, 0]), classes=())

    two = [(picture(1), [0, 1])]
    with fixes("items: classes= names the classes of one label, but items have {} labels"):
        quietly(two, classes=["a"])
    quietly(two)

    with fixes("items: the dataset has classes that classes= does not name"):
        quietly(Pictures(), classes=["cat", "emu"])
    assert quietly(Pictures(), classes=["emu", "dog", "cat"]).classes == ["emu", "dog", "cat"]
    assert quietly(Pictures(), classes=None).classes == ["cat", "dog"]

    dataset = Pictures()
    dataset.class_to_idx = {"dog": 1, "cat": 3}
    with fixes("items: classes and class_to_idx of the dataset contradict each ...") as fix:
        quietly(dataset)
    with_option(fix, fix.text.rpartition(": ")[2].replace("...", "'a', 'b'"), dataset)

    parts = [Pictures(), Pictures(["dog", "cat"])]
    with fixes("items: the datasets that are joined number their classes differently"):
        quietly(ConcatDataset(parts))
    quietly(ConcatDataset([parts[0], Pictures()]))
    for part in parts:
        quietly(part)


def test_the_fixes_work_for_items_without_a_label_and_with_lists_of_classes():
    source = [(picture(0), 0), (picture(1), None)]
    with fixes("label_arrays: label {} of {} {} {}") as fix:
        quietly(source)
    assert "table" not in fix
    quietly([(image, -1 if label is None else label) for image, label in source])

    source = [(picture(0), [0]), (picture(1), [1, 2]), (picture(2), [])]
    with fixes("items: item {} has another number of labels than the first one") as fix:
        quietly(source)
    row = re.search(r"\[float.*?\]", fix.text)[0].replace("number_of_classes", "3")
    made = quietly(fix.run(f"[(image, {row}) for image, labels in source]", source=source))
    assert made.labels[np.argsort(made.rows)].tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 0]]
    datasets = pytest.importorskip("datasets")
    images = [{"bytes": png(number), "path": None} for number in range(3)]
    labels = [labels for _, labels in source]
    source = datasets.Dataset.from_dict({"image": images, "labels": labels})
    call = re.search(r"source\.map.*?(?= and)", fix.text)[0].replace("number_of_classes", "3")
    made = quietly(fix.run(call, source=source), labels="tags")
    assert made.labels[np.argsort(made.rows)].tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 0]]

    with fixes("label_arrays: labels must be numbers, but {} holds {}") as fix:
        quietly([(picture(0), pandas.Timestamp("2024-01-01"))])
    assert "table" not in fix
    quietly([(picture(0), "2024-01-01")], classes=["2024-01-01"])


def test_the_fixes_work_for_a_plan_of_a_generator():
    with fixes("pack_plan: plan_pack reads the first item, and a {} yields it only once"):
        plan_pack(iter(items()))
    plan_pack(items())
    quietly(iter(items()))


def test_the_fixes_work_for_paths_in_place_of_images():
    paths, labels = table_of().path.tolist(), [0, 1, 0, 1]
    for source in (list(zip(paths, labels, strict=True)), sorted(Path().glob("*.png"))):
        with fixes("item_parts: the path {}") as fix:
            quietly(source)
        fix.run(f"quietly({fix.text.partition(': ')[2]})", paths=paths, labels=labels)


def test_the_fixes_work_for_datasets_that_are_not_the_same_twice():
    class Flipped(Pictures):
        flips = True

        def __getitem__(self, index):
            seed = np.random.default_rng().integers(0, 2**30, 2) if self.flips else [index]
            return picture(*seed), 0

    dataset = Flipped()
    with fixes("items: item {} differs each time it is read, as with a ...") as fix:
        quietly(dataset)
    dataset.flips = False
    quietly(dataset)
    assert fix.code(r"(?<=augment=)[\w.]+\([^)]*\)").flip == 0.5

    mixed = [(np.zeros((side, side, 3), np.uint8), 0) for side in (8, 9)]
    with fixes("items: item {} is not like the first one: {}"):
        quietly(mixed)
    quietly(mixed, size=8)
    quietly([(png(1), 0), (png(2), 0)])


def test_the_fixes_work_for_datasets_that_break():
    class Broken(Pictures):
        def __getitem__(self, index):
            return super().__getitem__(index if index < 3 else 1 // 0)

    broken = Broken(targets=[0, 1, 0, 1])
    with fixes("items: item {} of the source cannot be read") as fix:
        quietly(broken)
    assert 'damaged="skip"' in fix
    quietly(broken, damaged=0.5)

    class Damaged(Pictures):
        raises = False

        def __getitem__(self, index):
            if index == 1 and self.raises:
                raise OSError("not a whole image")
            return None if index == 1 else super().__getitem__(index)

    dataset = Damaged(targets=[0, 1] * 8)
    with fixes("item_parts: None, which some datasets return for a damaged image") as fix:
        quietly(dataset)
    dataset.raises = True
    assert len(done(fix, fix.text, dataset).skipped) == 1


def test_the_fixes_work_for_sources_of_another_length_than_they_say():
    class Sized:
        def __init__(self, length):
            self.length = length

        def __len__(self):
            return self.length

        def __iter__(self):
            return iter(items(4))

    with fixes("items: the source yields {} items, but its length is {}"):
        quietly(Sized(3))
    quietly(Sized(4), "again")

    used = iter(items())
    list(used)
    for source in (used, []):
        with fixes("items: the source yields nothing"):
            quietly(source)
    quietly(iter(items()))

    with fixes("pack_sources: the source yields {} items, and groups= has {}"):
        quietly(items(), groups=[1, 2])
    quietly(items(), "grouped", groups=[1, 1, 2, 2])


# Arguments of pack


ARGUMENTS = [
    ("size", (8, 8.5)),
    ("size", 8.5),
    ("size", "8"),
    ("size", 0),
]


@pytest.mark.parametrize(("name", "value"), ARGUMENTS)
def test_the_fixes_work_for_numbers_that_are_no_whole_number(name, value):
    def call(**options):
        pack(items(), "pack", progress="off", **options)

    with fixes("checked_files: {} must be a whole number, {} or more, got {}") as fix:
        call(**{name: value})
    call(**fix.run(f"dict({fix.text})"))


@pytest.mark.parametrize(("name", "value"), [("seed", -1), ("shard_size", 0), ("workers", 0)])
def test_the_fixes_work_for_options_that_are_no_whole_number(name, value):
    with fixes("checked_files: {} must be a whole number, {} or more, got {}") as fix:
        quietly(items(), options=PackOptions(**{name: value}))
    quietly(items(), options=fix.run(f"tpukit.PackOptions({fix.text})"))


def test_the_fixes_work_for_an_option_of_slices_alone():
    with fixes("packing: pack does not support PackOptions(quality=...)"):
        quietly(items(), options=PackOptions(quality=70))
    quietly(items(), options=PackOptions())


@pytest.mark.parametrize("folders", ["gs://bucket/pack", ["gs://bucket/pack"]])
def test_the_fixes_work_for_a_pack_at_a_url(folders):
    with fixes("packing: pack writes to a folder of this machine, got the URL {}") as fix:
        quietly(items(), folders)
    assert not Path("gs:").exists()
    assert "mounted" in fix
    quietly(items(), fix.code(r'".*"'))


def test_the_fixes_work_for_options_that_are_none():
    with fixes("packing: options must be a PackOptions, got {}") as fix:
        quietly(items(), options={"shard_size": 1024})
    fix.run(f"quietly(items, {fix.text})", items=items())


def test_the_fixes_work_for_arguments_that_do_not_belong_to_the_source():
    with fixes("pack_sources: groups= of items must be one value for each item, got {}"):
        quietly(items(), groups="patient")
    quietly(items(), groups=list("aabb"))

    two = [(picture(1), [0, 1])]
    with fixes("pack_sources: the items have {} labels, and labels= names {}: {}") as fix:
        quietly([(picture(0), [1, 0])], labels=[])
    assert quietly(fix.code(r"\[\(image.*\]", source=[(picture(0), [1, 0])])).names == []
    with fixes("pack_sources: the items have {} labels, and labels= names {}: {}"):
        quietly(two, labels="one")
    quietly(two, labels=["one", "other"])
    quietly(two)

    table = table_of(kind=["a", "b"] * 2, patient=[1, 1, 2, 2])
    folder_of(Path("in"), "cat/a.png")
    with fixes("pack_sources: labels= and groups= are not for folders: a folder's ..."):
        quietly("in", labels="kind")
    quietly(table, labels="kind", groups="patient")

    with fixes("pack_sources: labels= must be names of columns, or of parts of ...") as fix:
        quietly(table, labels=table.kind)
    with_option(fix, fix.text, table)
    values = pandas.Series([0, 1, 0, 1])
    with fixes("pack_sources: labels= must be names of columns, or of parts of ...") as fix:
        quietly(table, labels=values)
    call = fix.text.replace("...", "next_folder(), progress='off'")
    assert fix.run(call, table=table, values=values, next_folder=next_folder).names == ["label"]
    for series in (values, values.rename("kind")):
        images = [picture(kind) for kind in range(4)]
        with fixes("pack_sources: labels= must be names of columns, or of parts of ...") as fix:
            quietly(images, labels=series)
        call = fix.text.replace("...", "next_folder(), progress='off'")
        packed = fix.run(call, images=images, values=series, next_folder=next_folder)
        assert sorted(packed.labels[:, 0].tolist()) == [0, 0, 1, 1]

    with fixes("pack_sources: {}= is an argument for {}, and the source is {}") as fix:
        quietly(items(), root=".")
    assert fix.text == "leave root= out"
    quietly(items())

    with fixes('packing: damaged must be "raise", "skip", or a share from 0 to 1, got {}') as fix:
        quietly(items(), damaged="ignore")
    with_option(fix, fix.text, items())


# Labels of tables


def test_the_fixes_work_for_labels_that_are_missing():
    table_of(kind=["None", "a", "b", "a"]).to_csv("table.csv", index=False)
    with fixes("label_arrays: label {} of row {} is missing") as fix:
        quietly("table.csv", labels="kind")
    table = fix.code(r"table\.dropna\(.*?\)", table=pandas.read_csv("table.csv"))
    quietly(table, labels="kind")
    call = fix.text.replace("file,", "'table.csv',").replace("os.path.dirname(file)", "'.'")
    assert "None" in done(fix, call, labels="kind").classes

    table = table_of(kind=["cat", "", "dog", " "])
    with fixes("label_arrays: label {} of row {} is blank") as fix:
        quietly(table, labels="kind")
    some = fix.code(r"table\[[^;]*\]", table=table)
    assert quietly(some, labels="kind").classes == ["cat", "dog"]
    assert len(quietly(table.replace(" ", ""), labels="kind", classes=["", "cat", "dog"])) == 4

    table = table_of(patient=["a", None, "b", "c"])
    with fixes("label_arrays: images without a group: {}; the first is image {}"):
        quietly(table, groups="patient")
    quietly(table.fillna("d"), groups="patient")


def test_the_fixes_work_for_labels_of_no_class():
    table = table_of(kind=["cat", "dog", "emu", "cat"])
    with fixes("label_arrays: label {} of row {} is not one of the classes"):
        quietly(table, labels="kind", classes=["cat", "dog"])
    quietly(table, labels="kind", classes=["cat", "dog", "emu"])
    quietly(table.assign(kind=[0, 1, 0, 1]), labels="kind", classes=["cat", "dog"])
    table = table_of(kind=["cat", 7, "cat", 7])
    with fixes("label_arrays: label {} of row {} is not one of the classes") as fix:
        quietly(table, labels="kind")
    exec(fix.text.partition(": ")[2], {"table": table})
    assert quietly(table, labels="kind").classes == ["7", "cat"]

    table = table_of(species=["dog", "Dog ", "dog", "cat"])
    with fixes("label_arrays: two classes look like one") as fix:
        quietly(table, labels="species")
    one = fix.code(r"table\.replace.*?\)", table=table)
    assert quietly(one, labels="species").classes == ["cat", "dog"]
    two = with_option(fix, f"labels='species', {fix.text.split()[-1]}", table, table=table)
    assert two.classes == ["Dog ", "cat", "dog"]

    with fixes("label_arrays: classes= names a class twice") as fix:
        quietly(table, labels="species", classes=["dog", "Dog ", "dog", "cat"])
    names = re.search(r"classes=.*", fix.text)[0]
    assert len(with_option(fix, f"labels='species', {names}", table).classes) == 3
    os.rename(folder_of(Path("in"), "cat/a.png", "Cat/a.png") / "Cat", "in/dog")
    quietly("in")


@pytest.mark.parametrize(
    ("value", "mend"),
    [
        (np.nan, lambda table, fix: fix.code(r"[^:]*$", table=table)),
        (1e39, lambda table, fix: table.assign(value=table.value / 1e9)),
        (1e-300, lambda table, fix: table.assign(value=np.log(table.value))),
        (2.0**24 + 1, lambda table, fix: table.assign(value=table.value / 1000)),
    ],
)
def test_the_fixes_work_for_labels_that_float32_changes(value, mend):
    table = table_of(value=[1.0, 2.0, value, 3.0])
    with fixes("label_arrays: label {} of {} {} {}") as fix:
        quietly(table, labels="value")
    assert len(quietly(mend(table, fix), labels="value")) == 4


def test_the_fixes_work_for_identifiers_are_no_labels():
    table = table_of(value=[1, 2**24 + 1, 3, 4])
    with fixes("label_arrays: label {} of {} {} {}") as fix:
        quietly(table, labels=["value"])
    assert "leave identifiers out" in fix
    assert len(quietly(table).rows) == 4


def test_the_fixes_work_for_labels_that_are_no_numbers():
    table = table_of(kind=["cat", "dog"] * 2, text=["1", "2"] * 2, value=[1, 2, 3, 4])
    with fixes("label_arrays: labels must be numbers, but {} holds {}") as fix:
        quietly(table, labels=["kind", "value"])
    quietly(table, labels="kind")
    quietly(table.assign(kind=fix.code(r"table\[.*?codes", table=table)), labels=["kind", "value"])
    numbers = re.search(r"pandas\.to_numeric\(.*?\)", fix.text)[0].replace("kind", "text")
    quietly(table.assign(text=fix.run(numbers, table=table)), labels="text")

    table = table_of(day=pandas.to_datetime(["2024-01-01", "2024-01-03"] * 2))
    with fixes("label_arrays: labels must be numbers, but {} holds {}") as fix:
        quietly(table, labels="day")
    texts = table.assign(day=fix.code(r"table\[.*?astype\(str\)", table=table))
    assert quietly(texts, labels="day").classes == ["2024-01-01", "2024-01-03"]
    days = table.assign(day=fix.code(r"\(table.*days", table=table))
    assert sorted(quietly(days, labels="day").labels[:, 0].tolist()) == [0, 0, 2, 2]

    table = table_of(kind=["1,5", "2,5", "7", "2,5"])
    with fixes("label_arrays: labels must be numbers, but {} holds {}") as fix:
        quietly(table, labels="kind")
    numbers = fix.run(fix.text.rpartition(" comma ")[2], table=table)
    made = quietly(table.assign(kind=numbers), labels="kind")
    assert sorted(made.labels.ravel().tolist()) == [1.5, 2.5, 2.5, 7]


def tags_of(fix, table):
    """Make the tags that a fix names, and the pack of their columns."""
    tags = fix.code(r"(?<=tags = ).*?(?=; pack)", table=table)
    call = re.search(r"pack\(.*?\)\)", fix.text)[0]
    return done(fix, call, names={"table": table, "tags": tags})


@pytest.mark.parametrize("mark", [";", "|", ", "])
def test_the_fixes_work_for_several_words_in_one_label(mark):
    words = ["cat", "dog", mark.join(["cat", "dog"]), mark.join(["dog", "cat"])]
    table = table_of(kind=words)
    with fixes("label_arrays: label {} holds several words at once, as {}") as fix:
        quietly(table, labels="kind")
    made = tags_of(fix, table)
    assert made.names == ["cat", "dog"]
    assert made.labels[np.argsort(made.rows)].tolist() == [[1, 0], [0, 1], [1, 1], [1, 1]]
    classes = fix.text.rpartition("classes=")[2]
    assert len(quietly(table, labels="kind", classes=fix.run(classes, table=table)).classes) == 4


def test_the_fixes_work_for_tags_with_blanks_between_and_for_names_as_labels():
    kinds = ["scab", "scab complex", "complex", "rust", "rust complex", "rust scab"]
    table = table_of(6, kind=kinds)
    with fixes("label_arrays: label {} holds several words at once, as {}") as fix:
        quietly(table, labels="kind")
    made = tags_of(fix, table)
    assert made.names == ["complex", "rust", "scab"]
    assert made.labels[np.argsort(made.rows)][1].tolist() == [1, 0, 1]

    table = table_of(20, kind=[f"p{min(number, 15)}" for number in range(20)])
    with fixes("label_arrays: label {} has {} different words for {} images: names of ...") as fix:
        quietly(table, labels="kind")
    groups = re.search(r"groups='kind'", fix.text)[0]
    assert len(with_option(fix, groups, table).group_names) == 16
    classes = re.search(r"classes=.*", fix.text)[0]
    assert len(with_option(fix, f"labels='kind', {classes}", table, table=table).classes) == 16


LISTS = [[["cat", "dog"], ["cat"], ["dog"], []], [[1, 0], [0, 1], [1, 1], [0, 0]]]


@pytest.mark.parametrize("kinds", LISTS)
def test_the_fixes_work_for_several_values_in_one_label(kinds):
    table = table_of(kind=kinds).sample(frac=1, random_state=0)
    with fixes("pack_tables: label {} holds several values at once, as {}") as fix:
        quietly(table, labels="kind")
    tags_of(fix, table)


# Columns of tables


def test_the_fixes_work_for_columns_of_tables():
    table = table_of(kind=["a", "b"] * 2, value=[1, 2, 3, 4], grade=[0, 1, 0, 1])
    with fixes("pack_tables: classes= names the classes of one label, and labels= ..."):
        quietly(table, labels=["grade", "value"], classes=["a", "b"])
    quietly(table, labels=["grade", "value"])
    quietly(table, labels="kind", classes=["a", "b"])

    values = [1, 1, 2, 2]
    with fixes("pack_tables: groups= of a table is the name of one of its columns, ...") as fix:
        quietly(table, groups=values)
    with_groups = fix.code(r"table\.assign\(.*?\)", table=table, values=values)
    with_option(fix, fix.text.partition(";")[0], with_groups)

    renamed = table.rename(columns={"path": "file_name"})
    with fixes("pack_tables: the table has no column {}") as fix:
        quietly(renamed)
    with_option(fix, fix.text.rpartition(": ")[2], renamed)
    for options in ({"labels": "label"}, {"groups": "ward"}):
        with fixes("pack_tables: the table has no column {}"):
            quietly(table, **options)
    quietly(table, labels="kind")

    with fixes("pack_tables: the table has no row"):
        quietly(table[table.grade == "1"])
    quietly(table[table.grade == 1])

    twice = pandas.concat([table, table], axis=1)
    with fixes("pack_tables: the table has the column {} more than once") as fix:
        quietly(twice)
    quietly(fix.code(r"(?<=columns: ).*", table=twice))


def test_the_fixes_work_for_columns_that_are_no_paths():
    table = table_of()
    gap = table.assign(path=[None, *table.path[1:]])
    with fixes("pack_tables: the column {} holds a value that is not a path") as fix:
        quietly(gap)
    quietly(fix.code(r"(?<=: ).*", table=gap))

    numbers = table.assign(path=[0, 1, 2, 3])
    with fixes("pack_tables: the column {} holds a value that is not a path") as fix:
        quietly(numbers)
    quietly(numbers.assign(path=fix.code(r"(?<=: ).*", table=numbers)))
    folder_of(Path("zeros"), "000.png", "001.png")
    ids = pandas.DataFrame({"id": [0, 1]})
    with fixes("pack_tables: the column {} holds a value that is not a path") as fix:
        quietly(ids, path="id", root="zeros")
    quietly(ids.assign(id=fix.code(r"(?<=: ).*", table=ids)), path="id", root="zeros")
    with fixes("pack_tables: the column {} holds a value that is not a path") as fix:
        quietly(ids, path="id", root="nowhere")
    names = fix.code(r"(?<=: ).*", table=ids, ending=".png")
    quietly(ids.assign(id=names), path="id")

    wide = table.assign(path=[path + "\0\0" for path in table.path])  # numpy would cut them off
    with fixes("pack_tables: the path of row {} holds a zero character, which is ...") as fix:
        quietly(wide)
    quietly(wide.assign(path=[fix.code(r"path\.rstrip\('.*'\)", path=path) for path in wide.path]))


def test_the_fixes_work_for_images_that_cannot_be_packed():
    table = table_of()
    Path("1.png").write_text("no image")
    with fixes("pack_shards: image {} cannot be packed: {}") as fix:
        quietly(table, "pack")
    assert 'damaged="skip"' in fix
    assert len(quietly(table, "skipped", damaged=0.5)) == 3

    with fixes("packing: {} of this pack as damaged") as fix:
        quietly(table, "skipped")
    option = fix.text.rpartition(" ")[2]
    assert len(with_option(fix, f"'skipped', {option}", table)) == 3

    Path("2.png").write_text("no image")
    with fixes("packing: {} of {} images are damaged or missing, and damaged= ...") as fix:
        quietly(table, damaged=0.3)
    with_option(fix, fix.text.rpartition(" ")[2], table)
    picture(1).save("1.png")  # copied again
    picture(2).save("2.png")
    quietly(table, "pack")

    missing = table.assign(path=[f"no-{path}" for path in table.path])
    with fixes("packing: none of the {} images can be decoded"):
        quietly(missing, damaged=1.0)
    quietly(table, "all", damaged=1.0)


def imread(file):
    """Read a file of the test below as tifffile does, which is not a requirement of tpukit."""
    return np.frombuffer(Path(file).read_bytes()[-2 * 28 * 28 * 13 :], np.uint16).reshape(
        28, 28, 13
    )


def test_the_fixes_work_for_files_that_pillow_does_not_open():
    names = {"tifffile": SimpleNamespace(imread=imread), "labels": ["a"]}
    random = np.random.default_rng(0).integers(1, 255, 28 * 28 * 26, np.uint8)
    bands = random.view(np.uint16).reshape(28, 28, 13)
    Path("0.tif").write_bytes(tiff_of(bands))
    np.save("1.npy", bands[..., :3])
    for file in ("0.tif", "1.npy"):
        with fixes("unread_files: Pillow does not open this kind of file: {}") as fix:
            quietly(pandas.DataFrame({"path": [file]}))
        call = re.search(r"pack\(.*?\.\.\.\)(?=;)", fix.text)[0]
        call = call.replace(" ...)", " next_folder(), classes=labels)")
        packed = fix.run(call, **names, files=[file], next_folder=next_folder)
        assert packed[0][0].shape == (3, 28, 28)

    source = [(random[: 28 * 28].tobytes(), 0)]
    with fixes("unread_files: Pillow does not open this kind of file: {}") as fix:
        quietly(source)
    call = re.search(r"pack\(.*?\.\.\.\)", fix.text)[0].replace("...", "next_folder()")
    packed = fix.run(call, source=source, next_folder=next_folder)
    assert np.array_equal(packed[0][0][0].reshape(-1), random[: 28 * 28])


def test_the_fixes_work_for_images_of_more_pixels_than_pillow_opens(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with (
        warnings.catch_warnings(action="ignore"),
        fixes("decoding: its header claims more than {} pixels, the limit of ...") as fix,
    ):
        quietly(table_of(2), "pack")
    line = re.search(r"PIL\.Image\.MAX_IMAGE_PIXELS = None", fix.text)[0]
    exec(line, NAMES)
    assert len(quietly(table_of(2), "pack")) == 2


CHANGED = {
    "cat/0.png": "cat\\0.png",
    "0.png": "0.PNG",
    "1.PNG": "1.png",
    "2.png": " 2.png ",
    "3.png": "3",
}


@pytest.mark.parametrize(("file", "path"), CHANGED.items())
def test_the_fixes_work_for_paths_that_are_written_in_another_way(file, path):
    folder_of(Path(), file)
    table = pandas.DataFrame({"path": [path]})
    with fixes("pack_shards: image {} cannot be packed: {}") as fix:
        quietly(table)
    path = fix.code(r'table\[.*?(\.str.*?\)|\+ ".png")', table=table)
    assert len(quietly(table.assign(path=path), "mended")) == 1


def test_the_fixes_of_tables_work_for_a_csv_file():
    table_of(4, kind=["cat", "cat;dog", "dog", "dog;cat"], patient=["01", "02", "02", "03"]).to_csv(
        "table.csv", index=False
    )
    with fixes("pack_sources: {}") as fix:
        quietly("table.csv", labels="kind", groups="patient")
    table = fix.code(r"(?<=table = ).*?(?=, with)")
    tags = fix.code(r"(?<=tags = ).*?(?=; pack)", table=table)
    root = fix.code(r"(?<=root=)[^;]*")
    made = quietly(table.join(tags), labels=list(tags), groups="patient", root=root)
    assert (made.names, made.group_names) == (["cat", "dog"], ["01", "02", "03"])


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_the_fixes_work_for_paths_in_a_csv_file(ending):
    folder_of(Path("in"), "000.png", "001.png")
    separator = {"csv": ",", "tsv": "\t"}[ending]
    table = pandas.DataFrame({"id": ["000", "001"]})
    table.to_csv(f"in/table.{ending}", sep=separator, index=False)
    with fixes("pack_shards: image {} cannot be packed: {}") as fix:
        quietly(f"in/table.{ending}", path="id")
    table = fix.code(r"(?<=table = ).*?(?=, with)")
    column = fix.code(r"table\['id'\] [^;]*", table=table)
    root = fix.code(r"(?<=root=)[^;]*")
    assert len(quietly(table.assign(id=column), path="id", root=root)) == 2


def test_the_fixes_work_for_paths_from_another_folder():
    folder_of(Path("in"), "0.png")
    table = pandas.DataFrame({"path": ["0.png"]})
    with fixes("pack_shards: image {} cannot be packed: {}") as fix:
        quietly(table)
    assert f"check the path; the current folder is {os.getcwd()}" in fix
    quietly(table, "rooted", root="in")


# Files of tables


TABLES = {
    ".parquet": lambda table, file: table.to_parquet(file),
    ".feather": lambda table, file: table.to_feather(file),
    ".json": lambda table, file: table.to_json(file),
    ".jsonl": lambda table, file: table.to_json(file, orient="records", lines=True),
    ".txt": lambda table, file: table.to_csv(file, sep=" ", index=False),
}


@pytest.mark.parametrize("ending", TABLES)
def test_the_fixes_work_for_tables_in_other_files(ending, tmp_path):
    file = tmp_path / f"table{ending}"
    TABLES[ending](table_of(kind=["a", "b"] * 2), file)
    with fixes("pack_tables: {} is a file, and pack reads folders, CSV files and ...") as fix:
        quietly(file, labels="kind")
    assert len(done(fix, fix.text.replace(" path=, labels=,", ""), labels="kind")) == 4


def test_the_fixes_work_for_archives_and_files_that_are_not_there():
    folder_of(Path("in"), "cat/a.png")
    shutil.make_archive("in", "tar", "in")
    shutil.rmtree("in")
    with fixes("pack_tables: {} is a file, and pack reads folders, CSV files and ...") as fix:
        quietly("in.tar")
    os.makedirs("in")
    assert os.system(f"{fix.text.rpartition(', ')[2]} in.tar -C in") == 0
    quietly("in")

    table = table_of(kind=["a", "b"] * 2)
    table.to_csv("table.csv", index=False)
    with fixes("pack_tables: there is no file {}") as fix:
        quietly("tables.csv")
    assert fix.text == f"check the path; the current folder is {os.getcwd()}"
    quietly("table.csv")

    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pandas(table)
    with fixes("pack_sources: pack reads tables of pandas, got a {}") as fix:
        quietly(table, labels="kind")
    done(fix, fix.text, names={"table": table}, labels="kind")


DIALECTS = {
    "encoding='latin-1'": {"encoding": "latin-1"},
    "encoding='utf-16'": {"encoding": "utf-16"},
    "sep=';'": {"sep": ";"},
    "index_col=False": {},
}


@pytest.mark.parametrize("option", DIALECTS)
def test_the_fixes_work_for_dialects_of_csv_files(option):
    table_of(kind=["Bär", "élan"] * 2).to_csv("table.csv", index=False, **DIALECTS[option])
    if option == "index_col=False":
        Path("table.csv").write_text("path,kind\n0.png,cat,\n1.png,dog,\n")
    with fixes("pack_tables: {} {}") as fix:
        quietly("table.csv", labels="kind")
    assert option in fix.text.replace('"', "'")
    assert len(done(fix, fix.text, labels="kind").classes) == 2


@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_the_fixes_work_for_csv_files_that_pandas_cannot_read(ending):
    file = f"table.{ending}"
    mark = {"csv": ",", "tsv": "\t"}[ending]
    table_of(kind=["a", "b"] * 2).to_csv(file, sep=mark, index=False)
    whole = Path(file).read_text()
    Path(file).write_text(f"{whole}4.png{mark}a{mark}of 2020{mark}new\n")
    with fixes("pack_tables: {} {}") as fix:
        quietly(file, labels="kind")
    assert "on_bad_lines='warn'" in fix
    with pytest.warns(pandas.errors.ParserWarning):
        assert len(done(fix, fix.text, labels="kind")) == 4
    Path(file).write_text("")
    with fixes("pack_tables: {} is empty"):
        quietly(file, labels="kind")
    Path(file).write_text(whole)  # made again
    quietly(file, labels="kind")


# Masks


MASK = np.eye(16, dtype=np.uint8)
COLOURS = [(0, 0, 0), (255, 0, 0)]
COLOURED = Image.fromarray(np.array(COLOURS, np.uint8)[MASK])
SHAPE = "masks: a mask is (H, W), one class number for each pixel, but this one has the shape {}"
MODE = "masks: a mask is one class number for each pixel, and this is an image of mode {}"
NUMBERS = "masks: a mask holds class numbers, whole and from 0 to 255, but this one holds {} ({})"
STACKED = [1 - MASK, MASK]
MASKS = {
    "colours": (MODE, COLOURED, r"sum.*\)\)"),
    "two channels": (MODE, Image.fromarray(MASK).convert("LA"), r"mask\.getchannel.*\)"),
    "an array of colours": (SHAPE, np.asarray(COLOURED), r"sum.*?colours\)\)"),
    "one-hot, first": (SHAPE, np.stack(STACKED), r"mask\.argmax\(0\)"),
    "one-hot, last": (SHAPE, np.stack(STACKED, axis=2), r"mask\.argmax\(-1\)"),
    "large numbers": (NUMBERS, MASK.astype(int) * 300, r"numpy\.searchsorted.*?\)"),
    "numbers below 0": (NUMBERS, -MASK.astype(int), r"numpy\.where.*?\)"),
}


@pytest.mark.parametrize("case", MASKS)
def test_the_fixes_work_for_masks_that_are_no_class_numbers(case):
    key, mask, pattern = MASKS[case]
    with fixes(key) as fix:
        quietly([(picture(1), mask)])
    calls = re.findall(pattern, fix.text)
    assert calls
    truth = MASK * 255 if case == "numbers below 0" else MASK
    for call in calls:
        mended = fix.run(call, mask=mask, colours=COLOURS, values=[0, 300])
        taken = quietly([(picture(1), mended)]).take([0])[0, ..., 3]
        assert np.array_equal(taken, truth), call


def test_the_fixes_work_for_masks_of_other_sizes_and_files():
    image, mask = picture(1, side=32), Image.fromarray(MASK)
    with fixes("masks: the image has {} pixels, and its mask {}") as fix:
        quietly([(image, mask)])
    quietly([(image, fix.code(r"(?<=: ).*", image=image, mask=mask))])

    Image.fromarray(MASK * 255).save("mask.jpg", quality=95)
    mask = Image.open("mask.jpg")
    with fixes("masks: the mask is a JPEG, which blurs class numbers") as fix:
        quietly([(picture(1), mask)])
    fix.run(fix.text.rpartition("values: ")[2], mask=mask).save("mask.png")
    taken = quietly([(picture(1), Image.open("mask.png"))]).take([0])[0, ..., 3]
    assert np.array_equal(taken, MASK)


def test_the_fixes_work_for_a_mask_beside_an_image_that_is_to_be_turned():
    note = Image.Exif()
    note[0x0112] = 6
    picture(1).save("x.png", exif=note)
    Image.new("L", (16, 16)).save("mask.png")
    table = pandas.DataFrame({"path": ["x.png"], "mask": ["mask.png"]})
    with fixes("masks: the EXIF data turn the image, ...") as fix:
        quietly(table, masks="mask")
    with Image.open("x.png") as image:
        image.load()
        call = fix.text.partition(": ")[2].partition("; or")[0]
        fix.run(call, ImageOps=ImageOps, image=image, file="x.png")
    quietly(table, masks="mask")


# Splits


def test_the_fixes_work_for_splits():
    groups = np.arange(10)
    with fixes("splitting: stratify= has the shape {}, and there are {} images"):
        split_by_group(groups, stratify=[0, 1])
    split_by_group(groups, stratify=groups % 2)
    split_by_group(groups, stratify=np.eye(2)[groups % 2])

    values = np.linspace(0, 1, 10)
    with fixes("splitting: stratify= has {} classes for {} images") as fix:
        split_by_group(groups // 2, stratify=values)
    split_by_group(groups // 2, stratify=fix.code(r"(?<=: ).*", values=values))

    column = pandas.Series(list("abc" * 3) + [None])
    with fixes("splitting: stratify= has missing values") as fix:
        split_by_group(groups, stratify=column)
    split_by_group(groups, stratify=fix.code(r"column.*", column=column))

    labels = np.linspace(0, 1, 20).reshape(10, 2)
    with fixes("splitting: stratify= with several columns must hold zeros and ones") as fix:
        split_by_group(groups, stratify=labels)
    split_by_group(groups, stratify=fix.run(fix.text.rpartition("stratify=")[2], labels=labels))

    table = table_of(one=[1] * 4, patient=[1, 1, 2, 2])
    with fixes("splitting: {} in one group cannot be split"):
        quietly(table, groups="one").split(0.5)
    made = quietly(table, "patients", groups="patient")
    made.split(0.5)

    for share in (0, 1, 1.5, -0.2, 20):
        with fixes("splitting: valid must be the share of the images to validate on, ...") as fix:
            made.split(share)
    made.split(**fix.run(f"dict({fix.text})"))


# Stored images


def test_the_fixes_work_for_stored_images_that_are_asked_for():
    made, mask, indices = quietly(items()), np.array([True, False, True, False]), [0, 2]
    with fixes("stored_images: index {} is out of range: there are {} images"):
        made[4]
    for part in made.split(0.5):
        for number in part:
            made[int(number)]

    with fixes("stored_images: indices are one list of whole numbers, got shape {} ...") as fix:
        made.take(mask)
    made.take(fix.code(r"numpy\..*", mask=mask))

    with fixes("stored_images: the index of an image must be one whole number, got {}") as fix:
        made[indices]
    for call in re.findall(r"[\w.]+\([\w, ]*indices\)", fix.text):
        assert len(fix.run(call, images=made, indices=indices)) == 2

    wrong = [((3,), np.uint8), ((2, 16, 16, 3), np.uint8), ((1, 16, 16, 3), np.float32)]
    for shape, dtype in wrong:
        with fixes("stored_images: take writes {} uint8, and out is {} {}") as fix:
            made.take([0], out=np.empty(shape, dtype))
    made.take([0], out=fix.code(r"(?<=out=).*?(?=, or)"))
    made.take([0])


def test_the_fixes_work_for_labels_put_in_place():
    made = quietly(Pictures())
    with fixes("stored_images: label {} is not one of the {} classes"):
        made.labels = [2, 0]
    made.labels = [1, 0]
    quietly(Pictures(["a", "b", "c"], [2, 0]))

    table = table_of(8, kind=list("ababbbaa"))
    made = quietly(table, labels="kind")
    for words in (table.kind, table[["kind"]]):
        with fixes("stored_images: labels must be finite numbers") as fix:
            made.labels = words
        made.labels = fix.code(r"\S+\(images\.classes\.index\)", column=words, images=made)
        assert made.labels.tolist() == [int(table.kind[row] == "b") for row in made.rows]
    words = [made.classes[label] for label in made.labels]  # in the order of the images
    with fixes("stored_images: labels must be finite numbers") as fix:
        made.labels = words
    before = made.labels.tolist()
    made.labels = fix.code(r"\[.*\]", words=words, images=made)
    assert made.labels.tolist() == before

    made = quietly(items())
    with fixes("stored_images: labels must be finite numbers"):
        made.labels = [0, 1, np.nan, 0]
    made.labels = [0, 1, 2, 0]

    table = table_of(8, label=list(range(8)), labels=list(range(8)))
    made = quietly(table)
    more = pandas.concat([table.label, pandas.Series([9], [99])])
    with fixes("row_labels: the labels have {} rows, and the table that was packed had {}") as fix:
        made.labels = more
    made.labels = fix.code(r"(?<=: ).*?\]", labels=more, table=table)

    taken = table.label.iloc[made.rows]
    with fixes("row_labels: the labels have another index than the table that ...") as fix:
        made.labels = taken
    made.labels = fix.code(r"(?<=: ).*?\]", labels=taken, table=table)
    assert made.labels.tolist() == made.rows.tolist()
    made.labels = fix.code(r"labels\.to_numpy\(\)\[.*?\]", labels=table.label, images=made)
    assert made.labels.tolist() == made.rows.tolist()
    made.labels = fix.code(r"(?<=the order of the images: )labels\.to_numpy\(\)", labels=taken)
    assert made.labels.tolist() == made.rows.tolist()

    with fixes("stored_images: there are {} images, and labels of shape {}") as fix:
        made.labels = [1, 2]
    made.labels = fix.code(r"[^:]*$", table=table, images=made)


def test_the_fixes_work_for_folds_and_for_predictions_in_table_order():
    with fixes("splitting: {} groups cannot be divided into {} folds") as fix:
        folds_by_group([0, 0, 1, 2])
    assert len(folds_by_group([0, 0, 1, 2], fix.code(r"(?<=count=)\d+"))) == 3

    images = quietly(items(4))
    values = np.arange(2)
    with fixes("row_labels: there are {} images, and values of shape {}") as fix:
        images.in_table_order(values)
    call = re.search(r"in_table_order\(.*?\)", fix.text)[0]
    assert fix.run(f"images.{call}", images=images, values=values, indices=[3, 1]).shape == (4,)

    with fixes("row_labels: an image has more than one value"):
        images.in_table_order(values, [1, 1])
    images.in_table_order(values, [1, 2])


# TFRecord files


def read(**options):
    return list(read_tfrecords("a.tfrec", **options))


# The features of the records, the options that are refused, words of the fix, and its options.
FEATURES = {
    "tfrecords: {} has several labels, one of which is a word": (
        [{"image": b"x", "target": b"cat", "number": 1}],
        {"labels": ("target", "number")},
        "labels=(...)",
        {"labels": ("target",)},
    ),
    "tfrecords: feature {} of {} holds bytes, and labels are numbers or words": (
        [{"image": b"x", "target": b"\xff\xd8", "number": 1}],
        {},
        "labels=(...)",
        {"labels": ("number",)},
    ),
    "tfrecords: feature {} of {} holds no image: one string of bytes is needed": (
        [{"image": 3, "photo": b"x", "target": 1}],
        {},
        "image=...",
        {"image": "photo"},
    ),
    "tfrecords: feature {} of {} is too large for a label, which is a float32": (
        [{"image": b"x", "id": 2**30, "target": 1}],
        {"labels": ("target", "id")},
        "leave 'id' out of labels=(...)",
        {"labels": ("target",)},
    ),
    "tfrecords: {} has no feature {}": (
        [{"image": b"x", "kind": 1}],
        {},
        "labels=(...)) with one of these names",
        {"labels": ("kind",)},
    ),
    "tfrecords: {} has {} where earlier records have {}": (
        [
            {"image": b"x", "target": 1, "boxes": [1, 2]},
            {"image": b"x", "target": 1, "boxes": [1, 2, 3]},
        ],
        {"labels": ("boxes",)},
        "labels=(...)",
        {"labels": ("target",)},
    ),
}


@pytest.mark.parametrize("key", FEATURES)
def test_the_fixes_work_for_features_of_tfrecord_files(key):
    features, refused, words, mended = FEATURES[key]
    write(Path("a.tfrec"), *(example(**one) for one in features))
    with fixes(key) as fix:
        read(**refused)
    assert words in fix
    read(**mended)


def test_the_fixes_work_for_tfrecord_files():
    file = write(Path("a.tfrec"), example(image=b"x", target=1))
    whole = file.read_bytes()
    with fixes("tfrecords: read_tfrecords got no files") as fix:
        read_tfrecords([])
    list(read_tfrecords(fix.run(fix.text.rpartition("in ")[2])))
    with fixes("tfrecords: {} {}") as fix:
        read_tfrecords(".")
    list(read_tfrecords(fix.code(r"(?<=: ).*")))

    file.write_bytes(whole[:-3])
    with fixes("tfrecords: {}") as fix:
        read()
    assert fix.text == "copy or download this file again, or leave it out"
    file.write_bytes(whole)
    read()

    write(Path("a.tfrec"), example(image=b"x", target=1, who=[1, 2], scan=b"one"))
    records = read_tfrecords("a.tfrec")
    with fixes(
        "tfrecords: feature {} of {} must have exactly one word or number, because it ..."
    ) as fix:
        records.column("who")
    assert "groups=" in fix
    assert records.column("scan") == ["one"]

    write(Path("b.tfrec"), b"\xff\xff\xff")
    with fixes("tfrecords: {} is not a tf.train.Example"):
        list(read_tfrecords(["b.tfrec", "a.tfrec"]))
    read()


def test_every_fix_has_its_test():
    assert fixes.tested(__file__) == fixes.source()
