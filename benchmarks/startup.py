"""Measure the seconds between the start of a session and its first training steps.

A session is a new Python process that imports tpukit and launches the same training twice on one
core. The second session has the compilation cache of the first, where the backend can keep
programs. Each time is counted from the end of the time before it:

    import         `import tpukit`, and torch, which the user's cell imports
    first launch   from `launch` to the first line of the worker function
    model          the model on the device, and the optimizer
    first step     with the compilation of its graph, until the loss is on the host
    second step    the graph that the optimizer's new state changes
    third step     what every later step takes
    second launch  from `launch` to the end of its first step; the processes are new

The rows are medians over the rounds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

BACKENDS = ("cpu", "xla:cpu", "xla:simulator")
WITH_CACHE = ("xla:simulator",)  # XLA:CPU cannot read a compiled program back
TARGET = 0.08  # of the first session's compilation, for the second


def main() -> None:
    """Measure the sessions of every backend, print the table, and last one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="sessions of each kind")
    parser.add_argument("--network", default="resnet18", help="of torchvision")
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--session", nargs=2, help=argparse.SUPPRESS)  # backend and folder
    options = parser.parse_args()
    if options.session:
        backend, folder = options.session
        print(json.dumps(session(backend, folder, options.network)))
        return
    kinds = {}
    for backend in options.backends:
        kinds |= sessions(backend, options.network, options.rounds)
    print(table(kinds))
    figures = {
        name: {part: round(value, 2) for part, value in kinds[name].items()} for name in kinds
    }
    cold = kinds.get("xla:simulator")
    if cold:
        ratio = kinds["xla:simulator, cache"]["compiling"] / cold["compiling"]
        print(f"compiling in the second session: {ratio:.3f} of the first; target {TARGET}")
        figures["ratio"] = round(ratio, 3)
    print(json.dumps(figures))


def sessions(backend: str, network: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return the median seconds of the parts of a session, and of one with the cache, by name."""
    found = {backend: []}
    if backend in WITH_CACHE:
        found[f"{backend}, cache"] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for turns in found.values():
                turns.append(in_new_process(backend, folder, network))
    medians = {}
    for name, turns in found.items():
        medians[name] = {part: statistics.median(turn[part] for turn in turns) for part in turns[0]}
    return medians


def in_new_process(backend: str, folder: str, network: str) -> dict[str, float]:
    """Run a session in a new Python process; return its seconds."""
    arguments = ["--network", network, "--session", backend, folder]
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def session(backend: str, folder: str, network: str) -> dict[str, float]:
    """Import tpukit and launch twice; return the seconds of each part."""
    began = time.monotonic()
    import torch  # noqa: F401

    import tpukit

    options = {"cores": 1, "backend": backend, "seed": 0, "progress": "off"}
    if backend in WITH_CACHE:
        options["compile_cache"] = folder
    seconds = {"import": time.monotonic() - began}
    launched = time.monotonic()
    first = tpukit.launch(train, network, **options).results[0]
    seconds |= {"first launch": first["entered"] - launched}
    seconds |= {name: first[name] for name in ("model", "first step", "second step", "third step")}
    launched = time.monotonic()
    second = tpukit.launch(train, network, 1, **options).results[0]
    seconds["second launch"] = second["ended"] - launched
    seconds["compiling"] = first["compiling"]
    return seconds


def train(core, network: str, steps: int = 3) -> dict[str, float]:
    """Train for some steps on random images; return the seconds of each part."""
    entered = time.monotonic()
    import torch
    from torchvision import models

    torch.manual_seed(0)
    model = core.model(getattr(models, network)(weights=None, num_classes=10)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    images = torch.randn(4, 3, 32, 32)
    times = [time.monotonic()]
    for _ in range(steps):
        (batch,) = core.to_device([images])
        with core.step():
            loss = model(batch).square().mean()
            loss.backward()
            core.optimizer_step(optimizer)
        loss.item()
        times.append(time.monotonic())
    found = {"entered": entered, "model": times[0] - entered, "ended": times[-1]}
    names = ("first step", "second step", "third step")
    for name, start, end in zip(names, times, times[1:], strict=False):
        found[name] = end - start
    metrics = core.backend.metrics()
    found["compiling"] = metrics.get("CompileTime", (0, 0.0))[1] / 1e9
    return found


def table(kinds: dict[str, dict[str, float]]) -> str:
    """Return a row per part of a session, and a column per backend."""
    width = max(map(len, kinds)) + 2
    lines = ["seconds".ljust(16) + "".join(name.rjust(width) for name in kinds)]
    for part in next(iter(kinds.values())):
        cells = "".join(f"{seconds[part]:.2f}".rjust(width) for seconds in kinds.values())
        lines.append(part.ljust(16) + cells)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
