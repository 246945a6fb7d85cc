"""A training for large batches on any TPU: linear scaling of the rate, warmup and LARS.

As a job, from a clone:

    python -m tpukit job examples/train.py --to vertex --chip v5e-8 --bucket gs://my-bucket/jobs \\
        -p pack /gcs/my-bucket/packed -p steps 5000 -p epochs 10

`tpukit.pack("images", "packed")` writes the pack, for a folder with one subfolder per class. In a
job of Vertex AI a bucket is the folder /gcs/my-bucket. A hundred steps show how many images per
second the machine trains.
"""

import json

import torch
from torch import nn

import tpukit

# %% tags=["parameters"]
pack = "packed"
steps = 100  # per epoch
epochs = 1
batch_size = 128  # per core
size = 128


# %%
def train(core, pack, steps, epochs, batch_size, size):
    """Train ResNet-18 on a pack.

    Returns:
        the speed, and the last row of the history with TFLOP/s and MFU.
    """
    import torchvision

    images = tpukit.PackedImages(pack, size=size)
    train_part, valid_part = images.split(valid=0.2, stratify=True)
    train_images = torch.utils.data.Subset(images, train_part)
    valid_images = torch.utils.data.Subset(images, valid_part)
    batches = core.batches(train_images, batch_size=batch_size, shuffle=True, drop_last=True)
    valid = core.batches(valid_images, batch_size=batch_size)

    model = core.model(torchvision.models.resnet18(num_classes=len(images.classes)))
    # The rate grows with the batch, so it must be reached slowly: Goyal et al., arXiv:1706.02677.
    optimizer = tpukit.training.LARS(
        model.parameters(), lr=3.0 * batches.samples_per_step / 256, weight_decay=5e-5
    )
    schedule = tpukit.training.schedules.cosine(
        optimizer, steps * epochs, warmup=steps * epochs // 10
    )
    history = tpukit.fit(
        core,
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        batches,
        valid,
        epochs=epochs,
        steps_per_epoch=steps,
        scheduler=schedule,
        preprocess=lambda pixels: pixels / 255,
        bf16=True,
        # A relative path: a job that is started again continues from there.
        checkpoints=f"checkpoints/{steps}x{epochs}",
    )
    core.save(model.state_dict(), "model.pt")
    return {"images_per_second": round(history.samples_per_second, 1), **history.epochs[-1]}


# %%
run = tpukit.launch(train, pack, steps, epochs, batch_size, size)
with open("metrics.json", "w") as file:
    json.dump(run.results[0], file)
print(run.results[0])
