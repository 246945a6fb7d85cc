"""Gradients averaged over cores, which need not have one for the same parameters."""

import weakref
from collections.abc import Callable, Iterable, Sequence

from tpukit.essentials.backends import Backend
from tpukit.essentials.display import InvalidValueError, explain, first_few

_AFTER_MODEL = "make it after core.model, which returns a copy: torch.optim.Adam(model.parameters())"


class GradientAverage:
    """Averages the gradients of optimisers, in one message that has the same layout on every core.

    A layer that this core's share of the batch did not reach has no gradient here and may have one on another core. So
    every parameter that requires one sends its gradient, or zeros, and beside them goes one number per parameter:
    whether it has a gradient. Afterwards a parameter has the mean gradient if any core had one, and None if no core
    had: an optimiser does not touch that one, while zeros would decay it.

    A step in which every parameter has its gradient sends those numbers and reads none. A core that lacks some reads
    them; on a TPU, where reading waits for the device, once, unless it lacks others in other steps: there all cores
    have to run one program, and layers that come and go are looked at in each step.

    Args:
        names_of: the names of parameters, for what is told of them.
        say: takes a line for the user.
    """

    def __init__(self, backend: Backend, names_of: Callable[[list], list[str]], say: Callable[[str], None]):
        self._backend, self._names_of, self._say = backend, names_of, say
        self._read = weakref.WeakKeyDictionary()  # by optimiser, by what this core has: what any core has

    def __call__(self, optimizer, also: Iterable = ()) -> None:
        """Average, together; `also` are float tensors, overwritten with their mean in the same message."""
        import torch

        first = optimizer not in self._read
        if self._backend.world_size == 1 and not first:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        parameters = [parameter for parameter in parameters if parameter.requires_grad or parameter.grad is not None]
        here = tuple(parameter.grad is not None for parameter in parameters)
        if self._backend.world_size == 1:
            self._read[optimizer] = {}
            self._say_if_none(here)
            return
        device = self._backend.device
        if first and (elsewhere := [one for one in parameters if one.device.type != device.type]):
            raise InvalidValueError(
                "the optimizer's parameters are not on this core's device",
                found=f"{len(elsewhere)} of {len(parameters)} are on {elsewhere[0].device}, the device is {device}",
                fix=_AFTER_MODEL,
            )
        if sparse := [one for one in parameters if one.grad is not None and one.grad.layout is not torch.strided]:
            raise InvalidValueError(
                "sparse gradients cannot be averaged over the cores: each has others",
                found=f"the gradient of {first_few(self._names_of(sparse), 5)} is {sparse[0].grad.layout}",
                fix="torch.nn.Embedding(..., sparse=False), and an optimizer for dense gradients; or cores=1",
            )
        if self._backend.traced and not self._backend.in_graph:
            # XLA:CPU: that of `weight.sum()` is one number seen in every place, and what is written there in place
            # comes out as something else (torch_xla 2.9).
            for parameter, has in zip(parameters, here, strict=True):
                parameter.grad = parameter.grad.clone() if has else None
        for parameter in parameters if self._backend.in_graph else ():
            # What several calls of `backward` have added up in place: of it SGD's momentum, which keeps it, would go
            # back behind the all-reduce, to this core's own (torch_xla 2.9).
            if parameter.grad is not None and parameter.grad._version:
                parameter.grad = parameter.grad.clone()
        pairs = zip(parameters, here, strict=True)
        gradients = [parameter.grad if has else torch.zeros_like(parameter) for parameter, has in pairs]
        if all(here):
            numbers = torch.ones(len(here), device=device)
        else:
            (numbers,) = self._backend.to_device([torch.tensor(here, dtype=torch.float32)])
        self._backend.average([*gradients, numbers, *also])
        read = self._read.setdefault(optimizer, {})
        read.setdefault(here)
        if all(here):
            return
        anywhere = self._anywhere(optimizer, parameters, here, numbers)
        if first:
            self._say_if_none(anywhere)
        for parameter, gradient, has in zip(parameters, gradients, anywhere, strict=True):
            parameter.grad = gradient if has else None

    def _say_if_none(self, anywhere: Sequence[bool]) -> None:
        if anywhere and not any(anywhere):
            self._say(explain("no parameter of the optimizer has a gradient: it trains nothing", fix=_AFTER_MODEL))

    def _anywhere(self, optimizer, parameters: list, here: tuple, numbers) -> list[bool]:
        read = self._read[optimizer]
        if read[here] is None or len(read) > 1 or not self._backend.in_graph:
            shares = self._backend.to_cpu([numbers])[0].tolist()
            mixed = [parameter for parameter, share in zip(parameters, shares, strict=True) if 0 < share < 1]
            if mixed and self._backend.in_graph:
                raise InvalidValueError(
                    "the cores use different layers in one step, which on chips would be two programs that wait for "
                    "each other",
                    found=f"gradients on some cores and none on others: {first_few(self._names_of(mixed), 5)}",
                    fix=(
                        "the same layers on every core: FitOptions(same_seed=True), or core.same_seed(step) in a loop of "
                        "your own, for layers dropped at random; for experts and early exits compute all, times 0 or 1"
                    ),
                )
            read[here] = [share > 0 for share in shares]
        return read[here]
