"""A model's outputs for every sample of a set exactly once, over any number of cores."""

import contextlib
from collections.abc import Callable, Iterator

from tpukit.essentials.data import Batches, ShardedSampler
from tpukit.essentials.display import InvalidTypeError, InvalidValueError
from tpukit.essentials.launcher import Core
from tpukit.training.batch import inputs_only
from tpukit.training.step import forward
from tpukit.training.streams import StreamSampler

# Outputs wait on the device for so many steps, or bytes, and are then copied in one transfer. More would save little
# and keep more of the device's memory occupied.
_STEPS_BETWEEN_COPIES = 32
_BYTES_BETWEEN_COPIES = 1 << 28


def predict(core: Core, model, batches: Batches, *, preprocess: Callable | None = None, bf16: bool = False) -> object:
    """Return a model's outputs for every sample, once and in dataset order, together: the same on every core.

    Batches are those of `evaluate`, and need no targets: a tensor alone, the first part of a tuple, or a mapping, which
    is passed by name.

    Args:
        model, batches, preprocess, bf16: as in `evaluate`.

    Returns:
        (N, ...) float32 on the CPU, nested as the model's outputs.

    Raises:
        ValueError: the batches are shuffled or leave samples out, or an output has no axis of samples.
        TypeError: a batch or the model's outputs are of no known kind.
    """
    check_order("predict", batches.sampler)
    core.average_buffers(model)
    core.agreement.compare("in predict", modules={"": model}, data=batches.facts(), layers=False)
    steps = host_steps(core, model, batches, inputs_only, preprocess=preprocess, bf16=bf16, gather=core.gather)
    with evaluating(model):
        outputs, _ = in_dataset_order(steps, batches.sampler)
    return outputs


def check_order(name: str, sampler: ShardedSampler) -> None:
    """Raise ValueError unless the batches are every sample once, in order."""
    if isinstance(sampler, StreamSampler):
        raise InvalidValueError(
            f"{name} needs every sample once, and batches of a stream, with steps=, have no last one",
            fix="a dataset with a length, such as list(stream): core.batches(dataset, batch_size=...)",
        )
    if sampler.shuffle or sampler.drop_last:
        raise InvalidValueError(
            f"{name} needs every sample once, in order; got batches with shuffle={sampler.shuffle}, "
            f"drop_last={sampler.drop_last}",
            fix="core.batches(dataset, batch_size=...) without them",
        )


@contextlib.contextmanager
def evaluating(model) -> Iterator[None]:
    """Switch to evaluation, and back to what every layer was: a user may have frozen some."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def host_steps(
    core: Core,
    model,
    batches: Batches,
    split: Callable,
    *,
    preprocess: Callable | None,
    bf16: bool,
    gather: Callable,
    between_steps: Callable[[], None] | None = None,
    label: str | None = "predict",
) -> Iterator[tuple]:
    """Yield (outputs, targets) of every step, in host memory, each of their tensors as `gather` returns it.

    `between_steps` is called after every step; an exception from it ends this. `label` is that of the bar, None for no
    bar.
    """
    import torch
    from torch.utils import _pytree as tree

    def rows(leaf: object) -> object:
        return None if _has_no_axis(leaf, batches.sampler.batch_size) else gather(leaf)

    waiting, steps = [], _STEPS_BETWEEN_COPIES
    for batch in core.progress(batches, label):
        with torch.no_grad(), core.step():
            inputs, targets = split(batch)
            outputs = forward(core, model, preprocess(inputs) if preprocess else inputs, bf16=bf16)
            # Of every step, though only the last has padding: a cut in one step would be one more graph.
            waiting.append(tree.tree_map(rows, (outputs, targets)))
        if between_steps:
            between_steps()
        if len(waiting) == 1:
            size = sum(leaf.nbytes for leaf in tree.tree_leaves(waiting) if leaf is not None)
            steps = min(_STEPS_BETWEEN_COPIES, 1 + _BYTES_BETWEEN_COPIES // max(1, size))
        if len(waiting) >= steps:
            yield from core.to_host(waiting)
            waiting = []
    yield from core.to_host(waiting)


def _has_no_axis(leaf: object, batch_size: int) -> bool:
    """Return whether a part of the outputs or targets is a single number or None; raise where it has no samples."""
    import torch

    if leaf is None:
        return True
    if not isinstance(leaf, torch.Tensor):
        raise InvalidTypeError(
            f"outputs are tensors, nested in tuples and dicts; got a {type(leaf).__name__} among them",
            fix=(
                "leave it out of what the model returns; Hugging Face's: model.config.use_cache = False. A "
                f"dataclass: torch.export.register_dataclass({type(leaf).__name__})"
            ),
        )
    if leaf.ndim and len(leaf) != batch_size:
        raise InvalidValueError(
            f"every output has the samples on its first axis, got {tuple(leaf.shape)} for {batch_size} samples",
            fix="leave it out of what the model returns in evaluation: if self.training: ...",
        )
    return leaf.ndim == 0


def in_dataset_order(steps: Iterator[tuple], sampler: ShardedSampler) -> tuple:
    """Join what was gathered in each step, trees of (world_size * B, ...), to a tree of (N, ...).

    Each part is written to its place as it comes, so that memory holds the whole once, and not its pieces as well.
    """
    from torch.utils import _pytree as tree

    count, wholes, structure = sampler.seen(), None, None
    for step, gathered in enumerate(steps):
        leaves, structure = tree.tree_flatten(gathered)
        wholes = wholes or [leaf if leaf is None else leaf.new_empty(count, *leaf.shape[1:]) for leaf in leaves]
        for whole, leaf in zip(wholes, leaves, strict=True):
            if leaf is not None:
                _check_width(whole, leaf)
                for rows, places in sampler.places(step):
                    whole[places] = leaf[rows]
    return tree.tree_unflatten(wholes, structure)


def _check_width(whole, leaf) -> None:
    """Raise for outputs or targets that differ in more than their number from step to step: they cannot be joined."""
    if whole.shape[1:] != leaf.shape[1:]:
        raise InvalidValueError(
            f"outputs and targets of all steps are joined, and these have the shapes (B, {_rest(whole)}) and "
            f"(B, {_rest(leaf)})",
            found="batches by length, of which the model returns, or the dataset has, something of every position",
            fix=(
                "evaluate with one length, the largest: buckets=(256,), say; or keep_outputs=False; or return one "
                "row per sample"
            ),
        )


def _rest(tensor) -> str:
    return ", ".join(map(str, tensor.shape[1:]))
