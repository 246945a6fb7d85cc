"""Items: read once, whatever ended the reading; one that cannot be read is named or left out."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("array_record")

from tpukit.packs.packing import pack  # noqa: E402

KIT = Path(__file__).parents[2]
QUIET = {"progress": "off", "workers": 1}
LOOKS = 1 + 2 * 14 + 40  # of forty items, before they are packed: at the first, at some twice, at all


def encoded(number):
    file = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), number * 6, np.uint8)).save(file, "PNG")
    return file.getvalue()


class Dataset:
    """Items, some of which raise; it notes which were read."""

    def __init__(self, count=40, broken=(), stop=None, arrays=False):
        self.count, self.broken, self.stop, self.arrays, self.read = count, broken, stop, arrays, []

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        self.read.append(number)
        if number in self.broken:
            raise KeyError(f"no file for {number}")
        if number == self.stop and len(self.read) > LOOKS:
            raise KeyboardInterrupt
        return (np.full((8, 8, 3), number * 6, np.uint8) if self.arrays else encoded(number)), number


@pytest.mark.parametrize("arrays", [False, True])
def test_reading_goes_on_where_it_was_interrupted(tmp_path, arrays, capsys):
    with pytest.raises(KeyboardInterrupt):
        pack(Dataset(stop=33, broken=[5], arrays=arrays), tmp_path / "out", damaged="skip", **QUIET)
    again = Dataset(arrays=arrays, broken=[5])
    records = pack(again, tmp_path / "out", damaged="skip", **QUIET)
    assert again.read[LOOKS:] == list(range(33, 40))
    assert "goes on after the 33 items that an earlier call has read" in capsys.readouterr().out
    assert sorted(records.labels[:, 0].tolist()) == [n for n in range(40) if n != 5]
    whole = pack(Dataset(arrays=arrays, broken=[5]), tmp_path / "whole", damaged="skip", **QUIET)
    assert records.read(range(39)) == whole.read(range(39))
    assert np.array_equal(records.labels, whole.labels)
    assert records.skipped == whole.skipped


@pytest.mark.parametrize("harm", ["data cut", "data changed", "notes cut", "failed cut"])
def test_what_a_power_cut_has_lost_is_read_again(tmp_path, harm):
    with pytest.raises(KeyboardInterrupt):
        pack(Dataset(stop=33, broken=[5]), tmp_path / "out", damaged="skip", **QUIET)
    name, how = harm.split()
    file = tmp_path / "out" / "unfinished" / "items" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1 if how == "changed" else 0
    file.write_bytes(data[: None if how == "changed" else -3])
    again = Dataset(broken=[5])
    records = pack(again, tmp_path / "out", damaged="skip", **QUIET)
    assert len(again.read) - LOOKS in range(8, 30) if name != "failed" else True
    whole = pack(Dataset(broken=[5]), tmp_path / "whole", damaged="skip", **QUIET)
    assert (records.read(range(39)), records.skipped) == (whole.read(range(39)), whole.skipped)


KILLED = """
import sys, time
sys.path.insert(0, "tests")
from tpukit.packs.packing import pack
from packs.test_items import LOOKS, Dataset
class Slow(Dataset):
    def __getitem__(self, number):
        if len(self.read) >= LOOKS: time.sleep(0.02)
        return super().__getitem__(number)
pack(Slow(), sys.argv[1], progress="off", workers=1)
"""


def test_reading_that_is_killed_again_and_again_ends_with_every_item_once(tmp_path):
    notes = tmp_path / "out" / "unfinished" / "items" / "notes"
    reached = []
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path / "out"], cwd=KIT)
        before = notes.stat().st_size if notes.exists() else 0
        while not notes.exists() or notes.stat().st_size <= before:
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        reached.append(notes.stat().st_size)
    assert reached == sorted(set(reached))
    records = pack(Dataset(), tmp_path / "out", **QUIET)
    assert sorted(records.labels[:, 0].tolist()) == list(range(40))
    assert all(records.take([i])[0, 0, 0, 0] == records.labels[i, 0] * 6 for i in range(40))


def test_an_item_that_raises_is_named_and_can_be_left_out(tmp_path, capsys):
    with pytest.raises(OSError, match=r"item 3 of the source cannot be read\n  found: KeyError: .no file for 3.\n"):
        pack(Dataset(broken=[3]), tmp_path / "out", **QUIET)
    records = pack(Dataset(broken=[3, 0]), tmp_path / "new", damaged="skip", **QUIET)
    assert sorted(records.rows.tolist()) == [1, 2, *range(4, 40)]
    assert np.array_equal(records.labels[:, 0], records.rows)
    assert [(image["row"], image["name"]) for image in records.skipped] == [(0, "item 0"), (3, "item 3")]
    assert "2 of 40 images were left out: 2 x KeyError: 'no file for 0', as item 0" in capsys.readouterr().out
    mended = pack(Dataset(), tmp_path / "out", **QUIET)  # the other half of the fix
    assert len(mended) == 40


def test_a_generator_that_raises_names_the_item_and_cannot_go_on(tmp_path):
    def items():
        for number in range(5):
            yield encoded(number), number
        raise ValueError("no more")

    with pytest.raises(OSError, match=r"item 5 of the source cannot be read\n  found: ValueError: no more"):
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
    assert sorted(pack(items(None), tmp_path / "out", **QUIET).labels[:, 0].tolist()) == list(range(20))


def test_an_error_that_knows_its_fix_is_raised_as_it_is(tmp_path):
    def items():
        yield encoded(0), 0
        raise OSError("record 1 of a file is damaged\n  found: 3 bytes\n  fix:   copy this file again")

    with pytest.raises(OSError, match="^record 1 of a file is damaged") as error:
        pack(items(), tmp_path / "out", **QUIET)
    assert error.value.__notes__ == ["item 1 of the source"]
