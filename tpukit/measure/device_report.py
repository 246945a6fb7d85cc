"""What slows the device down: compiles, copies, waiting, and operations it does not have, each with its fix."""

import statistics
from dataclasses import dataclass

from tpukit.essentials.machine import peak_memory
from tpukit.essentials.run import Batches, Core
from tpukit.essentials.show import Finding, Findings, counted, human_size

# A training needs 2 graphs for its step, an evaluation 1; copies, averages and gathers have small graphs of their own.
_MANY_GRAPHS = 12
_MANY_COPIES = 0.5  # copies to the host per step; each waits until the device has finished its work
_LONG_WAIT = 0.1  # the share of its time that a loop may wait for data
_FULL = 0.9  # of the memory of the device
_LONG_COMPILE = 0.5  # the share of its time that a process may compile
# The share of the time in steps that the host waits for the device. Near 0, the device has finished before the next
# step is recorded, and stands idle; where steps are large enough, the host is ahead and waits in every one of them.
_SHORT_DEVICE_WAIT = 0.25
_FEW_STEPS = 20  # are not enough to tell
_BY_VALUE = {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"}


@dataclass(frozen=True, repr=False)
class Report(Findings):
    """What the process of a core has spent its time on so far: a table, as text or in a notebook."""

    subject: str
    findings: tuple[Finding, ...]


def report(core: Core, batches: Batches | None = None) -> Report:
    """Report what the process of a core has spent its time on since it started, and what to do about it.

    Copies no tensor and waits for nothing. On plain CPU and CUDA there is little to count: nothing is compiled there.

    Args:
        core: in the worker function.
        batches: those of the loop; with them the report says for which share of the time since the core started the
            loop waited for data.
    """
    backend = core.backend
    metrics = backend.metrics()
    findings = _of_graphs(core, metrics) if metrics else [_without_graphs(backend)]
    if batches is not None:
        findings.append(_waiting(batches.waited / core.seconds))
    findings += _memory(backend)
    return Report(f"core {backend.rank} of {backend.world_size} on {backend.device}", tuple(findings))


def _without_graphs(backend) -> Finding:
    kind = backend.device.type.upper()
    fact = f"none: {kind} operations run one by one, so nothing is compiled, recompiled or moved to the host"
    rehearse = '; a few steps with `launch(..., backend="xla", cores=1)` show what a TPU would do'
    return Finding("graphs", "ok", fact + (rehearse if kind == "CPU" else ""))


def _of_graphs(core: Core, metrics: dict) -> list[Finding]:
    backend, steps = core.backend, max(1, metrics.get("MarkStep", (0, 0))[0])
    return [
        _compiles(backend, metrics, steps),
        _copies_to_host(metrics, steps, backend),
        _copies_to_device(metrics, steps),
        _fallbacks(metrics),
        *_compile_time(backend, core.seconds),
        *_batch_size(metrics, steps, core.step_seconds, backend),
    ]


def _compiles(backend, metrics: dict, steps: int) -> Finding:
    (loaded, loading), (_, compiling) = backend.loads(), backend.compiles()
    count, runs = metrics.get("CompileTime", (0, 0.0))[0] - loaded, metrics.get("ExecuteComputation", (0, 0))[0]
    ran = f"run {runs:,} times in {counted(steps, 'step')}"
    kept = f", {loaded} loaded in {loading:.1f} s that were compiled before" if loaded else ""
    fact = f"{counted(count, 'graph')} compiled in {compiling:.1f} s{kept}, {ran}"
    if count <= _MANY_GRAPHS:
        return Finding("compiles", "ok", fact)
    fix = (
        "the same shape for every batch (`core.batches`, or `drop_last=True`), no Python number that changes, no `if` "
        "on a tensor; `tpukit.fit` says which step compiled again, and why"
    )
    return Finding("compiles", "warning", f"{fact}: a training and its evaluation need about four", fix)


def _compile_time(backend, seconds: float) -> list[Finding]:
    _, compiling = backend.compiles()
    if not compiling:
        return []
    fact = f"{compiling:.1f} of {seconds:.1f} s went into compiling, {min(1, compiling / seconds):.0%}"
    if compiling <= _LONG_COMPILE * seconds:
        return [Finding("compile time", "ok", fact)]
    fix = (
        "`tpukit.launch(..., keep_compiles=folder)`, so that the next one does not compile them again; more steps for "
        "the same graphs"
    )
    return [Finding("compile time", "warning", f"{fact}: this run was too short for its graphs", fix)]


def _batch_size(metrics: dict, steps: int, step: float | None, backend) -> list[Finding]:
    if not step or steps < _FEW_STEPS:
        return []
    asked = metrics.get("TransferFromDeviceTime", (0, 0.0))[0] > _MANY_COPIES * steps
    # A loop that asks for numbers waits for another reason, and a rehearsal on several cores waits for the others.
    if asked or backend.shares_process or (backend.world_size > 1 and not backend.in_graph):
        return []
    # torch_xla waits for the step before in the next sync; no more than all of it, since the first ones wait longer.
    own = statistics.median(backend.waits) * backend.wait_count if backend.waits else 0.0  # a stopwatch's
    waited = min(step, (metrics.get("DeviceLockWait", (0, 0.0))[1] / 1e9 + own) / steps)
    fact = f"a step takes the host {1000 * step:.1f} ms, of which it waits {1000 * waited:.1f} ms for the device"
    if waited >= _SHORT_DEVICE_WAIT * step:
        return [Finding("batch size", "ok", fact)]
    fix = "a larger batch_size, as long as the samples per second rise; with the learning rate and a warmup to match"
    return [Finding("batch size", "warning", f"{fact}: the device is done early and stands idle", fix)]


def _copies_to_host(metrics: dict, steps: int, backend) -> Finding:
    name = "copies to the host"
    count, nanoseconds = metrics.get("TransferFromDeviceTime", (0, 0.0))
    asked = metrics.get("aten::_local_scalar_dense", (0, 0))[0]  # .item(), which float() and `if` call
    size = human_size(int(metrics.get("InboundData", (0, 0.0))[1]))
    fact = f"{count:,}, {count / steps:.2f} per step, {size}, {nanoseconds / 1e9:.1f} s"
    if asked:
        fact += f"; {asked:,} for .item(), float() or an `if`"
    # A rehearsal on several cores averages gradients in the memory of the host; a TPU does not.
    own = count if backend.in_graph or backend.world_size == 1 else asked
    if own != count:
        fact += "; this includes the rehearsal's own averaging"
    if own / steps <= _MANY_COPIES:
        return Finding(name, "ok", fact)
    fix = (
        "`core.log(loss=loss)`, or a sum on the device that is read every 50 steps, instead of `loss.item()` or `print`"
    )
    return Finding(name, "warning", f"{fact}: each waits until the device has finished", fix)


def _copies_to_device(metrics: dict, steps: int) -> Finding:
    count = metrics.get("TransferToDeviceTime", (0, 0.0))[0]
    sent = metrics.get("OutboundData", (0, 0.0))[1]
    fact = f"{count:,}, {count / steps:.1f} per step, {human_size(int(sent))}, including the weights at the start"
    return Finding("copies to the device", "ok", fact)


def _fallbacks(metrics: dict) -> Finding:
    name, found = "fallbacks", {}
    for counter, (count, _) in metrics.items():
        # torch_xla counts each operation that it has no lowering for under its aten:: name.
        if counter.startswith("aten::") and counter != "aten::_local_scalar_dense":
            found[counter.removeprefix("aten::")] = count
    if not found:
        return Finding(name, "ok", "none: every operation runs on the device")
    operations = ", ".join(f"{operation} {counted(count, 'time')}" for operation, count in found.items())
    fixes = []
    if by_value := sorted(_BY_VALUE & found.keys()):
        fixes.append(
            f"{', '.join(by_value)}: the shape of the result depends on values; keep the shape and multiply by a mask, "
            "or use `torch.where`"
        )
    if others := sorted(found.keys() - _BY_VALUE):
        fixes.append(f"{', '.join(others)}: write it with other operations, or do it in the dataset, before the step")
    return Finding(name, "warning", f"{operations}: on the host's CPU, with a copy there and back", "; ".join(fixes))


def _waiting(share: float) -> Finding:
    fact = f"the loop waited for batches {share:.0%} of the time"
    if share <= _LONG_WAIT:
        return Finding("data", "ok", fact)
    fix = "`workers=` or `threads=` in `core.batches`, or `tpukit.pack` the dataset once"
    return Finding("data", "warning", fact, fix)


def _memory(backend) -> list[Finding]:
    host = Finding("host memory", "ok", f"{human_size(peak_memory() or None)} at most in this process")
    if backend.chips > 1:
        fact = "no chip's memory is counted where one process has all; `tpukit.preflight.preflight` knows it"
        return [Finding("device memory", "ok", fact), host]
    device = backend.memory()
    if not device:
        return [host]
    peak, limit = device["peak"], device["limit"]
    fact = f"{human_size(peak)} at most, of {human_size(limit)}"
    if peak <= _FULL * limit:
        return [Finding("device memory", "ok", fact), host]
    fix = "a smaller batch_size with a correspondingly larger `accumulate=`, or bf16"
    return [Finding("device memory", "warning", f"{fact}: nearly full", fix), host]
