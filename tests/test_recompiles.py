import pytest
import torch
from torch import nn

from tpukit.diagnostics.recompiles import RecompileMonitor, difference
from tpukit.distributed.launcher import launch

XLA = pytest.mark.xla


def told(loss, *, batch_of=lambda step: (8, 3), backend="xla", cores=1, steps=6, after=lambda core, step: None):
    """Train a small model; return what the watch said by step, and how many graphs compiled in and after the first."""

    def work(core):
        model = core.model(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # no state: one graph
        watch, lines, kept = RecompileMonitor(core.backend, settled=1), {}, []
        for step in range(1, steps + 1):
            (batch,) = core.to_device([torch.zeros(batch_of(step))])
            watch.before(batch)
            with core.step():
                value = loss(model, batch, step, kept)
                value.backward()
                watch.recorded(model, value)
                core.optimizer_step(optimizer)
                watch.recorded(model, value)
            if line := watch.after(step):
                lines[step] = line
            after(core, step)
        return lines, watch.recompiles

    return launch(work, cores=cores, backend=backend, progress="off").results[0]


def plain(model, batch, step, kept):
    return model(batch).square().mean()


# ---- quiet -----------------------------------------------------------------------------------------------------


@XLA
def test_the_first_steps_compile_two_graphs_and_nothing_is_said():
    def work(core):
        model = core.model(nn.Linear(3, 2))
        optimizer = torch.optim.Adam(model.parameters())
        watch, lines = RecompileMonitor(core.backend), []
        start = watch.compiles
        for step in range(6):
            watch.before(None)
            with core.step():
                model(torch.ones(4, 3, device=core.device)).sum().backward()
                core.optimizer_step(optimizer)
            lines.append(watch.after(step))
        return set(lines), watch.recompiles, watch.compiles - start

    assert launch(work, cores=1, backend="xla", progress="off").results[0] == ({None}, 0, 2)


def test_on_a_cpu_nothing_compiles_and_nothing_is_said():
    assert told(plain, backend="cpu", batch_of=lambda step: (step, 3)) == ({}, 0)


@XLA
def test_numbers_that_are_sent_to_the_graph_do_not_compile_it_again():
    def loss(model, batch, step, kept):
        made_here = torch.tensor(0.3 + step).to(batch.device)
        return (model(batch) * (0.2 + step) * made_here).clamp(max=0.1 + step).mean()

    assert told(loss) == ({}, 0)


@XLA
def test_the_numbers_0_and_1_are_written_into_the_graph_and_that_is_seen():
    lines, recompiles = told(lambda model, batch, step, kept: model(batch).mean() * max(0, 1 - step // 3), steps=7)
    assert recompiles == 1  # at step 3, when 1 becomes 0
    assert list(lines) == [3]


@XLA
def test_a_tensor_of_one_number_keeps_even_0_and_1_out_of_the_graph():
    def loss(model, batch, step, kept):
        return model(batch).mean() * torch.tensor([float(step % 3)], device=batch.device).sum()

    assert told(loss) == ({}, 0)


@XLA
def test_a_compile_between_the_steps_is_not_a_steps():
    def validate(core, step):
        with core.step():
            torch.ones(step, device=core.device).sum()

    assert told(plain, after=validate) == ({}, 0)


# ---- shapes ----------------------------------------------------------------------------------------------------


@XLA
def test_a_ragged_last_batch_is_named_with_both_shapes_and_once():
    lines, recompiles = told(plain, batch_of=lambda step: (8 if step % 3 else 5, 3))
    assert recompiles == 1
    (line,) = lines.values()
    assert line.startswith("step 3 compiled again, ")
    assert "batch is (5, 3) float32, it was (8, 3) float32\n  fix:   batches of one shape" in line


@XLA
def test_the_fix_for_a_ragged_batch_works():
    def work(core):
        model, watch, lines = core.model(nn.Linear(3, 2)), RecompileMonitor(core.backend, settled=1), []
        for batch in list(core.batches(torch.zeros(43, 3), batch_size=8)) * 2:
            watch.before(batch)
            with core.step():
                model.zero_grad()
                model(batch).sum().backward()
            lines.append(watch.after(0))
        return lines

    assert set(launch(work, cores=1, backend="xla", progress="off").results[0]) == {None}


@XLA
def test_in_a_nested_batch_the_tensor_is_named_and_its_dtype():
    def work(core):
        watch, lines = RecompileMonitor(core.backend, settled=1), []
        for step in range(3):
            whole = torch.int32 if step == 2 else torch.int64
            images, targets = core.to_device([torch.zeros(2, 3), torch.zeros(2, dtype=whole)])
            watch.before({"images": images, "targets": [targets]})
            with core.step():
                total = images.sum() + targets.sum()
            lines.append(watch.after(step))
            del total
        return lines

    *quiet, last = launch(work, cores=1, backend="xla", progress="off").results[0]
    assert set(quiet) == {None}
    assert "batch['targets'][0] is (2,) int32, it was (2,) int64" in last


# ---- values ----------------------------------------------------------------------------------------------------


def power(model, batch, step, kept):
    return (model(batch).abs() + 1).pow(2 + step / 4).mean()


@XLA
@pytest.mark.parametrize("cores", [1, 2])
def test_a_python_number_in_the_graph_is_named_with_both_values_and_its_line(cores):
    lines, _ = told(power, cores=cores, steps=4)
    assert list(lines) == [2, 4]  # 3 was the first to be looked at: nothing to compare it with
    assert "should it happen again, the graph will say what changed" in lines[2]
    assert "the constant 2.75 became 3, near `return (model(batch).abs() + 1).pow(2 + step / 4).mean()`" in lines[4]
    assert "fix:   torch.tensor([value], device=core.device)" in lines[4]


@XLA
def test_the_fix_for_a_number_in_the_graph_works():
    def loss(model, batch, step, kept):
        return (model(batch).abs() + 1).pow(torch.tensor([2 + step / 4], device=batch.device)).mean()

    assert told(loss) == ({}, 0)


@XLA
def test_of_many_compiles_a_few_are_told_and_all_are_counted():
    lines, recompiles = told(power, steps=9)
    assert (len(lines), recompiles) == (5, 8)
    assert "no more of these will be told; core.report() counts them" in lines[max(lines)]


@XLA
def test_a_cut_inside_the_model_is_named_with_both_shapes():
    lines, _ = told(lambda model, batch, step, kept: model(batch)[step:].mean(), steps=4)
    assert (
        "slice f32[5,2] (slice={[3:8], [0:2]}) became slice f32[4,2] (slice={[4:8], [0:2]}), near `lines, _" in lines[4]
    )


@XLA
def test_a_model_that_grows_is_told_by_its_operations():
    lines, _ = told(lambda model, batch, step, kept: sum(model(batch).mean() for _ in range(step)), steps=4)
    assert "operations, it had" in lines[4]


@XLA
def test_a_tensor_kept_now_and_then_is_told_from_another_computation():
    def loss(model, batch, step, kept):
        outputs = model(batch)
        kept.extend([outputs] * (step == 3) + [outputs, outputs * 2] * (step == 5))
        return outputs.mean()

    lines, recompiles = told(loss)
    assert recompiles == 2
    assert "should it happen again" in lines[3]
    assert "another tensor was computed or kept in this step\n  fix:" in lines[5]


@XLA
def test_looking_at_the_graph_compiles_nothing_and_changes_no_result():
    def work(core, look):
        torch.manual_seed(0)
        model = core.model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))  # buffers, too
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        watch = RecompileMonitor(core.backend)
        watch._arm(look)
        for step in range(4):
            (batch,) = core.to_device([torch.arange(24.0).reshape(8, 3)])
            watch.before(batch)
            with core.step():
                loss = model(batch).square().mean()
                loss.backward()
                watch.recorded(model, loss)
                core.optimizer_step(optimizer)
                watch.recorded(model, loss)
            watch.after(step)
        return watch.compiles, [value.cpu() for value in model.state_dict().values()]

    runs = [launch(work, look, cores=1, backend="xla", progress="off").results[0] for look in (False, True)]
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(*pair) for pair in zip(runs[0][1], runs[1][1], strict=True))


# ---- the comparison itself -------------------------------------------------------------------------------------

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
        ("%power.4 = f32[4]{0} power", "%divide.4 = f32[4]{0} divide", "the first that differs: divide f32[4]"),
        ("%p0.1", "%p3.19", "the graph is the same but for the order"),
        ("", "", "the graph is the same but for the order"),
        (GRAPH, "", "the graph has 0 operations, it had 5; the first that differs: parameter f32[4]"),
        (GRAPH, "not a graph ( = at all", "the graph has 0 operations"),
    ],
)
def test_two_graphs_are_compared(old, new, expected):
    found = difference(GRAPH, GRAPH.replace(old, new) if old else GRAPH)
    assert found.startswith(expected) or expected in found
    assert "\n  fix:   " in found
