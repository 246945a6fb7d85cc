"""A launch that is one of several hosts: two processes of this machine, each the kernel of its own cores."""

import functools
import multiprocessing
import socket
from types import SimpleNamespace

import pytest

from tpukit.accelerators.hosts import launch_on_host
from tpukit.essentials.backends.protocol import Hosts, Topology
from tpukit.essentials.display.progress import Screen
from tpukit.essentials.launcher import messages
from tpukit.essentials.launcher.launcher import WorkerError, launch
from tpukit.essentials.launcher.watchdog import Limits
from tpukit.essentials.launcher.worker import Task
from tpukit.essentials.launcher.worker_group import WorkerGroup


def on_two_hosts(fn, cores):
    """Launch on two hosts, and return what each brought: its results, or the words of its error."""
    listener, brought = (
        socket.create_server(("127.0.0.1", 0)),
        multiprocessing.get_context("fork").Queue(),
    )

    def be_host(number):
        hosts = Hosts(number, 2, listener.getsockname(), listener if number == 0 else None)
        try:
            outcome = launch_on_host(hosts, fn, cores=cores, backend="cpu", progress="off").results
        except WorkerError as error:
            outcome = str(error)
        brought.put((number, outcome))

    kernels = [
        multiprocessing.get_context("fork").Process(target=be_host, args=[number])
        for number in range(2)
    ]
    for kernel in kernels:
        kernel.start()
    listener.close()
    found = dict(brought.get(timeout=600) for _ in kernels)
    for kernel in kernels:
        kernel.join()
    return [found[number] for number in range(2)]


def look(core):
    import torch

    total = core.all_reduce(torch.tensor([2.0**core.rank], device=core.device)).item()
    return core.rank, core.world_size, total, torch.rand(1).item()


def test_ranks_collectives_and_random_numbers_of_two_hosts_are_those_of_one_with_all_cores():
    here = launch(look, cores=4, backend="cpu", progress="off").results
    assert [rank for rank, *_ in here] == [0, 1, 2, 3]
    assert here[0][:3] == (0, 4, 15.0)
    assert sum(on_two_hosts(look, cores=2), []) == here


def fail_on_the_second_host(core):
    core.barrier()
    if core.rank == 3:
        raise KeyError("SOPInstanceUID")
    core.barrier()


def test_a_core_of_the_second_host_that_fails_is_named_there_and_ends_the_first():
    first, second = on_two_hosts(fail_on_the_second_host, cores=2)
    assert second.startswith("core 3 of 4 raised KeyError: 'SOPInstanceUID' (the other was ended)")
    assert "it was waiting for the other cores in barrier()" in first


def train_to_the_best(core, folder):
    """Two good epochs, then one with a rate that breaks the model; every host has a folder of its own."""
    import torch

    from tpukit.training import EarlyStopping, FitOptions, fit

    model = core.model(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    batches = core.batches(
        torch.utils.data.TensorDataset(inputs, inputs[:, :1]), batch_size=4, drop_last=True
    )

    def break_it(history):
        optimizer.param_groups[0]["lr"] = 0.05 if len(history.epochs) < 2 else 3.0

    loss = torch.nn.functional.mse_loss
    history = fit(
        core,
        model,
        optimizer,
        loss,
        batches,
        epochs=3,
        monitor="train_loss",
        early_stopping=EarlyStopping(restore_best_weights=True),
        checkpoints=f"{folder}/{core.rank}",
        options=FitOptions(on_epoch_end=break_it),
    )
    return history.best["epoch"], [weight.tolist() for weight in model.parameters()]


def test_the_best_weights_come_back_on_every_host_though_only_the_first_has_them(tmp_path):
    first, second = on_two_hosts(functools.partial(train_to_the_best, folder=tmp_path), cores=1)
    assert first[0][0] == 2
    assert first == second
    assert not (tmp_path / "1" / "best.pt").exists()


@pytest.mark.parametrize("order", [(0, 1, 4, 5), (5, 4, 1, 0), (4, 0, 5, 1)])
def test_the_ranks_of_a_host_are_what_its_cores_say(order):
    """The chips of a 4x4 slice are numbered row by row, and each of its hosts has two by two of them."""
    topology = Topology("xla", "TPU v5e core", 4, 4, hosts=Hosts(0, 4, ("10.0.0.2", 1)))
    group = WorkerGroup(topology, task=Task(print, (), 0), limits=Limits(), display=Screen())
    assert group.ranks == [0, 1, 2, 3]
    group.workers = [SimpleNamespace(started=[]) for _ in order]
    for worker, rank in zip(group.workers, order, strict=True):
        worker.started.append(rank)
        group._take(messages.Started(rank), rank)
    assert group.ranks == [0, 1, 4, 5]
