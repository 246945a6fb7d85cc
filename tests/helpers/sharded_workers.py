"""Models, data and worker functions for the tests of `shard="fsdp"`: small, with sizes that eight chips divide."""

import copy
import functools
import itertools

import torch
from helpers.fit_arguments import grouped
from torch import nn

import tpukit


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        parts = self.attn(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).flatten(2))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """GPT-2's layout; the output layer is the embedding. `wrap` calls a block: a function of (block, x)."""

    def __init__(self, words=64, length=16, width=32, heads=2, layers=1, dropout=0.0, wrap=None):
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight, self.wrap = self.tokens.weight, wrap
        if not self.head.weight.is_meta:
            nn.init.normal_(self.head.weight, std=0.1)

    def forward(self, words):
        x = self.tokens(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = self.wrap(block, x) if self.wrap else block(x)
        return self.head(self.ln(x))


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def text(count=64, words=64, length=16):
    """Return sequences of words, each the one before plus a step that the sequence keeps."""
    generator = torch.Generator().manual_seed(5)
    start, step = (torch.randint(0, words, (count, 1), generator=generator) for _ in range(2))
    tokens = (start + step * torch.arange(length + 1)) % words
    return torch.utils.data.TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def pictures(count=64):
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(count, 3, 8, 8, generator=generator)
    images = images * (1 + torch.arange(count) % 5).view(-1, 1, 1, 1)
    return torch.utils.data.TensorDataset(images, torch.arange(count) % 5)


def seeded(make, **options):
    torch.manual_seed(0)
    return make(**options)


class Residual(nn.Module):
    """A ResNet's block: BatchNorm, a ReLU in place, a sum."""

    def __init__(self, channels):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(x + self.norm(self.conv(x)))


def resnet(channels=24):
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5)]
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), Residual(channels), Residual(channels), *pool
    )


def odd_net():
    """Two layers of sizes that no number of chips divides."""
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 37), nn.ReLU(inplace=True), nn.Linear(37, 5))


def size_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def state_of(optimizer):
    held = [one for state in optimizer.state.values() for one in state.values()]
    return [one for one in held if isinstance(one, torch.Tensor) and one.device.type == "xla"]


def on_each_chip(core, tensors):
    """Return the bytes of tensors that each chip holds, by the client's count: sorted, each number once."""
    import torch_xla

    core.backend.sync()
    core.backend.wait()
    held = dict.fromkeys(range(core.chips), 0)
    for tensor in tensors:
        if torch_xla._XLAC._get_xla_sharding_type(tensor) is None:  # sent as it is, to every chip
            held = {chip: size + tensor.nbytes for chip, size in held.items()}
            continue
        (parts,) = torch_xla._XLAC._get_local_shards([tensor])
        for data, device in parts:
            held[int(device.rpartition(":")[2])] += data.nbytes
    return sorted(set(held.values()))


def steps(core, model, data, *, count=3, bf16=False, average=None, accumulate=1, rate=1e-2):
    """Train for a few steps of a loop of one's own; return the losses, and what each chip holds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)  # no state, so one graph
    losses, batches = [], iter(core.batches(data, batch_size=16))
    for step in range(count):
        core.seed(step)
        with core.step():
            total = 0.0
            for inputs, targets in itertools.islice(batches, accumulate):
                with torch.autocast("xla", dtype=torch.bfloat16, enabled=bf16):
                    outputs = model(inputs)
                found = loss(outputs.float(), targets) / accumulate
                found.backward()
                total = total + found.detach()
            core.optimizer_step(optimizer)
            if average is not None:
                average.update_parameters(model)
        losses.append(total)
    told = {
        "losses": [float(one) for one in core.to_host(losses)],
        "whole": size_of(model.parameters()),
    }
    if core.chips > 1:
        told["held"] = on_each_chip(core, [*model.parameters()])
        if average is not None:
            told["average"] = on_each_chip(core, [*average.module.parameters()])
    return told


def averaged(core):
    model = core.model(seeded(GPT))
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay)
    return steps(core, model, text(), average=average)


def checkpointed(core):
    from torch_xla.utils.checkpoint import checkpoint

    return steps(core, core.model(seeded(GPT, wrap=checkpoint)), text())


def checkpointed_by_torch(core):
    import torch.utils.checkpoint

    again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    return steps(core, core.model(seeded(GPT, wrap=again)), text())


def copied(core):
    """A second model from a module that is on the chips already is a copy, and lies as the first."""
    first = core.model(seeded(GPT))
    second = core.model(first)
    assert first.tokens.weight is not second.tokens.weight
    return steps(core, second, text())


def all_at_once(core):
    """Dropout, added-up gradients, averaged weights, activation checkpoints and tied weights in one program."""
    from torch_xla.utils.checkpoint import checkpoint

    model = core.model(seeded(GPT, dropout=0.5, wrap=checkpoint))
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay)
    return steps(core, model, text(96), average=average, accumulate=2)


# What models ask of the cut; what each trains to is the same on one chip and on several.
TRIED = {
    "gpt": lambda core: steps(core, core.model(seeded(GPT)), text()),
    "bf16": lambda core: steps(core, core.model(seeded(GPT)), text(), bf16=True),
    "BatchNorm": lambda core: steps(core, core.model(seeded(resnet)), pictures()),
    "dropout": lambda core: steps(core, core.model(seeded(GPT, dropout=0.5)), text()),
    "accumulated": lambda core: steps(core, core.model(seeded(GPT)), text(96), accumulate=2),
    "sizes that do not divide": lambda core: steps(core, core.model(seeded(odd_net)), pictures()),
    "average of weights": averaged,
    "torch_xla's checkpoint": checkpointed,
    "torch's checkpoint": checkpointed_by_torch,
    "a model from a model": copied,
    "all at once": all_at_once,
}


def tried(core, names):
    return {name: TRIED[name](core) for name in names}


NETWORKS = {
    "gpt": GPT,
    "resnet": resnet,
    "gpt with everything": functools.partial(GPT, dropout=0.5),
}


def by_fit(core, epochs, folder=None, network="gpt"):
    """Train by fit, with a validation set that no number of chips divides; tell losses, bytes and weights."""
    data = pictures if network == "resnet" else text
    model, more = core.model(seeded(NETWORKS[network])), {}
    if "everything" in network:
        decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=decay)
        more = {
            "averaged_model": average,
            "accumulate_grad_batches": 2,
            "bf16": True,
            "max_grad_norm": 1.0,
            "restore_best_weights": True,
        }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sent, told = core.backend.metrics()["OutboundData"], {}

    def note_epoch(history):  # a run that resumes calls this before its first step
        if history.resumed and core.chips > 1 and "resumed with" not in told:
            held = [*model.parameters()], state_of(optimizer)
            told["resumed with"] = [(on_each_chip(core, part), size_of(part)) for part in held]

    train = core.batches(data(64), batch_size=16, shuffle=True, drop_last=True)
    valid = core.batches(data(43), batch_size=16)
    options = {
        "epochs": epochs,
        "log_every": 1,
        "folder": folder,
        "on_epoch_end": note_epoch,
        **more,
    }
    history = tpukit.fit(core, model, optimizer, loss, train, valid, **grouped(options))
    told |= {
        "train": [row["train_loss"] for row in history.intervals],
        "valid": [row["valid_loss"] for row in history.epochs],
        "outputs": tuple(tpukit.evaluate(core, model, loss, valid).outputs.shape),
        "sent": sent[1],
        "weights": copy.deepcopy(core.to_host(model.state_dict())),
        "compiles": core.backend.compiles()[0],
        "report": str(tpukit.profiling.report(core, train)),
    }
    if core.chips > 1:
        parts = (
            [*model.parameters()],
            state_of(optimizer),
            *([*one.module.parameters()] for one in [*more.values()][:1]),
        )
        told["held"] = [(on_each_chip(core, part), size_of(part)) for part in parts]
    return told
