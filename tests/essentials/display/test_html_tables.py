"""History, Run, PackedImages and CachedImages as tables of a notebook: what they say, its units and its plurals."""

import math
import re

import numpy as np
import pytest

import tpukit
from tpukit.essentials.display.tables import counted, human_size
from tpukit.training.history import History

EPOCHS = [
    {
        "epoch": 1,
        "step": 1200,
        "train_loss": 0.51234,
        "valid_loss": 0.6,
        "lr": 2e-4,
        "seconds": 61.04,
    },
    {
        "epoch": 2,
        "step": 2400,
        "train_loss": 0.41234,
        "valid_loss": math.nan,
        "auroc": 0.9,
        "lr": 1e-4,
        "seconds": 60.0,
    },
]


def words(html):
    """Return the text of a page, cells apart."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)).strip()


def run(**changes):
    fields = {
        "results": [{}],
        "cores": 1,
        "device": "CPU",
        "seconds": 2.0,
        "memory": [2**29],
        "log": [{"step": 1}],
    }
    return tpukit.essentials.launcher.Run(**fields | changes)


def test_a_history_is_a_table_with_a_heading_for_each_column_and_nothing_where_an_epoch_has_no_value():
    html = History(epochs=EPOCHS, best={"epoch": 1, "by": "valid_loss"})._repr_html_()
    assert words(html) == (
        "epoch step train loss valid loss learning rate seconds auroc "
        "1 1,200 0.5123 0.6000 0.0002 61.0 2 2,400 0.4123 0.0001 60.0 0.9000 best: epoch 1, by valid_loss"
    )


def test_the_rates_of_images_are_in_images_a_second():
    steps = {
        "step": 9,
        "epoch": 1,
        "samples_per_second": 40.0,
        "seconds": 2.0,
        "data_wait": 0.5,
        "compiles": 1,
    }
    history = History(
        epochs=[EPOCHS[0] | {"samples_per_second": 40.0}], intervals=[steps], of="images"
    )
    html = words(history._repr_html_())
    assert "seconds images/s" in html
    assert "40 images/s on 1 core, 50% of the time waiting for batches, 1 graph compiled" in html
    assert "40 images/s on 1 core" in repr(history)


def test_a_history_without_an_epoch_says_so():
    assert words(History()._repr_html_()) == "History: no epoch is finished"


def test_a_run_of_one_core_has_one_number_and_no_plural():
    html = words(run()._repr_html_())
    assert "1 x CPU" in html
    assert "512 MiB per core" in html
    assert "dict from the core" in html
    assert "1 row" in html
    assert "rows" not in html


def test_a_run_of_several_cores_has_a_span_and_says_who_grew_most():
    several = run(
        results=[1, 2], cores=2, memory=[2**29, 2**30], memory_growth=[2**20, 2**21], log=[]
    )
    html = words(several._repr_html_())
    assert "512 to 1,024 MiB per core core 1 grew most, by 2 MiB" in html
    assert "int from each core" in html
    assert "log" not in html, "nothing was logged"
    assert repr(several).endswith("results: 2 x int; 0 logged rows")


@pytest.fixture
def records(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 24, 24, 3), np.uint8)
    items = [(image, number % 2) for number, image in enumerate(images)]
    return tpukit.pack(items, tmp_path / "pack", progress="off")


def test_records_say_how_many_images_in_how_many_files(records):
    assert re.search(
        r"6 of 24 x 24 x 3, \w+ folder .* \d+ KiB in 1 file\b", words(records._repr_html_())
    )
    assert re.fullmatch(
        r"PackedImages\('.*pack'\): 6 images of 24 x 24 x 3, \w+, \d+ KiB in 1 file", repr(records)
    )


def test_a_cache_says_the_size_of_its_pixels(records, tmp_path):
    cache = tpukit.cached_images(records, folder=tmp_path / "cache", size=24, progress="off")
    assert "6 of 24 x 24 x 3 uint8" in words(cache._repr_html_())
    assert repr(cache).endswith("6 images of 24 x 24 x 3 uint8, 10 KiB of decoded pixels in 1 file")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 files"), (1, "1 file"), (2, "2 files"), (12345, "12,345 files")],
    ids=str,
)
def test_there_is_one_file_and_there_are_two_files(number, text):
    assert counted(number, "file") == text


def test_a_plural_that_needs_more_than_an_s():
    assert [counted(n, word) for word in ("class", "study") for n in (1, 2)] == [
        "1 class",
        "2 classes",
        "1 study",
        "2 studies",
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [(None, "unknown"), (0, "0 MiB"), (1500, "1 KiB"), (2**20, "1 MiB"), (3 * 2**30, "3.0 GiB")],
    ids=str,
)
def test_a_size_is_in_the_unit_that_fits(size, text):
    assert human_size(size) == text


def test_no_table_has_a_colour_of_its_own_for_text_or_ground():
    html = (
        History(epochs=[{"epoch": 1, "<a>": 0.5}], stopped="n & m")._repr_html_()
        + run()._repr_html_()
    )
    assert "<a>" not in html
    assert "n &amp; m" in html
    assert set(re.findall(r"[;\"](?:color|background):([^;\"]+)", html)) <= {"inherit", "none"}
