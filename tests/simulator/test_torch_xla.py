"""What code that knows nothing of tpukit asks of torch_xla and torch.distributed."""

import copy

import pytest
import torch
from simulator.machine import machines, on_every_core, results, run
from torch import nn

from tpukit.simulator.shapes import SHAPES, dry_run

pytestmark = pytest.mark.xla

STEPS = 4
MACHINES = {"two cores": dry_run(2)} | {
    name: SHAPES[name] for name in ("v4-8", "kaggle v5e-8", "v3-8")
}
ASKED = ["two cores", "kaggle v5e-8", "v3-8"]


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)


torch.manual_seed(0)
NET = nn.Sequential(
    nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)
)  # made once: two device threads share torch's seed


def train_alone(world, learning_rate=0.1):
    """Train in one process on the batches of all ranks joined: what data-parallel training must equal."""
    model = copy.deepcopy(NET)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    for step in range(STEPS):
        images, targets = (
            torch.cat(parts)
            for parts in zip(*(batch(rank, step) for rank in range(world)), strict=True)
        )
        optimizer.zero_grad()
        nn.functional.mse_loss(model(images), targets).backward()
        optimizer.step()
    return weights(model)


def weights(model):
    return [weight.detach().cpu() for weight in model.parameters()]


def train_on_core(model, after_backward):
    import torch_xla
    import torch_xla.runtime as xr

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        images, targets = (part.to("xla") for part in batch(xr.global_ordinal(), step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(images), targets).backward()
        after_backward(optimizer)
        torch_xla.sync()
    return weights(model)


def stranger():
    """Ask torch_xla everything a training script asks, on one core."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    rank = xr.global_ordinal()
    told = {
        "world size": xr.world_size(),
        "device type": xr.device_type(),
        "hardware": xm.xla_device_hw(torch_xla.device()),
        "is master": xm.is_master_ordinal(local=False),
        "rendezvous": xm.rendezvous("here", payload=bytes([rank])),
        "mesh_reduce": xm.mesh_reduce("sum", rank, sum),
        "memory": xm.get_memory_info(torch_xla.device()),
        "attributes": xr.runtime_device_attributes(str(torch_xla.device())),
        "devices": [device["name"] for device in xr.global_runtime_device_attributes()],
    }
    model = copy.deepcopy(NET).to("xla")
    told["weights"] = train_on_core(model, xm.optimizer_step)
    return told


def distributed():
    """Train under DistributedDataParallel, on torch.distributed's xla backend, and call its own collectives."""
    import torch.distributed as dist
    import torch_xla
    import torch_xla.distributed.xla_backend  # noqa: F401
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("xla", init_method="xla://")
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        total = torch.full((2,), float(rank), device="xla")
        dist.all_reduce(total)
        first = torch.full((2,), float(rank + 1), device="xla")
        dist.broadcast(first, src=0)
        parts = [torch.zeros(2, device="xla") for _ in range(world)]
        dist.all_gather(parts, torch.full((2,), float(rank), device="xla"))
        torch_xla.sync()
        told = {
            "rank": rank,
            "total": total.cpu(),
            "first": first.cpu(),
            "parts": torch.stack(parts).cpu(),
        }
        model = DistributedDataParallel(copy.deepcopy(NET).to("xla"))
        told["weights"] = train_on_core(model, lambda optimizer: optimizer.step())
        return told
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def ran(library):
    """What a function returned on each rank of a machine; run once for all tests that look at it."""
    runs = {}

    def on(body, machine):
        key = body.__name__, machine
        if key not in runs:
            runs[key] = run(MACHINES[machine], body, library=library)
        return results(runs[key])

    return on


@pytest.mark.parametrize("machine", machines(ASKED))
def test_torch_xla_knows_where_it_is(machine, ran):
    world = MACHINES[machine].chips * MACHINES[machine].cores
    ranks = ran(stranger, machine)
    assert sorted(ranks) == list(range(world))
    for rank, told in ranks.items():
        assert (told["world size"], told["device type"], told["hardware"]) == (world, "TPU", "TPU")
        assert told["is master"] == (rank == 0)
        assert told["memory"]["bytes_limit"] == 16 * 2**30
        assert 0 < told["memory"]["bytes_used"] < told["memory"]["bytes_limit"]
        assert told["devices"] == [f"TPU:{number}" for number in range(world)]


# By rank, the coordinates of the chip, and the core on it.
PLACES = {
    "two cores": [((0, 0, 0), 0), ((1, 0, 0), 0)],
    "kaggle v5e-8": [((x, y, 0), 0) for y in range(4) for x in range(2)],
    "v3-8": [((x, y, 0), core) for y in range(2) for x in range(2) for core in range(2)],
}


@pytest.mark.parametrize("machine", machines(ASKED))
def test_every_core_has_the_place_of_its_chip_on_the_torus(machine, ran):
    for rank, told in ran(stranger, machine).items():
        coordinates, core_on_chip = PLACES[machine][rank]
        assert told["attributes"] == {
            "coords": list(coordinates),
            "core_on_chip": core_on_chip,
            "num_cores": MACHINES[machine].cores,
        }


@pytest.mark.parametrize("machine", machines(ASKED))
def test_ranks_meet_and_carry_payloads(machine, ran):
    world = MACHINES[machine].chips * MACHINES[machine].cores
    for told in ran(stranger, machine).values():
        assert sorted(told["rendezvous"]) == [bytes([rank]) for rank in range(world)]
        assert told["mesh_reduce"] == sum(range(world))


@pytest.mark.parametrize("machine", machines(ASKED))
def test_optimizer_step_trains_as_one_process_with_the_joined_batch(machine, ran):
    ranks = ran(stranger, machine)
    torch.testing.assert_close(ranks[0]["weights"], train_alone(len(ranks)), rtol=1e-5, atol=1e-6)
    for told in ranks.values():  # to the last bit
        torch.testing.assert_close(told["weights"], ranks[0]["weights"], rtol=0, atol=0)


@pytest.mark.parametrize("machine", machines(["two cores", "v4-8"]))
def test_the_xla_backend_of_torch_distributed_carries_collectives(machine, ran):
    ranks = ran(distributed, machine)
    world = len(ranks)
    for rank, told in ranks.items():
        assert told["rank"] == rank
        assert told["total"].tolist() == [sum(range(world))] * 2
        assert told["first"].tolist() == [1.0, 1.0]
        assert told["parts"].tolist() == [[float(other)] * 2 for other in range(world)]


@pytest.mark.parametrize("machine", machines(["two cores", "v4-8"]))
def test_distributed_data_parallel_trains_as_one_process_with_the_joined_batch(machine, ran):
    ranks = ran(distributed, machine)
    torch.testing.assert_close(ranks[0]["weights"], train_alone(len(ranks)), rtol=1e-5, atol=1e-6)
    for told in ranks.values():
        torch.testing.assert_close(told["weights"], ranks[0]["weights"], rtol=0, atol=0)


def who_am_i():
    import os

    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    place = torch.tensor([int(os.environ["CLOUD_TPU_TASK_ID"])], device="xla")
    return {
        "process": int(os.environ["CLOUD_TPU_TASK_ID"]),
        "by rank": xm.all_gather(place).tolist(),
        "process index": xr.process_index(),
    }


@pytest.mark.parametrize(
    ("shape", "order", "expected"),
    [
        (dry_run(4), "2,0,3,1", [1, 3, 0, 2]),  # by rank, the process that has it
        (dry_run(2), "1,0", [1, 0]),
        (SHAPES["v3-8"], "3,2,1,0", [3, 3, 2, 2, 1, 1, 0, 0]),
    ],
    ids=["four in disorder", "two swapped", "v3-8 reversed"],
)
def test_ranks_may_be_in_another_order_than_processes(shape, order, expected, library):
    ranks = on_every_core(shape, who_am_i, library=library, environ={"SIMULATOR_ORDER": order})
    assert [ranks[rank]["process"] for rank in sorted(ranks)] == expected
    assert [told["process index"] for told in ranks.values()] == [
        told["process"] for told in ranks.values()
    ]
    assert all(told["by rank"] == expected for told in ranks.values())
