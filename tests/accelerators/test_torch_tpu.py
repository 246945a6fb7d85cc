"""The TorchTPU backend: on CPU processes and gloo all but the chip; with the real package up to the chip itself."""

import copy
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.machines import KAGGLE
from torch import nn

import tpukit
from tpukit import WorkerError, launch
from tpukit.accelerators.torch_patches import correct_running_statistics
from tpukit.accelerators.torch_tpu import TorchTpu, TorchTpuCpu, TorchTpuProcess, TorchTpuRuntime
from tpukit.essentials.launcher.topology import choose_device, choose_topology

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks CPU processes")
ROOT = Path(__file__).parents[2]


def on(*, chips=8, generation="v5e", **packages):
    versions = {
        "python": "3.12.1",
        "torch": "2.15.0",
        "torch_xla": None,
        "torch_tpu": None,
    } | packages
    return replace(KAGGLE, platform="TPU VM", chips=chips, generation=generation, versions=versions)


def on_the_simulator(fn, *args, **options):
    return launch(fn, *args, backend="torch_tpu:cpu", cores=2, progress="off", **options)


@pytest.mark.parametrize(
    ("packages", "backend"),
    [
        ({"torch_tpu": "0.2.0"}, "torch_tpu"),
        ({"torch_xla": "2.9.0"}, "xla"),
        ({"torch_xla": "2.9.0", "torch_tpu": "0.2.0"}, "torch_tpu"),
        ({"torch_xla": "2.9.0", "torch_tpu": "0.2.0", "torch": "2.9.0+cpu"}, "xla"),
    ],
)
def test_on_a_tpu_the_package_that_is_installed_decides_and_of_both_the_one_for_this_torch(
    packages, backend
):
    machine = on(**packages)
    assert choose_topology(machine, None, None).backend == backend


def test_on_a_tpu_without_either_no_dry_run_starts_silently():
    with pytest.raises(ValueError, match="the xla backend needs torch_xla, which is not installed"):
        choose_topology(on(), None, None)


def test_asked_for_without_its_package_the_message_has_the_line_that_installs_it():
    with pytest.raises(
        ValueError, match=r"needs torch_tpu, which is not inst(.|\n)*fix:   pip install torch_tpu"
    ):
        choose_topology(on(torch_xla="2.9.0"), None, "torch_tpu")


@pytest.mark.parametrize(("generation", "cores"), [("v5e", 8), ("7x", 16)])
def test_every_device_of_a_chip_has_a_process(generation, cores):
    topology = choose_topology(on(generation=generation, torch_tpu="0.2.0"), None, None)
    assert (topology.cores, topology.processes, topology.is_dry_run) == (cores, cores, False)


@pytest.mark.parametrize(
    ("machine", "cores", "words"),
    [
        (on(torch_tpu="0.2.0"), 2, "cores=2 is not supported"),
        (on(torch_tpu="0.2.0", generation="v3"), None, "TorchTPU does not support v3"),
    ],
)
def test_what_it_cannot_do_is_refused_with_a_fix(machine, cores, words):
    with pytest.raises(ValueError, match=rf"{words}(.|\n)*found:(.|\n)*fix:"):
        choose_topology(machine, cores, "torch_tpu")


def test_the_evidence_names_the_cores_of_this_machine():
    with pytest.raises(ValueError, match="cores=3 is not supported") as refused:
        choose_topology(on(torch_tpu="0.2.0", chips=4), 3, "torch_tpu")
    assert refused.value.found == "4 v5e chips; TorchTPU has no layout for 3 of 4 cores"


def test_a_run_on_another_than_the_first_chip_is_refused_before_a_fork():
    topology = choose_device(on(torch_tpu="0.2.0"), 3, None, None)
    with pytest.raises(ValueError, match=r"device=3 is not supported(.|\n)*fix:   device=0"):
        TorchTpuRuntime().load(topology)


@pytest.mark.parametrize(
    ("torch_tpu", "backend"), [(None, "torch_tpu:cpu"), ("0.2.0", "torch_tpu:simulator")]
)
def test_without_a_chip_it_makes_a_dry_run(torch_tpu, backend):
    topology = choose_topology(on(chips=0, generation=None, torch_tpu=torch_tpu), 2, "torch_tpu")
    assert (topology.backend, topology.is_dry_run) == (backend, True)


def test_the_simulator_has_as_many_chips_as_torchtpu_has_a_layout_for():
    machine = on(chips=0, generation=None, torch_tpu="0.2.0")
    with pytest.raises(ValueError, match="TorchTPU runs on 1, 2, 4 or 8 chips, got 3"):
        choose_topology(machine, 3, "torch_tpu:simulator")


def test_a_kernel_that_has_torch_tpu_starts_no_workers_that_would_open_its_chips(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_tpu", None)
    for backend in ("cpu", "torch_tpu:cpu"):
        with pytest.raises(
            RuntimeError, match=r"imported torch_tpu(.|\n)*fix:   restart the kernel"
        ):
            launch(lambda core: core.rank, backend=backend, cores=1, progress="off")


NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_each_core_finds_in_its_environment_what_torchrun_would_set():
    def work(core):
        import torch.distributed as dist

        return (
            {name: os.environ[name] for name in NAMES},
            dist.get_rank(),
            dist.get_backend(),
            str(core.device),
        )

    before = dict(os.environ)
    found = on_the_simulator(work).results
    for rank, (environ, told, transport, device) in enumerate(found):
        sizes = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
        assert sizes.items() <= environ.items()
        assert (environ["MASTER_ADDR"], told, transport, device) == (
            "127.0.0.1",
            rank,
            "gloo",
            "cpu",
        )
    assert int(found[0][0]["MASTER_PORT"]) == int(found[1][0]["MASTER_PORT"]) > 0
    assert dict(os.environ) == before


def test_addresses_of_another_number_of_processes_are_refused(monkeypatch):
    monkeypatch.setenv(
        "TORCH_TPU_SLICEBUILDER_ADDRESSES", "localhost:1,localhost:2,localhost:3,localhost:4"
    )
    with pytest.raises(WorkerError, match="names 4 processes, and this run has 2") as caught:
        on_the_simulator(lambda core: core.rank)
    exec(
        str(caught.value).partition("fix:   ")[2].partition("\n")[0], {"os": os}
    )  # as the fix says
    assert on_the_simulator(lambda core: core.rank).results == [0, 1]


def test_every_collective_gives_the_numbers_of_the_cpu_backend():
    def work(core):
        found = []
        for dtype in (torch.float32, torch.float64, torch.int64):
            value = torch.arange(3, dtype=dtype) * (core.rank + 1) - core.rank
            found += [core.all_reduce(value, op).tolist() for op in ("sum", "mean", "min", "max")]
            found.append(core.gather(value).tolist())
        tensors = [torch.full((2,), float(core.rank)), torch.full((600, 600), float(core.rank))]
        core.backend.broadcast(tensors)
        core.barrier()
        return found, [tensor.unique().tolist() for tensor in tensors], core.mean(core.rank)

    assert (
        on_the_simulator(work).results
        == launch(work, backend="cpu", cores=2, progress="off").results
    )


class Handle(torch.Tensor):
    """As on TorchTPU, whose addresses are those of handles: one of a part of a tensor may be another tensor's."""

    def data_ptr(self):
        return 7


def test_an_average_reaches_every_tensor_whatever_their_addresses_are():
    def work(core):
        tensors = [
            torch.full((size,), float(core.rank)).as_subclass(Handle) for size in (3, 2, 400_000)
        ]
        core.backend.average(tensors)
        return [tensor.unique().tolist() for tensor in tensors]

    assert on_the_simulator(work).results == [[[0.5]] * 3] * 2


def train(core):
    torch.manual_seed(0)
    model = core.model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    batches = core.batches(data, batch_size=8, shuffle=True, drop_last=True)
    history = tpukit.fit(core, model, optimizer, nn.functional.mse_loss, batches, epochs=2)
    return [row["train_loss"] for row in history.epochs], model.state_dict()


def test_a_training_is_that_of_the_cpu_backend_to_the_bit():
    (losses, weights), other = on_the_simulator(train).results
    (expected, theirs), _ = launch(train, backend="cpu", cores=2, progress="off").results
    assert losses == expected == other[0]
    assert losses[-1] < losses[0]
    assert all(torch.equal(weights[name], theirs[name]) for name in theirs)


def test_running_statistics_are_updated_as_pytorch_updates_them(monkeypatch):
    for function in ("batch_norm", "instance_norm"):
        monkeypatch.setattr(torch, function, getattr(torch, function))  # put back after this test
    torch.manual_seed(0)
    batch, instance = (
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        (nn.InstanceNorm1d, nn.InstanceNorm3d),
    )
    others = [{}, {"momentum": None}, {"momentum": 0.3, "affine": False}]
    plain = [layer(4, **more) for layer, more in zip(batch, others, strict=True)]
    plain += [layer(4, track_running_stats=True) for layer in instance]
    plain.append(nn.BatchNorm1d(4, dtype=torch.float64))
    ours = copy.deepcopy(plain)
    frozen = nn.BatchNorm1d(4, track_running_stats=False)
    inputs = [torch.randn(6, 4, *[5] * axes) * 3 + 2 for axes in (0, 2, 3, 1, 3)]
    inputs.append(inputs[0].double() + 1e9)  # as float32 all of them are the same
    expected = [layer(layer(x)) for layer, x in zip(plain, inputs, strict=True)]
    correct_running_statistics.__wrapped__("cpu")
    found = [layer(layer(x)) for layer, x in zip(ours, inputs, strict=True)]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert frozen(inputs[0]).shape == (6, 4)
    for one, other in zip(ours, plain, strict=True):
        assert one.running_mean.allclose(other.running_mean)
        assert one.running_var.allclose(other.running_var)
        assert one.num_batches_tracked == other.num_batches_tracked


def test_a_core_that_raises_is_named():
    def work(core):
        if core.rank == 1:
            raise KeyError("labels")
        core.barrier()

    with pytest.raises(WorkerError, match="core 1 of 2 raised KeyError: 'labels'"):
        on_the_simulator(work)


def test_a_dry_run_executes_the_code_of_a_chip():
    shared = {
        "all_reduce",
        "gather",
        "broadcast",
        "average",
        "barrier",
        "take_environment",
        "_for_collectives",
    }
    for backend in (TorchTpu, TorchTpuCpu):
        assert issubclass(backend, TorchTpuProcess)
        assert not shared & set(vars(backend))


@pytest.fixture
def package():
    if TorchTpuRuntime().is_started() or tpukit.machine_info().versions["torch_tpu"] is None:
        pytest.skip(
            "torch_tpu is not installed: make torchtpu has it, in an environment of its own"
        )


def with_the_package(code):
    """Run code in a fresh process on which torch_tpu sees one v5e chip, and return what it printed."""
    given = f"""
        import os, sys, warnings
        warnings.simplefilter("ignore")
        import torch, torch_tpu, tpukit
        from dataclasses import replace
        from tpukit.essentials.environment import MachineInfo
        from torch_tpu._internal.utils import hardware
        hardware._scan_pci_tpus = lambda: (1, hardware._V5E_TOPOLOGY)
        machine = replace(tpukit.machine_info(), chips=1, generation="v5e")
    {textwrap.indent(textwrap.dedent(code), "        ")}
    """
    prepared = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(ROOT)}
    alone = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }  # asks no network
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(given)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **prepared, **alone, "TPU_ACCELERATOR_TYPE": "v5litepod-1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def test_without_a_chip_the_package_is_not_asked_for_a_tensor(package):
    code = """
        import tpukit
        from tpukit.accelerators.torch_tpu import TorchTpuRuntime, load_torch_tpu
        try:
            load_torch_tpu()
        except RuntimeError as error:
            print(error)
        print("started", TorchTpuRuntime().is_started())
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert "TorchTPU finds no chip that it can open\n  found: torch_tpu" in done.stdout, done.stderr
    assert "started False" in done.stdout


def test_the_packages_own_launch_environment_reaches_a_worker_and_leaves_the_kernel_as_it_was(
    package,
):
    said = with_the_package("""
        from tpukit.essentials.backends import runtimes
        from tpukit.accelerators.torch_tpu import TorchTpu, TorchTpuRuntime

        class WithoutDevice(TorchTpu):  # all of a chip's own way but the chip
            transport = "gloo"
            in_graph = False

            def open_device(self):
                print("DEVICE", super().open_device(), torch.tpu._is_in_bad_fork(), flush=True)
                return torch.device("cpu")

            def seed(self, seed):
                pass

        runtimes()["torch_tpu"] = type("Runtime", (TorchTpuRuntime,), {"backend": WithoutDevice})()
        before = dict(os.environ)

        def work(core):
            return {name: value for name, value in os.environ.items() if name.startswith("TORCH_TPU_")}, core.mean(2.0)

        MachineInfo.read = lambda: machine
        run = tpukit.launch(work, progress="text")
        (environ, mean), = run.results
        print("RUN", run.device, mean, sorted(environ), environ["TORCH_TPU_TOPOLOGY"])
        print("KERNEL", dict(os.environ) == before, TorchTpuRuntime().is_started())
    """)
    assert "DEVICE tpu:0 False" in said
    names = (
        "['TORCH_TPU_SLICEBUILDER_ADDRESSES', 'TORCH_TPU_TOPOLOGY', 'TORCH_TPU_XPROF_SESSION_ID']"
    )
    assert f"RUN TPU v5e core by TorchTPU 2.0 {names} 1,1,1" in said
    assert "KERNEL True False" in said


def test_a_forked_worker_gets_as_far_as_libtpu_that_finds_no_chip(package):
    said = with_the_package("""
        try:
            MachineInfo.read = lambda: machine
            tpukit.launch(lambda core: core.rank, timeout=600)
        except tpukit.WorkerError as error:
            print("FAILED", error)
        print("KERNEL", torch.tpu.is_initialized())
    """)
    assert "FAILED core 0 of 1 could not start its device" in said
    assert (
        "TPU initialization failed: No jellyfish device found" in said
    )  # libtpu's own words for "no chip"
    assert "KERNEL False" in said
