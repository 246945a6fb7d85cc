import io
import json
import random
import tarfile

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from tpukit import evaluate, fit, predict
from tpukit.essentials.launcher.launcher import WorkerError, launch
from tpukit.training.streams import StreamBatches


class Numbers(IterableDataset):
    """0 to count - 1; it has a length, and divides itself among loader processes as torch's documentation says."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        info = get_worker_info()
        yield from (
            range(self.count) if info is None else range(info.id, self.count, info.num_workers)
        )


def ranks(dataset, *, world_size=2, steps=5, batch_size=2, **options):
    options = {"world_size": world_size, "steps": steps, "batch_size": batch_size, **options}
    return [StreamBatches(dataset, rank=rank, **options) for rank in range(world_size)]


def flat(batches):
    return [int(number) for batch in batches for number in batch]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "dataset",
    [
        Numbers(36),
        lambda share, shares: range(share, 36, shares),
        type("It", (), {"__iter__": lambda _: iter(range(36))})(),
    ],
    ids=["IterableDataset", "function", "iterable"],
)
def test_a_pass_over_all_shares_is_every_sample_once_whoever_reads(dataset, world_size, workers):
    options = {"steps": 36 // world_size // 3, "batch_size": 3, "workers": workers}
    seen = [flat(one) for one in ranks(dataset, world_size=world_size, **options)]
    assert sorted(sum(seen, [])) == list(range(36))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_short_share_starts_over_and_all_cores_have_the_same_steps(workers):
    short, long = ranks(
        lambda share, shares: [share] if share < 2 else range(share, 100), steps=8, workers=workers
    )
    assert len(flat(short)) == len(flat(long)) == 16


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_go_on_in_the_stream_also_after_a_loop_that_was_left_early(workers):
    (batches,) = ranks(Numbers(40), world_size=1, steps=4, workers=workers)
    loop, seen = iter(batches), []
    for _ in range(2):
        seen += next(loop).tolist()
    for _ in range(2):
        seen += flat(batches)
    assert sorted(seen) == list(range(20))
    assert batches.epoch == 3


@pytest.mark.parametrize(("kind", "workers"), [("function", 0), ("function", 2), ("iterable", 0)])
def test_after_an_error_a_share_is_read_again_from_its_start(kind, workers, tmp_path):
    def numbers(share=0, shares=1):
        for number in range(share, 40, shares):
            lost = tmp_path / f"lost-{number}"
            if number in (8, 9) and not lost.exists():
                lost.touch()
                raise ConnectionError("the bucket does not answer")
            yield number

    plain = type("It", (), {"__iter__": lambda _: numbers()})()
    dataset = numbers if kind == "function" else plain
    (batches,) = ranks(dataset, world_size=1, steps=10, workers=workers)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="does not answer"):
            list(batches)
    assert sorted(flat(batches)) == list(range(20))


def test_a_state_keeps_the_steps_and_not_the_place_in_the_stream():
    (batches,) = ranks(Numbers(40), world_size=1)
    list(batches)
    loop = iter(batches)
    next(loop)
    state = json.loads(json.dumps(batches.state_dict()))
    assert state == {"epoch": 1, "steps": 1, "seed": 0}
    for again in ranks(Numbers(40), world_size=2):
        again.load_state_dict(state)
        assert len(list(again)) == 4
        assert again.epoch == 2
    (again,) = ranks(Numbers(40), world_size=1)
    again.load_state_dict(state | {"steps": 5})
    assert len(list(again)) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_processes_draw_other_numbers_in_each_share_and_the_same_in_each_run(workers):
    def noisy(share, shares):
        while True:
            yield torch.tensor([random.random(), torch.rand(()).item(), np.random.random()])  # noqa: NPY002

    torch.manual_seed(0)
    first = [torch.cat(list(one)) for one in ranks(noisy, workers=workers)]
    if workers:
        second = [torch.cat(list(one)) for one in ranks(noisy, workers=workers)]
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert len(torch.cat(first).unique(dim=0)) == 20


def test_a_stream_is_not_evaluated_and_the_fix_works():
    def work(core):
        model, messages = core.model(nn.Identity()), []
        floats = lambda share, shares: (float(number) for number in range(share, 6, shares))  # noqa: E731
        stream = core.batches(floats, steps=3, batch_size=1)
        for call in (
            lambda: predict(core, model, stream),
            lambda: evaluate(core, model, nn.MSELoss(), stream),
        ):
            with pytest.raises(
                ValueError, match=r"but a stream \(steps=\) has no last sample"
            ) as error:
                call()
            messages.append(str(error.value))
        return predict(
            core, model, core.batches([float(number) for number in range(6)], batch_size=1)
        )

    assert launch(work, cores=2, backend="cpu", progress="off").results[0].tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]


def pairs(share, shares):
    generator = torch.Generator().manual_seed(share)
    for _ in range(10 + 7 * share):  # the shares end at different times
        inputs = torch.randn(3, generator=generator)
        yield inputs, inputs.sum(dim=0, keepdim=True)


@pytest.mark.parametrize(
    ("backend", "cores"), [("cpu", 3), pytest.param("xla:cpu", 2, marks=pytest.mark.xla)]
)
def test_fit_trains_on_a_stream_whose_shares_end_at_different_times_and_resumes(
    backend, cores, tmp_path
):
    def work(core, epochs):
        model = core.model(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = core.batches(pairs, steps=12, batch_size=4, workers=1)
        history = fit(
            core,
            model,
            optimizer,
            nn.functional.mse_loss,
            train,
            epochs=epochs,
            checkpoints=tmp_path,
        )
        return [row["step"] for row in history.epochs], history.epochs[-1]["train_loss"]

    options = {"cores": cores, "backend": backend, "progress": "off"}
    assert launch(work, 2, **options).results[0][0] == [12, 24]
    for steps, loss in launch(work, 4, **options).results:
        assert steps == [12, 24, 36, 48]
        assert loss < 0.01


def test_a_loss_that_is_not_finite_is_told_though_its_samples_are_gone():
    def work(core):
        model = core.model(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bad = lambda share, shares: [(torch.full((3,), torch.nan), torch.zeros(1))]  # noqa: E731
        fit(
            core, model, optimizer, nn.functional.mse_loss, core.batches(bad, steps=3, batch_size=2)
        )

    with pytest.raises(
        WorkerError, match="its samples come from a stream and cannot be read again"
    ):
        launch(work, cores=1, backend="cpu", progress="off")


@pytest.fixture
def shards(tmp_path):
    for shard in range(8):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for number in range(shard * 5, shard * 5 + 5):
                content = str(number).encode()
                info = tarfile.TarInfo(f"{number:04d}.cls")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return sorted(map(str, tmp_path.glob("*.tar")))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("splitting", ["none", "webdataset's own"])
def test_tar_shards_are_dealt_out_to_cores_and_loader_processes(shards, cores, workers, splitting):
    webdataset = pytest.importorskip("webdataset")
    off = (
        {"nodesplitter": None, "workersplitter": None}
        if splitting == "none"
        else {"nodesplitter": None}
    )

    def work(core):
        def share_of(share, shares):
            opened = webdataset.WebDataset(shards[share::shares], shardshuffle=False, **off)
            return opened.decode().to_tuple("cls")

        with pytest.raises(TypeError, match="not among the cores of a launch"):
            core.batches(webdataset.WebDataset(shards, shardshuffle=False), steps=1, batch_size=1)
        batches = core.batches(
            share_of, steps=40 // core.world_size // 5, batch_size=5, workers=workers
        )
        return [int(number) for (batch,) in batches for number in batch]

    seen = launch(work, cores=cores, backend="cpu", progress="off").results
    assert sorted(sum(seen, [])) == list(range(40))
