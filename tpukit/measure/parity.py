"""Does the device compute what the host does? Layer by layer, against what its precision explains."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass

from tpukit.essentials.run import Core, launch
from tpukit.essentials.show import Table, WrongValue

_FLOAT32_BITS = 24  # significant bits
# The largest of many rounding errors differs between two computers that round alike but add up in another order.
_FACTOR = 4
# Of a layer's largest value, where no product is rounded: sums in another order, and a device's own exp and rsqrt.
_FLOAT32_ERROR = 2.0**-14
# Where the factors of a product stand among the arguments of torch's operations; what is added to it is not rounded.
_FACTORS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "linear", "convolution"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), (1, 2)),
    "_trilinear": (0, 1, 2),
    "mkldnn_rnn_layer": (0, 1, 2, 5),  # an LSTM on a CPU, all its steps: inputs, weights, the first state
}


@dataclass(frozen=True)
class LayerDifference:
    """How far the output of one layer on the device is from the host's.

    Attributes:
        name: as in `model.named_modules()`; "(2)" for the second call, "[0]" for the first of several outputs.
        kind: the layer's class.
        difference: the largest absolute difference; infinite where one side is not finite and the other is, or other.
        relative: the same as a part of the largest absolute value on the host.
        explained: the largest absolute difference that the device's precision explains.
    """

    name: str
    kind: str
    difference: float
    relative: float
    explained: float

    @property
    def is_explained(self) -> bool:
        """True where the device's precision is enough to explain the difference."""
        return self.difference <= self.explained


@dataclass(frozen=True, repr=False)
class Comparison(Table):
    """A model on a device beside the same on the host; shows itself as a table.

    Attributes:
        layers: in the order in which they were computed; the model's own output is the last.
        device: in words.
        bits: significant bits that the device's products keep of a float32: 8 are bfloat16, 24 are all.
    """

    layers: tuple[LayerDifference, ...]
    device: str
    bits: int

    @property
    def first(self) -> LayerDifference | None:
        """The first layer whose difference is not explained, None if there is none; those after it inherit it."""
        return next((layer for layer in self.layers if not layer.is_explained), None)

    @property
    def title(self) -> str:
        """The outcome in one line."""
        kept = "float32" if self.bits == _FLOAT32_BITS else f"products of {self.bits} significant bits"
        outcome = f"{self.first.name} is the first layer beyond" if self.first else "all layers within"
        return f"{self.device} beside this host: {outcome} what {kept} explain{'s' * (self.bits == _FLOAT32_BITS)}"

    def rows(self) -> list[tuple[str, ...]]:
        """Return (state, layer, difference, part of the largest value, explained difference), after a heading."""
        heading = ("", "layer", "largest difference", "of the largest value", "explained up to")
        rows = [
            (
                "ok" if layer.is_explained else "warning",
                f"{layer.name} ({layer.kind})",
                f"{layer.difference:.2g}",
                f"{layer.relative:.1e}",
                f"{layer.explained:.2g}",
            )
            for layer in self.layers
        ]
        return [heading, *rows]


def compare(
    model,
    batch,
    *,
    backend: str | None = None,
    precision: str | None = None,
    timeout: float | None = None,
) -> Comparison:
    """Run a model on the host in float32 and on one core, and compare the outputs layer by layer.

    Both run in evaluation mode without gradients, in a worker; the model given is not changed. A layer is a module that
    calls no other. What a `forward` does between its modules is seen in the next module's output, or in the model's.

    What is explained: the host runs the model a second time, with the factors of every matrix product and convolution
    rounded as the device rounds them. Four times the difference which that makes to a layer is explained, and beside it
    one such rounding of the layer's largest value. A part of 2**-14 of that value is always explained: sums in another
    order, the device's own exp. So on a TPU bfloat16 products are explained, and on XLA:CPU and CPUs they are not.

    Args:
        model: a torch.nn.Module on the CPU.
        batch: what it is called with: a tensor, a tuple of its arguments, or a dict of them by name. A few samples are
            enough: the output of every layer is held three times.
        backend, precision, timeout: as in `launch`.

    Raises:
        TypeError: the model is no module.
        WorkerFailed: the model raised an error, or took different ways on host and device.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"compare takes a torch.nn.Module, got {type(model).__name__}")

    options = {"backend": backend, "precision": precision, "timeout": timeout}
    run = launch(_layer_differences, model, batch, precision, cores=1, progress="off", **options)
    bits, layers = run.results[0]
    return Comparison(tuple(layers), run.device, bits)


def _layer_differences(core: Core, model, batch, precision: str | None) -> tuple[int, list[LayerDifference]]:
    import torch
    from torch.utils import _pytree as tree

    bits = _product_bits(core.backend, precision)
    host = _layer_outputs(copy.deepcopy(model), batch)
    with _rounded_products(bits):
        rounded = _layer_outputs(copy.deepcopy(model), batch)
    on_device = tree.tree_map_only(torch.Tensor, lambda tensor: core.to_device([tensor])[0], batch)
    device = core.to_host(_layer_outputs(core.model(model), on_device))
    if host.keys() != device.keys():
        one_side = sorted({name for name, _ in host.keys() ^ device.keys()})
        raise WrongValue(
            f"the model takes another way on {core.device} than on the host",
            found=f"only one of them computes {', '.join(one_side[:5])}",
            fix="compare with a batch for which its forward() does not decide by values or by the device",
        )
    layers = [_judge(*layer, output, rounded.get(layer, output), device[layer], bits) for layer, output in host.items()]
    return bits, layers


def _product_bits(backend, precision: str | None) -> int:
    """Return how many significant bits products keep of their float32 factors with this precision; 24 are all."""
    if backend.device.type == "cuda":
        return 24 if precision == "highest" else 11  # TF32, where it is used: torch's default in convolutions
    if not backend.in_graph:  # no chip
        return 24
    # One, three and six bfloat16 products: the numbers of torch_xla.backends.set_mat_mul_precision.
    return {"high": 14, "highest": 22}.get(precision, 8)


def _judge(name: str, kind: str, host, rounded, device, bits: int) -> LayerDifference:
    largest = _largest(host)
    by_rounding = _difference(host, rounded)
    explained = _FACTOR * by_rounding + (2.0**-bits if by_rounding else 0) * largest + _FLOAT32_ERROR * largest
    difference = _difference(host, device)
    relative = difference / largest if largest else float(difference > 0)
    return LayerDifference(name, kind, difference, relative, explained)


def _difference(one, other) -> float:
    """Return the largest absolute difference; equal infinities and two NaN do not differ."""
    import torch

    one, other = one.double(), other.double()
    alike = (one == other) | (one.isnan() & other.isnan())
    return _largest(
        torch.where(alike, 0.0, (one - other).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))), finite=False
    )


def _largest(tensor, *, finite: bool = True) -> float:
    values = tensor.double().abs()
    values = values[values.isfinite()] if finite else values
    return values.max().item() if values.numel() else 0.0


def _layer_outputs(model, batch) -> dict[tuple[str, str], object]:
    """Return a copy of the tensors of every layer, in the order of their computation, by (name, class)."""
    import torch

    outputs: dict[tuple[str, str], object] = {}
    calls_others = [False]  # of each module that is being called, the innermost last
    names = {module: name or "the model" for name, module in model.named_modules()}

    def before(module, inputs) -> None:
        calls_others[-1] = True
        calls_others.append(False)

    def after(module, inputs, output) -> None:
        if not calls_others.pop() or module is model:
            _keep(outputs, names[module], type(module).__name__, output)

    model.eval()
    for module in names:
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    with torch.no_grad(), _no_shortcuts():
        if isinstance(batch, dict):
            model(**batch)
        else:
            model(*batch) if isinstance(batch, tuple | list) else model(batch)
    return outputs


def _keep(outputs: dict, name: str, kind: str, output: object) -> None:
    import torch
    from torch.utils import _pytree as tree

    tensors = [leaf for leaf in tree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    for index, tensor in enumerate(tensors):
        part = f"{name}[{index}]" if len(tensors) > 1 else name
        calls = sum(one == part or one.startswith(f"{part} (") for one, _ in outputs)
        outputs[part + f" ({calls + 1})" * bool(calls), kind] = tensor.clone()  # the next layer may work in place


@contextlib.contextmanager
def _no_shortcuts() -> Iterator[None]:
    """Have transformer layers call their parts: on a CPU, in evaluation, one call takes the place of all."""
    import torch

    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _rounded_products(bits: int) -> Iterator[None]:
    """Round the factors of every product in float32 to so many significant bits; sums stay float32."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils._python_dispatch import TorchDispatchMode

    class Rounding(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            places = _FACTORS.get(operation._schema.name.removeprefix("aten::"), ())
            args = [_rounded(arg, bits) if place in places else arg for place, arg in enumerate(args)]
            return operation(*args, **(kwargs or {}))

    if bits == _FLOAT32_BITS:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH), Rounding():  # attention as its two products, which one operation would hide
        yield


def _rounded(value, bits: int):
    """Return a float32 tensor rounded to so many significant bits, halves to even; anything else as it is."""
    import torch

    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return value
    dropped = _FLOAT32_BITS - bits
    raw = value.contiguous().view(torch.int32)
    halves_to_even = (1 << (dropped - 1)) - 1 + ((raw >> dropped) & 1)
    rounded = ((raw + halves_to_even) & -(1 << dropped)).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value)
