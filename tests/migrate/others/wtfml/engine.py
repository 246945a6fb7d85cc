"""The loop of wtfml: a core's batches through a model that gives its loss."""

import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl


class Engine:
    """Trains and evaluates."""

    def __init__(self, model, optimizer, device, use_tpu=False, tpu_print=10):
        self.model, self.optimizer, self.device = model, optimizer, device

    def _losses(self, loader, train):
        self.model.train(train)
        for batch in pl.MpDeviceLoader(loader, self.device):
            with torch.set_grad_enabled(train):
                _, loss = self.model(**batch)
            if train:
                self.optimizer.zero_grad()
                loss.backward()
                xm.optimizer_step(self.optimizer)
            yield loss.item()

    def train(self, loader):
        """Return the mean of the cores' losses."""
        return self._mean(list(self._losses(loader, True)))

    def evaluate(self, loader):
        """Return the mean of the cores' losses, without a step."""
        return self._mean(list(self._losses(loader, False)))

    def _mean(self, losses):
        return xm.mesh_reduce("loss", sum(losses) / len(losses), lambda cores: sum(cores) / len(cores))
