"""Gradients averaged over cores, which need not have one for the same parameters."""

import weakref
from collections.abc import Iterable

from tpukit.essentials.backends import Backend


class GradientAverage:
    """Averages the gradients of optimisers, in one message that has the same layout on every core.

    A layer that this core's share of the batch did not reach has no gradient here and may have one on another core. So
    every parameter that requires one sends its gradient, or zeros, and beside them goes one number per parameter:
    whether it has a gradient. Afterwards a parameter has the mean gradient if any core had one, and None if no core
    had: an optimiser does not touch that one, while zeros would decay it.

    A step in which every parameter has its gradient sends those numbers and reads none. A core that lacks some reads
    them; on a TPU, where reading waits for the device, only when it first lacks those: there all cores run one program,
    so what they lack together changes together.
    """

    def __init__(self, backend: Backend):
        self._backend = backend
        self._read = weakref.WeakKeyDictionary()  # by optimiser, by what this core has: what any core has

    def __call__(self, optimizer, also: Iterable = ()) -> None:
        """Average, together; `also` are float tensors, overwritten with their mean in the same message."""
        import torch

        if self._backend.world_size == 1:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        parameters = [parameter for parameter in parameters if parameter.requires_grad or parameter.grad is not None]
        here = tuple(parameter.grad is not None for parameter in parameters)
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
            numbers = torch.ones(len(here), device=self._backend.device)
        else:
            (numbers,) = self._backend.to_device([torch.tensor(here, dtype=torch.float32)])
        self._backend.average([*gradients, numbers, *also])
        if all(here):
            return
        anywhere = self._anywhere(optimizer, here, numbers)
        for parameter, gradient, has in zip(parameters, gradients, anywhere, strict=True):
            parameter.grad = gradient if has else None

    def _anywhere(self, optimizer, here: tuple, numbers) -> list[bool]:
        read = self._read.setdefault(optimizer, {}) if self._backend.in_graph else {}
        if here not in read:
            read[here] = [number > 0 for number in self._backend.to_cpu([numbers])[0].tolist()]
        return read[here]
