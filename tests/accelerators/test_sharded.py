"""`shard="fsdp"` where there is nothing to cut, and what is refused beside it; what it computes: tests/simulator."""

import dataclasses
import functools
import os
import re

import pytest
from helpers.machines import COLAB, KAGGLE, on_machine

import tpukit
from tpukit.accelerators import launch_on_host
from tpukit.accelerators.sharded import choose_sharded
from tpukit.essentials.backends import Hosts, runtimes
from tpukit.essentials.launcher.topology import (
    RuntimeInUseError,
    choose_topology,
    refuse_if_in_use,
    refuse_one_process_variables,
)

LAPTOP = dataclasses.replace(KAGGLE, platform="Linux", chips=0, generation="", cpus=4)


def lay_out(host):
    return choose_sharded("fsdp", functools.partial(choose_topology, host, backend=None))


def work(core):
    return core.rank, core.world_size, core.chips, len(core.batches(range(12), batch_size=6))


def test_a_cpu_dry_run_runs_whole_in_one_process_and_says_so(capsys):
    run = tpukit.launch(work, backend="cpu", shard="fsdp", progress="text")
    assert run.results == [(0, 1, 1, 2)]
    assert (
        'one CPU process holds the whole model here; backend="xla" is a dry run that shards it'
        in capsys.readouterr().out
    )


def test_all_chips_of_a_host_are_one_core():
    topology = lay_out(KAGGLE)
    assert (topology.cores, topology.processes, topology.chips, topology.world_size) == (1, 1, 8, 1)
    assert topology.device == "8 x TPU v5e chip"
    old = lay_out(dataclasses.replace(KAGGLE, chips=4, generation="v3"))
    assert (old.chips, old.device) == (8, "8 x TPU v3 core")


def test_one_chip_is_an_ordinary_launch():
    topology = lay_out(COLAB)
    assert (topology.cores, topology.processes, topology.chips) == (1, 1, 1)


@pytest.mark.parametrize(
    ("options", "words", "fix"),
    [
        ({"shard": True}, 'shard must be "fsdp" or None, got True', 'shard="fsdp"'),
        ({"shard": "zero"}, "got 'zero'", 'shard="fsdp"'),
        ({"cores": 4}, "all chips of one host are one rank", "leave out cores"),
        ({"device": 0}, "all chips of one host are one rank", "leave out device"),
        (
            {"hosts": Hosts(0, 2, ("10.0.0.1", 29500))},
            "all chips of one host are one rank",
            "leave out hosts",
        ),
        ({"cores": 1, "device": 0}, "a launch always uses all of them", "leave out cores, device"),
        (
            {"backend": "xla:cpu"},
            "the xla:cpu backend cannot shard a model",
            r"^pip install xla_cpu_pjrt==0\.0\.1 and",
        ),
    ],
)
def test_what_is_refused_beside_it(options, words, fix):
    given = {"shard": "fsdp"} | options
    start = tpukit.launch
    if "hosts" in given:
        start = functools.partial(launch_on_host, given.pop("hosts"))
    with on_machine(LAPTOP), pytest.raises(ValueError, match=re.escape(words)) as refused:
        start(work, progress="off", **given)
    assert re.search(fix, refused.value.fix)


def test_jobs_of_their_own_have_no_place_on_all_chips():
    with pytest.raises(TypeError, match="shard"):
        tpukit.launch_each(work, [1], shard="fsdp")


def test_a_part_of_the_chips_is_refused():
    topology = lay_out(KAGGLE)
    with pytest.raises(
        ValueError, match="TPU_VISIBLE_CHIPS limits a process to a part of the chips"
    ):
        refuse_one_process_variables(topology, {"TPU_VISIBLE_CHIPS": "0"})


def test_spmd_that_an_earlier_cell_switched_on_is_refused_at_once(monkeypatch):
    with pytest.raises(RuntimeInUseError, match="xr.use_spmd") as refused:
        refuse_if_in_use(KAGGLE, {"XLA_USE_SPMD": "1"})
    assert 'launch(..., shard="fsdp")' in refused.value.fix
    refuse_if_in_use(KAGGLE, {"XLA_USE_SPMD": "0"})
    monkeypatch.setitem(os.environ, "XLA_USE_SPMD", "1")
    with pytest.raises(RuntimeInUseError):
        tpukit.launch(work, cores=1, backend="cpu", progress="off")


def test_every_backend_says_whether_it_can():
    sharded = {
        name: runtime.sharded for name, runtime in runtimes().items() if runtime.is_for_launch
    }
    assert {name: by for name, by in sharded.items() if by} == {
        "xla": "xla:sharded",
        "xla:simulator": "xla:simulator",
    }
    assert not runtimes()["xla:sharded"].is_for_launch
