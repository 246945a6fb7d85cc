import json

import numpy as np
import pytest
import torch
from torch import nn

from tpukit import Buckets, Checkpoints, FitOptions, evaluate, fit, predict
from tpukit.essentials.data.batches import Batches
from tpukit.essentials.launcher.launcher import WorkerError, launch

LENGTHS = (4, 8, 16)


class Texts:
    """Text `i` is the number i + 1, 1 to 16 times; its label is its length modulo 3."""

    def __init__(self, count=101, kind="mapping"):
        self.sizes = torch.randint(
            1, 17, (count,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        self.kind = kind

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        tokens = torch.full((self.sizes[index],), index + 1)
        if self.kind == "mapping":
            return {
                "input_ids": tokens,
                "attention_mask": torch.ones_like(tokens),
                "labels": self.sizes[index] % 3,
            }
        return {
            "tensor": tokens,
            "tuple": (tokens, self.sizes[index] % 3),
            "list": tokens.tolist(),
        }[self.kind]


PAD = {"input_ids": 0, "attention_mask": 0}
MAPPING = Buckets(LENGTHS, pad=PAD)
SHUFFLED = {"shuffle": True, "seed": 5}


def ranks(world_size=3, batch_size=4, count=101, buckets=MAPPING, kind="mapping", **options):
    texts = Texts(count, kind)
    options = {"batch_size": batch_size, "world_size": world_size, "buckets": buckets, **options}
    return [Batches(texts, rank=rank, **options) for rank in range(world_size)]


@pytest.mark.parametrize("options", [{}, SHUFFLED, {**SHUFFLED, "drop_last": True}, {"workers": 1}])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 40, 101])
def test_every_sample_comes_once_whole_and_at_each_step_all_cores_have_one_length(
    count, world_size, options
):
    if count == 1 and options.get("drop_last"):
        pytest.skip("one sample fills no step")
    seen, texts = [], Texts(count)
    for parts in zip(*ranks(world_size, count=count, mask=True, **options), strict=True):
        assert len({part["input_ids"].shape for part in parts}) == 1
        length = parts[0]["input_ids"].shape[1]
        assert length in LENGTHS
        for part in parts:
            for tokens, mask, real in zip(
                part["input_ids"], part["attention_mask"], part["mask"], strict=True
            ):
                size = int(mask.sum())
                assert mask.tolist() == [1] * size + [0] * (length - size)
                assert tokens.tolist() == [int(tokens[0])] * size + [0] * (length - size)
                assert size == texts.sizes[int(tokens[0]) - 1]
                seen += [int(tokens[0]) - 1] * bool(real)
    left_out = count % (4 * world_size) if options.get("drop_last") else 0
    assert len(seen) == len(set(seen)) == count - left_out


def test_all_but_one_step_of_a_bucket_hold_only_its_samples():
    longer = 0
    (batches,) = ranks(1, batch_size=10, count=1000, shuffle=True)
    for batch in batches:
        bucket = [
            next(length for length in LENGTHS if size <= length)
            for size in batch["attention_mask"].sum(1)
        ]
        longer += min(bucket) < batch["input_ids"].shape[1]
        assert max(bucket) == batch["input_ids"].shape[1]
    assert longer <= len(LENGTHS) - 1


def test_one_step_of_every_length_comes_first_the_longest_before_all():
    for _ in range(2):
        (batches,) = ranks(1, **SHUFFLED)
        lengths = [batch["input_ids"].shape[1] for batch in batches]
        assert lengths[:3] == [16, 8, 4]
        assert lengths[3:] != sorted(lengths[3:], reverse=True)


def test_each_epoch_has_its_own_order_and_the_seed_decides_it():
    (first,), (same,), (other,) = (
        ranks(1, **SHUFFLED),
        ranks(1, **SHUFFLED),
        ranks(1, shuffle=True, seed=6),
    )
    assert first.indices(0) == same.indices(0)
    assert first.indices(0) != first.indices(1)
    assert first.indices(0) != other.indices(0)


@pytest.mark.parametrize("options", [{}, SHUFFLED, {**SHUFFLED, "drop_last": True}])
def test_an_epoch_is_resumed_in_its_middle_with_the_very_batches(options):
    for taken in range(1, len(ranks(2, **options)[0])):
        for whole, again in zip(ranks(2, **options), ranks(2, **options), strict=True):
            list(whole)
            loop = iter(whole)
            for _ in range(taken):
                next(loop)
            again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
            for left, right in zip(loop, again, strict=True):
                assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 2}, "batch_size=4.*batch_size=2"),
        ({"shuffle": False}, "shuffle=True, buckets.*shuffle=False, buckets"),
        ({"buckets": Buckets((8, 16), pad=PAD)}, r"buckets=\[4, 8, 16\].*buckets=\[8, 16\]"),
        (
            {"buckets": Buckets(LENGTHS, pad=PAD, sizes=[16] * 101)},
            r"lengths=(\d+); here.*lengths=(?!\1)",
        ),
    ],
)
def test_a_state_of_other_batches_is_refused_within_an_epoch(change, message):
    saved = ranks(1, **SHUFFLED)[0]
    next(iter(saved))
    other = ranks(1, **{**SHUFFLED, **change})[0]
    with pytest.raises(
        ValueError, match=f"(?s){message}.*fix: .*use the settings of the saved run"
    ):
        other.load_state_dict(saved.state_dict())


def test_a_tensor_and_the_first_part_of_a_tuple_are_padded_and_a_mask_comes_along():
    (batches,) = ranks(1, batch_size=2, count=2, buckets=Buckets(16), kind="tuple")
    ((tokens, labels, mask),) = batches
    assert (tokens.shape, labels.shape, mask.dtype) == ((2, 16), (2,), torch.bool)
    assert torch.equal(tokens > 0, mask)
    for kind in ("tensor", "list"):
        ((tokens, mask),) = ranks(1, batch_size=2, count=2, buckets=Buckets((16,)), kind=kind)[0]
        assert torch.equal(tokens > 0, mask)


def test_a_mapping_without_attention_mask_gets_one():
    class Sound(Texts):
        def __getitem__(self, index):
            return {"input_values": torch.ones(2, self.sizes[index]), "labels": [0.0, 1.0]}

    (batch,) = Batches(
        Sound(3), batch_size=3, buckets=Buckets((16,), pad={"input_values": -1.0}, axis=-1)
    )
    assert batch["input_values"].shape == (3, 2, 16)
    assert torch.equal(batch["attention_mask"].bool(), batch["input_values"][:, 0] == 1)
    assert batch["attention_mask"].dtype == torch.int64


def test_parts_of_different_lengths_are_all_padded_each_with_its_value():
    class Pairs(Texts):
        def __getitem__(self, index):
            size = self.sizes[index]
            return {"input_ids": torch.ones(size), "labels": [1] * (17 - size)}

    buckets = Buckets((8, 12, 16), pad={"input_ids": 0, "labels": -100})
    for batch in Batches(Pairs(40), batch_size=4, buckets=buckets):
        assert batch["input_ids"].shape == batch["labels"].shape
        assert set(batch["labels"].unique().tolist()) <= {1, -100}
        assert ((batch["labels"] == 1).sum(1) + (batch["input_ids"] == 1).sum(1)).tolist() == [
            17
        ] * 4


def test_lengths_that_are_known_are_not_read_again():
    class Counted(Texts):
        read = 0

        def __getitem__(self, index):
            Counted.read += 1
            return super().__getitem__(index)

    texts = Counted()
    state = torch.get_rng_state()
    Batches(texts, batch_size=4, buckets=Buckets(LENGTHS, pad=PAD, sizes=texts.sizes))
    assert Counted.read == 0
    Batches(texts, batch_size=4, buckets=MAPPING)
    assert Counted.read == 101
    assert torch.equal(torch.get_rng_state(), state)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(200, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None].float()
        return self.out((self.embed(input_ids) * mask).sum(1) / mask.sum(1))


class PerToken(Classifier):
    def forward(self, input_ids, attention_mask):
        return self.out(self.embed(input_ids))


@pytest.mark.parametrize(
    ("backend", "cores"),
    [("cpu", 1), ("cpu", 3), pytest.param("xla:cpu", 2, marks=pytest.mark.xla)],
)
def test_predictions_and_evaluations_are_those_without_buckets(backend, cores):
    def work(core):
        model = core.model(Classifier())
        found = {}
        for name, lengths in {"one": (16,), "three": LENGTHS}.items():
            batches = core.batches(Texts(), batch_size=4, buckets=Buckets(lengths, pad=PAD))
            loss = nn.functional.cross_entropy
            found[name] = (
                predict(core, model, batches),
                evaluate(core, model, loss, batches).loss,
                evaluate(core, model, loss, batches, keep_outputs=False).loss,
            )
        return found

    for found in launch(work, cores=cores, backend=backend, progress="off").results:
        assert torch.allclose(found["one"][0], found["three"][0], atol=1e-6)
        assert found["one"][1:] == pytest.approx(found["three"][1:], abs=1e-5)


def test_outputs_of_every_position_are_refused_and_the_fix_works():
    def work(core, lengths):
        model = core.model(PerToken())
        return predict(
            core, model, core.batches(Texts(), batch_size=4, buckets=Buckets(lengths, pad=PAD))
        )

    with pytest.raises(
        WorkerError,
        match=r"shapes differ: \(B, 16, 3\) and \(B, 8, 3\)(?s:.*)the largest length only",
    ):
        launch(work, LENGTHS, cores=1, backend="cpu", progress="off")
    assert launch(work, 16, cores=1, backend="cpu", progress="off").results[0].shape == (101, 16, 3)


@pytest.mark.xla
@pytest.mark.parametrize("cores", [1, 2])
def test_fit_compiles_its_step_once_for_each_length_and_says_so(cores, capfd):
    def work(core, lengths):
        model = core.model(Classifier())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = core.batches(
            Texts(), batch_size=4, shuffle=True, drop_last=True, buckets=Buckets(lengths, pad=PAD)
        )
        history = fit(
            core,
            model,
            optimizer,
            nn.functional.cross_entropy,
            train,
            epochs=3,
            options=FitOptions(log_every=1),
        )
        return [row["compiles"] for row in history.intervals]

    counts = {}
    for lengths in ((16,), LENGTHS):
        run = launch(work, lengths, cores=cores, backend="xla:cpu", progress="text")
        compiles = run.results[0]
        counts[lengths] = compiles[-1]
        assert len(set(compiles[5:])) == 1  # nothing after the first step of each length
    out = capfd.readouterr().out
    assert "batches of length 4, 8, 16: 3 shapes, so 3 graphs of each step will be compiled" in out
    assert "compiled again" not in out
    if cores == 1:  # with more, a dry run cuts each step into several graphs
        one, three = counts.values()
        assert three - one == 2


@pytest.mark.xla
def test_a_loop_by_hand_compiles_exactly_one_graph_for_each_length():
    def work(core):
        model = core.model(Classifier())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = core.batches(Texts(), batch_size=4, shuffle=True, buckets=MAPPING)
        before = core.backend.compiles()[0]
        for _ in range(3):
            for batch in batches:
                with core.step():
                    nn.functional.cross_entropy(
                        model(batch["input_ids"], batch["attention_mask"]), batch["labels"]
                    ).backward()
                    core.optimizer_step(optimizer)
        return core.backend.compiles()[0] - before

    assert launch(work, cores=1, backend="xla:cpu", progress="off").results == [3]


def test_fit_refuses_to_accumulate_over_several_lengths():
    def work(core):
        model = core.model(Classifier())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = core.batches(Texts(), batch_size=4, buckets=MAPPING)
        fit(core, model, optimizer, nn.functional.cross_entropy, train, accumulate_grad_batches=2)

    with pytest.raises(WorkerError, match="a graph for each combination of lengths"):
        launch(work, cores=1, backend="cpu", progress="off")


@pytest.mark.parametrize("cores", [1, 2])
def test_fit_that_was_cut_off_in_an_epoch_trains_the_very_same_weights(cores, tmp_path):
    def work(core, folder, steps):
        model = core.model(Classifier())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train = core.batches(Texts(), batch_size=4, drop_last=True, buckets=MAPPING, **SHUFFLED)

        def loss(outputs, labels):
            loss.calls += 1
            if steps and loss.calls > steps:
                raise RuntimeError("cut off")
            return nn.functional.cross_entropy(outputs, labels)

        loss.calls = 0
        fit(
            core,
            model,
            optimizer,
            loss,
            train,
            epochs=2,
            checkpoints=Checkpoints(folder, save_every=0),
            options=FitOptions(log_every=1),
        )
        return [parameter.detach() for parameter in model.parameters()]

    options = {"cores": cores, "backend": "cpu", "progress": "off"}
    whole = launch(work, tmp_path / "whole", 0, **options).results[0]
    with pytest.raises(WorkerError, match="cut off"):
        launch(work, tmp_path / "cut", 7, **options)
    again = launch(work, tmp_path / "cut", 0, **options).results[0]
    assert all(torch.equal(*pair) for pair in zip(whole, again, strict=True))


@pytest.mark.parametrize(
    ("dtype", "pad"), [(torch.float32, 0.1), (torch.bfloat16, 0.1), (torch.float32, float("nan"))]
)
def test_a_pad_that_only_rounds_is_taken(dtype, pad):
    padded = Buckets((8,), pad={0: pad}).collate([(torch.ones(5, dtype=dtype), 1)], [0], 8)[0][
        0, -1
    ]
    assert torch.isclose(padded, torch.tensor(pad).to(dtype), equal_nan=True)


def test_lengths_of_numpy_are_numbers_of_python_afterwards():
    lengths = Buckets(tuple(np.array([8, 16]))).lengths
    assert lengths == (8, 16)
    assert {type(length) for length in lengths} == {int}
