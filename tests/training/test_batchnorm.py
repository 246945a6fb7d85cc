"""BatchNorm over the cores against BatchNorm of the joined batch in one process."""

import copy
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from helpers.workers import Pairs, small_net, weights
from torch import nn

from tpukit import launch
from tpukit.training.batchnorm import sync_batchnorm

REHEARSALS = ["cpu", pytest.param("xla:cpu", marks=pytest.mark.xla)]

# Eight samples, four a core; the offset is what mean(x^2) - mean^2 would not survive.
LAYERS = {
    "1d, (N, C)": (lambda: nn.BatchNorm1d(3), (8, 3), 0),
    "1d, (N, C, L)": (lambda: nn.BatchNorm1d(3), (8, 3, 5), 0),
    "2d": (lambda: nn.BatchNorm2d(3), (8, 3, 4, 4), 0),
    "3d": (lambda: nn.BatchNorm3d(3), (8, 3, 2, 2, 2), 0),
    "without affine": (lambda: nn.BatchNorm2d(3, affine=False), (8, 3, 4, 4), 0),
    "without running statistics": (
        lambda: nn.BatchNorm2d(3, track_running_stats=False),
        (8, 3, 4, 4),
        0,
    ),
    "with a cumulative average": (lambda: nn.BatchNorm2d(3, momentum=None), (8, 3, 4, 4), 0),
    "torch's SyncBatchNorm": (lambda: nn.SyncBatchNorm(3), (8, 3, 4, 4), 0),
    "far from 0": (lambda: nn.BatchNorm2d(3), (8, 3, 4, 4), 1000),
}


def a_case(name: str):
    """Return a layer, a batch and what its output is multiplied by; the same in every process."""
    make, shape, offset = LAYERS[name]
    generator = torch.Generator().manual_seed(0)
    layer = make()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(3, generator=generator))
    # The halves differ in mean and spread, so that a core's own statistics would be far off.
    spread = torch.linspace(0.5, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))
    batch = torch.randn(shape, generator=generator) * spread + spread + offset
    return layer, batch, torch.randn(shape, generator=generator)


def forward_and_backward(layer, batch, factor) -> dict:
    """Run two training steps, then one in evaluation."""
    inputs = batch.clone().requires_grad_()
    layer(inputs)
    out = layer(inputs)
    (out * factor + out**3).mean().backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    with torch.no_grad():
        evaluated = layer.eval()(inputs)
    return {
        "out": out.detach(),
        "input": inputs.grad,
        "evaluated": evaluated,
        **grads,
        **dict(layer.named_buffers()),
    }


@pytest.mark.parametrize("backend", REHEARSALS)
def test_two_cores_normalise_as_one_with_the_joined_batch(backend):
    names = (
        LAYERS if backend == "cpu" else ["2d", "far from 0"]
    )  # each is some twenty graphs to compile

    def work(core):
        mine = slice(4 * core.rank, 4 * core.rank + 4)
        found = {}
        for name in names:
            layer, batch, factor = a_case(name)
            layer = core.model(sync_batchnorm(core, layer))
            found[name] = forward_and_backward(
                layer, batch[mine].to(core.device), factor[mine].to(core.device)
            )
        return found

    first, second = launch(work, cores=2, backend=backend, progress="off").results
    for name in names:
        layer, batch, factor = a_case(name)
        plain = nn.BatchNorm2d(3) if isinstance(layer, nn.SyncBatchNorm) else layer
        plain.load_state_dict(layer.state_dict())
        joined = forward_and_backward(plain.double(), batch.double(), factor.double())
        # A loss is the mean over the local batch and the step averages over the cores: so the input's gradient is
        # twice as large on each of two cores, and a parameter's is the mean of the two.
        ours = {key: (first[name][key] + second[name][key]) / 2 for key in first[name]}
        ours |= {
            key: torch.cat([first[name][key], second[name][key]]) for key in ("out", "evaluated")
        }
        if (
            plain.running_mean is None
        ):  # evaluated by the statistics of the local batch, as torch's SyncBatchNorm does
            del joined["evaluated"]
        ours["input"] = torch.cat([first[name]["input"], second[name]["input"]]) / 2
        accuracy = (
            2e-3 if name == "far from 0" else 1e-5
        )  # a float32 near 1000 is spaced by 6e-5 itself
        for key, expected in joined.items():
            scale = max(1.0, float(expected.abs().max()))
            assert ours[key].numpy() == pytest.approx(expected.numpy(), abs=accuracy * scale), (
                f"{name}: {key}"
            )
        for key in dict(plain.named_buffers()):
            assert torch.equal(first[name][key], second[name][key]), f"{name}: {key}"


def train(core, batch_size: int, steps: int = 8) -> dict:
    model = core.model(sync_batchnorm(core, small_net(True)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = core.batches(Pairs(), batch_size=batch_size, shuffle=True, drop_last=True)
    done = 0
    while done < steps:
        for images, targets in batches:
            with core.step():
                nn.functional.mse_loss(model(images), targets).backward()
                core.optimizer_step(optimizer)
            done += 1
            if done == steps:
                break
    return {"weights": weights(model), "buffers": dict(model.named_buffers())}


def test_a_model_with_batchnorm_trains_on_two_cores_as_on_one_with_the_joined_batch():
    two = launch(train, 8, cores=2, progress="off").results
    (one,) = launch(train, 16, cores=1, progress="off").results
    for name in one["weights"]:
        assert torch.equal(two[0]["weights"][name], two[1]["weights"][name])
        assert torch.allclose(two[0]["weights"][name], one["weights"][name], atol=1e-5)
    for name in one["buffers"]:
        assert torch.equal(two[0]["buffers"][name], two[1]["buffers"][name])
        assert torch.allclose(two[0]["buffers"][name], one["buffers"][name], atol=1e-5)


def test_on_one_core_it_is_plain_batchnorm_to_the_last_bit():
    def work(core):
        plain, synced = small_net(True), sync_batchnorm(core, small_net(True))
        return torch.equal(plain(Pairs().images), synced(Pairs().images))

    assert launch(work, cores=1, backend="cpu", progress="off").results == [True]


def test_a_synced_model_is_still_the_model_it_was():
    def work(core):
        plain = small_net(True)
        layer = plain[1]
        synced = sync_batchnorm(core, sync_batchnorm(core, plain))  # a cell that is run twice
        copied = copy.deepcopy(synced)
        copied.load_state_dict(small_net(True).state_dict())
        out = copied(Pairs().images[32 * core.rank : 32 * core.rank + 32])
        return {
            "same layer": synced[1] is layer and isinstance(layer, nn.BatchNorm2d),
            "same keys": list(synced.state_dict()) == list(small_net(True).state_dict()),
            "named": type(layer).__name__ == "SyncedBatchNorm2d",
            "synced once": type(layer).unsynced is nn.BatchNorm2d,
            "the copy works, too": out.shape == (32, 2),
            "bfloat16 stays": synced[1].train()(torch.ones(2, 4, 3, 3, dtype=torch.bfloat16)).dtype
            == torch.bfloat16,
        }

    for result in launch(work, cores=2, backend="cpu", progress="off").results:
        assert all(result.values()), result


class WithItsOwnForward(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


@pytest.mark.parametrize(
    ("layer", "message", "fix"),
    [
        (
            WithItsOwnForward(3),
            "stem.norm is WithItsOwnForward, whose class overrides forward",
            "plain BatchNorm there",
        ),
        (
            nn.LazyBatchNorm2d(),
            "stem.norm is LazyBatchNorm2d, a lazy layer",
            "call the module on one batch first",
        ),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:Lazy modules are a new feature"
)  # torch says so whenever one is made
def test_a_layer_that_would_lose_something_is_refused(layer, message, fix):
    first = nn.BatchNorm2d(3)
    module = nn.ModuleDict({"first": first, "stem": nn.ModuleDict({"norm": layer})})
    with pytest.raises(TypeError, match=message) as raised:
        sync_batchnorm(None, module)
    assert fix in str(raised.value)
    assert type(first) is nn.BatchNorm2d  # the error leaves the module as it was


@pytest.mark.xla
def test_on_eight_cores_the_statistics_are_averaged_inside_the_graph():
    """Traced for eight replicas and not run: XLA:CPU has no collectives, but it writes the graph a TPU compiles."""
    code = """
        import os, zlib
        import torch, torch_xla, torch_xla.core.xla_model as xm, torch_xla.debug.metrics as met
        from tpukit.essentials.backends.xla import Tpu
        from tpukit.essentials.launcher.core import Core
        from tpukit.training.batchnorm import sync_batchnorm

        def trace(rank):
            device = torch_xla.device()
            xm.set_replication(device, xm.get_xla_supported_devices())
            backend = Tpu()
            backend.rank, backend.world_size = rank, 8
            layer = sync_batchnorm(Core(backend, print), torch.nn.BatchNorm2d(3).to(device))
            inputs = torch.ones(4, 3, 2, 2, device=device, requires_grad=True)
            layer(inputs).pow(3).mean().backward()
            graph = xm.get_stablehlo([inputs.grad, layer.weight.grad, layer.running_mean, layer.running_var])
            counts = [(met.metric_data(name) or [0])[0] for name in ("CompileTime", "TransferFromDeviceTime")]
            print(graph.count('"stablehlo.all_reduce"'), *counts, zlib.crc32(graph.encode()), flush=True)

        for rank in (0, 7):
            if os.fork() == 0:
                with torch.autograd.set_multithreading_enabled(False):
                    trace(rank)
                os._exit(0)  # the pending graph must never run
            os.wait()
    """
    environ = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    first, last = done.stdout.splitlines()[-2:]
    assert first.startswith("4 0 0 "), (
        done.stdout + done.stderr
    )  # two forward, two backward; no compile, no copy
    assert first == last  # the very same graph on every core: no rank is in it
