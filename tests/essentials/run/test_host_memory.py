import functools
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tpukit.essentials.backends.protocol import Topology
from tpukit.essentials.machine.host_facts import host
from tpukit.essentials.run.host_memory import memory_warning
from tpukit.essentials.run.launcher import launch
from tpukit.essentials.run.topology import choose_topology

MODEL = nn.Sequential(nn.Linear(1000, 1000, bias=False))  # 4 MB
WHOLE = 4 * 1000 * 1000


@dataclass
class Config:
    model: nn.Module


def by_global(core):
    return MODEL


def closure(model):
    def work(core):
        return model

    return work


def unused(core):
    return None


TOPOLOGY: Topology = choose_topology(host(), 4, "cpu")


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (unused, (MODEL,)),
        (unused, ([MODEL, MODEL],)),
        (unused, ({"net": MODEL, "its first layer": MODEL[0]},)),
        (unused, (Config(MODEL),)),
        (unused, (SimpleNamespace(model=MODEL),)),
        (functools.partial(unused, model=MODEL), ()),
        (closure(MODEL), ()),
        (by_global, ()),
    ],
)
def test_models_are_found_where_a_worker_function_sees_them_and_counted_once(fn, args):
    assert memory_warning(fn, args, TOPOLOGY, available=4 * 2 * WHOLE) is None
    found = memory_warning(fn, args, TOPOLOGY, available=4 * 2 * WHOLE - 1)
    assert found.startswith("4 cores will need 31 MiB of host memory at least, and 31 MiB are available\n")
    assert "\n  fix:   cores=3, a smaller model" in found
    assert memory_warning(fn, args, choose_topology(host(), 3, "cpu"), available=4 * 2 * WHOLE - 1) is None


@pytest.mark.parametrize("args", [(), (np.zeros(10**6),), (torch.zeros(10**6),), ([0] * 5000,), (object(),)])
def test_what_the_notebook_holds_and_no_core_copies_is_not_counted(args):
    assert memory_warning(unused, args, TOPOLOGY, available=0) is None


def test_a_launch_says_so_before_it_forks(capfd):
    huge = nn.Linear(1, 1)
    huge.weight = nn.Parameter(torch.empty(20 * 2**30 // 4))  # 20 GiB that nobody writes to
    launch(unused, cores=2, backend="cpu", progress="text")
    assert "of host memory" not in capfd.readouterr().out
    launch(by_argument, [huge], cores=2, backend="cpu", progress="text")
    assert "2 cores will need 80.0 GiB of host memory at least" in capfd.readouterr().out


def by_argument(core, models):
    return None


def test_the_core_that_grew_most_is_named_and_what_is_shared_does_not_count():
    shared = np.ones(80 * 2**20 // 8)

    def work(core):
        own = np.ones(60 * 2**20 // 8) if core.rank == 1 else None
        core.barrier()
        time.sleep(0.5)  # so that it is seen
        return float(shared.sum() + (0 if own is None else own[:1].sum()))

    run = launch(work, cores=3, backend="cpu", progress="off", heartbeat=0.05)
    assert len(run.grown) == 3
    assert "core 1 grew most, by " in repr(run)
    assert 50 * 2**20 < run.grown[1] < 100 * 2**20
    assert max(run.grown[0], run.grown[2]) < 30 * 2**20
