"""Compare the outputs of a model's layers on the device with those on the host.

A device computes products with fewer bits, so its outputs differ from the host's. Therefore the
host runs the model a second time, with the factors of every product rounded as on the device. This
shows how large a difference the device's precision explains:

    layer      host     host, rounded    device    host - device    explained up to
    conv       1.250    1.252            1.253     0.003            0.013            ok
    head       0.500    0.501            0.300     0.200            0.006            wrong
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tpukit.essentials.display import InvalidValueError, Table
from tpukit.essentials.launcher import Core, launch

# Significant bits of a number in these formats.
_FLOAT32_BITS = 24
_BFLOAT16_BITS = 8
_TF32_BITS = 11
# A TPU computes a float32 product as three ("high") or six ("highest") bfloat16 products. The names
# are those of torch_xla.backends.set_mat_mul_precision.
_BITS_OF_PRECISION = {"high": 14, "highest": 22}

# The limit is this factor times the effect of rounding on the host: even if two computers round
# alike, they add in different orders, so their largest errors differ.
_FACTOR = 4
# The limit without rounded products, as a share of a layer's largest value: the device adds in
# another order, and has its own exp and rsqrt.
_FLOAT32_ERROR = 2.0**-14
# For each operation of torch, the positions of the arguments that are factors of a product. A term
# that is added to the product is not rounded.
_FACTORS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "linear": (0, 1),
    "convolution": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "addmv": (1, 2),
    "_trilinear": (0, 1, 2),
    # An LSTM on a CPU, all its steps: inputs, weights, the first state.
    "mkldnn_rnn_layer": (0, 1, 2, 5),
}


@dataclass(frozen=True)
class LayerDifference:
    """The difference between the outputs of a layer on the device and on the host.

    Attributes:
        name: the layer's name in `model.named_modules()`, with "(2)" for its second call and "[0]"
            for the first of several outputs.
        kind: the name of the layer's class.
        difference: the largest absolute difference between two values. It is infinite if the
            two values differ, and one of them is infinite or NaN. Two NaN count as equal.
        relative: `difference` divided by the largest absolute value on the host.
        explained: the largest absolute difference that the device's precision explains.
    """

    name: str
    kind: str
    difference: float
    relative: float
    explained: float

    @property
    def is_explained(self) -> bool:
        """Whether the device's precision is enough to explain the difference."""
        return self.difference <= self.explained


@dataclass(frozen=True, repr=False)
class Comparison(Table):
    """The result of `compare`: a table with a row per layer.

    Attributes:
        layers: the differences in the order of computation; the last is the output of the model.
        device: a description of the device.
        bits: significant bits to which the device rounds the float32 factors of matrix products and
            convolutions: 8 for bfloat16, 24 for no rounding.
    """

    layers: tuple[LayerDifference, ...]
    device: str
    bits: int

    @property
    def first(self) -> LayerDifference | None:
        """The first layer whose difference is not explained; None if there is none.

        Later layers use its output, so their differences may follow from it.
        """
        return next((layer for layer in self.layers if not layer.is_explained), None)

    @property
    def title(self) -> str:
        """A line with the device, its precision, and the first layer beyond the limit."""
        if self.bits == _FLOAT32_BITS:
            precision = "float32 explains"
        else:
            precision = f"products of {self.bits} significant bits explain"
        outcome = "all layers within"
        if self.first:
            outcome = f"{self.first.name} is the first layer beyond"
        return f"{self.device} beside this host: {outcome} what {precision}"

    def rows(self) -> list[tuple[str, ...]]:
        """Return a heading, then (state, layer, difference, relative difference, explained)."""
        rows = [("", "layer", "largest difference", "of the largest value", "explained up to")]
        for layer in self.layers:
            row = (
                "ok" if layer.is_explained else "warning",
                f"{layer.name} ({layer.kind})",
                f"{layer.difference:.2g}",
                f"{layer.relative:.1e}",
                f"{layer.explained:.2g}",
            )
            rows.append(row)
        return rows


def compare(
    model,
    batch,
    *,
    backend: str | None = None,
    matmul_precision: str | None = None,
    timeout: float | None = None,
) -> Comparison:
    """Run a model on the host in float32 and on a core; compare the outputs of all layers.

    Both runs are in a worker, in evaluation mode and without gradients; the given model is not
    changed. A layer is a module that calls no other module. The effect of an operation outside of
    layers, such as the sum of a skip connection, appears in the output of the next layer or of the
    model.

    The device's precision explains a difference up to a limit, which is the sum of

    - four times the change of the layer's output on the host if the factors of all matrix products
      and convolutions are rounded as on the device;
    - one rounding of the output's largest value, if the layer has such a product;
    - 2**-14 of the largest value, because the device adds in another order and has its own exp.

    By default, a TPU rounds factors to bfloat16. On CUDA, the limit allows TF32, because torch by
    default rounds the factors of convolutions to TF32. XLA:CPU and CPUs do not round factors, so
    the limit is much smaller.

    Args:
        model: a torch.nn.Module on the CPU, in float32. In bfloat16, the limit is too small.
        batch: the arguments of the model: a tensor, a tuple or list of arguments, or a dict of
            keyword arguments. Pass a few samples only, because the output of every layer is stored
            three times.
        backend, matmul_precision, timeout: as in `launch`.

    Returns:
        a `Comparison`, which a notebook shows as a table.

    Raises:
        TypeError: the model is not a module.
        WorkerError: the model raised an error, or used different layers on host and device.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"compare takes a torch.nn.Module, got {type(model).__name__}")
    options = {"backend": backend, "matmul_precision": matmul_precision, "timeout": timeout}
    run = launch(_compared, model, batch, matmul_precision, cores=1, progress="off", **options)
    compared = run.results[0]
    return Comparison(compared.layers, run.device, bits=compared.bits)


class _Compared(NamedTuple):
    """The differences, and the device's significant bits, as the worker returns them."""

    layers: tuple[LayerDifference, ...]
    bits: int


def _compared(core: Core, model, batch, precision: str | None) -> _Compared:
    import torch
    from torch.utils import _pytree as tree

    bits = _product_bits(core.backend, precision)
    # Copies, because `_layer_outputs` adds hooks and changes the mode.
    on_host = _layer_outputs(copy.deepcopy(model), batch)
    with _rounded_products(bits):
        rounded = _layer_outputs(copy.deepcopy(model), batch)
    sent = tree.tree_map_only(torch.Tensor, lambda tensor: core.to_device([tensor])[0], batch)
    on_device = core.to_host(_layer_outputs(core.model(model), sent))
    if on_host.keys() != on_device.keys():
        one_side = sorted({layer.name for layer in on_host.keys() ^ on_device.keys()})
        raise InvalidValueError(
            f"the model uses other layers on {core.device} than on the host",
            found=f"only one of the two computes {', '.join(one_side[:5])}",
            fix="use a batch for which forward() does not branch on values or on the device",
        )
    layers = [
        _judge(
            layer,
            host=output,
            rounded=rounded.get(layer, output),
            device=on_device[layer],
            bits=bits,
        )
        for layer, output in on_host.items()
    ]
    return _Compared(tuple(layers), bits)


def _product_bits(backend, precision: str | None) -> int:
    """Return the significant bits to which a device rounds the float32 factors of products."""
    if backend.device.type == "cuda":
        # By default, torch uses TF32 in convolutions only. But the limit of all layers allows TF32.
        return _FLOAT32_BITS if precision == "highest" else _TF32_BITS
    is_chip = backend.in_graph
    if not is_chip:
        return _FLOAT32_BITS
    return _BITS_OF_PRECISION.get(precision, _BFLOAT16_BITS)


class _Layer(NamedTuple):
    name: str
    kind: str


def _judge(layer: _Layer, *, host, rounded, device, bits: int) -> LayerDifference:
    """Return the difference of a layer's outputs on host and device, and the limit for it."""
    largest = _largest_finite(host)
    by_rounding = _difference(host, rounded)
    explained = _FACTOR * by_rounding + _FLOAT32_ERROR * largest
    # Only if the layer has a product: add one rounding of the largest value.
    if by_rounding:
        explained += 2.0**-bits * largest
    difference = _difference(host, device)
    relative = difference / largest if largest else float(difference > 0)
    return LayerDifference(
        layer.name,
        layer.kind,
        difference=difference,
        relative=relative,
        explained=explained,
    )


def _difference(one, other) -> float:
    """Return the largest absolute difference. Equal infinities, and two NaN, count as equal."""
    import torch

    one = _as_float64(one)
    other = _as_float64(other)
    is_alike = (one == other) | (one.isnan() & other.isnan())
    infinity = float("inf")
    differences = (one - other).abs().nan_to_num(nan=infinity, posinf=infinity)
    return _largest(torch.where(is_alike, 0.0, differences))


def _largest_finite(tensor) -> float:
    values = _as_float64(tensor).abs()
    return _largest(values[values.isfinite()])


def _as_float64(tensor):
    """Return a tensor as float64; complex numbers become pairs of their two parts."""
    import torch

    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _largest(values) -> float:
    return values.max().item() if values.numel() else 0.0


def _layer_outputs(model, batch) -> dict[_Layer, object]:
    """Return copies of the output tensors of all layers and of the model, in computation order."""
    import torch

    outputs: dict[_Layer, object] = {}
    # A stack with an entry for each module whose forward is running, the innermost last. An entry
    # is True if this module has called another module, so it is not a layer.
    calls_others = [False]
    names = {module: name or "the model" for name, module in model.named_modules()}

    def before(module, inputs) -> None:
        calls_others[-1] = True
        calls_others.append(False)

    def after(module, inputs, output) -> None:
        is_layer = not calls_others.pop()
        if is_layer or module is model:
            _keep(outputs, _Layer(names[module], type(module).__name__), output)

    model.eval()
    for module in names:
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    with torch.no_grad(), _no_shortcuts():
        if isinstance(batch, dict):
            model(**batch)
        elif isinstance(batch, tuple | list):
            model(*batch)
        else:
            model(batch)
    return outputs


def _keep(outputs: dict[_Layer, object], layer: _Layer, output: object) -> None:
    """Add copies of a call's output tensors to `outputs`, under names that no other call has."""
    import torch
    from torch.utils import _pytree as tree

    tensors = [leaf for leaf in tree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    for index, tensor in enumerate(tensors):
        name = f"{layer.name}[{index}]" if len(tensors) > 1 else layer.name
        earlier = [known for known in outputs if _is_call_of(known.name, name)]
        if earlier:
            name += f" ({len(earlier) + 1})"
        outputs[_Layer(name, layer.kind)] = tensor.clone()  # the next layer may work in place


def _is_call_of(known: str, name: str) -> bool:
    return known == name or known.startswith(f"{name} (")


@contextlib.contextmanager
def _no_shortcuts() -> Iterator[None]:
    """Make transformer layers call their submodules in the block.

    On a CPU in evaluation mode, torch would otherwise replace them by a single fused operation.
    """
    import torch

    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _rounded_products(bits: int) -> Iterator[None]:
    """Round the factors of every float32 product in the block to `bits` significant bits.

    Sums stay float32. Attention is computed by two separate products, because the factors in a
    fused operation could not be rounded.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if bits == _FLOAT32_BITS:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH), _rounding_mode(lambda value: _rounded(value, bits)):
        yield


def _rounding_mode(rounded: Callable):
    """Return a TorchDispatchMode that applies `rounded` to the factors of every product."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Rounding(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            name = operation._schema.name.removeprefix("aten::")
            args = list(args)
            for place in _FACTORS.get(name, ()):
                if place < len(args):
                    args[place] = rounded(args[place])
            return operation(*args, **(kwargs or {}))

    return Rounding()


def _rounded(value, bits: int):
    """Round a float32 tensor to `bits` significant bits; return anything else unchanged.

    It rounds to the nearest number, and in a tie to the even one, as hardware does: it adds nearly
    half of the last kept bit, or exactly half if this bit is 1, and clears the lower bits.
    """
    import torch

    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return value
    dropped = _FLOAT32_BITS - bits
    raw = value.contiguous().view(torch.int32)
    just_below_half = (1 << (dropped - 1)) - 1
    last_kept_bit = (raw >> dropped) & 1
    mask = -(1 << dropped)
    rounded = ((raw + just_below_half + last_kept_bit) & mask).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value)
