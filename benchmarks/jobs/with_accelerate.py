"""The small job with accelerate, in the loop of its documentation."""

import torch
from accelerate import Accelerator
from parts import Images, loss_fn, network
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = network()
optimizer = torch.optim.Adam(model.parameters())
images = DataLoader(Images(), batch_size=32, shuffle=True, drop_last=True)
valid = DataLoader(Images(), batch_size=32)
model, optimizer, images, valid = accelerator.prepare(model, optimizer, images, valid)
for epoch in range(2):
    model.train()
    for inputs, targets in images:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
    model.eval()
    losses = []
    for inputs, targets in valid:
        with torch.no_grad():
            outputs, targets = accelerator.gather_for_metrics((model(inputs), targets))
        losses.append(loss_fn(outputs, targets))
    accelerator.print(f"epoch {epoch}: valid loss {torch.stack(losses).mean().item():.4f}")
    accelerator.save_state("run")
