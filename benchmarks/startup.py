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
    compiling      of all graphs of the first launch, as torch_xla counts it in CompileTime
    in XLA         the part of "compiling" in which XLA compiles or loads programs

The rows are medians over the rounds. The ratio at the end compares compiling with compiling: the
capture of a graph in Python, and the first run of a program, are in neither session's figure. The
rest of "compiling" is not XLA's: torch_xla reads each compiled program back, in both sessions, and
the first session writes the programs to the cache. The script prints both ratios.
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
    turns = {}
    for backend in options.backends:
        turns |= sessions(backend, options.network, options.rounds)
    kinds = {name: medians(of_a_kind) for name, of_a_kind in turns.items()}
    print(table(kinds))
    figures = {
        name: {part: round(value, 2) for part, value in kinds[name].items()} for name in kinds
    }
    for backend in WITH_CACHE:
        if backend in kinds:
            figures |= ratios(turns[backend], turns[f"{backend}, cache"])
            print(f"target of the ratio of compiling: at most {TARGET}")
    print(json.dumps(figures))


def ratios(first: list[dict[str, float]], second: list[dict[str, float]]) -> dict[str, float]:
    """Print how long the second sessions compile, of the first ones; return the ratios."""
    found = {}
    for part, name in (("compiling", "ratio"), ("in XLA", "ratio_in_xla")):
        found[name] = round(medians(second)[part] / medians(first)[part], 3)
        rounds = [here[part] / there[part] for here, there in zip(second, first, strict=True)]
        each = ", ".join(f"{one:.3f}" for one in rounds)
        print(f"{part} in the second session: {found[name]:.3f} of the first; rounds {each}")
    return found


def medians(turns: list[dict[str, float]]) -> dict[str, float]:
    """Return the median seconds of each part of a session."""
    return {part: statistics.median(turn[part] for turn in turns) for part in turns[0]}


def sessions(backend: str, network: str, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return the seconds of the parts of all sessions, without and with the cache, by name."""
    found = {backend: []}
    if backend in WITH_CACHE:
        found[f"{backend}, cache"] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for turns in found.values():
                turns.append(in_new_process(backend, folder, network))
    return found


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
    seconds |= {name: first[name] for name in ("compiling", "in XLA")}
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
    cache = getattr(core.backend, "compile_cache", None)
    # Only the library of the cache measures XLA's own part.
    found["in XLA"] = cache.compiling_seconds + cache.loading_seconds if cache else 0.0
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
