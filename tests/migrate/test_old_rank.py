"""`on_old_rank`: an old worker function begins as a fork of `xmp.spawn` did."""

import importlib.util
import random
import re

import numpy
import pytest
import torch

import tpukit
from tpukit import WorkerFailed, launch, on_old_rank
from tpukit.standin import why_not

STAND_IN = pytest.mark.skipif(
    why_not() is not None or importlib.util.find_spec("torch_xla") is None, reason="needs the stand-in and torch_xla"
)


def old_worker(rank, flags):
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.parallel_loader as pl
    import torch_xla.distributed.xla_multiprocessing as xmp
    import torch_xla.runtime as xr

    data = torch.utils.data.TensorDataset(torch.rand(32, 4))
    kept, _ = torch.utils.data.random_split(data, [16, 16])
    made = xmp.MpSerialExecutor().run(lambda: torch.nn.Linear(4, 1))
    device = xm.xla_device()
    model = xmp.MpModelWrapper(made).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=flags["lr"])
    sampler = torch.utils.data.DistributedSampler(kept, num_replicas=xr.world_size(), rank=xr.global_ordinal())
    loader = torch.utils.data.DataLoader(kept, batch_size=4, sampler=sampler)
    for (inputs,) in pl.ParallelLoader(loader, [device]).per_device_loader(device):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        xm.optimizer_step(optimizer)
    xm.rendezvous("trained")
    values = [numpy.float64(rank), numpy.int64(rank), numpy.bool_(rank), numpy.ones(2) * rank, numpy.float32(rank)]
    sums = xm.mesh_reduce("values", {"all": values}, lambda every: [sum(one["all"][0] for one in every), len(every)])
    xm.save(model.state_dict(), flags["file"])
    weights = [one.detach().cpu() for one in model.parameters()]
    drawn = (random.random(), float(numpy.random.rand()), kept.indices)
    return rank, xr.world_size(), float(sums[0]), sums[1], weights, drawn


@STAND_IN
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_old_helpers_work_and_all_cores_begin_with_the_kernels_random_numbers(tmp_path):
    flags = {"lr": 0.1, "file": str(tmp_path / "model.pt")}
    run = launch(on_old_rank(old_worker), flags, cores=2, backend="xla:standin", progress="off", seed=0)
    (first, *same), (second, *others) = run.results
    assert (first, second) == (0, 1)
    assert same[:3] == others[:3] == [2, 1.0, 2]
    assert all(torch.equal(one, other) for one, other in zip(same[3], others[3], strict=True))
    assert same[4] == others[4]
    assert (tmp_path / "model.pt").stat().st_size > 0


@STAND_IN
def test_what_cannot_leave_its_process_stays_there_as_it_did_under_spawn(capfd):
    run = launch(on_old_rank(lambda rank: lambda: rank), cores=1, backend="xla:standin", progress="off", seed=0)
    assert run.results == [None]
    assert re.search(r"what the worker returned stays on core 0, as under xmp.spawn: .*lambda", capfd.readouterr().out)


def test_the_numbers_are_those_of_the_call_and_the_signature_is_the_functions():
    def worker(rank, flags):
        return rank, flags

    torch.manual_seed(3)
    wrapped = on_old_rank(worker)
    with pytest.raises(TypeError, match="cannot be called with"):
        launch(wrapped, cores=1, backend="cpu")
    assert wrapped.__name__ == "worker"


def test_plain_cpu_processes_are_refused_and_the_fix_is_the_backend():
    with pytest.raises(WorkerFailed, match="torch_xla itself") as failed:
        launch(on_old_rank(old_worker), {}, cores=1, backend="cpu", progress="off", seed=0)
    assert re.search(r'fix: .*launch\(\.\.\., backend="xla"\)', str(failed.value))
    assert tpukit.on_old_rank is on_old_rank
