import pytest

from tpukit.cloud.slices import SLICES, find_slice


@pytest.mark.parametrize(
    ("chip", "machine", "dollars", "accelerator_type", "runtime_version"),
    [
        ("v5e-1", ("ct5lp-hightpu-1t", "1x1"), 1.20, "v5litepod-1", "v2-alpha-tpuv5-lite"),
        ("v5e-4", ("ct5lp-hightpu-4t", "2x2"), 4.80, "v5litepod-4", "v2-alpha-tpuv5-lite"),
        ("v5e-8", ("ct5lp-hightpu-8t", "2x4"), 9.60, "v5litepod-8", "v2-alpha-tpuv5-lite"),
        ("v6e-1", ("ct6e-standard-1t", "1x1"), 2.70, "v6e-1", "v2-alpha-tpuv6e"),
        ("v6e-4", ("ct6e-standard-4t", "2x2"), 10.80, "v6e-4", "v2-alpha-tpuv6e"),
        ("v6e-8", ("ct6e-standard-8t", "2x4"), 21.60, "v6e-8", "v2-alpha-tpuv6e"),
        ("v2-8", ("cloud-tpu", "TPU_V2", 8), 4.50, "v2-8", "tpu-ubuntu2204-base"),
        ("v3-8", ("cloud-tpu", "TPU_V3", 8), 8.00, "v3-8", "tpu-ubuntu2204-base"),
        ("v4-8", (), 12.88, "v4-8", "tpu-ubuntu2204-base"),
        ("v5p-8", (), 16.80, "v5p-8", "v2-alpha-tpuv5"),
    ],
)
def test_every_tpu_has_its_machine_price_and_image(chip, machine, dollars, accelerator_type, runtime_version):
    one = find_slice(chip)
    assert tuple(one.machine.values()) == machine
    assert one.dollars == pytest.approx(dollars)
    assert (one.accelerator_type, one.runtime_version) == (accelerator_type, runtime_version)


def test_the_table_above_is_whole():
    assert len(SLICES) == 10


@pytest.mark.parametrize("chip", ["v5litepod-8", "tpu-v5litepod-8", "V5E-8", " v5e-8 ", "tpu-v5e-8", "v5lite-8"])
def test_other_tools_names_are_understood(chip):
    assert find_slice(chip).name == "v5e-8"


@pytest.mark.parametrize(
    ("chip", "for_vertex", "words"),
    [
        ("v5e-16", False, "v5e-16 is no TPU of one host"),
        ("v3-32", False, "v3-32 is no TPU of one host"),
        ("v5litepod-7", False, "there is no TPU 'v5litepod-7'"),
        ("v9-8", False, "there is no TPU 'v9-8'"),
        ("T4", False, "there is no TPU 'T4'"),
        ("", False, "there is no TPU ''"),
        ("v4-8", True, "Vertex AI trains on no v4-8"),
        ("v5p-8", True, "Vertex AI trains on no v5p-8"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(chip, for_vertex, words):
    with pytest.raises(ValueError, match="found: there are v2-8, v3-8,") as caught:
        find_slice(chip, for_vertex=for_vertex)
    assert words in str(caught.value)
    (fix,) = [line for line in str(caught.value).splitlines() if "fix:" in line]
    assert find_slice(fix.partition('chip="')[2].rstrip('"'), for_vertex=for_vertex)  # as the fix says
