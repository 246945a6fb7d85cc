"""Measure the compile time of a session, without and with a compilation cache.

The step is that of the walkthrough: a ResNet-34 with ten labels and Adam, on the simulator of
libtpu. Each round has a new folder; the first launch compiles and keeps, the second, in processes
as new as those of a restarted session, loads. A turn's figure is what torch_xla counts as
compiling, so reading, checking, writing and XLA's own loading are in it; that of a kind is the
median of its turns. XLA:CPU loads the machine code of this processor: the time in which libtpu
loads a TPU's programs is not known.
"""

import argparse
import json
import statistics
import tempfile

TARGET = 0.1


def main() -> None:
    """Measure both launches, print the table, and last one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind")
    parser.add_argument("--network", default="resnet34", help="of torchvision")
    options = parser.parse_args()
    turns = {"compiled and kept": [], "loaded": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for found in turns.values():
                found.append(trained(options.network, folder))
    print(f"all graphs of {options.network} and Adam on one core of the simulator, in s")
    medians = {
        name: statistics.median(one["seconds"] for one in found) for name, found in turns.items()
    }
    for name, found in turns.items():
        each = ", ".join(f"{one['seconds']:.2f}" for one in found)
        graphs = ", ".join(
            f"{one['compiled']} compiled and {one['loaded']} loaded" for one in found[:1]
        )
        print(f"  {name:<18} {medians[name]:6.2f}   of {each}; {graphs}")
    cold, warm = medians.values()
    losses = []
    for found in turns.values():
        losses += [one["losses"] for one in found]
    equal = all(one == losses[0] for one in losses)
    print(f"target: at most {TARGET} of the first, and the same losses to the last bit")
    figures = {"cold_s": round(cold, 2), "warm_s": round(warm, 2), "ratio": round(warm / cold, 3)}
    print(json.dumps(figures | {"losses_equal": equal}))


def trained(network: str, folder: str) -> dict:
    """Launch a few steps with a folder of compiled programs; return losses and compile times."""
    from tpukit import launch

    options = {"cores": 1, "backend": "xla:simulator", "seed": 0, "progress": "off"}
    return launch(train, network, compile_cache=folder, **options).results[0]


def train(core, network: str, steps: int = 3) -> dict:
    """Train for some steps on random images; return the losses and what compiling took."""
    import torch
    from torchvision import models

    torch.manual_seed(0)
    model = core.model(getattr(models, network)(weights=None, num_classes=10)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    criterion = torch.nn.BCEWithLogitsLoss()
    numbers = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        images, labels = core.to_device(
            [
                torch.randn(4, 3, 32, 32, generator=numbers),
                torch.rand(4, 10, generator=numbers).round(),
            ]
        )
        with core.step():
            loss = criterion(model(images), labels)
            loss.backward()
            core.optimizer_step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = core.backend.metrics()["CompileTime"][1] / 1e9
    return {
        "losses": losses,
        "seconds": seconds,
        "compiled": core.backend.compiles()[0],
        "loaded": core.backend.loads()[0],
    }


if __name__ == "__main__":
    main()
