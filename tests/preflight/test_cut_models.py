"""preflight of a model that is cut over the chips: what each holds, and whether it fits where one chip is too small."""

import importlib.util

import pytest
import torch
from helpers.preflight_workers import Drawn
from torch import nn

import tpukit
from tpukit.preflight import libtpu
from tpukit.preflight.hlo import Message
from tpukit.preflight.recording import record
from tpukit.profiling import find_tpu
from tpukit.simulator import build

pytestmark = pytest.mark.xla
CHIP = find_tpu("v5e-8")
SHARDING = 40  # of an instruction, in xla/service/hlo.proto


@pytest.fixture(scope="module", autouse=True)
def simulator():
    if reason := build.why_not():
        pytest.skip(reason)
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed")


@pytest.fixture(scope="module")
def real_libtpu():
    try:
        libtpu.fetch_libtpu()
    except tpukit.preflight.LibtpuNotFoundError as error:
        pytest.skip(str(error))
    return libtpu.platform_version()


def by_hand(core, batch_size=16, width=1024, layers=1, bf16=True):
    torch.manual_seed(0)
    inner = [nn.Linear(width, width, bias=False) for _ in range(layers)]
    model = core.model(
        nn.Sequential(nn.Flatten(), nn.Linear(192, width), *inner, nn.Linear(width, 10))
    )
    optimizer = torch.optim.Adam(model.parameters())
    for images, labels in core.batches(Drawn(1000), batch_size=batch_size, drop_last=True):
        with core.step():
            with torch.autocast(core.device.type, dtype=torch.bfloat16, enabled=bf16):
                outputs = model(images.float() / 255)
            nn.functional.binary_cross_entropy_with_logits(outputs.float(), labels).backward()
            core.optimizer_step(optimizer)


def large(core, batch_size=8):
    """Train 1.3 billion weights, 15 GiB with Adam's state: more than this machine has to have."""
    by_hand(core, batch_size, width=16384, layers=5)


def cut_parameters(graph):
    """Return how many parameters of a graph are sharded."""
    module = Message(graph.module)
    (entry_id,) = module.every(6)
    computations = [Message(content) for content in module.every(3)]
    (entry,) = [computation for computation in computations if computation.every(5) == [entry_id]]
    instructions = [Message(content) for content in entry.every(2)]
    parameters = [each for each in instructions if each.text(2) == "parameter"]
    return sum(bool(each.every(SHARDING)) for each in parameters)


def test_a_step_stays_cut_from_one_program_that_is_only_recorded_to_the_next():
    found = record(by_hand, chip=CHIP, shard="fsdp", progress="off")
    assert found.is_steady
    (graph,) = found.graphs
    assert cut_parameters(graph) >= 3 * 3  # three large weights, each with its two averages
    assert found.batches == ((((2, 3, 8, 8), "uint8"), ((2, 10), "float32")),)  # of a chip
    assert "--xla_tpu_spmd_f32_accum_for_bf16_ar=true" in found.flags.split()


def test_what_each_chip_holds_and_sends_is_told(real_libtpu):
    found = tpukit.preflight.preflight(by_hand, chip="v5e-8", shard="fsdp", progress="off")
    weights = (
        sum(
            one.numel()
            for one in (torch.empty(192, 1024), torch.empty(1024, 1024), torch.empty(1024, 10))
        )
        * 12
    )
    (compiled,) = found.compiled
    assert weights / 8 < compiled.argument_bytes < weights / 6
    assert (found.fits, found.batch_size) == (True, 2)
    sums = [
        one
        for one in compiled.program.everywhere()
        if one.opcode.startswith("all-reduce")
        for one in one.arrays
    ]
    added_in = {
        "0.0.17": "bf16",
        "0.0.21.1": "f32",
    }  # the gradients of an autocast to bfloat16, with the same flag
    assert {one.type for one in sums if len(one.dimensions) == 2} == {added_in[real_libtpu]}
    assert 2 * 1024 * 1024 * 2 < found.collective_bytes < 16 * 1024 * 1024 * 2
    assert "one model over its chips" in found.subject


def test_a_shard_that_there_is_not_is_refused_at_once():
    with pytest.raises(ValueError, match='shard must be "fsdp" or None'):
        tpukit.preflight.preflight(by_hand, shard="zero")


@pytest.mark.soak
def test_a_model_that_does_not_fit_one_chip_is_told_that_it_fits_all(real_libtpu):
    found = tpukit.preflight.preflight(large, chip="v5e-8", progress="off")
    assert not found.fits
    assert found.cut.fits
    assert found.cut.hbm_bytes < found.hbm_bytes / 3
    assert found.findings[0].fix.startswith('it fits with shard="fsdp": ')
    largest = tpukit.preflight.largest_batch(
        large, shard="fsdp", start=64, compiles=2, progress="off"
    )
    assert largest.batch_size >= 64
    assert "samples of the run fit" in largest.title
