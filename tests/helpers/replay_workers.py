"""One fit after another, replayed and recorded, for the tests of a step that is run again."""

import os

import torch
from helpers.fit_arguments import grouped
from helpers.workers import Pairs
from torch import nn

from tpukit import fit

STEPS = 200 if os.environ.get("TPUKIT_SOAK") else 12


def net(*, dropout=0.0, norm=True):
    torch.manual_seed(1)
    middle = [nn.BatchNorm2d(4)] if norm else []
    layers = [
        nn.Conv2d(3, 4, 3),
        *middle,
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(144, 2),
    ]
    return nn.Sequential(*layers)


class Trained:
    """One fit of a row: what is trained, and how; a row changes it before, and may keep things in it."""

    def __init__(self, core, model=None, optimizer=torch.optim.Adam, lr=1e-2, **settings):
        self.core, self.model = core, core.model(model or net())
        self.optimizer = optimizer(self.model.parameters(), lr=lr, **settings)
        self.loss, self.data, self.options = nn.MSELoss(), Pairs(64 * core.world_size), {}
        self.batches = {"batch_size": 4, "shuffle": True, "drop_last": True}

    def run(self, replay, steps=STEPS):
        lines, say = [], self.core.print
        self.core.print = lambda line: lines.append(line)
        options = {
            "log_every": 5,
            "steps_per_epoch": 6,
            "epochs": max(1, steps // 6),
            **self.options,
        }
        # A second call of fit draws other random numbers; these two are compared.
        self.core.internal.numbers.fits = 0
        try:
            batches = self.core.batches(self.data, **self.batches)
            history = fit(
                self.core,
                self.model,
                self.optimizer,
                self.loss,
                batches,
                replay=replay,
                **grouped(options),
            )
        finally:
            del self.core.print
            assert self.core.print == say
        own = [dict(one) for one in self.optimizer.state.values()]
        average = options["averaged_model"].state_dict() if "averaged_model" in options else {}
        losses = [row["train_loss"] for row in history.intervals]
        found = self.core.to_host([dict(self.model.state_dict()), own, dict(average)])
        return {
            "lines": [line for line in lines if "step" in line or "replay" in line],
            "losses": losses,
            "state": found,
        }


def both(core, table, steps):
    """Train every row of a table twice, replayed and recorded."""
    return {
        name: [make(core).run(replay, steps) for replay in (True, False)]
        for name, make in table.items()
    }


def assert_same(replayed, recorded):
    assert replayed["losses"] == recorded["losses"]
    torch.testing.assert_close(replayed["state"], recorded["state"], rtol=0, atol=0)
