import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tpukit
from tpukit.essentials.launcher.launcher import launch
from tpukit.profiling.device_report import Report, report

XLA = pytest.mark.xla


def of(backend, *, seconds=1000.0, step=None, compiled_before=0.0, **rates):
    """Return a core that has run for so long, with steps that took so long."""
    rates = {"tflops_per_second": None, "mfu": None, "peak_tflops": None, **rates}
    internal = SimpleNamespace(compiled_before=compiled_before)
    times = {"seconds": seconds, "step_seconds": step}
    return SimpleNamespace(backend=backend, internal=internal, **times, **rates)


def reported(step, *, backend="xla:cpu", cores=1, steps=14, rank=0, waited=None, **options):
    """Train a small model for some steps, doing `step(core, model, number)` in each, and return the report."""

    def work(core):
        model = core.model(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(1, steps + 1):
            with core.step():
                loss = step(core, model, number)
                loss.backward()
                core.optimizer_step(optimizer)
        return report(
            of(core.backend, **options), SimpleNamespace(wait_seconds=waited) if waited else None
        )

    return launch(work, cores=cores, backend=backend, progress="off").results[rank]


def found(report: Report, name: str):
    (finding,) = (finding for finding in report.findings if finding.name == name)
    return finding


def fine(core, model, number):
    return model(torch.zeros(8, 3, device=core.device)).square().mean()


@XLA
def test_of_a_loop_as_it_should_be_all_is_well_and_the_numbers_are_given():
    outcome = reported(fine)
    assert outcome.title == "core 0 of 1 on xla:0: all is well"
    assert [finding.name for finding in outcome.findings] == [
        "compiles",
        "copies to the host",
        "copies to the device",
        "fallbacks",
        "compile time",
        "host memory",
    ]
    assert found(outcome, "copies to the host").fact.startswith("0, 0.00 per step, ")
    assert " in 14 steps" in found(outcome, "compiles").fact
    assert not any(finding.fix for finding in outcome.findings)


@pytest.mark.parametrize(
    ("mfu", "fact"),
    [
        (None, "49.2 TFLOP/s per chip in the last steps"),
        (
            0.25,
            "49.2 TFLOP/s per chip in the last steps, MFU 25.0% of the 197 TFLOP/s in bfloat16",
        ),
    ],
)
def test_the_use_of_the_chip_is_reported_once_a_step_was_counted(mfu, fact):
    rates = {"tflops_per_second": 49.25, "mfu": mfu, "peak_tflops": 197.0}
    outcome = reported(fine, backend="cpu", steps=2, **rates)
    assert found(outcome, "use of the chip").fact == fact


WRONG = {
    # what is wrong: the step that does it, the finding, its fact, and the step after its fix has been applied
    "the loss is read every step": (
        lambda core, model, number: (
            torch.tensor(fine(core, model, number).item()) * 0 + fine(core, model, number)
        ),
        "copies to the host",
        "14, 1.00 per step, 0 KiB",
        lambda core, model, number: core.log(loss=(loss := fine(core, model, number))) or loss,
    ),
    "a tensor decides": (
        lambda core, model, number: (
            fine(core, model, number) * (2 if model.weight.sum() > 9 else 1)
        ),
        "copies to the host",
        "; 14 for .item(), float() or an `if`: each waits until the device has finished",
        lambda core, model, number: (
            fine(core, model, number) * torch.where(model.weight.sum() > 9, 2, 1)
        ),
    ),
    "every batch has another shape": (
        lambda core, model, number: (
            model(torch.zeros(number, 3, device=core.device)).square().mean()
        ),
        "compiles",
        "a training and its evaluation need about four",
        fine,
    ),
    "an operation that falls back": (
        lambda core, model, number: fine(core, model, number) + model.weight.detach().median(),
        "fallbacks",
        "median 14 times: on the host's CPU",
        lambda core, model, number: (
            fine(core, model, number) + model.weight.detach().flatten().sort()[0][2]
        ),
    ),
    "a shape that depends on values": (
        lambda core, model, number: (
            fine(core, model, number) + model.weight.detach().flatten().nonzero().sum()
        ),
        "fallbacks",
        "nonzero 14 times: on the host's CPU",
        lambda core, model, number: fine(core, model, number) + (model.weight.detach() != 0).sum(),
    ),
}


@XLA
@pytest.mark.parametrize(("wrong", "name", "fact", "fixed"), WRONG.values(), ids=WRONG)
def test_what_costs_time_is_found_and_the_fix_removes_it(wrong, name, fact, fixed):
    finding = found(reported(wrong), name)
    assert finding.state == "warning"
    assert fact in finding.fact
    assert finding.fix
    assert found(reported(fixed), name).state == "ok"


@XLA
def test_a_shape_that_depends_on_values_has_a_fix_of_its_own():
    outcome = reported(WRONG["a shape that depends on values"][0])
    assert "nonzero: the shape of the result depends on values" in found(outcome, "fallbacks").fix


@XLA
def test_the_dry_runs_own_copies_are_not_held_against_the_loop():
    assert not reported(fine, cores=2, rank=1).warnings
    finding = found(reported(WRONG["a tensor decides"][0], cores=2), "copies to the host")
    assert finding.state == "warning"
    assert "this includes the dry run's own averaging" in finding.fact


@pytest.mark.parametrize(("waited", "state"), [(0.5, "ok"), (4.0, "warning")])
def test_waiting_for_data_is_given_as_a_share(waited, state):
    finding = found(reported(fine, backend="cpu", waited=waited, seconds=10.0), "data")
    assert (finding.state, bool(finding.fix)) == (state, state == "warning")
    assert f"{waited / 10:.0%} of the time" in finding.fact


def test_on_a_cpu_it_says_why_there_is_little_to_say():
    outcome = reported(fine, backend="cpu", steps=2)
    assert outcome.title == "core 0 of 1 on cpu: all is well"
    assert [finding.name for finding in outcome.findings] == ["graphs", "host memory"]
    graphs = found(outcome, "graphs").fact
    assert 'launch(..., backend="xla", cores=1)' in graphs
    # A model of torch.compile does compile, on every device.
    assert "graphs of `torch.compile` are not counted" in graphs
    assert (
        " MiB at most" in found(outcome, "host memory").fact
        or " GiB at most" in found(outcome, "host memory").fact
    )


class Device:
    """A TPU core as it tells of itself; only a TPU counts its memory, and reads the graphs it has kept."""

    rank, world_size, chips, device, in_graph = 0, 8, 1, torch.device("xla:0"), True

    def __init__(self, peak=0, **metrics):
        self.peak, self.counted = peak, {name: (count, 0.0) for name, count in metrics.items()}

    def metrics(self):
        return {"MarkStep": (100, 0.0), **self.counted}

    def memory(self):
        return {"peak": self.peak, "limit": 16 * 2**30}

    def compiles(self):
        count, nanoseconds = self.metrics().get("CompileTime", (0, 0.0))
        return count - self.loads()[0], nanoseconds / 1e9 - self.loads()[1]

    def loads(self):
        return 0, 0.0


@pytest.mark.parametrize(("peak", "state"), [(8, "ok"), (15, "warning")])
def test_a_device_that_is_nearly_full_is_warned_of(peak, state):
    assert found(report(of(Device(peak * 2**30))), "device memory").state == state


@XLA
def test_it_prints_as_a_table_draws_itself_and_travels():
    outcome = reported(WRONG["the loss is read every step"][0])
    assert pickle.loads(pickle.dumps(outcome)) == outcome
    assert "\nwarning  copies to the host " in str(outcome)
    assert "fix: " in str(outcome)
    assert "<table" in outcome._repr_html_()
    assert "loss.item()" in outcome._repr_html_()


def counted(steps=100, *, compiling=1.0, waiting=5.0, copies=0):
    """Return a TPU core that has taken steps, with the seconds it compiled and waited for the device."""
    core = Device(TransferFromDeviceTime=copies)
    core.counted |= {"CompileTime": (3, compiling * 1e9), "DeviceLockWait": (steps, waiting * 1e9)}
    core.metrics = lambda: core.counted | {"MarkStep": (steps, 0.0)}
    core.shares_process, core.waits, core.wait_count = False, [], 0
    return core


def test_small_steps_after_which_the_device_stands_idle_are_named_as_a_small_batch():
    outcome = report(of(counted(waiting=0.5), step=0.1))
    finding = found(outcome, "batch size")
    assert finding.state == "warning"
    assert "a step takes the host 100.0 ms, of which it waits 5.0 ms for the device" in finding.fact
    assert "larger batch_size" in finding.fix
    assert found(report(of(counted(waiting=8.0), step=0.1)), "batch size").state == "ok"


def test_a_loop_that_waits_for_the_device_itself_is_not_told_that_its_batch_is_small():
    core = counted(waiting=0.0)
    core.waits, core.wait_count = (
        [0.1, 0.1, 9.0],
        50,
    )  # as a stopwatch does; the first time it compiled
    assert found(report(of(core, step=0.1)), "batch size").state == "ok"


UNKNOWN = {
    "too few steps": (counted(steps=5, waiting=0.0), 0.1),
    "the loop asks for numbers, which is another finding": (counted(waiting=0.0, copies=100), 0.1),
    "the seconds of a step are not known": (counted(waiting=0.0), None),
}


@pytest.mark.parametrize(("core", "step"), UNKNOWN.values(), ids=UNKNOWN)
def test_of_the_batch_size_nothing_is_said_where_nothing_is_known(core, step):
    assert "batch size" not in {finding.name for finding in report(of(core, step=step)).findings}


@pytest.mark.parametrize(("compiling", "state"), [(1.0, "ok"), (9.0, "warning")])
def test_a_run_that_mostly_compiles_is_named(compiling, state):
    finding = found(report(of(counted(compiling=compiling), seconds=10.0)), "compile time")
    assert (finding.state, bool(finding.fix)) == (state, state == "warning")
    assert f"{compiling:.1f} of 10.0 s went into compiling, {compiling / 10:.0%}" in finding.fact


def test_the_compilations_of_an_earlier_run_of_the_session_do_not_count():
    core = of(counted(compiling=9.0), seconds=10.0, compiled_before=8.0)
    assert "1.0 of 10.0 s went into compiling" in found(report(core), "compile time").fact


@XLA
def test_a_later_run_of_a_session_that_compiles_nothing_has_no_compile_time():
    def train(core):
        model = core.model(nn.Linear(3, 2))
        fine(core, model, 1).backward()
        core.backend.sync()
        return report(core)

    with tpukit.Session(1, "xla:cpu", progress="off") as session:
        first = session.run(train, progress="off").results[0]
        later = session.run(report, progress="off").results[0]
    assert found(first, "compile time")
    assert "compile time" not in {finding.name for finding in later.findings}


def test_what_was_loaded_is_told_as_loaded():
    core = counted(compiling=9.0)
    core.loads = lambda: (2, 8.5)
    outcome = report(of(core, seconds=10.0))
    assert found(outcome, "compiles").fact.startswith(
        "1 graph compiled in 0.5 s, 2 compiled before and loaded in 8.5 s"
    )
    assert found(outcome, "compile time").state == "ok"


@XLA
@pytest.mark.alone  # host and device share this machine's processors: others would make the host's part the longer one
def test_of_a_loop_with_large_steps_the_batch_size_is_all_right():
    def work(core):
        model = core.model(
            nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14**2, 10))
        )
        (images,) = core.to_device([torch.ones(4096, 1, 16, 16)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(30):
            with core.step():
                model(images).square().mean().backward()
                core.optimizer_step(optimizer)
        return report(core)

    outcome = launch(work, cores=1, backend="xla:cpu", progress="off").results[0]
    assert found(outcome, "batch size").state == "ok"
