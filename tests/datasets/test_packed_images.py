"""records: every image once, whatever ended the packing; what was damaged since is told, by the name of the file."""

import contextlib
import io
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("array_record")

from helpers.files import contents, flip, mounted  # noqa: E402
from helpers.sources import Items  # noqa: E402

from tpukit.datasets import packing  # noqa: E402
from tpukit.datasets.checked_files import seal, unseal  # noqa: E402
from tpukit.datasets.image_cache import cached_images  # noqa: E402
from tpukit.datasets.packed_images import PackedImages, PackFolder  # noqa: E402
from tpukit.datasets.packing import PackOptions, pack  # noqa: E402
from tpukit.datasets.splitting import split_by_group  # noqa: E402
from tpukit.essentials.data.identities import identity  # noqa: E402

KIT = Path(__file__).parents[2]
COUNT, SHARD = 60, 16
QUIET = {"progress": "off"}
OPTIONS = PackOptions(shard_size=SHARD, workers=2)
HOW = {"labels": ["sick", "age"], "groups": "patient", "options": OPTIONS, **QUIET}


def encoded(number, height=40, width=48, kind="JPEG"):
    coarse = np.random.default_rng(number).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(file, kind)
    return file.getvalue()


def by_pillow(data, size):
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Write a folder of two classes, 60 images, each third a PNG."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(COUNT):
        into = folder / ("cat" if number < 20 else "dog")
        into.mkdir(exist_ok=True)
        kind = "PNG" if number % 3 == 0 else "JPEG"
        (into / f"{number:03d}.{kind.lower()}").write_bytes(encoded(number, kind=kind))
    return folder


@pytest.fixture(scope="module")
def table(images):
    paths = sorted(str(path) for path in images.rglob("*.*"))
    paths.sort(key=lambda path: Path(path).stem)
    numbers = range(COUNT)
    columns = {"path": paths, "sick": [n % 2 for n in numbers], "age": [n / 4 for n in numbers]}
    return pd.DataFrame({**columns, "patient": [f"p{n * 7 % 13}" for n in numbers]})


@pytest.fixture(scope="module")
def packed(table, tmp_path_factory):
    return pack(table, tmp_path_factory.mktemp("packed"), **HOW).folder


def test_a_folder_may_begin_with_the_sign_of_the_home_folder(images, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    pack(images, "~/packed", **QUIET)
    cached_images(PackedImages("~/packed"), size=8, folder="~/cache", **QUIET)
    assert {path.name for path in tmp_path.iterdir()} == {"packed", "cache"}


@pytest.fixture(scope="module")
def pixels(table, tmp_path_factory):
    return pack(table, tmp_path_factory.mktemp("pixels"), size=32, **HOW).folder


@pytest.fixture
def copy(packed, tmp_path):
    return shutil.copytree(packed, tmp_path / "copy")


def shards(folder):
    return sorted(Path(folder).glob("*.array_record"))


def test_every_image_is_there_once_with_its_own_labels_and_group(packed, table):
    records = PackedImages(packed)
    assert len(records) == COUNT
    assert records.names == ["sick", "age"]
    assert (records.encoding, records.shape, len(records.skipped)) == ("jpeg", (40, 48, 3), 0)
    numbers = [table["path"].tolist().index(records.name(i)) for i in range(COUNT)]
    assert sorted(numbers) == list(range(COUNT))
    for data, number in zip(records.read(range(COUNT)), numbers, strict=True):
        assert data == Path(table["path"][number]).read_bytes()
    assert np.array_equal(records.labels, table[["sick", "age"]].to_numpy("float32")[numbers])
    assert records.labels.dtype == np.float32
    assert [records.group_names[group] for group in records.groups] == table["patient"][
        numbers
    ].tolist()
    assert (records.rows.tolist(), records.rows.dtype) == (numbers, np.int64)


def test_one_pack_serves_all_folds(packed, table):
    torch = pytest.importorskip("torch")
    records, folds = PackedImages(packed, 16), (np.arange(COUNT) // 20)
    seen = []
    for fold in range(3):
        subset = torch.utils.data.Subset(records, np.flatnonzero(folds[records.rows] == fold))
        ages = sorted(subset[i][1][1].item() for i in range(len(subset)))
        assert ages == table["age"][folds == fold].tolist()
        seen += ages
    assert sorted(seen) == table["age"].tolist()


def test_the_order_is_one_permutation_over_all_files_that_the_seed_decides(packed, table, tmp_path):
    again = pack(table, tmp_path / "again", **{**HOW, "options": replace(OPTIONS, workers=1)})
    assert contents(again.folder) == contents(packed)
    other = pack(table, tmp_path / "other", **{**HOW, "options": replace(OPTIONS, seed=1)})
    first, second = ([records.name(i) for i in range(COUNT)] for records in (again, other))
    assert sorted(first) == sorted(second)
    assert first != second
    ages = again.labels[:, 1]
    assert {len(set(ages[k : k + SHARD] // 5)) for k in range(0, 48, SHARD)} == {
        3
    }  # each file has some of all


def of_bytes():
    return [(encoded(number), [number % 2, number]) for number in range(COUNT)]


def of_arrays():
    return [(np.asarray(Image.open(io.BytesIO(data))), labels) for data, labels in of_bytes()]


ITEMS = {
    "a list": of_bytes,
    "a generator": lambda: iter(of_bytes()),
    "a map-style dataset": lambda: Items(of_bytes()),
    "arrays": of_arrays,
    "a generator of arrays": lambda: iter(of_arrays()),
}


@pytest.mark.parametrize("kind", ITEMS)
def test_items_of_any_kind_are_packed(kind, tmp_path):
    groups = [number // 5 for number in range(COUNT)]
    records = pack(
        ITEMS[kind](), tmp_path, options=PackOptions(shard_size=25), groups=groups, **QUIET
    )
    numbers = records.labels[:, 1].astype(int)
    assert sorted(numbers) == list(range(COUNT))
    assert records.names == ["label_0", "label_1"]
    assert [records.name(i) for i in range(COUNT)] == [f"item {number}" for number in numbers]
    assert records.rows.tolist() == numbers.tolist()
    assert [int(records.group_names[group]) for group in records.groups] == (numbers // 5).tolist()
    assert (records.encoding, records.shape) == (
        "uint8" if "arrays" in kind else "jpeg",
        (40, 48, 3),
    )
    expected = of_arrays()
    assert all(
        np.array_equal(image, expected[n][0])
        for image, n in zip(records.take(range(COUNT)), numbers, strict=True)
    )
    assert not (tmp_path / "unfinished").exists()


def test_a_folder_is_read_as_torchvision_reads_it(images, tmp_path):
    datasets = pytest.importorskip("torchvision.datasets")
    records = pack(images, tmp_path, **QUIET)
    expected = datasets.ImageFolder(images)
    assert records.classes == records.names == expected.classes
    found = {str(images / records.name(i)): records.labels[i] for i in range(len(records))}
    assert found == dict(expected.samples)
    assert [expected.samples[row][0] for row in records.rows] == list(found)
    assert records.group_names == []
    assert len(set(records.groups)) == COUNT


def test_a_table_needs_no_labels(table, tmp_path):
    records = pack(table, tmp_path, **QUIET)
    assert (records.labels.shape, records.names) == ((COUNT, 0), [])
    assert len(records.read(range(COUNT))) == COUNT


def test_pixels_are_pillows_to_the_last_bit(pixels, packed, table):
    records, decoded = PackedImages(pixels), PackedImages(packed, 32, exact=True)
    assert (records.encoding, records.shape, decoded.shape) == ("uint8", (32, 32, 3), (32, 32, 3))
    expected = [by_pillow(Path(records.name(i)).read_bytes(), 32) for i in range(COUNT)]
    assert np.array_equal(records.take(range(COUNT)), expected)
    assert np.array_equal(decoded.take(range(COUNT)), expected)
    assert b"".join(records.read([3, 5])) == expected[3].tobytes() + expected[5].tobytes()


def test_arrays_of_many_shapes_are_resized_as_files_are(tmp_path):
    files = [encoded(number, height=30 + number, width=41) for number in range(9)]
    arrays = [
        (np.asarray(Image.open(io.BytesIO(data))), number) for number, data in enumerate(files)
    ]
    records = pack(arrays, tmp_path, size=24, **QUIET)
    for image, number in zip(records.take(range(9)), records.labels[:, 0].astype(int), strict=True):
        assert np.array_equal(image, by_pillow(files[number], 24))


def test_a_finished_pack_is_not_made_again(copy, table, monkeypatch):
    before = {file: file.stat().st_mtime_ns for file in copy.iterdir()}
    monkeypatch.setattr(subprocess, "Popen", None)  # no process is started
    assert len(pack(table, copy, **HOW)) == COUNT
    assert {file: file.stat().st_mtime_ns for file in copy.iterdir()} == before


OTHER = {
    "another seed": ({"options": replace(OPTIONS, seed=5)}, "seed 0, asked for 5"),
    "another size": ({"size": 32}, "size None, asked for 32"),
    "other labels": ({"labels": "age"}, "labels sick, age, asked for labels age"),
    "other groups": ({"groups": None}, "groups 13, p0 to p9, asked for no groups"),
    "other shards": ({"options": replace(OPTIONS, shard_size=7)}, "shard 16, asked for 7"),
}


@pytest.mark.parametrize("what", OTHER)
@pytest.mark.parametrize("finished", [True, False])
def test_another_pack_is_left_alone(copy, table, what, finished):
    if not finished:
        plan = json.loads((copy / "manifest.json").read_text())["plan"]
        (copy / "manifest.json").unlink()
        (copy / "unfinished").mkdir()
        (copy / "unfinished" / "plan.json").write_text(
            json.dumps({"format": PackFolder(copy).format, "plan": plan})
        )
    before = contents(copy)
    with pytest.raises(FileExistsError, match=r"no items, asked for 1 items; .*asked for no files"):
        pack([(np.zeros((8, 8, 3), np.uint8), 0)], copy, options=OPTIONS, **QUIET)
    changed, found = OTHER[what]
    with pytest.raises(
        FileExistsError,
        match=rf"holds another pack.*\n  found: {found}.*\n  fix:   name another folder",
    ):
        pack(table, copy, **{**HOW, **changed})
    assert contents(copy) == before


def test_a_folder_with_somebodys_files_is_left_alone(table, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"not a pack's\n  found: \['thesis.txt'\]\n  fix:"):
        pack(table, tmp_path, **HOW)
    assert contents(tmp_path) == {"thesis.txt": b"precious"}


def test_a_pack_that_failed_before_its_first_file_is_no_other_pack(table, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"item 1 has another number of labels than the first one\n  found: 1, where the first one has 2",
    ):
        pack([(encoded(0), [1, 2]), (encoded(1), 1)], tmp_path, **QUIET)
    assert len(pack(table, tmp_path, **HOW)) == COUNT


@pytest.fixture
def spoilt(table, tmp_path):
    """Return a table of which one image is cut off, one is text and one is gone."""
    paths = table["path"].tolist()
    for row, data in ((7, Path(paths[7]).read_bytes()[:300]), (30, b"<html>"), (41, None)):
        paths[row] = str(tmp_path / f"spoilt-{row}.jpg")
        if data is not None:
            Path(paths[row]).write_bytes(data)
    return table.assign(path=paths)


@pytest.mark.parametrize("size", [None, 32])
def test_a_damaged_image_is_named_and_what_the_fix_says_works(
    spoilt, table, packed, pixels, tmp_path, size
):
    with pytest.raises(
        OSError,
        match=r"image (7|30|41) cannot be packed: .*spoilt-.*\n  found: .*\n  fix:   (copy it|check the path)",
    ):
        pack(spoilt, tmp_path / "new", size=size, **HOW)
    with pytest.raises(
        FileNotFoundError, match=r"no finished pack\n(.|\n)*fix:   call pack.* as before"
    ):
        PackedImages(tmp_path / "new")
    for row in (7, 30, 41):  # the one half of the fix
        shutil.copy(table["path"][row], spoilt["path"][row])
    fixed = pack(spoilt, tmp_path / "new", size=size, **HOW)
    whole = PackedImages(packed if size is None else pixels)
    assert fixed.read(range(COUNT)) == whole.read(range(COUNT))


def test_damaged_images_are_left_out_and_listed(spoilt, tmp_path):
    with pytest.raises(OSError, match="cannot be packed"):
        pack(spoilt, tmp_path / "new", **HOW)
    records = pack(
        spoilt, tmp_path / "new", damaged="skip", **HOW
    )  # what the fix says; continues from there
    assert len(records) == COUNT - 3
    assert [image["row"] for image in records.skipped] == [7, 30, 41]
    assert [Path(image["name"]).name for image in records.skipped] == [
        f"spoilt-{n}.jpg" for n in (7, 30, 41)
    ]
    for image, why in zip(
        records.skipped, ("truncated", "cannot identify", "No such file"), strict=True
    ):
        assert why.lower() in image["why"].lower()
    names = {records.name(i) for i in range(len(records))}
    assert names == set(spoilt["path"].drop([7, 30, 41]))
    for i, data in enumerate(records.read(range(len(records)))):
        assert data == Path(records.name(i)).read_bytes()
        assert records.rows[i] == spoilt.index[spoilt["path"] == records.name(i)][0]
        assert records.labels[i, 1] == records.rows[i] / 4
    patients = [records.group_names[group] for group in records.groups]
    assert patients == spoilt["patient"][records.rows].tolist()
    with pytest.raises(ValueError, match="3 of 60 images were left out of this pack as damaged"):
        pack(spoilt, tmp_path / "new", **HOW)
    with pytest.raises(ValueError, match=r"3 of 60 images were left out(.|\n)*damaged=0\.05$"):
        pack(spoilt, tmp_path / "new", damaged=0.04, **HOW)
    assert pack(spoilt, tmp_path / "new", damaged=0.05, **HOW).digest == records.digest


@pytest.mark.parametrize("finished", [True, False])
def test_files_that_were_left_out_and_are_whole_now_are_noticed(
    spoilt, table, packed, tmp_path, finished
):
    with contextlib.ExitStack() as stack:
        if not finished:  # all shards are written, and the call ends before the manifest is
            stack.enter_context(pytest.raises(KeyboardInterrupt))
            end = mock.patch.object(packing, "_finish", side_effect=KeyboardInterrupt)
            stack.enter_context(end)
        pack(spoilt, tmp_path / "new", damaged="skip", **HOW)
    for row in (7, 30, 41):
        shutil.copy(table["path"][row], spoilt["path"][row])
    if finished:
        with pytest.raises(
            FileExistsError, match="damaged when it was packed, but are intact now"
        ) as error:
            pack(spoilt, tmp_path / "new", damaged="skip", **HOW)
        eval(error.value.fix.partition(": ")[2], {"shutil": shutil})
    again = pack(spoilt, tmp_path / "new", damaged="skip", **HOW)
    assert again.read(range(COUNT)) == PackedImages(packed).read(range(COUNT))


SCRIPT = (
    "import sys; from tpukit import PackOptions, pack; "
    "pack(sys.argv[1], sys.argv[2], size=64, options=PackOptions(shard_size=10, workers=2))"
)


def started(images, folder):
    """Start a pack in a process group of its own; return once it has begun to write."""
    call = [sys.executable, "-c", SCRIPT, str(images), str(folder)]
    process = subprocess.Popen(call, cwd=KIT, start_new_session=True, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (folder / "unfinished").exists():
        time.sleep(0.005)
    return process


@pytest.fixture
def many(images, tmp_path):
    folder = tmp_path / "many"
    for number in range(4):
        shutil.copytree(images, folder / str(number) / f"part {number}", copy_function=os.link)
    return folder


@pytest.mark.soak
def test_after_many_kills_nothing_is_lost_or_doubled_and_every_byte_is_the_same(
    many, tmp_path, how_often
):
    assert started(many, tmp_path / "undisturbed").wait(600) == 0
    whole = contents(tmp_path / "undisturbed")
    random = np.random.default_rng()
    folders, moments = [tmp_path / "0"], set()
    for number in range(how_often(4, 20)):
        process = started(many, folders[-1])
        # Of 24; from 25 on, it may end by itself. The first is early, so that others can follow.
        most = 27 if number else 12
        enough = random.integers(len(shards(folders[-1])), most)
        while process.poll() is None and len(shards(folders[-1])) < enough:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.03))
        with contextlib.suppress(ProcessLookupError):  # it was through
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        there = contents(folders[-1])
        moments.add(len(shards(folders[-1])))
        # Whatever stands under its own name is whole.
        assert {name: there[name] for name in there if name in whole}.items() <= whole.items()
        if "manifest.json" in there:
            folders.append(tmp_path / str(len(folders)))
    for folder in folders:
        assert started(many, folder).wait(600) == 0
        assert contents(folder) == whole
    assert len(moments) > how_often(1, 3), (
        f"all kills fell into a few moments: {moments} of 24 files were there"
    )


def test_a_killed_parent_takes_its_processes_along(many, tmp_path):
    psutil = pytest.importorskip("psutil")
    process = started(many, tmp_path / "new")
    children = []
    while not children:
        assert process.poll() is None
        children = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    assert psutil.wait_procs(children, timeout=600)[1] == []


FULL = """
import os, pathlib, subprocess, sys
from tpukit.datasets.packing import PackOptions, pack
from tpukit.datasets.packed_images import PackedImages
from tpukit.datasets.disk_space import Room
Room.check = lambda *_, **__: None  # else it is known before; another program may take the room meanwhile
images, disk = sys.argv[1], pathlib.Path(sys.argv[2])
old = pack(images, disk / "old", progress="off", options=PackOptions(workers=1))
before = old.read(range(len(old)))
for source in (images, ((pathlib.Path(images, old.name(i)).read_bytes(), i) for i in range(len(old)))):
    new = disk / type(source).__name__
    try:
        pack(source, new, size=256, progress="off", options=PackOptions(shard_size=8, workers=2))
    except OSError as error:
        print(error.errno, error)
    assert not list(disk.rglob("*.part")), list(disk.rglob("*.part"))
assert PackedImages(disk / "old").read(range(len(old))) == before
subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
print("then", len(pack(images, disk / "str", size=256, progress="off", options=PackOptions(shard_size=8, workers=2))))
"""


def test_a_full_disk_says_so_and_an_older_pack_stays_usable(images, tmp_path):
    tiny = mounted(tmp_path, "size=5m")
    ran = subprocess.run(
        [*tiny, sys.executable, "-c", FULL, images, tmp_path],
        cwd=KIT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line for line in ran.stdout.splitlines() if not line.startswith("pack: ")]
    fact, evidence, fix, *_, last = lines
    assert fact == f"28 the disk of {tmp_path}/str is full"
    assert "files of" in evidence
    assert "make room and call pack again: it continues from here" in fix
    assert ran.stdout.count("is full") == 2
    assert last == f"then {COUNT}"


def cut(file, share=0.7):
    os.truncate(file, int(file.stat().st_size * share))


def swap(one, other):
    one.rename(one.with_suffix(".held"))
    other.rename(one)
    one.with_suffix(".held").rename(other)


def foreign(file):
    file.write_bytes(np.random.default_rng(0).bytes(file.stat().st_size))


def append(file):
    with file.open("ab") as end:
        end.write(b"junk")


FAULTS = {  # what was done to which file; what is said, if it opens at all when the last image is read
    "a shard cut off": (cut, "00002", "found: 00002-of-00004.array_record has .* bytes where"),
    "a shard one byte short": (
        lambda file: cut(file, 0.99999),
        "00002",
        "found: 00002-of-.* bytes where",
    ),
    "an empty shard": (lambda file: cut(file, 0), "00002", "found: 00002-of-.* has 0 bytes where"),
    "junk behind a shard": (
        append,
        "00002",
        "found: 00002-of-00004.array_record has .* bytes where",
    ),
    "a shard that is gone": (Path.unlink, "00002", "found: 00002-of-00004.array_record is missing"),
    "a foreign file as long": (
        foreign,
        "00002",
        "record 0 of .*00002-of-00004.array_record cannot be read",
    ),
    "a shard of zeros": (
        lambda f: f.write_bytes(bytes(f.stat().st_size)),
        "00002",
        "record 0 of .*00002-of-00004",
    ),
    "a flipped bit in a shard": (
        flip,
        "00002",
        "record [0-9]* of .*00002-of-00004.array_record cannot be read",
    ),
    "a flipped bit in the index": (
        flip,
        "index",
        "index.npy is not what was written: its checksum",
    ),
    "an index cut off": (cut, "index", "index.npy has .* bytes where"),
    "an index that is gone": (Path.unlink, "index", "index.npy is missing"),
    "a flipped bit in the manifest": (
        flip,
        "manifest",
        "manifest.json is not what was written",
    ),
    "a manifest cut off": (cut, "manifest", "manifest.json is not what was written"),
    "an empty manifest": (
        lambda file: cut(file, 0),
        "manifest",
        "manifest.json is not what was written",
    ),
    "a manifest that is gone": (Path.unlink, "manifest", "holds no finished pack"),
    "a flipped bit in the names": (flip, "names", "names is not what was written: its checksum"),
    "names that are cut off": (cut, "names", "found: names has .* bytes where"),
    "names that are gone": (Path.unlink, "names", "found: names is missing"),
    "looks that are cut off": (cut, "looks", "found: looks.npy has .* bytes where"),
    "looks that are gone": (Path.unlink, "looks", "found: looks.npy is missing"),
    "two shards of one size exchanged": (
        lambda f: swap(f, shards(f.parent)[0]),
        "00002",
        "record 0 of .*00000-of-00004",
    ),
}


def read_all(folder):
    records = PackedImages(folder)
    return records.read(range(COUNT)), records.name(0)


@pytest.mark.parametrize("what", FAULTS)
def test_a_damaged_pack_is_told_by_the_name_of_the_file_and_the_fix_works(what, pixels, tmp_path):
    folder = shutil.copytree(pixels, tmp_path / "copy")
    harm, name, message = FAULTS[what]
    (file,) = folder.glob(f"{name}*")
    harm(file)
    with pytest.raises(OSError, match=rf"{message}(.|\n)*fix:   (copy|pass)"):
        read_all(folder)
    shutil.copytree(pixels, folder, dirs_exist_ok=True)
    assert PackedImages(folder).read(range(COUNT)) == PackedImages(pixels).read(range(COUNT))


def test_a_flipped_bit_harms_one_record_and_no_other(copy, packed):
    records, whole = PackedImages(packed), PackedImages(copy)
    victim = records.read(range(COUNT))[20]
    file = shards(copy)[1]
    file.write_bytes(
        file.read_bytes().replace(victim[50:90], victim[50:89] + bytes([victim[89] ^ 4]))
    )
    with pytest.raises(OSError, match=r"record 4 of .*00001-of-00004(.|\n)*leave image 20 out"):
        whole.read([3, 20, 40, 21])
    others = [i for i in range(COUNT) if i != 20]
    assert whole.read(others) == records.read(others)


def test_a_file_cut_off_while_it_is_open_gives_no_empty_image(copy):
    records = PackedImages(copy, 32)
    records.take([0, 20])
    cut(shards(copy)[1], 0.0)
    with pytest.raises(OSError, match=r"record \d+ of .*00001-of-00004"):
        records.take(range(COUNT))


def test_a_pack_of_a_later_format_says_so(copy):
    manifest = unseal((copy / "manifest.json").read_bytes())
    (copy / "manifest.json").write_bytes(seal({**manifest, "format": "tpukit pack 99"}))
    with pytest.raises(
        ValueError, match="found: a manifest.json of tpukit pack 99, not of tpukit pack 4\n  fix:"
    ):
        PackedImages(copy)


def test_the_folder_of_another_program_is_no_pack_and_is_left_alone(table, tmp_path):
    (tmp_path / "manifest.json").write_text('{"count": 3}')
    for call in (PackedImages, lambda folder: pack(table, folder, **HOW)):
        with pytest.raises(
            ValueError, match=r"holds no pack that this tpukit can read\n  found: .* something else"
        ):
            call(tmp_path)
    assert contents(tmp_path) == {"manifest.json": b'{"count": 3}'}


def test_an_item_is_a_tensor_of_an_image_and_one_of_its_labels(packed, pixels):
    torch = pytest.importorskip("torch")
    for records in (PackedImages(packed, 32, exact=True), PackedImages(pixels)):
        image, labels = records[7]
        assert (image.shape, image.dtype, image.is_contiguous()) == ((3, 32, 32), torch.uint8, True)
        assert np.array_equal(image.permute(1, 2, 0), records.take([7])[0])
        assert (labels.dtype, labels.tolist()) == (torch.float32, records.labels[7].tolist())
        image += 1  # both are the caller's own
        labels += 1
        assert records.labels[7].tolist() != labels.tolist()
        assert torch.equal(records[-1][0], records[COUNT - 1][0])
        assert len([None for _ in records]) == COUNT
    assert PackedImages(packed)[0][0].shape == (3, 40, 48)


@pytest.mark.parametrize("exact", [True, False])
def test_many_are_taken_in_any_order_into_an_array_that_is_there(packed, pixels, exact):
    for records in (PackedImages(packed, 20, exact=exact), PackedImages(pixels)):
        single = [records.take([i])[0] for i in range(COUNT)]
        indices = np.random.default_rng(1).integers(0, COUNT, 200)
        out = np.zeros((200, *records.shape), np.uint8)
        assert records.take(indices, out) is out
        assert np.array_equal(out, [single[i] for i in indices])
        assert records.take([]).shape == (0, *records.shape)


@pytest.mark.parametrize("indices", [[60], [-1], [0, 1, 10**9], np.array([3, -61])])
def test_an_image_that_is_not_there_is_an_index_error(packed, indices):
    with pytest.raises(IndexError, match=r"index -?\d+ is out of range: there are 60 images"):
        PackedImages(packed).read(indices)


def test_readers_pickle_after_they_have_read(packed):
    records = PackedImages(packed, 20, exact=True)
    expected = records.take(range(COUNT))
    again = pickle.loads(pickle.dumps(records))
    assert np.array_equal(again.take(range(COUNT)), expected)
    assert (again.digest, again.exact) == (records.digest, True)


def in_a_fork(call):
    """Return the exit status of a child that does this, killed after five seconds."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout has one of its own
        signal.alarm(5)
        try:
            os._exit(0 if call() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("kind", ["packed", "pixels"])
def test_a_fork_reads_what_its_parent_has_read_before(kind, request):
    records = PackedImages(request.getfixturevalue(kind))
    expected = records.read(range(COUNT))
    assert [in_a_fork(lambda: records.read(range(COUNT)) == expected) for _ in range(3)] == [
        0,
        0,
        0,
    ]
    assert records.read(range(COUNT)) == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)  # which is the point
@pytest.mark.soak
def test_a_fork_while_array_records_threads_are_busy_does_not_hang(pixels, how_often):
    from array_record.python.array_record_module import ArrayRecordReader

    records, stop = PackedImages(pixels), threading.Event()
    expected = records.read(range(COUNT))
    reader, many = (
        ArrayRecordReader(str(shards(pixels)[0])),
        [number % SHARD for number in range(400)],
    )

    def keep_reading():
        while not stop.is_set():
            reader.read(many)

    thread = threading.Thread(target=keep_reading)
    thread.start()
    try:
        for _ in range(how_often(15, 60)):
            assert (
                in_a_fork(lambda: all(records.read(range(COUNT)) == expected for _ in range(5)))
                == 0
            )
    finally:
        stop.set()
        thread.join()


def test_a_data_loader_reads_from_its_processes(packed):
    data = pytest.importorskip("torch.utils.data")
    records = PackedImages(packed, 16)
    records.read([0])
    loader = data.DataLoader(records, batch_size=20, num_workers=2, multiprocessing_context="fork")
    images, labels = (np.concatenate(part) for part in zip(*loader, strict=True))
    assert np.array_equal(images.transpose(0, 2, 3, 1), records.take(range(COUNT)))
    assert np.array_equal(labels, records.labels)


def test_no_group_is_on_both_sides_of_a_split(packed):
    records = PackedImages(packed)
    train, valid = records.split(0.25, seed=3)
    assert sorted([*train, *valid]) == list(range(COUNT))
    assert not set(records.groups[train]) & set(records.groups[valid])
    assert abs(len(valid) - 15) <= 3  # a patient has four or five images
    assert np.array_equal(records.split(0.25, seed=3)[1], valid)
    assert not np.array_equal(records.split(0.25, seed=4)[1], valid)


SPLITS = {
    "each its own": (np.arange(100), 0.2, 20),
    "two groups": (np.repeat([4, 9], 50), 0.2, 50),
    "one that is large": (np.repeat([0, 1, 2, 3], [97, 1, 1, 1]), 0.02, None),
    "more wanted than there is without one": (np.repeat([0, 1], [1, 99]), 0.99, None),
    "two images": (np.array([1, 2]), 0.001, 1),
}


@pytest.mark.parametrize("what", SPLITS)
@pytest.mark.parametrize("seed", range(3))
def test_both_sides_of_a_split_have_something(what, seed):
    groups, share, expected = SPLITS[what]
    train, valid = split_by_group(groups, share, seed)
    assert len(train) > 0
    assert len(valid) > 0
    assert sorted([*train, *valid]) == list(range(len(groups)))
    assert not set(groups[train]) & set(groups[valid])
    assert expected in (None, len(valid))


UNEVEN = {
    "one that is too large": ([90] + [1] * 10, 0.2, 10),
    "one of four fifths": ([80] + [1] * 20, 0.2, 20),
    "one that only fits alone": ([20, 30, 50], 0.2, 20),
    "two that fit together": ([13, 40, 7, 40], 0.2, 20),
    "three that fit together": ([31, 9, 33, 6, 16, 5], 0.2, 20),
    "as near as groups allow": ([30, 31, 39], 0.2, 30),
}


@pytest.mark.parametrize("what", UNEVEN)
def test_groups_of_uneven_size_are_split_as_nearly_as_they_allow(what):
    sizes, share, expected = UNEVEN[what]
    groups = np.repeat(np.arange(len(sizes)), sizes)
    for seed in range(50):
        assert len(split_by_group(groups, share, seed)[1]) == expected


def test_a_split_is_the_nearest_of_all_that_there_are():
    random, missed = np.random.default_rng(0), []
    for seed in range(200):
        sizes = np.ceil(random.pareto(1, random.integers(2, 11)) * 10).astype(int)
        sums = [
            sum(part)
            for n in range(1, len(sizes))
            for part in itertools.combinations(sizes.tolist(), n)
        ]
        best = min(abs(each - 0.3 * sizes.sum()) for each in sums)
        got = len(split_by_group(np.repeat(np.arange(len(sizes)), sizes), 0.3, seed)[1])
        missed.append((abs(got - 0.3 * sizes.sum()) - best) / sizes.sum())
    assert max(missed) < 1e-9


def test_every_group_has_its_turn_on_the_second_side():
    sizes = np.arange(1, 41)
    groups = np.repeat(np.arange(40), sizes)
    turns = sum(
        np.bincount(np.unique(groups[split_by_group(groups, 0.25, s)[1]]), minlength=40)
        for s in range(200)
    )
    assert turns.min() > 25  # 50 is the mean
    assert turns.max() < 75


@pytest.mark.parametrize("columns", [False, True])
def test_a_stratified_split_has_the_same_shares_on_both_sides(columns):
    random = np.random.default_rng(1)
    sizes = random.integers(1, 30, 120)
    groups = np.repeat(np.arange(120), sizes)
    classes = np.repeat(random.choice(3, 120, p=[0.85, 0.1, 0.05]), sizes)
    wanted = np.eye(3)[classes] if columns else classes
    for seed in range(10):
        _, valid = split_by_group(groups, 0.2, seed, wanted)
        assert not set(groups[valid]) & set(groups[np.setdiff1d(np.arange(len(groups)), valid)])
        assert (
            np.abs(np.bincount(classes[valid], minlength=3) / np.bincount(classes) - 0.2).max()
            < 0.02
        )


def test_images_without_groups_are_stratified_exactly_however_many_classes_there_are():
    classes = np.random.default_rng(0).permutation(np.arange(50_000) % 1000)
    train, valid = split_by_group(np.arange(50_000), 0.2, 3, classes)
    assert np.bincount(classes[valid]).tolist() == [10] * 1000
    assert sorted([*train, *valid]) == list(range(50_000))
    assert not np.array_equal(valid, split_by_group(np.arange(50_000), 0.2, 4, classes)[1])


def test_records_are_split_by_their_own_labels(packed):
    records = PackedImages(packed)
    with pytest.raises(
        ValueError,
        match=r"stratify= with several columns must hold zeros and ones\n  found: [\d.]+\n  fix:",
    ):
        records.split(stratify=True)
    records.labels = records.labels[:, 0].astype(int)
    train, valid = records.split(0.3, stratify=True)
    assert not set(records.groups[train]) & set(records.groups[valid])
    assert abs(records.labels[valid].mean() - 0.5) < 0.1
    with pytest.raises(
        ValueError, match=r"stratify= has the shape \(3,\), and there are 60 images"
    ):
        split_by_group(records.groups, stratify=[1, 2, 3])


def test_importing_it_is_free():
    heavy = {"numpy", "PIL", "torch", "array_record", "simplejpeg"}
    code = f"import sys, tpukit.datasets.packing; print({heavy} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=KIT, capture_output=True, text=True).stdout
        == "set()\n"
    )


@pytest.mark.parametrize("name", ["names", "looks.npy"])
def test_the_sizes_of_all_files_are_checked_when_a_pack_is_opened(copy, name):
    cut(copy / name)
    with pytest.raises(OSError, match=f"{name} has .* bytes where"):
        PackedImages(copy)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_pack_of_files_is_not_called_by_another_format(tmp_path, kind):
    made = pack([(encoded(0, kind=kind), 0)], tmp_path, progress="off")
    assert "of 40 x 48 x 3, encoded, " in repr(made)


def test_a_pack_of_images_of_several_sizes_has_an_identity_for_checkpoints(tmp_path):
    from torch.utils.data import ConcatDataset

    for number in range(2):
        Image.new("RGB", (8, 8 + number)).save(tmp_path / f"{number}.png")
    table = pd.DataFrame({"path": ["0.png", "1.png"]})
    made = pack(table, tmp_path / "a", root=tmp_path, **QUIET)
    other = PackedImages(made.folder, 8)
    assert identity(ConcatDataset([made])) == identity(ConcatDataset([PackedImages(made.folder)]))
    assert identity(ConcatDataset([made])) != identity(ConcatDataset([other]))
