"""What does a session save? The second run of a function over the first, and over a second launch.

    python benchmarks/session.py [--backend cpu xla:cpu xla] [--cores 2]

It prints a row per backend. `start` is the time from the call of `session.run` to its return with
a function that does nothing, the median of nine runs. The last line is JSON. The program ends with
1 if a second run compiles something, or if three runs are not one uninterrupted run to the bit.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

import tpukit

MOST_SECONDS = {"cpu": 0.1, "cuda": 0.1, "xla:cpu": 0.2, "xla": 0.2}  # of a start
_STEPS = 5  # per run
_RUNS = 3


def train(core: tpukit.Core, steps: int) -> tuple[list[str], int]:
    """Train a small network with dropout and Adam; return the losses and the compilations."""
    state = core.state
    if not hasattr(state, "model"):
        layers = torch.nn.Linear(20, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 1)
        state.model = core.model(torch.nn.Sequential(*layers))
        state.optimizer = torch.optim.Adam(state.model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        (inputs,) = core.to_device([torch.rand(32, 20)])
        with core.step():
            loss = (state.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            core.optimizer_step(state.optimizer)
        losses.append(loss.detach())
    compiled, _ = core.backend.compiles() or (0, 0.0)
    return [loss.item().hex() for loss in core.to_host(losses)], compiled


def nothing(core: tpukit.Core) -> int:
    """Return at once."""
    return core.rank


def timed(run: Callable, *args: object) -> tuple[tpukit.essentials.launcher.Run, float]:
    """Return the result of a call, and its seconds."""
    began = time.monotonic()
    result = run(*args)
    return result, time.monotonic() - began


def measure(backend: str, cores: int) -> dict:
    """Measure one backend."""
    launch = functools.partial(tpukit.launch, cores=cores, backend=backend, seed=0, progress="off")
    whole, _ = timed(launch, train, _STEPS * _RUNS)
    _, second_launch = timed(launch, train, _STEPS)
    with tpukit.Session(cores, backend, progress="off") as session:
        run = functools.partial(session.run, progress="off")
        runs = [timed(run, train, _STEPS) for _ in range(_RUNS)]
        starts = [timed(run, nothing)[1] for _ in range(9)]
    losses = [sum((found.results[rank][0] for found, _ in runs), []) for rank in range(cores)]
    compiled = [found.results[0][1] for found, _ in runs]
    first = runs[0][1]
    second = runs[1][1]
    return {
        "first": first,
        "second": second,
        "second_launch": second_launch,
        "over_first": second / first,
        "over_launch": second / second_launch,
        "start": statistics.median(starts),
        "compiled": compiled[0],
        "compiled_later": compiled[-1] - compiled[0],
        "same_bits": losses == [result[0] for result in whole.results],
    }


def main() -> None:
    """Measure each backend, and print a table and its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", nargs="+", default=["cpu", "xla:cpu", "xla"])
    parser.add_argument("--cores", type=int, default=2)
    given = parser.parse_args()
    found = {backend: measure(backend, given.cores) for backend in given.backend}
    print(
        f"{'':8} {'first':>8} {'second':>8} {'of first':>9} {'of a launch':>12} {'start':>8} "
        f"{'compiled':>9} {'later':>6}  same bits as one run"
    )
    for backend, row in found.items():
        print(
            f"{backend:8} {row['first']:6.2f} s {row['second']:6.3f} s {row['over_first']:9.3f} "
            f"{row['over_launch']:12.3f} {row['start']:6.3f} s {row['compiled']:9} "
            f"{row['compiled_later']:6}  {row['same_bits']}"
        )
        if row["start"] > MOST_SECONDS[backend]:
            print(f"  {backend}: a start takes more than {MOST_SECONDS[backend]} s")
    print(json.dumps({"benchmark": "session", "cores": given.cores, **found}))
    sys.exit(any(row["compiled_later"] or not row["same_bits"] for row in found.values()))


if __name__ == "__main__":
    main()
