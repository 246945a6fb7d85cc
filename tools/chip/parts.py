"""Define the parts of a proof: each runs something real on every core, and checks the outcome."""

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
from tools.chip.answers import (
    EXACT,
    NEAR,
    NotAsExpected,
    check_by_hand,
    check_fit,
    check_resumed,
    check_samples,
    expect,
)
from tools.chip.reference import BATCH, Numbers
from tools.chip.worker_functions import CLIP, RATE
from tpukit.cloud import local_health
from tpukit.essentials.backends import Topology, runtimes
from tpukit.essentials.environment import MachineInfo, check
from tpukit.essentials.launcher import LaunchInterrupted, Run, WorkerError, launch

_MIDDLE = 6  # the step from which `fit` is resumed: half of its second epoch
_AT_ONCE = 30.0  # seconds within which a failure and an interrupt give control back


@dataclass(frozen=True)
class Plan:
    """The size of the work in a proof.

    Attributes:
        network: "resnet34", the walkthrough's; or "convolutions", two of them, which XLA:CPU
            compiles in seconds instead of minutes.
        size: pixels of an image's side.
        batch_size: images per core and step.
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

    host: MachineInfo
    topology: Topology
    folder: Path
    seconds: float

    @property
    def plan(self) -> Plan:
        """The size of the work."""
        if not self.topology.is_dry_run:
            return ON_A_DEVICE
        return ON_CPU_PROCESSES if self.topology.backend == "cpu" else ON_XLA_CPU

    @property
    def near(self) -> float:
        """How near the cores come to plain PyTorch in float32."""
        return EXACT if self.topology.is_dry_run else NEAR

    def launch(self, fn: Callable, *args: object, **options: object) -> Run:
        """Launch on the cores of this proof."""
        cores = self.topology.cores
        backend = self.topology.backend
        options = {"seed": 0, "timeout": self.seconds, "progress": "text", **options}
        return launch(fn, *args, cores=cores, backend=backend, **options)

    @functools.cached_property
    def data(self) -> Numbers:
        """Numbered samples: three more than four steps per epoch of two batches on each core."""
        return Numbers(4 * 2 * BATCH * self.topology.cores + 3)

    @functools.cached_property
    def network(self):
        """The walkthrough's network with ten outputs; every run inherits the same weights."""
        import torch
        from torch import nn

        from tpukit.pe import resnet34

        torch.manual_seed(0)
        if self.plan.network == "resnet34":
            return resnet34()
        layers = []
        channels = 3
        for wider in (16, 32):
            layers += [
                nn.Conv2d(channels, wider, 3, stride=2, padding=1),
                nn.BatchNorm2d(wider),
                nn.ReLU(),
            ]
            channels = wider
        return nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)
        )

    @functools.cached_property
    def images(self):
        """Phantoms, packed and decoded as in the walkthrough; repeated until they fill an epoch."""
        import torch

        from tpukit.datasets import cached_images, pack
        from tpukit.pe import LABELS, index_images, phantom, read_labels

        plan = self.plan
        drawn = phantom(self.folder / "phantoms", plan.studies, plan.slices, progress="text")
        table = index_images(read_labels(drawn), drawn / "train-jpegs")
        packed = pack(table, self.folder / "packed", labels=list(LABELS), groups="StudyInstanceUID")
        images = cached_images(packed, size=plan.size)
        wanted = 10 * plan.batch_size * self.topology.cores
        return torch.utils.data.Subset(images, [number % len(images) for number in range(wanted)])


def find_nothing_wrong(proof: Proof) -> dict:
    """The check has no failure."""
    found = check(info=proof.host)
    print(found)
    found.raise_for_failures()
    return {"warnings": [f"{one.name}: {one.fact}" for one in found.warnings]}


def be_healthy(proof: Proof) -> dict:
    """The local health check, whose computation runs on the cores of this proof."""

    def compute(fn: Callable, *, timeout: float, progress: str, host: MachineInfo) -> Run:
        return proof.launch(fn, progress=progress)

    found = local_health(host=proof.host, timeout=proof.seconds, compute=compute)
    print(found)
    expect(found.ok, "; ".join(f"{one.name}: {one.fact}" for one in found.failures))
    return {"findings": {one.name: f"{one.state}: {one.fact}" for one in found.findings}}


def launch_on_all(proof: Proof) -> dict:
    """Every core starts in another process, has its rank, and returns a tensor; twice."""
    for _ in range(2):
        run = proof.launch(on_cores.introduce)
        cores = proof.topology.cores
        expect([one["rank"] for one in run.results] == [*range(cores)], f"ranks {run.results}")
        expect({one["world_size"] for one in run.results} == {cores}, f"sizes {run.results}")
        tensors = [one["tensor"] for one in run.results]
        right = all(
            tensor.device.type == "cpu" and (tensor == rank).all()
            for rank, tensor in enumerate(tensors)
        )
        expect(right, f"tensors that came home are {tensors}")
        processes = {one["process"] for one in run.results}
        expect(len(processes) == (proof.topology.processes or 1), f"{len(processes)} processes")
        expect(
            not proof.topology.processes or os.getpid() not in processes,
            "a core ran in the launching process",
        )
    return {
        "devices": sorted({one["device"] for one in run.results}),
        "seconds_of_a_launch": round(run.seconds, 1),
    }


def use_collectives(proof: Proof) -> dict:
    """Every collective of `Core`, with every dtype, gives every core the right answer."""
    results = proof.launch(on_cores.use_collectives).results
    wrong = []
    for rank, result in enumerate(results):
        wrong += [f"core {rank}: {one}" for one in result["wrong"]]
    expect(not wrong, f"{len(wrong)} answers: {'; '.join(wrong[:5])}")
    return {"answers": sum(result["answers"] for result in results)}


def count_samples(proof: Proof) -> dict:
    """Batches, `evaluate` and `predict` have every sample once, in its place, with its label."""
    check_samples(proof.launch(on_cores.count_samples, proof.data).results, proof.data)
    return {"samples": len(proof.data), "kinds_of_batches": len(on_cores.KINDS)}


def train_by_hand(proof: Proof) -> dict:
    """A loop ends with the weights of plain PyTorch; no two cores draw the same random numbers."""
    results = proof.launch(on_cores.train_by_hand, proof.data, matmul_precision="highest").results
    return check_by_hand(results, proof.data, proof.near)


def train_with_fit(proof: Proof) -> dict:
    """`fit` trains as plain PyTorch does; its checkpoints hold the trained weights."""
    import torch

    folder = proof.folder / "fit"
    recipes = _recipes()
    held_out = Numbers(2 * BATCH * proof.topology.cores + 3)
    given = (proof.data, held_out, recipes, folder)
    results = proof.launch(on_cores.train_with_fit, *given, matmul_precision="highest").results
    torch.save([one["float32"] for one in results], proof.folder / "fit.pt")
    return {
        name: check_fit(
            [one[name] for one in results], proof.data, held_out, recipe, folder / name, proof.near
        )
        for name, recipe in recipes.items()
    }


def resume(proof: Proof) -> dict:
    """A new launch continues `fit` from the middle of an epoch, and ends with the same bits."""
    import torch

    told = proof.folder / "fit.pt"
    expect(told.exists(), "there is no checkpoint to resume from: the part `fit` has failed")
    recipes = {"float32": _recipes()["float32"]}
    folder = proof.folder / "resumed"
    (folder / "float32").mkdir(parents=True, exist_ok=True)
    middle = sorted((proof.folder / "fit" / "float32").glob(f"step-{_MIDDLE:08}-*.pt"))
    expect(bool(middle), f"fit has left no checkpoint of step {_MIDDLE}")
    for file in middle:
        shutil.copy(file, folder / "float32")
    held_out = Numbers(2 * BATCH * proof.topology.cores + 3)
    given = (proof.data, held_out, recipes, folder)
    results = proof.launch(on_cores.train_with_fit, *given, matmul_precision="highest").results
    again = [one["float32"] for one in results]
    check_resumed(again, torch.load(told), _MIDDLE, recipes["float32"])
    return {"resumed_from": again[0]["resumed"], "loss": again[0]["losses"][-1]}


def _recipes() -> dict[str, dict]:
    """Return the recipes for `fit`; each shows an error that another recipe would hide."""
    # The last epoch goes uphill, so the best is neither the first nor the last.
    rates = [RATE * share for share in (1.1, 1.05, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)] + [
        -0.6 * RATE
    ] * 4
    exact = {
        "epochs": 3,
        "rates": rates,
        "accumulate": 2,
        "clip": None,
        "bf16": False,
        "averaged": False,
    }
    rounded = {
        "epochs": 1,
        "rates": [RATE] * 8,
        "accumulate": 1,
        "clip": CLIP,
        "bf16": True,
        "averaged": True,
    }
    return {"float32": exact, "bfloat16": rounded}


def name_a_fault(proof: Proof) -> dict:
    """A core that raises is named with its error, at once; the next launch works."""
    cores = proof.topology.cores
    message = "deliberate: a proof of how a failure is told"
    began = time.monotonic()
    try:
        proof.launch(on_cores.fail, message)
    except WorkerError as error:
        said = str(error)
        failed = error
        seconds = time.monotonic() - began
    else:
        raise NotAsExpected("the launch returned although a core raised")
    print(said.partition("\n\n")[0])
    expect(failed.rank == cores - 1, f"core {failed.rank} was named, core {cores - 1} raised")
    expect(isinstance(failed.__cause__, LookupError) and message in said, f"told as: {said[:500]}")
    # The start of the devices is in it: on a chip most of this time.
    expect(seconds < _AT_ONCE + _usual_start(proof), f"control came back after {seconds:.1f} s")
    return {
        "seconds_until_told": round(seconds, 1),
        "told": said.splitlines()[0],
        **_next_launch(proof),
    }


def be_interrupted(proof: Proof) -> dict:
    """SIGINT ends the launch while all cores work, at once; the next launch works."""
    sent = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    def when_they_work(row: dict) -> None:
        if row["done"] >= 3 and not timers:
            timers.append(threading.Timer(0.3, interrupt))
            timers[0].start()

    timers: list[threading.Timer] = []
    # a shell's `&` leaves it ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        proof.launch(on_cores.go_on, loggers=when_they_work)
    except LaunchInterrupted as interrupted:
        seconds = time.monotonic() - sent[0]
        rows = len(interrupted.run.log)
    else:
        raise NotAsExpected("the launch returned although it was interrupted")
    finally:
        for timer in timers:
            timer.join()
        signal.signal(signal.SIGINT, before)
    expect(seconds < _AT_ONCE, f"control came back {seconds:.1f} s after SIGINT")
    expect(rows >= 3, f"{rows} rows of the log were kept")
    return {"seconds_until_back": round(seconds, 1), "rows_kept": rows, **_next_launch(proof)}


def record_a_profile(proof: Proof) -> dict:
    """A trace of some steps is written and can be read."""
    files = [
        Path(file) for file in proof.launch(on_cores.record, proof.folder / "trace").results[0]
    ]
    traces = [file for file in files if file.name.endswith(".json.gz")]
    expect(bool(traces), f"no trace among the files {files}")
    events = len(json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"])
    expect(events > 10, f"{events} events in {traces[0]}")
    return {"files": {file.name: file.stat().st_size for file in files}, "events": events}


def load_what_was_compiled(proof: Proof) -> dict:
    """A second launch loads the compiled programs of the first, with the same losses.

    With PREFLIGHT_KEPT, a folder that `python -m tpukit preflight
    tools.chip.worker_functions:compile_some --chip v5e-1 --keep folder` has filled without a chip,
    the first launch tells whether this chip's client loads that.
    """
    if not runtimes()[proof.topology.backend].keeps_compiles:
        return {"kept": f"nothing: {proof.topology.backend} compiles nothing that can be kept"}
    own = proof.folder / "kept"
    given = os.environ.get("PREFLIGHT_KEPT")
    folders = [own, Path(given)] if given else [own]
    cold, warm = (proof.launch(on_cores.compile_some, compile_cache=folders) for _ in range(2))
    losses = {str(one["losses"]) for one in (*cold.results, *warm.results)}
    expect(len(losses) == 1, f"losses differ: {losses}")
    compiled = {
        name: sum(one["compiled"] for one in run.results)
        for name, run in (("cold", cold), ("warm", warm))
    }
    loaded = sum(one["loaded"] for one in warm.results)
    expect(
        compiled["warm"] == 0 and loaded > 0,
        f"{compiled['warm']} graphs were compiled again, {loaded} loaded",
    )
    seconds = {
        f"seconds_{name}": round(max(one["seconds"] for one in run.results), 2)
        for name, run in (("cold", cold), ("warm", warm))
    }
    kept = sorted(own.glob("*.pjrt"))
    found = {
        "files": len(kept),
        "bytes": sum(file.stat().st_size for file in kept),
        "keys": _keys(kept),
    }
    if given:
        found["loaded_of_preflight"] = sum(one["loaded"] for one in cold.results)
        found["keys_of_preflight"] = _keys(sorted(Path(given).glob("*.pjrt")))
    return {**seconds, **found}


def _keys(files: list[Path]) -> dict:
    """Return the parts of the programs' keys, as in `program_key.c`; one each if they agree."""
    names = ("program", "options", "flags", "plugin", "version", "topology", "topology_bytes")
    found = {}
    for head in (file.read_bytes()[:360] for file in files):
        parts = [head[8 + 32 * at : 12 + 32 * at].hex() for at in range(6)]
        parts.append(head[240 : 240 + int.from_bytes(head[232:240], "little")].hex())
        for name, part in zip(names, parts, strict=True):
            found.setdefault(name, set()).add(part)
    return {name: sorted(parts) for name, parts in found.items()}


def measure_rates(proof: Proof) -> dict:
    """Images a second on a batch that stays on the device, and as they come from the cache."""
    plan = proof.plan
    results = proof.launch(on_cores.measure_rates, proof.network, proof.images, plan).results
    first, host = results[0]["losses"]
    # A TPU rounds the inputs of products to bfloat16, 8 significant bits.
    expect(math.isclose(first, host, rel_tol=2e-2), f"first loss {first}, on the host {host}")
    expect(len({one["weights"] for one in results}) == 1, "cores ended with different weights")
    expect(
        not any(one["compiled"] for one in results), "a step was compiled again while it was timed"
    )
    images = plan.timed_steps * plan.batch_size * proof.topology.cores
    rates = {
        f"images_per_second_{kind}": round(images / max(one[kind] for one in results), 1)
        for kind in ("without_input", "with_input")
    }
    step = statistics.median(one["without_input"] for one in results) / plan.timed_steps
    memory = [one["memory"]["peak"] for one in results if one["memory"]]
    work = {"network": plan.network, "size": plan.size, "batch_size": plan.batch_size}
    return {
        **rates,
        **work,
        "milliseconds_a_step": round(1000 * step, 1),
        "device_memory": max(memory, default=None),
    }


PARTS: dict[str, Callable[[Proof], dict]] = {
    "check": find_nothing_wrong,
    "health": be_healthy,
    "launch": launch_on_all,
    "collectives": use_collectives,
    "samples": count_samples,
    "by hand": train_by_hand,
    "fit": train_with_fit,
    "resume": resume,
    "fault": name_a_fault,
    "interrupt": be_interrupted,
    "profile": record_a_profile,
    "kept": load_what_was_compiled,
    "rates": measure_rates,
}


def _usual_start(proof: Proof) -> float:
    """Return the seconds in which a launch that does next to nothing starts and ends here."""
    began = time.monotonic()
    proof.launch(on_cores.use_one_collective)
    return time.monotonic() - began


def _next_launch(proof: Proof) -> dict:
    """See that no process is left, and that the cores can be launched on again."""
    left = multiprocessing.active_children()
    expect(not left, f"processes are left: {left}")
    cores = proof.topology.cores
    totals = proof.launch(on_cores.use_one_collective).results
    expect(totals == [cores] * cores, f"the next launch added up to {totals}")
    return {"next_launch": "works"}
