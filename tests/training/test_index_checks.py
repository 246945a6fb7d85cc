"""Labels and token ids that are out of range are an error on XLA, as on a CPU."""

import functools

import pytest
import torch
from helpers.launching import DRY_RUNS, quietly
from torch import nn
from torch.nn import functional as F

from tpukit import WorkerError, evaluate, fit

CLASSES = 10


class Labels(torch.utils.data.Dataset):
    """Samples whose labels are `first` and the following numbers; one of them is last of all."""

    def __init__(self, first=0, rare=None, count=64):
        self.labels = first + torch.arange(count) % CLASSES
        if rare is not None:
            self.labels[-1] = rare

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return torch.ones(8), self.labels[index]


def train(core, data, loss, accumulated=1, model=None, classes=CLASSES, replay=False):
    torch.manual_seed(0)
    model = core.model(model or nn.Linear(8, classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lines = []
    core.print = lines.append
    batches = core.batches(data, batch_size=4)
    try:
        fit(
            core, model, optimizer, loss, batches,
            accumulate_grad_batches=accumulated, replay=replay,
        )  # fmt: skip
    finally:
        del core.print
    return lines


LOSSES = {
    "a module": nn.CrossEntropyLoss(),
    "a function": F.cross_entropy,
    "a partial": functools.partial(F.cross_entropy, label_smoothing=0.1),
    "nll": lambda outputs, labels: F.nll_loss(outputs.log_softmax(1), labels.flatten().long()),
    "shifted": lambda outputs, labels: F.cross_entropy(outputs[1:], labels[1:]),
}


@pytest.mark.parametrize("backend", DRY_RUNS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_label_that_no_output_stands_for_is_refused_in_the_first_step(loss, backend):
    class Wrong(Labels):
        def __getitem__(self, index):
            return torch.ones(8), torch.tensor(CLASSES)

    with pytest.raises(WorkerError, match="target 10 is out of range: the model has 10 outputs"):
        quietly(train, Wrong(), LOSSES[loss], cores=1, backend=backend)


@pytest.mark.parametrize("backend", DRY_RUNS)
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("rare", [CLASSES, -1])
def test_a_rare_label_in_a_late_batch_is_refused_on_xla_as_on_a_cpu(rare, replay, backend):
    data = Labels(rare=rare)
    with pytest.raises(WorkerError, match="out of (range|bounds)"):
        quietly(train, data, F.cross_entropy, 1, None, CLASSES, replay, cores=2, backend=backend)


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_the_fix_is_right_for_labels_that_begin_with_one(backend):
    with pytest.raises(WorkerError, match="labels that begin with 0: labels - 1"):
        quietly(train, Labels(1), nn.CrossEntropyLoss(), 4, cores=1, backend=backend)
    quietly(train, Labels(0), nn.CrossEntropyLoss(), 4, cores=1, backend=backend)


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_ignored_targets_and_losses_that_take_no_classes_are_let_through(backend):
    ignoring = nn.CrossEntropyLoss(ignore_index=255)
    quietly(train, Labels(rare=255), ignoring, cores=1, backend=backend)

    def binary(outputs, labels):
        return F.binary_cross_entropy_with_logits(outputs[:, 0], (labels > 4).float())

    quietly(train, Labels(1), binary, 1, None, 1, cores=1, backend=backend)

    def replaced(outputs, labels):
        return F.cross_entropy(outputs, labels.masked_fill(labels == 77, -100))

    quietly(train, Labels(rare=77), replaced, cores=1, backend=backend)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


class ModelOfTheLoss(nn.Module):
    """Computes its loss itself, as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs, labels):
        logits = self.head(inputs)
        return {"loss": F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))}


class Named(Labels):
    def __getitem__(self, index):
        return {"inputs": torch.ones(8), "labels": self.labels[index]}


@pytest.mark.parametrize("backend", DRY_RUNS)
@pytest.mark.parametrize("form", [lambda model: model, torch.compile])
def test_a_loss_that_the_model_computes_and_one_beside_a_compiled_model_are_checked(form, backend):
    if form is torch.compile:
        model = torch.compile(nn.Linear(8, CLASSES), backend="eager")
        arguments = (Labels(rare=CLASSES), F.cross_entropy, 1, model)
    else:
        arguments = (Named(rare=CLASSES), lambda outputs, labels: outputs["loss"], 1)
        arguments += (ModelOfTheLoss(),)
    with pytest.raises(WorkerError, match="out of (range|bounds)"):
        quietly(train, *arguments, cores=1, backend=backend)


class Texts(Labels):
    def __getitem__(self, index):
        return self.labels[index], torch.tensor(0)


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_a_token_beyond_the_vocabulary_is_refused(backend):
    with pytest.raises(WorkerError, match="out of range"):
        quietly(train, Texts(rare=10), F.cross_entropy, 1, Tokens(), cores=1, backend=backend)
    quietly(train, Texts(), F.cross_entropy, 1, Tokens(), cores=1, backend=backend)


@pytest.mark.parametrize("keep_outputs", [True, False])
def test_an_evaluation_refuses_them_with_the_fix(keep_outputs):
    def work(core):
        model = core.model(nn.Linear(8, CLASSES))
        batches = core.batches(Labels(1), batch_size=4)
        evaluate(core, model, F.cross_entropy, batches, keep_outputs=keep_outputs)

    with pytest.raises(WorkerError, match="target 10 is out of range"):
        quietly(work, backend="cpu", cores=1)


@pytest.mark.parametrize("backend", DRY_RUNS)
@pytest.mark.parametrize("rare", [None, 10])
def test_an_evaluation_refuses_a_token_beyond_the_vocabulary(rare, backend):
    def work(core):
        model = core.model(Tokens())
        batches = core.batches(Texts(rare=rare), batch_size=4)
        return evaluate(core, model, F.cross_entropy, batches).loss

    if rare is None:
        quietly(work, backend=backend, cores=2)
    else:
        with pytest.raises(WorkerError, match="out of range"):
            quietly(work, backend=backend, cores=1)


UNEQUAL = {
    "ignore_index": (
        F.cross_entropy,
        Labels(rare=-100),
        'cross_entropy(outputs, labels, reduction="sum"), (labels != -100).sum()',
    ),
    "another ignore_index": (
        nn.CrossEntropyLoss(ignore_index=3),
        Labels(),
        'cross_entropy(outputs, labels, ignore_index=3, reduction="sum"), (labels != 3).sum()',
    ),
    "weights": (
        functools.partial(F.cross_entropy, weight=torch.arange(10.0)),
        Labels(),
        'cross_entropy(outputs, labels, weight=weight, reduction="sum"), weight[labels].sum()',
    ),
}


@pytest.mark.parametrize("backend", DRY_RUNS)
@pytest.mark.parametrize("kind", UNEQUAL)
def test_a_weighted_mean_over_several_batches_is_named_with_the_lines_to_write(kind, backend):
    loss, data, fix = UNEQUAL[kind]
    if kind == "weights" and backend != "cpu":
        pytest.skip("the weights are not on the device")
    lines = quietly(train, data, loss, 2, cores=1, backend=backend).results[0]
    said = [line for line in lines if "plain mean over cores" in line]
    assert len(said) == 1
    assert said[0].endswith(fix)

    def fixed(outputs, labels):
        names = {"cross_entropy": F.cross_entropy, "outputs": outputs, "labels": labels}
        return eval(fix, names | {"weight": torch.arange(10.0)})

    lines = quietly(train, data, fixed, 2, cores=1, backend=backend).results[0]
    assert not [line for line in lines if "plain mean over cores" in line]
    lines = quietly(train, Labels(), F.cross_entropy, 2, cores=1, backend=backend).results[0]
    assert not [line for line in lines if "plain mean over cores" in line]


class Table(torch.utils.data.Dataset):
    """Rows of two categories; the second has a number that the embedding does not have."""

    def __init__(self, wrong):
        self.rows = torch.stack([torch.arange(16) % 5, torch.arange(16) % 7], 1)
        self.rows[2, 1] = wrong

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], torch.tensor([1.0])


class Categories(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(5, 1), nn.Embedding(7, 1)

    def forward(self, rows):
        return self.first(rows[:, 0]) + self.second(rows[..., 1])


@pytest.mark.parametrize("backend", DRY_RUNS)
@pytest.mark.parametrize("wrong", [7, -1, 6])
def test_a_category_of_a_table_that_its_embedding_does_not_have_is_refused(wrong, backend):
    arguments = (Table(wrong), F.mse_loss, 1, Categories())
    if wrong == 6:
        quietly(train, *arguments, cores=2, backend=backend)
        return
    with pytest.raises(WorkerError, match=f"token id {wrong} is out of range"):
        quietly(train, *arguments, cores=2, backend=backend)
