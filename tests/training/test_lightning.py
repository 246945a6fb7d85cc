"""Lightning's Trainer in the processes of a launch: the weights of a loop by hand, on every core."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tpukit import WorkerError, launch
from tpukit.simulator.runtime import why_not

torchmetrics = pytest.importorskip("torchmetrics")
lightning = pytest.importorskip(
    "lightning", reason="lightning is not installed: pip install lightning"
)

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # Lightning's advice, and torch_xla's of its own old names
SIMULATOR = pytest.param(
    "xla:simulator",
    marks=[pytest.mark.xla, pytest.mark.skipif(bool(why_not()), reason=why_not() or "")],
)
XLA_CPU = pytest.param(
    "xla:cpu", marks=[pytest.mark.xla, pytest.mark.only_soak]
)  # the simulator goes further
EVERY_BACKEND = pytest.mark.parametrize("backend", ["cpu", XLA_CPU, SIMULATOR])

inputs = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, (inputs[:, :1] * 2 + inputs[:, 1:2]).tanh())


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)
    )


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()

    def training_step(self, batch, number):
        loss = nn.functional.mse_loss(self.network(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, number):
        self.log(
            "valid_loss", nn.functional.mse_loss(self.network(batch[0]), batch[1]), sync_dist=True
        )

    def predict_step(self, batch, number):
        return self.network(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def with_lightning(core, folder, options, from_core):
    from tpukit.training.lightning import trainer_options

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    keeps = lightning.pytorch.callbacks.ModelCheckpoint(folder, monitor="valid_loss")
    options = {
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "callbacks": [keeps],
        **options,
        **trainer_options(core),
    }
    trainer, module = lightning.Trainer(enable_model_summary=False, **options), Module()
    batches = (
        core.batches(data, batch_size=16, drop_last=True)
        if from_core
        else DataLoader(data, 16, shuffle=True)
    )
    trainer.fit(module, batches, DataLoader(data, 16))
    return {
        "weights": module.network.state_dict(),
        "valid_loss": trainer.callback_metrics["valid_loss"].item(),
        "best": keeps.best_model_path,
        "sent": trainer.strategy.broadcast({"from": core.rank}, src=core.world_size - 1),
        "gathered": trainer.strategy.all_gather(torch.tensor([core.rank])).flatten().tolist(),
        "predicted": len(trainer.predict(module, DataLoader(data, 16))),
    }


def by_hand(core, clip, accumulate, from_core):
    model = core.model(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    sampler = DistributedSampler(data, core.world_size, core.rank)
    loader = DataLoader(data, 16, sampler=sampler)
    batches = core.batches(data, batch_size=16, drop_last=True) if from_core else loader
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(batches, start=1):
            loss = nn.functional.mse_loss(model(x.to(core.device)), y.to(core.device))
            (loss / accumulate).backward()
            if number % accumulate == 0:
                with core.step():
                    core.optimizer_step(optimizer, clip=clip, average_also=buffers)
    return model.state_dict()


@EVERY_BACKEND
@pytest.mark.parametrize(("clip", "accumulate", "from_core"), [(0.1, 1, False), (None, 2, True)])
def test_lightning_trains_to_the_weights_of_a_loop_by_hand_on_every_core(
    backend, clip, accumulate, from_core, tmp_path
):
    options = {"gradient_clip_val": clip, "accumulate_grad_batches": accumulate}
    run = launch(
        with_lightning, tmp_path, options, from_core, cores=2, backend=backend, progress="off"
    )
    expected = launch(
        by_hand, clip, accumulate, from_core, cores=2, backend=backend, progress="off"
    ).results[0]
    for result in run.results:
        for name, weight in expected.items():
            assert torch.allclose(result["weights"][name], weight, atol=1e-6), name
            assert torch.equal(result["weights"][name], run.results[0]["weights"][name]), name
        assert result["sent"] == {"from": 1}
        assert result["gathered"] == [0, 1]
        assert result["valid_loss"] == run.results[0]["valid_loss"]
        assert result["best"] == run.results[0]["best"]
        assert result["predicted"] == 4
    assert {"train_loss", "valid_loss"} <= {name for row in run.log for name in row}
    kept = torch.load(
        run.results[0]["best"], weights_only=True
    )  # on any machine, without torch_xla
    assert {tensor.device.type for tensor in kept["state_dict"].values()} == {"cpu"}


@EVERY_BACKEND
def test_bfloat16_is_computed_in_on_the_device(backend):
    class Looked(Module):
        def training_step(self, batch, number):
            self.found = self.network(batch[0]).dtype
            return super().training_step(batch, number)

    def work(core):
        from tpukit.training.lightning import trainer_options

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        options = {
            "enable_checkpointing": False,
            "precision": "bf16-mixed",
            **trainer_options(core),
        }
        trainer, module = (
            lightning.Trainer(max_steps=2, enable_model_summary=False, **options),
            Looked(),
        )
        trainer.fit(module, DataLoader(data, 16))
        return module.found, {weight.dtype for weight in module.parameters()}

    assert launch(work, cores=1, backend=backend, progress="off").results == [
        (torch.bfloat16, {torch.float32})
    ]


def test_without_its_options_every_trainer_trains_alone():
    def alone(core):
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        return lightning.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False
        ).world_size

    assert launch(alone, cores=2, progress="off").results == [1, 1]


def test_cores_that_share_a_process_are_refused_with_a_fix():
    def shared(core):
        from tpukit.training.lightning import trainer_options

        core.backend.shares_process = True
        trainer_options(core)

    with pytest.raises(Exception, match=r"(?s)one rank per process.*cores=1\), or tpukit.fit"):
        launch(shared, cores=1, progress="off")


def quiet_trainer(core, **options):
    from tpukit.training.lightning import trainer_options

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = {
        "max_epochs": 1,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        **options,
        **trainer_options(core),
    }
    return lightning.Trainer(**options)


class Scored(Module):
    """A module with metric objects, one of them made in a hook."""

    def __init__(self):
        super().__init__()
        self.error = torchmetrics.MeanMetric()

    def on_validation_start(self):
        self.all = torchmetrics.CatMetric()

    def validation_step(self, batch, number):
        self.error.update(batch[1].mean())
        self.all.update(batch[0][:, 0])
        self.log("error", self.error)

    def on_validation_epoch_end(self):
        self.count = len(self.all.compute())


@EVERY_BACKEND
def test_metric_objects_hold_the_samples_of_all_cores(backend):
    def work(core):
        module = Scored()
        trainer = quiet_trainer(core)
        trainer.validate(module, DataLoader(data, 16), verbose=False)
        # The module leaves the run as it came, so its metrics hold no core any more.
        is_free = module.error.dist_sync_fn is None
        return trainer.callback_metrics["error"].item(), module.count, is_free

    run = launch(work, cores=2, backend=backend, progress="off")
    for error, count, is_free in run.results:
        assert error == pytest.approx(data.tensors[1].mean().item(), abs=1e-6)
        assert count == 128
        assert is_free


def test_sync_batchnorm_of_the_trainer_is_that_of_the_joined_batch():
    class Plain(Module):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def work(core, sync):
        module = Plain()
        trainer = quiet_trainer(core, sync_batchnorm=sync, max_steps=1)
        trainer.fit(module, core.batches(data, batch_size=64))
        return module.network.state_dict(), type(module.network[1]).__name__

    module = Plain()
    optimizer = module.configure_optimizers()
    nn.functional.mse_loss(module.network(data.tensors[0]), data.tensors[1]).backward()
    optimizer.step()
    found = {}
    for sync in (False, True):
        run = launch(work, sync, cores=2, backend="cpu", progress="off")
        weights, kind = run.results[0]
        assert kind == "BatchNorm1d"
        found[sync] = torch.allclose(weights["0.weight"], module.network[0].weight, atol=1e-6)
    assert found == {False: False, True: True}


@EVERY_BACKEND
def test_tied_weights_stay_tied_over_validate_and_two_fits(backend):
    class Tied(Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8, bias=False)
            self.outer = nn.Linear(8, 8, bias=False)
            self.outer.weight = self.inner.weight
            self.network = nn.Sequential(self.inner, nn.Tanh(), self.outer, nn.Linear(8, 1))

    def work(core):
        module = Tied()
        quiet_trainer(core).validate(module, DataLoader(data, 16), verbose=False)
        for _ in range(2):
            quiet_trainer(core).fit(module, DataLoader(data, 16))
        return module.inner.weight is module.outer.weight

    assert launch(work, cores=2, backend=backend, progress="off").results == [True, True]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, first, step):
        self.numbers = range(first, 128, step)

    def __iter__(self):
        return map(data.__getitem__, self.numbers)


def fit_stream(core, is_divided):
    stream = Stream(core.rank, core.world_size) if is_divided else Stream(0, 1)
    quiet_trainer(core).fit(Module(), DataLoader(stream, 16))
    return True


def test_a_stream_that_gives_every_core_the_same_batches_is_refused():
    with pytest.raises(WorkerError, match="does not divide a stream") as caught:
        launch(fit_stream, False, cores=2, backend="cpu", progress="off")
    assert "core.batches(stream, batch_size=16" in caught.value.fix


def test_a_stream_that_the_user_has_divided_trains():
    assert launch(fit_stream, True, cores=2, backend="cpu", progress="off").results == [True] * 2
