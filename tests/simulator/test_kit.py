"""tpukit on simulated machines: the code that a TPU would run, from `launch` to a resumed `fit`."""

import copy
import errno
import functools
import importlib.metadata
import itertools
import multiprocessing
import os
import re
import signal
import time

import pytest
import torch
from helpers.launching import DTYPES
from helpers.workers import Branches, Pairs, Tied, small_net
from simulator.machine import machines, played
from torch import nn

import tpukit
from tpukit import FitOptions, WorkerError, evaluate, fit, launch
from tpukit.essentials.environment import chip_holders as chips
from tpukit.essentials.environment.platforms import Machine
from tpukit.profiling import graph_text
from tpukit.simulator import shapes

# torch_xla 2.8 ends the process where an error on the device is read; 2.9 raises it.
RAISED = "was killed by SIGABRT" if importlib.metadata.version("torch_xla") < "2.9" else "raised"
CORES = {shape.name: shape.chips * shape.cores for shape in shapes.SHAPES.values()}
EVERY_MACHINE = pytest.mark.parametrize("machine", machines(shapes.SHAPES))
# Of the rows of a history: differ from run to run.
_TIMES = {"seconds", "samples_per_second", "tflops_per_second", "mfu"}

pytestmark = [
    pytest.mark.usefixtures("library"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning"
    ),  # torch_xla's, in its own calls of its own old names
]


def on(shape, fn, *args, environ=None, **options):
    """Launch on a machine as its user would."""
    with played(shape, **(environ or {})):
        return launch(fn, *args, progress="off", **options)


def everything(core):
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    mine = torch.arange(3, device=core.device) + core.rank
    return {
        "rank": (core.rank, xr.global_ordinal(), xr.world_size(), xm.xla_device_hw(core.device)),
        **{op: core.all_reduce(mine.float(), op) for op in ("sum", "mean", "min", "max")},
        "max of int64": core.all_reduce(mine, "max"),
        "gather": core.gather(mine),
        "mean of a number": core.mean(core.rank),
    }


@pytest.mark.soak
@EVERY_MACHINE
def test_launches_in_a_row_give_every_core_its_results(machine, how_often):
    shape = shapes.SHAPES[machine]
    world = CORES[shape.name]
    every = torch.stack([torch.arange(3) + rank for rank in range(world)])
    for _ in range(how_often(2, 5)):
        results = on(shape, everything).results
        for rank, result in enumerate(results):
            assert result["rank"] == (rank, rank, world, "TPU")
            assert result["sum"].tolist() == every.sum(0).tolist()
            assert result["mean"].tolist() == pytest.approx(every.float().mean(0).tolist())
            assert result["min"].tolist() == every.amin(0).tolist()
            assert (
                result["max"].tolist() == result["max of int64"].tolist() == every.amax(0).tolist()
            )
            assert result["gather"].tolist() == every.reshape(-1).tolist()
            assert result["mean of a number"] == (world - 1) / 2


@EVERY_MACHINE
def test_one_core_alone_is_a_run_too(machine):
    shape = shapes.SHAPES[machine]
    (result,) = on(shape, everything, cores=1).results
    assert result["rank"][:3] == (0, 0, 1)


def test_ranks_may_come_in_another_order_than_processes(capsys):
    def work(core):
        core.barrier()
        os.write(1, f"this is {core.rank}\n".encode())
        return everything(core)

    run = on(shapes.SHAPES["v4-8"], work, environ={"SIMULATOR_ORDER": "3,2,1,0"})
    assert [result["rank"][0] for result in run.results] == [0, 1, 2, 3]
    said = sorted(line for line in capsys.readouterr().out.splitlines() if "this is" in line)
    assert said == [f"[core {rank}] this is {rank}" for rank in range(4)]


def test_chips_that_are_busy_at_first_are_said_to_be_and_the_next_launch_works():
    shape = shapes.SHAPES["v4-8"]
    with pytest.raises(WorkerError, match="(?i)busy") as failed:
        on(shape, everything, environ={"SIMULATOR_BUSY_UNTIL": str(time.time() + 600)})
    assert re.match(r"core \d of 4 could not start its device: ", str(failed.value))
    assert "because chips stay busy for some seconds" in str(failed.value)
    assert len(on(shape, everything).results) == 4


@pytest.mark.parametrize("device", [None, 0])
def test_chips_that_are_busy_are_waited_for_before_anything_is_forked(
    device, monkeypatch, tmp_path, capsys
):
    node, free = tmp_path / "accel0", None
    node.touch()

    def open_node(path, flags):
        nonlocal free
        free = free or time.monotonic() + 2  # after the first look
        if time.monotonic() < free:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        return os.open(path, flags)

    wait = functools.partial(
        chips.wait_for_chips, machine=Machine(dev=tmp_path, open_node=open_node)
    )
    monkeypatch.setattr("tpukit.essentials.launcher.launcher.wait_for_chips", wait)
    run = on(shapes.SHAPES["colab v5e-1"], lambda core: time.monotonic(), device=device)
    assert run.results[0] > free
    assert (
        f"waiting for 1 of 1 chips to become free, 60 s at most: {node} by no process"
        in capsys.readouterr().out
    )
    if device is not None:
        return
    monkeypatch.setattr(
        "tpukit.essentials.launcher.launcher.wait_for_chips", functools.partial(wait, seconds=0.5)
    )
    free = float("inf")
    with pytest.raises(
        tpukit.essentials.environment.DeviceBusyError, match="1 of 1 chips are still busy"
    ):
        on(shapes.SHAPES["colab v5e-1"], everything)
    assert multiprocessing.active_children() == []


def test_max_and_min_are_right_for_every_dtype_and_use_what_the_tpus_compiler_can_lower():
    """It has no all-reduce of s64 and f64 but the sum: "Supported lowering only of Sum all reduce"."""

    def work(core):
        values, found = torch.tensor([[core.rank, 1 - core.rank, 5]]), {}
        for dtype in DTYPES:
            for op in ("max", "min"):
                tensor = core.all_reduce(values.to(dtype).to(core.device), op)
                found[dtype, op] = graph_text([tensor]), tensor.cpu()
        return found

    expected = {"max": [[1, 1, 5]], "min": [[0, 0, 5]]}
    for result in launch(work, cores=2, backend="xla:simulator", progress="off").results:
        for (dtype, op), (graph, tensor) in result.items():
            assert tensor.dtype == dtype
            assert tensor.tolist() == torch.tensor(expected[op]).to(dtype).tolist()
            assert (
                "all-reduce(" in graph
            )  # also a gather is one, a sum of what is 0 in all places but one's own
            assert not re.search(r"[sf]64\[.* all-reduce\(.*to_apply=%M(ax|in)", graph)


def one_step(core):
    with core.step():
        return core.all_reduce(torch.ones(2, device=core.device))


def raises(core):
    one_step(core)
    if core.rank == core.world_size - 1:
        raise KeyError("a")
    core.barrier()


def is_killed(core):
    one_step(core).tolist()
    if core.rank == core.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    one_step(core).tolist()


def leaves_early(core):
    for _ in range(2 if core.rank else 3):
        one_step(core).tolist()


def sleeps(core):
    one_step(core).tolist()
    if core.rank == 1:
        time.sleep(900)
    one_step(core)
    one_step(core).tolist()


def another_shape(core):
    core.all_reduce(torch.ones(2 + core.rank, device=core.device)).tolist()


FAILURES = {
    "an exception": (raises, r"core {last} of {world} raised KeyError: 'a'"),
    "a killed core": (is_killed, r"core {last} of {world} was killed by SIGKILL"),
    "a core that leaves early": (
        leaves_early,
        r"core \d of {world} (returned while|raised .*has not come)",
    ),
    "a core that sleeps": (sleeps, r"core \d of {world} (has not moved|raised .*has not come)"),
    "another shape": (another_shape, rf"core \d of {{world}} {RAISED}"),
}


@pytest.mark.parametrize("machine", ["v4-8", pytest.param("v3-8", marks=pytest.mark.every_machine)])
@pytest.mark.parametrize("work", FAILURES)
def test_a_failure_is_named_and_the_next_launch_works(machine, work):
    shape = shapes.SHAPES[machine]
    fn, message = FAILURES[work]
    if shape.cores == 2 and fn is is_killed:
        message = (
            r"core \d of {world} was killed by SIGKILL"  # its chip's other core is killed with it
        )
    world = CORES[shape.name]
    with pytest.raises(WorkerError, match=message.format(last=world - 1, world=world)):
        on(shape, fn, limits=tpukit.Limits(stall=3.0, heartbeat=0.3), timeout=600)
    assert len(on(shape, lambda core: core.mean(core.rank)).results) == world


def test_an_interrupt_ends_the_run_and_the_next_launch_works():
    shape = shapes.SHAPES["v4-8"]

    def work(core):
        one_step(core).tolist()
        if core.is_main:
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(900)

    with pytest.raises(tpukit.LaunchInterrupted):
        on(shape, work)
    assert len(on(shape, one_step).results) == 4


def test_shared_weights_stay_one_and_parameters_that_no_core_uses_are_left_alone():
    def work(core):
        tied, branches = core.model(Tied()), core.model(Branches())
        optimizer = torch.optim.AdamW(
            [*tied.parameters(), *branches.parameters()], lr=0.1, weight_decay=0.5
        )
        words = torch.arange(11, device=core.device)
        inputs = torch.ones(4, 3, device=core.device) + core.rank
        layers, compiles = [branches.a] * 3 + [branches.b] * 3, []
        for layer in layers:
            with core.step():
                loss = (
                    nn.functional.cross_entropy(tied(words), words.flip(0))
                    + layer(inputs).square().mean()
                )
                loss.backward()
                core.optimizer_step(optimizer)
            compiles.append(core.backend.compiles()[0])
        return (
            len(list(tied.parameters())),
            compiles,
            core.to_host([tied.state_dict(), branches.state_dict()]),
        )

    results = on(shapes.SHAPES["v4-8"], work).results
    for count, compiles, (tied, branches) in results:
        assert count == 3
        assert torch.equal(tied["head.weight"], tied["embed.weight"])
        assert torch.equal(branches["unused.weight"], Branches().unused.weight)
        assert not torch.equal(branches["b.weight"], Branches().b.weight)
        assert compiles[2] - compiles[1] == compiles[5] - compiles[4] == 0
        assert torch.equal(branches["a.weight"], results[0][2][1]["a.weight"])


def train(core, network, folder=None, epochs=2):
    model = core.model(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches = core.batches(Pairs(), batch_size=64 // core.world_size, shuffle=True, drop_last=True)
    valid = core.batches(Pairs(37), batch_size=8)
    criterion = nn.functional.mse_loss
    history = fit(
        core,
        model,
        optimizer,
        criterion,
        batches,
        valid,
        epochs=epochs,
        checkpoints=folder,
        options=FitOptions(log_every=1),
    )
    found = evaluate(core, model, criterion, valid)
    return {
        "epochs": [
            {name: row[name] for name in row if name not in _TIMES} for row in history.epochs
        ],
        "state": core.to_host(model.state_dict()),
        "loss": found.loss,
        "outputs": found.outputs,
        "report": tpukit.profiling.report(core, batches),
    }


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.every_machine
def test_cores_that_share_a_process_are_said_to_share_random_numbers(capsys):
    on(shapes.SHAPES["v3-8"], lambda core: core.rank)
    assert "cores that share a chip share the host's random numbers" in capsys.readouterr().out
    on(shapes.SHAPES["colab v5e-1"], lambda core: core.rank)
    assert "share" not in capsys.readouterr().out


@pytest.mark.parametrize("machine", machines(shapes.SHAPES, only_soak=("kaggle v5e-8",)))
def test_fit_trains_evaluates_and_resumes_to_the_last_bit(machine, tmp_path):
    shape = shapes.SHAPES[machine]
    network = small_net(
        True
    )  # made here: on a v3, two cores would draw its weights from one generator
    whole = on(shape, train, network).results
    on(shape, train, network, tmp_path, 1)
    resumed = on(shape, train, network, tmp_path, 2).results
    first = whole[0]
    for result in [*whole, *resumed]:
        assert same(result["state"], first["state"])  # on all ranks, resumed or not
        assert result["epochs"] == first["epochs"]
    data, model = Pairs(37), small_net(True)
    model.load_state_dict(first["state"])
    with torch.no_grad():
        expected = model.eval()(data.images)
    assert torch.allclose(first["outputs"], expected, atol=1e-5)
    assert first["loss"] == pytest.approx(
        nn.functional.mse_loss(expected, data.targets).item(), rel=1e-5
    )
    findings = {finding.name: finding for finding in first["report"].findings}
    assert findings["fallbacks"].state == "ok"


@EVERY_MACHINE
def test_named_inputs_streamed_metrics_and_a_hook_work_and_no_step_is_compiled_again(
    machine, capsys
):
    from torchmetrics.regression import MeanSquaredError

    class Net(nn.Linear):  # without buffers: there is nothing to average before an evaluation
        def forward(self, x):
            return {"y": super().forward(x)}

    class Error(MeanSquaredError):
        def update(self, outputs, targets):
            super().update(outputs["y"], targets)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32 * CORES[machine], 4, generator=generator)
    data = [{"x": row, "labels": row[:2]} for row in x]
    valid = torch.utils.data.Subset(data, range(4 * CORES[machine] + 3))

    def criterion(outputs, targets):
        return nn.functional.mse_loss(outputs["y"], targets)

    def work(core):
        torch.manual_seed(0)
        model = core.model(Net(4, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        batches = core.batches(data, batch_size=4, shuffle=True, drop_last=True)
        valid_batches = core.batches(valid, batch_size=4)
        history = fit(
            core,
            model,
            optimizer,
            criterion,
            batches,
            valid_batches,
            epochs=2,
            metrics={"error": Error()},
            options=FitOptions(keep_outputs=False, on_epoch_end=lambda history: None),
        )
        found = evaluate(core, model, criterion, valid_batches)
        return (
            history.epochs,
            found.loss,
            tpukit.predict(core, model, valid_batches),
            model.state_dict(),
        )

    for epochs, loss, outputs, state in on(shapes.SHAPES[machine], work).results:
        expected = nn.functional.linear(x[: len(valid)], state["weight"], state["bias"])
        assert torch.allclose(outputs["y"], expected, atol=1e-5)
        assert loss == pytest.approx(
            nn.functional.mse_loss(expected, x[: len(valid), :2]).item(), rel=1e-5
        )
        assert epochs[-1]["valid_error"] == pytest.approx(epochs[-1]["valid_loss"], rel=1e-5)
        assert epochs[-1]["valid_loss"] == pytest.approx(loss, rel=1e-5)
    assert "compiled again" not in capsys.readouterr().out


def test_gradients_of_several_batches_stay_averaged_where_the_optimizer_keeps_them():
    x = torch.arange(24.0).reshape(2, 2, 6) / 24  # of each core, two batches of one sample

    def work(core):
        model = core.model(nn.Linear(6, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        (mine,) = core.to_device([x[core.rank % 2]])
        for _ in range(3):
            with core.step():
                for row in mine:
                    model(row[None]).square().sum().backward()
                core.optimizer_step(optimizer)
        return [optimizer.state[one]["momentum_buffer"] for one in model.parameters()]

    first, second = launch(work, cores=2, backend="xla:simulator", seed=0, progress="off").results
    assert all(map(torch.equal, first, second))


def ten_steps(core, batch_size, size=32):
    """Ten steps of the walkthrough's model, as notebook 05 takes them but for its size and its BatchNorm."""
    from tpukit import pe

    torch.manual_seed(0)
    network = pe.resnet34()
    for name, layer in list(network.named_modules()):
        if isinstance(
            layer, nn.BatchNorm2d
        ):  # which normalises each core's own share, here as on chips
            owner, _, own = name.rpartition(".")
            setattr(network.get_submodule(owner), own, nn.GroupNorm(8, layer.num_features))
    model = core.model(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (80, 3, size, size), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 2, (80, 10), generator=generator).float()
    data = torch.utils.data.TensorDataset(images, labels)
    batches = core.batches(data, batch_size=batch_size, shuffle=True, drop_last=True)
    for inputs, targets in itertools.islice(itertools.chain(batches, batches), 10):
        with core.step():
            loss = nn.functional.binary_cross_entropy_with_logits(
                model(pe.normalize(inputs)), targets
            )
            loss.backward()
            core.optimizer_step(optimizer)
    return core.to_host(model.state_dict())


@pytest.mark.every_machine
@pytest.mark.parametrize("cores", [8, 2])
def test_ten_steps_of_the_walkthroughs_model_are_one_process_with_the_joined_batch(cores):
    """Every core compiles a ResNet-34 for itself, which takes minutes on two processors: `make simulator` runs it."""
    options = {"backend": "xla:simulator", "progress": "off", "limits": tpukit.Limits(stall=None)}
    results = launch(ten_steps, 8 // cores, cores=cores, **options).results
    assert all(same(results[0], result) for result in results[1:])
    (alone,) = launch(ten_steps, 8, cores=1, backend="cpu", progress="off").results
    for name, value in alone.items():
        assert torch.allclose(value, results[0][name], atol=2e-4), name


def test_a_trace_is_written(tmp_path):
    def work(core):
        with tpukit.profiling.profile(core, tmp_path) as recording:
            for _ in range(3):
                one_step(core)
        return [file.stat().st_size for file in recording.files]

    sizes = on(shapes.SHAPES["colab v5e-1"], work).results[0]
    assert sizes
    assert min(sizes) > 0


def strangers(core):
    """What a user's own torch_xla code does, beside tpukit."""
    import torch.distributed as dist
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.xla_backend  # noqa: F401
    import torch_xla.runtime as xr

    one = torch.full((2,), float(xr.global_ordinal()), device="xla")
    gathered = xm.all_gather(one).tolist()
    reduced = xm.mesh_reduce("sum", xr.global_ordinal(), sum)
    weight = nn.Parameter(torch.zeros(2, device="xla"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    (weight * (xr.global_ordinal() + 1)).sum().backward()
    xm.optimizer_step(optimizer, barrier=True)
    dist.init_process_group("xla", init_method="xla://")
    total = torch.ones(1, device="xla") * dist.get_rank()
    dist.all_reduce(total)
    return gathered, reduced, weight.tolist(), total.tolist(), dist.get_world_size()


def test_a_strangers_torch_xla_code_gives_the_right_numbers():
    for gathered, reduced, weight, total, world in launch(
        strangers, cores=2, backend="xla:simulator", progress="off"
    ).results:
        assert gathered == [0, 0, 1, 1]
        assert reduced == 1
        assert weight == [-1.5, -1.5]
        assert (total, world) == ([1.0], 2)


def test_a_strangers_loop_with_its_loader_and_its_model_wrapper_trains_as_under_xmp_spawn():
    from torch_xla.distributed.xla_multiprocessing import MpModelWrapper

    wrapped, x = MpModelWrapper(nn.Linear(4, 1)), torch.linspace(-1, 1, 128).reshape(32, 4)
    alone = copy.deepcopy(wrapped._model)

    def work(core):
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.distributed.parallel_loader as pl
        import torch_xla.runtime as xr

        device, model = torch_xla.device(), wrapped.to(torch_xla.device())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.utils.data.TensorDataset(x, x[:, :1])
        sampler = torch.utils.data.DistributedSampler(
            data, xr.world_size(), xr.global_ordinal(), shuffle=False
        )
        loader, losses = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler), []
        for batches in (
            pl.MpDeviceLoader(loader, device),
            pl.ParallelLoader(loader, [device]).per_device_loader(device),
        ):
            for inputs, targets in batches:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                xm.optimizer_step(optimizer)
                losses.append(loss.detach())
        mean = xm.mesh_reduce("loss", torch.stack(losses).cpu(), lambda them: sum(them) / len(them))
        return model.weight.detach().cpu(), mean

    (one, mean), (two, other) = launch(
        work, cores=2, backend="xla:simulator", progress="off"
    ).results
    assert torch.equal(one, two)
    assert torch.equal(mean, other)
    optimizer, losses = torch.optim.SGD(alone.parameters(), lr=0.1), []
    for _ in range(2):
        for start in (0, 16):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(alone(x[start : start + 16]), x[start : start + 16, :1])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    assert torch.allclose(one, alone.weight.detach(), atol=1e-5)
    assert torch.allclose(mean, torch.stack(losses), atol=1e-5)


def test_ddp_of_a_strangers_trains_as_one_process_with_the_joined_batch():
    def work(core):
        import torch.distributed as dist
        import torch_xla
        import torch_xla.distributed.xla_backend  # noqa: F401
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("xla", init_method="xla://")
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(3, 2).to("xla"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.arange(12.0).reshape(4, 3)[2 * core.rank : 2 * core.rank + 2].to("xla")
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            torch_xla.sync()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    results = launch(work, cores=2, backend="xla:simulator", progress="off").results
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(12.0).reshape(4, 3)).square().mean().backward()
        optimizer.step()
    for result in results:
        for own, expected in zip(result, model.parameters(), strict=True):
            assert torch.allclose(own, expected, atol=1e-4)


def test_xla_uses_the_simulator_if_it_is_installed_and_prints_so(capsys):
    run = launch(functools.partial(everything), cores=2, backend="xla", progress="text")
    assert run.results[1]["rank"] == (1, 1, 2, "TPU")
    assert "torch_xla sees TPU chips of a simulated libtpu" in capsys.readouterr().out


def test_xla_uses_gloo_without_the_simulator_and_prints_so(monkeypatch, capsys):
    monkeypatch.setattr("tpukit.simulator.runtime.why_not", lambda: "no C compiler is here")
    launch(lambda core: core.rank, cores=2, backend="xla", progress="text")
    assert "gloo joins them, torch_xla's own collectives do not" in capsys.readouterr().out


def test_nothing_is_left_in_shared_memory_by_a_run_that_was_killed():
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(WorkerError):
        launch(is_killed, cores=2, backend="xla:simulator", progress="off")
    assert set(os.listdir("/dev/shm")) <= before


def its_chip(core, config):
    import torch_xla.runtime as xr

    variables = ("TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS")
    time.sleep(0.5)
    return {
        "chip": [os.environ[name] for name in variables],
        "cores": (core.world_size, xr.world_size(), xr.global_ordinal()),
        "sum": core.all_reduce(torch.ones(2, device=core.device) * config),
    }


@EVERY_MACHINE
def test_each_job_has_a_chip_of_its_own(machine):
    shape = shapes.SHAPES[machine]
    with played(shape):
        jobs = tpukit.launch_each(its_chip, range(shape.chips + 1), progress="off")
    assert not jobs.failures, jobs
    assert [result["cores"] for result in jobs.results] == [(1, 1, 0)] * (shape.chips + 1)
    assert [result["sum"].tolist() for result in jobs.results] == [
        [n, n] for n in range(shape.chips + 1)
    ]
    used = [result["chip"] for result in jobs.results]
    assert used[: shape.chips] == [[str(chip), "1,1,1", "1,1,1"] for chip in range(shape.chips)]


def test_a_run_on_one_chosen_chip_has_that_one():
    shape = shapes.SHAPES["kaggle v5e-8"]
    run = on(shape, its_chip, 3, device=5)
    assert run.results[0]["chip"] == ["5", "1,1,1", "1,1,1"]
    assert run.results[0]["cores"] == (1, 1, 0)


def test_a_job_waits_for_a_chip_that_is_busy_with_the_job_before(capsys):
    with played(shapes.SHAPES["kaggle v5e-8"], SIMULATOR_BUSY_UNTIL=str(int(time.time()) + 25)):
        jobs = tpukit.launch_each(its_chip, [1, 2], cores=2, progress="off")
    assert not jobs.failures, jobs
    assert jobs.seconds > 3
    assert (
        capsys.readouterr().out.count(
            "[job 0] its chip does not start, it may be busy; trying for 60 s"
        )
        == 1
    )


def test_a_job_whose_chip_stays_busy_is_told_to_be(monkeypatch):
    monkeypatch.setattr("tpukit.training.jobs._BUSY_SECONDS", 4.0)
    with played(shapes.SHAPES["colab v5e-1"], SIMULATOR_BUSY_UNTIL=str(int(time.time()) + 600)):
        jobs = tpukit.launch_each(its_chip, [1], progress="off")
    assert "chips stay busy for some seconds" in str(jobs.failures[0])
