"""The page "From one chip to a pod": its tables follow from its arithmetic, its bytes from the compiler."""

import re
from pathlib import Path

import pytest
import torch
import torchvision
from helpers import preflight_workers as workers

import tpukit
from tpukit.preflight import scaling

PAGE = (Path(__file__).parents[2] / "docs" / "one_chip_to_a_pod.md").read_text()
CLOCK = 1.5e9


def rows(title):
    """Return the numbers in the rows of the table under a title."""
    section = PAGE.split(f"## {title}")[1].split("\n## ")[0]
    found = []
    for line in section.splitlines():
        if re.match(r"\| [0-9]", line):
            cells = line.replace(",", "").replace("%", "").strip("| ").split("|")
            found.append([float(cell) for cell in cells])
    return found


def arithmetic():
    """Return the functions that the page shows."""
    names = {}
    exec(PAGE.split("```python")[1].split("```")[0], names)
    return names


@pytest.mark.parametrize("chips", [1, 8, 64, 256])
def test_the_page_computes_as_preflight_does(chips):
    page = arithmetic()
    for name in ("gather_seconds", "all_reduce_seconds"):
        assert page[name](85e6, chips) == getattr(scaling, name)(85e6, "v5e", chips)


def test_collectives_take_the_time_of_a_ring():
    assert scaling.ring_bandwidth("v5e", 8) == 100e9
    assert scaling.ring_bandwidth("v5e", 256) == 51.2e12 / 256  # "all-reduce bandwidth per pod"
    assert scaling.all_reduce_seconds(100e6, "v5e", 8) == pytest.approx(1.75e-3)
    assert scaling.gather_seconds(100e6, "v5e", 8) == pytest.approx(0.875e-3)
    assert scaling.all_reduce_seconds(100e6, "v5e", 1) == 0


def test_the_table_of_data_parallel_follows():
    with torch.device("meta"):
        model = torchvision.models.resnet34(num_classes=10)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    operations = 13.85e6 / CLOCK
    for chips, milliseconds, links, rate, linear, overlapped in rows("Data parallel"):
        seconds = scaling.all_reduce_seconds(size, "v5e", int(chips))
        assert milliseconds == pytest.approx(1e3 * operations, abs=0.01)
        assert links == pytest.approx(1e3 * seconds, abs=0.006)
        assert rate == pytest.approx(128 * chips / (operations + seconds), rel=1e-3)
        assert linear == pytest.approx(100 * operations / (operations + seconds), abs=0.6)
        assert overlapped == pytest.approx(128 * chips / max(operations, seconds), rel=1e-3)
    each = operations / 128
    assert scaling.all_reduce_seconds(size, "v5e", 64) / each == pytest.approx(23.3, abs=0.1)


def test_the_table_of_fsdp_follows():
    gathered = 2 * 2 * 1.52e9
    reduced = 4 * 1.52e9
    for chips, milliseconds, links, ratio in rows("FSDP"):
        seconds = scaling.gather_seconds(gathered + reduced, "v5e", int(chips))
        assert links == pytest.approx(1e3 * seconds, abs=0.06)
        assert ratio == pytest.approx(links / milliseconds, abs=0.006)


@pytest.mark.xla
def test_the_compilers_program_sends_four_bytes_per_weight():
    try:
        tpukit.preflight.fetch_libtpu()
    except tpukit.preflight.LibtpuNotFoundError as error:
        pytest.skip(str(error))
    found = tpukit.preflight.preflight(workers.by_hand, chip="v5e-8", progress="off")
    weights = sum(parameter.numel() for parameter in workers.network().parameters())
    assert 4 * weights <= found.collective_bytes <= 4 * weights + 1024
    assert found.link_seconds == scaling.all_reduce_seconds(found.collective_bytes, "v5e", 8)
