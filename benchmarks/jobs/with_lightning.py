"""The small job with Lightning's Trainer."""

import lightning
import torch
from parts import Images, loss_fn, network
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    """The network, its loss and its optimizer."""

    def __init__(self):
        super().__init__()
        self.model = network()

    def training_step(self, batch, index):
        """Return the loss of a batch."""
        inputs, targets = batch
        return loss_fn(self.model(inputs), targets)

    def validation_step(self, batch, index):
        """Log the loss of a batch."""
        inputs, targets = batch
        self.log("valid_loss", loss_fn(self.model(inputs), targets), sync_dist=True)

    def configure_optimizers(self):
        """Return Adam."""
        return torch.optim.Adam(self.parameters())


images = DataLoader(Images(), batch_size=32, shuffle=True, drop_last=True)
valid = DataLoader(Images(), batch_size=32)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, num_sanity_val_steps=0
)
trainer.fit(Module(), images, valid)
