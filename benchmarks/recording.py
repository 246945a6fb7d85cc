"""Measure the host's time for a step: PyTorch's recording, that of `fit`, and `fit(replay=True)`.

A TPU computes nothing before torch_xla has recorded the step in Python, so a step lasts at least
that long. The step is that of `fit` in the walkthrough: a ResNet-34 with ten labels, bfloat16
autocast, Adam. It is recorded on XLA:CPU and never run, so the size of the images does not matter.
tpukit records Adam as one operation for each parameter (`tpukit/accelerators/adam.py`), and on
request runs the program of a captured step again (`tpukit/training/replay.py`). A replayed step is
timed in steps that are run, on images of 32 pixels: the seconds are of the thread that trains, and
XLA:CPU computes in others.

The kinds take turns, and each turn is a new process. The figure of a turn is the median of its
steps, in seconds of processor time. The figure of a kind is the median of its turns.
"""

import argparse
import contextlib
import json
import statistics
import time
from unittest import mock

STEPS = 12
LEFT_OUT = 4
TARGET = 0.25
REPLAY_TARGET = 0.15
CHIP_TARGET = 0.25
# a step of 128 images of 128 px on a v5e, by the TPU compiler's count: benchmarks/preflight.py
CHIP_MS = 9.0
KINDS = ("PyTorch's Adam", "fit, the default", "fit(replay=True)")


def main() -> None:
    """Measure each kind, print the table, and last one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind")
    parser.add_argument("--network", default="resnet34", help="of torchvision")
    options = parser.parse_args()
    turns = {name: [] for name in KINDS}
    for _ in range(options.rounds):
        for name in KINDS:
            turns[name].append(measure(options.network, name))
    print(f"a step of {options.network} with Adam on the host, in ms of one processor")
    for name, found in turns.items():
        each = ", ".join(f"{1000 * one:.1f}" for one in found)
        print(f"  {name:<18} {1000 * statistics.median(found):6.1f}   of {each}")
    theirs, ours, replayed = (statistics.median(found) for found in turns.values())
    print(
        f"target: recorded at most {TARGET} of PyTorch's, replayed at most {REPLAY_TARGET} of "
        "recorded"
    )
    print(
        f"and {CHIP_TARGET} of the {CHIP_MS:g} ms that a v5e needs for a ResNet-34's, by its "
        "compiler's count"
    )
    found = {
        "record_ms": round(1000 * ours, 1),
        "replay_ms": round(1000 * replayed, 2),
        "pytorch_ms": round(1000 * theirs, 1),
        "chip_ms": CHIP_MS,
    }
    ratios = {
        "replay_vs_record": replayed / ours,
        "host_vs_chip": 1000 * replayed / CHIP_MS,
        "vs_pytorch": ours / theirs,
    }
    print(json.dumps(found | {name: round(value, 2) for name, value in ratios.items()}))


def measure(network: str, kind: str) -> float:
    """Return the median seconds of a step, in a new process."""
    from tpukit import launch

    is_theirs = kind == KINDS[0]
    kept = mock.patch("tpukit.accelerators.shorten_adam") if is_theirs else contextlib.nullcontext()
    with kept:
        return launch(
            stepped, network, kind == KINDS[2], cores=1, backend="xla:cpu", progress="off"
        ).results[0]


def stepped(core, network: str, replayed: bool) -> float:
    """Take steps and return their median seconds; without `replayed` they are never run."""
    import torch
    from torchvision import models

    from tpukit.pe import normalize
    from tpukit.training.step import TrainStep

    model = core.model(getattr(models, network)(weights=None, num_classes=10)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    loss = torch.nn.BCEWithLogitsLoss()
    options = {"preprocess": normalize, "bf16": True, "shapes": STEPS, "replay": replayed}
    step = TrainStep(
        core,
        model,
        optimizer,
        loss,
        arrange=lambda batch: batch,
        further_parts=lambda batch: (),
        **options,
    )
    batch = core.to_device([torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(2, 10)])
    flags = tuple(core.to_device([torch.zeros(()), torch.zeros(())]))
    core.backend.sync()
    if not replayed:
        core.backend.sync = lambda: None
    seconds = []
    for number in range(1, STEPS + 1):
        began = time.thread_time()
        losses = step(number, (batch,), flags)
        seconds.append(time.thread_time() - began)
        if replayed:
            core.to_host(losses)  # a program that still runs would be waited for in the next step
    return statistics.median(seconds[LEFT_OUT:])


if __name__ == "__main__":
    main()
