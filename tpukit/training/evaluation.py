"""Evaluate a model on every sample of a dataset exactly once, on any number of cores."""

import contextlib
import copy
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tpukit.essentials.data import Batches, ShardedSampler
from tpukit.essentials.display import InvalidValueError, check_flag
from tpukit.essentials.launcher import Core, gather_objects
from tpukit.training.batch import FurtherParts
from tpukit.training.checks import check_batches, check_classes
from tpukit.training.index_checks import watched_loss
from tpukit.training.metrics import StreamedMetrics, as_classes, has_state, separate_metrics
from tpukit.training.prediction import check_order, evaluating, host_steps, in_dataset_order
from tpukit.training.weighted_loss import Loss, as_loss

# A loss whose tensors have more bytes, such as a teacher network, is computed on the device. Class
# weights and temperatures have fewer bytes.
_LARGE_LOSS_BYTES = 2**20
_MOST_OBJECTS = 5_000  # limit of the search for a loss's tensors


@dataclass(frozen=True)
class Evaluation:
    """A model's outputs for a dataset, its loss and metrics; the same on every core.

    Attributes:
        loss: the loss of all samples together, as if they were one batch. A loss function that
            uses more than 1 MiB of tensors is an exception: see `evaluate`. With
            `keep_outputs=False`, `loss` is the mean of the batches' losses. Each batch counts by
            its number of samples, or by its weight if the loss returns `(total, weight)`.
        metrics: the value of each metric, by name.
        outputs: (N, ...) on the CPU, in dataset order, nested as the model's outputs; bfloat16 and
            float16 are converted to float32. None with `keep_outputs=False`.
        targets: (N, ...) on the CPU, in dataset order; nested as the targets of a batch. None with
            `keep_outputs=False`.
    """

    loss: float
    metrics: dict[str, float]
    outputs: Any
    targets: Any

    def __repr__(self) -> str:
        from torch.utils import _pytree as tree

        parts = [f"loss {self.loss:.4f}"]
        parts += [f"{name} {value:.4f}" for name, value in self.metrics.items()]
        leaves = tree.tree_leaves(self.targets)
        if leaves and leaves[0] is not None:
            parts.insert(0, f"{len(leaves[0]):,} samples")
        return f"Evaluation: {', '.join(parts)}"


def evaluate(
    core: Core,
    model,
    loss: Callable,
    batches: Batches,
    *,
    metrics: Mapping[str, Callable] | None = None,
    preprocess: Callable | None = None,
    bf16: bool = False,
    keep_outputs: bool = True,
) -> Evaluation:
    """Evaluate a model on every sample exactly once. Collective: call it on every core.

        found = evaluate(core, model, loss, core.batches(images, batch_size=64))
        found.loss, found.outputs.shape

    In every step, the outputs and targets of all cores are gathered. They are copied to the host
    every 32 steps or 256 MB, and sorted into dataset order, without the padding of the last step.
    On the host, the loss and the metrics are computed from all samples at once. So they do not
    depend on the number of cores, even if the loss is not a plain mean. Every core has all N
    outputs and targets.

    With `keep_outputs=False`, nothing is gathered. Each core updates torchmetrics' metrics with its
    own samples, step by step, and at the end their states are combined. The loss is then the mean
    of the batches' losses, weighted by their numbers of samples. If the loss is not a plain mean
    over the samples, as with class weights or `ignore_index`, this mean differs from the loss of
    all samples. In this case let the loss return `(total, weight)`, or use a metric instead.

    Batches reach the model and the loss as in `fit`. If the model returns a dict or a tuple, the
    loss and the metrics get a dict or a tuple, too. An output without dimensions, such as a loss
    that the model computes itself, is replaced by None, because it includes the padding. Compute
    the loss from the other outputs instead.

    Before the first step, the model's float buffers, such as BatchNorm's statistics, are averaged
    over the cores. At the end, each layer has the mode (training or evaluation) that it had before.

    Args:
        core: this core.
        model: module from a batch's inputs to outputs (B, ...), or to a tuple or dict of such
            tensors.
        loss: function of (outputs, targets) that returns one number, or `(total, weight)`. A module
            is in evaluation mode. The loss runs on the CPU; for this, a module is copied to the
            CPU. There are two exceptions. A function that uses tensors on the device runs on the
            device. A loss with more than 1 MiB of tensors, such as a frozen teacher's weights, runs
            where these tensors are. It gets `batch_size` samples at a time, and its results are
            averaged over all samples. The second exception does not apply to `launch(shard=...)`.
        batches: `core.batches(dataset, batch_size=...)`, without `shuffle` and `drop_last`.
        metrics: for each name a function of (outputs, targets), or a metric of torchmetrics; see
            `fit`. None: no metrics.
        preprocess: function from a batch's inputs to the model's inputs, as in `fit`.
        bf16: run the forward pass under autocast to bfloat16.
        keep_outputs: gather and return all outputs and targets. Use False if they do not fit
            into memory.

    Raises:
        ValueError: the batches are shuffled or leave samples out; the dataset numbers its classes
            differently from the dataset that `fit` trained this model on; the first dimension of an
            output is not the samples; or the loss or a metric is not one number.
        OutOfSyncError: the cores have different weights or data.
        TypeError: `batches` is not from `core.batches`; a batch or an output of the model has an
            unsupported type; or, with `keep_outputs=False`, a metric cannot be updated step by
            step.
    """
    metrics = separate_metrics(core, metrics or {})
    check_flag("bf16", bf16)
    check_flag("keep_outputs", keep_outputs)
    check_batches("batches", batches)
    check_classes(model, batches, "evaluation")
    # After a loop of the user's, each core's BatchNorm has the statistics of its own batches only.
    core.average_buffers(model)
    core.internal.agreement.compare(
        "in evaluate", modules={"": model}, data=batches.facts(), layers=False
    )
    return evaluate_synced(
        core,
        model,
        loss,
        batches,
        metrics=metrics,
        preprocess=preprocess,
        bf16=bf16,
        keep_outputs=keep_outputs,
    )


def evaluate_synced(
    core: Core,
    model,
    loss: Callable,
    batches: Batches,
    *,
    metrics: Mapping[str, Callable] | None,
    keep_outputs: bool,
    label: str | None = "valid",
    **options: object,
) -> Evaluation:
    """Evaluate as `evaluate` does, with a model whose float buffers are in sync already.

    Args:
        core: this core.
        model: as in `evaluate`.
        loss: as in `evaluate`.
        batches: as in `evaluate`.
        metrics: as in `evaluate`.
        keep_outputs: as in `evaluate`.
        label: the label of the progress bar; None for no progress bar.
        options: further options of `host_steps`: `preprocess`, `bf16` and `between_steps`.
    """
    import torch

    check_order("evaluate", batches.sampler)
    # Decide where to compute the loss. A small module is copied to the host, next to the outputs. A
    # large loss, and a function with tensors on the device, are computed where their tensors are.
    own = _tensors_of(loss)
    is_large = sum(tensor.nbytes for tensor in own) > _LARGE_LOSS_BYTES
    on_device = [tensor for tensor in own if tensor.device.type != "cpu"]
    copied = set()  # ids of the tensors that `_loss_on_host` copies to the host with their module
    if isinstance(loss, torch.nn.Module):
        copied = {id(tensor) for tensor in (*loss.parameters(), *loss.buffers())}
    needs_device = any(id(tensor) not in copied for tensor in on_device)
    # Not with shard=...: the last part may have too few rows to be divided over the chips.
    is_large = is_large and core.chips == 1
    if is_large or needs_device:
        compute = _loss_with_its_tensors(core, loss, is_on_device=bool(on_device))
    else:
        compute = _loss_on_host(loss)
    streamed = None if keep_outputs else StreamedMetrics(core, metrics or {})
    gather = core.gather if keep_outputs else torch.Tensor.detach
    # `split` adds the further arguments of the loss to the targets, so that they are gathered too.
    split = FurtherParts(batches, loss).split
    steps = host_steps(core, model, batches, split, gather=gather, label=label, **options)
    with evaluating(model):
        if not keep_outputs:
            return _streamed(core, steps, sampler=batches.sampler, loss=compute, metrics=streamed)
        outputs, targets = in_dataset_order(steps, batches.sampler)
        targets, further = targets
        if is_large:
            rows = (outputs, targets, further)
            value = _loss_in_parts(core, compute, rows, size=batches.sampler.batch_size)
        else:
            value = compute(outputs, targets, *further).mean
    numbers = {
        name: _one_number(name, _of_all(core, metric, outputs, targets))
        for name, metric in (metrics or {}).items()
    }
    # All cores must get the same numbers, because they choose the best epoch by them.
    value, numbers = _from_core_0(core, (value, numbers))
    return Evaluation(value, numbers, outputs=outputs, targets=targets)


def _loss_on_host(loss: Callable) -> Callable[..., Loss]:
    """Return the loss as a function of outputs and targets in host memory, computed on the host."""
    import torch

    if isinstance(loss, torch.nn.Module):
        # A copy, because the module's own weights (of classes, say) are in use on the device.
        loss = copy.deepcopy(loss).cpu().eval()
    return lambda *parts: _loss(watched_loss(loss, *parts))


def _tensors_of(loss: Callable) -> list:
    """Return the tensors that a loss can use besides its arguments.

    For a module these are its parameters, buffers and other attributes. For a function, they are in
    its closure, its defaults, and the globals that its code names. For a method, they are in
    the attributes that its code names. Functions and modules found there are searched as well.
    """
    import torch

    tensors = []
    seen = set()
    waiting = [loss]
    # A search through all objects that the loss refers to, with a limit for very large ones.
    while waiting and len(seen) < _MOST_OBJECTS:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        else:
            waiting += _parts_of(value)
    return tensors


def _parts_of(value: object) -> list:
    """Return the values that a part of a loss can use; for a tensor or a number, none."""
    import torch

    if isinstance(value, torch.nn.Module):
        return [*value.parameters(), *value.buffers(), *vars(value).values()]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        names = _names_in(getattr(value.__func__, "__code__", None))
        return [value.__func__, *_attributes(value.__self__, names)]
    if isinstance(value, types.FunctionType):
        return _variables_of(value)
    # An object that is called as a function; `callable` does not return its code.
    call = getattr(type(value), "__call__", None)  # noqa: B004
    if isinstance(call, types.FunctionType):
        return [types.MethodType(call, value)]
    return []


def _variables_of(function: types.FunctionType) -> list:
    """Return the values of a function's closure and defaults, and of globals that its code names.

    Attributes of these values are included if the code names them. Functions of torch and tpukit
    are not searched, because they refer to no tensors of the user's.
    """
    # Not `__module__`, which `functools.wraps` copies from torch's function to a user's wrapper.
    module = function.__globals__.get("__name__") or ""
    if module.partition(".")[0] in ("torch", "tpukit"):
        return []
    names = _names_in(function.__code__)
    variables = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            variables.append(cell.cell_contents)
    for name in names:
        if name in function.__globals__:
            variables.append(function.__globals__[name])
    return [*variables, *itertools.chain(*(_attributes(value, names) for value in variables))]


def _attributes(owner: object, names: set[str]) -> list:
    """Return the attributes and methods of an object whose names are in `names`.

    If an attribute is a namespace, such as `core.state`, its attributes are searched as well.
    """
    import torch

    if isinstance(owner, types.ModuleType | type | types.FunctionType):
        return []
    # A module stores parameters, buffers and submodules in separate dicts.
    own = dict(getattr(owner, "__dict__", {}))
    if isinstance(owner, torch.nn.Module):
        own |= {**owner._parameters, **owner._buffers, **owner._modules}
    parts = []
    for name in names:
        of_class = getattr(type(owner), name, None)
        if name in own:
            parts.append(own[name])
            if isinstance(own[name], types.SimpleNamespace):  # core.state
                parts += _attributes(own[name], names)
        elif isinstance(of_class, types.FunctionType):
            parts.append(types.MethodType(of_class, owner))
    return parts


def _names_in(code: types.CodeType | None) -> set[str]:
    """Return the names of globals and attributes in code and in the functions defined in it."""
    if code is None:
        return set()
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _loss_with_its_tensors(core: Core, loss, *, is_on_device: bool) -> Callable[..., Loss]:
    """Return the loss as a function of host tensors, computed on the device of its own tensors.

    Args:
        core: this core.
        loss: a function or a module.
        is_on_device: whether outputs and targets must be sent to the device.
    """
    import torch

    is_module = isinstance(loss, torch.nn.Module)

    def compute(*parts) -> Loss:
        call = functools.partial(watched_loss, loss)  # checks labels, which needs host tensors
        if is_on_device:
            call = loss
            parts = _on_device(core, parts)
        with torch.no_grad(), evaluating(loss) if is_module else contextlib.nullcontext():
            value = call(*parts)
        return _loss(core.to_host(value))

    return compute


def _on_device(core: Core, parts: tuple) -> tuple:
    """Send nested tensors to the device and return them; None stays None."""
    from torch.utils import _pytree as tree

    # Send all tensors in one transfer, and put them back between the Nones.
    leaves, structure = tree.tree_flatten(parts)
    sent = iter(core.to_device([leaf for leaf in leaves if leaf is not None]))
    leaves = [None if leaf is None else next(sent) for leaf in leaves]
    return tree.tree_unflatten(leaves, structure)


def _loss_in_parts(core: Core, loss: Callable[..., Loss], rows: tuple, *, size: int) -> float:
    """Return the mean of a loss over all rows, computed `size` rows at a time. Collective.

    The cores take turns: with 2 cores and `size` 64, core 1 computes rows 64-127, 192-255 and so
    on.
    """
    from torch.utils import _pytree as tree

    outputs, targets, further = rows
    count = len(next(leaf for leaf in tree.tree_leaves(rows) if leaf is not None))
    sums = _WeightedSums()
    for first in range(core.rank * size, count, core.world_size * size):
        last = min(first + size, count)

        # Defaults bind the values of this iteration, because a closure would see later ones.
        def part(leaf, first=first, last=last):
            return None if leaf is None else leaf[first:last]

        some_outputs, some_targets, some_further = tree.tree_map(part, (outputs, targets, further))
        sums.add(loss(some_outputs, some_targets, *some_further), samples=last - first)
    return sums.mean(core)


class _WeightedSums:
    """Sums of a loss's totals and weights, over samples of this core."""

    def __init__(self) -> None:
        self._total = 0.0
        self._weight = 0.0

    def add(self, loss: Loss, *, samples: int) -> None:
        """Add a loss. A loss without a weight must be the mean over this number of samples."""
        if loss.weight is None:
            loss = Loss(samples * float(loss.total), samples)
        self._total += float(loss.total)
        self._weight += float(loss.weight)

    def mean(self, core: Core) -> float:
        """Return the mean over the samples of all cores. Collective."""
        everyone = [(self._total, self._weight)]
        if core.world_size > 1:
            everyone = gather_objects(core, everyone[0])
        totals, weights = zip(*everyone, strict=True)
        return Loss(sum(totals), sum(weights)).mean


def _from_core_0(core: Core, numbers: tuple) -> tuple:
    """Return core 0's numbers on every core. Collective.

    A metric may draw random numbers, or read a clock or a file of its host, and so differ between
    cores. But every core chooses the best epoch by these numbers, and all must choose the same.
    """
    if core.world_size == 1 or core.backend.is_recording:
        return numbers
    return gather_objects(core, numbers)[0]


def _streamed(
    core: Core,
    steps: Iterator[tuple],
    *,
    sampler: ShardedSampler,
    loss: Callable[..., Loss],
    metrics: StreamedMetrics,
) -> Evaluation:
    """Return the `Evaluation` for `keep_outputs=False`: each core uses its own samples only."""
    from torch.utils import _pytree as tree

    sums = _WeightedSums()
    for step, positions in zip(steps, sampler.positions(), strict=True):
        # Positions from `sampler.count` on are padding, which fills the last step of each core.
        real = int((positions < sampler.count).sum())
        if not real:
            continue

        def without_padding(leaf, real=real):
            return None if leaf is None else leaf[:real]

        outputs, targets = tree.tree_map(without_padding, step)
        targets, further = targets
        sums.add(loss(outputs, targets, *further), samples=real)
        metrics.update(outputs, targets)
    mean = sums.mean(core)
    numbers = {name: _one_number(name, value) for name, value in metrics.compute().items()}
    mean, numbers = _from_core_0(core, (mean, numbers))
    return Evaluation(mean, numbers, outputs=None, targets=None)


def _loss(value: object) -> Loss:
    """Return a loss function's result as a `Loss`; raise if it is None or not one number."""
    has_parts = isinstance(value, list | tuple | Mapping)
    loss = as_loss(value if has_parts else _one_number("the loss", value))
    return Loss(_detached(loss.total), _detached(loss.weight))


def _detached(value: object) -> object:
    """Return a tensor without its graph: torch warns if a number is made of one with a graph.

    Losses and metrics may have parameters, such as a learned temperature.
    """
    return value.detach() if hasattr(value, "detach") else value


def _one_number(name: str, value: object) -> float:
    if value is None:
        raise InvalidValueError(
            f"{name} must return one number, got None",
            found=(
                "an evaluation sets outputs.loss to None, because this loss includes the padding "
                "of the batch"
            ),
            fix=(
                "compute the number from other outputs, and return it: lambda outputs, labels: "
                "cross_entropy(outputs.logits, labels)"
            ),
        )
    if isinstance(value, Mapping):
        part = next(iter(value), "name")
        raise InvalidValueError(
            f"{name} must return one number, got a {type(value).__name__} of "
            f"{', '.join(map(repr, value))}",
            fix="pass a function for each number: "
            f"lambda outputs, targets: {name}(outputs, targets)[{part!r}]",
        )
    # A torchmetrics metric with average=None returns a number per class.
    size = value.numel() if hasattr(value, "numel") else 1
    if size != 1 or not hasattr(value, "__float__"):
        found = type(value).__name__
        if hasattr(value, "shape"):
            found += f" {tuple(value.shape)}"
        raise InvalidValueError(
            f"{name} must return one number, got a {found}",
            fix='take its mean; for a torchmetrics metric, pass average="macro"',
        )
    return float(_detached(value))


def _of_all(core: Core, metric: Callable, outputs, targets) -> object:
    """Return the value of a metric for all samples at once."""
    if has_state(metric):  # torchmetrics
        metric.reset()
        targets = as_classes(metric, targets)
    try:
        return metric(outputs, targets)
    except RuntimeError:
        if all(tensor.device.type == "cpu" for tensor in _tensors_of(metric)):
            raise
    # The metric has tensors on the device, as a loss that is also a metric has. So send it the
    # outputs.
    return metric(*_on_device(core, (outputs, targets)))
