"""Each fix of the room for packs, done as it says: the same call then passes."""

import builtins
import errno
import io
import os
import re
import shutil
import struct
import sys
import zlib
from pathlib import Path
from unittest import mock

import numpy
import numpy as np
import pandas
import PIL.Image
import pytest
import torch
from fixes import Fixes
from one_process import in_this_process
from PIL import Image, ImageOps
from torch.utils.data import ConcatDataset, Subset

import tpukit
from tpukit.packs import (
    Cache,
    Records,
    build_cache,
    build_pixel_cache,
    cache_or_decode,
    decode,
    decoding,
    pack,
    packing,
    read_tfrecords,
    records,
    room,
    tfrecords,
)
from tpukit.packs.splitting import split_by_group

fixes = Fixes("packs/*.py")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with in_this_process():
        yield


def picture(*seed, side=16):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8))


def folder_of(path, *files):
    for number, file in enumerate(files):
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        picture(number).save(path / file)
    return path


def table_of(folder, count=4, **columns):
    names = [f"{number}.png" for number in range(count)]
    folder_of(folder, *names)
    return pandas.DataFrame({"path": names, **columns})


def quietly(source, folder="pack", **options):
    return pack(source, folder, progress="off", workers=1, **options)


def items(count=4, label=int):
    return [(picture(number), label(number % 2)) for number in range(count)]


def with_pack(done, **more):
    """Do a call of `pack` that a fix names, with the folder and the options in the dots' place."""
    call = re.search(r"pack\(.*\)", done)[0].replace("...", "'pack', progress='off', workers=1, **more", 1)
    return eval(call, {"pack": pack, "pandas": pandas, "more": more})


class Pictures:
    def __init__(self, classes=("cat", "dog"), targets=(0, 1)):
        self.classes, self.targets = list(classes), list(targets)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return picture(index), self.targets[index]


@fixes("array_records: a pack is made of array_record files, and array_record is not installed")
def _(folder):
    def without():
        with mock.patch.dict(sys.modules, {"array_record.python": None}):
            quietly(items())

    return without, lambda fix: quietly(items()) if "%pip install array_record" in fix else None


@fixes("array_records: record {} of {} cannot be read")
def _(folder):
    made = quietly([(picture(number, side=64), number % 2) for number in range(4)])
    file = made.shards.files[0]
    whole = file.read_bytes()
    at = whole.find(bytes(np.asarray(picture(int(made.rows[0]), side=64)).tobytes()[:64]))
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])

    def mended(fix):
        image = int(re.search(r"leave image (\d+) out", fix)[1])
        Records("pack").take([number for number in range(4) if number != image])
        file.write_bytes(whole)  # copied again from where it is whole
        Records("pack").take(range(4))

    return lambda: Records("pack").take(range(4)), mended


@fixes("array_records: {} cannot be opened")
def _(folder):
    import resource

    quietly(items()).take([0])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fresh = Records("pack")

    def without():
        taken = os.open("/", os.O_RDONLY)
        os.close(taken)
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken, hard))  # no more than there are
        try:
            fresh.take([0])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return without, lambda fix: fresh.take([0])


@fixes("build_pixel_cache: a cache is made of Records, got {}")
def _(folder):
    made = quietly(items())

    def mended(fix):
        cache = build_cache(made, size=16, progress="off")
        assert "take the Subset of the cache" in fix
        assert len(Subset(cache, [0])) == 1

    return lambda: build_cache(Subset(made, [0]), size=16), mended


@fixes("build_pixel_cache: a cache is made of Records, got {}")
def _(folder):
    quietly(items())
    return lambda: build_cache("pack", size=16), lambda fix: build_cache(
        eval(fix, {"Records": Records, "folder": "pack"}), size=16
    )


@fixes("build_pixel_cache: nothing can be written to {}")
def _(folder):
    made = quietly(items())

    def without():
        with mock.patch.object(build_pixel_cache, "is_writable", return_value=False):
            build_cache(made, "read-only", size=16)

    return without, lambda fix: build_cache(made, "another", size=16)


@fixes("build_pixel_cache: size is the height and width in pixels, got {}")
def _(folder):
    made = quietly(items())
    return lambda: build_cache(made, size=None), lambda fix: eval(
        f"build_cache(made, {fix}, folder='small')",
        {"made": quietly(items(), "b", size=128), "build_cache": build_cache},
    )


@fixes("build_pixel_cache: the disk of {} is full: a cache of {} images at {} pixels takes {}")
def _(folder):
    made = quietly(items())

    def without():
        with mock.patch.object(build_pixel_cache, "_allocate", side_effect=OSError(errno.ENOSPC, "full")):
            build_cache(made, "cache", size=16)

    def mended(fix):
        build_cache(made, "cache", size=16)
        cache_or_decode(made, size=16, folder="other", free=2**40, available=2**40)

    return without, mended


@fixes("decoding: {}")
def _(folder):
    def said(**modules):
        decoding.jpeg_decoder.cache_clear()
        with mock.patch.dict(sys.modules, modules), mock.patch.object(builtins, "print") as printed:
            decoding.jpeg_decoder()
        decoding.jpeg_decoder.cache_clear()
        return printed.call_args[0][0] if printed.called else ""

    def mended(fix):
        assert fix == "pip install simplejpeg"
        assert not said()

    return lambda: said(simplejpeg=None), mended


@fixes("image_folders: the folder {} holds no image that is read here, and would be a class without one")
def _(folder):
    folder_of(Path("in"), "cat/a.png")
    Path("in/dog").mkdir()
    Path("in/dog/a.heic").write_text("")

    def mended(fix):
        shutil.copytree("in", "again")
        picture(1).save("again/dog/a.png")
        quietly("again", "a")
        shutil.move("in/dog", "away")
        quietly("in", "b")

    return lambda: quietly("in"), mended


@fixes("image_folders: there is no folder {}")
def _(folder):
    return lambda: quietly("in"), lambda fix: quietly(folder_of(Path("in"), "cat/a.png"))


@fixes("image_folders: {}")
def _(folder):
    folder_of(Path("in"), "cat/a.png").chmod(0o000)
    look = os.scandir

    def scandir(path):
        if not os.stat(path).st_mode & 0o500 == 0o500:
            raise PermissionError(errno.EACCES, "Permission denied")  # which root is never refused
        return look(path)

    def call():
        with mock.patch.object(os, "scandir", scandir):
            return quietly("in")

    def mended(fix):
        os.system(fix.partition(",")[0])
        call()

    return call, mended


@fixes("image_folders: {} holds no image in a sub-folder")
def _(folder):
    folder_of(Path("in/cat"), "a.png")

    def mended(fix):
        quietly("in")
        quietly(pandas.DataFrame({"path": ["in/cat/a.png"]}), "table")

    return lambda: quietly("in/cat"), mended


@fixes("image_folders: {} holds {} folders that are not in classes=")
def _(folder):
    folder_of(Path("in"), "cat/a.png", "dog/a.png")

    def mended(fix):
        quietly("in", "a", classes=["cat", "dog"])
        shutil.move("in/dog", "away")
        quietly("in", "b", classes=["cat"])

    return lambda: quietly("in", classes=["cat"]), mended


@fixes("image_folders: {} would give the classes {}, and in each lie the same folders")
def _(folder):
    folder_of(Path("in"), "a/cat/1.png", "a/dog/1.png", "b/cat/1.png", "b/dog/1.png")

    def mended(fix):
        assert with_pack(fix).classes == ["cat", "dog"]
        assert eval(f"quietly('in', 'b', {fix.rpartition('or ')[2]})").classes == ["a", "b"]

    return lambda: quietly("in"), mended


@fixes("image_modes: a {} of mode {} has no known range: which values are black and white?")
def _(folder):
    Path("in/a").mkdir(parents=True)
    Image.fromarray(np.eye(8, dtype=np.float32)).save("in/a/x.tif")
    return lambda: quietly("in"), lambda fix: with_pack(
        fix.partition("; or")[0].replace("pack(...", "pack('in', ...").replace("(low, high)", "(0, 1)")
    )


@fixes("image_modes: it holds nan or infinity")
def _(folder):
    image = np.full((8, 8, 3), np.nan, np.float32)

    def mended(fix):
        quietly([(eval(fix.partition(": ")[2], {"numpy": numpy, "image": image}), 0)], window=(0, 1))

    return lambda: quietly([(image, 0)], window=(0, 1)), mended


@fixes("image_modes: window is the values that become black and white, the lower one first, got {}")
def _(folder):
    image = np.arange(64, dtype=np.uint16).reshape(8, 8)

    def mended(fix):
        for number, window in enumerate(re.findall(r"\(-?\d+, \d+\)", fix)):
            quietly([(image, 0)], f"pack-{number}", window=eval(window))

    return lambda: quietly([(image, 0)], window=(9, 0)), mended


@fixes("image_modes: window= is for one channel of 16 bits, and this {} has {}")
def _(folder):
    def part(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)
    parts = part(b"IHDR", head) + part(b"IDAT", zlib.compress(bytes(25 * 4))) + part(b"IEND", b"")
    Path("in/a").mkdir(parents=True)
    Path("in/a/x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + parts)

    def mended(fix):
        quietly([(np.zeros((4, 4, 3), np.uint16), 0)], "a", window=(0, 4095))
        quietly("in", "b")

    return lambda: quietly("in", window=(0, 4095)), mended


@fixes("item_parts: an array of four channels, {}, and nothing says what the fourth is")
def _(folder):
    image = np.zeros((8, 8, 4), np.uint8)

    def mended(fix):
        for number, call in enumerate((r"image\[.*?\]", r"PIL\.\S+ \S+\)")):
            done = eval(re.search(call, fix)[0], {"image": image, "PIL": PIL})
            quietly([(done, 0)], f"pack-{number}")

    return lambda: quietly([(image, 0)]), mended


@fixes("item_parts: an array of shape {} beside the image is no mask of it: boxes, points, one-hot?")
def _(folder):
    boxes, one_hot = np.array([[1, 2, 3, 4], [5, 6, 7, 8]]), np.array([[0, 1, 0]])

    def mended(fix):
        for number, call in enumerate(re.findall(r"\w+\.\w+\(-?\d*\)", fix)):
            quietly([(picture(1), eval(call, {"boxes": boxes, "one_hot": one_hot}))], f"pack-{number}")

    return lambda: quietly([(picture(1), boxes)]), mended


@fixes("item_parts: an image of shape {} and dtype {}{}")
def _(folder):
    image = np.full((8, 8, 3), 200)

    def mended(fix):
        quietly([(image.astype(np.uint8), 0)], "a")
        quietly([(image / 255, 0)], "b")
        with_pack(
            fix.replace("pack(...", "pack(*more.pop('items'), ...").replace("(low, high)", "(0, 255)"),
            items=[[(image, 0)]],
        )

    return lambda: quietly([(image, 0)]), mended


@fixes("item_parts: item {} has a dict for its label: {}")
def _(folder):
    class Boxes(Pictures):
        target_transform = None

        def __getitem__(self, index):
            target = {"label": self.targets[index], "box": [1, 2]}
            return picture(index), self.target_transform(target) if self.target_transform else target

    def mended(fix):
        dataset = Boxes()
        dataset.target_transform = lambda target: target["label"]
        quietly(dataset)

    return lambda: quietly(Boxes()), mended


@fixes("item_parts: item {} has labels of shape {}, which are rows of rows")
def _(folder):
    def mended(fix):
        quietly([(picture(1), [1, 2])], "a")
        quietly([(picture(1), np.zeros((16, 16), np.uint8))], "b")

    return lambda: quietly([(picture(1), [[1, 2], [3, 4]])]), mended


@fixes("item_parts: item {} has the word {} for its label, and words are numbered by classes=")
def _(folder):
    words = [(picture(0), "cat"), (picture(1), "dog")]

    def mended(fix):
        assert eval(f"quietly(words, {fix.partition(';')[0]})", {"quietly": quietly, "words": words}).classes == [
            "cat",
            "dog",
        ]
        datasets = pytest.importorskip("datasets")
        dataset = datasets.Dataset.from_dict(
            {"image": [{"bytes": png(k), "path": None} for k in (0, 1)], "label": ["cat", "dog"]}
        )
        dataset = eval(fix.rpartition(", ")[2], {"dataset": dataset})
        assert quietly(dataset, "b").classes == ["cat", "dog"]

    return lambda: quietly(words), mended


def png(*seed):
    file = io.BytesIO()
    picture(*seed).save(file, "PNG")
    return file.getvalue()


@fixes("item_parts: item {} is not (image, labels) as pack reads them")
def _(folder):
    def mended(fix):
        for number, item in enumerate([(png(1), 0), {"image": picture(1), "label": 0}, (np.asarray(picture(1)), ())]):
            quietly([item], f"pack-{number}")

    return lambda: quietly([5]), mended


@fixes("item_parts: keys {}, and none is {}")
def _(folder):
    item = {"photo": picture(1), "species": 1, "segmentation": np.zeros((16, 16), np.uint8)}
    return lambda: quietly([item]), lambda fix: with_pack(
        fix.replace("pack(...", "pack(more.pop('items'), ..."), items=[item]
    )


@fixes("item_parts: keys {}, and none of the others is a label by its name")
def _(folder):
    item = {"image": picture(1), "species": 1}

    def mended(fix):
        with_pack(fix.replace("pack(...", "pack(more.pop('items'), ..."), items=[item])
        quietly([item], "b", labels=[])

    return lambda: quietly([item]), mended


@fixes("item_parts: label {} of item {} is none of the {} classes")
def _(folder):
    def mended(fix):
        quietly(Subset(Pictures(targets=[0, 7]), [0]), "a")
        quietly(Pictures(targets=[7, 0]), "b", classes=())

    return lambda: quietly(Pictures(targets=[7, 0])), mended


@fixes("item_parts: the path {}")
def _(folder):
    paths, labels = table_of(folder).path.tolist(), [0, 1, 0, 1]

    def mended(fix):
        call = fix.partition(": ")[2]
        eval(f"quietly({call})", {"quietly": quietly, "pandas": pandas, "paths": paths, "labels": labels})

    return lambda: quietly(list(zip(paths, labels, strict=True))), mended


@fixes("items: classes= names the classes of one label, and items have {}")
def _(folder):
    two = [(picture(1), [0, 1])]
    return lambda: quietly(two, classes=["a"]), lambda fix: quietly(two)


@fixes("items: item {} is another one each time it is read: a random transform?")
def _(folder):
    class Flipped(Pictures):
        flips = True

        def __getitem__(self, index):
            return picture(*np.random.default_rng().integers(0, 2**30, 2)) if self.flips else picture(index), 0

    def mended(fix):
        dataset = Flipped()
        dataset.flips = False
        quietly(dataset)
        augment = eval(
            re.search(r"augment=(.*?\)\))|augment=(.*?\))\)", fix + ")")[0].partition("=")[2].rstrip(")") + ")",
            {"tpukit": tpukit},
        )
        assert augment.flip == 0.5

    return lambda: quietly(Flipped()), mended


@fixes("items: item {} is not like the first one: {}")
def _(folder):
    mixed = [(np.zeros((8, 8, 3), np.uint8), 0), (np.zeros((9, 9, 3), np.uint8), 0)]

    def mended(fix):
        quietly(mixed, "a", size=8)
        quietly([(png(1), 0), (png(2), 0)], "b")

    return lambda: quietly(mixed), mended


@fixes("items: item {} of the source cannot be read")
def _(folder):
    class Broken(Pictures):
        def __getitem__(self, index):
            return super().__getitem__(index if index < 3 else 1 // 0)

    broken = Broken(targets=[0, 1, 0, 1])
    return lambda: quietly(broken), lambda fix: quietly(broken, damaged=0.5 if 'damaged="skip"' in fix else 0.0)


@fixes("items: pack cannot read a {}")
def _(folder):
    parts = {"train": items()}
    return lambda: quietly(parts), lambda fix: quietly(eval(fix.rpartition(": ")[2], {"source": parts}))


@fixes("items: pack cannot read a {}")
def _(folder):
    return lambda: quietly(5), lambda fix: quietly(items())


@fixes("items: the dataset says two things of its classes")
def _(folder):
    dataset = Pictures()
    dataset.class_to_idx = {"dog": 1, "cat": 3}
    return lambda: quietly(dataset), lambda fix: eval(
        f"quietly(d, {fix.split()[0].replace('...', repr('a') + ',' + repr('b'))})", {"quietly": quietly, "d": dataset}
    )


@fixes("items: the datasets that are joined number their classes differently")
def _(folder):
    parts = [Pictures(), Pictures(["dog", "cat"])]

    def mended(fix):
        quietly(ConcatDataset([parts[0], Pictures()]), "a")
        for number, part in enumerate(parts):
            quietly(part, f"part-{number}")

    return lambda: quietly(ConcatDataset(parts)), mended


@fixes("items: the source yields nothing")
def _(folder):
    def pictures():
        yield from items()

    used = pictures()
    list(used)
    return lambda: quietly(used), lambda fix: quietly(pictures())


@fixes("items: the source yields {} items, and the source has a length of {}")
def _(folder):
    class Sized:
        def __init__(self, length):
            self.length = length

        def __len__(self):
            return self.length

        def __iter__(self):
            return iter(items(4))

    return lambda: quietly(Sized(3)), lambda fix: quietly(Sized(4), "again")


@fixes("label_arrays: label {} of row {} is missing")
def _(folder):
    table_of(folder, kind=["None", "a", "b", "a"]).to_csv("table.csv", index=False)

    def mended(fix):
        table = pandas.read_csv("table.csv")
        quietly(eval(re.search(r"table\.dropna\(.*?\)", fix)[0], {"table": table}), "a", labels="kind", root=folder)
        call = fix.replace("file,", "'table.csv',").replace("root=folder of the file", f"root={str(folder)!r}")
        assert "None" in with_pack(call, labels="kind").classes

    return lambda: quietly("table.csv", labels="kind"), mended


@fixes("label_arrays: label {} of row {} is none of the classes")
def _(folder):
    table = table_of(folder, kind=["cat", "dog", "emu", "cat"])

    def mended(fix):
        quietly(table, "a", labels="kind", classes=["cat", "dog", "emu"])
        quietly(table.assign(kind=[0, 1, 0, 1]), "b", labels="kind", classes=["cat", "dog"])

    return lambda: quietly(table, labels="kind", classes=["cat", "dog"]), mended


@pytest.mark.parametrize(
    ("value", "mend"),
    [
        (np.nan, lambda table, fix: eval(fix.rpartition(": ")[2], {"table": table})),
        (1e39, lambda table, fix: table.assign(value=table.value / 1e9)),
        (1e-300, lambda table, fix: table.assign(value=np.log(table.value))),
        (2.0**24 + 1, lambda table, fix: table.assign(value=table.value / 1000)),
    ],
)
def test_a_label_that_float32_changes_is_mended_as_the_fix_says(tmp_path, value, mend):
    table = table_of(tmp_path, value=[1.0, 2.0, value, 3.0])
    with pytest.raises(ValueError, match="label 'value' of row 2") as caught:
        quietly(table, labels="value")
    assert len(quietly(mend(table, caught.value.fix), labels="value")) == 4


@fixes("label_arrays: label {} of {} {} {}")
def _(folder):
    table = table_of(folder, value=[1, 2**24 + 1, 3, 4])
    return lambda: quietly(
        table, labels=["value"]
    ), lambda fix: quietly(table).rows if "leave identifiers out" in fix else 1 / 0


@fixes("label_arrays: labels are numbers, and these are not: {} holds {}")
def _(folder):
    table = table_of(folder, kind=["cat", "dog"] * 2, text=["1", "2"] * 2, value=[1, 2, 3, 4])

    def mended(fix):
        quietly(table, "a", labels="kind")
        codes = eval(re.search(r"table\[.*?codes", fix)[0], {"table": table})
        quietly(table.assign(kind=codes), "b", labels=["kind", "value"])
        numbers = re.search(r"pandas\.to_numeric\(.*?\)", fix)[0].replace("kind", "text")
        quietly(table.assign(text=eval(numbers, {"pandas": pandas, "table": table})), "c", labels="text")

    return lambda: quietly(table, labels=["kind", "value"]), mended


@fixes("label_arrays: {}")
def _(folder):
    table = table_of(folder, species=["dog", "Dog ", "dog", "cat"])

    def mended(fix):
        done = eval(re.search(r"table\..*?\)", fix)[0], {"table": table})
        assert quietly(done, labels="species").classes == ["cat", "dog"]
        os.rename(folder_of(folder / "in", "cat/a.png", "Cat/a.png") / "Cat", folder / "in" / "dog")
        quietly("in", "b")

    return lambda: quietly(table, labels="species"), mended


@fixes("label_arrays: {} images have no group, first image {}")
def _(folder):
    table = table_of(folder, patient=["a", None, "b", "c"])
    return lambda: quietly(table, groups="patient"), lambda fix: quietly(table.fillna("d"), groups="patient")


@fixes("masks: the EXIF of the image turns it, and its mask may or may not be turned already")
def _(folder):
    note = Image.Exif()
    note[0x0112] = 6
    picture(1).save("x.png", exif=note)
    Image.new("L", (16, 16)).save("mask.png")
    table = pandas.DataFrame({"path": ["x.png"], "mask": ["mask.png"]})

    def mended(fix):
        with Image.open("x.png") as image:
            image.load()
            eval(fix.partition(": ")[2].partition("; or")[0], {"ImageOps": ImageOps, "image": image, "file": "x.png"})
        quietly(table, masks="mask")

    return lambda: quietly(table, masks="mask"), mended


@fixes("pack_shards: image {} cannot be packed: {}")
def _(folder):
    table = table_of(folder)
    Path("1.png").write_text("no image")

    def mended(fix):
        assert len(quietly(table, "a", damaged=0.5 if 'damaged="skip"' in fix else 0.0)) == 3
        picture(1).save("1.png")  # copied again
        quietly(table)

    return lambda: quietly(table), mended


@fixes("pack_shards: image {} cannot be packed: {}")
def _(folder):
    table = table_of(folder).assign(path=["0", "1", "2", "3"])
    return lambda: quietly(table), lambda fix: quietly(
        table.assign(path=eval(fix.partition(": ")[2].partition(";")[0], {"table": table})), "b"
    )


@fixes("pack_shards: image {} cannot be packed: {}")
def _(folder):
    table_of(folder / "in")
    table = pandas.DataFrame({"path": ["0.png"]})

    def mended(fix):
        assert f"check the path, from {os.getcwd()}" in fix
        quietly(table, root="in")

    return lambda: quietly(table), mended


@fixes("pack_sources: classes= is the names of all classes, in their order, got {}")
def _(folder):
    return lambda: quietly(items(), classes=2), lambda fix: eval(
        f"quietly(items(), {fix})", {"quietly": quietly, "items": items}
    )


@fixes("pack_sources: classes= is the names of all classes, in their order, got {}")
def _(folder):
    return lambda: quietly(items(), classes="cat"), lambda fix: eval(
        f"quietly(items(), {fix.replace('...', repr('dog'))})", {"quietly": quietly, "items": items}
    )


@fixes("pack_sources: groups= of items is one value for each item, got {}")
def _(folder):
    values = "aabb"
    return lambda: quietly(items(), groups="patient"), lambda fix: quietly(items(), groups=list(values))


@fixes("pack_sources: the items have {} labels, and labels= names {}: {}")
def _(folder):
    two = [(picture(1), [0, 1])]

    def mended(fix):
        quietly(two, "a", labels=["one", "other"])
        quietly(two, "b")

    return lambda: quietly(two, labels="one"), mended


@fixes("pack_sources: the labels of a folder are its sub-folders, and it has no groups")
def _(folder):
    table = table_of(folder, kind=["a", "b"] * 2, patient=[1, 1, 2, 2])
    folder_of(folder / "in", "cat/a.png")
    return lambda: quietly("in", labels="kind"), lambda fix: quietly(table, labels="kind", groups="patient")


@fixes("pack_sources: the source yields {} items, and groups= has {}")
def _(folder):
    return lambda: quietly(items(), groups=[1, 2]), lambda fix: quietly(items(), "again", groups=[1, 1, 2, 2])


@fixes("pack_sources: {}= is an argument for {}, and this is {}")
def _(folder):
    def mended(fix):
        assert fix == "leave root= out"
        quietly(items())

    return lambda: quietly(items(), root="."), mended


@fixes("pack_tables: classes= names the classes of one label, and labels= names {}")
def _(folder):
    table = table_of(folder, kind=["a", "b"] * 2, value=[1, 2, 3, 4], grade=[0, 1, 0, 1])

    def mended(fix):
        quietly(table, "a", labels=["grade", "value"])
        quietly(table, "b", labels="kind", classes=["a", "b"])

    return lambda: quietly(table, labels=["grade", "value"], classes=["a", "b"]), mended


@fixes("pack_tables: groups= of a table is the name of one of its columns, got a {}")
def _(folder):
    table, values = table_of(folder), [1, 1, 2, 2]

    def mended(fix):
        done = eval(re.search(r"table\.assign\(.*?\)", fix)[0], {"table": table, "values": values})
        eval(f"quietly(table, {fix.partition(';')[0]})", {"quietly": quietly, "table": done})

    return lambda: quietly(table, groups=values), mended


@fixes("pack_tables: the column {} holds something else than paths")
def _(folder):
    table = table_of(folder)
    gap = table.assign(path=[None, *table.path[1:]])
    return lambda: quietly(gap), lambda fix: quietly(eval(fix.partition(": ")[2], {"table": gap}))


@fixes("pack_tables: the column {} holds something else than paths")
def _(folder):
    table = table_of(folder).assign(path=[0, 1, 2, 3])
    return lambda: quietly(table), lambda fix: quietly(
        table.assign(path=eval(fix.partition(", where")[0], {"table": table}))
    )


@fixes("pack_tables: the path of row {} holds a zero character, which no path can")
def _(folder):
    table = table_of(folder)
    wide = table.assign(path=[path + "\0\0" for path in table.path])  # numpy would cut them off

    def mended(fix):
        call = re.search(r"path\.rstrip\('.*'\)", fix)[0]
        quietly(wide.assign(path=[eval(call, {"path": path}) for path in wide.path]))

    return lambda: quietly(wide), mended


@fixes("pack_tables: the table has no column {}")
def _(folder):
    table = table_of(folder).rename(columns={"path": "file_name"})
    return lambda: quietly(table), lambda fix: eval(
        f"quietly(table, {fix.partition(' is')[0]})", {"quietly": quietly, "table": table}
    )


@fixes("pack_tables: the table has no column {}")
def _(folder):
    table = table_of(folder, kind=["a", "b"] * 2)
    return lambda: quietly(table, labels="label"), lambda fix: quietly(table, labels="kind")


@fixes("pack_tables: the table has no row")
def _(folder):
    table = table_of(folder, fold=[1, 2, 1, 2])
    return lambda: quietly(table[table.fold == "1"]), lambda fix: quietly(table[table.fold == 1])


@fixes("pack_tables: the table has the column {} more than once")
def _(folder):
    table = table_of(folder)
    twice = pandas.concat([table, table], axis=1)
    return lambda: quietly(twice), lambda fix: quietly(eval(fix.partition(" keeps")[0], {"table": twice}))


@fixes("pack_tables: there is no file {}")
def _(folder):
    table_of(folder).to_csv("table.csv", index=False)

    def mended(fix):
        assert fix == f"check the path, from {os.getcwd()}"
        quietly("table.csv")

    return lambda: quietly("tables.csv"), mended


def other_table(ending, write):
    @fixes("pack_tables: {} is a file, and pack reads folders, CSV files and tables in memory")
    def _(folder):
        table = table_of(folder, kind=["a", "b"] * 2)
        write(table, folder / f"table{ending}")
        more = {"labels": "kind"}
        return lambda: quietly(folder / f"table{ending}"), lambda fix: with_pack(
            fix.replace(" path=, labels=,", ""), **more
        )


other_table(".parquet", lambda table, file: table.to_parquet(file))
other_table(".feather", lambda table, file: table.to_feather(file))
other_table(".json", lambda table, file: table.to_json(file))
other_table(".jsonl", lambda table, file: table.to_json(file, orient="records", lines=True))
other_table(".txt", lambda table, file: table.to_csv(file, sep=" ", index=False))


@fixes("pack_tables: {} is a file, and pack reads folders, CSV files and tables in memory")
def _(folder):
    folder_of(folder / "in", "cat/a.png")
    shutil.make_archive("in", "tar", "in")
    shutil.rmtree("in")

    def mended(fix):
        os.makedirs("in")
        assert os.system(f"{fix.rpartition(', ')[2]} in.tar -C in") == 0
        quietly("in")

    return lambda: quietly("in.tar"), mended


@fixes("pack_tables: {} {}")
def _(folder):
    table_of(folder, kind=["Bär", "b"] * 2).to_csv("table.csv", index=False, encoding="latin-1")
    return lambda: quietly("table.csv", labels="kind"), lambda fix: with_pack(fix, labels="kind")


@fixes("pack_tables: {} {}")
def _(folder):
    table_of(folder, kind=["a", "b"] * 2).to_csv("table.csv", index=False, sep=";")
    return lambda: quietly("table.csv", labels="kind"), lambda fix: with_pack(fix, labels="kind")


@fixes("packing: none of the {} images can be decoded, for instance {}")
def _(folder):
    table = pandas.DataFrame({"path": [f"{number}.png" for number in range(4)]})
    return lambda: quietly(table, damaged=1.0), lambda fix: quietly(table_of(folder), "again", damaged=1.0)


@fixes(
    "packing: pack looks for damage with simplejpeg, and it is not installed: Pillow takes half a JPEG for a whole one"
)
def _(folder):
    def without():
        with mock.patch.object(packing, "jpeg_decoder", return_value=None):
            quietly(items())

    return without, lambda fix: quietly(items()) if "%pip install simplejpeg" in fix else None


@fixes("packing: the disk of {} is full")
def _(folder):
    def without():
        with mock.patch.object(packing, "write_shards", side_effect=OSError(errno.ENOSPC, "full")):
            quietly(items())

    return without, lambda fix: quietly(items())


@fixes("packing: {} of this pack as damaged")
def _(folder):
    table = table_of(folder)
    Path("1.png").write_text("no image")
    quietly(table, damaged=0.5)

    def mended(fix):
        assert 'damaged="skip"' in fix
        quietly(table, damaged=0.5)
        picture(1).save("1.png")
        quietly(table, "new")

    return lambda: quietly(table), mended


@fixes("packing: {} of {} images are damaged or missing, and {} may be left out")
def _(folder):
    table = table_of(folder)
    for number in (1, 2):
        Path(f"{number}.png").write_text("no image")
    return lambda: quietly(table, damaged=0.3), lambda fix: eval(
        f"quietly(table, {fix.rpartition(' ')[2]})", {"quietly": quietly, "table": table}
    )


@fixes("records: image {} of {} cannot be decoded: {}")
def _(folder):
    made = quietly(table_of(folder))
    bad = made.read([0])[0]

    def fails(data, *rest, **options):
        if bytes(data) == bad:
            raise ValueError("not a whole image")
        return decode(data, *rest, **options)

    def mended(fix):
        subset = eval(re.search(r"torch\S+ indices\)", fix)[0], {"torch": torch, "records": made, "indices": [1, 2, 3]})
        with mock.patch.object(records, "decode", fails):
            assert len([subset[number] for number in range(3)]) == 3

    def without():
        with mock.patch.object(records, "decode", fails):
            made.take([0])

    return without, mended


@fixes("records: the images in {} differ in size, so they do not fit into one batch")
def _(folder):
    table = table_of(folder)
    picture(9, side=24).save("1.png")
    made = quietly(table)

    def mended(fix):
        eval(fix.partition(" decodes")[0], {"Records": Records, "folder": "pack"}).take([0, 1])

    return lambda: made.take([0, 1]), mended


@fixes("records: {} holds pixels of {} x {}, not of {} x {}")
def _(folder):
    quietly(items())

    def mended(fix):
        eval(fix.partition(", ")[0], {"Records": Records, "folder": "pack"})
        quietly(items(), "other", size=eval(re.search(r"size=(\d+)", fix)[1]))
        Records("other", 8)

    return lambda: Records("pack", 8), mended


@fixes("resumable: the {} in {} is damaged")
def _(folder):
    made = quietly(items())
    build_cache(made, "cache", size=16)
    Path("cache/images.npy").write_bytes(b"")

    def mended(fix):
        eval(re.search(r"shutil\.rmtree\(.*?\)", fix)[0], {"shutil": shutil})
        build_cache(made, "cache", size=16)
        Cache("cache")

    return lambda: Cache("cache"), mended


@fixes("resumable: the {} in {} is damaged")
def _(folder):
    quietly(items())
    shutil.copytree("pack", "whole")
    Path("pack/index.npy").unlink()

    def mended(fix):
        assert "copy it again from where it is whole, or pack the images again into a new folder" in fix
        shutil.copytree("whole", "pack", dirs_exist_ok=True)
        Records("pack")
        quietly(items(), "new")

    return lambda: Records("pack"), mended


@fixes("resumable: {}")
def _(folder):
    Path("pack").mkdir()
    Path("pack/mine.txt").write_text("")

    def mended(fix):
        quietly(items(), "new")
        Path("empty").mkdir()
        quietly(items(), "empty")

    return lambda: quietly(items()), mended


@fixes("resumable: {} holds another {}{}")
def _(folder):
    quietly(items())

    def mended(fix):
        quietly(items(6), "other")
        eval(re.search(r"shutil\.rmtree\(.*?\)", fix)[0], {"shutil": shutil})
        quietly(items(6))

    return lambda: quietly(items(6)), mended


@fixes("resumable: {} holds no finished {}")
def _(folder):
    def without():
        with mock.patch.object(packing, "_finish", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            quietly(items())
        Records("pack")

    def mended(fix):
        assert fix == "call pack(source, folder) as before: it continues where it was interrupted"
        quietly(items())
        Records("pack")

    return without, mended


@fixes("resumable: {} holds no finished {}")
def _(folder):
    quietly(items())
    return lambda: Records("."), lambda fix: Records("pack")


@fixes("resumable: {} holds no {} that this tpukit can read")
def _(folder):
    build_cache(quietly(items()), "cache", size=16)
    return lambda: Records("cache"), lambda fix: eval(fix.rpartition(": ")[2], {"Cache": Cache, "folder": "cache"})


@fixes("resumable: {} holds no {} that this tpukit can read")
def _(folder):
    made = quietly(items())
    build_cache(made, "cache", size=16)

    def mended(fix):
        one, other = fix.partition(": ")[2].split(" or ")
        eval(one, {"Records": Records, "folder": "pack"})
        eval(other.replace("...", "size=16"), {"build_cache": build_cache, "Records": Records, "folder": "pack"})

    return lambda: Cache("pack"), mended


@fixes("room: {} need about {}, and {} are free in {}")
def _(folder):
    table = table_of(folder)
    for name in table.path:
        picture(1, side=64).save(name)

    def call(**options):
        with mock.patch.object(room, "free_in", return_value=20_000):
            return quietly(table, **options)

    def mended(fix):
        call(size=eval(re.search(r"size=(\d+)", fix)[1]))
        some = int(re.search(r"some of the images: (\d+) fit", fix)[1])
        with mock.patch.object(room, "free_in", return_value=20_000):
            quietly(table.head(some), "some")
        quietly(table, "after")  # with room made

    return call, mended


@fixes("splitting: stratify= has the shape {}, and there are {} images")
def _(folder):
    groups = np.arange(10)

    def mended(fix):
        split_by_group(groups, stratify=groups % 2)
        split_by_group(groups, stratify=np.eye(2)[groups % 2])

    return lambda: split_by_group(groups, stratify=[0, 1]), mended


@fixes("splitting: stratify= has {} classes for {} images")
def _(folder):
    groups, values = np.arange(10) // 2, np.linspace(0, 1, 10)
    return lambda: split_by_group(groups, stratify=values), lambda fix: split_by_group(
        groups, stratify=eval(fix.partition(": ")[2], {"numpy": numpy, "values": values})
    )


@fixes("splitting: stratify= in columns holds zeros and ones")
def _(folder):
    groups, labels = np.arange(10), np.linspace(0, 1, 20).reshape(10, 2)

    def mended(fix):
        split_by_group(groups, stratify=eval(fix.rpartition("or ")[2], {"labels": labels}))
        split_by_group(groups, stratify=groups % 2)

    return lambda: split_by_group(groups, stratify=labels), mended


@fixes("splitting: {} images in one group cannot be split")
def _(folder):
    table = table_of(folder, one=[1] * 4, patient=[1, 1, 2, 2])
    made = quietly(table, groups="one")
    return lambda: made.split(0.5), lambda fix: quietly(table, "b", groups="patient").split(0.5)


@fixes("stored_images: image {} of {} was asked for")
def _(folder):
    made = quietly(items())
    return lambda: made[4], lambda fix: [made[int(number)] for part in made.split(0.5) for number in part]


@fixes("stored_images: indices are one list of whole numbers, got shape {} of {}")
def _(folder):
    made, mask = quietly(items()), np.array([True, False, True, False])
    return lambda: made.take(mask), lambda fix: made.take(eval(fix.partition(", ")[0], {"numpy": numpy, "mask": mask}))


@fixes("stored_images: label {} is none of the {} classes")
def _(folder):
    made = quietly(Pictures())

    def put(labels):
        made.labels = labels

    def mended(fix):
        put([1, 0])
        quietly(Pictures(["a", "b", "c"], [2, 0]), "again")

    return lambda: put([2, 0]), mended


@fixes("stored_images: labels are finite numbers")
def _(folder):
    made = quietly(items())

    def put(labels):
        made.labels = labels

    return lambda: put([0, 1, np.nan, 0]), lambda fix: put([0, 1, 2, 0])


@fixes("stored_images: one image is asked for by its number, got {}")
def _(folder):
    images, indices = quietly(items()), [0, 2]

    def mended(fix):
        for call in re.findall(r"[\w.]+\([\w, ]*indices\)", fix):
            assert len(eval(call, {"images": images, "torch": torch, "indices": indices})) == 2

    return lambda: images[indices], mended


@fixes("stored_images: take writes {} uint8, and out is {} {}")
def _(folder):
    made = quietly(items())

    def mended(fix):
        made.take([0], out=eval(fix.partition(", or")[0].partition("=")[2], {"numpy": numpy}))
        made.take([0])

    return lambda: made.take([0], out=np.empty(3)), mended


@fixes("stored_images: the labels have {} rows, and the images were rows 0 to {} of a table")
def _(folder):
    table = table_of(folder, label=[0, 1, 2, 3])
    images = quietly(table)

    def put(labels):
        images.labels = labels

    return lambda: put(table.label[:3]), lambda fix: put(table.label)


@fixes(
    "stored_images: the labels seem to be in the order of the images already, and those of pandas in that of the table"
)
def _(folder):
    table = table_of(folder, 8, label=list(range(8)))
    images = quietly(table)
    taken = table.label.iloc[images.rows]

    def put(labels):
        images.labels = labels

    def mended(fix):
        put(eval(fix.partition(" where")[0], {"labels": taken}))
        assert images.labels.tolist() == images.rows.tolist()
        put(eval(fix.rpartition(", ")[2], {"labels": taken}))

    return lambda: put(taken), mended


@fixes("stored_images: there are {} images, and labels of shape {}")
def _(folder):
    table = table_of(folder, labels=[0, 1, 2, 3])
    images = quietly(table)

    def put(labels):
        images.labels = labels

    return lambda: put([1, 2]), lambda fix: put(eval(fix.rpartition(": ")[2], {"table": table, "images": images}))


def example(**features):
    """Return a tf.train.Example: bytes, whole numbers or fractions by name."""
    made = tfrecords._example()()
    for name, values in features.items():
        values = values if isinstance(values, list) else [values]
        kind = {bytes: "bytes_list", int: "int64_list", float: "float_list"}[type(values[0])]
        getattr(made.features.feature[name], kind).value.extend(values)
    return made.SerializeToString()


def tfrecord(*records, name="a.tfrec"):
    import google_crc32c

    def sealed(data):
        crc = google_crc32c.value(data)
        return data + struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    Path(name).write_bytes(b"".join(sealed(struct.pack("<Q", len(data))) + sealed(data) for data in records))
    return name


def read(fix=None, **options):
    return list(read_tfrecords("a.tfrec", **options))


def reads(wrong, *, says, **right):
    """Return a row: options that are wrong, and those that the fix asks for."""

    def mended(fix):
        assert says in fix
        read(**right)

    return lambda: read(**wrong), mended


@fixes("tfrecords: feature {} of {} holds bytes, and labels are numbers")
def _(folder):
    tfrecord(example(image=b"x", target=b"cat", number=1))
    return reads({}, says="labels=(...)", labels=("number",))


@fixes("tfrecords: feature {} of {} holds no image: one string of bytes is needed")
def _(folder):
    tfrecord(example(image=3, photo=b"x", target=1))
    return reads({}, says="image=...", image="photo")


@fixes("tfrecords: feature {} of {} is too large for a label, which is a float32")
def _(folder):
    tfrecord(example(image=b"x", id=2**30, target=1))
    return reads({"labels": ("target", "id")}, says="leave 'id' out of labels=(...)", labels=("target",))


@fixes("tfrecords: read_tfrecords got no files")
def _(folder):
    tfrecord(example(image=b"x", target=1))
    return lambda: read_tfrecords([]), lambda fix: list(
        read_tfrecords(eval(fix.rpartition("in ")[2], {"Path": Path, "folder": "."}))
    )


@fixes("tfrecords: {}")
def _(folder):
    whole = Path(tfrecord(example(image=b"x", target=1))).read_bytes()
    Path("a.tfrec").write_bytes(whole[:-3])

    def mended(fix):
        assert fix == "copy or download this file again, or leave it out"
        Path("a.tfrec").write_bytes(whole)
        read()

    return read, mended


@fixes("tfrecords: {} has no feature {}")
def _(folder):
    tfrecord(example(image=b"x", kind=1))
    return reads({}, says="labels=(...)) with a name that is there", labels=("kind",))


@fixes("tfrecords: {} has {} label values where those before have {}")
def _(folder):
    tfrecord(example(image=b"x", target=1, boxes=[1, 2]), example(image=b"x", target=1, boxes=[1, 2, 3]))
    return reads({"labels": ("boxes",)}, says="labels=(...)", labels=("target",))


@fixes("tfrecords: {} is no tf.train.Example")
def _(folder):
    tfrecord(b"\xff\xff\xff")
    tfrecord(example(image=b"x", target=1), name="b.tfrec")
    return read, lambda fix: list(read_tfrecords(["b.tfrec"]))


@fixes("tfrecords: {} {}")
def _(folder):
    tfrecord(example(image=b"x", target=1))
    return lambda: read_tfrecords("."), lambda fix: list(
        read_tfrecords(eval(fix.partition(": ")[2], {"Path": Path, "folder": "."}))
    )


@fixes("checked_files: {} is a whole number, {} or more, got {}")
def _(folder):
    made = quietly(items())
    return (
        lambda: build_cache(made, size=16, workers=0, progress="off"),
        lambda fix: build_cache(made, size=16, progress="off", **eval(f"dict({fix.partition('such as ')[2]})")),
    )


@fixes('packing: damaged is "raise", "skip", or a share from 0 to 1, got {}')
def _(folder):
    return lambda: quietly(items(), damaged="ignore"), lambda fix: quietly(items(), **eval(f"dict({fix})"))


@fixes("splitting: valid is the share of the images to validate on, between 0 and 1, got {}")
def _(folder):
    made = quietly(items())
    return lambda: made.split(20), lambda fix: made.split(**eval(f"dict({fix})"))


def one_deeper(*files):
    @fixes("image_folders: {} would give the classes {}, and in each lie the same folders")
    def _(folder):
        folder_of(Path("in"), *files)

        def mended(fix):
            assert with_pack(fix).classes[:2] == ["cat", "dog"]
            assert eval(f"quietly('in', 'b', {fix.rpartition('or ')[2]})").classes

        return lambda: quietly("in"), mended


one_deeper("train/cat/1.png", "train/dog/1.png", "train/emu/1.png", "valid/cat/1.png", "valid/dog/1.png")
one_deeper("train/cat/1.png", "train/dog/1.png", "test/1.png")


def with_roles(*files):
    @fixes("image_folders: {} would give the classes {}, which say nothing of what is seen")
    def _(folder):
        folder_of(Path("in"), *files)

        def mended(fix):
            assert eval(f"quietly('in', 'b', {fix.rpartition('or ')[2]})").classes
            options = {"root": "in"}
            call = re.search(r"pack\(.*labels=\"label\"\)", fix)[0]
            names = {"files": list(files), "labels": ["a", "b"] * (len(files) // 2)}
            call = call.replace("...", "'a', progress='off', workers=1, **options", 1)
            assert eval(call, {"pack": pack, "pandas": pandas, "options": options, **names}).classes == ["a", "b"]

        return lambda: quietly("in"), mended


with_roles("train/cat.0.jpg", "train/dog.0.jpg")
with_roles("images/0.png", "masks/0.png")


@fixes("item_parts: item {} has the word {} among its labels")
def _(folder):
    words = ["dog", "emu"]

    def mended(fix):
        quietly([(picture(1), eval(fix.partition(": ")[2], {"words": words}))])

    return lambda: quietly([(picture(1), words)]), mended


@fixes("item_parts: nothing, as where an image is damaged")
def _(folder):
    class Damaged(Pictures):
        raises = False

        def __getitem__(self, index):
            if index == 1:
                if self.raises:
                    raise OSError("not a whole image")
                return None
            return super().__getitem__(index)

    dataset = Damaged(targets=[0, 1] * 8)

    def mended(fix):
        dataset.raises = True
        assert len(with_pack(fix.replace("...", "*more.pop('items'), ...", 1), items=[dataset]).skipped) == 1

    return lambda: quietly(dataset), mended


@fixes("item_parts: the path {}")
def _(folder):
    paths, labels = table_of(folder).path.tolist(), [0, 1, 0, 1]
    known = {"quietly": quietly, "pandas": pandas, "paths": paths, "labels": labels}
    return lambda: quietly(sorted(Path().glob("*.png"))), lambda fix: eval(f"quietly({fix.partition(': ')[2]})", known)


@fixes("items: pack cannot read a {}")
def _(folder):
    source = {"path": table_of(folder).path.tolist(), "kind": ["a", "b"] * 2}
    known = {"quietly": quietly, "pandas": pandas, "source": source}
    return lambda: quietly(source), lambda fix: eval(f"quietly({fix}, labels='kind')", known)


@fixes("items: the dataset has classes that classes= does not name")
def _(folder):
    def mended(fix):
        assert quietly(Pictures(), "a", classes=["emu", "dog", "cat"]).classes == ["emu", "dog", "cat"]
        assert quietly(Pictures(), "b", classes=None).classes == ["cat", "dog"]

    return lambda: quietly(Pictures(), classes=["cat", "emu"]), mended


def as_the_fix_joins(fix, table):
    """Make the tags that a fix names, and the pack of their columns."""
    tags = eval(re.search(r"tags = (.*?), pack", fix)[1], {"table": table, "pandas": pandas})
    call = re.search(r"pack\(.*?\)\)", fix)[0].replace("...", "'a', progress='off', workers=1", 1)
    return eval(call, {"pack": pack, "table": table, "tags": tags})


@pytest.mark.parametrize("mark", [";", "|", ", "])
def test_tags_in_one_word_become_labels_as_the_fix_says(mark, tmp_path):
    words = ["cat", "dog", mark.join(["cat", "dog"]), mark.join(["dog", "cat"])]
    table = table_of(tmp_path, kind=words)
    with pytest.raises(ValueError, match="several words at once") as caught:
        quietly(table, labels="kind")
    made = as_the_fix_joins(str(caught.value), table)
    labels = np.array([[1, 0], [0, 1], [1, 1], [1, 1]])
    assert (made.names, made.labels[np.argsort(made.rows)].tolist()) == (["cat", "dog"], labels.tolist())


@fixes("label_arrays: label {} holds several words at once, as {}")
def _(folder):
    table = table_of(folder, kind=["cat", "dog", "cat;dog", "dog;cat"])

    def mended(fix):
        assert len(as_the_fix_joins(fix, table).names) == 2
        call = f"quietly(table, 'b', labels='kind', {fix.rpartition(', ')[2]})"
        assert len(eval(call, {"quietly": quietly, "table": table}).classes) == 4

    return lambda: quietly(table, labels="kind"), mended


def several(*kinds):
    @fixes("pack_tables: label {} holds several values at once, as {}")
    def _(folder):
        table = table_of(folder, kind=list(kinds)).sample(frac=1, random_state=0)
        return lambda: quietly(table, labels="kind"), lambda fix: as_the_fix_joins(fix, table)


several(["cat", "dog"], ["cat"], ["dog"], [])
several([1, 0], [0, 1], [1, 1], [0, 0])


@fixes("label_arrays: label {} of row {} is blank")
def _(folder):
    table = table_of(folder, kind=["cat", "", "dog", " "])

    def mended(fix):
        some = eval(re.search(r"table\[.*\]", fix.partition(";")[0])[0], {"table": table})
        assert quietly(some, "a", labels="kind").classes == ["cat", "dog"]
        assert len(quietly(table.replace(" ", ""), "b", labels="kind", classes=["", "cat", "dog"])) == 4

    return lambda: quietly(table, labels="kind"), mended


@fixes("label_arrays: labels are numbers, and these are not: {} holds {}")
def _(folder):
    table = table_of(folder, day=pandas.to_datetime(["2024-01-01", "2024-01-03"] * 2))

    def mended(fix):
        texts, days = (
            eval(call, {"table": table}) for call in re.findall(r"table\[.*?astype\(str\)|\(table.*days", fix)
        )
        assert quietly(table.assign(day=texts), "a", labels="day").classes == ["2024-01-01", "2024-01-03"]
        assert sorted(quietly(table.assign(day=days), "b", labels="day").labels[:, 0].tolist()) == [0, 0, 2, 2]

    return lambda: quietly(table, labels="day"), mended


MASK = np.eye(16, dtype=np.uint8)
COLOURS = [(0, 0, 0), (255, 0, 0)]
COLOURED = Image.fromarray(np.array(COLOURS, np.uint8)[MASK])
KNOWN = {"numpy": numpy, "PIL": PIL, "colours": COLOURS}


def masked(mask, key, pattern, known=KNOWN, truth=MASK):
    """A row for a mask that is none, and for each way of the fix to make it one."""

    @fixes(f"masks: {key}")
    def _(folder):
        def mended(fix):
            found = re.findall(pattern, fix)
            assert found
            for number, call in enumerate(found):
                done = eval(call, {**known, "mask": mask})
                taken = quietly([(picture(1), done)], f"pack-{number}").take([0])[0, ..., 3]
                assert np.array_equal(taken, truth), call

        return lambda: quietly([(picture(1), mask)]), mended


SHAPE = "a mask is (H, W), one class number for each pixel, and this has the shape {}"
MODE = "a mask is one class number for each pixel, and this is an image of mode {}"
NUMBERS = "a mask holds class numbers, whole and from 0 to 255, and this {} ({})"
masked(COLOURED, MODE, r"sum.*\)\)")
masked(Image.fromarray(MASK).convert("LA"), MODE, r"mask\.getchannel.*\)")
masked(np.asarray(COLOURED), SHAPE, r"sum.*?colours\)\)")
masked(np.stack([1 - MASK, MASK]), SHAPE, r"mask\.argmax\(0\)")
masked(np.stack([1 - MASK, MASK], axis=2), SHAPE, r"mask\.argmax\(-1\)")
masked(MASK.astype(int) * 300, NUMBERS, r"numpy\.searchsorted.*?\)", {"numpy": numpy, "values": [0, 300]})
masked(-MASK.astype(int), NUMBERS, r"numpy\.where.*?\)", truth=MASK * 255)


@fixes("masks: the image has {} pixels, and its mask {}")
def _(folder):
    image, mask = picture(1, side=32), Image.fromarray(MASK)

    def mended(fix):
        quietly([(image, eval(fix.partition(": ")[2], {"image": image, "mask": mask, "PIL": PIL}))])

    return lambda: quietly([(image, mask)]), mended


@fixes("masks: the mask is a JPEG, which blurs class numbers")
def _(folder):
    Image.fromarray(MASK * 255).save("mask.jpg", quality=95)
    mask = Image.open("mask.jpg")

    def mended(fix):
        done = eval(fix.rpartition("classes ")[2], {"mask": mask, **KNOWN})
        done.save("mask.png")
        assert np.array_equal(quietly([(picture(1), Image.open("mask.png"))]).take([0])[0, ..., 3], MASK)

    return lambda: quietly([(picture(1), mask)]), mended


@fixes("pack_sources: labels= is names of columns, or of what items hold, got a {}")
def _(folder):
    table = table_of(folder, kind=["a", "b"] * 2)
    known = {"quietly": quietly, "table": table}
    return lambda: quietly(table, labels=table.kind), lambda fix: eval(f"quietly(table, {fix})", known)


@fixes("pack_sources: pack reads tables of pandas, got a {}")
def _(folder):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pandas(table_of(folder, kind=["a", "b"] * 2))
    return lambda: quietly(table, labels="kind"), lambda fix: eval(
        fix.replace("...", "'a', labels='kind', progress='off', workers=1"), {"pack": pack, "table": table}
    )


CHANGED = {
    "cat/0.png": "cat\\0.png",
    "0.png": "0.PNG",
    "1.PNG": "1.png",
    "2.png": " 2.png ",
}


@pytest.mark.parametrize(("file", "path"), CHANGED.items())
def test_a_path_that_is_written_otherwise_is_mended_as_the_fix_says(file, path, tmp_path):
    folder_of(tmp_path, file)
    table = pandas.DataFrame({"path": [path]})

    def mended(fix):
        assert len(quietly(table.assign(path=eval(re.search(r"table\[.*?\.str.*?\)", fix)[0], {"table": table})))) == 1

    fixes.check("pack_shards: image {} cannot be packed: {}", lambda _: (lambda: quietly(table), mended), tmp_path)


def dialect(option, *, text=None, **written):
    @fixes("pack_tables: {} {}")
    def _(folder):
        table = table_of(folder, kind=["Bär", "élan"] * 2)
        table.to_csv("table.csv", index=False, **written)
        if text is not None:
            Path("table.csv").write_text(text)

        def mended(fix):
            assert option in fix
            assert len(with_pack(fix, labels="kind").classes) == 2

        return lambda: quietly("table.csv", labels="kind"), mended


dialect("encoding='utf-16'", encoding="utf-16")
dialect("index_col=False", text="path,kind\n0.png,cat,\n1.png,dog,\n")


@pytest.mark.parametrize(("key", "row"), fixes.cases)
def test_the_same_call_passes_when_the_fix_is_done(key, row, tmp_path):
    fixes.check(key, row, tmp_path)


def test_every_fix_has_its_row():
    assert fixes.rows.keys() == fixes.source()
