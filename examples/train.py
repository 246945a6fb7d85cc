"""A trainer for large batches on any TPU: linear scaling of the rate, warmup, LARS, and images a second first.

A hundred steps tell what a machine is worth; then the same trainer runs as long as it should:

    python -m tpukit job examples/train.py:train --target vertex --args '["gs://my-bucket/packed", 100]' ...
    python -m tpukit job examples/train.py:train --target vertex --args '["gs://my-bucket/packed", 5000, 10]' ...

The pack is what `tpukit.pack("images", "packed")` writes for a folder with one sub-folder per class.
"""

import torch
from torch import nn

import tpukit
from tpukit.cloud.folders import checkpoint_folder, model_folder, mounted


def train(core, pack: str, steps: int = 100, epochs: int = 1, batch_size: int = 128, size: int = 128) -> dict:
    """Train ResNet-18 on a pack; return the images a second of all cores, and the last row of the history."""
    import torchvision

    images = tpukit.Records(mounted(pack), size=size)
    parts = [torch.utils.data.Subset(images, part) for part in images.split(valid=0.2, stratify=True)]
    batches = core.batches(parts[0], batch_size=batch_size, shuffle=True, drop_last=True)
    valid = core.batches(parts[1], batch_size=batch_size)

    model = core.model(torchvision.models.resnet18(num_classes=len(images.classes)))
    # The rate grows with the batch, so it must be reached slowly: Goyal and others, arXiv:1706.02677.
    optimizer = tpukit.train.LARS(model.parameters(), lr=3.0 * batches.samples_per_step / 256, weight_decay=5e-5)
    schedule = tpukit.train.schedules.cosine(optimizer, steps * epochs, warmup=steps * epochs // 10)
    history = tpukit.fit(
        core,
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        batches,
        valid,
        epochs=epochs,
        steps_per_epoch=steps,
        schedule=schedule,
        prepare=lambda pixels: pixels / 255,
        bf16=True,
        folder=checkpoint_folder("runs/checkpoints") / f"{steps}x{epochs}",  # the hundred steps are a run of their own
    )
    folder = model_folder("runs/model")
    folder.mkdir(parents=True, exist_ok=True)
    core.save(model.state_dict(), folder / "model.pt")
    return {"images_per_second": round(history.samples_per_second, 1), **history.epochs[-1]}
