import dataclasses
from collections import OrderedDict, UserDict

import numpy as np
import pytest
import torch
from helpers.fit_arguments import grouped
from helpers.launching import DRY_RUNS, quietly
from torch import nn
from torch.utils import _pytree as tree

from tpukit import Buckets, FitOptions, WorkerError, evaluate, fit, launch, predict
from tpukit.essentials.data.batches import Batches
from tpukit.training.batch import call, inputs_and_targets, inputs_only, kind_of_samples


class ModelOutput(OrderedDict):
    def __getattr__(self, name):
        return self.get(name)


tree.register_pytree_node(
    ModelOutput,
    lambda output: (list(output.values()), list(output)),
    lambda values, names: ModelOutput(zip(names, values, strict=True)),
)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        mask = attention_mask.unsqueeze(2)
        logits = self.head((self.embed(input_ids) * mask).sum(1) / mask.sum(1))
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return ModelOutput(loss=loss, logits=logits)


class Texts:
    """37 texts of eight tokens, some of them padding, in three classes that can be learned."""

    def __init__(self, count=37, kind=dict, **more):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(1, 20, (count, 8), generator=generator)
        self.mask = (torch.arange(8) < torch.randint(3, 9, (count, 1), generator=generator)).long()
        self.kind, self.more = kind, more

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        item = {
            "input_ids": self.tokens[index],
            "attention_mask": self.mask[index],
            "labels": self.label(index),
        }
        return self.kind({**item, **self.more})

    def label(self, index):
        return self.tokens[index, 0] % 3


def own_loss(outputs, labels):
    return nn.functional.cross_entropy(outputs.logits, labels)


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_a_hugging_face_batch_goes_through_fit_evaluate_and_predict(backend):
    def work(core, batch_size):
        model = core.model(Classifier())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        train = core.batches(Texts(48), batch_size=batch_size, shuffle=True, drop_last=True)
        valid = core.batches(Texts(), batch_size=batch_size)
        history = fit(core, model, optimizer, own_loss, train, valid, epochs=3)
        metrics = {
            "right": lambda outputs, labels: (outputs.logits.argmax(1) == labels).float().mean()
        }
        found = evaluate(core, model, own_loss, valid, metrics=metrics)
        return history, found, predict(core, model, valid), model.state_dict()

    one = quietly(work, 8, cores=1, backend=backend).results[0]
    for history, found, outputs, weights in quietly(work, 4, backend=backend).results:
        data, alone = Texts(), Classifier()
        alone.load_state_dict(weights)
        expected = alone(data.tokens, data.mask)
        assert history.epochs[-1]["valid_loss"] < 0.9 * history.epochs[0]["valid_loss"]
        losses = [[row["train_loss"] for row in each.epochs] for each in (one[0], history)]
        assert np.allclose(*losses, rtol=1e-3)
        assert type(outputs) is type(found.outputs) is ModelOutput
        assert torch.allclose(outputs.logits, expected.logits, atol=1e-5)
        assert torch.equal(found.outputs.logits, outputs.logits)
        labels = torch.stack([data.label(index) for index in range(37)])
        assert torch.equal(found.targets, labels)
        assert found.loss == pytest.approx(own_loss(expected, labels).item(), rel=1e-5)
        assert found.metrics["right"] == pytest.approx(
            (expected.logits.argmax(1) == labels).float().mean().item()
        )
        assert repr(found).startswith("Evaluation: 37 samples, loss ")


def test_a_model_may_compute_its_own_loss_and_an_evaluation_says_that_it_needs_another():
    def work(core, loss, valid):
        model = core.model(Classifier())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        train = core.batches(Texts(48), batch_size=4, shuffle=True, drop_last=True)
        return fit(
            core,
            model,
            optimizer,
            loss,
            train,
            core.batches(Texts(), batch_size=4) if valid else None,
        )

    models_own = quietly(work, lambda outputs, labels: outputs.loss, False).results[0]
    ours = quietly(work, own_loss, False).results[0]
    assert models_own.epochs[0]["train_loss"] == ours.epochs[0]["train_loss"]
    with pytest.raises(WorkerError, match="the loss must return one number, got None") as failure:
        quietly(work, lambda outputs, labels: outputs.loss, True)
    assert "cross_entropy(outputs.logits, labels)" in str(failure.value)
    assert quietly(work, own_loss, True).results[0].epochs  # the fix


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
@pytest.mark.parametrize(("mask", "workers"), [(False, 0), (True, 0), (True, 2)])
def test_mappings_of_any_kind_become_dicts_whose_tensors_are_all_sent_at_once(kind, mask, workers):
    sent = []
    send = lambda tensors: sent.append(len(tensors)) or [tensor + 100 for tensor in tensors]  # noqa: E731
    for batch in Batches(Texts(8, kind=kind), batch_size=4, send=send, mask=mask, workers=workers):
        assert isinstance(batch, dict)
        assert all((value >= 100).all() for value in batch.values())
    assert sent == [3 + mask] * 2


class Scenes:
    """Images with an age as inputs; a mask and a depth as targets."""

    def __init__(self, count=48):
        generator = torch.Generator().manual_seed(0)
        self.images, self.ages = (
            torch.randn(count, 3, 8, 8, generator=generator),
            torch.rand(count, generator=generator),
        )

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, age = self.images[index], self.ages[index]
        return {"image": image, "age": age}, {
            "mask": (image[:1] > 0).float(),
            "depth": image.mean(0) + age,
        }


class TwoHeads(nn.Module):
    def __init__(self, kind=dict):
        super().__init__()
        torch.manual_seed(1)
        self.mask, self.depth, self.kind = nn.Conv2d(3, 1, 1), nn.Conv2d(3, 1, 1), kind

    def forward(self, image, age):
        mask, depth = self.mask(image), self.depth(image).squeeze(1) + age.view(-1, 1, 1)
        return {"mask": mask, "depth": depth} if self.kind is dict else self.kind(mask, depth)


def both(outputs, targets):
    bce = nn.functional.binary_cross_entropy_with_logits(outputs["mask"], targets["mask"])
    return bce + nn.functional.l1_loss(outputs["depth"], targets["depth"])


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_several_inputs_outputs_and_targets_give_the_same_curve_on_one_and_two_cores(backend):
    def work(core, batch_size):
        model = core.model(TwoHeads())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        train = core.batches(Scenes(), batch_size=batch_size, shuffle=True, drop_last=True)
        valid = core.batches(Scenes(19), batch_size=batch_size)
        metrics = {
            "off": lambda outputs, targets: (outputs["depth"] - targets["depth"]).abs().mean()
        }
        history = fit(
            core,
            model,
            optimizer,
            both,
            train,
            valid,
            epochs=3,
            options=FitOptions(log_every=2),
            metrics=metrics,
        )
        return history, evaluate(core, model, both, valid)

    (one, alone), (two, found) = (
        quietly(work, 16 // cores, cores=cores, backend=backend).results[0] for cores in (1, 2)
    )
    for rows, others in [(one.intervals, two.intervals), (one.epochs, two.epochs)]:
        names = [name for name in rows[0] if name.startswith(("train", "valid"))]
        assert np.allclose(
            *([[row[name] for name in names] for row in each] for each in (rows, others)), rtol=1e-3
        )
    assert two.epochs[-1]["valid_off"] < two.epochs[0]["valid_off"]
    for name in ("mask", "depth"):
        expected = torch.stack([Scenes(19)[index][1][name] for index in range(19)])
        assert torch.equal(found.targets[name], expected)
        assert found.outputs[name].shape == expected.shape
        assert torch.allclose(found.outputs[name], alone.outputs[name], atol=1e-2)


@dataclasses.dataclass
class Output:
    mask: torch.Tensor
    depth: torch.Tensor


def test_a_dataclass_is_refused_until_pytree_knows_it():
    def work(core, fix):
        if fix:
            torch.export.register_dataclass(Output)
        model = core.model(TwoHeads(Output))
        return predict(core, model, core.batches(Scenes(10), batch_size=4))

    with pytest.raises(WorkerError, match="TwoHeads returns a Output") as failure:
        quietly(work, False)
    assert (
        "fix:   return a tuple or a dict; for a dataclass, torch.export.register_dataclass(Output)"
        in str(failure.value)
    )
    found = quietly(work, True).results[0]
    assert (type(found).__name__, found.mask.shape, found.depth.shape) == (
        "Output",
        (10, 1, 8, 8),
        (10, 8, 8),
    )


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            lambda x: (x, torch.zeros(9, 4)),
            r"the samples on its first axis, got \(9, 4\) for 4 samples",
        ),
        (
            lambda x: (x, "text"),
            "outputs are tensors, nested in tuples and dicts; got a str among them",
        ),
    ],
)
def test_an_output_that_has_no_samples_is_refused(extra, message):
    class Net(nn.Module):
        forward = staticmethod(extra)

    def work(core):
        return predict(core, core.model(Net()), core.batches([torch.ones(2)] * 6, batch_size=4))

    with pytest.raises(WorkerError, match=message) as failure:
        quietly(work)
    assert "fix:" in str(failure.value)


X, Y = torch.ones(2, 3), torch.zeros(2)


@pytest.mark.parametrize(
    ("batch", "inputs", "targets"),
    [
        ((X, Y), X, Y),
        ([X, Y, ["a name", "another"]], X, Y),
        (({"a": X}, [Y, Y]), {"a": X}, [Y, Y]),
        ({"a": X, "labels": Y}, {"a": X, "labels": Y}, Y),
        ({"a": X, "label": {"mask": Y}}, {"a": X, "label": {"mask": Y}}, {"mask": Y}),
    ],
)
def test_what_are_the_inputs_and_the_targets_of_a_batch(batch, inputs, targets):
    found = inputs_and_targets(batch)
    for one, other in zip(found, (inputs, targets), strict=True):
        ours, theirs = tree.tree_flatten(one), tree.tree_flatten(other)
        assert ours[1] == theirs[1]
        assert all(a is b for a, b in zip(ours[0], theirs[0], strict=True))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (X, "found: a Tensor"),
        ([X], "found: a list of 1"),
        ({"a": X}, "found: a mapping with the keys 'a'"),
        ({"label": Y, "target": Y}, "found: a mapping with the keys 'label', 'target'"),
        (
            {"a": X, "text": ["hello"], "labels": Y},
            "a str 'hello' of the key 'text'\n.*remove_columns..text",
        ),
        (({"a": X, "b": [X, None]}, Y), "a NoneType of the key 'b'"),
        ((X, ["cat", "dog"]), r"a str 'cat' at \[1\]\[0\]"),
    ],
)
def test_a_batch_without_targets_or_with_text_is_refused(batch, message):
    with pytest.raises(TypeError, match=message):
        inputs_and_targets(batch)


@pytest.mark.parametrize("batch", [X, [X], (X, Y), (X, ["cat"])])
def test_predicting_needs_no_targets(batch):
    assert inputs_only(batch) == (X, None)


class Named(nn.Module):
    def forward(self, image, labels=None):
        return image, labels


class Plain(nn.Module):
    def forward(self, image):
        return image, None


class Anything(nn.Module):
    def forward(self, **inputs):
        return inputs["image"], inputs.get("labels")


@pytest.mark.parametrize(("model", "labels"), [(Named(), Y), (Plain(), None), (Anything(), Y)])
def test_a_mapping_goes_by_name_and_its_labels_only_where_they_are_asked_for(model, labels):
    assert call(model, {"image": X, "labels": Y}) == (X, labels)
    assert call(Plain(), (X, Y)) == ((X, Y), None)  # a tuple is one argument


def test_an_input_that_the_model_does_not_take_is_named_and_the_fix_works():
    batch = {"image": X, "id": Y, "labels": Y}
    with pytest.raises(TypeError, match="Plain.forward has no argument 'id'") as failure:
        call(Plain(), batch)
    (fix,) = [
        line.split("preprocess=")[1]
        for line in str(failure.value).splitlines()
        if "preprocess=" in line
    ]
    assert call(Plain(), eval(fix)(batch)) == (X, None)


def test_text_in_a_batch_is_named_before_the_first_step():
    def work(core, **more):
        model = core.model(Classifier())
        train = core.batches(Texts(**more), batch_size=4, drop_last=True)
        return fit(core, model, torch.optim.Adam(model.parameters()), own_loss, train)

    with pytest.raises(WorkerError, match="this batch holds a str 'some words' of the key 'text'"):
        quietly(lambda core: work(core, text="some words"), cores=1)
    assert quietly(work, cores=1).results[0].epochs


def test_a_mapping_is_augmented_whole():
    def work(core):
        seen = []

        def augment(batch):
            seen.append(sorted(batch))
            return {**batch, "input_ids": batch["input_ids"] * 0}

        def loss(outputs, labels):
            seen.append(torch.allclose(outputs.logits, outputs.logits[:1], atol=1e-5))
            return own_loss(outputs, labels)

        model = core.model(Classifier())
        train = core.batches(Texts(8), batch_size=4)
        fit(core, model, torch.optim.SGD(model.parameters(), lr=0.1), loss, train, augment=augment)
        return seen

    assert (
        quietly(work, cores=1).results[0] == [["attention_mask", "input_ids", "labels"], True] * 2
    )


@pytest.mark.parametrize("backend", ["cpu", pytest.param("xla:cpu", marks=pytest.mark.xla)])
def test_batches_are_augmented_from_the_epoch_that_is_named_also_when_a_run_goes_on(
    tmp_path, backend
):
    def work(core, epochs):
        at, lines = [], []

        def augment(images, labels):
            at.append(core.backend.compiles() or True)
            return images + 9, labels

        torch.manual_seed(0)
        model = core.model(torch.nn.Linear(4, 1))
        images = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.rand(16, 1))
        train = core.batches(images, batch_size=4)
        options = {
            "augment": augment,
            "checkpoints": tmp_path,
            "epochs": epochs,
            "options": FitOptions(augment_from=3),
        }
        core.print = lines.append
        optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss
        history = fit(
            core, model, optimizer, loss, train, core.batches(images, batch_size=4), **options
        )
        compiled = [line for line in lines if "compiled" in line]
        return (
            len(at),
            [row["train_loss"] for row in history.epochs],
            compiled,
            history.best["epoch"],
        )

    calls, losses, said, best = quietly(work, 3, cores=1, backend=backend).results[0]
    assert calls == (4 if backend == "cpu" else pytest.approx(4, abs=2)), (
        "the four steps of the third epoch"
    )
    assert losses[2] > 1.5 * losses[1]
    assert said == [], "that the graph is another one is expected"
    assert best == 3, "however much worse it is than those before"
    calls, losses, *_ = quietly(work, 4, cores=1, backend=backend).results[0]
    assert (calls, len(losses)) == (4, 4), "the fourth is augmented at once"


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        ((torch.zeros(2, 3, 8, 8), torch.zeros(2)), "images"),
        ([torch.zeros(2, 1, 8, 8), torch.zeros(2)], "images"),
        ((torch.zeros(2, 64), torch.zeros(2)), "samples"),
        ((torch.zeros(2, 8, 8, 3), torch.zeros(2)), "samples"),
        ({"input_ids": torch.zeros(2, 7)}, "samples"),
    ],
    ids=["colour", "grey", "vectors", "channels last", "by name"],
)
def test_only_a_batch_of_images_is_counted_in_images(batch, kind):
    assert kind_of_samples(batch) == kind


class Series(torch.utils.data.Dataset):
    """Series of ones of length 5, with a target of 1 at each position."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.ones(5), torch.ones(5)


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.0))

    def forward(self, series):
        return self.slope * series


def masked_mean(outputs, targets, mask):
    return ((outputs - targets).abs() * mask).sum() / mask.sum()


class WeightedSeries(Series):
    """Every other sample counts nothing."""

    def __getitem__(self, index):
        return (*super().__getitem__(index), float(index % 2))


def losses(loss, length=8, pad=0.0, dataset=Series, **options):
    def train(core):
        model = core.model(Slope())
        buckets = {"batch_size": 4, "buckets": Buckets((length,), pad={0: 0.0, 1: pad})}
        parts = [
            core.batches(dataset(), drop_last=True, shuffle=True, **buckets),
            core.batches(dataset(), **buckets),
        ]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        history = fit(core, model, optimizer, loss, *parts, **grouped(options))
        return [history.epochs[-1][name] for name in ("train_loss", "valid_loss")]

    return launch(train, cores=2, backend="cpu", progress="off").results[0]


@pytest.mark.parametrize("keep_outputs", [True, False])
def test_the_padding_of_tuples_counts_in_no_loss_that_takes_the_mask(keep_outputs):
    assert losses(masked_mean, keep_outputs=keep_outputs) == pytest.approx([1.0, 1.0])


def test_a_loss_without_the_mask_is_refused_unless_it_ignores_what_pads():
    with pytest.raises(WorkerError, match=r"would count the padding(.|\n)*third parameter, mask"):
        losses(nn.functional.l1_loss)

    assert losses(Ignores(), pad=-100.0) == pytest.approx([1.0, 1.0])


class Ignores(nn.Module):
    ignore_index = -100.0

    def forward(self, outputs, targets):
        return (outputs - targets)[targets != self.ignore_index].abs().mean()


class IgnoresAndWeighs(Ignores):
    def forward(self, outputs, targets, weight):
        is_data = targets != self.ignore_index
        return ((outputs - targets).abs() * is_data * weight[:, None]).sum() / is_data.sum()


class IgnoresAndTakesTheMask(Ignores):
    def forward(self, outputs, targets, weight, mask):
        return ((outputs - targets).abs() * mask * weight[:, None]).sum() / mask.sum()


@pytest.mark.parametrize("loss", [IgnoresAndWeighs(), IgnoresAndTakesTheMask()])
def test_a_part_between_the_targets_and_the_mask_reaches_a_loss_that_ignores_padding(loss):
    found = losses(loss, pad=-100.0, dataset=WeightedSeries)
    assert found == pytest.approx([0.5, 0.5])


def test_a_part_between_the_targets_and_the_mask_is_never_dropped():
    with pytest.raises(WorkerError, match="a batch has 3 parts, and the loss takes 2"):
        losses(Ignores(), pad=-100.0, dataset=WeightedSeries)
