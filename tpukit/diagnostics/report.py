"""What kept the device from computing: compiles, copies, waits, and operations it does not have, each with its fix."""

from dataclasses import dataclass

from tpukit.display.findings import Finding, Findings
from tpukit.display.tables import human_size
from tpukit.machine.resources import peak_memory

# A training needs 2 graphs of a step and an evaluation 1; copying, averaging and gathering have small ones.
_MANY_GRAPHS = 12
_MANY_COPIES = 0.5  # to the host, a step: each one waits until the device has caught up
_LONG_WAIT = 0.1  # of the time, for data
_FULL = 0.9  # of the device's memory
_BY_VALUE = {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"}


@dataclass(frozen=True, repr=False)
class Report(Findings):
    """What a core has to tell about its process so far. Prints as a table, and draws itself in a notebook."""

    subject: str
    findings: tuple[Finding, ...]


def report(backend, *, waited: float | None = None, seconds: float | None = None) -> Report:
    """Say what the process of a core has spent its time on since it started, and what to do about it.

    Copies no tensor and waits for nothing. On plain CPU and CUDA little is counted: nothing is compiled there.

    Args:
        backend: of the core.
        waited: seconds the loop has waited for batches, if known.
        seconds: that the loop has taken.
    """
    metrics = backend.metrics()
    findings = _of_graphs(backend, metrics) if metrics else [_without_graphs(backend)]
    if waited is not None and seconds:
        findings.append(_waiting(waited / seconds))
    findings += _memory(backend.memory())
    return Report(f"core {backend.rank} of {backend.world_size} on {backend.device}", tuple(findings))


def _without_graphs(backend) -> Finding:
    kind = backend.device.type.upper()
    fact = f"none: {kind} tensors are computed as the program runs, so nothing compiles, recompiles or falls back here"
    rehearse = '; `launch(..., backend="xla", cores=1)` shows for a few steps what a TPU would do'
    return Finding("graphs", "ok", fact + (rehearse if kind == "CPU" else ""))


def _of_graphs(backend, metrics: dict) -> list[Finding]:
    steps = max(1, metrics.get("MarkStep", (0, 0))[0])
    return [
        _compiles(metrics, steps),
        _copies_to_host(metrics, steps, backend),
        _copies_to_device(metrics, steps),
        _fallbacks(metrics),
    ]


def _compiles(metrics: dict, steps: int) -> Finding:
    (count, nanoseconds), runs = metrics.get("CompileTime", (0, 0.0)), metrics.get("ExecuteComputation", (0, 0))[0]
    fact = (
        f"{_times(count, 'graph')} compiled in {nanoseconds / 1e9:.1f} s, run {runs:,} times in {_times(steps, 'step')}"
    )
    if count <= _MANY_GRAPHS:
        return Finding("compiles", "ok", fact)
    fix = (
        "one shape for every batch (`core.batches`, or `drop_last=True`), no Python number that changes, no `if` on a "
        "tensor; `tpukit.fit` says which step compiled again, and why"
    )
    return Finding("compiles", "warning", f"{fact}: a training and its evaluation need about four", fix)


def _copies_to_host(metrics: dict, steps: int, backend) -> Finding:
    name = "copies to the host"
    count, nanoseconds = metrics.get("TransferFromDeviceTime", (0, 0.0))
    asked = metrics.get("aten::_local_scalar_dense", (0, 0))[0]
    size = human_size(int(metrics.get("InboundData", (0, 0.0))[1]))
    fact = f"{count:,}, {count / steps:.2f} a step, {size}, {nanoseconds / 1e9:.1f} s"
    if asked:
        fact += f"; {asked:,} for .item(), float() or an `if`"
    # Gradients are averaged through host memory in a rehearsal on several cores; a TPU does not.
    own = count if backend.in_graph or backend.world_size == 1 else asked
    if own != count:
        fact += "; the rehearsal's own averaging is among them"
    if own / steps <= _MANY_COPIES:
        return Finding(name, "ok", fact)
    fix = (
        "`core.log(loss=loss)` and a sum kept on the device, read every 50 steps, in place of `loss.item()` or `print`"
    )
    return Finding(name, "warning", f"{fact}: each waits until the device is done", fix)


def _copies_to_device(metrics: dict, steps: int) -> Finding:
    count = metrics.get("TransferToDeviceTime", (0, 0.0))[0]
    sent = metrics.get("OutboundData", (0, 0.0))[1]
    fact = f"{count:,}, {count / steps:.1f} a step, {human_size(int(sent))}; the weights at the start included"
    return Finding("copies to the device", "ok", fact)


def _fallbacks(metrics: dict) -> Finding:
    name, found = "fallbacks", {}
    for counter, (count, _) in metrics.items():
        if counter.startswith("aten::") and counter != "aten::_local_scalar_dense":
            found[counter.removeprefix("aten::")] = count
    if not found:
        return Finding(name, "ok", "none: every operation runs on the device")
    told = ", ".join(f"{operation} {_times(count, 'time')}" for operation, count in found.items())
    fixes = []
    if by_value := sorted(_BY_VALUE & found.keys()):
        fixes.append(
            f"{', '.join(by_value)}: the result's shape depends on values; keep the shape and multiply by the mask, "
            "or use `torch.where`"
        )
    if others := sorted(found.keys() - _BY_VALUE):
        fixes.append(f"{', '.join(others)}: write it with other operations, or do it in the dataset, before the step")
    return Finding(name, "warning", f"{told}: on the host's CPU, with a copy there and back", "; ".join(fixes))


def _waiting(share: float) -> Finding:
    fact = f"the loop waited for batches {share:.0%} of the time"
    if share <= _LONG_WAIT:
        return Finding("data", "ok", fact)
    fix = "`workers=` or `threads=` in `core.batches`, or `tpukit.pack` the dataset once"
    return Finding("data", "warning", fact, fix)


def _memory(device: dict) -> list[Finding]:
    host = Finding("host memory", "ok", f"{human_size(peak_memory() or None)} at most in this process")
    if not device:
        return [host]
    peak, limit = device["peak"], device["limit"]
    fact = f"{human_size(peak)} at most, of {human_size(limit)}"
    if peak <= _FULL * limit:
        return [Finding("device memory", "ok", fact), host]
    fix = "a smaller batch_size with `accumulate=` as much larger, or bf16"
    return [Finding("device memory", "warning", f"{fact}: nearly full", fix), host]


def _times(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
