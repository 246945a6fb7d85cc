import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from workers import Pairs, small_net

from tpukit import launch


def moving_average(model, decay=0.999):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))


def shake(model, seed: int) -> None:
    """Change weights and buffers as a training step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), model[1].running_mean]:
            tensor.add_(torch.randn(tensor.shape, generator=generator))


def test_weights_are_averaged_exponentially_and_buffers_copied():
    model = small_net(True)
    averaged = moving_average(model, decay=0.9)
    expected = None
    for seed in range(5):
        shake(model, seed)
        averaged.update_parameters(model)
        now = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        expected = now if expected is None else {name: 0.9 * expected[name] + 0.1 * now[name] for name in now}
    for name, weight in averaged.module.named_parameters():
        assert torch.allclose(weight, expected[name], atol=1e-6), name
        assert not torch.allclose(weight, now[name], atol=1e-2), name
    assert torch.equal(averaged.module[1].running_mean, model[1].running_mean)


def test_the_average_is_a_model_of_the_same_kind_with_the_same_state_dict():
    model = small_net(True)
    averaged = moving_average(model)
    averaged.update_parameters(model)
    assert list(averaged.module.state_dict()) == list(model.state_dict())
    small_net(True).load_state_dict(averaged.module.state_dict())


def test_a_resumed_average_goes_on_to_the_last_bit(tmp_path):
    whole, model = small_net(True), small_net(True)
    uninterrupted, averaged = moving_average(whole, decay=0.9), moving_average(model, decay=0.9)
    for seed in range(6):
        shake(whole, seed)
        uninterrupted.update_parameters(whole)
        if seed == 3:
            torch.save({"model": model.state_dict(), "averaged": averaged.state_dict()}, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
            model = small_net(True)
            averaged = moving_average(model, decay=0.9)
            model.load_state_dict(state["model"])
            averaged.load_state_dict(state["averaged"])
        shake(model, seed)
        averaged.update_parameters(model)
    for name, tensor in uninterrupted.state_dict().items():
        assert torch.equal(tensor, averaged.state_dict()[name]), name


@pytest.mark.parametrize("decay", [0, 1, 1.5, -0.1])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ValueError, match=f"decay is between 0 and 1, .* got {decay}"):
        moving_average(small_net(True), decay=decay)


@pytest.mark.xla
def test_updates_are_a_part_of_the_steps_graph_and_copy_nothing_to_the_host():
    def work(core):
        import torch_xla.debug.metrics as met

        def metrics():
            return [(met.metric_data(name) or [0])[0] for name in ("CompileTime", "TransferFromDeviceTime")]

        model = small_net(True).to(core.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        averaged = moving_average(model, decay=0.9)
        images, targets = (tensor[:8].to(core.device) for tensor in (Pairs().images, Pairs().targets))
        seen = []
        for _ in range(6):
            before = metrics()
            with core.step():
                nn.functional.mse_loss(model(images), targets).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                averaged.update_parameters(model)
            seen.append(tuple(after - earlier for after, earlier in zip(metrics(), before, strict=True)))
        evaluations = []
        for each in (model, averaged.module):
            before = metrics()
            with torch.no_grad(), core.step():
                outputs = each.eval()(images)
            evaluations.append(metrics()[0] - before[0])
            assert outputs.shape == (8, 2)  # alive until here, or it would not be computed
        return seen, evaluations, [name for name in met.counter_names() if name.startswith("aten::")]

    seen, evaluations, fallbacks = launch(work, cores=1, backend="xla", progress="off").results[0]
    assert seen == [(1, 0), (1, 0), (0, 0), (0, 0), (0, 0), (0, 0)]
    assert evaluations == [1, 0]  # the average is evaluated by the model's own graph
    assert fallbacks == []


@pytest.mark.parametrize("backend", ["cpu", pytest.param("xla", marks=pytest.mark.xla)])
def test_every_core_has_the_same_average(backend):
    def work(core):
        model = core.model(small_net(True))
        averaged = moving_average(model, decay=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for images, targets in core.batches(Pairs(), batch_size=8):
            with core.step():
                nn.functional.mse_loss(model(images), targets).backward()
                core.optimizer_step(optimizer)
                averaged.update_parameters(model)
        return dict(averaged.module.named_parameters()), dict(model.named_parameters())

    (first, moved), (second, _) = launch(work, cores=2, backend=backend, progress="off").results
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], moved[name]) for name in first)
