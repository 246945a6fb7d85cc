import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tpukit
from tpukit.essentials.launcher.launcher import launch
from tpukit.profiling.instruments import graph_text, record_lines
from tpukit.profiling.recompiles import RecompileMonitor, difference

XLA = pytest.mark.xla


def trained(
    loss,
    *,
    batch_of=lambda step: (8, 3),
    backend="xla:cpu",
    cores=1,
    steps=6,
    after=lambda core, step: None,
):
    """Train a small model; return the monitor's messages by step, and how many graphs compiled again."""

    def work(core):
        model = core.model(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # no state: one graph
        monitor, lines, kept = RecompileMonitor(core.backend, settled=1), {}, []
        for step in range(1, steps + 1):
            (batch,) = core.to_device([torch.zeros(batch_of(step))])
            monitor.start_step(batch)
            with core.step():
                value = loss(model, batch, step, kept)
                value.backward()
                monitor.check_graph(model, value)
                core.optimizer_step(optimizer)
                monitor.check_graph(model, value)
            if line := monitor.end_step(step):
                lines[step] = line
            after(core, step)
        return lines, monitor.recompiles

    return launch(work, cores=cores, backend=backend, progress="off").results[0]


def plain(model, batch, step, kept):
    return model(batch).square().mean()


@XLA
def test_the_first_steps_compile_two_graphs_and_nothing_is_said():
    def work(core):
        model = core.model(nn.Linear(3, 2))
        optimizer = torch.optim.Adam(model.parameters())
        monitor, lines = RecompileMonitor(core.backend), []
        start = monitor.compiles
        for step in range(6):
            monitor.start_step(None)
            with core.step():
                model(torch.ones(4, 3, device=core.device)).sum().backward()
                core.optimizer_step(optimizer)
            lines.append(monitor.end_step(step))
        return set(lines), monitor.recompiles, monitor.compiles - start

    assert launch(work, cores=1, backend="xla:cpu", progress="off").results[0] == ({None}, 0, 2)


def test_on_a_cpu_nothing_compiles_and_nothing_is_said():
    assert trained(plain, backend="cpu", batch_of=lambda step: (step, 3)) == ({}, 0)


@XLA
class Compiling:
    """A backend that has compiled a graph more at each look."""

    graphs = 0

    def compiles(self):
        self.graphs += 1
        return self.graphs, 0.0


def test_an_expected_compile_does_not_shorten_the_steps_at_the_beginning():
    monitor = RecompileMonitor(Compiling(), settled=3)
    monitor.expect()
    lines = []
    for step in range(1, 5):
        monitor.start_step(torch.zeros(step))
        lines.append(monitor.end_step(step))
    assert [line is None for line in lines] == [True, True, True, False]
    assert monitor.recompiles == 1


def test_numbers_that_are_sent_to_the_graph_do_not_compile_it_again():
    def loss(model, batch, step, kept):
        made_here = torch.tensor(0.3 + step).to(batch.device)
        return (model(batch) * (0.2 + step) * made_here).clamp(max=0.1 + step).mean()

    assert trained(loss) == ({}, 0)


@XLA
def test_the_numbers_0_and_1_are_written_into_the_graph_and_that_is_seen():
    lines, recompiles = trained(
        lambda model, batch, step, kept: model(batch).mean() * max(0, 1 - step // 3), steps=7
    )
    assert recompiles == 1  # at step 3, when 1 becomes 0
    assert list(lines) == [3]


@XLA
def test_a_tensor_of_one_number_keeps_even_0_and_1_out_of_the_graph():
    def loss(model, batch, step, kept):
        return model(batch).mean() * torch.tensor([float(step % 3)], device=batch.device).sum()

    assert trained(loss) == ({}, 0)


@XLA
def test_a_compile_between_the_steps_is_not_a_steps():
    def validate(core, step):
        with core.step():
            torch.ones(step, device=core.device).sum()

    assert trained(plain, after=validate) == ({}, 0)


@XLA
def test_of_several_shapes_the_first_is_compiled_once_more_and_nothing_is_said():
    """The first step creates the optimizer's state, so the next step with its shape has another graph."""

    def work(core):
        model = core.model(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        monitor, lines = RecompileMonitor(core.backend, shapes=2), []
        for step, samples in enumerate([4, 8, 8, 8, 4, 8, 4, 6], start=1):
            (batch,) = core.to_device([torch.zeros(samples, 3)])
            monitor.start_step(batch)
            with core.step():
                model(batch).square().mean().backward()
                core.optimizer_step(optimizer)
            lines.append(monitor.end_step(step))
        return lines, monitor.recompiles

    lines, recompiles = launch(work, cores=1, backend="xla:cpu", progress="off").results[0]
    assert lines[:-1] == [None] * 7
    assert "batch is (6, 3) float32, before (4, 3) float32" in lines[-1]
    assert recompiles == 1


@XLA
def test_a_ragged_last_batch_is_named_with_both_shapes_and_once():
    lines, recompiles = trained(plain, batch_of=lambda step: (8 if step % 3 else 5, 3))
    assert recompiles == 1
    (line,) = lines.values()
    assert line.startswith("step 3 compiled again, ")
    assert "batch is (5, 3) float32, before (8, 3) float32\n  fix:   batches of one shape" in line


@XLA
def test_the_fix_for_a_ragged_batch_works():
    def work(core):
        model, monitor, lines = (
            core.model(nn.Linear(3, 2)),
            RecompileMonitor(core.backend, settled=1),
            [],
        )
        for batch in list(core.batches(torch.zeros(43, 3), batch_size=8)) * 2:
            monitor.start_step(batch)
            with core.step():
                model.zero_grad()
                model(batch).sum().backward()
            lines.append(monitor.end_step(0))
        return lines

    assert set(launch(work, cores=1, backend="xla:cpu", progress="off").results[0]) == {None}


@XLA
def test_in_a_nested_batch_the_tensor_is_named_and_its_dtype():
    def work(core):
        monitor, lines = RecompileMonitor(core.backend, settled=1), []
        for step in range(3):
            whole = torch.int32 if step == 2 else torch.int64
            images, targets = core.to_device([torch.zeros(2, 3), torch.zeros(2, dtype=whole)])
            monitor.start_step({"images": images, "targets": [targets]})
            with core.step():
                total = images.sum() + targets.sum()
            lines.append(monitor.end_step(step))
            del total
        return lines

    *quiet, last = launch(work, cores=1, backend="xla:cpu", progress="off").results[0]
    assert set(quiet) == {None}
    assert "batch['targets'][0] is (2,) int32, before (2,) int64" in last


def power(model, batch, step, kept):
    return (model(batch).abs() + 1).pow(2 + step / 4).mean()


@XLA
@pytest.mark.parametrize("cores", [1, 2])
def test_a_python_number_in_the_graph_is_named_with_both_values_and_its_line(cores):
    lines, _ = trained(power, cores=cores, steps=4)
    assert list(lines) == [2, 4]  # 3 was the first to be looked at: nothing to compare it with
    assert "if it happens again, the message names the change in the graph" in lines[2]
    assert (
        "the constant 2.75 became 3, near `return (model(batch).abs() + 1).pow(2 + step / 4).mean()`"
        in lines[4]
    )
    assert "fix:   torch.tensor([value], device=core.device)" in lines[4]


ODD_FOLDERS = [
    "with a blank",
    "Ä é",
    "e\u0301 decomposed",
    "日本語",
    "😀",
    "'single' \"double\"",
    r"back\slash \n \303\204 \\",
    "new\nline, tab\t, return\r",
    "\x01\x7f\x85\u2028",
    'a" source_line=3 source_file="b',
    "a, metadata={b}",
    "%s {0} $HOME `ls` *",
]


POWER = """
def loss(model, batch, step, kept):
    return (model(batch).abs() + 1).pow(2 + step / 4).mean()
"""


def module_in(folder, code):
    """Import a new module of this code from a new file in a folder."""
    folder.mkdir()
    file = folder / "steps.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location("steps", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@XLA
def test_the_line_is_found_in_a_file_whose_path_has_letters_of_any_kind(tmp_path):
    def work(core):
        record_lines(True)
        for number, name in enumerate(ODD_FOLDERS):
            code = f"def power(x, exponent):\n    return x.pow(exponent)  # in folder {number}"
            module = module_in(tmp_path / name, code)
            x = torch.ones(3, device=core.device)
            before, after = (graph_text([module.power(x, exponent)]) for exponent in (2.5, 2.75))
            yield name, difference(before, after)

    run = launch(lambda core: list(work(core)), cores=1, backend="xla:cpu", progress="off")
    found = dict(run.results[0])
    assert list(found) == ODD_FOLDERS
    for number, message in enumerate(found.values()):
        assert f"near `return x.pow(exponent)  # in folder {number}`" in message


@XLA
def test_a_step_in_a_path_with_an_umlaut_is_reported_with_its_line(tmp_path):
    lines, _ = trained(module_in(tmp_path / "Ordner mit Ä", POWER).loss, steps=4)
    assert "the constant 2.75 became 3, near `return (model(batch).abs() + 1)" in lines[4]


@XLA
def test_a_step_in_a_path_that_is_not_utf_8_is_reported_without_its_line(tmp_path, monkeypatch):
    """torch_xla cannot read the name of that file, and would raise an error in every operation."""
    module = module_in(tmp_path / os.fsdecode(b"Ordner mit \xc4"), POWER)
    monkeypatch.setitem(sys.modules, "steps", module)
    lines, _ = trained(module.loss, steps=4)
    assert "the constant 2.75 became 3\n  fix:" in lines[4]


@XLA
def test_the_fix_for_a_number_in_the_graph_works():
    def loss(model, batch, step, kept):
        return (
            (model(batch).abs() + 1).pow(torch.tensor([2 + step / 4], device=batch.device)).mean()
        )

    assert trained(loss) == ({}, 0)


@XLA
def test_of_many_compiles_a_few_are_reported_and_all_are_counted():
    lines, recompiles = trained(power, steps=9)
    assert (len(lines), recompiles) == (5, 8)
    assert (
        "this is the last of these messages; tpukit.profiling.report(core) counts further compiles"
        in lines[max(lines)]
    )


@XLA
def test_a_cut_inside_the_model_is_named_with_both_shapes():
    lines, _ = trained(lambda model, batch, step, kept: model(batch)[step:].mean(), steps=4)
    assert (
        "slice f32[5,2] (slice={[3:8], [0:2]}) became slice f32[4,2] (slice={[4:8], [0:2]}), near `lines, _"
        in lines[4]
    )


@XLA
def test_a_model_that_grows_is_recognised_by_its_operations():
    lines, _ = trained(
        lambda model, batch, step, kept: sum(model(batch).mean() for _ in range(step)), steps=4
    )
    assert "operations, before" in lines[4]


@XLA
def test_a_tensor_kept_now_and_then_is_distinguished_from_another_computation():
    def loss(model, batch, step, kept):
        outputs = model(batch)
        kept.extend([outputs] * (step == 3) + [outputs, outputs * 2] * (step == 5))
        return outputs.mean()

    lines, recompiles = trained(loss)
    assert recompiles == 2
    assert "if it happens again" in lines[3]
    assert "another tensor was computed or kept in this step\n  fix:" in lines[5]


@XLA
def test_looking_at_the_graph_compiles_nothing_and_changes_no_result():
    def work(core, look):
        torch.manual_seed(0)
        model = core.model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))  # buffers, too
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        monitor = RecompileMonitor(core.backend)
        monitor._enable_graph_checks(look)
        for step in range(4):
            (batch,) = core.to_device([torch.arange(24.0).reshape(8, 3)])
            monitor.start_step(batch)
            with core.step():
                loss = model(batch).square().mean()
                loss.backward()
                monitor.check_graph(model, loss)
                core.optimizer_step(optimizer)
                monitor.check_graph(model, loss)
            monitor.end_step(step)
        return monitor.compiles, [value.cpu() for value in model.state_dict().values()]

    runs = [
        launch(work, look, cores=1, backend="xla:cpu", progress="off").results[0]
        for look in (False, True)
    ]
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(*pair) for pair in zip(runs[0][1], runs[1][1], strict=True))


GRAPH = """HloModule IrToHlo.9, entry_computation_layout={(f32[4]{0})->(f32[4]{0})}

ENTRY %IrToHlo.9 (p0.1: f32[4]) -> (f32[4]) {
  %p0.1 = f32[4]{0} parameter(0)
  %constant.2 = f32[] constant(0.5), metadata={op_type="prim__Constant" source_file="nowhere.py" source_line=7}
  %broadcast.3 = f32[4]{0} broadcast(f32[] %constant.2), dimensions={}
  %power.4 = f32[4]{0} power(f32[4]{0} %p0.1, f32[4]{0} %broadcast.3)
  ROOT %tuple.5 = (f32[4]{0}) tuple(f32[4]{0} %power.4)
}
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("constant(0.5)", "constant(0.7)", "the constant 0.5 became 0.7, near nowhere.py:7"),
        (
            "%power.4 = f32[4]{0} power",
            "%divide.4 = f32[4]{0} divide",
            "the first that differs: divide f32[4]",
        ),
        ("%p0.1", "%p3.19", "the graphs differ only in the order"),
        ("", "", "the graphs differ only in the order"),
        (
            GRAPH,
            "",
            "the graph has 0 operations, before 5; the first that differs: parameter f32[4]",
        ),
        (GRAPH, "not a graph ( = at all", "the graph has 0 operations"),
    ],
)
def test_two_graphs_are_compared(old, new, expected):
    found = difference(GRAPH, GRAPH.replace(old, new) if old else GRAPH)
    assert found.startswith(expected) or expected in found
    assert "\n  fix:   " in found


def test_a_file_beside_tpukit_whose_name_begins_like_it_is_the_users():
    root = Path(tpukit.__file__).parent

    def message(file):
        before = GRAPH.replace("nowhere.py", file)
        return difference(before, before.replace("constant(0.5)", "constant(0.7)"))

    assert "near tpukit_mine.py:7" in message(f"{root}_mine.py")
    assert "near" not in message(f"{root}/mine.py")
