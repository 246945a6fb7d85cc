"""Check the results of the cores: the samples they had, and their training."""

import itertools
import math
from pathlib import Path

from tools.chip import reference
from tools.chip import worker_functions as on_cores

# How far from the reference, of the way that a weight goes: on CPUs; on a chip, whose convolutions
# round in their backward pass whatever precision is asked for (torch_xla 2.9); and anywhere with a
# forward pass in bfloat16.
EXACT = 2e-3
NEAR = 2e-2
_ROUNDED = 5e-2


class NotAsExpected(AssertionError):
    """A part ran, and its outcome is wrong."""


def expect(true: bool, otherwise: str) -> None:
    """Raise unless it is true."""
    if not true:
        raise NotAsExpected(otherwise)


def check_samples(results: list[dict], data: reference.Numbers) -> None:
    """Raise unless batches, `evaluate` and `predict` had every sample once, with its label."""
    for name, (_, options) in on_cores.KINDS.items():
        orders = [
            _order(name, [one["shown"][name][epoch] for one in results], data, **options)
            for epoch in range(2)
        ]
        if options.get("shuffle"):
            expect(orders[0] != orders[1], f"{name}: two epochs have the same order")
            expect(
                sorted(orders[0]) != orders[0], f"{name}: the samples come in the dataset's order"
            )
    for rank, one in enumerate(results):
        for name, found in one["found"].items():
            count = len(data) if name == "all" else 1
            labels = data.labels[:count]
            for kind in ("outputs", "predicted"):
                expect(
                    found[kind].flatten().tolist() == [*range(count)],
                    f"core {rank}: {kind} are {found[kind]}",
                )
            expect(
                found["targets"].tolist() == labels.tolist(),
                f"core {rank}: targets are {found['targets']}",
            )
            expect(
                found["samples"] == count,
                f"core {rank}: evaluate had {found['samples']} samples of {count}",
            )
            right = ((labels[:, 0] / 100 - labels[:, 1]) ** 2).mean().item()
            for loss in found["losses"]:
                expect(
                    math.isclose(loss, right, rel_tol=1e-4),
                    f"core {rank}: the loss of all is {loss}, not {right}",
                )


def _order(name: str, shares: list[list], data: reference.Numbers, **options) -> list[int]:
    """Return the samples of an epoch in their order.

    Unshuffled samples come core by core. Shuffled samples come step by step over all cores.
    """
    import torch

    cores = len(shares)
    full = reference.BATCH * len(shares)
    orders = []
    steps = len(data) // full if options.get("drop_last") else math.ceil(len(data) / full)
    drawn = []
    for rank, batches in enumerate(shares):
        expect(
            len(batches) == steps, f"{name}: core {rank} had {len(batches)} batches, not {steps}"
        )
        images, labels, real = (torch.stack(part) for part in zip(*batches, strict=True))
        numbers = reference.numbers_of(images.flatten(0, 1)).long().reshape(real.shape)
        same_pixels = (images.numpy() == data.images[numbers].transpose(0, 1, 4, 2, 3)).all()
        expect(bool(same_pixels), f"{name}: core {rank} had images with other pixels than theirs")
        same_labels = (labels[..., :3].numpy() == data.labels[numbers]).all()
        expect(bool(same_labels), f"{name}: core {rank} had images with the labels of others")
        orders.append((numbers, real))
        drawn += [tuple(row) for row in labels[..., 3:].flatten(1).tolist() if row]
    expect(len({*drawn}) == len(drawn), f"{name}: batches were read with the same random numbers")
    numbers, real = (
        torch.stack(part, dim=0 if "in order" in name else 1) for part in zip(*orders, strict=True)
    )
    seen = numbers[real].tolist()
    wanted = steps * full if options.get("drop_last") else len(data)
    expect(
        len(seen) == wanted == len({*seen}),
        f"{name}: {len({*seen})} samples came, {len(seen)} times, of {wanted}",
    )
    expect(
        "in order" not in name or seen == [*range(len(data))], f"{name}: the samples came as {seen}"
    )
    expect(
        numbers.numel() == steps * cores * reference.BATCH,
        f"{name}: batches are not of {reference.BATCH}",
    )
    return seen


def check_by_hand(results: list[dict], data: reference.Numbers, near: float) -> dict:
    """Raise unless a loop trains as the reference does, and no two cores drew the same numbers."""
    steps = len(data) // (reference.BATCH * len(results))
    clips = []
    for clip in on_cores.CLIPS_BY_HAND:
        clips += [clip] * steps
    rates = [on_cores.RATE for _ in clips]
    right = _reference(results, data, 1, steps, rates=rates, clips=clips)
    losses = _expect_losses(results, right.losses, near)
    share = max(
        _expect_state(f"core {rank}", one["state"], right.states[-1], near)
        for rank, one in enumerate(results)
    )
    _expect_draws(results)
    for rank, one in enumerate(results):
        expect(
            one["again"].equal(one["draws"][-1]),
            f"core {rank}: the same seed gave other random numbers",
        )
    return {"losses": losses, "apart": share, "compiles": results[0]["compiles"]}


def check_fit(
    results: list[dict],
    data: reference.Numbers,
    held_out: reference.Numbers,
    recipe: dict,
    folder: Path,
    near: float,
) -> dict:
    """Raise unless `fit` trains as the reference does, and its files hold the trained weights."""
    import torch

    name = folder.name
    first = results[0]
    bf16 = recipe["bf16"]
    rates = recipe["rates"]
    clip = recipe["clip"]
    near = _ROUNDED if bf16 else near
    steps = len(rates) // recipe["epochs"]
    expect(not first["resumed"], f"{name}: resumed from {first['resumed']}")
    expect(first["rates"] == rates, f"{name}: learning rates {first['rates']}, not {rates}")
    options = {"rates": rates, "clips": [clip for _ in rates], "bf16": bf16}
    right = _reference(results, data, recipe["accumulate"], steps, **options)
    _expect_losses(results, right.losses, near)
    _expect_draws(results)
    kept = right.averages if recipe["averaged"] else right.states
    shares = []
    valid = []
    for rank, one in enumerate(results):
        dtypes = ["torch.bfloat16" if bf16 else "torch.float32"]
        expect(
            one["dtypes"] == dtypes,
            f"{name}: core {rank} computed in {one['dtypes']}, not {dtypes}",
        )
        epochs = {len(one[each]) for each in ("states", "epochs")}
        expect(
            epochs == {recipe["epochs"]},
            f"{name}: core {rank} has {epochs} epochs, not {recipe['epochs']}",
        )
        for epoch, state in enumerate(one["states"], 1):
            where = f"{name}: core {rank} after epoch {epoch}"
            shares.append(_expect_state(where, state, kept[epoch * steps - 1], near))
            expect(
                _same(state, first["states"][epoch - 1]), f"{where} holds other weights than core 0"
            )
    for epoch, state in enumerate(first["states"], 1):
        valid.append(reference.evaluate(state, held_out, bf16=bf16))
        wanted = [valid[-1], len(held_out), (len(held_out) - 1) / 2]
        for rank, one in enumerate(results):
            got = one["epochs"][epoch - 1]
            same = all(map(lambda a, b: math.isclose(a, b, rel_tol=near), got, wanted))
            expect(
                same,
                f"{name}: core {rank}, epoch {epoch}: loss, samples, number {got}, not {wanted}",
            )
    best = 1 + min(range(len(valid)), key=valid.__getitem__)
    said = {one["best"] for one in results}
    expect(said == {best}, f"{name}: the best epoch is {best}, cores say {said}")
    best_state = first["states"][best - 1]
    expect(
        _same(torch.load(folder / "best.pt"), best_state),
        f"{name}: best.pt does not hold epoch {best}",
    )
    for rank, one in enumerate(results):
        expect(
            _same(one["state"], best_state),
            f"{name}: core {rank} was not given the best weights back",
        )
    last = torch.load(sorted(folder.glob("step-*.pt"))[-1])
    expect(
        last["progress"]["step"] == len(rates),
        f"{name}: the last checkpoint is of step {last['progress']['step']}",
    )
    share = _expect_state(f"{name}: the last checkpoint", last["model"], right.states[-1], near)
    return {
        "losses": first["losses"],
        "apart": max(*shares, share),
        "best": best,
        "compiles": first["compiles"],
    }


def check_resumed(results: list[dict], whole: list[dict], done: int, recipe: dict) -> None:
    """Raise unless a run that was resumed after so many steps is the whole one, to the last bit."""
    steps = len(recipe["rates"]) // recipe["epochs"]
    for rank, (one, other) in enumerate(zip(results, whole, strict=True)):
        expect(bool(one["resumed"]), "fit did not resume")
        for name in ("losses", "rates", "epochs", "best"):
            expect(one[name] == other[name], f"core {rank}: {name} {one[name]}, not {other[name]}")
        for name in ("numbers", "draws"):
            rest = other[name][done * recipe["accumulate"] :]
            same = len(rest) == len(one[name]) and all(
                map(lambda a, b: a.equal(b), one[name], rest)
            )
            expect(same, f"core {rank}: other {name} after resuming, {one[name]}, not {rest}")
        rest = other["states"][done // steps :]
        same = len(rest) == len(one["states"]) and all(map(_same, one["states"], rest))
        expect(same and _same(one["state"], other["state"]), f"core {rank}: the weights are others")


def _reference(
    results: list[dict], data, accumulate: int, of_epoch: int, **options
) -> reference.Trained:
    """Train the reference on the samples that the cores had; no sample may repeat in an epoch."""
    had = []
    for one in results:
        had.append([batch.long().tolist() for batch in one["numbers"]])
    steps = len(options["rates"])
    wrong = [len(one) for one in had if len(one) != steps * accumulate]
    expect(not wrong, f"cores had {wrong} batches, not {steps * accumulate}")
    by_step = []
    for step in range(steps):
        first = step * accumulate
        by_step.append([one[first : first + accumulate] for one in had])
    wanted = of_epoch * accumulate * reference.BATCH * len(had)
    for begin in range(0, steps, of_epoch):
        batches = []
        for cores in by_step[begin : begin + of_epoch]:
            batches += itertools.chain.from_iterable(cores)
        seen = [*itertools.chain.from_iterable(batches)]
        few = f"{len({*seen})} samples came in an epoch, {len(seen)} times, of {wanted}"
        expect(len(seen) == wanted == len({*seen}), few)
    return reference.train(data, by_step, **options)


def _expect_losses(results: list[dict], right: list[float], near: float) -> list[float]:
    by_core = [[*map(float, one["losses"])] for one in results]
    for rank, losses in enumerate(by_core):
        same = len(losses) == len(right) and all(
            map(lambda a, b: math.isclose(a, b, rel_tol=near), losses, right)
        )
        expect(same, f"core {rank}: losses {losses}, not {right}")
    return by_core[0]


def _expect_state(where: str, state: dict, right: dict, near: float) -> float:
    share, name = reference.apart(state, right)
    expect(
        share < near, f"{where}: {name} is {share:.1%} of its way from where plain PyTorch comes to"
    )
    return share


def _expect_draws(results: list[dict]) -> None:
    """Raise unless the numbers drawn in a step differ between cores and between steps."""
    for place, part in {"on the device": slice(3), "by the dataset": slice(3, None)}.items():
        drawn = []
        for one in results:
            parts = [draws[part] for draws in one["draws"]]
            drawn += [tuple(numbers.tolist()) for numbers in parts if len(numbers)]
        few = (
            f"random numbers were drawn {len(drawn)} times {place}, {len({*drawn})} of them differ"
        )
        expect(len({*drawn}) == len(drawn), few)


def _same(state: dict, other: dict) -> bool:
    return state.keys() == other.keys() and all(
        value.equal(other[name]) for name, value in state.items()
    )
