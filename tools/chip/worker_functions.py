"""What every core does in a proof."""

import hashlib
import itertools
import os
import time

# Those that collectives take on every backend: gloo has no int16. Sums over eight cores of what `_values` gives are
# whole numbers below 128, exact in each of these.
_DTYPES = ("float32", "float64", "bfloat16", "float16", "int8", "int32", "int64", "uint8", "bool")
_OPERATIONS = ("sum", "mean", "min", "max")


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


# ---- collectives -------------------------------------------------------------------------------------------------


def use_collectives(core) -> dict:
    """Call all that cores do together, with every dtype; return how many answers came, and which are wrong."""
    answers = [*_reductions_and_gathers(core), *_means(core), *_models(core)]
    core.barrier()
    wrong = [f"{name}: {got}, not {expected}" for name, got, expected in answers if got != expected]
    return {"answers": len(answers), "wrong": wrong}


def _reductions_and_gathers(core):
    """Yield (name, answer, right answer) of every dtype; those of a dtype are one graph where there are graphs."""
    import torch

    for dtype in _DTYPES:
        mine = _values(core.rank, dtype).to(core.device)
        # Of truth values there is no sum.
        operations = [one for one in _OPERATIONS if dtype != "bool" or one in ("min", "max")]
        answers = core.to_host({one: core.all_reduce(mine, one) for one in operations} | {"gather": core.gather(mine)})
        everyone = torch.cat([_values(rank, dtype) for rank in range(core.world_size)])
        for operation, answer in answers.items():
            name, numbers = f"{operation} of {dtype}", everyone.double()
            if operation == "mean":  # a share is rounded: to the dtype, or on its way there
                expected = numbers.mean(0, keepdim=True)
                close = torch.allclose(answer.double(), expected, rtol=1e-2 if "16" in dtype else 1e-6)
                yield name, answer.tolist(), answer.tolist() if close else expected.tolist()
                continue
            right = {"sum": numbers.sum(0), "min": numbers.amin(0), "max": numbers.amax(0)}
            expected = numbers if operation == "gather" else right[operation][None]
            yield name, (str(answer.dtype), answer.double().tolist()), (f"torch.{dtype}", expected.tolist())
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


# ---- training ----------------------------------------------------------------------------------------------------


def train_by_hand(core, network, images, plan) -> dict:
    """Take the walkthrough's steps in a loop, and compute the first step's loss on the host as well."""
    import copy

    import torch

    from tpukit.pe import normalize

    criterion = torch.nn.BCEWithLogitsLoss()
    model, optimizer = _model(core, network)
    losses, on_host = [], None
    for pixels, labels in core.batches(images, batch_size=plan.batch_size, shuffle=True, drop_last=True):
        if on_host is None:
            first = core.to_host((pixels, labels))
            with torch.no_grad():
                on_host = core.mean(criterion(copy.deepcopy(network)(normalize(first[0])), first[1]).item())
        with core.step():
            loss = criterion(model(normalize(pixels)), labels)
            loss.backward()
            core.optimizer_step(optimizer)
            losses.append(core.mean(loss.detach()))
    return {
        "losses": [loss.item() for loss in core.to_host(losses)],
        "first_loss_on_host": on_host,
        "weights": _digest(core, dict(model.named_parameters())),
        "compiles": core.backend.compiles(),
    }


def train_with_fit(core, network, images, plan, epochs: int, folder) -> dict:
    """Let `fit` take the same steps, evaluate after each epoch, and keep checkpoints."""
    import torch

    from tpukit.pe import normalize
    from tpukit.train import fit

    model, optimizer = _model(core, network)
    batches = core.batches(images, batch_size=plan.batch_size, shuffle=True, drop_last=True)
    held_out = torch.utils.data.Subset(images, range(2 * plan.batch_size + 1))
    valid = core.batches(held_out, batch_size=plan.batch_size)
    options = {"epochs": epochs, "prepare": normalize, "log_every": 1, "folder": folder}
    history = fit(core, model, optimizer, torch.nn.BCEWithLogitsLoss(), batches, valid, **options)
    return {
        "losses": [row["train_loss"] for row in history.intervals],
        "valid_losses": [row["valid_loss"] for row in history.epochs],
        "resumed": history.resumed,
        "weights": _digest(core, model.state_dict()),
        "compiles": core.backend.compiles(),
    }


def measure_rates(core, network, images, plan) -> dict:
    """Time steps on one batch that stays on the device, then steps on batches as they come from the images."""
    import torch

    from tpukit.pe import normalize

    criterion = torch.nn.BCEWithLogitsLoss()
    model, optimizer = _model(core, network)
    batches = core.batches(images, batch_size=plan.batch_size, shuffle=True, drop_last=True)

    def step(batch) -> None:
        with core.step():
            criterion(model(normalize(batch[0])), batch[1]).backward()
            core.optimizer_step(optimizer)

    def seconds(given) -> float:
        core.barrier()  # a small graph, which may be compiled each time
        core.backend.wait()
        compiled, began = core.backend.compiles(), time.perf_counter()
        for batch in given:
            step(batch)
        core.backend.wait()
        taken = time.perf_counter() - began
        again.append(core.backend.compiles() != compiled)
        return taken

    def endless():
        while True:
            yield from batches

    again, stream = [], endless()
    batch = next(stream)
    # Three graphs: the first step makes the optimiser's state; and where a batch has just come, the step begins with
    # turning its pixels from (N, H, W, C), which one that has stayed does not need any more.
    seconds([batch] * 3)
    seconds(itertools.islice(stream, 2))
    again.clear()
    without = seconds([batch] * plan.timed_steps)
    following = seconds(itertools.islice(stream, plan.timed_steps))
    return {
        "without_input": without,
        "with_input": following,
        "compiled": any(again),
        "memory": core.backend.memory(),
    }


def _model(core, network) -> tuple:
    import torch

    model = core.model(network)
    return model, torch.optim.Adam(model.parameters(), lr=1e-4 * core.world_size)


def _digest(core, tensors: dict) -> str:
    """Return what identifies tensors to the last bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(core.to_host(tensors).items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


# ---- failures, and a trace ---------------------------------------------------------------------------------------


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


def record(core, folder) -> list[str]:
    """Record some steps of a small network; return the files that core 0 wrote."""
    import torch

    from tpukit.measure import profile

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
