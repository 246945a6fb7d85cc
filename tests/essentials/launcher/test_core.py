import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy
import pytest
import torch
from helpers.launching import DRY_RUNS, DTYPES, quietly
from helpers.workers import Branches, Pairs, Tied, small_net, train, train_in_shares, weights

from tpukit import WorkerError
from tpukit.essentials.backends.protocol import Backend
from tpukit.essentials.data.batches import Batches
from tpukit.essentials.launcher.core import Core
from tpukit.essentials.launcher.core_internal import CoreInternal
from tpukit.essentials.launcher.difference import OutOfSyncError
from tpukit.simulator.runtime import why_not
from tpukit.training import launch_each

SIMULATED = [pytest.mark.xla, pytest.mark.skipif(bool(why_not()), reason=why_not() or "")]


def distance(first: dict, second: dict) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize("backend", DRY_RUNS)
@pytest.mark.parametrize("norm", [False, True], ids=["no norm", "BatchNorm"])
def test_after_ten_steps_the_weights_agree_across_ranks_to_the_last_bit(backend, norm):
    first, second = quietly(train, norm, 8, backend=backend).results
    assert all(
        torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"]
    )
    assert distance(first["weights"], weights(small_net(norm))) > 0.01  # they did move


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_two_cores_train_as_one_with_the_joined_batch(backend):
    two = quietly(train, False, 8, backend=backend).results[0]
    one = quietly(train, False, 16, backend=backend, cores=1).results[0]
    assert distance(two["weights"], one["weights"]) < 1e-6
    assert torch.stack(two["losses"]).tolist() == pytest.approx(
        torch.stack(one["losses"]).tolist(), abs=1e-6
    )


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_batchnorm_sees_its_cores_share_and_nothing_else_differs(backend):
    first, second = quietly(train, True, 8, backend=backend).results
    joined = quietly(train, True, 16, backend=backend, cores=1).results[0]
    in_shares = train_in_shares(True, 8, 2)
    # A batch normalised in two shares is not the batch normalised at once, so the joined batch trains elsewhere...
    assert distance(first["weights"], joined["weights"]) > 1e-3
    # ...while one process that normalises share by share gets the same weights...
    assert distance(first["weights"], in_shares["weights"]) < 1e-4
    # ...and each core keeps the running statistics of what it saw.
    assert distance(first["buffers"], second["buffers"]) > 1e-3


def test_the_public_names_of_a_core_are_for_worker_functions():
    """Everything that only tpukit calls is behind `core.internal`, so that the reference does not list it."""
    core = Core(Sharing(0), lambda message: None)
    assert isinstance(core.internal, CoreInternal)
    names = {name for name in dir(core) if not name.startswith("_")}
    collectives = {
        "all_reduce",
        "average_buffers",
        "average_gradients",
        "barrier",
        "gather",
        "init_process_group",
        "mean",
    }
    training = {
        "batches",
        "counting_flops",
        "model",
        "optimizer_step",
        "same_seed",
        "save",
        "seed",
        "step",
        "sync",
        "to_device",
        "to_host",
    }
    output = {"flush", "log", "print", "progress"}
    facts = {
        "backend",
        "chips",
        "device",
        "hosts",
        "is_main",
        "mfu",
        "peak_tflops",
        "rank",
        "seconds",
        "state",
        "step_seconds",
        "tflops_per_second",
        "world_size",
    }
    assert names == collectives | training | output | facts | {"internal"}


def test_average_buffers_gives_every_core_the_mean_of_the_running_statistics():
    def work(core):
        model = core.model(small_net(True))
        for images, _ in core.batches(Pairs(), batch_size=8):
            model(images)
        before = model[1].running_mean.clone()
        core.average_buffers(model)
        return before, model[1].running_mean, model[1].num_batches_tracked

    (before0, after0, count), (before1, after1, _) = quietly(work).results
    assert torch.equal(after0, after1)
    assert torch.allclose(after0, (before0 + before1) / 2)
    assert count == 4  # whole numbers are left alone


def test_model_gives_every_core_rank_0s_weights_and_buffers():
    def work(core):
        model = small_net(True)
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.fill_(core.rank + 1)
        return {
            name: float(tensor.float().mean())
            for name, tensor in core.model(model).state_dict().items()
        }

    first, second = quietly(work).results
    assert set(first.values()) == set(second.values()) == {1.0}


def test_a_model_that_holds_what_cannot_be_copied_is_moved_itself_as_the_fix_says():
    def work(core):
        model = torch.nn.Linear(2, 2)
        model.lock = threading.Lock()
        with pytest.raises(TypeError, match=r"lock.*\n  fix: .*in_place=True"):
            core.model(model)
        return core.model(model, in_place=True) is model

    assert quietly(work).results == [True, True]


def test_a_model_that_holds_a_list_of_computed_tensors_names_the_fix():
    def work(core):
        model = torch.nn.Linear(2, 2)
        model.history = [model.weight * 2]  # as a forward pass in the notebook may leave behind
        with pytest.raises(TypeError, match=r"cannot be copied(.|\n)*in_place=True"):
            core.model(model)
        return core.model(model, in_place=True) is model

    assert quietly(work).results == [True, True]


def test_optimizer_step_clears_the_gradients_and_leaves_unused_parameters_alone():
    def work(core):
        used, unused = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([used, unused], lr=1.0)
        (used * core.rank).sum().backward()
        core.optimizer_step(optimizer)
        return used.item(), unused.item(), used.grad

    assert quietly(work, cores=3).results == [(0.0, 1.0, None)] * 3  # 1 - mean(0, 1, 2)


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_a_gradient_that_is_one_number_seen_in_every_place_is_averaged_too(backend):
    def work(core):
        model = core.model(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = model.weight.detach().clone()
        with core.step():
            model.weight.sum().mul(core.rank).add(model.bias.sum()).backward()
            core.optimizer_step(optimizer)
        return (before - model.weight).tolist()

    for changed in quietly(work, backend=backend).results:
        assert changed == [[pytest.approx(0.5)] * 2]  # the mean of 0 and 1


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_weights_under_several_names_stay_one_on_the_device_and_train_as_one(backend):
    def work(core, tied):
        model = core.model(Tied(tied))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        words = torch.arange(11, device=core.device)
        for _ in range(3):
            with core.step():
                torch.nn.functional.cross_entropy(model(words), words.flip(0)).backward()
                core.optimizer_step(optimizer)
        same = (
            model.head.weight is model.embed.weight,
            model.head.scale is model.scale,
            model.first is model.second,
        )
        return (
            len(list(model.parameters())),
            len(list(model.buffers())),
            same,
            core.to_host(model.state_dict()),
        )

    tied, control = (quietly(work, tied, backend=backend).results[0] for tied in (True, False))
    assert (
        tied[:3]
        == (len(list(Tied().parameters())), 1, (True, True, True))
        == (3, 1, (True, True, True))
    )
    assert control[:3] == (4, 1, (False, True, True))
    assert torch.equal(tied[3]["head.weight"], tied[3]["embed.weight"])
    plain = quietly(work, True, cores=1, backend="cpu").results[0]
    assert all(
        torch.allclose(tensor, plain[3][name], atol=1e-5) for name, tensor in tied[3].items()
    )


@pytest.mark.parametrize("backend", DRY_RUNS)
@pytest.mark.parametrize("width", [3, 5])
def test_cores_may_have_gradients_for_different_parameters(backend, width):
    def work(core):
        model = core.model(Branches(width))
        before = core.internal.snapshot(model.state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        # Layer a everywhere, then a here and b there, then b on core 0 alone.
        for step, layers in enumerate(["aa", "ab", "bn"]):
            layer = getattr(model, {"a": "a", "b": "b", "n": "a"}[layers[core.rank]])
            inputs = torch.full((4, layer.in_features), step + 1.0, device=core.device)
            with core.step():
                layer(inputs).square().mean().backward()
                core.optimizer_step(optimizer)
        return before, core.to_host(model.state_dict())

    (before, first), (_, second) = quietly(work, backend=backend).results
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(before["a.weight"], first["a.weight"])
    assert not torch.equal(before["b.weight"], first["b.weight"])
    for name in (
        "unused.weight",
        "frozen.weight",
    ):  # no core had a gradient: not even the weight decay
        assert torch.equal(before[name], first[name])


def test_a_gradient_that_one_core_lacks_counts_as_zero_in_the_mean():
    def work(core):
        shared = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([shared], lr=1.0)
        if core.rank:
            (shared * 4).sum().backward()
        core.optimizer_step(optimizer)
        return shared.item()

    assert quietly(work).results == [-1.0, -1.0]


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_collectives_return_what_they_say_on_every_core(backend):
    def work(core):
        mine = torch.tensor([1.0, 2.0], device=core.device) * (core.rank + 1)
        core.barrier()
        return {
            "sum": core.all_reduce(mine),
            "mean": core.all_reduce(mine, "mean"),
            "min": core.all_reduce(mine, "min"),
            "max": core.all_reduce(mine, "max"),
            "whole": core.all_reduce(torch.tensor(core.rank, device=core.device)),
            "gather": core.gather(mine),
            "gather scalar": core.gather(mine.sum()),
            "mean of tensor": core.mean(mine.sum()),
            "mean of numbers": core.mean({"a": core.rank, "b": core.rank * 0.5}),
            "untouched": mine,
        }

    first, second = quietly(work, backend=backend).results
    assert first["sum"].tolist() == [3, 6]
    assert first["mean"].tolist() == [1.5, 3]
    assert first["min"].tolist() == [1, 2]
    assert first["max"].tolist() == [2, 4]
    assert int(first["whole"]) == 1
    assert first["gather"].tolist() == [1, 2, 2, 4]
    assert first["gather scalar"].tolist() == [3, 6]
    assert float(first["mean of tensor"]) == 4.5
    assert first["mean of numbers"] == {"a": 0.5, "b": 0.25}
    assert first["untouched"].tolist() == [1, 2]
    assert second["untouched"].tolist() == [2, 4]
    assert all(torch.equal(first[name], second[name]) for name in ("sum", "mean", "gather"))


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_the_mean_of_a_dict_is_by_name_in_any_order(backend):
    def work(core):
        order = ["cat", "dog"] if core.rank == 0 else ["dog", "cat"]
        numbers = {name: {"cat": 0.0, "dog": 1.0}[name] + core.rank for name in order}
        tensors = {name: core.to_device([torch.tensor(numbers[name])])[0] for name in order}
        found = core.mean(
            {
                "of": numbers,
                "tensors": tensors,
                "cat": 16_777_217 + core.rank,
                "kinds": numpy.float64(1.0) if core.rank else 0.0,
            }
        )
        with core.step():
            within = core.mean(tensors)
        return core.to_host((found, within))

    for found, within in quietly(work, backend=backend).results:
        assert found["of"] == {"cat": 0.5, "dog": 1.5}
        assert found["cat"] == 16_777_217.5
        assert found["kinds"] == 0.5
        for tensors in (found["tensors"], within):
            assert {name: float(tensor) for name, tensor in tensors.items()} == found["of"]


@pytest.mark.parametrize(
    ("mine", "different", "found"),
    [
        (
            [{"loss": 1.0, "even": 1}, {"loss": 1.0, "odd": 1}],
            "names",
            "even: a number on core 0, none on",
        ),
        ([{"a": 1.0}, {}], "names", "a: a number on core 0, none on core 1"),
        ([{"a": {"b": 1.0}}, {"a": 1.0}], "names", "a.b: a number on core 0, none on core 1"),
        (
            [{"a": 1.0}, {"a": torch.ones(2)}],
            "kinds of values",
            r"a: a number on core 0, \(2,\) torch.float32 on(.|\n)*fix: +give each name a number",
        ),
    ],
)
def test_the_mean_of_a_dict_with_other_names_on_another_core_is_refused(mine, different, found):
    with pytest.raises(WorkerError, match=f"different {different}(.|\n)*{found}") as caught:
        quietly(lambda core: core.mean(mine[core.rank]))
    assert isinstance(caught.value.__cause__, OutOfSyncError)


def train_alone(core, joined):
    model = torch.nn.Linear(2, 1).to(core.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3, 2, device=core.device)).sum().backward()
    if joined == "optimizer_step":
        core.optimizer_step(optimizer)
    elif joined == "torch_xla":
        import torch_xla.core.xla_model

        torch_xla.core.xla_model.optimizer_step(optimizer)
    elif joined != "one core" or core.rank == 0:
        optimizer.step()
    if joined == "mean":
        core.mean(1.0)
    core.to_host(model.weight.detach())


@pytest.mark.parametrize(
    ("backend", "joined", "is_named"),
    [
        ("cpu", "", True),
        ("cpu", "optimizer_step", False),
        ("cpu", "mean", False),
        ("cpu", "one core", False),
        pytest.param("xla", "", True, marks=pytest.mark.xla),
        pytest.param("xla:simulator", "torch_xla", False, marks=SIMULATED),
    ],
)
def test_cores_that_trained_without_ever_meeting_are_named(backend, joined, is_named, capsys):
    quietly(train_alone, joined, backend=backend)
    assert ("each has trained a separate model" in capsys.readouterr().out) == is_named


def test_a_single_core_and_independent_runs_are_not_named(capsys):
    quietly(train_alone, "", cores=1, backend="cpu")
    launch_each(train_alone, ["", ""], cores=1, backend="cpu", progress="off")
    assert "a separate model" not in capsys.readouterr().out


def test_gather_in_order_is_every_sample_once():
    def work(core):
        batches = core.batches(Pairs(13), batch_size=3)
        return core.gather(torch.cat([images for images, _ in batches]))[:13]

    for result in quietly(work, cores=3).results:
        assert torch.equal(result, Pairs(13).images)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda core: core.gather(torch.ones(core.rank + 1)),
            r"core 0 \(1,\) float32, core 1 \(2,\) float32",
        ),
        (
            lambda core: core.all_reduce(torch.ones(1), "median"),
            r"op must be one of 'sum', 'mean', 'min', 'max', got 'median'",
        ),
        (
            lambda core: core.log(loss=torch.ones(3)),
            r"one-element tensors, got loss = Tensor\(3,\)",
        ),
        (lambda core: core.log(note="text"), "got note = str"),
        (lambda core: core.log(note="3"), "got note = str"),
        (lambda core: core.log({"loss": 1.0}), "step must be a number, got {'loss': 1.0}"),
        (lambda core: [*core.progress([], 5)], r"got 5(.|\n)*core.progress\(\.\.\., total=5\)"),
        (
            lambda core: core.model(small_net(True), allow_different="*.counts"),
            r"allow_different=\['\*.counts'\]",
        ),
        (lambda core: core.log(loss=torch.tensor(1j)), "got loss = Tensor"),
        (lambda core: core.log(loss=numpy.ones(3)), r"got loss = ndarray\(3,\)"),
        (lambda core: core.batches([], batch_size=4), "dataset is empty"),
    ],
)
def test_a_wrong_call_is_refused_with_what_came(call, message):
    with pytest.raises(WorkerError, match=message):
        quietly(call)


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_save_writes_once_from_core_0_and_loads_anywhere(backend, tmp_path):
    def work(core):
        model = core.model(small_net(True))
        core.save({"model": model.state_dict(), "rank": core.rank}, tmp_path / "new" / "weights.pt")
        return (tmp_path / "new" / "weights.pt").exists()

    assert quietly(work, backend=backend).results == [True, True]
    loaded = torch.load(tmp_path / "new" / "weights.pt", weights_only=True)
    assert loaded["rank"] == 0
    small_net(True).load_state_dict(loaded["model"])
    assert all(tensor.device.type == "cpu" for tensor in loaded["model"].values())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["weights.pt"]


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_a_snapshot_stays_as_it_was_where_its_tensors_change_in_place(backend):
    def work(core):
        there, here = (
            core.to_device([torch.ones(3)])[0],
            torch.ones(()),
        )  # Adam counts its steps on the host
        kept = core.internal.snapshot({"there": there, "here": [here], "view": here.detach()})
        for one in (there, here):
            one += 1
        return kept

    ones = {"there": torch.ones(3), "here": [torch.ones(())], "view": torch.ones(())}
    for kept in quietly(work, backend=backend).results:
        torch.testing.assert_close(kept, ones)


def test_a_save_that_fails_leaves_the_old_file(tmp_path):
    def work(core, value):
        core.save(value, tmp_path / "weights.pt")

    quietly(work, 1)
    with pytest.raises(WorkerError, match="core 0 of 2"):
        quietly(work, {"model": lambda: 0})
    assert torch.load(tmp_path / "weights.pt", weights_only=True) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]


@pytest.mark.xla
def test_xla_workers_can_go_backward_though_the_kernel_did():
    torch.ones(2, requires_grad=True).sum().backward()

    def work(core):
        weight = torch.ones(2, device=core.device, requires_grad=True)
        (weight * 3).sum().backward()
        return weight.grad

    assert [result.tolist() for result in quietly(work, backend="xla:cpu").results] == [
        [3, 3],
        [3, 3],
    ]


@pytest.mark.xla
def test_logging_every_step_copies_nothing_between_messages():
    def work(core):
        import torch_xla.debug.metrics as met

        value = torch.ones(1, device=core.device)
        core.log(loss=value)  # opens the quarter of a second in which nothing is sent
        before = (met.metric_data("TransferFromDeviceTime") or [0])[0]
        began = time.monotonic()
        for _ in range(50):
            with core.step():
                value = value + 1
            core.log(loss=value)
        fast_enough = time.monotonic() - began < 0.2
        return fast_enough, (met.metric_data("TransferFromDeviceTime") or [0])[0] - before

    run = quietly(work, backend="xla:cpu", cores=1)
    fast_enough, copies = run.results[0]
    assert copies == 0 or not fast_enough
    assert [row["loss"] for row in run.log] == [float(step) for step in range(1, 52)]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_progress_goes_over_a_loader_whose_length_is_not_known():
    loader = torch.utils.data.DataLoader(Stream(), batch_size=2)  # it has __len__, which raises
    run = quietly(lambda core: [batch.tolist() for batch in core.progress(loader)])
    assert run.results == [[[0, 1], [2, 3]]] * 2


def test_whatever_is_a_number_can_be_logged():
    def work(core):
        core.log(
            a=numpy.float32(0.5),
            b=numpy.int64(2),
            c=numpy.float64(3),
            d=numpy.array(4.0),
            e=Fraction(1, 4),
            f=True,
        )

    (row,) = quietly(work).log
    assert row == {"step": 1, "a": 0.5, "b": 2, "c": 3, "d": 4, "e": 0.25, "f": True}


def test_the_worker_side_without_torch_xla_imports_none_of_it():
    work = "lambda core: 'torch_xla' in sys.modules"
    code = f"import sys, tpukit; assert tpukit.launch({work}, cores=1, backend='cpu').results == [False]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def train_by_an_optimizer_of_the_notebook(core):
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = core.model(net)  # a copy
    for _ in range(3):
        (inputs,) = core.to_device([torch.full((4, 2), float(core.rank))])
        with core.step():
            model(inputs).sum().backward()
            core.optimizer_step(optimizer)


@pytest.mark.parametrize("cores", [1, 2])
def test_an_optimizer_whose_parameters_have_no_gradient_is_told_once(cores, capfd):
    quietly(train_by_an_optimizer_of_the_notebook, cores=cores, backend="cpu")
    assert (
        capfd.readouterr().out.count(
            "no parameter of the optimizer has a gradient: it trains nothing"
        )
        == 1
    )


@pytest.mark.xla
def test_an_optimizer_whose_parameters_are_not_on_the_device_is_refused():
    with pytest.raises(
        WorkerError,
        match=r"not on this core's device(.|\n)*on cpu(.|\n)*fix: .*make the optimizer from the model",
    ):
        quietly(train_by_an_optimizer_of_the_notebook, backend="xla:cpu")


def test_an_optimizer_of_a_frozen_layer_says_nothing(capfd):
    def work(core):
        model = core.model(torch.nn.Linear(2, 1)).requires_grad_(False)
        core.optimizer_step(torch.optim.SGD(model.parameters(), lr=0.1))

    quietly(work, backend="cpu")
    assert "gradient" not in capfd.readouterr().out


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_max_and_min_are_right_for_every_dtype(backend):
    def work(core):
        values = torch.tensor([core.rank, 1 - core.rank, 5])
        return {
            dtype: (
                core.all_reduce(values.to(dtype), "max"),
                core.all_reduce(values.to(dtype), "min"),
            )
            for dtype in DTYPES
        }

    for result in quietly(work, backend=backend).results:
        for dtype, (most, least) in result.items():
            assert most.dtype == least.dtype == dtype
            assert most.tolist() == torch.tensor([1, 1, 5]).to(dtype).tolist()
            assert least.tolist() == torch.tensor([0, 0, 5]).to(dtype).tolist()


class Sharing(Backend):
    """One of two cores that are threads of a process; nothing of it is together."""

    world_size, device, real, shares_process = 2, torch.device("cpu"), torch.float64, True

    def __init__(self, rank):
        self.rank = rank

    def to_device(self, tensors):
        return tensors


class Drawing:
    """A dataset whose samples are random numbers of all three kinds, with a pause in which another thread may draw."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        first = random.random()
        time.sleep(0.001)
        return torch.tensor([first, numpy.random.random(), torch.rand(()).item()])  # noqa: NPY002


def draw(rank, seed_each_step=True):
    core = Core(Sharing(rank), lambda message: None)
    drawn = []
    for step, batch in enumerate(core.batches(Drawing(), batch_size=4, seed=3)):
        drawn.append(batch)
        if seed_each_step:
            core.seed(step)
    return torch.cat(drawn)


def test_what_datasets_draw_for_two_cores_of_a_process_is_each_cores_own():
    with ThreadPoolExecutor(2) as cores:
        together = list(cores.map(draw, (0, 1)))
    alone = [draw(rank) for rank in (0, 1)]
    in_processes = list(Batches(Drawing(), batch_size=4, rank=1, world_size=2, seed=3, workers=1))
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
    assert torch.equal(torch.cat(in_processes), alone[1])
    assert not set(alone[0].flatten().tolist()) & set(alone[1].flatten().tolist())


def test_a_batch_of_a_shared_process_leaves_the_random_numbers_as_they_were():
    core = Core(Sharing(0), lambda message: None)
    batches = iter(core.batches(Drawing(), batch_size=4))
    random.seed(5), torch.manual_seed(5), numpy.random.seed(5)  # noqa: NPY002
    expected = random.random(), torch.rand(()).item(), numpy.random.random()  # noqa: NPY002
    random.seed(5), torch.manual_seed(5), numpy.random.seed(5)  # noqa: NPY002
    next(batches)
    assert (random.random(), torch.rand(()).item(), numpy.random.random()) == expected  # noqa: NPY002
