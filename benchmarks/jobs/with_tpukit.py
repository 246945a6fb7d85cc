"""The small job with tpukit."""

import torch
from parts import Images, loss_fn, network

import tpukit


def train(core):
    """Train and evaluate on every core."""
    model = core.model(network())
    optimizer = torch.optim.Adam(model.parameters())
    images = core.batches(Images(), batch_size=32, shuffle=True, drop_last=True)
    valid = core.batches(Images(), batch_size=32)
    tpukit.fit(core, model, optimizer, loss_fn, images, valid, epochs=2, checkpoints="run")


tpukit.launch(train, cores=2, backend="cpu")
