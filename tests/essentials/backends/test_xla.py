"""The TPU path, as far as a machine without a chip can take it: its start-up, its calls, its graph."""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch

import tpukit
from tpukit.profiling import graph_text
from tpukit.simulator.build import why_not

pytestmark = pytest.mark.xla


def in_python(code, **environ):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PJRT_DEVICE": "CPU", **environ},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("generation", "given", "expected"),
    [
        ("v5e", "", "--xla_tpu_scoped_vmem_limit_kib=22528"),
        ("v5e", "--xla_a=true", "--xla_a=true --xla_tpu_scoped_vmem_limit_kib=22528"),
        ("v5e", "--xla_tpu_scoped_vmem_limit_kib=16384", "--xla_tpu_scoped_vmem_limit_kib=16384"),
        ("v3", "--xla_a=true", "--xla_a=true"),
        ("unknown (0x1ae0:0x00ab)", "", ""),
    ],
)
def test_a_tpu_core_starts_with_the_compilers_flags_of_its_generation(
    generation, given, expected, monkeypatch
):
    from tpukit.essentials.backends import xla

    found = []
    monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
    monkeypatch.setattr(
        xla, "start_pjrt", lambda *_, **__: found.append(os.environ["LIBTPU_INIT_ARGS"])
    )
    runtime = xla.XlaRuntime()
    machine = dataclasses.replace(tpukit.machine_info(), chips=8, generation=generation)
    runtime.start(
        lambda backend: None, runtime.topology(machine, None), process=0, meeting_point=None
    )
    assert found == [expected]


@pytest.mark.parametrize(
    "processes", [1, 2], ids=["single-process start-up", "multi-process start-up"]
)
def test_the_tpu_core_trains_through_torch_xlas_own_start_up(processes):
    out = in_python(
        f"""
        import torch
        from torch import nn
        from tpukit.essentials.backends import Topology
        from tpukit.essentials.backends.xla import Tpu, start_pjrt
        from tpukit.essentials.launcher import messages
        from tpukit.essentials.launcher.core import Core
        from tpukit.essentials.launcher.worker import Task, run_core

        def work(core):
            model = core.model(nn.Linear(3, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                with core.step():
                    loss = model(torch.ones(4, 3, device=core.device)).square().mean()
                    loss.backward()
                    core.optimizer_step(optimizer)
                core.log(loss=loss)
            core.average_buffers(model)
            core.barrier()
            gathered = core.gather(torch.tensor([1, 2], device=core.device))
            return core.rank, core.world_size, str(core.device), core.mean(2), gathered.tolist(), core.mean(loss).item()

        sent = []
        there = Topology("xla", "XLA:CPU", cores={processes}, processes={processes})
        start_pjrt("CPU", lambda: run_core(Task(work, (), 0), Tpu(), send=sent.append, cores=[]), there, process=0)
        failures = [message.failure.trace for message in sent if isinstance(message, messages.CoreFailed)]
        assert not failures, failures[0]
        print([message.value for message in sent if isinstance(message, messages.Result)][0])
        print(len([row for message in sent if isinstance(message, messages.LogRows) for row in message.rows]))
        """
    )
    result, rows = out.strip().splitlines()[-2:]
    assert result.startswith("(0, 1, 'xla:0', 2.0, [1, 2], 0.")
    assert rows == "3"


def test_the_gradients_of_eight_cores_are_averaged_inside_the_graph():
    """Traced for eight replicas and not run: XLA:CPU has no collectives, but it writes the graph a TPU compiles."""
    out = in_python(
        """
        import os, torch, torch_xla, torch_xla.core.xla_model as xm
        from tpukit.essentials.backends.xla import Tpu
        device = torch_xla.device()
        xm.set_replication(device, xm.get_xla_supported_devices())
        core = Tpu()
        core.world_size = 8
        model = torch.nn.Linear(3, 2).to(device)
        model(torch.ones(4, 3, device=device)).square().mean().backward()
        core.average([parameter.grad for parameter in model.parameters()])
        mean = core.all_reduce(torch.ones(2, device=device), "mean")
        print(xm.get_stablehlo([model.weight.grad, model.bias.grad, mean]), flush=True)
        os._exit(0)  # the pending graph must never run
        """,
        CPU_NUM_DEVICES="8",
    )
    assert out.count("stablehlo.all_reduce") >= 2
    assert "replica_groups = dense<> " in out  # none named: all of them
    assert "1.250000e-01" in out  # the mean: a multiplication by 1/8, in the graph


CALLS = {
    # torch_xla 2.8.0 and 2.9.0 have the same; `make platforms` runs this test on both.
    "torch_xla._internal.pjrt._run_thread_per_device": "(local_rank, local_world_size, fn, initializer_fn)",
    "torch_xla._internal.pjrt.initialize_multiprocess": "(local_rank, local_world_size)",
    "torch_xla._internal.pjrt._run_singleprocess": "(fn, *args, **kwargs)",
    "torch_xla.device": "(index=None)",
    "torch_xla.sync": "(wait=False, reset_scope=True)",
    "torch_xla.manual_seed": "(seed, device=None)",
    "torch_xla.runtime.global_ordinal": "()",
    "torch_xla.runtime.world_size": "()",
    "torch_xla.core.xla_model.rendezvous": "(tag, payload=b'', replicas=[])",
    "torch_xla.core.xla_model.all_reduce": "(reduce_type, inputs, scale=1.0, groups=None, pin_layout=True)",
    "torch_xla.core.xla_model.all_gather": (
        "(value, dim=0, groups=None, output=None, pin_layout=True, channel_id=None, use_global_device_ids=None)"
    ),
    "torch_xla.core.xla_model.collective_broadcast": "(tensors, root_ordinal=0, groups=None, pin_layout=True)",
}


@pytest.mark.parametrize(("call", "expected"), CALLS.items(), ids=CALLS)
def test_torch_xla_still_has_the_call(call, expected, monkeypatch):
    import importlib

    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    module, name = call.rsplit(".", 1)
    signature = inspect.signature(getattr(importlib.import_module(module), name))
    bare = signature.replace(
        parameters=[
            p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
        ],
        return_annotation=inspect.Signature.empty,
    )
    assert str(bare) == expected


def test_the_private_calls_exist():
    import torch_xla

    for name in ("_xla_runtime_is_initialized", "_xla_sync_multi", "_xla_get_cpu_tensors"):
        assert callable(getattr(torch_xla._XLAC, name))


def with_chips(count, code, **environ):
    """Run a program on a machine of its own that shows v5e chips on its PCI bus."""
    chip = "mkdir $bus/$i; echo 0x1ae0 > $bus/$i/vendor; echo 0x0063 > $bus/$i/device"
    chip += "; echo 0 > $bus/$i/subsystem_device"
    script = f"bus=/sys/bus/pci/devices; mount -t tmpfs none $bus && for i in $(seq {count}); "
    script += f'do {chip}; done; exec "$@"'
    return subprocess.run(
        [
            "unshare",
            "--mount",
            "sh",
            "-c",
            script,
            "sh",
            sys.executable,
            "-c",
            textwrap.dedent(code),
        ],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_metadata_server_that_does_not_answer_is_an_error_with_a_fix():
    if with_chips(1, "").returncode:
        pytest.skip("this user cannot mount a PCI bus of their own")
    code = "import tpukit\ntry: tpukit.launch(lambda core: core.rank)\nexcept RuntimeError as error: print(error)"
    done = with_chips(1, code)
    assert (
        "it asks Google Cloud's metadata server which TPU this is, and gets no answer"
        in done.stdout
    ), done.stderr
    assert "fix:   outside of Google Cloud set the variables yourself" in done.stdout


STRANGERS = {
    "xm.all_reduce": lambda xm, one: xm.all_reduce(xm.REDUCE_SUM, one),
    "xm.all_gather": lambda xm, one: xm.all_gather(one),
    "xm.reduce_scatter": lambda xm, one: xm.reduce_scatter(xm.REDUCE_SUM, one, 1.0, 0, 2),
    "xm.optimizer_step": lambda xm, one: xm.optimizer_step(None),
    "xm.mesh_reduce": lambda xm, one: xm.mesh_reduce("loss", 1.0, sum),
    "xm.rendezvous": lambda xm, one: xm.rendezvous("here"),
    'dist.init_process_group("xla")': lambda xm, one: __import__(
        "torch"
    ).distributed.init_process_group("xla"),
}


def test_torch_xlas_own_calls_are_true_or_refused_in_the_dry_run_joined_by_gloo():
    """Each process is alone there: a stranger's code would train one model per process, silently."""
    import torch

    from tpukit import launch

    def work(core):
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr

        refused = {}
        for name, call in STRANGERS.items():
            try:
                call(xm, torch.ones(2, device=core.device))
            except RuntimeError as error:
                refused[name] = str(error)
        return xr.world_size(), xr.global_ordinal(), xm.is_master_ordinal(), refused

    for rank, (world_size, ordinal, is_master, refused) in enumerate(
        launch(work, cores=2, backend="xla:cpu", progress="off").results
    ):
        assert (world_size, ordinal, is_master) == (2, rank, rank == 0)
        assert refused.keys() == STRANGERS.keys()
        for name, message in refused.items():
            assert message.startswith(
                f"{name} does not reach other cores in this dry run\n  found: 2 XLA:CPU processes"
            )
            assert "fix:   use core.all_reduce" in message


SIMULATOR = pytest.param(
    "xla:simulator", marks=pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
)


def recorded_precisions(backend, precision, make):
    """Return the precision of each product in the graph of `make(core)`'s tensors."""

    def work(core):
        text = graph_text(make(core))
        products = [
            line for line in text.splitlines() if " dot(" in line or " convolution(" in line
        ]
        return [(re.findall("operand_precision={([^}]*)}", line) or [None])[0] for line in products]

    return tpukit.launch(
        work, cores=1, backend=backend, matmul_precision=precision, progress="off"
    ).results[0]


@pytest.mark.parametrize("backend", ["xla:cpu", SIMULATOR])
@pytest.mark.parametrize("precision", [None, "high", "highest"])
def test_products_are_recorded_with_the_precision_that_was_asked_for(backend, precision):
    def make(core):
        layers = core.model(torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Linear(4, 4)))
        convolution = core.model(torch.nn.Conv2d(3, 4, 3))
        x = layers(torch.ones(2, 3, 5, device=core.device))
        x = torch.nn.functional.scaled_dot_product_attention(x, x, x)
        x.square().mean().backward()
        image = convolution(torch.ones(2, 3, 8, 8, device=core.device))
        return [image, *(parameter.grad for parameter in layers.parameters())]

    found = recorded_precisions(backend, precision, make)
    assert len(found) >= 12
    assert set(found) == {precision and f"{precision},{precision}"}


def test_torch_xla_leaves_the_precision_out_where_our_docstring_says_so():
    def make(core):
        layer = core.model(torch.nn.Conv2d(3, 4, 3))
        x = torch.ones(2, 3, 8, 8, device=core.device)
        layer(x).square().mean().backward()
        return [layer.weight.grad, torch.einsum("bchw,bcvw->bchv", x, x)]

    forward, *others = recorded_precisions("xla:cpu", "highest", make)
    assert forward == "highest,highest"
    assert others == [None, None, None]  # once upstream mends it, mend the docstring of `launch`


@pytest.mark.xla
@pytest.mark.parametrize("backend", ["xla:cpu", "xla:simulator"])
def test_what_is_computed_again_in_backward_is_what_was_computed_dropout_included(backend):
    import torch
    from torch.utils.checkpoint import checkpoint

    from tpukit import launch

    layers = torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Linear(16, 1)

    def work(core):
        block, found = core.model(torch.nn.Sequential(*layers)), []
        for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
            core.seed(1)  # the same dropout
            (x,) = core.to_device([torch.ones(8, 4) + core.rank])
            x.requires_grad_(True)
            with core.step():
                (block(x) if options is None else checkpoint(block, x, **options)).sum().backward()
            found.append(core.to_host(x.grad))
        return found

    for plain, *again in launch(work, cores=2, backend=backend, progress="off").results:
        assert plain.any()
        assert all(torch.allclose(plain, one, atol=1e-5) for one in again)


TRACKING = {  # layers of four channels and the shapes of their batches
    "a table": ("BatchNorm1d", (8, 4)),
    "sequences": ("BatchNorm1d", (3, 4, 5)),
    "maps of one pixel": ("BatchNorm2d", (8, 4, 1, 1)),
    "large maps": ("BatchNorm2d", (2, 4, 30, 30)),
    "volumes": ("BatchNorm3d", (2, 4, 2, 2, 2)),
    "instances": ("InstanceNorm2d", (3, 4, 3, 2)),
}


@pytest.mark.xla
@pytest.mark.parametrize("backend", ["xla:cpu", "xla:simulator"])
def test_running_variances_are_of_n_minus_1_samples_as_pytorchs(backend):
    import pickle

    import torch
    from torch import nn

    from tpukit import launch
    from tpukit.training import sync_batchnorm

    class OwnForward(nn.BatchNorm2d):  # as timm's BatchNormAct2d has
        def forward(self, x):
            return nn.functional.batch_norm(
                x,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.training,
                0.1,
                self.eps,
            )

    def layers():
        made = {
            what: getattr(nn, kind)(4, affine=True, track_running_stats=True)
            for what, (kind, _) in TRACKING.items()
        }
        return nn.ModuleDict(made | {"a forward of its own": OwnForward(4)})

    data = {what: torch.randn(shape) * 3 for what, (_, shape) in TRACKING.items()}
    data["a forward of its own"] = torch.randn(8, 4, 1, 1) * 3

    def train(core, norms):
        norms = core.model(norms)
        synced = sync_batchnorm(core, core.model(nn.BatchNorm1d(4)))
        batches = core.to_device(data)
        for _ in range(2):
            with core.step():
                sum(
                    (norms[what](x) + norms[what](2 * x)).sum() for what, x in batches.items()
                ).backward()
                synced(batches["a table"]).sum().backward()
        pickle.dumps(norms["a table"])
        variances = {what: norms[what].running_var for what in batches}
        return core.to_host(variances | {"synced": synced.running_var})

    (found,) = launch(train, layers(), cores=1, backend=backend, progress="off").results
    right = layers()
    synced = nn.BatchNorm1d(4)
    for _ in range(2):
        for what, x in data.items():
            right[what](x), right[what](2 * x)
        synced(data["a table"])
    expected = {what: right[what].running_var for what in data} | {"synced": synced.running_var}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.xla
@pytest.mark.parametrize(
    ("name", "training"), [("batch_norm", "training"), ("instance_norm", "use_input_stats")]
)
def test_the_functions_of_torch_still_accept_keywords(name, training):
    import torch

    from tpukit import launch

    def running_variance(core):
        x = torch.tensor([0.0, 1.0, 2.0, 3.0]).reshape(1, 1, 4).to(core.device)
        mean, variance = torch.zeros(2, 1, device=core.device)
        options = {training: True, "momentum": 1.0, "eps": 1e-5, "cudnn_enabled": False}
        getattr(torch, name)(x, None, None, mean, variance, **options)
        return core.to_host(variance).item()

    (found,) = launch(running_variance, cores=1, backend="xla:cpu", progress="off").results
    assert found == pytest.approx(5 / 3)


@pytest.mark.xla
@pytest.mark.parametrize("name", ["batch_norm", "instance_norm"])
def test_torch_xla_itself_still_divides_the_running_variance_by_n(name):
    """If this fails, torch_xla divides by n - 1: remove `correct_running_variance`."""
    import torch

    from tpukit import launch

    def running_variance(core):
        normalize = getattr(torch, name).__wrapped__
        x = torch.tensor([0.0, 1.0, 2.0, 3.0]).reshape(1, 1, 4).to(core.device)
        mean = torch.zeros(1, device=core.device)
        variance = torch.zeros(1, device=core.device)
        # With a momentum of 1 the running variance is that of the batch.
        normalize(x, None, None, mean, variance, True, 1.0, 1e-5, False)
        return core.to_host(variance).item()

    (found,) = launch(running_variance, cores=1, backend="xla:cpu", progress="off").results
    squares = 5.0  # of the deviations from 1.5
    assert found == pytest.approx(squares / 4)
