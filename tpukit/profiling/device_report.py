"""Report the reasons why a device is slow, each with its fix.

The numbers come from counters of torch_xla and of the backend: compilations, copies to and from the
host, operations without a lowering, waits and memory. For each, a function here returns a
`Finding`: a warning if a number is beyond its limit.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from tpukit.essentials.display import Finding, Findings, InvalidValueError, counted, human_size
from tpukit.essentials.environment import peak_memory
from tpukit.essentials.launcher import Batches, Core

# Limits of the findings: a larger number is a warning.
# A training needs 1 or 2 graphs for its step, and an evaluation 1. Copies, averages and gathers
# need further small graphs.
_MANY_GRAPHS = 12
_MANY_COPIES = 0.5  # copies to the host per step; each waits until the device has finished its work
_LONG_WAIT = 0.1  # share of a loop's time in which it waits for data
_FULL = 0.9  # share of the device's memory that is used
_LONG_COMPILE = 0.5  # share of a run's time in which its process compiles
# Share of the time in steps in which the host waits for the device; a smaller share is a warning.
# Near 0, the device has finished before the next step is recorded, and is idle. If steps are large
# enough, the host is ahead, and waits in each step.
_SHORT_DEVICE_WAIT = 0.25
_FEW_STEPS = 20  # with fewer steps, the batch size is not judged
# Operations whose result has a shape that depends on values.
_BY_VALUE = {
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}


@dataclass(frozen=True, repr=False)
class Report(Findings):
    """A table of findings about the speed and memory of a core's process so far.

    Attributes:
        subject: the core and its device.
        findings: the rows of the table.
        step_seconds: the median time of a step, over the last 64; None before the first step.
    """

    subject: str
    findings: tuple[Finding, ...]
    step_seconds: float | None = None

    def roofline(self, planned):
        """Draw the measured step under the roofline of its chip; return a figure of matplotlib.

        Call it in the notebook, on the report that the worker function returned. This report does
        not contain single operations, so the figure takes them from `planned`.

        Args:
            planned: the result of `tpukit.preflight.preflight` for the same step and chip.

        Raises:
            InvalidValueError: the report has no step; or `planned` has no program, because its step
                needs too much memory.
        """
        if self.step_seconds is None:
            raise InvalidValueError(
                "a report without a step has no roofline",
                found="the report was made before the first step of the loop ended",
                fix="call `tpukit.profiling.report(core)` after the training loop",
            )
        return planned.roofline(step_seconds=self.step_seconds)


def report(core: Core, batches: Batches | None = None) -> Report:
    """Report how a core's process has used its time, and how to make it faster.

    The report copies no tensor and does not wait for the device. Most findings need torch_xla's
    counters, so the report has only a few on plain CPU, on CUDA and with TorchTPU. In a session,
    the counters include earlier runs.

    Args:
        core: this core; call `report` in the worker function.
        batches: the batches of the loop. If they are given, the report contains the time that the
            loop waited for data, as a share of `core.seconds`.

    Returns:
        a `Report`, which a notebook shows as a table.
    """
    backend = core.backend
    metrics = backend.metrics()
    findings = _of_graphs(core, _Metrics(metrics)) if metrics else [_without_graphs(backend)]
    if batches is not None:
        findings.append(_waiting(batches.wait_seconds / core.seconds))
    findings += _use(core)
    findings += _memory(backend)
    subject = f"core {backend.rank} of {backend.world_size} on {backend.device}"
    return Report(subject, tuple(findings), core.step_seconds)


class _Metrics:
    """torch_xla's counters and metrics: a count and a total for each name."""

    def __init__(self, values: Mapping[str, tuple[int, float]]) -> None:
        self._values = values
        self.steps = max(1, self.count("MarkStep"))

    def count(self, name: str) -> int:
        count, _ = self._values.get(name, (0, 0.0))
        return count

    def total(self, name: str) -> float:
        _, total = self._values.get(name, (0, 0.0))
        return total

    def seconds(self, name: str) -> float:
        return self.total(name) / 1e9  # torch_xla counts nanoseconds

    @property
    def reads(self) -> int:
        """Number of calls of .item(); float() and an `if` on a tensor call it, too."""
        return self.count("aten::_local_scalar_dense")

    def fallbacks(self) -> dict[str, int]:
        """Return how often each operation ran on the host.

        torch_xla counts an operation without a lowering under its aten:: name.
        """
        found = {}
        for name in self._values:
            if name.startswith("aten::") and name != "aten::_local_scalar_dense":
                found[name.removeprefix("aten::")] = self.count(name)
        return found


def _without_graphs(backend) -> Finding:
    """Return the finding for a device without torch_xla, which alone counts graphs."""
    kind = backend.device.type.upper()
    fact = f"none: {kind} operations run one by one; graphs of `torch.compile` are not counted"
    if kind == "CPU":
        dry_run = 'a few steps with `launch(..., backend="xla", cores=1)`'
        fact += f"; {dry_run} show what a TPU would do"
    return Finding("graphs", "ok", fact)


def _of_graphs(core: Core, metrics: _Metrics) -> list[Finding]:
    return [
        _compiles(core.backend, metrics),
        _copies_to_host(core.backend, metrics),
        _copies_to_device(metrics),
        _fallbacks(metrics),
        *_compile_time(core),
        *_batch_size(core.backend, metrics, core.step_seconds),
    ]


def _compiles(backend, metrics: _Metrics) -> Finding:
    # torch_xla counts a program that the compilation cache has loaded as compiled. So subtract it.
    loaded, loading_seconds = backend.loads()
    _, compiling_seconds = backend.compiles()
    count = metrics.count("CompileTime") - loaded
    fact = f"{counted(count, 'graph')} compiled in {compiling_seconds:.1f} s, "
    if loaded:
        fact += f"{loaded} compiled before and loaded in {loading_seconds:.1f} s, "
    runs = metrics.count("ExecuteComputation")
    fact += f"run {runs:,} times in {counted(metrics.steps, 'step')}"
    if count <= _MANY_GRAPHS:
        return Finding("compiles", "ok", fact)
    fact += ": a training and its evaluation need about four"
    fix = (
        "the same shape for every batch (`core.batches`, or `drop_last=True`), no exponent or "
        "index in Python that changes, no `if` on a tensor; `tpukit.fit` reports which step "
        "compiled again, and why"
    )
    return Finding("compiles", "warning", fact, fix=fix)


def _compile_time(core: Core) -> list[Finding]:
    _, compiling = core.backend.compiles()
    compiling -= core.internal.compiled_before
    if not compiling:
        return []
    seconds = core.seconds
    share = min(1, compiling / seconds)
    fact = f"{compiling:.1f} of {seconds:.1f} s went into compiling, {share:.0%}"
    if compiling <= _LONG_COMPILE * seconds:
        return [Finding("compile time", "ok", fact)]
    fact += ": this run was too short for its graphs"
    fix = (
        "`tpukit.launch(..., compile_cache=folder)`, so that the next launch does not compile them "
        "again; or more steps with the same graphs"
    )
    return [Finding("compile time", "warning", fact, fix=fix)]


def _batch_size(backend, metrics: _Metrics, step: float | None) -> list[Finding]:
    """Judge whether the batch is large enough: the host should wait for the device in each step.

    Args:
        backend: the backend of the core.
        metrics: the counters of torch_xla.
        step: seconds per step; None if unknown.
    """
    if not step or metrics.steps < _FEW_STEPS:
        return []
    reads_numbers = metrics.count("TransferFromDeviceTime") > _MANY_COPIES * metrics.steps
    is_dry_run_of_several = backend.world_size > 1 and not backend.in_graph
    if reads_numbers or backend.shares_process or is_dry_run_of_several:
        return []  # the host also waits for numbers or for other cores, so the wait proves nothing
    # In a sync, torch_xla waits for the previous step. A wait cannot be longer than the step, but
    # for the first steps, which compile. So `min` below limits it to the step.
    by_torch_xla = metrics.seconds("DeviceLockWait")
    by_stopwatch = 0.0
    if backend.waits:
        by_stopwatch = statistics.median(backend.waits) * backend.wait_count
    waited = min(step, (by_torch_xla + by_stopwatch) / metrics.steps)
    times = f"a step takes the host {1000 * step:.1f} ms"
    fact = f"{times}, of which it waits {1000 * waited:.1f} ms for the device"
    if waited >= _SHORT_DEVICE_WAIT * step:
        return [Finding("batch size", "ok", fact)]
    fact += ": the device is done early and stands idle"
    fix = "a larger batch_size, while the samples per second rise; adapt learning rate and warmup"
    return [Finding("batch size", "warning", fact, fix=fix)]


def _copies_to_host(backend, metrics: _Metrics) -> Finding:
    count = metrics.count("TransferFromDeviceTime")
    size = human_size(int(metrics.total("InboundData")))
    seconds = metrics.seconds("TransferFromDeviceTime")
    fact = f"{count:,}, {count / metrics.steps:.2f} per step, {size}, {seconds:.1f} s"
    if metrics.reads:
        fact += f"; {metrics.reads:,} for .item(), float() or an `if`"
    by_loop = count
    if backend.world_size > 1 and not backend.in_graph:
        # A dry run on several cores averages gradients in host memory, which a TPU does not. So
        # count only the copies that .item() makes.
        by_loop = metrics.reads
    if by_loop != count:
        fact += "; this includes the dry run's own averaging"
    if by_loop / metrics.steps <= _MANY_COPIES:
        return Finding("copies to the host", "ok", fact)
    fact += ": each waits until the device has finished"
    read_later = "a sum on the device that is read every 50 steps"
    fix = f"`core.log(loss=loss)`, or {read_later}, instead of `loss.item()` or `print`"
    return Finding("copies to the host", "warning", fact, fix=fix)


def _copies_to_device(metrics: _Metrics) -> Finding:
    count = metrics.count("TransferToDeviceTime")
    size = human_size(int(metrics.total("OutboundData")))
    per_step = f"{count / metrics.steps:.1f} per step"
    fact = f"{count:,}, {per_step}, {size}, including the weights at the start"
    return Finding("copies to the device", "ok", fact)


def _fallbacks(metrics: _Metrics) -> Finding:
    found = metrics.fallbacks()
    if not found:
        return Finding("fallbacks", "ok", "none: every operation runs on the device")
    # XLA cannot compute a result whose shape depends on values. Other operations only lack a
    # lowering, so their fix is another one.
    fixes = []
    by_value = ", ".join(sorted(_BY_VALUE & found.keys()))
    if by_value:
        reason = "the shape of the result depends on values"
        fix = "keep the shape and multiply by a mask, or use `torch.where`"
        fixes.append(f"{by_value}: {reason}; {fix}")
    others = ", ".join(sorted(found.keys() - _BY_VALUE))
    if others:
        fix = "write it with other operations, or do it in the dataset, before the step"
        fixes.append(f"{others}: {fix}")
    names = ", ".join(f"{name} {counted(count, 'time')}" for name, count in found.items())
    fact = f"{names}: on the host's CPU, with a copy there and back"
    return Finding("fallbacks", "warning", fact, fix="; ".join(fixes))


def _waiting(share: float) -> Finding:
    fact = f"the loop waited for batches {share:.0%} of the time"
    if share <= _LONG_WAIT:
        return Finding("data", "ok", fact)
    fix = "`workers=` or `threads=` in `core.batches`, or `tpukit.pack` the dataset once"
    return Finding("data", "warning", fact, fix=fix)


def _use(core: Core) -> list[Finding]:
    """Return the model's FLOP/s, if `fit` or `Core.counting_flops` has counted a step."""
    if core.tflops_per_second is None:
        return []
    fact = f"{core.tflops_per_second:.3g} TFLOP/s per chip in the last steps"
    if core.mfu is not None:
        fact += f", MFU {core.mfu:.1%} of the {core.peak_tflops:g} TFLOP/s in bfloat16"
    return [Finding("use of the chip", "ok", fact)]


def _memory(backend) -> list[Finding]:
    peak_of_host = human_size(peak_memory() or None)
    host = Finding("host memory", "ok", f"{peak_of_host} at most in this process")
    if backend.chips > 1:
        reason = "because one process has all chips"
        fact = f"no chip's memory is counted, {reason}; `tpukit.preflight.preflight` reports it"
        return [Finding("device memory", "ok", fact), host]
    device = backend.memory()
    if not device:
        return [host]
    fact = f"{human_size(device['peak'])} at most, of {human_size(device['limit'])}"
    if device["peak"] <= _FULL * device["limit"]:
        return [Finding("device memory", "ok", fact), host]
    fix = "a smaller batch_size with a correspondingly larger `accumulate_grad_batches=`, or bf16"
    return [Finding("device memory", "warning", f"{fact}: nearly full", fix=fix), host]
