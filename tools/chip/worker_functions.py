"""What every core does in a proof."""

import copy
import hashlib
import itertools
import os
import time

from tools.chip import reference
from tpukit.training import Checkpoints, EarlyStopping, FitOptions, evaluate, fit, predict

# Those that collectives take on every backend: gloo has no int16. Sums over eight cores of what
# `_values` gives are whole numbers below 128, exact in each of these.
_DTYPES = ("float32", "float64", "bfloat16", "float16", "int8", "int32", "int64", "uint8", "bool")
_OPERATIONS = ("sum", "mean", "min", "max")
RATE = 0.1  # the default learning rate
CLIP = 0.1  # less than any gradient here has
CLIPS_BY_HAND = (None, CLIP)  # of each epoch


def introduce(core) -> dict:
    """Return who this core is, and a tensor of its device."""
    import torch

    core.barrier()
    return {
        "rank": core.rank,
        "world_size": core.world_size,
        "process": os.getpid(),
        "device": str(core.device),
        "tensor": torch.full((2, 2), core.rank, device=core.device),
    }


def use_collectives(core) -> dict:
    """Call every collective with every dtype; return the number of answers, and the wrong ones.

    Where some are, the parts that follow are left out: they are made of these, and would fail for
    another reason.
    """
    answers = []
    wrong = []
    for part in (_reductions_and_gathers, _means, _models):
        if not wrong:
            answers += part(core)
            wrong = [
                f"{name}: {got}, not {expected}"
                for name, got, expected in answers
                if got != expected
            ]
    return {"answers": len(answers), "wrong": wrong}


def _reductions_and_gathers(core):
    """Yield (name, answer, right answer) of every dtype; the calls of a dtype are one graph."""
    import torch

    for dtype in _DTYPES:
        mine = _values(core.rank, dtype).to(core.device)
        # Of truth values there is no sum.
        operations = [one for one in _OPERATIONS if dtype != "bool" or one in ("min", "max")]
        answers = core.to_host(
            {one: core.all_reduce(mine, one) for one in operations} | {"gather": core.gather(mine)}
        )
        everyone = torch.cat([_values(rank, dtype) for rank in range(core.world_size)])
        for operation, answer in answers.items():
            name = f"{operation} of {dtype}"
            numbers = everyone.double()
            if operation == "mean":  # a share is rounded: to the dtype, or on its way there
                expected = numbers.mean(0, keepdim=True)
                close = torch.allclose(
                    answer.double(), expected, rtol=1e-2 if "16" in dtype else 1e-6
                )
                yield name, answer.tolist(), answer.tolist() if close else expected.tolist()
                continue
            right = {"sum": numbers.sum(0), "min": numbers.amin(0), "max": numbers.amax(0)}
            expected = numbers if operation == "gather" else right[operation][None]
            yield (
                name,
                (str(answer.dtype), answer.double().tolist()),
                (f"torch.{dtype}", expected.tolist()),
            )
    numbers = core.gather(torch.tensor(core.rank, device=core.device)).tolist()
    yield "gather of a scalar", numbers, [*range(core.world_size)]


def _values(rank: int, dtype: str):
    import torch

    return torch.tensor([[rank + 1, 3, 8 - rank]]).to(getattr(torch, dtype))


def _means(core):
    import torch

    middle = (core.world_size - 1) / 2
    yield "mean of a number", core.mean(core.rank), middle
    tensor = torch.tensor([float(core.rank), 1.0], device=core.device)
    yield "mean of a tensor", core.mean(tensor).tolist(), [middle, 1.0]
    yield "mean of a dict", core.mean({"rank": core.rank, "one": 1}), {"rank": middle, "one": 1.0}


def _models(core):
    """Weights from core 0, gradients averaged, buffers averaged."""
    import torch

    network = torch.nn.BatchNorm1d(2)
    with torch.no_grad():
        network.weight.fill_(core.rank + 5)
    model = core.model(network)
    yield "weights of core 0", model.weight.tolist(), [5.0, 5.0]
    middle = (core.world_size - 1) / 2
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with core.step():
        model.weight.sum().mul(core.rank).add(model.bias.sum() * 0).backward()
        core.optimizer_step(optimizer)
    yield "gradients averaged", model.weight.tolist(), [5.0 - middle] * 2
    with torch.no_grad():
        model.running_mean.fill_(core.rank)
    core.average_buffers(model)
    yield "buffers averaged", model.running_mean.tolist(), [middle] * 2


def count_samples(core, data) -> dict:
    """Return two epochs of batches of every kind, and the results of `evaluate` and `predict`."""
    shown = {}
    for name, (read, options) in KINDS.items():
        batches = core.batches(read(data), batch_size=reference.BATCH, mask=True, **options)
        shown[name] = [[core.to_host(batch) for batch in batches] for _ in range(2)]
    found = {}
    for name, samples in {"all": data, "one": reference.Numbers(1)}.items():
        batches = core.batches(samples, batch_size=reference.BATCH)
        model = core.model(_Spell())
        of_all = evaluate(
            core, model, how_far, batches, metrics={"samples": lambda outputs, _: len(outputs)}
        )
        streamed = evaluate(core, model, how_far, batches, keep_outputs=False)
        found[name] = {
            "outputs": of_all.outputs,
            "targets": of_all.targets,
            "predicted": predict(core, model, batches),
        }
        found[name] |= {
            "losses": [of_all.loss, streamed.loss],
            "samples": of_all.metrics["samples"],
        }
    return {"shown": shown, "found": found}


# How the samples are read, and the options of `core.batches`.
KINDS = {
    "shuffled": (lambda data: data, {"shuffle": True}),
    "in order": (lambda data: data, {}),
    "one by one, shuffled, in full batches": (
        reference.OneByOne,
        {"shuffle": True, "drop_last": True},
    ),
    "one by one, in order, by a process": (reference.OneByOne, {"workers": 1}),
}


def how_far(outputs, labels):
    """Return the mean square of how far the numbers that images spell are from what labels say."""
    return (outputs[:, 0] / 100 - labels[:, 1]).square().mean()


def train_by_hand(core, data) -> dict:
    """Train in a loop: an epoch without options, then one with seeds and clipped gradients."""
    import torch

    model, optimizer = _model(core)
    batches = core.batches(data, batch_size=reference.BATCH, shuffle=True, drop_last=True)
    numbers = []
    draws = []
    losses = []
    for clip in CLIPS_BY_HAND:
        for images, labels in batches:
            if clip:
                core.seed(len(losses))
            with core.step():
                draws.append(torch.rand(3, device=core.device))
                numbers.append(reference.numbers_of(images))
                loss = reference.loss(model(reference.prepare(images)), labels)
                loss.backward()
                core.optimizer_step(optimizer, clip=clip)
                losses.append(core.mean(loss.detach()))
    core.average_buffers(model)
    core.seed(len(losses) - 1)
    again = torch.rand(3, device=core.device)
    told = {
        "numbers": numbers,
        "draws": draws,
        "losses": losses,
        "again": again,
        "state": model.state_dict(),
    }
    return core.internal.snapshot(told) | {"compiles": core.backend.compiles()}


def train_with_fit(core, data, held_out, recipes: dict[str, dict], folder) -> dict:
    """Train with `fit` by each recipe, from the start or from a checkpoint; return the results."""
    return {
        name: _fit(core, data, held_out, folder / name, **recipe)
        for name, recipe in recipes.items()
    }


def _fit(
    core,
    data,
    held_out,
    folder,
    *,
    rates: list,
    averaged: bool,
    accumulate: int,
    clip: float | None,
    **options,
) -> dict:
    import torch

    model, optimizer = _model(core)
    dtypes = set()
    numbers = []
    draws = []
    states = []
    model[-1].register_forward_hook(lambda layer, inputs, outputs: dtypes.add(str(outputs.dtype)))
    average = torch.optim.swa_utils.AveragedModel(model) if averaged else None
    # A step more than there are: a schedule is asked for the rate after the last one, too.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: [*rates, rates[-1]][step] / RATE
    )

    def look(images, labels) -> tuple:
        numbers.append(reference.numbers_of(images))
        draws.append(torch.cat([torch.rand(3, device=core.device), labels[:, 3]]))
        return images, labels

    def keep_state(_history) -> None:
        trained = average.module if averaged else model
        states.append(core.internal.snapshot(trained.state_dict()))

    history = fit(
        core,
        model,
        optimizer,
        reference.loss,
        core.batches(
            reference.OneByOne(data), batch_size=reference.BATCH, shuffle=True, drop_last=True
        ),
        core.batches(held_out, batch_size=reference.BATCH),
        scheduler=schedule,
        metrics={
            "samples": lambda outputs, _: len(outputs),
            "number": lambda _, labels: labels[:, 0].mean(),
        },
        preprocess=reference.prepare,
        augment=look,
        accumulate_grad_batches=accumulate,
        max_grad_norm=clip,
        early_stopping=EarlyStopping(restore_best_weights=True),
        checkpoints=Checkpoints(folder, keep_last=100, save_every=0),
        options=FitOptions(averaged_model=average, on_epoch_end=keep_state, log_every=1),
        **options,
    )
    told = {
        "numbers": numbers,
        "draws": draws,
        "state": (average.module if averaged else model).state_dict(),
    }
    return core.internal.snapshot(told) | {
        "losses": [row["train_loss"] for row in history.intervals],
        "rates": [row["lr"] for row in history.intervals],
        "epochs": [
            [row[f"valid_{name}"] for name in ("loss", "samples", "number")]
            for row in history.epochs
        ],
        "best": history.best["epoch"],
        "states": states,
        "dtypes": sorted(dtypes),
        "resumed": history.resumed,
        "compiles": core.backend.compiles(),
    }


def _model(core) -> tuple:
    """Return the network as core 0 has it, on every core, and its optimiser."""
    import torch

    network = reference.make_network()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1 + core.rank)
    model = core.model(network)
    return model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=reference.MOMENTUM)


def _Spell():
    """Return a model with a weight whose output is the number that an image encodes."""
    import torch

    class Spell(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Parameter(torch.ones(1))

        def forward(self, images):
            return reference.numbers_of(images)[:, None] * self.one

    return Spell()


def measure_rates(core, network, images, plan) -> dict:
    """Time steps on one batch that stays on the device, then steps on batches from the images.

    The first step's loss is computed on the host as well.
    """
    import torch

    from tpukit.pe import normalize

    criterion = torch.nn.BCEWithLogitsLoss()
    model = core.model(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4 * core.world_size)
    batches = core.batches(images, batch_size=plan.batch_size, shuffle=True, drop_last=True)

    def step(batch):
        with core.step():
            loss = criterion(model(normalize(batch[0])), batch[1])
            loss.backward()
            core.optimizer_step(optimizer)
        return loss.detach()

    def seconds(given) -> float:
        core.barrier()  # a small graph, which may be compiled each time
        core.backend.wait()
        compiled = core.backend.compiles()
        began = time.perf_counter()
        for batch in given:
            step(batch)
        core.backend.wait()
        taken = time.perf_counter() - began
        again.append(core.backend.compiles() != compiled)
        return taken

    def endless():
        while True:
            yield from batches

    again = []
    stream = endless()
    batch = next(stream)
    with torch.no_grad():
        pixels, labels = core.to_host(batch)
        on_host = core.mean(criterion(copy.deepcopy(network)(normalize(pixels)), labels).item())
    first = core.mean(step(batch).item())
    # Three graphs: the first step makes the optimiser's state; and where a batch has just come, the
    # step begins with turning its pixels from (N, H, W, C), which one that has stayed does not need
    # any more.
    seconds([batch] * 3)
    seconds(itertools.islice(stream, 2))
    again.clear()
    without = seconds([batch] * plan.timed_steps)
    following = seconds(itertools.islice(stream, plan.timed_steps))
    return {
        "losses": [first, on_host],
        "weights": _digest(core, dict(model.named_parameters())),
        "without_input": without,
        "with_input": following,
        "compiled": any(again),
        "memory": core.backend.memory(),
    }


def _digest(core, tensors: dict) -> str:
    """Return what identifies tensors to the last bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(core.to_host(tensors).items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def fail(core, message: str) -> None:
    """Raise on the last core, while the others wait for it."""
    use_one_collective(core)
    if core.rank == core.world_size - 1:
        raise LookupError(message)
    core.barrier()


def go_on(core) -> None:
    """Take steps until somebody ends this."""
    for number in itertools.count(1):
        use_one_collective(core)
        core.log(step=number, done=number)
        core.flush()
        time.sleep(0.05)


def use_one_collective(core) -> float:
    """Take one step that all cores must take."""
    import torch

    with core.step():
        total = core.all_reduce(torch.ones(2, device=core.device))
    return total[0].item()


def compile_some(core) -> dict:
    """Train a small network for some steps; return the losses, and what compiling took."""
    import torch

    torch.manual_seed(0)
    layers = [
        torch.nn.Conv2d(3, 16, 3),
        torch.nn.BatchNorm2d(16),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
    ]
    model = core.model(torch.nn.Sequential(*layers, torch.nn.Linear(16 * 14 * 14, 10)))
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    images = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(core.rank))
    for _ in range(6):
        (batch,) = core.to_device([images])
        with core.step():
            loss = model(batch).square().mean()
            loss.backward()
            core.optimizer_step(optimizer)
        optimizer.zero_grad()
        losses.append(core.mean(loss))
    (compiled, compiling) = core.backend.compiles()
    (loaded, loading) = core.backend.loads()
    return {
        "losses": losses,
        "compiled": compiled,
        "loaded": loaded,
        "seconds": compiling + loading,
    }


def record(core, folder) -> list[str]:
    """Record some steps of a small network; return the files that core 0 wrote."""
    import torch

    from tpukit.profiling import profile

    model = core.model(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(32, 64, device=core.device)

    def step() -> None:
        with core.step():
            model(inputs).square().mean().backward()
            core.optimizer_step(optimizer)

    step()
    with profile(core, folder) as recording:
        for _ in range(5):
            step()
    return [str(file) for file in recording.files]
