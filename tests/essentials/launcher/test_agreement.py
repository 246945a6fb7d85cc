"""The agreement of cores: What may not differ between cores: compared in a loop of one's own, and named."""

import random

import numpy
import pytest
import torch

import tpukit
from tpukit.essentials.launcher import WorkerError, core_values, launch

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
X = torch.arange(256.0).reshape(64, 4) / 256
PAIRS = torch.utils.data.TensorDataset(X, X[:, :1])


class Counting(torch.nn.Linear):
    """Counts in a buffer of whole numbers, on each core something else."""

    def __init__(self):
        super().__init__(4, 1)
        self.register_buffer("counts", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.counts += tpukit.current_core().rank
        return super().forward(x)


class Start(torch.nn.Linear):
    """Sets its weights from the first batch it sees."""

    ready = False

    def forward(self, x):
        if not self.ready:
            self.weight.data.copy_(x.mean(0, keepdim=True))
            self.ready = True
        return super().forward(x)


def loop(
    core, model=None, *, lr=0.1, data=PAIRS, seed=0, step=None, allow_different=(), scheduled=False
):
    """Train by a loop of one's own: two epochs of four steps."""
    model = core.model(model or torch.nn.Linear(4, 1), allow_different=allow_different)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
    batches = core.batches(data, batch_size=8, shuffle=True, seed=seed, drop_last=True)
    for _ in range(2):
        for inputs, targets in batches:
            with core.step():
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                (step or core.optimizer_step)(optimizer)
        if scheduled:
            plateau.step(1.0)
            plateau.step(2.0 * core.rank)  # better on core 0, worse on core 1
    core.internal.agreement.compare_loop("at the end of the test")
    return model


def without_optimizer(core):
    """Step by hand, with gradients that nobody averaged."""
    model = core.model(torch.nn.Linear(4, 1))
    for _ in range(3):
        with core.step():
            model(X[:4] + core.rank).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad


def beside_the_optimizer(core):
    """Train with a teacher that no optimizer holds, and that sees other samples on each core."""
    model, teacher = core.model(torch.nn.Linear(4, 1)), core.model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with core.step():
        model(X[:4]).sum().backward()
        core.optimizer_step(optimizer)
        teacher.bias.data += core.rank


def without_core_model(core):
    """Average the gradients of two models."""
    torch.manual_seed(core.rank)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with core.step():
        model(X[:4] + core.rank).sum().backward()
        core.optimizer_step(optimizer)


def other_activation(core):
    """The same weights, and another layer that has none."""
    return torch.nn.Sequential(torch.nn.Linear(4, 1), (torch.nn.ReLU, torch.nn.GELU)[core.rank]())


def other_attribute(core):
    """The same layers, and another function between them."""
    model = torch.nn.Linear(4, 1)
    model.activation = (torch.relu, torch.tanh)[core.rank]
    return model


def other_order(core):
    """Layers whose weights have the same shapes, in another order."""
    layers = {"one": torch.nn.Linear(4, 4), "two": torch.nn.Linear(4, 4)}
    model = torch.nn.Sequential()
    for name in sorted(layers, reverse=bool(core.rank)):
        model.add_module(name, layers[name])
    return model


def frozen_on_one(core):
    """Train a layer on core 0 alone."""
    model = core.model(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))
    model[0].requires_grad_(core.rank == 0)
    step(core, model)


def tied_on_one(core):
    """Make two weights one, on core 1 alone."""
    model = core.model(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    if core.rank:
        model[1].weight = model[0].weight
    step(core, model)


def halves_on_one(core):
    """Have weights of another dtype on core 1."""
    step(core, core.model(torch.nn.Linear(4, 1)).to((torch.float32, torch.float64)[core.rank]))


def accumulated_otherwise(core):
    """Step after every second batch on core 0, after every fourth on core 1."""
    model = core.model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(1, 9):
        with core.step():
            model(X[:4]).sum().backward()
            if number % (2 + 2 * core.rank) == 0:
                core.optimizer_step(optimizer)


def step(core, model):
    with core.step():
        model(X[:4].to(next(model.parameters()).dtype)).sum().backward()
        core.optimizer_step(torch.optim.SGD(model.parameters(), lr=0.1))


class ByName(torch.utils.data.Dataset):
    """Makes numbers of names while it is read."""

    def __init__(self, names):
        self.names = names

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return X[index], torch.tensor([float(self.names.index("ab"[index % 2]))])


def samples(core, count):
    """A dataset whose samples come in another order on each core."""
    order = torch.arange(count) if core.rank == 0 else torch.arange(count - 1, -1, -1)
    return torch.utils.data.TensorDataset(X[order], X[order, :1])


# What a core does with others, and what the error has to name.
REFUSED = {
    "weights": (
        without_core_model,
        ("weights", "parameter 0 of the SGD", "after the first step", "core.model(model)"),
    ),
    "settings": (
        lambda core: loop(core, lr=0.1 * (1 + core.rank)),
        ("lr of SGD", "0.1 on core 0, 0.2 on core 1"),
    ),
    "a schedule by this core's own loss": (
        lambda core: loop(core, scheduled=True),
        ("lr of SGD", "core.mean(loss)", "after step 4 the cores were in sync"),
    ),
    "seed of the batches": (
        lambda core: loop(core, seed=core.rank),
        ("dataset", "seed of core.batches: 0 on core 0"),
    ),
    "order of samples": (lambda core: loop(core, data=samples(core, 64)), ("dataset", "tensors")),
    "number of samples": (
        lambda core: loop(core, data=torch.utils.data.Subset(PAIRS, range(64 - core.rank))),
        ("dataset", "length of dataset: 64 on core 0, 63 on core 1"),
    ),
    "another activation": (
        lambda core: loop(core, other_activation(core)),
        ("different models", "ReLU", "GELU"),
    ),
    "another function": (
        lambda core: loop(core, other_attribute(core)),
        ("different models", "relu", "tanh"),
    ),
    "another order of layers": (
        lambda core: loop(core, other_order(core)),
        ("different models", "one", "two"),
    ),
    "layers frozen by rank": (
        frozen_on_one,
        ("different models", "0.weight: (4, 4)", "none on core 1"),
    ),
    "weights tied on one core": (
        tied_on_one,
        ("different models", "1.weight: (4, 4)", "none on core 1"),
    ),
    "another dtype": (
        halves_on_one,
        ("different models", "float32 on core 0", "float64 on core 1"),
    ),
    "steps of another size": (
        accumulated_otherwise,
        ("different collectives", "core 0 average", "core 1 all_reduce"),
    ),
    "a lazy layer": (
        lambda core: loop(core, torch.nn.LazyLinear(1)),
        ("lazy", "weight", "call the model once"),
    ),
    "another order of names": (
        lambda core: loop(core, data=ByName([["a", "b"], ["b", "a"]][core.rank])),
        ("dataset", "dataset.names: "),
    ),
    "shapes in all_reduce": (
        lambda core: core.all_reduce(torch.ones(2 + core.rank)),
        ("all_reduce needs the same shape", "core 0 (2,) float32, core 1 (3,) float32"),
    ),
    "dtypes in all_reduce": (
        lambda core: core.all_reduce(torch.ones(2).to((torch.float32, torch.int32)[core.rank])),
        ("all_reduce needs the same shape and dtype", "core 0 (2,) float32, core 1 (2,) int32"),
    ),
    "other shapes": (
        lambda core: loop(core, torch.nn.Linear(4, 1 + core.rank)),
        ("different models", "out_features=1", "out_features=2"),
    ),
    "whole numbers": (
        lambda core: loop(core, Counting()),
        ("buffers", "counts", 'allow_different=["*counts"]'),
    ),
    "weights from the first batch": (
        lambda core: loop(core, Start(4, 1)),
        ("weights", "weight", "first batch"),
    ),
    "plain step": (
        lambda core: loop(core, step=lambda optimizer: optimizer.step()),
        ("core.optimizer_step(optimizer)", "launch_each"),
    ),
    "plain step that changes nothing yet": (
        lambda core: loop(core, lr=0.0, step=lambda optimizer: optimizer.step()),
        ("core.optimizer_step(optimizer)", "launch_each"),
    ),
    "plain step with a closure": (
        lambda core: loop(core, step=lambda optimizer: optimizer.step(lambda: None)),
        ("weights", "after the first step", "core.optimizer_step(optimizer)"),
    ),
    "no optimizer": (
        without_optimizer,
        ("weights", "after the second step", "core.optimizer_step"),
    ),
    "a teacher": (beside_the_optimizer, ("weights", "1.bias", "after the first step")),
}


def attempts(core):
    """Try each, and return what was said; an error of this kind is raised on every core at the same place."""
    said = {}
    for name, (attempt, _) in REFUSED.items():
        try:
            attempt(core)
        except ValueError as error:
            said[name] = str(error)
        core.internal.agreement.forget()
    return said


@pytest.fixture(scope="module")
def said():
    return launch(attempts, cores=2, backend="cpu", progress="off").results


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_between_the_cores_is_an_error_that_names_it(said, name):
    assert said[0].get(name) == said[1].get(name)
    missing = [
        part for part in REFUSED[name][1] if part not in said[0].get(name, "nothing was said")
    ]
    assert not missing, said[0].get(name)


def test_what_differs_when_the_worker_functions_return_is_an_error_that_keeps_their_results():
    def work(core):
        model = loop(core)
        model.weight.data += core.rank
        return core.rank

    with pytest.raises(
        WorkerError, match=r"different weights, and(.|\n)*when the worker function returned"
    ) as failure:
        launch(work, cores=2, backend="cpu", progress="off")
    assert failure.value.run.results == [0, 1]


def test_batches_that_are_only_read_have_to_be_the_same_as_well():
    def work(core):
        return [
            batch.tolist() for batch in core.batches(X, batch_size=8, shuffle=True, seed=core.rank)
        ]

    with pytest.raises(
        WorkerError, match=r"different datasets(.|\n)*seed of core.batches, batches 1: 0 on core 0"
    ):
        launch(work, cores=2, backend="cpu", progress="off")


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ((1, 2), "batches 2: none on core 0, 0 on core 1"),
        ((2, 0), "batches 1: 0 on core 0, none on core 1"),
    ],
)
def test_batches_that_only_some_cores_have_made_are_named_with_those_cores(made, found):
    def work(core):
        for _ in range(made[core.rank]):
            core.batches(X, batch_size=8, shuffle=True)

    with pytest.raises(WorkerError, match="the cores have different datasets") as failed:
        launch(work, cores=2, backend="cpu", progress="off")
    assert f"seed of core.batches, {found}" in failed.value.found
    assert "batches 1: none" not in failed.value.found
    # Nothing was compared before, so the message must not claim that the cores were in sync.
    assert "in sync" not in failed.value.found


def test_a_save_on_core_0_alone_is_told_that_every_core_calls_it(tmp_path):
    def work(core):
        model = loop(core)
        if core.is_main:
            core.save(model.state_dict(), tmp_path / "model.pt")

    with pytest.raises(
        WorkerError, match=r"waits for it in save\(\)(.|\n)*not under `if core.is_main`"
    ):
        launch(work, cores=2, backend="cpu", progress="off")


def test_what_is_the_same_or_may_differ_is_no_error():
    def work(core):
        loop(core)
        loop(
            core,
            torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 1)),
        )
        counts = loop(core, Counting(), allow_different=["counts"]).counts.item()
        one, two = (
            torch.nn.Linear(4, 1),
            torch.nn.Linear(4, 1),
        )  # two models, each with an optimizer of its own

        def average(optimizer):  # a stranger's own averaging
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = core.all_reduce(parameter.grad, "mean")
            optimizer.step()

        loop(core, one, step=average), loop(core, two)
        adversaries(core)
        wrapped(core)
        core.log(loss=core.rank)
        best = loop(core)
        if core.is_main:  # which looks at the best once more, alone
            best.load_state_dict(torch.nn.Linear(4, 1).state_dict())
        return counts

    assert len(set(launch(work, cores=2, backend="cpu", progress="off").results)) == 2


def adversaries(core):
    """Two models, each with an optimizer of its own, that step in turn."""
    models = [core.model(torch.nn.Linear(4, 1)) for _ in range(2)]
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=0.1 * (at + 1)) for at, model in enumerate(models)
    ]
    for inputs, _ in core.batches(PAIRS, batch_size=8):
        for model, optimizer in zip(models, optimizers, strict=True):
            with core.step():
                model(inputs).sum().backward()
                core.optimizer_step(optimizer)


class Wrapped:
    """An optimizer around another, as Lookahead is."""

    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups
        self.zero_grad = inner.zero_grad

    def step(self):
        self.inner.step()


def wrapped(core):
    """Train with such an optimizer."""
    model = core.model(torch.nn.Linear(4, 1))
    optimizer = Wrapped(torch.optim.SGD(model.parameters(), lr=0.1))
    for inputs, _ in core.batches(PAIRS, batch_size=8):
        with core.step():
            model(inputs).sum().backward()
            core.optimizer_step(optimizer)


def test_a_large_model_comes_into_host_memory_in_portions(monkeypatch):
    def work(core):
        model = core.model(
            torch.nn.Sequential(
                torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)
            )
        )
        return core_values.tensor_checksums(
            core, {"": model}, (), averaged=False, allow_different=["*.bias"]
        )

    whole, _ = launch(work, cores=2, backend="cpu", progress="off").results
    assert whole["weights"].keys() == {"0.weight", "1.weight", "2.weight"}
    assert whole["buffers"].keys() == {"1.num_batches_tracked"}
    monkeypatch.setattr(core_values, "_PORTION_BYTES", 20)
    assert launch(work, cores=2, backend="cpu", progress="off").results == [whole] * 2


def test_complex_buffers_are_averaged_as_float_ones_are():
    def work(core):
        model = torch.nn.Linear(1, 1)
        model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        model = core.model(model)
        model.phase = model.phase + 2j * core.rank
        core.average_buffers(model)
        return core.to_host(model.phase).tolist()

    assert launch(work, cores=2, backend="cpu", progress="off").results == [[1j, 1j]] * 2


@pytest.mark.parametrize("backend", ["cpu", pytest.param("xla", marks=pytest.mark.xla)])
def test_the_worker_function_begins_with_the_same_random_numbers_and_its_steps_with_their_own(
    backend,
):
    def work(core):
        first = host_numbers()
        on_device = core.to_host(torch.rand(2, device=core.device)).tolist()
        with core.step():
            inside = host_numbers()
            mask = core.to_host(
                torch.nn.functional.dropout(torch.ones(64, device=core.device))
            ).tolist()
        split, _ = torch.utils.data.random_split(range(20), [10, 10])
        drawn = [row for batch in core.batches(Drawing(), batch_size=2) for row in batch.tolist()]
        loader = torch.utils.data.DataLoader(Drawing(), batch_size=2, num_workers=1)
        strangers = [row for batch in loader for row in batch.tolist()]
        loaded = [
            row
            for batch in core.batches(Drawing(), batch_size=2, workers=1)
            for row in batch.tolist()
        ]
        outside = host_numbers()
        core.same_seed(1)
        with core.step():
            alike = host_numbers()
        core.seed(1)
        own = host_numbers()
        return {
            "same": (first, on_device, split.indices, strangers, outside, alike),
            "own": (*inside, mask, drawn, loaded, *own),
        }

    one, two = launch(work, cores=2, backend=backend, progress="off").results
    assert one["same"] == two["same"]
    assert all(mine != other for mine, other in zip(one["own"], two["own"], strict=True))


def host_numbers():
    return random.random(), numpy.random.random(), torch.rand(()).item()  # noqa: NPY002


class Drawing(torch.utils.data.Dataset):
    """Draws a number for each sample, as an augmentation does."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(())


def test_the_seed_of_a_launch_is_the_notebooks_unless_one_is_given():
    def work(core):
        return torch.rand(()).item()

    def drawn(**options):
        return launch(work, cores=1, backend="cpu", progress="off", **options).results[0]

    torch.manual_seed(1)
    first, again = drawn(), drawn()
    torch.manual_seed(2)
    assert first == again != drawn()
    assert drawn(seed=3) == drawn(seed=3) != first


def test_a_core_is_found_from_anywhere_in_its_worker_and_nowhere_else():
    def work(core):
        return tpukit.current_core() is core

    assert launch(work, cores=2, backend="cpu", progress="off").results == [True, True]
    with pytest.raises(RuntimeError, match="works only inside a worker function"):
        tpukit.current_core()


BACKENDS = pytest.mark.parametrize(
    "backend", ["cpu", pytest.param("xla:simulator", marks=pytest.mark.xla)]
)


@BACKENDS
def test_the_mean_of_numbers_is_exact_where_float32_is_not(backend):
    def work(core):
        return core.mean(16777217 + 2 * core.rank), core.mean(float("inf"))

    assert (
        launch(work, cores=2, backend=backend, progress="off").results
        == [(16777218.0, float("inf"))] * 2
    )


@BACKENDS
def test_the_gradient_flows_through_gather_to_the_core_that_each_row_came_from(backend):
    def work(core):
        mine = torch.full((2, 1), 1.0 + core.rank, device=core.device, requires_grad=True)
        with core.step():
            everyone = core.gather(mine)
            (
                everyone.squeeze() * torch.arange(4.0, device=core.device) * (core.rank + 1)
            ).sum().backward()
        return core.to_host(mine.grad).flatten().tolist(), core.gather(mine.detach()).requires_grad

    (one, _), (two, cut) = launch(work, cores=2, backend=backend, progress="off").results
    assert (one, two, cut) == ([0.0, 3.0], [6.0, 9.0], False)


def test_sparse_gradients_are_refused_by_name_on_several_cores():
    def work(core):
        table = core.model(torch.nn.Embedding(10, 2, sparse=True))
        table(torch.tensor([core.rank])).sum().backward()
        core.optimizer_step(torch.optim.SGD(table.parameters(), lr=0.1))

    with pytest.raises(WorkerError, match=r"sparse gradients(.|\n)*weight(.|\n)*sparse=False"):
        launch(work, cores=2, backend="cpu", progress="off")


@BACKENDS
def test_the_default_group_of_torch_distributed_is_joined_only_where_it_is_asked_for(backend):
    import torch.distributed as dist

    def work(core):
        before = dist.is_initialized()
        core.init_process_group()
        total = torch.full((1,), core.rank + 1.0, device=core.device)
        dist.all_reduce(total)
        return before, total.item(), dist.get_world_size()

    assert launch(work, cores=2, backend=backend, progress="off").results == [(False, 3.0, 2)] * 2


def test_torch_xlas_own_calls_are_told_of_the_dry_run_that_joins_them(capsys, monkeypatch):
    pytest.importorskip("torch_xla")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    torch.nn.Parameter(
        torch.ones(2)
    ).sum().backward()  # which starts the engine that the processes inherit

    def evaluates(core):
        import torch_xla.runtime as xr

        return torch.ones(2, device="xla").sum().item() * xr.world_size()

    assert launch(evaluates, cores=2, backend="cpu", progress="text").results == [2.0, 2.0]
    assert (
        "torch_xla was used, but it does not connect the CPU processes of this dry run"
        in capsys.readouterr().out
    )

    def trains(core):
        import torch_xla.core.xla_model as xm

        weight = torch.nn.Parameter(torch.zeros(2, device="xla"))
        weight.sum().backward()
        xm.optimizer_step(torch.optim.SGD([weight], lr=0.1))

    with pytest.raises(WorkerError, match=r'a separate device(.|\n)*launch\(..., backend="xla"\)'):
        launch(trains, cores=2, backend="cpu", progress="off")


def test_a_number_that_no_float_holds_is_logged_as_infinite(capsys):
    def work(core):
        core.log(combinations=10**400, less=-(10**400))

    (row,) = launch(work, cores=1, backend="cpu", progress="text").log
    assert (row["combinations"], row["less"]) == (float("inf"), float("-inf"))
