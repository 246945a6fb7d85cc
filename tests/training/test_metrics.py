import numpy as np
import pytest
import torch
import torchmetrics
from helpers.launching import DRY_RUNS, quietly
from sklearn.metrics import roc_auc_score
from torch import nn
from torchmetrics.classification import BinaryJaccardIndex, MulticlassAccuracy, MultilabelAUROC
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef

from tpukit import FitOptions, WorkerError, evaluate, fit
from tpukit.essentials.launcher import gather_objects


class Rows:
    """Rows of four numbers with two labels; the second is rare and comes late, so cores see different things."""

    def __init__(self, count=37, classes=False):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, 4, generator=generator)
        self.y = torch.stack([self.x[:, 0] > 0, torch.arange(count) % 5 == 0], 1).float()
        self.y = self.y[:, 0].long() if classes else self.y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def net():
    torch.manual_seed(1)
    return nn.Linear(4, 2)


LOSS = nn.BCEWithLogitsLoss()


class Counted(torchmetrics.Metric):
    """How many samples were seen: one that is repeated to fill a step would count twice."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("largest", torch.tensor(-9.0), dist_reduce_fx="max")
        self.add_state("rows", [], dist_reduce_fx=None)

    def update(self, outputs, targets):
        self.seen += len(outputs)
        self.largest = torch.maximum(self.largest, outputs.max())
        self.rows += list(outputs)

    def compute(self):
        assert self.largest == torch.stack(self.rows).max()
        assert len(self.rows) == self.seen
        return self.seen.float()


class Correlation(PearsonCorrCoef):
    """A state that is not reduced but combined in `compute`, of one of two columns."""

    def update(self, outputs, targets):
        super().update(outputs[:, 0], targets[:, 0].float())


def metrics():
    return {
        "auroc": MultilabelAUROC(num_labels=2),  # its state is all it has seen
        "jaccard": BinaryJaccardIndex(),  # sums
        "seen": Counted(),
        "correlation": Correlation(),
    }


@pytest.mark.parametrize("backend", DRY_RUNS)
@pytest.mark.parametrize("count", [3, 37, 40])  # of 3, the second core has none
def test_streamed_metrics_are_those_of_all_samples_over_any_number_of_cores(count, backend):
    data = Rows(count)

    def work(core, keep_outputs):
        model = core.model(net())
        return evaluate(
            core,
            model,
            LOSS,
            core.batches(data, batch_size=4),
            metrics=metrics(),
            keep_outputs=keep_outputs,
        )

    outputs = net()(data.x).detach()
    for cores in (1, 2, 3):
        for kept in (True, False):
            for found in quietly(work, kept, cores=cores, backend=backend).results:
                assert found.metrics["seen"] == count
                assert found.loss == pytest.approx(LOSS(outputs, data.y).item(), abs=1e-6)
                for column in (0, 1) if count > 3 else ():
                    assert len(data.y[:, column].unique()) == 2
                if count > 3:
                    auroc = roc_auc_score(data.y.numpy(), outputs.numpy())
                    assert found.metrics["auroc"] == pytest.approx(auroc, abs=1e-6)
                correlation = np.corrcoef(outputs[:, 0], data.y[:, 0])[0, 1]
                assert found.metrics["correlation"] == pytest.approx(correlation, abs=1e-5)
                positive, true = outputs.sigmoid() > 0.5, data.y == 1
                expected = ((positive & true).sum() / (positive | true).sum()).item()
                assert found.metrics["jaccard"] == pytest.approx(expected, abs=1e-6)
                assert (found.outputs is None) == (found.targets is None) == (not kept)
                assert repr(found).startswith(
                    f"Evaluation: {count} samples, loss" if kept else "Evaluation: loss"
                )


def test_a_metric_made_of_others_and_one_that_chooses_its_part_are_combined_too():
    class First(MulticlassAccuracy):
        def update(self, outputs, targets):
            super().update(outputs["class"], targets)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = net()

        def forward(self, x):
            return {"class": self.linear(x), "norm": x.norm(dim=1)}

    def work(core, keep_outputs):
        made = {
            "first": First(num_classes=2, average="micro"),
            "wrong": 1 - First(num_classes=2, average="micro"),
        }
        loss = lambda outputs, targets: nn.functional.cross_entropy(outputs["class"], targets)  # noqa: E731
        batches = core.batches(Rows(classes=True), batch_size=4)
        found = evaluate(
            core, core.model(Net()), loss, batches, metrics=made, keep_outputs=keep_outputs
        )
        assert found.metrics["wrong"] == pytest.approx(1 - found.metrics["first"])
        return found.metrics, found.loss

    results = [
        quietly(work, kept, cores=cores).results[0] for kept in (True, False) for cores in (1, 2)
    ]
    assert len({round(numbers["first"], 6) for numbers, _ in results}) == 1
    assert [loss for _, loss in results] == pytest.approx([results[0][1]] * 4, abs=1e-6)


def test_fit_streams_too_and_its_curve_is_the_same():
    def work(core, keep_outputs):
        model = core.model(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = core.batches(Rows(48), batch_size=4, shuffle=True, drop_last=True)
        valid = core.batches(Rows(), batch_size=4)
        options = {
            "metrics": metrics(),
            "monitor": "valid_auroc",
            "options": FitOptions(keep_outputs=keep_outputs),
        }
        return fit(core, model, optimizer, LOSS, train, valid, epochs=3, **options)

    kept, streamed = (quietly(work, keep).results[0] for keep in (True, False))
    names = [name for name in kept.epochs[0] if name.startswith("valid")]
    assert len(names) == 5
    for one, other in zip(kept.epochs, streamed.epochs, strict=True):
        assert [one[name] for name in names] == pytest.approx(
            [other[name] for name in names], abs=1e-5
        )
    assert kept.best["epoch"] == streamed.best["epoch"]


def test_the_metrics_that_were_passed_are_left_as_they_were():
    def work(core):
        mine = metrics()
        evaluate(
            core,
            core.model(net()),
            LOSS,
            core.batches(Rows(), batch_size=4),
            metrics=mine,
            keep_outputs=False,
        )
        return [metric.update_called for metric in mine.values()]

    assert quietly(work).results == [[False] * 4] * 2


@pytest.mark.parametrize("made", [[LOSS], LOSS, {"loss": "mse"}])
def test_metrics_that_are_no_functions_by_name_are_refused_and_the_fix_works(made):
    def work(core, metrics):
        batches = core.batches(Rows(), batch_size=4)
        return evaluate(core, core.model(net()), LOSS, batches, metrics=metrics).metrics

    with pytest.raises(WorkerError, match="metrics must be functions by name, got") as failure:
        quietly(work, made)
    fixed = eval(failure.value.fix.partition("metrics=")[2])
    assert quietly(work, fixed).results[0].keys() == {"mse"}


class Averaged(MeanSquaredError):
    def __init__(self):
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda outputs, targets: outputs.mean(), "right is a function"),
        (
            Averaged(),
            "Averaged takes the plain mean of 'mean' over the cores, although cores may "
            "have different numbers of samples",
        ),
    ],
)
def test_what_cannot_be_combined_exactly_is_refused_and_the_fix_works(metric, message):
    def work(core, keep_outputs):
        batches = core.batches(Rows(), batch_size=4)
        options = {"metrics": {"right": metric}, "keep_outputs": keep_outputs}
        return evaluate(core, core.model(net()), LOSS, batches, **options).metrics

    with pytest.raises(WorkerError, match=message) as failure:
        quietly(work, False)
    assert "keep_outputs=True" in str(failure.value)
    assert quietly(work, True).results[0].keys() == {"right"}


@pytest.mark.parametrize("backend", DRY_RUNS)
def test_objects_of_any_size_are_gathered(backend):
    def work(core):
        found = gather_objects(
            core, {"rank": core.rank, "rows": [torch.arange(core.rank * 1000)], "none": None}
        )
        return found, core.step_seconds

    for found, step_seconds in quietly(work, cores=3, backend=backend).results:
        assert (
            step_seconds is None
        )  # no step of the user's, by whose length the report judges the batch size
        assert [each["rank"] for each in found] == [0, 1, 2]
        assert [len(each["rows"][0]) for each in found] == [0, 1000, 2000]
        assert torch.equal(found[2]["rows"][0], torch.arange(2000))
