"""Adam's state, which `fit` creates on XLA before its first step: the bits and the keys are PyTorch's."""

import contextlib
from unittest import mock

import pytest
import torch
from helpers.launching import quietly
from helpers.sources import Items
from torch import nn

from tpukit import FitOptions, fit

pytestmark = pytest.mark.xla

SETTINGS = {
    "Adam": (torch.optim.Adam, {}),
    "Adam, decay in the gradients": (torch.optim.Adam, {"weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {}),
    "maximize": (torch.optim.AdamW, {"maximize": True}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
}


class Net(nn.Module):
    """A network with a frozen layer, a layer that no step uses, and a layer that only later steps use."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.late = nn.Linear(16, 10)
        self.last = nn.Linear(16, 10)
        self.steps = 0

    def forward(self, images):
        self.steps += 1
        hidden = self.frozen(self.first(images))
        outputs = self.last(hidden)
        return outputs + self.late(hidden) if self.steps > 2 else outputs


def trained(core, kind, options, is_created):
    """Return the weights and the optimizer's state after four steps."""
    torch.manual_seed(0)
    data = Items([(torch.randn(3, 4, 4), torch.rand(10).round()) for _ in range(16)])
    model = core.model(Net())
    groups = [{"params": [*model.first.parameters()], "lr": 0.01}]
    groups += [{"params": [p for name, p in model.named_parameters() if "first" not in name]}]
    optimizer = kind(groups, lr=0.1, **options)
    torchs_own = mock.patch(
        "tpukit.training.trainer.adam_state_created",
        return_value=contextlib.nullcontext(),
    )
    with contextlib.nullcontext() if is_created else torchs_own:
        history = fit(
            core,
            model,
            optimizer,
            nn.BCEWithLogitsLoss(),
            core.batches(data, batch_size=4, drop_last=True),
            options=FitOptions(log_every=1),
        )
    losses = [row["train_loss"] for row in history.intervals]
    return losses, model.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize(("kind", "options"), SETTINGS.values(), ids=SETTINGS)
def test_weights_and_state_have_the_bits_and_keys_of_the_optimizers_own_first_step(kind, options):
    ours, torchs = (
        quietly(trained, kind, options, is_created, cores=1, backend="xla:cpu").results[0]
        for is_created in (True, False)
    )
    leaves = [torch.utils._pytree.tree_flatten(one) for one in (ours, torchs)]
    assert leaves[0][1] == leaves[1][1]  # the same keys, so no state of the unused layer
    for one, other in zip(leaves[0][0], leaves[1][0], strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
