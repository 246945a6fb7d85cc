"""Caches: the pixels are Pillow's, the bytes are the same after any interruption, and damage is told when they open."""

import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("array_record")

from helpers.files import contents, flip, mounted  # noqa: E402

from tpukit.datasets.image_cache import Space, build_image_cache, cached_images, choose_images  # noqa: E402
from tpukit.datasets.packed_images import PackedImages  # noqa: E402
from tpukit.datasets.packing import pack  # noqa: E402
from tpukit.datasets.pixel_cache import BLOCK, CachedImages, CacheFolder  # noqa: E402

ROOT = Path(__file__).parents[2]
COUNT = 2 * BLOCK + 300  # three blocks, the last of them short
SIZE = 32
SOURCE_SIZES = [(32, 32), (32, 64), (41, 25), (64, 64), (100, 75), (20, 15)]
GIB = 2**30


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Real JPEGs of many sizes, used in turn by the rows of a table: path, label, study."""
    folder, rng = tmp_path_factory.mktemp("sources"), np.random.default_rng(0)
    paths = []
    for number in range(60):
        width, height = SOURCE_SIZES[number % len(SOURCE_SIZES)]
        coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8)).resize((width, height))
        noisy = np.clip(np.asarray(coarse) + rng.normal(0, 12, (height, width, 3)), 0, 255).astype(
            np.uint8
        )
        image = Image.fromarray(noisy)
        paths.append(folder / f"{number}.jpg")
        (image.convert("L") if number % 10 == 9 else image).save(paths[-1], quality=90)
    numbers = np.arange(COUNT)
    paths = [str(paths[number % len(paths)]) for number in numbers]
    return pd.DataFrame(
        {"path": paths, "number": numbers, "odd": numbers % 2, "study": numbers // 9}
    )


def packed(table, folder):
    return pack(table, folder, labels=["number", "odd"], groups="study", progress="off")


@pytest.fixture(scope="module")
def records(sources, tmp_path_factory):
    return packed(sources, tmp_path_factory.mktemp("packed") / "records")


@pytest.fixture(scope="module")
def few(sources, tmp_path_factory):
    return packed(sources.head(200), tmp_path_factory.mktemp("packed") / "few")


@pytest.fixture(scope="module")
def others(sources, tmp_path_factory):
    """Other images with the same shape and number."""
    return packed(sources.iloc[::-1], tmp_path_factory.mktemp("packed") / "others")


@pytest.fixture(scope="module")
def built(records, tmp_path_factory):
    return build(records, tmp_path_factory.mktemp("caches") / "cache")


@pytest.fixture(scope="module")
def other(others, tmp_path_factory):
    return build(others, tmp_path_factory.mktemp("caches") / "other")


def build(records, folder, *, workers=1, size=SIZE, **options):
    return build_image_cache(records, folder, size=size, workers=workers, progress="off", **options)


@pytest.fixture
def cache(built, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(built.folder, tmp_path / "cache")


def in_python(script, *arguments, wrap=(), **options):
    """Run a script in a Python of its own and return what it printed."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{script}"
    call = [*wrap, sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    done = subprocess.run(call, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"^simplejpeg is not installed.*\n(  fix:.*\n)?", "", done.stdout)


# What is in it


def test_every_pixel_is_pillows(records, built, sources):
    for i in random.Random(0).sample(range(COUNT), 200):
        with Image.open(sources.path[int(built.labels[i, 0])]) as file:
            right = file.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        assert np.array_equal(built.images[i], np.asarray(right)), sources.path[
            int(built.labels[i, 0])
        ]


def test_labels_names_groups_rows_and_split_are_those_of_the_records(records, built):
    assert np.array_equal(built.labels, records.labels)
    assert sorted(built.labels[:, 0]) == list(range(COUNT))
    assert np.array_equal(built.groups, records.groups)
    assert np.array_equal(built.rows, records.rows)
    assert np.array_equal(built.rows, built.labels[:, 0])  # which is the row's number
    assert (built.names, built.classes, built.group_names) == (
        records.names,
        records.classes,
        records.group_names,
    )
    assert built.shape == (SIZE, SIZE, 3)
    for of_cache, of_records in zip(
        built.split(0.3, seed=4), records.split(0.3, seed=4), strict=True
    ):
        assert np.array_equal(of_cache, of_records)


def test_the_file_is_an_npy_that_anybody_can_read(built):
    images = np.load(built.folder / "images.npy", mmap_mode="r")
    assert images.shape == (COUNT, SIZE, SIZE, 3)
    assert np.array_equal(images, built.images)


def test_one_process_and_more_than_there_are_blocks_write_the_same_bytes(records, built, tmp_path):
    assert contents(build(records, tmp_path / "cache", workers=7).folder) == contents(built.folder)


def test_a_second_call_opens_what_is_there(records, cache):
    before = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    build(records, cache)
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == before


def test_decoding_in_the_jpeg_decoder_is_another_cache(records, built, cache, tmp_path):
    pytest.importorskip("simplejpeg")  # without it decoding is always exact
    scaled = build(records, tmp_path / "scaled", exact=False)
    assert not np.array_equal(scaled.images, built.images)
    with pytest.raises(ValueError, match="exact True, asked for False"):
        build(records, cache, exact=False)


# Reading it


def test_take_returns_the_images_asked_for_into_the_array_given(built):
    indices = np.random.default_rng(1).integers(0, COUNT, 64)
    out = np.empty((64, SIZE, SIZE, 3), np.uint8)
    assert built.take(indices, out) is out
    assert np.array_equal(out, built.images[indices])
    assert np.array_equal(built.take(indices.tolist()), out)
    assert built.take([]).shape == (0, SIZE, SIZE, 3)
    built.read_ahead(indices)


WRONG = [
    (
        [0, COUNT],
        IndexError,
        rf"index {COUNT} is out of range: there are {COUNT:,} images(.|\n)*fix:   indices from 0 to {COUNT - 1:,}",
    ),
    ([-1], IndexError, f"index -1 is out of range: there are {COUNT:,}"),
    ([2**62], IndexError, "index 4611686018427387904 is out of range"),
    ([0.5], ValueError, r"\(1,\) of float64"),
    ([True, False], ValueError, r"bool\n  fix:   if this is a mask: numpy.flatnonzero"),
    ([[0, 1]], ValueError, r"\(1, 2\) of int64"),
]


@pytest.mark.parametrize(("indices", "error", "said"), WRONG)
def test_indices_outside_the_cache_are_refused(built, indices, error, said):
    for call in (built.take, built.read_ahead):
        with pytest.raises(error, match=said):
            call(np.array(indices))


def test_one_sample_is_an_image_and_its_labels(built):
    torch = pytest.importorskip("torch")
    image, labels = built[7]
    assert (image.shape, image.dtype) == ((3, SIZE, SIZE), torch.uint8)
    assert np.array_equal(image.permute(1, 2, 0).numpy(), built.images[7])
    assert labels.tolist() == built.labels[7].tolist()
    image.zero_()  # the caller's own
    labels.zero_()
    assert built.images[7].any()
    assert built.labels[7].any()
    assert built[-1][1].tolist() == built.labels[-1].tolist()
    for index in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError, match=f"index {index} is out of range"):
            built[index]


def test_the_images_cannot_be_changed_by_accident(built):
    with pytest.raises(ValueError, match="read-only"):
        built.images[0] = 0


def test_a_pickle_is_the_path(built):
    assert len(pickle.dumps(built)) < 500
    assert np.array_equal(pickle.loads(pickle.dumps(built)).take([5]), built.take([5]))


def test_two_forked_processes_share_the_pages(built):
    pytest.importorskip("psutil")
    script = """
import os, pickle, numpy, psutil
from tpukit.datasets.pixel_cache import CachedImages
cache = CachedImages(sys.argv[1], verify=False)
out = numpy.empty((64, *cache.shape), numpy.uint8)
uss = lambda: psutil.Process().memory_full_info().uss
ready, measure, results, leave = (os.pipe() for _ in range(4))
for number in range(2):
    if os.fork() == 0:
        before, total = uss(), 0
        mine = pickle.loads(pickle.dumps(cache)) if number else cache  # opened here, or before the fork
        for first in range(0, len(cache) - 64, 64):
            total += int(mine.take(numpy.arange(first, first + 64), out).sum())
        os.write(ready[1], b".")
        os.read(measure[0], 1)  # all pages are mapped here and in the other process...
        os.write(results[1], b"%d %d\\n" % (uss() - before, total))
        os.read(leave[0], 1)  # ...and stay so until both have measured
        os._exit(0)
for _ in range(2): os.read(ready[0], 1)
os.write(measure[1], b"..")
with os.fdopen(results[0]) as file:
    for _ in range(2): print(file.readline(), end="")
os.write(leave[1], b"..")
for _ in range(2): os.wait()
"""
    results = [line.split() for line in in_python(script, built.folder).splitlines() if line]
    assert len(results) == 2
    assert len({total for _, total in results}) == 1
    assert max(int(grown) for grown, _ in results) < built.images.nbytes / 2


# Interruptions


def start_to_build(records, folder):
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tpukit.datasets.image_cache import build_image_cache
from tpukit.datasets.packed_images import PackedImages
build_image_cache(PackedImages({str(records.folder)!r}), {str(folder)!r}, size={SIZE}, workers=2, progress="off")
"""
    return subprocess.Popen([sys.executable, "-c", script])


def noted(folder):
    return any(note.stat().st_size for note in folder.glob("unfinished/done-*.txt"))


# What is seen before the kill, and the most seconds after it: before and among the images, after some of them, after
# the last, before the manifest.
MOMENTS = [
    (lambda folder: (folder / "unfinished" / "plan.json").exists(), 0.8),
    (noted, 0),
    (noted, 0.3),
    (lambda folder: (folder / "index.npy").exists(), 0),
    (lambda folder: (folder / "images.npy").exists(), 0),
]


def test_killed_at_any_moment_it_goes_on_and_the_bytes_are_the_same(records, built, tmp_path):
    psutil = pytest.importorskip("psutil")
    folder, kept = tmp_path / "cache", 0
    for number, (is_seen, seconds) in enumerate(MOMENTS + 8 * [(noted, 0)]):
        if kept and number >= len(
            MOMENTS
        ):  # more tries are for a machine so busy that all kills came too late
            break
        process = start_to_build(records, folder)
        while process.poll() is None and not is_seen(folder):
            time.sleep(0.002)
        time.sleep(random.uniform(0, seconds))
        family = psutil.Process(process.pid).children() if process.poll() is None else []
        process.kill()
        process.wait()
        # One that was just started hears of it once Python is up: 0.6 s, and many times that on a busy machine.
        assert psutil.wait_procs(family, timeout=600)[1] == [], (
            "what decodes ends with the process that asked"
        )
        if (folder / "manifest.json").exists():  # the kill came too late
            shutil.rmtree(folder)
        kept += noted(folder)
    assert kept, "no kill came when blocks were done"
    assert contents(build(records, folder).folder) == contents(built.folder)


@pytest.mark.parametrize("where", ["unfinished", "."])
def test_a_block_that_a_power_cut_has_lost_is_decoded_again_and_the_others_kept(
    records, built, tmp_path, where
):
    folder = tmp_path / "cache"
    work = folder / "unfinished"
    work.mkdir(parents=True)
    (work / "plan.json").write_text(
        json.dumps({"format": CacheFolder(work.parent).format, "plan": built.plan})
    )
    data = bytearray((built.folder / "images.npy").read_bytes())
    data[5000:9096] = bytes(4096)
    (folder / where / "images.npy").write_bytes(data)
    file = (folder / where / "images.npy").stat().st_ino
    notes = [
        f"\n{block} {crc};"
        for block, crc in enumerate(
            json.loads((built.folder / "manifest.json").read_text())["blocks"]
        )
    ]
    (work / "done-0.txt").write_text("".join(notes)[:-4])  # the last of them was cut, too
    assert contents(build(records, folder).folder) == contents(built.folder)
    assert (folder / "images.npy").stat().st_ino == file


def test_what_an_interrupted_build_of_something_else_left_is_cleared(records, built, tmp_path):
    work = tmp_path / "cache" / "unfinished"
    work.mkdir(parents=True)
    (work / "plan.json").write_text(json.dumps({"format": "tpukit cache 0", "plan": built.plan}))
    (work / "done-0.txt").write_text("\n0 1;")
    assert contents(build(records, tmp_path / "cache").folder) == contents(built.folder)


def test_two_builds_at_once_make_one_cache(records, built, tmp_path):
    both = [start_to_build(records, tmp_path / "cache") for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert contents(tmp_path / "cache") == contents(built.folder)


# A full disk, and one that cannot be written


def test_a_full_disk_is_told_before_the_first_image_and_leaves_an_old_cache_as_it_was(
    records, tmp_path
):
    script = """
import os, shutil
from tpukit.datasets.image_cache import DiskFullError, build_image_cache
from tpukit.datasets.pixel_cache import CachedImages
from tpukit.datasets.packed_images import PackedImages
records, disk = PackedImages(sys.argv[1]), sys.argv[2]
old = build_image_cache(records, f"{disk}/old", size=16, progress="off")
before = shutil.disk_usage(disk).free
try:
    build_image_cache(records, f"{disk}/new", size=32, progress="off")
except DiskFullError as error:
    print(error)
print(os.listdir(f"{disk}/new/unfinished"), before - shutil.disk_usage(disk).free < 20000)
CachedImages(old.folder)
print(len(build_image_cache(records, f"{disk}/new", size=20, progress="off")))
"""
    said = in_python(
        script, records.folder, tmp_path, wrap=mounted(tmp_path, "size=8m")
    ).splitlines()
    assert said[0].startswith(f"the disk of {tmp_path}/new is full")
    assert said[0].endswith("7 MiB")
    assert "6 MiB free" in said[1]
    assert "fix:" in said[2]
    assert said[3:] == ["['plan.json'] True", str(COUNT)]


def test_a_disk_that_fills_while_images_are_decoded_is_told_and_the_build_goes_on_later(
    records, built, tmp_path
):
    script = """
import os
from tpukit.datasets.image_cache import DiskFullError, build_image_cache
from tpukit.datasets.packed_images import PackedImages
records, disk = PackedImages(sys.argv[1]), sys.argv[2]
with open(f"{disk}/ballast", "wb") as ballast:
    ballast.truncate(0)
    os.posix_fallocate(ballast.fileno(), 0, int(sys.argv[3]))
try:
    build_image_cache(records, f"{disk}/cache", size=32, workers=2, progress="off")
except DiskFullError as error:
    print(error)
os.unlink(ballast.name)
print(build_image_cache(records, f"{disk}/cache", size=32, workers=2, progress="off").images.sum())
"""
    # The images fit, with a few pages for the plan; the labels and what is noted of them do not.
    left = -(-(built.folder / "images.npy").stat().st_size // 4096) * 4096 + 3 * 4096
    wrap = mounted(tmp_path, f"size={left + 4096 * 256}")
    said = in_python(script, records.folder, tmp_path, 4096 * 256, wrap=wrap).splitlines()
    assert said[0].startswith(f"the disk of {tmp_path}/cache is full")
    assert said[-1] == str(built.images.sum())


def test_beside_records_that_cannot_be_written_to_the_cache_goes_to_the_temporary_folder(
    few, tmp_path
):
    script = """
import tempfile
from tpukit.datasets.image_cache import DiskFullError, Space, build_image_cache, choose_images
from tpukit.datasets.packed_images import PackedImages
records = PackedImages(sys.argv[1])
try:
    build_image_cache(records, sys.argv[1] + "/inside", size=16)
except DiskFullError as error:
    print(error)
space, how = Space(2**40, 2**30), {"size": 16, "workers": 1, "progress": "off", "exact": True}
cache = choose_images(records, space, folder=None, **how)
print(cache.folder, len(cache))
print(build_image_cache(records, size=16).folder)
print(type(choose_images(records, space, folder=sys.argv[1] + "/inside", **how)).__name__)
"""
    kaggle, temporary = tmp_path / "input", tmp_path / "temporary"
    kaggle.mkdir()
    temporary.mkdir()
    wrap = mounted(
        kaggle, "size=5m", f'cp -r "{few.folder}" "{kaggle}/set" && mount -o remount,ro "{kaggle}"'
    )
    environ = {**os.environ, "TMPDIR": str(temporary)}
    said = in_python(script, kaggle / "set", wrap=wrap, env=environ).splitlines()
    assert said[0] == f"nothing can be written to {kaggle}/set/inside"
    assert said[1].startswith("  fix:")
    assert said[2].startswith(
        f"cache: 200 images at 16 pixels, 150 KiB, made in {temporary}/set-cache-16-"
    )
    assert re.fullmatch(rf"{temporary}/set-cache-16-[0-9a-f]{{8}} 200", said[3])
    assert said[4] == said[3].split()[0]
    assert said[5].startswith("no cache:")
    assert "nothing can be written" in said[5]
    assert said[6] == "PackedImages"


# Damage


def cut(file, by=1):
    os.truncate(file, file.stat().st_size - by)


DAMAGE = {
    "images one byte short": (lambda c, o: cut(c / "images.npy"), "images.npy has"),
    "images half there": (lambda c, o: cut(c / "images.npy", 4_000_000), "images.npy has"),
    "images a byte too long": (lambda c, o: cut(c / "images.npy", -1), "images.npy has"),
    "images empty": (lambda c, o: os.truncate(c / "images.npy", 0), "images.npy has 0 bytes"),
    "images gone": (lambda c, o: (c / "images.npy").unlink(), "images.npy is missing"),
    "header changed": (lambda c, o: flip(c / "images.npy", 30), "header of images.npy"),
    "index changed": (lambda c, o: flip(c / "index.npy", 999), "index.npy is not what was written"),
    "index cut": (lambda c, o: cut(c / "index.npy"), "index.npy has"),
    "index gone": (lambda c, o: (c / "index.npy").unlink(), "index.npy is missing"),
    "another cache's index": (
        lambda c, o: shutil.copy(o / "index.npy", c),
        "index.npy is not what was written",
    ),
    "manifest cut": (
        lambda c, o: cut(c / "manifest.json", 5),
        "manifest.json is not what was written",
    ),
    "manifest changed": (
        lambda c, o: (c / "manifest.json").write_text(
            (c / "manifest.json").read_text().replace(f'"count": {COUNT}', f'"count": {COUNT - 1}')
        ),
        "manifest.json is not what was written",
    ),
}
DAMAGED_IMAGES = {
    "a bit in the first image": (
        lambda c, o: flip(c / "images.npy", 128),
        "1 of 3 blocks of images.npy are not what was written; the first has the images 0 to 1,023",
    ),
    "a bit in the last image": (
        lambda c, o: flip(c / "images.npy", -1),
        "the first has the images 2,048 to 2,347",
    ),
    "another cache's images": (lambda c, o: shutil.copy(o / "images.npy", c), "3 of 3 blocks"),
    "another cache's manifest": (
        lambda c, o: shutil.copy(o / "manifest.json", c),
        "index.npy is not what",
    ),
}


@pytest.mark.parametrize("name", [*DAMAGE, *DAMAGED_IMAGES])
def test_a_damaged_cache_is_told_when_it_is_opened(records, other, cache, name):
    damage, said = {**DAMAGE, **DAMAGED_IMAGES}[name]
    damage(cache, other.folder)
    for call in (CachedImages, lambda folder: build(records, folder)):
        with pytest.raises(OSError, match=re.escape(said) + r"(.|\n)*fix:"):
            call(cache)


@pytest.mark.parametrize("name", DAMAGE)
def test_without_verify_all_is_told_but_pixels(other, cache, name):
    damage, said = DAMAGE[name]
    damage(cache, other.folder)
    with pytest.raises(OSError, match=re.escape(said)):
        CachedImages(cache, verify=False)


def test_without_verify_pixels_are_not_looked_at(cache):
    flip(cache / "images.npy", -1)
    assert len(CachedImages(cache, verify=False)) == COUNT


def test_other_records_and_other_sizes_are_refused_and_the_fix_helps(
    records, others, cache, tmp_path
):
    with pytest.raises(
        ValueError, match=r"another cache\n  found: pack .*/records, asked for .*/others\n  fix:"
    ):
        build(others, cache)
    with pytest.raises(ValueError, match=r"size 32, asked for 24\n  fix:") as raised:
        build(records, cache, size=24)
    exec(re.search(r"(shutil\.rmtree\(.*?\))", str(raised.value))[1])
    assert build(records, cache, size=24).shape == (24, 24, 3)


def test_a_folder_that_is_no_cache_is_told(records, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"holds no finished cache(.|\n)*no such folder(.|\n)*fix:"
    ):
        CachedImages(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no finished cache(.|\n)*found: \[\](.|\n)*fix:"):
        CachedImages(tmp_path)
    for call in (CachedImages, lambda folder: build(records, folder)):
        with pytest.raises(
            ValueError,
            match=r"holds no cache that this tpukit can read\n  found: .* tpukit pack(.|\n)*fix:",
        ):
            call(records.folder)


@pytest.mark.parametrize("name", ["images.npy", "notes.txt", "manifest.json.new"])
def test_a_folder_with_somebodys_files_is_refused_and_left_alone(records, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(FileExistsError, match=r"(.|\n)*fix:"):
        build(records, tmp_path)
    assert (tmp_path / name).read_text() == "mine"


def test_a_record_that_is_damaged_is_named_by_the_build(sources, tmp_path):
    records = packed(sources.head(50), tmp_path / "records")
    (shard,) = records.folder.glob("*.array_record")
    flip(shard, shard.stat().st_size // 2)
    with pytest.raises(OSError, match=re.escape(shard.name)):
        build(records, tmp_path / "cache")
    assert not (tmp_path / "cache" / "manifest.json").exists()


# The choice

NEED = 128 + 200 * SIZE * SIZE * 3
CHOICES = [
    (64 * GIB, None, "CachedImages", "made in"),
    (NEED + 4 * GIB, NEED * 4 // 3 + 1, "CachedImages", "made in"),
    (NEED + 4 * GIB - 1, 64 * GIB, "PackedImages", "4.0 GiB of disk is free for"),
    (64 * GIB, NEED * 4 // 3 - 1, "PackedImages", "800 KiB of memory is available"),
    (0, 0, "PackedImages", "0 MiB of memory is available"),
]


def choose(packed, folder, space):
    """Have the cache chosen as `cached_images` does, on a machine with this space."""
    return choose_images(
        packed, space, size=SIZE, folder=folder, workers=1, progress="off", exact=True
    )


@pytest.mark.parametrize(("free", "available", "kind", "said"), CHOICES)
def test_the_choice_is_made_by_disk_and_memory_and_told_in_one_line(
    few, tmp_path, capsys, free, available, kind, said
):
    chosen = choose(few, tmp_path / "new", Space(free, available))
    (line,) = capsys.readouterr().out.splitlines()
    assert (type(chosen).__name__, chosen.shape) == (kind, (SIZE, SIZE, 3))
    assert said in line
    assert re.search("200 images at 32 pixels(,| need) 600 KiB", line)
    assert (tmp_path / "new").exists() == (kind == "CachedImages")


@pytest.mark.parametrize(("gigabytes", "kind"), [(3, "PackedImages"), (5, "CachedImages")])
def test_without_free_the_disk_itself_is_asked(few, tmp_path, gigabytes, kind):
    script = """
from tpukit.datasets.image_cache import cached_images
from tpukit.datasets.packed_images import PackedImages
print(type(cached_images(PackedImages(sys.argv[1]), size=16, folder=sys.argv[2], progress="off")).__name__)
"""
    wrap = mounted(tmp_path, f"size={gigabytes}g")
    line, name = in_python(script, few.folder, tmp_path / "new", wrap=wrap).splitlines()
    assert f"{gigabytes}.0 GiB" in line
    assert name == kind


def test_a_cache_that_is_there_needs_no_more_disk_but_memory(records, cache, capsys):
    assert choose(records, cache, Space(disk=0)).folder == cache
    assert "found in" in capsys.readouterr().out
    assert isinstance(choose(records, cache, Space(memory=0)), PackedImages)


def test_a_cache_of_other_records_is_refused_by_the_choice_too(others, cache):
    with pytest.raises(ValueError, match="fix:"):
        cached_images(others, size=SIZE, folder=cache)


def test_an_interrupted_build_has_its_disk_already(records, built, tmp_path, capsys):
    work = tmp_path / "cache" / "unfinished"
    work.mkdir(parents=True)
    shutil.copy(built.folder / "images.npy", work)
    (work / "plan.json").write_text(
        json.dumps({"format": CacheFolder(work.parent).format, "plan": built.plan})
    )
    chosen = choose(records, tmp_path / "cache", Space(disk=4 * GIB + 4096))
    assert chosen.encoding == "uint8"
    assert "made in" in capsys.readouterr().out


def test_by_default_a_cache_lies_beside_its_records(few):
    for _ in range(2):
        assert build(few, None, size=16).folder == few.folder.with_name("few-cache-16")
