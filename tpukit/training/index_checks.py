"""Check labels and token ids, which XLA does not check: an index out of range raises no error.

On a CPU, a label 10 with 10 classes raises an error. XLA clamps it or leaves it out. So in the
first step, tpukit watches the calls of `cross_entropy`, `nll_loss` and `embedding`, and compares
their arguments with the batch's integers on the host:

    batch                         part 1, labels: 8 integers on the host
    labels.flatten()              the same values
    cross_entropy(outputs, ...)   10 outputs, ignore_index -100: part 1 must be 0 to 9 or -100

Later batches are compared with these limits before they are sent to the device.
"""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from tpukit.essentials.display import InvalidValueError

# Functions whose results have the same values as their argument.
_SAME_VALUES = {
    *("clone", "contiguous", "detach", "flatten", "int", "long", "movedim", "permute", "reshape"),
    *("squeeze", "swapaxes", "t", "to", "transpose", "unflatten", "unsqueeze", "view", "view_as"),
}
# Functions that the host can call again with its own copies of the arguments.
_REPEATED = {
    *("__getitem__", "narrow", "select", "unbind", "chunk", "split", "roll"),
    *("add", "sub", "mul", "__add__", "__sub__", "__mul__", "__rsub__", "clamp", "where"),
    *("masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__gt__"),
    *("logical_and", "logical_or", "logical_not", "__and__", "__or__", "__invert__"),
}
_IN_PLACE = {"__setitem__", "masked_fill_", "add_", "sub_", "clamp_", "copy_"}

_UNLABELLED = 255  # pixels without a class in the masks of PASCAL VOC and Cityscapes


class _Known(NamedTuple):
    """A tensor of integers whose values are known on the host.

    Attributes:
        tensor: the tensor on the device. The reference keeps its id from being used again.
        values: a copy on the host.
        place: the index in the batch of the tensor that has these values; None if the values were
            computed, or are not in the batch.
    """

    tensor: object
    values: object
    place: int | None


class _Limit(NamedTuple):
    """The valid range of an integer tensor of the batches.

    Attributes:
        size: valid integers are 0 to size - 1.
        ignored: a further valid integer, such as -100, that the loss ignores; or None.
        of: "targets" or "token ids".
        is_mean: whether the loss is a mean over the integers that are not ignored.
    """

    size: int
    ignored: int | None
    of: str
    is_mean: bool = False


class IndexChecks:
    """Checks the integers in the batches of one `fit`, or of one evaluation or prediction.

    Attributes:
        unequal: why the batches of a step have different weights in the mean loss, such as
            "ignore_index=-100"; None as long as no reason was found.
        watching: a context in which a step must call the model and the loss. In the first step, the
            context checks the indices that torch functions get; later, it does nothing.
    """

    def __init__(self):
        self.unequal: str | None = None
        self.watching = contextlib.nullcontext()
        self._limits: dict[int, _Limit] | None = None  # None before the first step
        # Batches are prepared ahead: these came before the first step, and `end` checks them.
        self._sent: list[list] = []

    @property
    def is_due(self) -> bool:
        """True until `first_step` has checked a step."""
        return self._limits is None

    def check(self, tensors: list) -> None:
        """Check the tensors of a batch before they are sent to the device.

        Batches are prepared ahead. Those before the first step are stored until `end` checks them.
        """
        if self._limits is None:
            self._sent.append([tensor if _is_integer(tensor) else None for tensor in tensors])
            return
        for place, limit in self._limits.items():
            if place < len(tensors) and tensors[place] is not None and _is_integer(tensors[place]):
                self.compare(tensors[place], limit)

    def compare(self, values, limit: _Limit) -> None:
        """Raise if values are out of range; set `unequal` if the loss ignores some values."""
        if limit.ignored is not None and _has(values, limit.ignored):
            values = values[values != limit.ignored]
            if limit.is_mean:
                self.unequal = self.unequal or f"ignore_index={limit.ignored}"
        if not values.numel():
            return
        low, high = (int(end) for end in values.aminmax())
        if low < 0 or high >= limit.size:
            raise _out_of_range(low, high, limit)

    @contextlib.contextmanager
    def first_step(self, sent: list[list], on_host: list[list]) -> Iterator[object]:
        """Check the integers of the first step in this block; set the limits of later batches.

        Yields the context `watching`, in which the step must call the model and the loss.

        Args:
            sent: for each batch of the step, its integers on the device, from `integers_of`.
            on_host: copies of these tensors in host memory.
        """
        watch = _Watch(self)
        for tensors, values in zip(sent, on_host, strict=True):
            watch.add_batch(tensors, values)
        self.watching = watch.mode()
        try:
            yield self.watching
        finally:
            self.watching = contextlib.nullcontext()
            watch.forget()
        self.end(watch.limits)

    def end(self, limits: dict[int, _Limit]) -> None:
        """Set the limits for later batches, and check the batches that were stored so far."""
        self._limits = limits
        waiting = self._sent
        self._sent = []
        for tensors in waiting:
            self.check(tensors)


def unequal_advice(reason: str) -> str:
    """Return advice for a loss that needs a weighted mean over batches."""
    # `reason` is "ignore_index=-100" or, with class weights, "weight=".
    ignored = reason.partition("=")[2]
    weight = f"(labels != {ignored}).sum()"
    argument = ""
    if not ignored:
        argument = ", weight=weight"
        weight = "weight[labels].sum()"
    elif ignored != "-100":
        argument = f", ignore_index={ignored}"
    return (
        f"the loss is a mean with {reason}, so batches have different weights, but fit takes the "
        "plain mean over cores and accumulated batches; for the mean of the joined batch, let the "
        f'loss return: cross_entropy(outputs, labels{argument}, reduction="sum"), {weight}'
    )


def integers_of(batches: tuple) -> list[list]:
    """Return the tensors of each batch, with None in place of tensors that are not integers."""
    from torch.utils import _pytree as tree

    found = []
    for batch in batches:
        tensors = [leaf for leaf in tree.tree_leaves(batch) if _is_tensor(leaf)]
        found.append([tensor if _is_integer(tensor) else None for tensor in tensors])
    return found


def can_watch(part: object, *, on_cpu: bool) -> bool:
    """Return whether tpukit can watch the calls of torch functions in a model or loss.

    The result is False if a layer is compiled: tpukit watches in a TorchFunctionMode, in which
    `torch.compile` would compile the layer again. On a CPU, the result is also False for torch's
    attention layers, because the mode would switch off their fast path and so change the rounding.

    Args:
        part: a module or a function.
        on_cpu: whether `part` runs on a CPU.
    """
    from torch import nn

    layers = part.modules() if hasattr(part, "modules") else [part]
    for layer in layers:
        is_compiled = hasattr(layer, "_torchdynamo_orig_callable") or hasattr(layer, "_orig_mod")
        if is_compiled or getattr(layer, "_compiled_call_impl", None) is not None:
            return False
        if on_cpu and isinstance(layer, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            return False
    return True


def _has(values, number: int) -> bool:
    """Return whether a number is among values."""
    if not values.numel():
        return False
    # Test the range first: aminmax is one pass over the values, and usually excludes the number.
    low, high = values.aminmax()
    return bool(low <= number <= high) and bool((values == number).any())


def _out_of_range(low: int, high: int, limit: _Limit) -> InvalidValueError:
    """Return the error for values from `low` to `high`, with a fix that this range suggests."""
    wrong = low if low < 0 else high
    if limit.of == "token ids":
        # Usually the tokenizer has added tokens that the model's embedding lacks.
        fix = f"nn.Embedding({high + 1}, ...), or the tokenizer that belongs to the model"
        if low < 0:
            fix = "leave out negative token ids, such as those of padding"
        return InvalidValueError(
            f"token id {wrong} is out of range: the embedding has {limit.size} rows",
            found=f"token ids {low} to {high} in a batch",
            fix=fix,
        )
    fix = f"a model with {high + 1} outputs, or labels from 0 to {limit.size - 1}"
    # Labels 1 to 10 with 10 outputs are probably counted from 1.
    if low == 1 and high == limit.size:
        fix = "labels that begin with 0: labels - 1"
    elif low < 0 or high == _UNLABELLED:
        fix = f"CrossEntropyLoss(ignore_index={wrong}), if such targets do not count"
    return InvalidValueError(
        f"target {wrong} is out of range: the model has {limit.size} outputs",
        found=f"targets {low} to {high} in a batch; ignore_index is {limit.ignored}",
        fix=fix,
    )


def watched_loss(loss, outputs, *targets):
    """Return `loss(outputs, *targets)` on the CPU; raise if a target is out of range."""
    if not can_watch(loss, on_cpu=True):
        return loss(outputs, *targets)
    with _Watch(IndexChecks()).mode():
        return loss(outputs, *targets)


class _Watch:
    """Checks the indices of the calls in a step, and follows the integers of its batches.

    It knows the values of integers on the device from copies on the host. It repeats each
    operation on these integers with the copies, and so knows the values of the result.

    Attributes:
        limits: the limits found so far, by the index of the tensor in a batch.
    """

    def __init__(self, checks: IndexChecks):
        self.limits: dict[int, _Limit] = {}
        self._checks = checks
        self._known: dict[int, _Known] = {}  # by id of the tensor

    def add_batch(self, tensors: list, values: list) -> None:
        """Add a batch's integers on the device, with their copies on the host."""
        for place, (tensor, value) in enumerate(zip(tensors, values, strict=True)):
            if tensor is not None:
                self._known[id(tensor)] = _Known(tensor, value, place)

    def forget(self) -> None:
        """Release the tensors now; the mode would keep them until the garbage collector runs."""
        self._known.clear()

    def mode(self):
        """Return a TorchFunctionMode that passes each call of a torch function to `call`."""
        from torch.overrides import TorchFunctionMode

        watch = self

        class Mode(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                return watch.call(function, args, kwargs or {})

        return Mode()

    def call(self, function, args: tuple, kwargs: dict):
        """Check a call's indices, run the call, follow its integers, and return its result."""
        self._look_at(function, args, kwargs)
        result = function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name in _SAME_VALUES or name in _REPEATED or name in _IN_PLACE:
            # If the host cannot repeat the call, later uses of the result are not checked.
            with contextlib.suppress(Exception):
                self._follow(name, args, kwargs, result)
        return result

    def _look_at(self, function, args: tuple, kwargs: dict) -> None:
        from torch.nn import functional as F

        # `nn.Embedding` and other layers call these functions, so all uses come here.
        if function is F.embedding and _is_integer(args[0]):
            self._learn(args[0], _Limit(len(args[1]), ignored=None, of="token ids"))
        if function not in (F.cross_entropy, F.nll_loss) or not _is_integer(args[1]):
            return
        outputs, targets = args[:2]
        # Outputs are (N, classes, ...), or (classes,) for one sample.
        size = outputs.shape[1 if outputs.ndim > 1 else 0]
        is_mean = kwargs.get("reduction", "mean") == "mean"
        ignored = kwargs.get("ignore_index", -100)
        self._learn(targets, _Limit(size, ignored, of="targets", is_mean=is_mean))
        if is_mean and kwargs.get("weight") is not None:
            self._checks.unequal = self._checks.unequal or "weight="

    def _learn(self, tensor, limit: _Limit) -> None:
        """Check integers if the host knows their values; store their limit for later batches."""
        known = self._find(tensor)
        if known is None:
            return
        self._checks.compare(known.values, limit)
        # Only tensors of the batch are checked in later steps.
        if known.place is not None:
            self.limits[known.place] = limit

    def _find(self, tensor) -> _Known | None:
        """Return the facts about a tensor; None if its values are not known on the host."""
        found = self._known.get(id(tensor))
        if found is None and _is_tensor(tensor) and tensor.device.type == "cpu":
            return _Known(tensor, tensor, place=None)
        return found

    def _follow(self, name: str, args: tuple, kwargs: dict, result) -> None:
        """Store the host's copy of a call's result, if the host knows all tensor arguments."""
        from torch.utils import _pytree as tree

        tensors = [leaf for leaf in tree.tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        facts = [self._find(tensor) for tensor in tensors]
        if not facts or any(fact is None for fact in facts):
            return
        first = facts[0]
        if name in _IN_PLACE:
            # The call changes the batch's tensor, so a limit that the loss sets does not hold for
            # the values that later batches are sent with.
            for key, fact in self._known.items():
                if fact.place == first.place:
                    self._known[key] = fact._replace(place=None)
        # On a CPU the result has its values already.
        values = result
        if first.tensor is not first.values:
            values = self._repeat(name, args, kwargs)
        # A limit of the result is a limit of the batch only if the values are unchanged.
        place = first.place if name in _SAME_VALUES else None
        for leaf, host in zip(tree.tree_leaves(result), tree.tree_leaves(values), strict=True):
            is_integer = _is_tensor(leaf) and not leaf.is_floating_point()
            if is_integer and host.device.type == "cpu":
                self._known[id(leaf)] = _Known(leaf, host, place)

    def _repeat(self, name: str, args: tuple, kwargs: dict):
        """Run a call again with the host's copies of its arguments; return its result."""
        import torch
        from torch.utils import _pytree as tree

        def on_host(leaf):
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            return self._find(leaf).values if _is_tensor(leaf) else leaf

        args, kwargs = tree.tree_map(on_host, (args, kwargs))
        owner = torch.Tensor if hasattr(torch.Tensor, name) else torch
        return getattr(owner, name)(*args, **kwargs)


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_integer(tensor: object) -> bool:
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.dtype == torch.bool:
        return False
    return not (tensor.is_floating_point() or tensor.is_complex())
