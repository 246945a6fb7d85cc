"""Average gradients over the cores, even if a parameter has a gradient on some cores only.

A layer that a core's share of the batch did not reach has no gradient on that core. A collective
needs the same layout on every core, so each core sends a gradient or zeros for every parameter
and, in the same message, one flag per parameter:

               core 0      core 1                mean, on both cores
    a.grad     2.0         4.0                   3.0
    b.grad     6.0         None, sent as 0.0     3.0
    flags      1, 1        1, 0                  1, 0.5

A mean flag above 0 says that some core has a gradient, so both cores use 3.0 for b. If no core has
a gradient for a parameter, its gradient remains None: with a gradient of zeros, weight decay and
momentum would still change the parameter.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence

from tpukit.essentials.backends import Backend
from tpukit.essentials.display import InvalidValueError, explain, first_few
from tpukit.essentials.launcher.core_values import parameters_of

_REMAKE = (
    "make the optimizer from the model that core.model returns: "
    "torch.optim.Adam(model.parameters())"
)


class GradientAverage:
    """Averages the gradients of optimizers over all cores, in a single message per step."""

    def __init__(self, backend: Backend, names_of: Callable[[list], list[str]], say: Callable):
        self._backend = backend
        self._names_of = names_of  # returns the names of parameters
        self._say = say  # prints a line for the user
        # Per optimizer: {flags of the parameters with a gradient on this core: flags of those with
        # a gradient on any core}, so that on a TPU a pattern that came before needs no reading.
        self._anywhere: weakref.WeakKeyDictionary[object, dict] = weakref.WeakKeyDictionary()

    def forget(self) -> None:
        """Forget which parameters had a gradient, after a run that failed or was interrupted."""
        # Some cores may have recorded their flags before the error, and others not. On a TPU a core
        # with recorded flags would then skip a wait for the device, in which other cores are.
        self._anywhere.clear()

    def __call__(self, optimizer, also: Iterable = ()) -> None:
        """Average the gradients of an optimizer, and the float tensors in `also`. Collective."""
        is_first = optimizer not in self._anywhere
        if self._backend.world_size == 1 and not is_first:
            return  # there is nothing to average; the first call warns if no gradient exists
        parameters = parameters_of(optimizer)
        trained = list(filter(_is_trained, parameters))
        here = tuple(one.grad is not None for one in trained)
        if self._backend.world_size == 1:
            self._anywhere[optimizer] = {}
            self._warn_if_none(here)
            return
        if is_first:
            self._check_device(trained)
        reached = [one for one in trained if one.grad is not None]
        self._check_dense(reached)
        self._work_around_torch_xla(reached)
        gradients, flags = self._exchange(trained, here, also)
        known = self._anywhere.setdefault(optimizer, {})
        if all(here):
            # Every parameter has a gradient on this core, so no flag of another core is needed.
            known[here] = here
            return
        # Reading the flags waits for the device. On a TPU all cores must use the same layers, so
        # one reading per pattern is enough.
        is_settled = self._backend.in_graph and known.keys() == {here}
        if not is_settled:
            known[here] = self._read(flags, trained)
        if is_first:
            self._warn_if_none(known[here])
        for parameter, gradient, is_used in zip(trained, gradients, known[here], strict=True):
            parameter.grad = gradient if is_used else None

    def _work_around_torch_xla(self, parameters: list) -> None:
        """Clone the gradients that torch_xla 2.9 would average wrongly.

        On XLA:CPU, the gradient of `weight.sum()` is one number that is expanded to the weight's
        shape, and writing into such a tensor gives wrong values. On a TPU, several calls of
        `backward` may have added to a gradient. If an optimizer then keeps this tensor, as SGD's
        momentum does, the tensor loses the average again.
        """
        in_graph = self._backend.in_graph
        is_xla_cpu = self._backend.traced and not in_graph
        for parameter in parameters:
            was_added_to = parameter.grad._version > 0
            if is_xla_cpu or (in_graph and was_added_to):
                parameter.grad = parameter.grad.clone()

    def _exchange(self, parameters: list, here: Sequence[bool], also: Iterable) -> tuple:
        """Average the gradients over the cores; return them and the averaged flags of `here`.

        A parameter without a gradient on this core counts as zeros. The results are on the device.
        """
        import torch

        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        if all(here):
            flags = torch.ones(len(here), device=self._backend.device)
        else:
            (flags,) = self._backend.to_device([torch.tensor(here, dtype=torch.float32)])
        self._backend.average([*gradients, flags, *also])
        return gradients, flags

    def _read(self, flags, parameters: list) -> list[bool]:
        """Return which parameters have a gradient on any core; this waits for the device."""
        shares = self._backend.to_cpu([flags])[0].tolist()
        mixed = [one for one, share in zip(parameters, shares, strict=True) if 0 < share < 1]
        if mixed and self._backend.in_graph:
            names = first_few(self._names_of(mixed), 5)
            raise InvalidValueError(
                "the cores use different layers in one step: on a TPU "
                "they would wait for each other forever",
                found=f"gradients on some cores and none on others: {names}",
                fix="use the same layers on every core; if layers are dropped at random, "
                "FitOptions(same_seed=True), or core.same_seed(step) in a loop of your own; "
                "if the model chooses among experts or exits, compute all of them and multiply "
                "each by 0 or 1",
            )
        return [share > 0 for share in shares]

    def _check_device(self, parameters: list) -> None:
        if elsewhere := [one for one in parameters if one.device.type != self._backend.device.type]:
            raise InvalidValueError(
                "the optimizer's parameters are not on this core's device",
                found=f"{len(elsewhere)} of {len(parameters)} are on {elsewhere[0].device}, "
                f"the device is {self._backend.device}",
                fix=_REMAKE,
            )

    def _check_dense(self, parameters: list) -> None:
        import torch

        if sparse := [one for one in parameters if one.grad.layout is not torch.strided]:
            names = first_few(self._names_of(sparse), 5)
            raise InvalidValueError(
                "sparse gradients cannot be averaged over the cores, because the gradients of each "
                "core have different rows",
                found=f"the gradient of {names} is {sparse[0].grad.layout}",
                fix=(
                    "torch.nn.Embedding(..., sparse=False), and an "
                    "optimizer for dense gradients; or cores=1"
                ),
            )

    def _warn_if_none(self, has_gradient: Sequence[bool]) -> None:
        if has_gradient and not any(has_gradient):
            fact = "no parameter of the optimizer has a gradient: it trains nothing"
            self._say(explain(fact, fix=_REMAKE))


def _is_trained(parameter) -> bool:
    """Return whether a parameter is trained, or has a gradient although it is frozen."""
    return parameter.requires_grad or parameter.grad is not None
