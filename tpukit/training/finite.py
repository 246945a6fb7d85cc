"""When the loss becomes NaN or infinite: which step, which core, which samples."""


class NotFinite(ArithmeticError):
    """The loss became NaN or infinite; the message names the step, the core, the samples and the last checkpoint."""


def explain(loss: float, *, step: int, rank: int, dataset, samples, lr: float, checkpoint: str) -> NotFinite:
    """Return the error for a loss that is no number, with what can be found out about its samples."""
    return NotFinite(
        f"the loss is {loss:g} at step {step} on core {rank}\n"
        f"  found: {_blame(dataset, samples)}\n"
        f"         learning rate {lr:g}; last checkpoint: {checkpoint}\n"
        "  fix:   leave samples out that hold no numbers; otherwise a lower learning rate, warmup, or clip=1.0"
    )


def _blame(dataset, samples) -> str:
    """Read the samples again, and say which of them hold NaN or infinity themselves."""
    holding = [sample for sample in samples.tolist() if not _is_finite(dataset[sample])]
    if holding:
        return f"sample {_few(holding)} holds nan or infinity, of samples {_few(samples.tolist())}"
    return f"none of its samples, {_few(samples.tolist())}, holds nan or infinity itself"


def _is_finite(sample: object) -> bool:
    import torch
    from torch.utils import _pytree as tree

    leaves = [torch.as_tensor(leaf) for leaf in tree.tree_leaves(sample) if not isinstance(leaf, str)]
    return all(bool(leaf.isfinite().all()) for leaf in leaves)


def _few(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + ", ..." * (len(numbers) > 8)
