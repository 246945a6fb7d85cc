import itertools
import json
import os
import random
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.sources import Pixels

from tpukit.essentials.data.batches import Batches
from tpukit.essentials.launcher.launcher import launch


class Numbers:
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor(index)


class Noisy(Numbers):
    """A dataset that augments: random numbers of all three kinds with each sample."""

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.random()])  # noqa: NPY002


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 7, 24, 97])
def test_under_the_mask_every_sample_comes_exactly_once(count, world_size, shuffle):
    flat, shapes = [], set()
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size, "shuffle": shuffle}
        for samples, mask in Batches(Numbers(count), batch_size=4, mask=True, **options):
            flat += samples[mask].tolist()
            shapes |= {(samples.shape, mask.shape, mask.dtype)}
    assert sorted(flat) == list(range(count))
    assert shapes == {((4,), (4,), torch.bool)}


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (lambda i: torch.tensor(i), tuple),
        (lambda i: (i, float(i)), tuple),
        (lambda i: {"image": i, "name": f"{i}.jpg"}, dict),
    ],
)
def test_the_mask_joins_a_tensor_a_tuple_and_a_dict(item, expected):
    class Items(Numbers):
        def __getitem__(self, index):
            return item(index)

    batch = list(Batches(Items(3), batch_size=2, mask=True))[1]
    assert isinstance(batch, expected)
    mask = batch["mask"] if expected is dict else batch[-1]
    assert mask.tolist() == [True, False]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_source_gives_every_image_with_its_label_whoever_prepares_them(threads, workers):
    batches = Batches(
        Pixels(150), batch_size=8, shuffle=True, mask=True, threads=threads, workers=workers
    )
    for hold in (
        list,
        iter,
    ):  # all at once, so that no buffer may be used again meanwhile; then one after the other
        seen = []
        for images, labels, mask in hold(batches):
            assert (images.shape, images.dtype, labels.shape) == ((8, 3, 2, 2), torch.uint8, (8, 1))
            assert torch.equal(images[:, 0, 0, 0].float(), labels[:, 0])
            seen += labels[mask, 0].int().tolist()
        assert sorted(seen) == list(range(150))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_that_writes_nowhere_but_returns_its_images_is_one_too(workers):
    class Returning(Pixels):
        def take(self, indices, out=None):
            return super().take(indices)

    for images, labels in Batches(Returning(30), batch_size=4, workers=workers):
        assert torch.equal(images[:, 0, 0, 0].float(), labels[:, 0])


def test_a_source_learns_which_samples_come_next():
    source = Pixels(12)
    batches = Batches(source, batch_size=4)
    seen = [labels[:, 0].tolist() for _, labels in batches]
    assert source.asked == seen[1:]


@pytest.mark.parametrize("dataset", [Numbers(40), Pixels(40)])
@pytest.mark.parametrize("options", [{}, {"workers": 1}, {"mask": True}])
def test_batches_come_with_the_numbers_of_their_samples(dataset, options):
    batches = Batches(dataset, batch_size=8, shuffle=True, seed=3, **options)
    kept = list(batches.with_samples())  # together, because the numbers belong to their batch
    assert [samples.tolist() for samples, _ in kept] == batches.indices(0)
    for samples, batch in kept:
        labels = batch
        if isinstance(dataset, Pixels):
            labels = batch[1][:, 0]
        elif options.get("mask"):
            labels = batch[0]
        assert labels.tolist() == samples.tolist()


def test_a_loop_left_early_is_followed_by_the_next_epoch():
    batches = Batches(Numbers(40), batch_size=8, shuffle=True)
    next(iter(batches))
    assert [batch.tolist() for batch in batches] == batches.indices(1)


def rest(dataset, state, **options):
    batches = Batches(dataset, batch_size=4, shuffle=True, **options)
    batches.load_state_dict(state)
    return [
        torch.as_tensor(batch[0] if isinstance(batch, tuple) else batch).tolist()
        for batch in batches
    ], batches


@pytest.mark.parametrize("taken", [0, 1, 5, 9, 10])
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Numbers(40), {}),
        (Pixels(40), {}),
        (Pixels(40), {"threads": 2}),
        (Noisy(40), {"workers": 1}),
    ],
)
def test_a_state_saved_in_the_loop_brings_the_same_remaining_batches(dataset, options, taken):
    batches = Batches(dataset, batch_size=4, shuffle=True, seed=3, **options)
    list(batches)
    state, epoch = batches.state_dict(), []
    for number, batch in enumerate(batches, start=1):
        epoch.append(torch.as_tensor(batch[0] if isinstance(batch, tuple) else batch).tolist())
        if number == taken:
            state = json.loads(json.dumps(batches.state_dict()))
    again, resumed = rest(dataset, state, **options)
    if taken < 10:
        assert again == epoch[taken:]
        assert resumed.epoch == batches.epoch
    else:  # the last batch was given: what remains is the next epoch
        assert resumed.state_dict()["epoch"] == batches.epoch + 1


@pytest.mark.parametrize(
    ("before", "after"), [((1, 6), (3, 2)), ((2, 4), (1, 5)), ((3, 4), (2, 2))]
)
def test_an_epoch_begun_on_some_cores_is_finished_on_others(before, after):
    def ranks(cores, batch_size, state=None):
        made = [
            Batches(
                Numbers(97),
                batch_size=batch_size,
                rank=r,
                world_size=cores,
                shuffle=True,
                mask=True,
            )
            for r in range(cores)
        ]
        for batches in made:
            batches.load_state_dict(state) if state else None
        return made

    first, seen = ranks(*before), []
    for parts, _ in zip(zip(*first, strict=True), range(3), strict=False):
        seen += [n for samples, mask in parts for n in samples[mask].tolist()]
        state = first[0].state_dict()
    assert len(seen) == before[0] * before[1] * 3
    seen += [n for b in ranks(*after, state) for samples, mask in b for n in samples[mask].tolist()]
    assert sorted(seen) == list(range(97))


def layout(**changed):
    return {"samples": 8, "layout": {"cores": 1, "batch_size": 4, "drop_last": False} | changed}


@pytest.mark.parametrize(
    ("options", "state", "message"),
    [
        ({"shuffle": True}, {"count": 41}, "dataset of 41 samples, but this dataset has 40"),
        (
            {},
            layout(batch_size=8),
            "saved with cores=1, batch_size=8, drop_last=False; here cores=1, batch_size=4",
        ),
        ({}, layout(cores=2), "saved with cores=2, batch_size=4, .*; here cores=1, batch_size=4"),
        (
            {},
            layout(drop_last=True),
            "batch_size=4, drop_last=True; here cores=1, batch_size=4, drop_last=False",
        ),
        (
            {},
            {"samples": 8, "layout": {"shuffle": True}},
            "8 samples after the start of an epoch(.|\n)*saved with shuffle=True; here",
        ),
        (
            {"shuffle": True},
            layout(),
            "saved with cores=1, batch_size=4, drop_last=False; here shuffle=True",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused(options, state, message):
    batches = Batches(Numbers(40), batch_size=4, **options)
    with pytest.raises(ValueError, match=message):
        batches.load_state_dict({**batches.state_dict(), **state})


def test_an_epoch_in_order_is_continued_on_the_same_cores_only():
    saved = Batches(Numbers(32), batch_size=4, rank=1, world_size=2)
    assert next(iter(saved)).tolist() == [16, 17, 18, 19]
    again = Batches(Numbers(32), batch_size=4, rank=0, world_size=2)
    again.load_state_dict(saved.state_dict())
    assert torch.cat(list(again)).tolist() == list(range(4, 16))
    other = Batches(
        Numbers(32), batch_size=2, rank=0, world_size=4
    )  # as many samples per step, and others
    with pytest.raises(
        ValueError,
        match=r"(?s)saved with cores=2, batch_size=4.*; here cores=4.*fix: .*both runs have shuffle=True",
    ):
        other.load_state_dict(saved.state_dict())
    list(saved)
    other.load_state_dict(saved.state_dict())  # between two epochs there is nothing to share out


def test_a_killed_process_is_continued_with_the_same_samples(tmp_path):
    """The loop notes each sample it has used and saves its state after each step; it is killed in between."""
    code = """
import json, os, sys
from pathlib import Path
from helpers.sources import Pixels
from tpukit.essentials.data.batches import Batches
folder = Path(sys.argv[1]); state = folder / "state.json"
batches = Batches(Pixels(96), batch_size=4, shuffle=True, seed=7, threads=2)
if state.exists(): batches.load_state_dict(json.loads(state.read_text()))
for images, labels in batches:
    (folder / "new.json").write_text(json.dumps([batches.state_dict(), labels[:, 0].tolist()]))
    saved, samples = json.loads((folder / "new.json").read_text())
    with open(folder / "seen", "a") as seen: seen.write(json.dumps(samples) + "\\n")
    (folder / "new.json").write_text(json.dumps(saved)); os.replace(folder / "new.json", state)
    if len(sys.argv) > 2 and saved["samples"] == int(sys.argv[2]): os.kill(os.getpid(), 9)
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[2:4]))}
    for stop in (["12"], ["60"], []):
        ended = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), *stop], env=environ, check=False
        )
        assert ended.returncode == (-signal.SIGKILL if stop else 0)
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert seen == Batches(Pixels(96), batch_size=4, shuffle=True, seed=7).indices(0)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_while_preparing_reaches_the_loop(workers):
    class Broken(Pixels):
        def take(self, indices, out=None):
            if 21 in indices:
                raise OSError("record 21 is damaged")
            return super().take(indices, out)

    with pytest.raises(OSError, match="record 21 is damaged"):
        list(Batches(Broken(40), batch_size=4, workers=workers))


def test_the_time_a_loop_waits_is_counted():
    import time

    class Slow(Numbers):
        def __getitem__(self, index):
            time.sleep(0.01)
            return index

    batches = Batches(Slow(8), batch_size=4)
    list(batches)
    assert batches.wait_seconds >= 0.08


@pytest.mark.xla
def test_on_xla_bytes_travel_and_no_batch_is_compiled_twice():
    def work(core):
        import torch_xla.debug.metrics as met

        compiled, seen = [], []
        for images, labels, mask in core.batches(Pixels(50), batch_size=8, shuffle=True, mask=True):
            with core.step():
                total = ((images[:, 0, 0, 0] - labels[:, 0]).abs() * mask).sum()
            compiled.append((met.metric_data("CompileTime") or [0])[0])
            seen.append((images.dtype, images.device.type, tuple(images.shape), total.item()))
        return compiled, seen

    for compiled, seen in launch(work, cores=2, backend="xla:cpu", progress="off").results:
        assert set(seen) == {(torch.uint8, "xla", (8, 3, 2, 2), 0.0)}
        assert len(set(compiled[1:])) == 1


def test_labels_that_are_fewer_than_the_images_are_an_error_and_no_label_is_taken_twice():
    class Short:
        shape, labels = (2, 2, 3), np.arange(3)

        def __len__(self):
            return 4

        def take(self, indices, out=None):
            return np.zeros((len(indices), 2, 2, 3), np.uint8)

    with pytest.raises(IndexError):
        list(Batches(Short(), batch_size=2))


def test_a_batch_that_the_loop_has_let_go_of_is_gone_before_the_next_is_made():
    given, kept = [], []

    class Samples:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            kept.append([one() is not None for one in given])
            return torch.zeros(3)

    batches = iter(Batches(Samples(), batch_size=2))
    given.append(weakref.ref(next(batches)))
    given.append(weakref.ref(next(batches)))
    assert kept == [[], [], [False], [False]]


# Weights of the samples

RARE = [4.0] * 10 + [0.0] * 10 + [1.0] * 76


def drawn(world_size, *, epochs=3, batch_size=4, state=None, stop=None):
    """Return the samples of each step of all cores together, and the states after the last one."""
    cores = []
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size, "batch_size": batch_size}
        cores.append(Batches(Numbers(96), weights=RARE, seed=5, drop_last=True, **options))
        if state:
            cores[-1].load_state_dict(state)
    steps = []
    for _ in range(epochs):
        for parts in itertools.islice(zip(*cores, strict=True), stop):
            steps.append([number for part in parts for number in part.tolist()])
    return steps, json.loads(json.dumps(cores[0].state_dict()))


def test_weights_draw_samples_in_their_proportion_and_anew_in_every_epoch():
    steps, _ = drawn(1, epochs=60)
    counts = np.bincount(np.concatenate(steps), minlength=96)
    assert not counts[10:20].any()
    assert abs(counts[:10].mean() / counts[20:].mean() - 4) < 0.4
    assert (counts[20:] > 0).all()
    assert sorted(steps[0:24]) != sorted(steps[24:48])


def test_weighted_samples_of_a_step_are_the_same_on_any_number_of_cores():
    whole, _ = drawn(1, batch_size=8)
    assert drawn(2, batch_size=4)[0] == whole
    assert drawn(4, batch_size=2)[0] == whole


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 8), (2, 4), (4, 2)])
def test_weighted_batches_resume_in_the_middle_of_an_epoch(world_size, batch_size):
    whole, _ = drawn(2)
    begun, state = drawn(2, epochs=1, stop=5)
    rest, _ = drawn(world_size, batch_size=batch_size, state=state)
    assert begun + rest == whole


def weighted(core):
    batches = core.batches(Numbers(96), weights=torch.tensor(RARE), batch_size=8, drop_last=True)
    return [number for batch in batches for number in batch.tolist()]


def test_core_batches_takes_weights_in_a_launch():
    both = launch(weighted, cores=2, backend="cpu", progress="off").results
    (alone,) = launch(weighted, cores=1, backend="cpu", progress="off").results
    assert sorted(both[0] + both[1]) == sorted(alone)
    assert not set(alone) & set(range(10, 20))


@pytest.mark.parametrize(
    ("cores", "hosts", "workers"), [(1, 1, 7), (2, 1, 3), (4, 2, 3), (8, 8, 7), (16, 1, 0)]
)
def test_the_cores_of_a_host_share_its_processors_for_decoding(monkeypatch, cores, hosts, workers):
    monkeypatch.setattr("tpukit.essentials.data.batches.cpus", lambda: 8)
    pixels = Pixels(40)
    pixels.encoding = "jpeg"
    batches = Batches(pixels, batch_size=2, world_size=cores, hosts=hosts)
    assert batches._feed._workers == workers


def test_the_default_loader_processes_share_no_open_file(monkeypatch):
    monkeypatch.setattr("tpukit.essentials.data.batches.cpus", lambda: 2)
    pixels = Pixels(40)
    pixels.encoding = "jpeg"
    with open(__file__, "rb") as pixels.file, pytest.raises(ValueError, match="an open file"):
        Batches(pixels, batch_size=2)


def test_a_state_has_no_numbers_of_numpy_which_torch_does_not_load(tmp_path):
    batches = Batches(Numbers(9), batch_size=np.int64(2), seed=np.int64(3))
    torch.save(batches.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    assert (state["seed"], state["layout"]["batch_size"]) == (3, 2)


def test_a_resumed_epoch_is_still_resumed_after_an_error_of_its_first_batch():
    class Flaky(Numbers):
        has_failed = False

        def __getitem__(self, index):
            if not self.has_failed:
                self.has_failed = True
                raise OSError("the share is gone")
            return super().__getitem__(index)

    saved = Batches(Numbers(8), batch_size=2)
    next(iter(saved))
    batches = Batches(Flaky(8), batch_size=2)
    batches.load_state_dict(saved.state_dict() | {"dataset": batches.identity()})
    with pytest.raises(OSError, match="gone"):
        next(iter(batches))
    assert torch.cat(list(batches)).tolist() == [2, 3, 4, 5, 6, 7]
