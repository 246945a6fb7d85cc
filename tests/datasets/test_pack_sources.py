"""What is packed is what was asked for: another source, a changed file, a label that does not fit are told."""

import contextlib
import io
import os
import pickle
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("array_record")
torch = pytest.importorskip("torch")

from helpers.sources import Items  # noqa: E402

import tpukit  # noqa: E402
from tpukit.datasets import checked_files, plan_pack  # noqa: E402
from tpukit.datasets.image_cache import build_image_cache, cached_images  # noqa: E402
from tpukit.datasets.packed_images import PackedImages  # noqa: E402
from tpukit.datasets.packing import PackOptions, pack  # noqa: E402
from tpukit.datasets.source_files import find_changed, look_at  # noqa: E402
from tpukit.essentials.data.batches import Batches  # noqa: E402
from tpukit.essentials.display.figures import show_batch  # noqa: E402

KIT = Path(__file__).parents[2]
QUIET = {"progress": "off"}


def encoded(number, kind="JPEG", size=24):
    file = io.BytesIO()
    Image.fromarray(np.full((size, size, 3), number * 20 % 256, np.uint8)).save(file, kind)
    return file.getvalue()


def fill(folder, numbers=range(4), kind="BMP"):
    """Write a folder of two classes; as BMP all files have the same length."""
    for number in numbers:
        into = folder / ("cat" if number % 2 else "dog")
        into.mkdir(parents=True, exist_ok=True)
        (into / f"{number}.{kind.lower()}").write_bytes(encoded(number % 12, kind))
    return folder


def grey(records):
    """Return the grey level of each image by its name."""
    return {
        Path(records.name(i)).stem: int(records.take([i])[0, 0, 0, 0]) for i in range(len(records))
    }


def said(error):
    """Check that a message has its three parts, and return it."""
    text = str(error.value)
    assert re.search(r"(?m)^  found: ", text)
    assert re.search(r"(?m)^  fix:   ", text)
    assert 3 <= len(text.splitlines()) <= 4
    return text


@pytest.mark.parametrize("size", [None, 8])
def test_another_folder_with_the_same_names_is_another_pack(tmp_path, size):
    fill(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # the same names, lengths and times
    file = tmp_path / "b" / "cat" / "1.bmp"
    times = os.stat(file)
    file.write_bytes(encoded(9, "BMP"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    pack(tmp_path / "a", tmp_path / "out", size=size, **QUIET)
    with pytest.raises(
        FileExistsError, match=r"b/cat/1.bmp has other contents than the file that was packed"
    ) as error:
        pack(tmp_path / "b", tmp_path / "out", size=size, **QUIET)
    assert "holds another pack" in said(error)


def test_a_folder_that_was_moved_or_copied_is_the_same(tmp_path):
    fill(tmp_path / "a")
    made = pack(tmp_path / "a", tmp_path / "out", **QUIET)
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copyfile)  # other times
    assert pack(tmp_path / "b", tmp_path / "out", **QUIET).digest == made.digest
    shutil.rmtree(tmp_path / "b" / "cat")
    fill(tmp_path / "b")
    os.utime(tmp_path / "b" / "cat" / "1.bmp", ns=(5, 5))
    assert pack(tmp_path / "b", tmp_path / "out", **QUIET).digest == made.digest


def test_the_number_of_files_that_were_compared_is_told(tmp_path, capsys):
    before = look_at([""] * 101, str(tmp_path))
    before["size"] = 1
    now = before.copy()
    now["time"] += 1
    compared = []
    assert find_changed(before, now, None, lambda row: compared.append(row) or True) is None
    said = capsys.readouterr().out
    assert (
        f"pack: 101 files have other times or paths than when they were packed; {len(compared)}"
        in said
    )


@pytest.mark.parametrize("kind", ["a folder", "a table"])
@pytest.mark.parametrize("finished", [True, False])
def test_a_file_that_was_changed_is_told(tmp_path, kind, finished):
    fill(tmp_path / "a")
    paths = sorted(map(str, (tmp_path / "a").rglob("*.bmp")))
    source = tmp_path / "a" if kind == "a folder" else pd.DataFrame({"path": paths})
    if finished:
        pack(source, tmp_path / "out", **QUIET)
    else:  # the last of the random order is damaged, so the shards before it are there
        order = np.random.default_rng(0).permutation(4)
        whole = Path(paths[order[3]]).read_bytes()
        Path(paths[order[3]]).write_bytes(b"damaged")
        with pytest.raises(OSError, match="cannot be packed"):
            pack(source, tmp_path / "out", options=PackOptions(shard_size=1), **QUIET)
        Path(paths[order[3]]).write_bytes(whole)  # mended, as the fix says: this one may be another
    changed = Path(paths[np.random.default_rng(0).permutation(4)[0]])
    before = changed.read_bytes()
    how = {} if finished else {"options": PackOptions(shard_size=1)}
    for data, message in (
        (encoded(7, "BMP"), "has other contents"),
        (encoded(7, "BMP", 30), "have another size"),
    ):
        changed.write_bytes(data)
        with pytest.raises(FileExistsError, match=message) as error:
            pack(source, tmp_path / "out", **how, **QUIET)
        assert changed.name in said(error)
    changed.write_bytes(before)
    assert len(pack(source, tmp_path / "out", **how, **QUIET)) == 4


def test_a_pack_outlives_its_files(tmp_path):
    table = pd.DataFrame({"path": sorted(map(str, fill(tmp_path / "a").rglob("*.bmp")))})
    made = pack(table, tmp_path / "out", **QUIET)
    shutil.rmtree(tmp_path / "a")
    assert pack(table, tmp_path / "out", **QUIET).digest == made.digest


@pytest.mark.parametrize("kind", ["folder", "CSV file"])
def test_a_pack_outlives_its_source(tmp_path, capsys, kind):
    fill(tmp_path / "in")
    names = [str(file.relative_to(tmp_path / "in")) for file in (tmp_path / "in").rglob("*.bmp")]
    pd.DataFrame({"path": names, "label": 1}).to_csv(tmp_path / "in" / "table.csv", index=False)
    source = tmp_path / "in"
    arguments = {}
    if kind == "CSV file":
        source = source / "table.csv"
        arguments = {"labels": "label"}
    made = pack(source, tmp_path / "out", **arguments, **QUIET)
    shutil.rmtree(tmp_path / "in")
    capsys.readouterr()
    again = pack(source, tmp_path / "out", **arguments, **QUIET)
    assert again.digest == made.digest
    assert (
        f"{source} does not exist any more, but the pack in {tmp_path / 'out'} is finished"
        in capsys.readouterr().out
    )

    with pytest.raises(FileExistsError, match="size None, asked for 8"):
        pack(source, tmp_path / "out", size=8, **arguments, **QUIET)
    with pytest.raises(FileNotFoundError, match="of images that were in another place") as error:
        pack(tmp_path / "typo" / source.name, tmp_path / "out", **arguments, **QUIET)
    call = error.value.fix.partition(" opens")[0]
    assert eval(call, {"tpukit": tpukit}).digest == made.digest
    with pytest.raises(FileNotFoundError, match="there is no f"):
        pack(source, tmp_path / "new", **arguments, **QUIET)


def outlived_table(folder, **columns):
    """Return a CSV file of four images with columns of classes, quantities, groups and masks."""
    fill(folder)
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.bmp"))
    for number in range(4):
        Image.new("L", (24, 24), number).save(folder / f"mask{number}.png")
    words = {
        "species": list("aabb"),
        "site": list("xyxy"),
        "patient": list("pqrs"),
        "age": range(4),
    }
    masks = [f"mask{number}.png" for number in range(4)]
    table = pd.DataFrame({"path": names, **words, "mask": masks, "other": masks[::-1], **columns})
    table.to_csv(folder / "t.csv", index=False)
    return folder / "t.csv"


# The arguments of the pack, those of the call without the source, and the difference in words.
OTHER_ARGUMENTS = {
    "labels": ({"labels": "species"}, {"labels": "site"}, "labels species, asked for site"),
    "no labels": ({"labels": "species"}, {}, "labels species, asked for none"),
    "groups": (
        {"labels": "age", "groups": "patient"},
        {"labels": "age", "groups": "site"},
        "groups patient, asked for site",
    ),
    "no groups": ({"groups": "patient"}, {}, "groups patient, asked for none"),
    "new groups": ({}, {"groups": "patient"}, "groups none, asked for patient"),
    "classes": (
        {"labels": "species", "classes": ["a", "b"]},
        {"labels": "species", "classes": ["b", "a"]},
        "classes a, b, asked for b, a",
    ),
    "no classes": (
        {"labels": "age", "classes": range(4)},
        {"labels": "age"},
        "classes 0, 1, 2, 3, asked for none",
    ),
    "new classes": (
        {"labels": "age"},
        {"labels": "age", "classes": range(4)},
        "classes none, asked for 0, 1, 2, 3",
    ),
    "masks": ({"masks": "mask"}, {"masks": "other"}, "masks mask, asked for other"),
    "no masks": (
        {"masks": "mask", "labels": "age"},
        {"labels": "age"},
        "masks mask, asked for none",
    ),
    "path": ({}, {"path": "name"}, "path path, asked for name"),
    "two": (
        {"labels": "age", "groups": "site"},
        {"labels": "site"},
        "labels age, asked for site; groups site, asked for none",
    ),
}


@pytest.mark.parametrize("what", OTHER_ARGUMENTS)
def test_other_arguments_are_refused_although_the_source_is_gone(tmp_path, what):
    packed_with, asked, message = OTHER_ARGUMENTS[what]
    source = outlived_table(tmp_path / "in")
    made = pack(source, tmp_path / "out", **packed_with, **QUIET)
    shutil.rmtree(tmp_path / "in")
    with pytest.raises(FileExistsError, match=f"found: {re.escape(message)}\n") as error:
        pack(source, tmp_path / "out", **asked, **QUIET)
    said(error)
    assert "rmtree" not in error.value.fix  # the pack is all that is left
    call = error.value.fix.partition("; or ")[2].partition(" opens")[0]
    assert eval(call, {"tpukit": tpukit}).digest == made.digest
    assert pack(source, tmp_path / "out", **packed_with, **QUIET).digest == made.digest


def test_classes_may_be_named_that_the_pack_found_itself(tmp_path):
    source = outlived_table(tmp_path / "in")
    made = pack(source, tmp_path / "out", labels="species", **QUIET)
    shutil.rmtree(tmp_path / "in")
    again = pack(source, tmp_path / "out", labels=["species"], classes=("a", "b"), **QUIET)
    with pytest.raises(FileExistsError, match="classes a, b, asked for b, a"):
        pack(source, tmp_path / "out", labels=["species"], classes=("b", "a"), **QUIET)
    assert again.digest == made.digest


def test_a_pack_with_masks_outlives_its_source(tmp_path, capsys):
    source = outlived_table(tmp_path / "in")
    made = pack(source, tmp_path / "out", masks="mask", **QUIET)
    shutil.rmtree(tmp_path / "in")
    capsys.readouterr()
    assert pack(source, tmp_path / "out", masks="mask", **QUIET).digest == made.digest
    assert f"{source} does not exist any more, " in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match="of images that were in another place"):
        pack(tmp_path / "typo" / "t.csv", tmp_path / "out", masks="mask", **QUIET)


def test_another_table_of_the_same_images_is_not_the_source(tmp_path):
    source = outlived_table(tmp_path / "in")
    other = tmp_path / "in" / "u.csv"
    table = pd.read_csv(source)
    table.assign(species=table.species[::-1].to_list()).to_csv(other, index=False)
    arguments = {"labels": "species", "root": tmp_path / "in"}
    pack(source, tmp_path / "out", **arguments, **QUIET)
    pack(table, tmp_path / "of_memory", **arguments, **QUIET)
    source.unlink()
    other.unlink()
    with pytest.raises(FileNotFoundError, match="that was made from .*t.csv") as error:
        pack(other, tmp_path / "out", **arguments, **QUIET)
    said(error)
    with pytest.raises(FileNotFoundError, match="that was made from another kind of source"):
        pack(source, tmp_path / "of_memory", **arguments, **QUIET)
    shutil.rmtree(tmp_path / "in")
    with pytest.raises(FileNotFoundError, match="that was made from .*t.csv"):
        pack(tmp_path / "in", tmp_path / "out", **QUIET)  # the folder, not the table in it


def test_a_pack_without_its_source_may_be_in_any_of_several_folders(tmp_path):
    source = outlived_table(tmp_path / "in")
    places = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    pack(source, places[1], labels="species", **QUIET)
    made = pack(source, places[2], labels="site", **QUIET)
    shutil.rmtree(tmp_path / "in")
    assert pack(source, places, labels="site", **QUIET).digest == made.digest
    with pytest.raises(FileExistsError, match="labels species, asked for age"):
        pack(source, places, labels="age", **QUIET)
    with pytest.raises(FileExistsError, match="groups none, asked for a list"):
        pack(source, places, labels="species", groups=["p"] * 1000, **QUIET)


def test_folders_and_names_are_read_once_from_an_iterator(tmp_path):
    source = outlived_table(tmp_path / "in")
    places = [tmp_path / "a", tmp_path / "b"]
    made = pack(source, iter(places), labels=iter(["species"]), classes=iter("ab"), **QUIET)
    assert (made.folder, made.classes) == (places[0], ["a", "b"])
    with pytest.raises(ValueError, match="folder= names no folder"):
        pack(source, [], labels="species", **QUIET)


def without_arguments(folder):
    """Make a pack like those of earlier versions, which did not store the arguments."""
    file = folder / "manifest.json"
    manifest = checked_files.unseal(file.read_bytes())
    del manifest["arguments"]
    del manifest["first_mask"]
    file.write_bytes(checked_files.seal(manifest))


def test_an_old_pack_outlives_its_source_and_tells_what_it_cannot_compare(tmp_path, capsys):
    source = outlived_table(tmp_path / "in")
    arguments = {"labels": "species", "groups": "patient"}
    pack(source, tmp_path / "out", **arguments, **QUIET)
    pack(source, tmp_path / "masks", masks="mask", **QUIET)
    shutil.rmtree(tmp_path / "in")
    without_arguments(tmp_path / "out")
    without_arguments(tmp_path / "masks")
    capsys.readouterr()
    assert len(pack(source, tmp_path / "out", **arguments, **QUIET)) == 4
    assert "not compared: source, groups, classes, path" in capsys.readouterr().out
    for change, message in (
        ({"labels": "site"}, "labels species, asked for site"),
        ({"groups": None}, "groups of unknown name, asked for none"),
        ({"classes": ["b", "a"]}, "classes a, b, asked for b, a"),
        ({"masks": "mask"}, "masks none, asked for mask"),
    ):
        with pytest.raises(FileExistsError, match=f"found: {message}\n"):
            pack(source, tmp_path / "out", **{**arguments, **change}, **QUIET)
    with pytest.raises(FileNotFoundError, match="does not store where its masks were") as error:
        pack(source, tmp_path / "masks", masks="mask", **QUIET)
    said(error)


def items(count=6, shift=0):
    return [(encoded(n + shift * (n > 0)), n) for n in range(count)]


OTHER_ITEMS = {
    "other images": (lambda: items(shift=1), "other contents"),
    "other labels": (lambda: [(data, label * 2) for data, label in items()], "other contents"),
    "one label": (lambda: [*items()[:-1], (items()[-1][0], 99)], "other contents"),
    "one item more": (lambda: items(7), "6 items, asked for 7 items"),
}


@pytest.mark.parametrize("kind", [list, Items])
@pytest.mark.parametrize("what", OTHER_ITEMS)
def test_items_of_the_same_first_one_and_length_are_told_apart(tmp_path, kind, what):
    pack(kind(items()), tmp_path, **QUIET)
    other, message = OTHER_ITEMS[what]
    with pytest.raises(FileExistsError, match=message) as error:
        pack(kind(other()), tmp_path, **QUIET)
    said(error)
    assert len(pack(kind(items()), tmp_path, **QUIET)) == 6


def test_what_can_only_be_iterated_is_not_taken_for_compared(tmp_path, capsys):
    pack(iter(items()), tmp_path, **QUIET)
    assert capsys.readouterr().out == "pack: 6 images, 1 label: label\n"
    pack(iter(items(shift=1)), tmp_path, **QUIET)
    assert "only its first item was compared" in capsys.readouterr().out


def test_what_differs_is_told_in_words(tmp_path):
    table = pd.DataFrame(
        {
            "path": sorted(map(str, fill(tmp_path / "a").rglob("*.bmp"))),
            "x": range(4),
            "p": list("abcd"),
        }
    )
    pack(table, tmp_path / "out", labels="x", groups="p", **QUIET)
    others = {
        "other labels under the same names: labels x": {"source": table.assign(x=5)},
        "groups a, b, c, d, asked for no groups": {"groups": None},
        "4 files, .*1.bmp to .*2.bmp, asked for 3 files, .*3.bmp": {"source": table[1:]},
        "seed 0, asked for 1": {"options": PackOptions(seed=1)},
    }
    for message, changed in others.items():
        with pytest.raises(FileExistsError, match=message) as error:
            pack(
                **{
                    "source": table,
                    "folder": tmp_path / "out",
                    "labels": "x",
                    "groups": "p",
                    **QUIET,
                    **changed,
                }
            )
        assert not re.search("[0-9a-f]{32}", said(error))


def test_a_pack_of_an_earlier_format_says_what_to_do(tmp_path):
    from tpukit.datasets.checked_files import seal, unseal

    made = pack(items(), tmp_path, **QUIET)
    manifest = unseal((tmp_path / "manifest.json").read_bytes())
    (tmp_path / "manifest.json").write_bytes(seal({**manifest, "format": "tpukit pack 2"}))
    for call in (PackedImages, lambda folder: pack(items(), folder, **QUIET)):
        with pytest.raises(
            ValueError,
            match=r"tpukit pack 2, not of tpukit pack 4\n  fix:   call pack.* new folder",
        ):
            call(made.folder)


def test_what_is_no_class_and_no_image_is_left_out(tmp_path, capfd):
    fill(tmp_path / "imgs", kind="PNG")
    expected = sorted(
        pack(tmp_path / "imgs", tmp_path / "plain", **QUIET).name(i) for i in range(4)
    )
    for name in (".ipynb_checkpoints", "__MACOSX", "cat/.ipynb_checkpoints", "cat/__MACOSX"):
        (tmp_path / "imgs" / name).mkdir()
        (tmp_path / "imgs" / name / "9.png").write_bytes(encoded(9, "PNG"))
    (tmp_path / "imgs" / "cat" / "._1.png").write_bytes(b"a Mac's")
    (tmp_path / "imgs" / "cat" / "loop").symlink_to("..")
    (tmp_path / "imgs" / "dog" / "loop").symlink_to("../dog")
    (tmp_path / "imgs" / "dog" / "folder.png").mkdir()
    os.mkfifo(tmp_path / "imgs" / "dog" / "pipe.png")
    for folder in ("records", "cat/records"):
        for _ in range(2):  # the second time, the pack itself is there
            records = pack(tmp_path / "imgs", tmp_path / "imgs" / folder, **QUIET)
            assert records.classes == ["cat", "dog"]
            assert sorted(records.name(i) for i in range(len(records))) == expected
    build_image_cache(records, tmp_path / "imgs" / "cache", size=8, **QUIET)
    assert pack(tmp_path / "imgs", tmp_path / "more", **QUIET).classes == ["cat", "dog"]


def test_a_pipe_in_a_table_is_damaged_and_nobody_waits(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    table = pd.DataFrame({"path": [str(tmp_path / "pipe.png")]})
    with pytest.raises(OSError, match=r"pipe.png\n  found: not a whole image"):
        pack(table, tmp_path / "out", **QUIET)


def test_a_link_to_nothing_is_a_missing_image(tmp_path):
    fill(tmp_path / "imgs")
    (tmp_path / "imgs" / "cat" / "gone.bmp").symlink_to("nowhere.bmp")
    with pytest.raises(OSError, match=r"gone.bmp\n  found: No such file"):
        pack(tmp_path / "imgs", tmp_path / "out", **QUIET)


@pytest.mark.skipif(
    not hasattr(os, "seteuid") or os.geteuid() != 0, reason="only root can become somebody else"
)
def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    from tpukit.datasets.image_folders import find_images

    fill(tmp_path / "imgs")
    (tmp_path / "imgs").chmod(0o755)
    (tmp_path / "imgs" / "cat").chmod(0)
    monkeypatch.chdir(tmp_path / "imgs")
    os.seteuid(65534)
    try:
        with pytest.raises(
            PermissionError, match="cat cannot be read, so its images would be missing"
        ) as error:
            find_images(".")
    finally:
        os.seteuid(0)
    said(error)


def test_classes_and_files_whose_names_are_not_utf_8_are_printed(tmp_path, capsys):
    source = tmp_path / "in"
    fill(source)
    (source / "cat").rename(source / os.fsdecode(b"Z\xfcrich"))
    (source / "dog" / os.fsdecode(b"Z\xfcrich.png")).write_bytes(b"no image")
    plan_pack(source)
    packed = pack(source, tmp_path / "out", damaged=0.5, **QUIET)
    assert packed.classes == [os.fsdecode(b"Z\xfcrich"), "dog"]
    said = capsys.readouterr().out
    assert "2: Z\\udcfcrich 2, dog 3" in said
    assert "2 classes: Z\\udcfcrich 2, dog 2" in said
    assert "Z\\udcfcrich.png" in said


def test_classes_fix_the_numbering(tmp_path):
    fill(tmp_path / "train")
    for name in ("ant", "bee"):
        (tmp_path / "train" / name).mkdir()
        (tmp_path / "train" / name / "x.png").write_bytes(encoded(3, "PNG"))
    train = pack(tmp_path / "train", tmp_path / "out", **QUIET)
    assert train.classes == ["ant", "bee", "cat", "dog"]
    valid = pack(fill(tmp_path / "valid"), tmp_path / "valid-out", classes=train.classes, **QUIET)
    assert valid.classes == train.classes
    assert {valid.name(i)[:3]: int(valid.labels[i]) for i in range(4)} == {"cat": 2, "dog": 3}
    with pytest.raises(ValueError, match="holds 2 folders that are not in classes=") as error:
        pack(tmp_path / "train", tmp_path / "third", classes=["cat", "dog"], **QUIET)
    assert "found: ant, bee" in said(error)
    with pytest.raises(
        FileExistsError, match="classes ant, bee, cat, dog, asked for classes dog, cat, bee, ant"
    ):
        pack(tmp_path / "train", tmp_path / "out", classes=["dog", "cat", "bee", "ant"], **QUIET)


def test_class_numbers_arrive_as_cross_entropy_wants_them(tmp_path):
    records = pack(fill(tmp_path / "imgs", range(8)), tmp_path / "out", **QUIET)
    cache = build_image_cache(records, tmp_path / "cache", size=24, **QUIET)
    for images in (records, cache, pickle.loads(pickle.dumps(records))):
        assert (images.labels.shape, images.labels.dtype) == ((8,), np.int64)
        assert images.names == images.classes == ["cat", "dog"]
        image, label = images[3]
        assert (label.shape, label.dtype) == ((), torch.int64)
        for workers in (0, 1):
            batch, labels = next(iter(Batches(images, batch_size=8, workers=workers)))
            assert (labels.shape, labels.dtype) == ((8,), torch.int64)
            torch.nn.functional.cross_entropy(torch.zeros(8, 2), labels)
        written = show_batch(batch, labels, names=images.names).axes
        assert [axes.get_title(loc="left") for axes in written] == [
            images.classes[n] for n in labels
        ]
        subset = torch.utils.data.Subset(images, [5, 2])
        assert (
            next(iter(Batches(subset, batch_size=2)))[1].tolist() == images.labels[[5, 2]].tolist()
        )


LABELS = {
    "an integer beyond 2**24": ([2**24 + 1, 0], "is beyond 2..24(.|\n)*found: 16777217"),
    "the least integer": (np.array([0, 1 - 2**63]), "row 1 is beyond"),
    "an identifier read as a float": ([123456789.0, np.nan], "beyond|missing"),
    "a float that becomes 0": ([0.5, 1e-300], "too small for float32(.|\n)*found: 1e-300"),
    "a float that becomes infinite": (
        [1e300, 0.5],
        "no finite number as float32(.|\n)*found: 1e[+]300",
    ),
    "infinity": ([np.inf, 0.5], "no finite number"),
    "NaN": ([0.5, np.nan], "label 'x' of row 1 is missing"),
    "None": ([None, 1], "row 0 is missing"),
    "None among words": ([None, "sick"], "label 'x' of row 0 is missing"),
    "a number among words": ([1, "sick"], "row 0 is not one of the classes"),
    "pd.NA": (pd.array([1, None], dtype="Int64"), "row 1 is missing"),
    "dates": (
        pd.to_datetime(["2020-01-01", "2020-01-02"]),
        "labels must be numbers, but",
    ),
    "durations": (pd.to_timedelta([1, 2], unit="s"), "labels must be numbers, but"),
    "numbers in text": (["1", "2"], "labels must be numbers, but"),
}


@pytest.mark.parametrize("what", LABELS)
def test_a_label_that_would_change_is_refused(tmp_path, what):
    values, message = LABELS[what]
    table = pd.DataFrame({"path": ["a.jpg", "b.jpg"], "x": values})
    with pytest.raises(ValueError, match=message) as error:
        pack(table, tmp_path / "out", labels="x", **QUIET)
    said(error)


@pytest.mark.parametrize(
    "label", [2**24 + 1, 1e300, float("nan"), None, "1", np.datetime64("2020-01-01"), [0, None]]
)
def test_a_label_of_an_item_that_would_change_is_refused(tmp_path, label):
    width = len(label) if isinstance(label, list) else 1
    with pytest.raises(ValueError, match=r"item 1 |labels must be numbers"):
        pack([(encoded(0), [0] * width), (encoded(1), label)], tmp_path / "out", **QUIET)


FITTING = {
    "fractions": [0.1, -3.25],
    "2**24": [2**24, -(2**24)],
    "booleans": [True, False],
    "pandas' integers": pd.array([1, 2], dtype="Int64"),
    "pandas' booleans": pd.array([True, False], dtype="boolean"),
    "large floats that float32 holds": [2.0**40, 1e30],
    "numbers in a column of objects": np.array([1, 2.5], object),
}


@pytest.mark.parametrize("what", FITTING)
def test_labels_that_fit_are_kept(tmp_path, what):
    paths = sorted(map(str, fill(tmp_path / "a", range(2)).rglob("*.bmp")))
    records = pack(
        pd.DataFrame({"path": paths, 0: FITTING[what]}), tmp_path / "out", labels=0, **QUIET
    )
    assert records.names == ["0"]  # labels=0 is a column, not "no labels"
    assert (
        records.labels[np.argsort(records.rows), 0].tolist()
        == np.array(list(FITTING[what])).astype("f4").tolist()
    )


def test_labels_are_not_changed_in_place_and_other_ones_reach_every_process(tmp_path):
    records = pack(items(), tmp_path / "out", **QUIET)
    with pytest.raises(ValueError, match="read-only"):
        records.labels[0] = 5
    records.labels = records.labels * 2 + 1
    cache = build_image_cache(PackedImages(tmp_path / "out"), tmp_path / "cache", size=8, **QUIET)
    cache.labels = cache.labels + 7
    for images in (records, cache):
        assert np.array_equal(pickle.loads(pickle.dumps(images)).labels, images.labels)
    loader = torch.utils.data.DataLoader(
        records, batch_size=6, num_workers=1, multiprocessing_context="spawn"
    )
    assert torch.equal(next(iter(loader))[1], torch.tensor(records.labels))
    assert (
        pickle.loads(pickle.dumps(PackedImages(tmp_path / "out"))).labels.tolist()
        != records.labels.tolist()
    )


def test_assigned_floats_are_float32_as_packed_ones_are(tmp_path):
    records = pack(items(), tmp_path / "out", **QUIET)
    wide = records.labels.astype(float) / 3
    for given in (wide, wide.tolist(), pd.DataFrame(wide[np.argsort(records.rows)])):
        records.labels = given
        assert np.array_equal(records.labels, wide.astype("f4"))
        assert records.labels.dtype == records[0][1].numpy().dtype == np.float32
    with pytest.raises(ValueError, match="labels must be finite numbers\n  found: .*inf"):
        records.labels = np.full(len(records), 1e300)  # too large for float32
    records.labels = np.arange(len(records))
    assert records.labels.dtype.kind == "i"


def test_many_missing_images_are_refused_unless_that_is_agreed_to(tmp_path, capsys):
    fill(tmp_path / "a", [5])
    real = str(next((tmp_path / "a").rglob("*.bmp")))
    table = pd.DataFrame({"path": [str(tmp_path / f"{n}.jpg") for n in range(99)] + [real]})
    with pytest.raises(
        ValueError, match="99 of 100 images are damaged or missing, and damaged= allows 10%"
    ) as error:
        pack(table, tmp_path / "out", damaged="skip", options=PackOptions(shard_size=30), **QUIET)
    assert "found: 99 x No such file or directory, as" in said(error)
    assert "damaged=0.99" in str(error.value)
    assert (
        len(
            pack(table, tmp_path / "out", damaged=0.99, options=PackOptions(shard_size=30), **QUIET)
        )
        == 1
    )
    assert "left out: 99 x No such file or directory" in capsys.readouterr().out
    for path in table["path"][:95]:  # the other half of the fix
        shutil.copy(real, path)
    with contextlib.suppress(ValueError):
        pack(table, tmp_path / "new", damaged="skip", options=PackOptions(shard_size=30), **QUIET)
    assert (
        len(
            pack(
                table, tmp_path / "new", damaged="skip", options=PackOptions(shard_size=30), **QUIET
            )
        )
        == 96
    )
    assert (
        "4 of 100 images were left out: 4 x No such file or directory, as"
        in capsys.readouterr().out
    )


def test_the_share_that_the_message_names_is_enough(tmp_path):
    fill(tmp_path / "a", [5])
    real = str(next((tmp_path / "a").rglob("*.bmp")))
    table = pd.DataFrame({"path": [str(tmp_path / f"{n}.jpg") for n in range(29)] + [real] * 71})
    with pytest.raises(ValueError, match=r": damaged=0.29$"):  # 0.29 * 100 is 28.999999999999996
        pack(table, tmp_path / "out", damaged="skip", **QUIET)
    assert len(pack(table, tmp_path / "out", damaged=0.29, **QUIET)) == 71


def test_images_that_are_put_in_the_place_of_missing_ones_are_packed(tmp_path):
    fill(tmp_path / "a", [5])
    real = str(next((tmp_path / "a").rglob("*.bmp")))
    table = pd.DataFrame({"path": [str(tmp_path / f"{n}.jpg") for n in range(9)] + [real]})
    with pytest.raises(ValueError, match="9 of 10 images are damaged or missing"):
        pack(table, tmp_path / "out", damaged="skip", **QUIET)
    for path in table["path"][:9]:
        shutil.copy(real, path)
    assert len(pack(table, tmp_path / "out", damaged="skip", **QUIET)) == 10


def test_a_zero_character_in_a_path_shifts_no_label(tmp_path):
    fill(tmp_path / "a")
    paths = sorted(map(str, (tmp_path / "a").rglob("*.bmp")))
    table = pd.DataFrame({"path": [paths[0], f"{paths[1]}\0{paths[2]}", paths[2], paths[3]]})
    with pytest.raises(ValueError, match="path of row 1 holds a zero character") as error:
        pack(table, tmp_path / "out", damaged="skip", **QUIET)
    said(error)


MANY = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import numpy
from tpukit.datasets.packed_images import PackedImages
records = PackedImages(sys.argv[1])
assert len(records.shards.files) == 100
order = numpy.random.default_rng(0).integers(0, 100, 500)
assert records.read(order.tolist()) == [records.read([i])[0] for i in order.tolist()]
held = []
try:
    while True: held.append(open("/dev/null"))
except OSError: pass
records = PackedImages.__reduce__(records)[0](*records.__reduce__()[1]) if len(held) < 3 else records
records.shards._readers.clear(); held.pop(); held.append(open("/dev/null"))
try: records.read(order.tolist())
except OSError as error: print(error)
"""


def test_too_many_open_files_are_no_damage(tmp_path):
    pack(
        [(encoded(n), n) for n in range(100)],
        tmp_path / "out",
        options=PackOptions(shard_size=1),
        **QUIET,
    )
    code = [sys.executable, "-c", MANY, str(tmp_path / "out")]
    ran = subprocess.run(code, cwd=KIT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "found: Too many open files; the file is undamaged" in ran.stdout
    assert "copy this file again" not in ran.stdout


def test_an_image_that_cannot_be_opened_for_the_machines_sake_is_not_left_out(tmp_path):
    code = (
        "import resource, sys, tpukit\n"
        "from tpukit.datasets.pack_shards import prepare; from tpukit.datasets.source_files import Files\n"
        "import numpy, simplejpeg, PIL.Image\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "try: print(prepare(Files([sys.argv[1]], ''), 0, None, tpukit.datasets.PixelForm()))\n"
        "except OSError as error: print('raised', error.strerror)"
    )
    (tmp_path / "a.jpg").write_bytes(encoded(1))
    ran = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a.jpg"], cwd=KIT, capture_output=True, text=True
    )
    assert ran.stdout == "raised Too many open files\n", ran.stderr


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    paths = sorted(map(str, fill(tmp_path_factory.mktemp("table")).rglob("*.bmp")))
    return pd.DataFrame({"path": paths, "x": range(4), "pid": list("abab")})


class Iterable(torch.utils.data.IterableDataset):
    def __len__(self):
        return 6

    def __iter__(self):
        return iter(items())


ACCEPTED = {
    "an Index of columns": lambda table, out: pack(table, out, labels=table.columns[1:2], **QUIET),
    "a path of bytes": lambda table, out: pack(
        table.assign(path=table["path"].map(os.fsencode)), out, **QUIET
    ),
    "an IterableDataset with a length": lambda table, out: pack(Iterable(), out, **QUIET),
    "a size of numpy's": lambda table, out: pack(table, out, size=np.int64(8), **QUIET),
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_means_one_thing_only_is_accepted(table, tmp_path, what):
    assert len(ACCEPTED[what](table, tmp_path / "out")) in (4, 6)


UNCLEAR = {
    "groups= a column itself": (
        lambda t, out: pack(t, out, groups=t["pid"]),
        "one of its columns, got a Series",
    ),
    "groups= a list": (
        lambda t, out: pack(t, out, groups=["pid"]),
        "name of one of its columns, got a list",
    ),
    "a column twice": (
        lambda t, out: pack(pd.concat([t, t[["x"]]], axis=1), out, labels="x"),
        "has the column 'x' more than once",
    ),
    "a dict": (lambda t, out: pack({"a": items()[0]}, out), "cannot read a dict"),
    "a group that is pd.NA": (
        lambda t, out: pack(t.assign(pid=["a", pd.NA, "b", "b"]), out, groups="pid"),
        "images without a group: 1; the first is image 1",
    ),
    "paths and labels": (
        lambda t, out: pack([("a.jpg", 1)], out),
        r'(?s)found: tuple: the path .a.jpg.*pandas.DataFrame\({"path"',
    ),
    "groups= a word, of items": (
        lambda t, out: pack(items(), out, groups="pid"),
        "one value for each item, got 'pid'",
    ),
    "a size of 8.0": (
        lambda t, out: pack(t, out, size=8.0),
        "size must be a whole number, 1 or more, got 8.0",
    ),
    "a size of True": (
        lambda t, out: pack(t, out, size=True),
        "size must be a whole number, 1 or more, got True",
    ),
    "classes= without a label": (
        lambda t, out: pack(t, out, classes=["a"]),
        "classes of one label, and labels= names 0",
    ),
    "path= of a folder": (
        lambda t, out: pack(out.parent, out, path="file"),
        "path= is an argument for a table",
    ),
    "image= of a table": (
        lambda t, out: pack(t, out, options=PackOptions(image="x")),
        "image= is an argument for items that are dicts",
    ),
    "a window upside down": (
        lambda t, out: pack(t, out, options=PackOptions(window=(9, 1))),
        "the lower one first, got [(]9, 1[)]",
    ),
}


@pytest.mark.parametrize("what", UNCLEAR)
def test_what_cannot_be_packed_is_told_with_a_way_out(table, tmp_path, what):
    call, message = UNCLEAR[what]
    with pytest.raises(ValueError, match=message):
        call(table, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_records_is_told_with_a_way_out(tmp_path):
    records = pack(items(), tmp_path / "out", **QUIET)
    subset = torch.utils.data.Subset(records, [1, 2])
    calls = {
        "got Subset\n.*take the Subset of the cache": lambda: build_image_cache(
            subset, tmp_path / "new", size=8
        ),
        r"got str\n  fix:   PackedImages\(folder\)": lambda: cached_images(
            str(tmp_path / "out"), size=8
        ),
        r"of tpukit cache 4, not of tpukit pack 4\n.*CachedImages\(folder\)": lambda: PackedImages(
            build_image_cache(records, tmp_path / "cache", size=8, **QUIET).folder
        ),
        "size must be a whole number, 1 or more, got 0": lambda: PackedImages(
            tmp_path / "out", size=0
        ),
        "got 8.0": lambda: build_image_cache(records, tmp_path / "new", size=8.0),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(
        TypeError,
        match=r"must be one whole number, got slice\(0, 3, None\)\n  fix:   .*images.take",
    ):
        records[0:3]
    other = pack(items(shift=1), tmp_path / "other", **QUIET)
    with pytest.raises(ValueError, match="holds another cache") as error:
        build_image_cache(other, tmp_path / "cache", size=8, **QUIET)
    assert not re.search("[0-9a-f]{32}", said(error))


def test_who_waits_for_another_process_says_so(tmp_path, capfd):
    code = (
        "import sys, time; from pathlib import Path; from tpukit.datasets.locks import lock_folder\n"
        "with lock_folder(Path(sys.argv[1])): print('in', flush=True); time.sleep(1.5)"
    )
    (tmp_path / "out").mkdir()
    other = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "out"], cwd=KIT, stdout=subprocess.PIPE
    )
    assert other.stdout.readline() == b"in\n"
    assert len(pack(items(), tmp_path / "out", **QUIET)) == 6
    assert (
        f"another process writes to {tmp_path / 'out'}; this call waits" in capfd.readouterr().out
    )
    other.wait()
    other.stdout.close()


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.004, "0.4%"), (0.29, "29%"), (Fraction(1, 4), "25%"), ("skip", "10%")],
)
def test_the_share_that_may_be_damaged_is_told_exactly(tmp_path, share, words):
    fill(tmp_path / "a")
    for file in list((tmp_path / "a").rglob("*.bmp"))[:2]:
        file.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=f"damaged= allows {words}\n"):
        pack(tmp_path / "a", tmp_path / "out", damaged=share, **QUIET)


def test_a_seed_of_none_is_refused_because_no_later_call_could_continue(tmp_path):
    with pytest.raises(ValueError, match="seed must be a whole number, 0 or more, got None"):
        pack(items(), tmp_path / "out", options=PackOptions(seed=None), **QUIET)
    assert not (tmp_path / "out").exists()
