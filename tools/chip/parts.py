"""The parts of a proof: each runs something real on every core, and raises where the outcome is not as it should be."""

import functools
import gzip
import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.chip import worker_functions as on_cores
from tpukit.cloud import local_health
from tpukit.essentials.backends import Topology
from tpukit.essentials.machine import Host, check
from tpukit.essentials.run import Interrupted, Run, WorkerFailed, launch

_STEPS = 10
_AT_ONCE = 30.0  # seconds within which a failure and an interrupt give control back


class NotAsExpected(AssertionError):
    """A part ran, and its outcome is not what it should be."""


@dataclass(frozen=True)
class Plan:
    """How large the work of a proof is.

    Attributes:
        network: "resnet34", the walkthrough's; or "convolutions", two of them, which XLA:CPU compiles in seconds and
            not in minutes.
        size: pixels of an image's side.
        batch_size: images a core and step.
        studies, slices: of the phantoms that are drawn.
        timed_steps: over which a rate is measured.
    """

    network: str
    size: int
    batch_size: int
    studies: int
    slices: int
    timed_steps: int


ON_A_DEVICE = Plan("resnet34", size=128, batch_size=128, studies=24, slices=16, timed_steps=50)
ON_CPU_PROCESSES = Plan("resnet34", size=32, batch_size=4, studies=4, slices=12, timed_steps=5)
ON_XLA_CPU = Plan("convolutions", size=32, batch_size=4, studies=4, slices=12, timed_steps=5)


@dataclass
class Proof:
    """What the parts work with.

    Attributes:
        host: this machine.
        topology: the cores, as `launch` lays them out.
        folder: where the parts write; empty at first.
        seconds: after which a launch is ended.
    """

    host: Host
    topology: Topology
    folder: Path
    seconds: float

    @property
    def plan(self) -> Plan:
        """The size of the work."""
        if not self.topology.rehearsal:
            return ON_A_DEVICE
        return ON_CPU_PROCESSES if self.topology.backend == "cpu" else ON_XLA_CPU

    def launch(self, fn: Callable, *args: object, **options: object) -> Run:
        """Launch on the cores of this proof."""
        cores, backend = self.topology.cores, self.topology.backend
        return launch(fn, *args, cores=cores, backend=backend, timeout=self.seconds, **{"progress": "text", **options})

    @functools.cached_property
    def network(self):
        """The walkthrough's network with ten outputs, made here: the fork hands the same weights to every run."""
        import torch
        from torch import nn

        from tpukit.pe import resnet34

        torch.manual_seed(0)
        if self.plan.network == "resnet34":
            return resnet34()
        layers, channels = [], 3
        for wider in (16, 32):
            layers += [nn.Conv2d(channels, wider, 3, stride=2, padding=1), nn.BatchNorm2d(wider), nn.ReLU()]
            channels = wider
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))

    @functools.cached_property
    def images(self):
        """Phantoms drawn, packed and decoded as in the walkthrough; some repeatedly, as many as ten steps take."""
        import torch

        from tpukit.packs import cache_or_decode, pack
        from tpukit.pe import LABELS, index_images, phantom, read_labels

        plan = self.plan
        drawn = phantom(self.folder / "phantoms", plan.studies, plan.slices, progress="text")
        table = index_images(read_labels(drawn), drawn / "train-jpegs")
        packed = pack(table, self.folder / "packed", labels=list(LABELS), groups="StudyInstanceUID")
        images = cache_or_decode(packed, size=plan.size)
        wanted = _STEPS * plan.batch_size * self.topology.cores
        return torch.utils.data.Subset(images, [number % len(images) for number in range(wanted)])


# ---- the parts; each returns the facts that the JSON keeps --------------------------------------------------------


def find_nothing_wrong(proof: Proof) -> dict:
    """The check has no failure."""
    found = check(host=proof.host)
    print(found)
    found.raise_for_failures()
    return {"warnings": [f"{one.name}: {one.fact}" for one in found.warnings]}


def be_healthy(proof: Proof) -> dict:
    """The local health check, whose computation runs on the cores of this proof."""

    def compute(fn: Callable, *, timeout: float, progress: str, host: Host) -> Run:
        return proof.launch(fn, progress=progress)

    found = local_health(host=proof.host, timeout=proof.seconds, compute=compute)
    print(found)
    _expect(found.ok, "; ".join(f"{one.name}: {one.fact}" for one in found.failures))
    return {"findings": {one.name: f"{one.state}: {one.fact}" for one in found.findings}}


def launch_on_all(proof: Proof) -> dict:
    """Every core starts, in processes that are not this one, knows its rank, and brings a tensor home; twice."""
    for _ in range(2):
        run = proof.launch(on_cores.introduce)
        cores = proof.topology.cores
        _expect([one["rank"] for one in run.results] == [*range(cores)], f"ranks {run.results}")
        _expect({one["world_size"] for one in run.results} == {cores}, f"sizes {run.results}")
        tensors = [one["tensor"] for one in run.results]
        right = all(tensor.device.type == "cpu" and (tensor == rank).all() for rank, tensor in enumerate(tensors))
        _expect(right, f"tensors that came home are {tensors}")
        processes = {one["process"] for one in run.results}
        _expect(len(processes) == (proof.topology.processes or 1), f"{len(processes)} processes")
        _expect(not proof.topology.processes or os.getpid() not in processes, "a core ran in the launching process")
    return {"devices": sorted({one["device"] for one in run.results}), "seconds_of_a_launch": round(run.seconds, 1)}


def use_collectives(proof: Proof) -> dict:
    """Every collective of `Core`, with every dtype, gives every core the right answer."""
    results = proof.launch(on_cores.use_collectives).results
    wrong = [f"core {rank}: {one}" for rank, result in enumerate(results) for one in result["wrong"]]
    _expect(not wrong, f"{len(wrong)} answers: {'; '.join(wrong[:5])}")
    return {"answers": sum(result["answers"] for result in results)}


def train_by_hand(proof: Proof) -> dict:
    """Ten steps in a loop: the first loss is the host's, and all cores end with the same weights, to the last bit."""
    results = proof.launch(on_cores.train_by_hand, proof.network, proof.images, proof.plan).results
    losses, host = results[0]["losses"], results[0]["first_loss_on_host"]
    _expect(len(losses) == _STEPS and all(map(math.isfinite, losses)), f"losses {losses}")
    # A TPU rounds the inputs of products to bfloat16, 8 significant bits.
    _expect(math.isclose(losses[0], host, rel_tol=2e-2), f"first loss {losses[0]}, on the host {host}")
    _expect(len({one["weights"] for one in results}) == 1, "cores ended with different weights")
    (proof.folder / "by_hand.json").write_text(json.dumps(losses))
    return {"losses": losses, "first_loss_on_host": host, "compiles": results[0]["compiles"]}


def train_with_fit(proof: Proof) -> dict:
    """The same ten steps by `fit`, and ten more: the losses are those of the loop by hand."""
    folder = proof.folder / "fit"
    results = proof.launch(on_cores.train_with_fit, proof.network, proof.images, proof.plan, 2, folder).results
    first = results[0]
    _expect(len(first["losses"]) == 2 * _STEPS and all(map(math.isfinite, first["losses"])), f"{first['losses']}")
    _expect(all(map(math.isfinite, first["valid_losses"])), f"validation losses {first['valid_losses']}")
    _expect(len({one["weights"] for one in results}) == 1, "cores ended with different weights")
    _expect(not first["resumed"], f"resumed from {first['resumed']}")
    by_hand = proof.folder / "by_hand.json"
    if by_hand.exists():  # otherwise that part has failed, and says so itself
        pairs = list(zip(json.loads(by_hand.read_text()), first["losses"], strict=False))
        apart = max(abs(one - other) / abs(one) for one, other in pairs)
        # The same arithmetic in another graph: it rounds differently, and Adam's first steps magnify that.
        _expect(apart < 5e-2, f"losses by hand and of fit are up to {apart:.1%} apart: {pairs}")
    (proof.folder / "fit.json").write_text(json.dumps(first))
    return {name: first[name] for name in ("losses", "valid_losses", "compiles")}


def name_a_fault(proof: Proof) -> dict:
    """A core that raises is named with its own error, at once; nothing is left, and the next launch works."""
    cores, message = proof.topology.cores, "deliberate: a proof of how a failure is told"
    began = time.monotonic()
    try:
        proof.launch(on_cores.fail, message)
    except WorkerFailed as error:
        said, failed, seconds = str(error), error, time.monotonic() - began
    else:
        raise NotAsExpected("the launch returned although a core raised")
    print(said.partition("\n\n")[0])
    _expect(failed.rank == cores - 1, f"core {failed.rank} was named, core {cores - 1} raised")
    _expect(isinstance(failed.__cause__, LookupError) and message in said, f"told as: {said[:500]}")
    # The start of the devices is in it: on a chip most of this time.
    _expect(seconds < _AT_ONCE + _usual_start(proof), f"control came back after {seconds:.1f} s")
    return {"seconds_until_told": round(seconds, 1), "told": said.splitlines()[0], **_next_launch(proof)}


def be_interrupted(proof: Proof) -> dict:
    """SIGINT reaches the launch while all cores work: it ends at once, and the next launch works."""
    sent = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    def when_they_work(row: dict) -> None:
        if row["done"] >= 3 and not timers:
            timers.append(threading.Timer(0.3, interrupt))
            timers[0].start()

    timers: list[threading.Timer] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` leaves it ignored
    try:
        proof.launch(on_cores.go_on, to=when_they_work)
    except Interrupted as interrupted:
        seconds, rows = time.monotonic() - sent[0], len(interrupted.run.log)
    else:
        raise NotAsExpected("the launch returned although it was interrupted")
    finally:
        for timer in timers:
            timer.join()
        signal.signal(signal.SIGINT, before)
    _expect(seconds < _AT_ONCE, f"control came back {seconds:.1f} s after SIGINT")
    _expect(rows >= 3, f"{rows} rows of the log were kept")
    return {"seconds_until_back": round(seconds, 1), "rows_kept": rows, **_next_launch(proof)}


def resume(proof: Proof) -> dict:
    """A new launch continues from the middle checkpoint of `fit`, and reaches the same losses, to the last digit."""
    told = proof.folder / "fit.json"
    _expect(told.exists(), "there is no checkpoint to resume from: the part `fit` has failed")
    whole = json.loads(told.read_text())
    folder = proof.folder / "resumed"
    folder.mkdir(exist_ok=True)
    middle = sorted((proof.folder / "fit").glob(f"step-{_STEPS:08}-*.pt"))
    _expect(bool(middle), f"fit has left no checkpoint of step {_STEPS}")
    for file in middle:
        shutil.copy(file, folder)
    results = proof.launch(on_cores.train_with_fit, proof.network, proof.images, proof.plan, 2, folder).results
    again = results[0]
    _expect(bool(again["resumed"]), "fit did not resume")
    _expect(again["losses"] == whole["losses"], f"losses {again['losses']}, not {whole['losses']}")
    _expect(again["valid_losses"] == whole["valid_losses"], f"{again['valid_losses']}, not {whole['valid_losses']}")
    _expect({one["weights"] for one in results} == {whole["weights"]}, "the weights are others")
    losses = {"loss": again["losses"][-1], "loss_of_the_whole": whole["losses"][-1]}
    return {"resumed_from": Path(again["resumed"]).name, **losses}


def record_a_profile(proof: Proof) -> dict:
    """A trace of some steps is written and can be read."""
    files = [Path(file) for file in proof.launch(on_cores.record, proof.folder / "trace").results[0]]
    traces = [file for file in files if file.name.endswith(".json.gz")]
    _expect(bool(traces), f"no trace among the files {files}")
    events = len(json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"])
    _expect(events > 10, f"{events} events in {traces[0]}")
    return {"files": {file.name: file.stat().st_size for file in files}, "events": events}


def measure_rates(proof: Proof) -> dict:
    """Images a second on a batch that stays on the device, and as they come from the cache."""
    plan = proof.plan
    results = proof.launch(on_cores.measure_rates, proof.network, proof.images, plan).results
    _expect(not any(one["compiled"] for one in results), "a step was compiled again while it was timed")
    images = plan.timed_steps * plan.batch_size * proof.topology.cores
    rates = {
        f"images_per_second_{kind}": round(images / max(one[kind] for one in results), 1)
        for kind in ("without_input", "with_input")
    }
    step = statistics.median(one["without_input"] for one in results) / plan.timed_steps
    memory = [one["memory"]["peak"] for one in results if one["memory"]]
    work = {"network": plan.network, "size": plan.size, "batch_size": plan.batch_size}
    return {**rates, **work, "milliseconds_a_step": round(1000 * step, 1), "device_memory": max(memory, default=None)}


PARTS: dict[str, Callable[[Proof], dict]] = {
    "check": find_nothing_wrong,
    "health": be_healthy,
    "launch": launch_on_all,
    "collectives": use_collectives,
    "by hand": train_by_hand,
    "fit": train_with_fit,
    "resume": resume,
    "fault": name_a_fault,
    "interrupt": be_interrupted,
    "profile": record_a_profile,
    "rates": measure_rates,
}


def _expect(true: bool, otherwise: str) -> None:
    if not true:
        raise NotAsExpected(otherwise)


def _usual_start(proof: Proof) -> float:
    """Return the seconds in which a launch that does next to nothing starts and ends here."""
    began = time.monotonic()
    proof.launch(on_cores.use_one_collective)
    return time.monotonic() - began


def _next_launch(proof: Proof) -> dict:
    """See that no process is left, and that the cores can be launched on again."""
    left = multiprocessing.active_children()
    _expect(not left, f"processes are left: {left}")
    cores = proof.topology.cores
    totals = proof.launch(on_cores.use_one_collective).results
    _expect(totals == [cores] * cores, f"the next launch added up to {totals}")
    return {"next_launch": "works"}
