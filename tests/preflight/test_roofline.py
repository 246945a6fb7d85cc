"""The FLOPs and bytes of a compiled step's operations, its limit, and its figure."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tpukit
from tpukit.preflight.hlo import Array, Operation, Program, _window_places, read_program
from tpukit.preflight.recording import record
from tpukit.preflight.roofline import limit, points, roofline_figure
from tpukit.preflight.step_report import Cost
from tpukit.profiling import Report, find_tpu

CHIP = find_tpu("v5e-8")


def cost(name, *, flops, hbm_bytes, cycles, direction="forward"):
    return Cost(
        Operation(name, "fusion", ()),
        cycles,
        share=cycles / 1e6,
        module=name,
        line="",
        direction=direction,
        flops=flops,
        hbm_bytes=hbm_bytes,
    )


def step(**changes):
    """Return a step of 1e6 cycles on v5e-8, by its numbers."""
    seconds = 1e6 / CHIP.clock
    numbers = {
        "chip": CHIP,
        "batch_size": 8,
        "seconds": seconds,
        "host_seconds": math.nan,
        "link_seconds": 0.0,
        "pipeline": None,
        "compiled": (None,),
        "flops": 0.6 * seconds * CHIP.flops,
        "hbm_traffic": 0.2 * seconds * CHIP.bandwidth,
        "products": (
            cost("conv1", flops=2e9, hbm_bytes=4_000_000, cycles=200_000),
            cost("conv2", flops=9e9, hbm_bytes=0, cycles=300_000, direction="backward"),
        ),
        **changes,
    }
    numbers["flops_share"] = numbers["flops"] / (seconds * CHIP.flops)
    return SimpleNamespace(**numbers)


LIMITS = {
    "compute": ({}, "the chip's compute is the limit, at 60% of its peak; only fewer FLOPs"),
    "memory": (
        {"hbm_traffic": 0.7 * 1e6 / CHIP.clock * CHIP.bandwidth},
        "the chip's memory is the limit, at 70% of its peak; bf16=True",
    ),
    "operations": (
        {"flops": 1e9},
        "neither compute nor memory is used up, 1% of the peak and 20% of the bandwidth",
    ),
    "host": (
        {"host_seconds": 0.02},
        "the host is the limit: 20.0 ms per step, the chip's operations 0.7 ms; fit(replay=True)",
    ),
    "input": ({"pipeline": 6400.0}, "the input is the limit: 10.0 ms per step"),
    "links": ({"link_seconds": 0.003}, "the links are the limit: 3.0 ms per step"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_limit_of_a_step_is_named_with_what_to_do(name):
    changes, words = LIMITS[name]
    found, sentence = limit(step(**changes))
    assert found == name
    assert sentence.startswith(words)


def test_the_figure_has_the_roof_the_operations_and_the_step():
    found = step()
    (first, second) = points(found)
    assert first.intensity == 500
    assert first.rate == pytest.approx(2e9 / (200_000 / CHIP.clock))
    assert second.intensity == 10 * CHIP.flops / CHIP.bandwidth  # at the edge, without HBM
    figure = roofline_figure(found)
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    roof = axes.lines[0].get_xydata()
    assert roof[1].tolist() == [CHIP.flops / CHIP.bandwidth, CHIP.flops / 1e12]
    assert roof[0][1] == pytest.approx(roof[0][0] * CHIP.bandwidth / 1e12)
    assert "the chip's compute is the limit" in figure.alt
    assert "conv1, 20%" in figure.alt


def test_a_measured_step_lies_below_the_estimate_at_the_same_intensity():
    found = step()
    found.roofline = lambda step_seconds: roofline_figure(found, step_seconds=step_seconds)
    report = Report("core 0 of 8 on xla:0", (), step_seconds=4 * found.seconds)
    figure = report.roofline(found)
    (axes,) = figure.axes
    estimate, measured = [line for line in axes.lines if line.get_marker() == "D"][:2]
    assert measured.get_xdata()[0] == estimate.get_xdata()[0]
    assert measured.get_ydata()[0] == pytest.approx(estimate.get_ydata()[0] / 4)
    assert "measured 2.7 ms per step, 15% of the peak" in figure.alt
    assert "the chip's operations take 0.7 ms (25%); the rows of the report name" in figure.alt


def test_a_measured_step_close_to_the_estimate_has_its_limit():
    found = step()
    figure = roofline_figure(found, step_seconds=1.25 * found.seconds)
    assert "(80%); the chip's compute is the limit, at 60% of its peak" in figure.alt


def test_a_report_before_the_first_step_has_no_roofline():
    with pytest.raises(tpukit.TpukitError, match="a report without a step has no roofline"):
        Report("core 0 of 8 on xla:0", ()).roofline(step())


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
def test_a_measured_time_must_be_positive(seconds):
    with pytest.raises(tpukit.TpukitError, match="step_seconds must be positive"):
        roofline_figure(step(), step_seconds=seconds)


def test_a_step_that_was_not_compiled_has_no_roofline():
    with pytest.raises(tpukit.TpukitError, match="has no roofline"):
        roofline_figure(step(compiled=()))


@pytest.mark.parametrize(
    ("size", "stride", "low", "window_dilation", "input_dilation", "places"),
    [
        (1, 1, 0, 1, 1, 8),
        (3, 1, 1, 1, 1, 22),  # two of 24 lie on the padding
        (3, 2, 1, 1, 1, 11),
        (3, 1, 0, 2, 1, 12),
        (3, 1, 2, 1, 2, 11),  # every other element is a hole
        (1, 1, -2, 1, 1, 4),
    ],
)
def test_places_of_a_window_are_those_on_elements(
    size, stride, low, window_dilation, input_dilation, places
):
    fields = {1: size, 2: stride, 3: low % 2**64, 5: window_dilation, 6: input_dilation}
    code = bytearray()
    for number, value in fields.items():
        code.append(number << 3)
        while value > 127:
            code.append(value & 127 | 128)
            value >>= 7
        code.append(value)
    output = {(3, 2): 4, (3, 1): 8}.get((size, stride), 8)
    elements = range(8) if input_dilation == 1 else range(0, 15, input_dilation)
    if window_dilation == 2:
        output = 4
    if low < 0:
        output = 4
    expected = 0
    for element in range(size):
        for place in range(output):
            expected += place * stride - low + element * window_dilation in elements
    assert _window_places(bytes(code), 8, output) == expected == places


def test_bytes_are_those_in_hbm_and_names_of_arrays_move_none():
    weights = Operation("p", "parameter", (Array("f32", (4, 8)),), id=1)
    fast = Operation("f", "fusion", (Array("f32", (4,), in_hbm=False),), id=2, operands=(1, 1))
    view = Operation("b", "bitcast", (Array("f32", (32,)),), id=3, operands=(1,))
    program = Program({0: (weights, fast, view)}, entry=0)
    assert [program.hbm_bytes(one) for one in (weights, fast, view)] == [0, 128, 0]


def small_network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, bias=False),
        nn.Flatten(),
        nn.Linear(8 * 3 * 3, 5, bias=False),
    )


@pytest.mark.xla
def test_the_flops_of_a_recorded_step_are_those_of_torch():
    def train(core):
        model = core.model(small_network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            with core.step():
                loss = model(torch.ones(4, 3, 8, 8, device=core.device)).sum()
                loss.backward()
                core.optimizer_step(optimizer)

    recording = record(train, chip=CHIP, progress="off")
    (graph,) = recording.graphs
    program = read_program(graph.module)
    found = sum(program.flops(operation) for operation in program.operations)
    with FlopCounterMode(display=False) as counter:
        small_network()(torch.ones(4, 3, 8, 8, requires_grad=True)).sum().backward()
    # No window of these lies on padding, so both count the same. torch_xla records the gradient of
    # the images, too, which the compiler then leaves out.
    assert found == counter.get_total_flops()
