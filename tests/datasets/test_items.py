"""Items: packed once, whatever ended the packing; one that cannot be read is named or left out."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("array_record")

from tpukit.datasets.packing import PackOptions, pack  # noqa: E402
from tpukit.datasets.resumable import ResumableFolder  # noqa: E402
from tpukit.essentials.display import SystemFailureError  # noqa: E402

KIT = Path(__file__).parents[2]
QUIET = {"progress": "off"}
SHARD = 8
LOOKS = (
    1 + 2 * 14 + 40
)  # of forty items, before they are packed: at the first, at some twice, at all


def encoded(number):
    file = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), number * 6, np.uint8)).save(file, "PNG")
    return file.getvalue()


class Dataset:
    """Items, some of which raise; it notes which were read."""

    def __init__(self, count=40, broken=(), arrays=False):
        self.count, self.broken, self.arrays, self.read = count, broken, arrays, []

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        self.read.append(number)
        if number in self.broken:
            raise KeyError(f"no file for {number}")
        return (
            np.full((8, 8, 3), number * 6, np.uint8) if self.arrays else encoded(number)
        ), number


@pytest.mark.parametrize("arrays", [False, True])
def test_interrupted_packing_keeps_the_files_that_are_finished(tmp_path, arrays):
    how = {"damaged": "skip", "options": PackOptions(shard_size=SHARD, workers=1), **QUIET}
    order = np.random.default_rng(0).permutation(40)

    class LaunchInterrupted(Dataset):
        def __getitem__(self, number):
            if number == order[35] and len(self.read) >= LOOKS:
                while len(list(tmp_path.glob("out/*.array_record"))) < 3:
                    time.sleep(0.01)
                raise KeyboardInterrupt
            return super().__getitem__(number)

    with pytest.raises(KeyboardInterrupt):
        pack(LaunchInterrupted(broken=[5], arrays=arrays), tmp_path / "out", **how)
    kept = SHARD * len(list(tmp_path.glob("out/*.array_record")))
    again = Dataset(arrays=arrays, broken=[5])
    records = pack(again, tmp_path / "out", **how)
    assert again.read[LOOKS:] == order[kept:].tolist()
    assert sorted(records.labels[:, 0].tolist()) == [n for n in range(40) if n != 5]
    whole = pack(Dataset(arrays=arrays, broken=[5]), tmp_path / "whole", **how)
    assert records.read(range(39)) == whole.read(range(39))
    assert np.array_equal(records.labels, whole.labels)
    assert records.skipped == whole.skipped


KILLED = """
import sys, time
sys.path[:0] = ["tests", "tests/datasets"]
from tpukit.datasets.packing import PackOptions, pack
from test_items import LOOKS, SHARD, Dataset
class Slow(Dataset):
    def __getitem__(self, number):
        if len(self.read) >= LOOKS: time.sleep(0.02)
        return super().__getitem__(number)
pack(Slow(arrays=True), sys.argv[1], progress="off", options=PackOptions(shard_size=SHARD, workers=2))
"""


def test_packing_that_is_killed_again_and_again_ends_with_every_item_once(tmp_path):
    def finished():
        return {file: file.stat().st_mtime_ns for file in tmp_path.glob("out/*.array_record")}

    for _ in range(2):
        before = finished()
        process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path / "out"], cwd=KIT)
        while len(finished()) == len(before):
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert before.items() <= finished().items()
    records = pack(
        Dataset(arrays=True),
        tmp_path / "out",
        options=PackOptions(shard_size=SHARD, workers=1),
        **QUIET,
    )
    assert sorted(records.labels[:, 0].tolist()) == list(range(40))
    assert all(records.take([i])[0, 0, 0, 0] == records.labels[i, 0] * 6 for i in range(40))


def photos(folder):
    for number in range(40):
        file = folder / f"{number % 2}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(noise(number)[0])
    return folder


def noise(number):
    pixels = np.random.default_rng(number).integers(0, 256, (96, 96, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue(), number


class Noise(Dataset):
    def __getitem__(self, number):
        return noise(number)


SOURCES = {  # and how many times the finished pack they may take while it is made
    "a folder": (photos, {}, 1.1),
    "a folder as pixels": (photos, {"size": 64}, 1.1),
    "a list": (lambda folder: [noise(number) for number in range(40)], {}, 1.1),
    "a dataset": (lambda folder: Noise(), {}, 1.1),
    "a dataset as pixels": (lambda folder: Noise(arrays=True), {"size": 64}, 1.1),
    "a stream": (lambda folder: map(noise, range(40)), {}, 2.1),
}


@pytest.mark.parametrize("what", SOURCES)
def test_no_more_than_the_pack_lies_on_the_disk_while_it_is_made(what, tmp_path, peak_of):
    make, options, most = SOURCES[what]
    source = make(tmp_path / "photos")
    peak = peak_of(tmp_path / "out")
    pack(
        source, tmp_path / "out", options=PackOptions(shard_size=20, workers=2), **options, **QUIET
    )
    assert most - 0.3 < peak() < most


def test_no_more_than_the_pack_of_slices_lies_on_the_disk_while_it_is_made(tmp_path, peak_of):
    pytest.importorskip("pydicom")
    from tpukit import pe

    scans = pe.phantom(tmp_path / "scans", 2, 12, size=96, form="dicom", **QUIET) / "train"
    peak = peak_of(tmp_path / "out")
    pe.pack_dicom(
        scans,
        tmp_path / "out",
        size=96,
        form="int16",
        options=PackOptions(shard_size=SHARD, workers=1),
        **QUIET,
    )
    assert peak() < 1.1


@pytest.fixture
def peak_of(monkeypatch):
    """Return a function that watches a folder; what it returns tells the peak, as a multiple of the size at the end."""
    stopped = threading.Event()
    watching = []

    def size(folder):
        total = 0
        for inside, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # it has got another name meanwhile
                    total += os.stat(os.path.join(inside, name)).st_size
        return total

    def watch(folder):
        sizes = []
        finish = ResumableFolder.finish

        def finish_and_see(target, **facts):
            sizes.append(
                size(folder)
            )  # all that was needed is still there: at any speed this moment is seen
            finish(target, **facts)

        monkeypatch.setattr(ResumableFolder, "finish", finish_and_see)

        def look():
            while not stopped.wait(0.002):
                sizes.append(size(folder))

        watching.append(threading.Thread(target=look))
        watching[-1].start()
        return lambda: max(sizes) / size(folder)

    yield watch
    stopped.set()
    for thread in watching:
        thread.join()


def test_an_item_that_raises_is_named_and_can_be_left_out(tmp_path, capsys):
    with pytest.raises(
        OSError, match=r"item 3 of the source cannot be read\n  found: KeyError: .no file for 3.\n"
    ):
        pack(Dataset(broken=[3]), tmp_path / "out", **QUIET)
    records = pack(Dataset(broken=[3, 0]), tmp_path / "new", damaged="skip", **QUIET)
    assert sorted(records.rows.tolist()) == [1, 2, *range(4, 40)]
    assert np.array_equal(records.labels[:, 0], records.rows)
    assert [(image["row"], image["name"]) for image in records.skipped] == [
        (0, "item 0"),
        (3, "item 3"),
    ]
    assert (
        "2 of 40 images were left out: 2 x KeyError: 'no file for 0', as item 0"
        in capsys.readouterr().out
    )
    mended = pack(Dataset(), tmp_path / "out", **QUIET)  # the other half of the fix
    assert len(mended) == 40


class Opened(Dataset):
    """A dataset with an item that Pillow cannot open; the error contains the address of a buffer."""

    opened = []

    def __getitem__(self, number):
        if number in self.broken:
            self.opened.append(io.BytesIO(b"no image"))
            Image.open(self.opened[-1])
        return super().__getitem__(number)


def test_an_error_with_an_address_is_no_random_transform_and_no_other_source(tmp_path):
    made = pack(Opened(broken=[3]), tmp_path / "out", damaged="skip", **QUIET)
    assert pack(Opened(broken=[3]), tmp_path / "out", damaged="skip", **QUIET).digest == made.digest


def test_a_generator_that_raises_names_the_item_and_cannot_go_on(tmp_path):
    def items():
        for number in range(5):
            yield encoded(number), number
        raise ValueError("no more")

    with pytest.raises(
        OSError, match=r"item 5 of the source cannot be read\n  found: ValueError: no more"
    ):
        pack(items(), tmp_path / "out", damaged="skip", **QUIET)


def test_a_source_where_nothing_can_be_read_is_refused(tmp_path):
    with pytest.raises(OSError, match="item 0 of the source cannot be read"):
        pack(Dataset(broken=range(40)), tmp_path / "out", damaged=1.0, **QUIET)


def test_what_can_only_be_iterated_is_read_from_its_start_again(tmp_path):
    def items(stop):
        for number in range(20):
            if number == stop:
                raise KeyboardInterrupt
            yield encoded(number), number

    with pytest.raises(KeyboardInterrupt):
        pack(items(7), tmp_path / "out", **QUIET)
    assert sorted(pack(items(None), tmp_path / "out", **QUIET).labels[:, 0].tolist()) == list(
        range(20)
    )


def test_an_error_that_knows_its_fix_is_raised_as_it_is(tmp_path):
    def items():
        yield encoded(0), 0
        raise SystemFailureError(
            "record 1 of a file is damaged", found="3 bytes", fix="copy this file again"
        )

    with pytest.raises(OSError, match="^record 1 of a file is damaged") as error:
        pack(items(), tmp_path / "out", **QUIET)
    assert error.value.__notes__ == ["item 1 of the source"]
