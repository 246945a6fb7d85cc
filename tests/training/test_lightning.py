"""Lightning's Trainer in the processes of a launch: the weights of a loop by hand, on every core."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tpukit import launch
from tpukit.simulator.runtime import why_not

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

    with pytest.raises(Exception, match=r"(?s)one rank for each process.*cores=1\), or tpukit.fit"):
        launch(shared, cores=1, progress="off")
