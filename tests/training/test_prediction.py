import pytest
import torch
from helpers.launching import DRY_RUNS, quietly
from torch import nn
from torch.utils.data import DataLoader

from tpukit import WorkerError, evaluate, predict


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.frozen, self.drop, self.head = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.drop(self.frozen(x)))


class Rows:
    def __init__(self, count, item):
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
        self.item = item

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.item(self.x[index])


ITEMS = {
    "a tensor": lambda x: x,
    "a tuple of one": lambda x: (x,),
    "with targets": lambda x: (x, x.sum()),
    "a mapping": lambda x: {"x": x},
    "a mapping with targets": lambda x: {"x": x, "labels": x.sum()},
}


@pytest.mark.parametrize("backend", DRY_RUNS)
@pytest.mark.parametrize("count", [1, 16, 37])
def test_every_sample_is_predicted_once_in_order_on_every_core(count, backend):
    def work(core):
        model = core.model(Net())
        return [
            predict(core, model, core.batches(Rows(count, item), batch_size=4))
            for item in ITEMS.values()
        ]

    expected = Net().eval()(Rows(count, None).x).detach()
    for cores in (1, 2, 3):
        results = quietly(work, cores=cores, backend=backend).results
        for outputs in (one for found in results for one in found):
            assert (outputs.shape, outputs.dtype, outputs.device.type) == (
                (count, 2),
                torch.float32,
                "cpu",
            )
            assert torch.equal(outputs, results[0][0])
            assert torch.allclose(outputs, expected, atol=1e-5)


def test_the_mode_of_every_layer_is_restored_also_after_an_error():
    def work(core):
        model = core.model(Net())
        model.train()
        model.frozen.eval()
        batches = core.batches(Rows(8, ITEMS["a tensor"]), batch_size=4)
        predict(core, model, batches)
        seen = [[module.training for module in model.modules()]]
        with pytest.raises(KeyError):
            predict(core, model, batches, preprocess={}.__getitem__)
        return [*seen, [module.training for module in model.modules()]]

    assert quietly(work).results == [[[True, False, True, True]] * 2] * 2


def test_prepare_and_bfloat16_are_those_of_evaluate():
    seen = []

    class Noting(Net):
        def forward(self, x):
            outputs = super().forward(x)
            seen.append(outputs.dtype)
            return outputs

    def work(core):
        batches = core.batches(Rows(8, ITEMS["a tensor"]), batch_size=4)
        return predict(
            core, core.model(Noting()), batches, preprocess=lambda x: x * 0, bf16=True
        ), set(seen)

    outputs, dtypes = quietly(work).results[0]
    assert (outputs.dtype, dtypes) == (torch.float32, {torch.bfloat16})
    assert torch.equal(outputs, outputs[:1].expand(8, 2))


def test_shuffled_batches_are_refused_with_the_fix():
    def work(core, **options):
        return predict(
            core,
            core.model(Net()),
            core.batches(Rows(8, ITEMS["a tensor"]), batch_size=4, **options),
        )

    with pytest.raises(
        WorkerError, match="predict needs every sample once, in order; got .* shuffle=True"
    ):
        quietly(lambda core: work(core, shuffle=True))
    assert len(quietly(work).results[0]) == 8


def test_a_dataloader_is_refused_and_the_fix_works():
    def work(core, function):
        model = core.model(Net())
        loader = DataLoader(Rows(8, ITEMS["a tensor"]), batch_size=4)
        try:
            function(core, model, loader)
        except TypeError as error:
            batches = eval(error.fix, {"core": core, "loader": loader})
        return len(predict(core, model, batches))

    for function in (predict, lambda core, model, loader: evaluate(core, model, None, loader)):
        assert quietly(work, function, cores=1).results == [8]
