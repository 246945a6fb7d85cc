"""Return a model's outputs for every sample of a dataset exactly once, on any number of cores."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tpukit.essentials.data import Batches, ShardedSampler
from tpukit.essentials.display import InvalidTypeError, InvalidValueError, check_flag
from tpukit.essentials.launcher import Core
from tpukit.training.batch import inputs_only
from tpukit.training.checks import check_batches
from tpukit.training.index_checks import IndexChecks, can_watch, integers_of
from tpukit.training.step import forward
from tpukit.training.step_batches import StepBatches
from tpukit.training.streams import StreamSampler

# Outputs stay on the device for this number of steps or bytes, and are then copied to the host in a
# single transfer. Larger limits would save little time, and occupy more of the device's memory.
_STEPS_BETWEEN_COPIES = 32
_BYTES_BETWEEN_COPIES = 1 << 28


def predict(
    core: Core,
    model,
    batches: Batches,
    *,
    preprocess: Callable | None = None,
    bf16: bool = False,
) -> Any:
    """Return a model's outputs for every sample, once and in order. Collective.

        outputs = predict(core, model, core.batches(images, batch_size=64))

    Every core gets the outputs of all samples. First, as in `evaluate`, the model's float buffers
    are averaged over the cores. A batch needs no targets. It is a tensor; a tuple,
    of which only the first part is used; or a mapping, which is passed as keyword arguments.

    Args:
        core: this core.
        model: module from a batch's inputs to outputs (B, ...), or to a tuple or dict of such
            tensors.
        batches: `core.batches(dataset, batch_size=...)`, without `shuffle` and `drop_last`.
        preprocess: function from a batch's inputs to the model's inputs, as in `fit`.
        bf16: run the forward pass under autocast to bfloat16.

    Returns:
        tensors (N, ...) on the CPU, in dataset order, nested as the model's outputs. bfloat16 and
        float16 outputs are converted to float32; other dtypes stay as they are. An output without
        dimensions, such as a loss, becomes None.

    Raises:
        ValueError: the batches are shuffled or leave samples out, or the first dimension of an
            output is not the samples.
        OutOfSyncError: the cores have different weights or data.
        TypeError: `batches` is not from `core.batches`; or a batch or an output of the model has an
            unsupported type.
    """
    check_flag("bf16", bf16)
    check_batches("batches", batches)
    check_order("predict", batches.sampler)
    # After a loop of the user's, each core's BatchNorm has the statistics of its own batches only.
    core.average_buffers(model)
    core.internal.agreement.compare(
        "in predict", modules={"": model}, data=batches.facts(), layers=False
    )
    steps = host_steps(
        core, model, batches, inputs_only, preprocess=preprocess, bf16=bf16, gather=core.gather
    )
    with evaluating(model):
        outputs, _ = in_dataset_order(steps, batches.sampler)
    return outputs


def check_order(name: str, sampler: ShardedSampler) -> None:
    """Raise ValueError unless the batches contain every sample once, in order.

    Args:
        name: the name of the calling function, for the message.
        sampler: the sampler of the batches.
    """
    if isinstance(sampler, StreamSampler):
        raise InvalidValueError(
            f"{name} needs every sample once, but a stream (steps=) has no last sample",
            fix=(
                "pass a dataset with a length, such as a list of the samples: "
                "core.batches(dataset, batch_size=...)"
            ),
        )
    if sampler.shuffle or sampler.drop_last:
        raise InvalidValueError(
            f"{name} needs every sample once, in order; got batches with "
            f"shuffle={sampler.shuffle}, drop_last={sampler.drop_last}",
            fix="core.batches(dataset, batch_size=...), without shuffle, weights and drop_last",
        )


@contextlib.contextmanager
def evaluating(model) -> Iterator[None]:
    """Switch a model to evaluation mode, and afterwards restore the mode of each layer."""
    modes = [(module, module.training) for module in model.modules()]
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        # `train` of some classes does more than set the mode: LoRA's layers merge their weights.
        model.train(was_training)
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
    """Yield (outputs, targets) of every step, in host memory.

    Args:
        core: this core.
        model: a module in evaluation mode.
        batches: batches in dataset order.
        split: function from a batch to (inputs, targets).
        preprocess: function from a batch's inputs to the model's inputs; None: no change.
        bf16: as in `predict`.
        gather: function that is applied to each tensor of outputs and targets on the device, such
            as `core.gather`.
        between_steps: function that is called after every step; an error in it ends the loop.
        label: the label of the progress bar; None for no progress bar.
    """
    import torch
    from torch.utils import _pytree as tree

    def gathered(leaf: object) -> object:
        return None if _has_no_axis(leaf, batches.sampler.batch_size) else gather(leaf)

    def computed(sent) -> tuple:
        # `arrange` runs within the step: before it, its operations could become another graph.
        inputs, targets = split(batches.arrange(sent.tensors))
        if preprocess:
            inputs = preprocess(inputs)
        return forward(core, model, inputs, bf16=bf16), targets

    pending = []
    limit = _STEPS_BETWEEN_COPIES
    for sent, checking in _checked(core, (model, preprocess), batches, label):
        with torch.no_grad(), core.step():
            with checking as watching, watching or contextlib.nullcontext():
                outputs, targets = computed(sent)
            # Gather the padding of the last step, too: to remove it here would need another graph.
            pending.append(tree.tree_map(gathered, (outputs, targets)))
        if between_steps:
            between_steps()
        if len(pending) == 1:
            limit = _steps_until_copy(pending[0])
        if len(pending) >= limit:
            yield from core.to_host(pending)
            pending = []
    yield from core.to_host(pending)


def _checked(core: Core, functions: tuple, batches: Batches, label) -> Iterator[tuple]:
    """Yield each sent batch with a context for its step, which on XLA checks its token ids.

    Entering this context gives the context for the calls of the step, or None if nothing is
    watched.
    """
    arrived = core.progress(StepBatches(batches), label, total=len(batches))
    on_device = core.backend.traced and not core.backend.is_recording
    if not on_device or not all(can_watch(one, on_cpu=False) for one in functions):
        for sent in arrived:
            yield sent, contextlib.nullcontext()
        return
    # As in `fit`: watch the calls for the first batch, and compare later batches with its limits.
    checks = IndexChecks()
    with batches.checking(checks.check):
        for sent in arrived:
            checking = contextlib.nullcontext()
            if checks.is_due:
                integers = integers_of((sent.tensors,))
                checking = checks.first_step(integers, core.to_host(integers))
            yield sent, checking


def _steps_until_copy(step: tuple) -> int:
    """Return the number of steps after which outputs of this size are copied to the host."""
    from torch.utils import _pytree as tree

    size = sum(leaf.nbytes for leaf in tree.tree_leaves(step) if leaf is not None)
    # The step that reaches the limit is included, so one step may have more bytes than the limit.
    return min(_STEPS_BETWEEN_COPIES, 1 + _BYTES_BETWEEN_COPIES // max(1, size))


def _has_no_axis(leaf: object, batch_size: int) -> bool:
    """Return whether an entry of the outputs or targets is None or a tensor without dimensions.

    Raises:
        TypeError: the entry is neither None nor a tensor.
        ValueError: its first dimension is not the number of samples.
    """
    import torch

    if leaf is None:
        return True
    if not isinstance(leaf, torch.Tensor):
        kind = type(leaf).__name__
        raise InvalidTypeError(
            f"outputs are tensors, nested in tuples and dicts; got a {kind} among them",
            fix=(
                "leave it out of the model's outputs; for Hugging Face, model.config.use_cache "
                f"= False. For a dataclass, torch.export.register_dataclass({kind})"
            ),
        )
    # The last batch is padded, so every batch has `batch_size` samples.
    if leaf.ndim and len(leaf) != batch_size:
        raise InvalidValueError(
            f"every output must have the samples on its first axis, got {tuple(leaf.shape)} for "
            f"{batch_size} samples",
            fix="leave it out of the model's outputs in evaluation: "
            "return (logits, extra) if self.training else logits",
        )
    return leaf.ndim == 0


def in_dataset_order(steps: Iterator[tuple], sampler: ShardedSampler) -> tuple:
    """Join the outputs of all steps, (world_size * B, ...), to (N, ...), with the same nesting.

    Each step's rows are written into the result when they arrive, so memory contains the outputs
    only once.
    """
    from torch.utils import _pytree as tree

    count = sampler.seen()
    wholes = None
    structure = None
    for step, gathered in enumerate(steps):
        leaves, structure = tree.tree_flatten(gathered)
        wholes = wholes or [_whole_of(leaf, count) for leaf in leaves]
        for whole, leaf in zip(wholes, leaves, strict=True):
            if leaf is None:
                continue
            _check_width(whole, leaf)
            # Rows that are padding have no place.
            for rows, places in sampler.places(step):
                whole[places] = leaf[rows]
    return tree.tree_unflatten(wholes, structure)


def _whole_of(leaf, count: int):
    """Return an uninitialised tensor for the rows of all samples; None if `leaf` is None."""
    return None if leaf is None else leaf.new_empty(count, *leaf.shape[1:])


def _check_width(whole, leaf) -> None:
    """Raise if the shapes of outputs or targets differ between steps, so they cannot be joined."""
    if whole.shape[1:] != leaf.shape[1:]:
        raise InvalidValueError(
            "the outputs or targets of two steps cannot be joined, because their shapes differ: "
            f"(B, {_rest(whole)}) and (B, {_rest(leaf)})",
            found=(
                "the batches have several lengths, and the model's outputs, the targets or the "
                "loss's mask have a value for every position"
            ),
            fix=(
                "evaluate with the largest length only, such as buckets=(256,); or pass "
                "keep_outputs=False; or return one row per sample"
            ),
        )


def _rest(tensor) -> str:
    return ", ".join(map(str, tensor.shape[1:]))
