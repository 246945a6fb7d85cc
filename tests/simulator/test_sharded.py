"""A model cut over the chips of a host, `launch(..., shard="fsdp")`: it trains, resumes and fails as on one chip."""

import dataclasses
import functools
import importlib.util
import os
import shutil
import signal
import time

import pytest
import torch
from helpers.machines import on_machine
from helpers.sharded_workers import (
    GPT,
    TRIED,
    by_fit,
    loss,
    odd_net,
    on_each_chip,
    pictures,
    seeded,
    steps,
    text,
    tried,
)
from simulator.test_kit import on
from torch import nn

import tpukit
from tpukit.essentials.environment import OwnMemory, own_memory
from tpukit.profiling.recompiles import RecompileMonitor
from tpukit.simulator import shapes

CHIPS = pytest.mark.parametrize("chips", [4, pytest.param(8, marks=pytest.mark.every_machine)])

pytestmark = [
    pytest.mark.usefixtures("library"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning"
    ),  # torch_xla's, in its own calls of its own old names
]


def cut(chips, fn, *args, **options):
    """Launch on a machine of so many chips, as one core."""
    return on(shapes.dry_run(chips), fn, *args, shard="fsdp", seed=0, **options)


@functools.cache
def one_chip(fn, *args):
    return on(shapes.dry_run(1), fn, *args, seed=0).results[0]


def differ(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def check(name, alone, found, chips):
    limit = 2e-2 if name == "bf16" else 1e-5
    assert differ(alone["losses"], found["losses"]) < limit, name
    assert len(set(found["losses"])) == len(found["losses"])  # it trains
    small = 0.35 if chips == 4 else 0.25  # biases and the weights of norms stay whole
    assert max(found["held"]) < small * found["whole"], name
    assert found.get("average", found["held"]) == found["held"]  # a copy of what is cut is cut


@pytest.mark.parametrize(
    "names", [["all at once", "BatchNorm"], pytest.param([*TRIED], marks=pytest.mark.every_machine)]
)
@CHIPS
def test_what_trains_on_one_chip_trains_the_same_over_several(chips, names):
    alone, found = one_chip(tried, tuple(names)), cut(chips, tried, names).results[0]
    for name in names:
        check(name, alone[name], found[name], chips)


@CHIPS
def test_fit_resumes_to_the_bit_and_its_checkpoints_are_those_of_the_plain_model(
    chips, tmp_path, capsys
):
    alone = one_chip(by_fit, 2)
    whole = cut(chips, by_fit, 2, tmp_path / "whole").results[0]
    assert differ(alone["train"], whole["train"]) < 1e-5
    assert differ(alone["valid"], whole["valid"]) < 1e-5
    assert whole["outputs"][0] == 43  # which no number of chips divides, and each is there once
    said = capsys.readouterr().out
    assert f"one process on {chips} x TPU v5e chip; the weights are sharded over them" in said
    assert "compiled again" not in said
    assert "no chip's memory is counted" in whole["report"]
    (weights, size), (state, size_of_state) = whole["held"]
    small = sum(one.nbytes for one in GPT().parameters() if one.numel() < 1024)
    assert weights == [small + (size - small) // chips]
    assert state == [2 * weights[0]]
    assert size_of_state == 2 * size

    cut(chips, by_fit, 1, tmp_path / "saved")
    for saved in (tmp_path / "saved").glob("step-*.pt"):
        shapes_of = {
            name: one.shape for name, one in torch.load(saved, weights_only=True)["model"].items()
        }
        assert shapes_of == {name: one.shape for name, one in GPT().state_dict().items()}
    shutil.copytree(tmp_path / "saved", tmp_path / "one")
    resumed = cut(chips, by_fit, 2, tmp_path / "saved").results[0]
    assert resumed["train"] == whole["train"]
    assert all(torch.equal(resumed["weights"][name], one) for name, one in whole["weights"].items())
    assert (
        resumed["resumed with"] == whole["held"]
    )  # loading makes whole tensors, which are cut before they are sent

    plain = GPT()
    plain.load_state_dict(torch.load(tmp_path / "whole" / "best.pt", weights_only=True))
    inputs, targets = text(43).tensors
    with torch.no_grad():
        assert loss(plain.eval()(inputs), targets).item() == pytest.approx(
            min(whole["valid"]), rel=1e-4
        )


@pytest.mark.every_machine
def test_what_fit_can_do_beside_goes_on_to_the_bit_and_stays_cut(tmp_path):
    """Dropout, averaged weights, which are restored and so loaded twice, bf16, gradients of two batches, clipped."""
    whole = cut(8, by_fit, 2, None, "gpt with everything").results[0]
    cut(8, by_fit, 1, tmp_path, "gpt with everything")
    resumed = cut(8, by_fit, 2, tmp_path, "gpt with everything").results[0]
    assert resumed["train"] == whole["train"]
    assert all(torch.equal(resumed["weights"][name], one) for name, one in whole["weights"].items())
    weights, _, average = whole["held"]
    assert weights == average
    assert resumed["held"] == whole["held"]
    assert differ(one_chip(by_fit, 2, None, "gpt with everything")["train"], whole["train"]) < 2e-2


@pytest.mark.every_machine
@pytest.mark.parametrize("network", ["gpt", "resnet"])
def test_a_checkpoint_of_eight_chips_goes_on_with_four_with_two_and_with_one(network, tmp_path):
    whole = cut(8, by_fit, 3, None, network).results[0]  # twelve steps
    assert differ(one_chip(by_fit, 3, None, network)["train"], whole["train"]) < 1e-4
    cut(8, by_fit, 1, tmp_path / "8", network)
    for chips in (4, 2, 1):
        shutil.copytree(tmp_path / "8", tmp_path / str(chips))
        start = (
            functools.partial(cut, chips)
            if chips > 1
            else functools.partial(on, shapes.dry_run(1), seed=0)
        )
        found = start(by_fit, 3, tmp_path / str(chips), network).results[0]
        assert differ(found["train"], whole["train"]) < 1e-4
        assert differ(found["valid"], whole["valid"]) < 1e-4


def large(core, width=1024, layers=16):
    """Tell the memory that core.model takes on the host, which is the chips' as well here, and what a chip gets."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    before, most = own_memory(), OwnMemory()
    core.model(model)
    core.backend.wait()
    sent = core.backend.metrics()["OutboundData"][1]
    size = sum(one.nbytes for one in model.parameters())
    return {
        "grown": most.most() - before,
        "sent": sent,
        "size": size,
        "held": on_each_chip(core, [*model.parameters()]),
    }


def compiled_again(core):
    """Train with a number in the graph that changes in the fourth step; return what is said by step."""
    model = core.model(seeded(odd_net))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # no state: one graph
    monitor, lines = RecompileMonitor(core.backend, settled=1), {}
    for step, (images, labels) in zip(
        range(1, 7), core.batches(pictures(96), batch_size=16), strict=True
    ):
        monitor.start_step((images, labels))
        with core.step():
            found = loss(model(images), labels) * max(0, 1 - step // 4)
            found.backward()
            core.optimizer_step(optimizer)
        if line := monitor.end_step(step):
            lines[step] = line
    return lines


def ones(core):
    tensor = torch.arange(3.0, device=core.device)
    return {
        "as one": (core.rank, core.world_size, core.chips),
        "reduced": core.all_reduce(tensor, "mean"),
        "gathered": core.gather(tensor),
        "of a number": core.mean(2),
        "of integers": core.all_reduce(torch.arange(2, device=core.device), "mean").dtype,
        "model": large(core),
        "compiled again": compiled_again(core),
    }


def test_one_core_is_all_chips_and_a_model_is_on_the_host_once(capsys):
    run = cut(4, ones)
    (found,) = run.results
    assert run.cores == 1
    assert run.device == "4 x TPU v5e chip"
    assert found["as one"] == (0, 1, 4)
    assert found["reduced"].tolist() == found["gathered"].tolist() == [0, 1, 2]
    assert (found["of a number"], found["of integers"]) == (2, torch.float32)
    assert [*found["compiled again"]] == [4]
    model = found["model"]
    assert model["held"] == [model["size"] // 4]
    assert model["sent"] <= model["size"] + 2**16
    assert (
        model["grown"] < 1.5 * model["size"]
    )  # on the chips, which are this host; with a copy it would be twice that


def odd(core):
    with pytest.raises(ValueError, match="divisible by 4 chips, got 6") as refused:
        core.batches(text(), batch_size=6)
    assert refused.value.fix == "batch_size=8, or another multiple of 4"
    fix = int(refused.value.fix.partition(",")[0].removeprefix("batch_size="))
    batches = core.batches(text(), batch_size=fix)

    class FullyShardedDataParallel(nn.Sequential):
        pass

    with pytest.raises(TypeError, match="sharded already"):
        core.model(nn.Sequential(FullyShardedDataParallel(nn.Linear(64, 64))))
    core.model(nn.Linear(1601, 61))
    return len(batches)


def test_what_cannot_be_cut_is_refused_or_said(capsys):
    run = on(shapes.dry_run(4), odd, shard="fsdp")
    assert run.results == [8]
    said = capsys.readouterr().out
    assert "stay whole on every chip\n  found: weight (61, 1601)\n" in said
    assert "  fix:   sizes divisible by 4 chips: 1604 in place of 1601" in said


def hybrid_mesh(core):
    from torch_xla.distributed.spmd import HybridMesh

    return HybridMesh(ici_mesh_shape=(2, 4)).get_logical_mesh().tolist()


def test_a_mesh_that_follows_the_torus_has_every_chip_once():
    (rows,) = cut(8, hybrid_mesh).results
    assert len(rows) == 2
    assert sorted(number for row in rows for number in row) == list(range(8))


def test_over_one_chip_it_is_an_ordinary_launch(capsys):
    run = on(shapes.dry_run(1), lambda core: (core.world_size, core.chips), shard="fsdp")
    assert run.results == [(1, 1)]
    assert "one chip: there is nothing to shard" in capsys.readouterr().out


def test_without_a_chip_chips_are_played():
    laptop = dataclasses.replace(tpukit.machine_info(), chips=0, cpus=2)
    with on_machine(laptop):
        run = tpukit.launch(lambda core: core.chips, backend="xla", shard="fsdp", progress="off")
    assert run.results == [2]


def differentiated(core):
    """Return the gradient by torch.func, which gives layers something else than tensors."""
    layer = core.model(seeded(nn.Linear, in_features=64, out_features=64))
    (x,) = core.to_device([torch.ones(8, 64)])
    weights = dict(layer.named_parameters())
    found = torch.func.grad(
        lambda weights: torch.func.functional_call(layer, weights, (x,)).square().mean()
    )(weights)
    return core.to_host(found["weight"])


@pytest.mark.every_machine
def test_torch_func_sees_no_marks():
    assert torch.allclose(cut(2, differentiated).results[0], one_chip(differentiated), atol=1e-6)


def scans(core):
    from torch_xla.experimental.scan_layers import scan_layers

    layers = core.model(nn.ModuleList(nn.Linear(64, 64) for _ in range(2)))
    scan_layers(layers, *core.to_device([torch.ones(8, 64)])).sum().backward()


@pytest.mark.every_machine
@pytest.mark.skipif(importlib.util.find_spec("jax") is not None, reason="jax is here")
def test_scan_layers_asks_for_jax():
    with pytest.raises(tpukit.WorkerError, match="jax"):
        cut(2, scans)


def raises(core):
    raise KeyError("a column")


def is_killed(core):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(core):
    time.sleep(900)


FAILURES = {
    "an exception": (raises, "raised KeyError: 'a column'"),
    "killed": (is_killed, "was killed by SIGKILL"),
    "hangs": (hangs, "has not moved"),
}


def fails(core, work):
    model = core.model(seeded(GPT))
    steps(core, model, text())
    work(core)


@pytest.mark.parametrize(
    "fault",
    [
        "killed",
        *(pytest.param(one, marks=pytest.mark.every_machine) for one in ("an exception", "hangs")),
    ],
)
def test_a_failure_is_told_and_the_chips_are_free_at_once(fault):
    work, words = FAILURES[fault]
    with pytest.raises(tpukit.WorkerError, match=f"core 0 of 1 {words}"):
        cut(2, fails, work, limits=tpukit.Limits(stall=3.0, heartbeat=0.3))
    assert cut(2, lambda core: core.chips).results == [2]


@pytest.mark.every_machine
def test_an_interrupt_ends_the_run_and_the_next_launch_works():
    def work(core):
        fails(core, lambda core: os.kill(os.getppid(), signal.SIGINT))
        time.sleep(900)

    with pytest.raises(tpukit.LaunchInterrupted):
        cut(2, work)
    assert cut(2, lambda core: core.chips).results == [2]
