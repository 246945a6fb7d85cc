"""How long does the host take to record a step? As PyTorch records it, and as the kit does.

A TPU computes nothing before torch_xla has recorded the step in Python, so a step lasts at least that long. The step is
that of `fit` in the walkthrough: a ResNet-34 with ten labels, bfloat16 autocast, Adam. It is recorded on XLA:CPU and
never run, so the size of the images does not matter. The kit records Adam as one operation for each parameter
(`tpukit/essentials/backends/adam.py`), for all of a process, so each turn is a process of its own, the kinds by turns.
A turn's figure is the median of its steps, in seconds of the processor; that of a kind the median of its turns.
"""

import argparse
import contextlib
import json
import statistics
import time
from unittest import mock

STEPS, LEFT_OUT = 12, 4
TARGET = 0.4
KINDS = {"as PyTorch has it": False, "with a short Adam": True}


def main() -> None:
    """Measure both kinds, print the table, and last one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind")
    parser.add_argument("--network", default="resnet34", help="of torchvision")
    options = parser.parse_args()
    turns = {name: [] for name in KINDS}
    for _ in range(options.rounds):
        for name, short in KINDS.items():
            turns[name].append(record(options.network, short))
    print(f"a step of {options.network} with Adam, recorded and not run, in ms of one processor")
    for name, found in turns.items():
        each = ", ".join(f"{1000 * one:.1f}" for one in found)
        print(f"  {name:<18} {1000 * statistics.median(found):6.1f}   of {each}")
    theirs, ours = (statistics.median(found) for found in turns.values())
    print(f"target: at most {TARGET} of PyTorch's")
    print(json.dumps({"record_ms": round(1000 * ours, 1), "vs_pytorch": round(ours / theirs, 2)}))


def record(network: str, short: bool) -> float:
    """Return the median seconds of a step's recording, in a process of its own, with a short Adam or PyTorch's."""
    from tpukit import launch

    kept = mock.patch("tpukit.essentials.backends.adam.shorten_adam") if not short else contextlib.nullcontext()
    with kept:
        return launch(recorded, network, cores=1, backend="xla:cpu", progress="off").results[0]


def recorded(core, network: str) -> float:
    """Record steps, one after the other, into a graph that is never run; return their median seconds."""
    import torch
    from torchvision import models

    from tpukit.pe import normalize
    from tpukit.train.step import TrainStep

    model = core.model(getattr(models, network)(weights=None, num_classes=10)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    loss = torch.nn.BCEWithLogitsLoss()
    step = TrainStep(core, model, optimizer, loss, prepare=normalize, bf16=True, shapes=STEPS)
    batch = core.to_device([torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(2, 10)])
    (flag,) = core.to_device([torch.zeros(())])
    core.backend.sync()
    core.backend.sync = lambda: None
    seconds = []
    for number in range(1, STEPS + 1):
        began = time.thread_time()
        step(number, (batch,), flag)
        seconds.append(time.thread_time() - began)
    return statistics.median(seconds[LEFT_OUT:])


if __name__ == "__main__":
    main()
