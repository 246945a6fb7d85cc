"""Measure a step of `fit`, and compare it with other training loops.

The others are loops by hand, Lightning's Trainer, accelerate and the tutorial's loop.

All contestants train the same model from the same weights, with one Adam each, on the same images
in memory, each through its own loader, which starts again in every turn: the same batches in the
same order. So they do the same work, and their losses have to agree after the first turn. A clock
notes each loss: a step lasts from one to the next, with everything in between, also the one time in
each turn when the losses are read. `fit` takes part as it is by default, so with `replay=False`; on
XLA also with `replay=True`. The JSON measures the default. The contestants take turns in one
process, or in the same two, in another order in every round, because the load on a machine changes:
the figures are ratios within a round, and their median. The first round compiles and is left out.

- By hand: the short loop of somebody who knows torch_xla, with `MpDeviceLoader` and the losses kept
  on the device. On plain CPU the loop of somebody who knows torch, over two processes with
  `DistributedDataParallel`.
- Lightning's `Trainer`, with everything turned off that is not training. It refuses XLA where there
  is no TPU, so it and `fit` are compared on plain CPU.
- accelerate, in the loop of its documentation, on XLA:CPU and on plain CPU.
- The tutorial's loop in today's calls: `xm.optimizer_step(barrier=True)`, and `.item()` on the loss
  in every step.

On plain CPU a process computes with one thread, for every contestant; two processes share one gloo
group. The graphs that `fit` and `evaluate` compile, and the copies to the host between two log
points, are counted in a separate process.
"""

import argparse
import contextlib
import ctypes
import functools
import importlib.metadata
import io
import itertools
import json
import logging
import os
import random
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from unittest import mock

from tpukit.essentials.data import ShardedSampler

LABELS = 10
RATE = 1e-4
SAME = 1e-3  # of the loss: rounding, after one turn
TARGETS = {"hand_written": 1.03, "lightning": 1.0, "accelerate": 1.0, "tutorial": 1.0}
NAMES = {
    "fit": "tpukit.fit",
    "fit_replayed": "fit(replay=True)",
    "hand_written": "by hand",
    "lightning": "Lightning",
    "accelerate": "accelerate",
    "tutorial": "the tutorial's loop",
}


def main() -> None:
    """Measure every case, print the table, and last one line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, help="per case, a second or two each; 40, and 20 for a ResNet"
    )
    parser.add_argument(
        "--only",
        default="",
        help="cases whose name holds this; the worst of a few cases is no result",
    )
    options = parser.parse_args()
    describe()
    cases = [
        Case("MLP, XLA:CPU", mlp, size=32, batch=128, steps=12, rounds=40, backend="xla:cpu"),
        Case(
            "convnet, XLA:CPU", convnet, size=32, batch=128, steps=12, rounds=40, backend="xla:cpu"
        ),
        Case("MLP, CPU", mlp, size=32, batch=128, steps=12, rounds=40),
        Case("convnet, CPU", convnet, size=32, batch=128, steps=12, rounds=40),
        Case("ResNet-18, CPU", resnet18, size=64, batch=8, steps=4, rounds=20),
        Case("convnet, 2 x CPU", convnet, size=32, batch=128, steps=12, rounds=40, cores=2),
        Case("ResNet-18, 2 x CPU", resnet18, size=64, batch=8, steps=4, rounds=20, cores=2),
    ]
    measured = {
        case.name: run(case, options.rounds or case.rounds)
        for case in cases
        if options.only in case.name
    }
    print(
        "over two XLA:CPU processes only fit runs: torch_xla takes each for the only one and "
        "averages no gradients"
    )
    report(measured, quietly(count, cores=1, backend="xla:cpu")[0])


@dataclass(frozen=True)
class Case:
    """A case: images of (3, size, size), `batch` per core and step, `steps` steps per turn.

    Turns are short and many: the load on the machine changes within seconds, and so all contestants
    meet it alike.
    """

    name: str
    model: Callable
    size: int
    batch: int
    steps: int
    rounds: int
    backend: str = "cpu"
    cores: int = 1

    @property
    def log_every(self) -> int:
        """Steps between two log points; the first log point is among the steps that are timed."""
        return self.steps // 2


class Samples:
    """Images in memory, (size, size, 3) uint8, and (LABELS,) float32: bright or not.

    Gives whole batches, to tpukit as a `CachedImages` does and to torch's loader: collating is not
    what is compared.
    """

    def __init__(self, size: int, length: int, count: int = 512):
        import numpy

        random = numpy.random.default_rng(0)
        self.shape = (size, size, 3)
        self.images = random.integers(0, 256, (count, *self.shape), numpy.uint8)
        brightness = self.images.mean((1, 2, 3))
        bright = (brightness > numpy.median(brightness)).astype("float32")
        self.labels = bright[numpy.arange(length) % count, None].repeat(LABELS, axis=1)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices, out=None):
        """Return (n, size, size, 3) uint8 images."""
        import numpy

        return numpy.take(self.images, indices % len(self.images), axis=0, out=out)

    def __getitems__(self, indices: list[int]) -> tuple:
        import numpy
        import torch

        indices = numpy.array(indices)
        return torch.from_numpy(self.take(indices)), torch.from_numpy(self.labels[indices])


def pixels(images):
    """Turn (B, H, W, 3) uint8 into (B, 3, H, W) float32 in [0, 1]; only permute for tpukit."""
    return (images if images.shape[1] == 3 else images.permute(0, 3, 1, 2)).float() / 255


class Clock:
    """The loss of every contestant's steps, which records when it is called."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, outputs, targets):
        """Return the binary cross-entropy, and keep it to be shown at the end."""
        import torch

        self.times.append(time.perf_counter())
        value = torch.nn.functional.binary_cross_entropy_with_logits(outputs, targets)
        self.last = value.detach()
        return value


def mlp():
    """Return three layers over 32 x 32 images, 855,000 parameters."""
    from torch import nn

    layers = [
        nn.Linear(3 * 32 * 32, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, LABELS),
    ]
    return nn.Sequential(nn.Flatten(), *layers)


def convnet():
    """Return three convolutions with BatchNorm, 6,500 parameters."""
    from torch import nn

    widths = [3, 8, 16, 32]
    layers = []
    for before, width in itertools.pairwise(widths):
        convolution = nn.Conv2d(before, width, 3, stride=2, padding=1)
        layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], LABELS)
    )


def resnet18():
    """Return torchvision's ResNet-18, 11 million parameters."""
    from torchvision import models

    return models.resnet18(num_classes=LABELS)


def fresh(case: Case):
    """Return the model that every contestant begins with."""
    import torch

    torch.manual_seed(0)
    return case.model()


def adam(model):
    """Return the optimiser that all contestants use: the tutorial's."""
    import torch

    return torch.optim.Adam(model.parameters(), lr=RATE)


def loader(case: Case, samples: Samples, ranks: Iterable[int]):
    """Return torch's loader for all but tpukit, with the batches that tpukit gives each rank."""
    import numpy
    from torch.utils.data import DataLoader

    of_ranks = [
        ShardedSampler(len(samples), case.batch, rank, case.cores).positions() for rank in ranks
    ]
    return DataLoader(
        samples,
        batch_size=case.batch,
        sampler=numpy.stack(of_ranks, axis=1).ravel().tolist(),
        drop_last=True,
        collate_fn=lambda batch: batch,  # it is one already
    )


def endless(batches: Iterable) -> Iterator:
    """Yield the batches of one turn after the other."""
    while True:
        yield from batches


def with_fit(
    core, case: Case, samples: Samples, loss: Clock, *, replay: bool = False
) -> Callable[[], object]:
    """Call `fit` for every turn, with one model and optimizer; `replay` captures three steps.

    The clock is asked where `fit` notes a step's loss: a loss that keeps something is never
    replayed.
    """
    import torch

    from tpukit.training import FitOptions, fit
    from tpukit.training.losses import StepLosses

    model = core.model(fresh(case))
    add = StepLosses.add
    optimizer = adam(model)
    batches = core.batches(samples, batch_size=case.batch)
    options = {
        "options": FitOptions(log_every=case.log_every),
        "preprocess": pixels,
        "replay": replay,
    }

    def noted(losses: StepLosses, step) -> None:
        loss.times.append(time.perf_counter())
        loss.last = step.local
        add(losses, step)

    def turn() -> None:
        with mock.patch.object(StepLosses, "add", noted):
            fit(core, model, optimizer, torch.nn.BCEWithLogitsLoss(), batches, **options)

    return turn


def by_hand(core, case: Case, samples: Samples, loss: Clock) -> Callable[[], object]:
    """Train in the loop of somebody who knows the device."""
    return in_turns(
        case, (on_xla if case.backend == "xla:cpu" else on_cpu)(core, case, samples, loss)
    )


def on_xla(core, case: Case, samples: Samples, loss: Clock) -> Iterator[None]:
    """Train with torch_xla; its loader ends the graph when the next batch is asked for."""
    import torch
    import torch_xla.distributed.parallel_loader as pl

    model = fresh(case).to(core.device).train()
    optimizer = adam(model)
    losses = []
    for inputs, targets in endless(
        pl.MpDeviceLoader(loader(case, samples, [core.rank]), core.device)
    ):
        if len(losses) == case.log_every:
            torch.stack(losses).mean().item()
            losses.clear()
        value = loss(model(pixels(inputs)), targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
        yield


def on_cpu(core, case: Case, samples: Samples, loss: Clock) -> Iterator[None]:
    """Train with plain torch, in one process or two."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = fresh(case).train()
    if core.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = adam(model)
    losses = []
    for inputs, targets in endless(loader(case, samples, [core.rank])):
        value = loss(model(pixels(inputs)), targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
        if len(losses) == case.log_every:
            core.mean(torch.stack(losses).mean())
            losses.clear()
        yield


def with_lightning(core, case: Case, samples: Samples, loss: Clock) -> Callable[[], object]:
    """Call `Trainer.fit` for every turn, with everything off that is not training."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = fresh(case)
            self.adam = adam(self.model)  # one for all turns

        def training_step(self, batch, index):
            inputs, targets = batch
            value = loss(self.model(pixels(inputs)), targets)
            self.log("train_loss", value)
            return value

        def configure_optimizers(self):
            return self.adam

    def trainer():
        names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        return lightning.Trainer(
            accelerator="tpu" if case.backend == "xla:cpu" else "cpu",
            devices=case.cores,
            max_steps=case.steps,
            log_every_n_steps=case.log_every,
            use_distributed_sampler=False,
            **dict.fromkeys(names, False),
        )

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer()  # if it refuses the device, then here
    module = Module()
    batches = loader(case, samples, [core.rank])
    return lambda: trainer().fit(module, batches)


def with_accelerate(core, case: Case, samples: Samples, loss: Clock) -> Callable[[], object]:
    """Train in the loop of accelerate's documentation."""
    # It uses XLA wherever torch_xla is installed, unless this variable is set before it is
    # imported.
    os.environ["USE_TORCH_XLA"] = str(int(case.backend == "xla:cpu"))
    from accelerate import Accelerator

    return in_turns(case, accelerated(Accelerator(cpu=case.backend == "cpu"), case, samples, loss))


def accelerated(accelerator, case: Case, samples: Samples, loss: Clock) -> Iterator[None]:
    """Train with what `prepare` makes of model, optimiser and loader."""
    import torch

    model = fresh(case).train()
    # Its processes take the batches of one loader by turns.
    batches = loader(case, samples, range(case.cores))
    model, optimizer, batches = accelerator.prepare(model, adam(model), batches)
    losses = []
    for inputs, targets in endless(batches):
        if len(losses) == case.log_every:
            torch.stack(losses).mean().item()
            losses.clear()
        optimizer.zero_grad()
        value = loss(model(pixels(inputs)), targets)
        accelerator.backward(value)
        optimizer.step()
        losses.append(value.detach())
        yield


def as_the_tutorial(core, case: Case, samples: Samples, loss: Clock) -> Callable[[], object]:
    """Train in the tutorial's loop, without the collection of garbage that it advises."""
    return in_turns(case, tutorial(core, case, samples, loss))


def tutorial(core, case: Case, samples: Samples, loss: Clock) -> Iterator[None]:
    """Train with a copy of the loss to the host in every step."""
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.parallel_loader as pl

    model = fresh(case).to(core.device).train()
    optimizer = adam(model)
    total = 0.0
    count = 0
    for inputs, targets in endless(
        pl.MpDeviceLoader(loader(case, samples, [core.rank]), core.device)
    ):
        inputs = inputs.to(core.device)
        targets = targets.to(core.device)
        optimizer.zero_grad()
        value = loss(model(pixels(inputs)), targets)
        value.backward()
        xm.optimizer_step(optimizer, barrier=True)
        total += value.detach().item() * inputs.size(0)
        count += inputs.size(0)
        del inputs, targets, value
        yield


def in_turns(case: Case, steps: Iterator[None]) -> Callable[[], object]:
    """Return a function that takes as many steps of an endless loop as a turn has."""
    return lambda: deque(itertools.islice(steps, case.steps), maxlen=0)


@dataclass(frozen=True)
class Measured:
    """By name: the seconds per step of all rounds, the last loss of turn one, and refusals."""

    rounds: list[dict[str, float]]
    losses: dict[str, float]
    without: dict[str, str]


def run(case: Case, rounds: int) -> Measured:
    """Measure a case; a step over two cores takes as long as on the slower one."""
    began = time.perf_counter()
    cores = quietly(take_turns, case, rounds, cores=case.cores, backend=case.backend)
    for name, why in cores[0].without.items():
        print(f"{case.name}: without {NAMES[name]}: {why}")
    print(f"{case.name}: {time.perf_counter() - began:.0f} s", flush=True)
    together = zip(*(core.rounds for core in cores), strict=True)
    longest = [
        {name: max(times[name] for times in of_cores) for name in of_cores[0]}
        for of_cores in together
    ]
    losses = list(cores[0].losses.values())
    if max(losses) - min(losses) > SAME * max(losses):
        raise RuntimeError(
            f"{case.name}: the contestants did not do the same work, their losses are "
            f"{cores[0].losses}"
        )
    return Measured(longest, cores[0].losses, cores[0].without)


def quietly(fn: Callable, *args: object, **options: object) -> list:
    """Launch a function and return its results, without the lines of every epoch."""
    from tpukit.essentials.launcher.launcher import launch

    with contextlib.redirect_stdout(io.StringIO()):
        return launch(fn, *args, progress="off", **options).results


def take_turns(core, case: Case, rounds: int) -> Measured:
    """Measure a step of every contestant, in every round."""
    warnings.simplefilter("ignore")  # few processes for data, a TPU not used, memory not pinned
    # libraries ask torch_xla for its devices, and it would warn
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    keep_freed_memory()
    as_torchrun(core)
    samples = Samples(case.size, length=case.batch * case.steps * core.world_size)
    makers = {
        "fit": with_fit,
        "hand_written": by_hand,
        "lightning": with_lightning,
        "accelerate": with_accelerate,
    }
    if case.backend == "xla:cpu":
        makers["tutorial"] = as_the_tutorial
        makers["fit_replayed"] = functools.partial(with_fit, replay=True)
    turns = {}
    clocks = {name: Clock() for name in makers}
    without = {}
    for name, make in makers.items():
        try:
            turns[name] = make(core, case, samples, clocks[name])
        except (
            Exception
        ) as error:  # not installed, or not on this device: the others are measured all the same
            without[name] = str(error).splitlines()[0]
    measured = []
    for number in range(rounds + 1):
        names = random.Random(number).sample(list(turns), len(turns))  # the same on all cores
        times = {name: seconds(core, case, turns[name], clocks[name]) for name in names}
        measured.append({name: times[name] for name in turns})
        if number == 0:
            losses = {name: clocks[name].last.item() for name in turns}
    return Measured(measured[1:], losses, without)


def seconds(core, case: Case, turn: Callable, clock: Clock) -> float:
    """Return the seconds per step of a turn, without the first, which begin with idle queues.

    Raises:
        RuntimeError: the turn had another number of steps.
    """
    clock.times.clear()
    core.barrier()
    turn()
    if case.backend == "xla:cpu":
        import torch_xla

        # run the last step here, so that it is not in the next contestant's graph
        torch_xla.sync(wait=True)
    if len(clock.times) != case.steps:
        raise RuntimeError(f"a turn has {case.steps} steps, this one had {len(clock.times)}")
    skipped = case.steps // 8 + 1
    return (clock.times[-1] - clock.times[skipped]) / (case.steps - 1 - skipped)


def keep_freed_memory() -> None:
    """Have this process keep freed memory and not return it to the system.

    Otherwise two equal loops differ by up to 8 %: the one whose gradients lie, by chance, at the
    end of the heap pays for page faults in every step.
    """
    # of glibc's malloc.h
    trim_threshold = -1
    mmap_threshold = -3
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(trim_threshold, 1 << 30)
        libc.mallopt(mmap_threshold, 1 << 30)


def as_torchrun(core) -> None:
    """Set torchrun's variables for Lightning and accelerate; the process group exists already."""
    if core.world_size > 1:
        os.environ |= {
            "RANK": str(core.rank),
            "WORLD_SIZE": str(core.world_size),
            "OMP_NUM_THREADS": "1",
        }
        os.environ |= {"LOCAL_RANK": str(core.rank), "LOCAL_WORLD_SIZE": str(core.world_size)}
        os.environ |= {"TORCHELASTIC_RUN_ID": "step", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def count(core, length: int = 100) -> dict[str, int]:
    """Return the graphs that `fit` compiles, and the most copies to the host between two logs."""
    from torch_xla.debug import metrics

    from tpukit.training import FitOptions, fit
    from tpukit.training.evaluation import evaluate

    def metric(name: str) -> int:
        return (metrics.metric_data(name) or (0,))[0]

    copies = []  # made by the time of each step

    def loss(outputs, targets):
        copies.append(metric("TransferFromDeviceTime"))
        return Clock()(outputs, targets)

    case = Case("counted", convnet, 32, 16, steps=40, rounds=1)
    model = core.model(fresh(case))
    samples = Samples(case.size, length=case.batch * case.steps * 2)
    batches = core.batches(samples, batch_size=case.batch, shuffle=True, drop_last=True)
    before = metric("CompileTime")
    fit(
        core,
        model,
        adam(model),
        loss,
        batches,
        epochs=2,
        steps_per_epoch=case.steps,
        preprocess=pixels,
        options=FitOptions(log_every=case.log_every),
    )
    trained = metric("CompileTime")
    intervals = [
        copies[first : first + case.log_every] for first in range(0, len(copies), case.log_every)
    ]
    for count in (length, length + 1, 3 * length):
        batches = core.batches(Samples(case.size, length=count), batch_size=case.batch)
        evaluate(core, model, Clock(), batches, preprocess=pixels)
    return {
        "host_copies_per_step": max(of[-1] - of[0] for of in intervals),
        "train_graphs": trained - before,
        "eval_graphs": metric("CompileTime") - trained,
    }


def describe() -> None:
    """Print the versions and the machine."""
    from tpukit.essentials.environment.resources import cpus

    there = {
        package.name.replace("-", "_"): package.version
        for package in importlib.metadata.distributions()
    }
    packages = ("torch", "torch_xla", "torchvision", "lightning", "accelerate")
    print(
        ", ".join(f"{name} {there.get(name, 'not installed')}" for name in packages)
        + f"; {cpus()} processors"
    )


def report(measured: dict[str, Measured], counted: dict[str, int]) -> None:
    """Print a line per contestant and case, and the JSON: the worst ratios of `fit`."""
    print(
        "\nmedians of the rounds, least and most in brackets; fit's time over another's in the "
        "same round"
    )
    print(f"\n{'':22}{'':20}{'ms per step':>24}{'fit over it':>24}{'loss':>12}")
    worst: dict[str, float] = {}
    for case, found in measured.items():
        for name, loss in found.losses.items():
            ratios = [times["fit"] / times[name] for times in found.rounds]
            if name != "fit":
                worst[name] = max(worst.get(name, 0.0), statistics.median(ratios))
            times = shown([1000 * times[name] for times in found.rounds], 1)
            ratio = shown(ratios, 3) if name != "fit" else ""
            print(
                f"{case if name == 'fit' else '':22}{NAMES[name]:20}{times:>24}{ratio:>24}"
                f"{loss:12.5f}"
            )
    print()
    for name, target in TARGETS.items():
        found = f"{worst[name]:.3f}" if name in worst else "not measured"
        print(f"{'fit over ' + NAMES[name] + ', worst case':46}{found:>14}   target <= {target:g}")
    for name, target in (("host_copies_per_step", 0), ("train_graphs", 2), ("eval_graphs", 1)):
        print(f"{name.replace('_', ' '):46}{counted[name]:>14}   target {target}")
    print(
        json.dumps(
            {f"vs_{name}": round(worst[name], 3) if name in worst else None for name in TARGETS}
            | counted
        )
    )


def shown(values: list[float], digits: int) -> str:
    """Write a median, with the least and the most."""
    middle, *ends = (
        f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values))
    )
    return f"{middle} [{ends[0]}..{ends[1]}]"


if __name__ == "__main__":
    main()
