"""The one table of TPUs: names, facts, and that all who need one know each."""

import re
from dataclasses import astuple

import pytest

import tpukit
from tpukit.essentials.environment.chips import GENERATIONS
from tpukit.profiling import TPUS, find_tpu

# Chips, cores; of a core: bytes of HBM, FLOP/s, bytes a second, clock; topology of libtpu, name in Google's tools.
GIB = 2**30
FACTS = {
    "v2-8": (4, 8, 8 * GIB, 22.9e12, 350e9, 0.70e9, "v2:2x2", "v2-8"),
    "v3-8": (4, 8, 16 * GIB, 61.5e12, 450e9, 0.94e9, "v3:2x2", "v3-8"),
    "v4-8": (4, 4, 32 * GIB, 275e12, 1228e9, 1.05e9, "v4:2x2x1", "v4-8"),
    "v5e-1": (1, 1, 16 * GIB, 197e12, 819e9, 1.50e9, "v5e:1x1", "v5litepod-1"),
    "v5e-4": (4, 4, 16 * GIB, 197e12, 819e9, 1.50e9, "v5e:2x2", "v5litepod-4"),
    "v5e-8": (8, 8, 16 * GIB, 197e12, 819e9, 1.50e9, "v5e:2x4", "v5litepod-8"),
    "v5p-8": (4, 4, 95 * GIB, 459e12, 2765e9, 1.75e9, "v5p:2x2x1", "v5p-8"),
    "v6e-1": (1, 1, 32 * GIB, 918e12, 1640e9, 1.75e9, "v6e:1x1", "v6e-1"),
    "v6e-4": (4, 4, 32 * GIB, 918e12, 1640e9, 1.75e9, "v6e:2x2", "v6e-4"),
    "v6e-8": (8, 8, 32 * GIB, 918e12, 1640e9, 1.75e9, "v6e:2x4", "v6e-8"),
}


def test_the_table_above_is_whole():
    assert set(FACTS) == set(TPUS)


@pytest.mark.parametrize("name", TPUS)
def test_a_tpu_is_what_its_name_says(name):
    tpu = find_tpu(name)
    assert astuple(tpu)[:2] == (name, name.partition("-")[0])
    assert astuple(tpu)[2:-1] == FACTS[name]
    kind = GENERATIONS[tpu.generation]
    assert name.endswith(f"-{tpu.chips}") or name.endswith(f"-{tpu.chips * kind.tensor_cores}")


def test_a_kind_of_chip_is_known_by_its_pci_id_alone():
    ids = [(kind.pci, kind.subsystem) for kind in GENERATIONS.values()]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    "name", ["v5litepod-8", "tpu-v5litepod-8", "V5E-8", " v5e-8 ", "tpu-v5e-8", "v5lite-8"]
)
def test_other_tools_names_are_understood(name):
    assert find_tpu(name) is find_tpu(TPUS["v5e-8"]) is TPUS["v5e-8"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5e-16", "v5e-16 is no TPU of one host"),
        ("v3-32", "v3-32 is no TPU of one host"),
        ("v5litepod-7", "there is no TPU 'v5litepod-7'"),
        ("v9-8", "there is no TPU 'v9-8'"),
        ("v9-16", "there is no TPU 'v9-16'"),
        ("TPU v5e-8", "there is no TPU 'TPU v5e-8'"),
        ("v3", "there is no TPU 'v3'"),
        ("", "there is no TPU ''"),
    ],
)
@pytest.mark.parametrize("ask", [find_tpu, tpukit.draw_tpu])
def test_what_there_is_not_is_refused_with_what_there_is(ask, name, words):
    with pytest.raises(ValueError, match="found: there are v2-8, v3-8,") as caught:
        ask(name)
    assert words in str(caught.value)
    assert find_tpu(re.search('fix:   pass "(.*)"', str(caught.value))[1])  # as the fix says
