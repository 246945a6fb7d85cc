"""Every graph that tpukit itself makes, as a worker function that repeats it, and the machines it is compiled for."""

import functools

from tpukit.preflight.compiler import compile_graph
from tpukit.preflight.hlo import read_program
from tpukit.preflight.recording import record
from tpukit.profiling import find_tpu

CHIPS = ("v5e-8", "v6e-8", "v3-8")  # v5e:2x4, v6e:2x4 and v3:2x2, eight cores each
LIBTPUS = ("0.0.17", "0.0.21.1")  # Kaggle's, Colab's
OPS = ("sum", "mean", "min", "max")
DTYPES = ("float32", "bfloat16", "float64", "int32", "int64", "uint8", "bool")
# What the graph of that name holds, so that another small one is not taken for it.
HOLDS = {
    "broadcast": "all-reduce",
    "average": "all-reduce",
    "all_reduce": "all-reduce",
    "gather": "all-reduce",  # of zeros around this core's part: torch_xla 2.8 and 2.9 gather so
    "augment": "rng-bit-generator",
    "evaluation": "convolution",
    "fit": "convolution",
}
STEPS = 6  # more than it takes until a step comes back unchanged


def compile_for(chip_name: str, recording, libtpu: str | None = None):
    """Compile what was recorded for one machine of eight cores for another; the trace is the same."""
    from tpukit.simulator.recording_runtime import libtpu_flags

    chip = find_tpu(chip_name)
    (graph,) = recording.graphs
    flags = libtpu_flags(chip.accelerator_type, chip.generation)
    return compile_graph(graph, chip, libtpu=libtpu, flags=flags, progress="off")


def record_graph(name: str):
    """Record the graph of that name, for eight cores.

    Raises:
        RuntimeError: it is not one graph, or not the one that was meant.
    """
    recording = record(GRAPHS[name], chip=find_tpu("v5e-8"), progress="off")
    opcodes = {one.opcode for one in read_program(recording.graphs[0].module).everywhere()}
    first = name.partition(",")[0].partition(" ")[0]
    if (
        len(recording.graphs) != 1
        or HOLDS[first] not in opcodes
        or (first == "fit" and not recording.is_steady)
    ):
        found = f"{len(recording.graphs)} graphs, {recording.is_steady=}, {sorted(opcodes)}"
        raise RuntimeError(f"{name} is one graph with {HOLDS[first]}, got {found}")
    return recording


def broadcast(core):
    """Give every core rank 0's weights, as `core.model` does."""
    tensors = [*small_net().to(core.device).parameters()]
    for _ in range(STEPS):
        core.backend.broadcast(tensors)


def average(core):
    """Average float tensors in place, as `core.average_buffers` does."""
    model = small_net().to(core.device)
    for _ in range(STEPS):
        core.average_buffers(model)
        core.backend.sync()


def all_reduce(core, op, dtype):
    """Reduce a tensor of one type."""
    tensor = ones(core, dtype)
    for _ in range(STEPS):
        kept = core.all_reduce(tensor, op)
        core.backend.sync()
    return kept


def gather(core, dtype):
    """Join the tensors of all cores."""
    tensor = ones(core, dtype)
    for _ in range(STEPS):
        kept = core.gather(tensor)
        core.backend.sync()
    return kept


def ones(core, dtype):
    """Return a tensor of three rows on the device."""
    import torch

    return core.to_device([torch.ones(3, 5, dtype=getattr(torch, dtype))])[0]


def augment(core):
    """Change images and labels at random, with everything that `Augment` offers by default, and the walkthrough's."""
    import torch

    from tpukit.pe import augment

    change, labels = augment(), torch.zeros(8, 10)
    images, labels = core.to_device([torch.zeros(8, 3, 32, 32, dtype=torch.uint8), labels])
    for step in range(STEPS):
        core.seed(step)
        kept = change(images, labels)
        core.backend.sync()
    return kept


def evaluation(core):
    """Evaluate, outputs gathered."""
    import torch

    from tpukit import evaluate

    batches = batches_of(core, drop_last=False)
    evaluate(core, core.model(small_net()), torch.nn.BCEWithLogitsLoss(), batches)


def fit(core, network, **options):
    """Train a network with `fit`."""
    import torch

    import tpukit

    model = core.model(network())
    if options.pop("sync", False):
        tpukit.training.sync_batchnorm(core, model)
    if options.pop("average", False):
        averaged = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
        )
        options["options"] = tpukit.FitOptions(averaged_model=averaged)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss = torch.nn.BCEWithLogitsLoss()
    tpukit.fit(
        core, model, optimizer, loss, batches_of(core), preprocess=tpukit.pe.normalize, **options
    )


def batches_of(core, *, drop_last=True):
    """Return batches of 8 images (3, 32, 32) uint8 and ten labels."""
    import torch

    count = 8 * core.world_size * 2 * STEPS
    data = torch.utils.data.TensorDataset(
        torch.zeros(count, 3, 32, 32, dtype=torch.uint8), torch.zeros(count, 10)
    )
    return core.batches(data, batch_size=8, drop_last=drop_last)


def small_net():
    """Return a convolution, a BatchNorm and a linear layer, for images of any type."""
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(3, 8, 3),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(8, 10),
            )

        def forward(self, x):
            return self.layers(x.float())

    return Net()


def resnet10():
    """Return the smallest ResNet."""
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)


_STEPS = {
    "fit, float32": {},
    "fit, bf16": {"bf16": True},
    "fit, accumulate 2": {"accumulate_grad_batches": 2},
    "fit, clip": {"max_grad_norm": 1.0},
    "fit, average": {"average": True},
    "fit, sync_batchnorm": {"sync": True},
}
GRAPHS = {
    "broadcast": broadcast,
    "average": average,
    **{
        f"all_reduce {op} {kind}": functools.partial(all_reduce, op=op, dtype=kind)
        for op in OPS
        for kind in DTYPES
    },
    **{f"gather {kind}": functools.partial(gather, dtype=kind) for kind in DTYPES},
    "augment": augment,
    "evaluation": evaluation,
    **{
        name: functools.partial(fit, network=small_net, **options)
        for name, options in _STEPS.items()
    },
    "fit, a ResNet, bf16": functools.partial(fit, network=resnet10, bf16=True),
}
