"""What does it cost to compare the cores? One comparison of a ResNet-34, and an epoch of the
walkthrough.

    python benchmarks/same.py [--backend xla] [--epoch 60]

The last line is JSON: seconds of processor and of time for one comparison, the first (which
compiles) left out, and its share of an epoch of so many seconds.
"""

import argparse
import json
import time

import torch

import tpukit
from tpukit.essentials.launcher import Core, launch


def measure(core: Core, repeats: int) -> dict[str, float]:
    """Compare a ResNet-34 several times; return the medians."""
    model = core.model(tpukit.pe.resnet34())
    optimizer = torch.optim.Adam(model.parameters())
    found = []
    for number in range(repeats + 1):
        began = time.monotonic()
        used = time.process_time()
        compiled = (core.backend.compiles() or (0, 0))[0]
        core.internal.agreement.compare(
            "in a benchmark",
            modules={"": model},
            optimizers=[optimizer],
            run={"number": number},
        )
        compiled = (core.backend.compiles() or (0, 0))[0] - compiled
        found.append((time.monotonic() - began, time.process_time() - used, compiled))
    seconds, processor, compiles = (
        sorted(column)[repeats // 2] for column in zip(*found[1:], strict=True)
    )
    return {"seconds": seconds, "processor_seconds": processor, "compiles": compiles}


def main() -> None:
    """Measure, and print a line and its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--epoch", type=float, default=60.0, help="seconds of an epoch")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    result = launch(measure, given.repeats, cores=2, backend=given.backend, progress="off").results[
        0
    ]
    share = result["processor_seconds"] / given.epoch
    print(
        f"{given.backend}: {result['processor_seconds']:.3f} s of processor, {share:.2%} of "
        f"{given.epoch:g} s"
    )
    print(json.dumps({"benchmark": "same", "backend": given.backend, **result, "share": share}))


if __name__ == "__main__":
    main()
