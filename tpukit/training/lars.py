"""LARS, an optimiser for large batches; importing this file loads torch, as `tpukit.training.LARS` does when used."""

from collections.abc import Callable, Iterable

import torch

from tpukit.essentials.display import InvalidValueError


class LARS(torch.optim.Optimizer):
    """SGD with momentum in which every layer has a learning rate of its own, for batches of thousands.

    A layer's step is kept in proportion to the size of its weights, so a large learning rate does not break the layers
    whose gradients are large beside their weights (You, Gitman and Ginsburg 2017, https://arxiv.org/abs/1708.03888):

        rate = lr * trust * |weights| / (|gradient| + weight_decay * |weights|)
        momentum = momentum * momentum_before + rate * (gradient + weight_decay * weights)
        weights = weights - momentum

    Biases and the parameters of BatchNorm, which have one axis, take plain steps without weight decay: their norms say
    little, and the paper's successors leave them out. Use a warmup, as the paper does:

        optimizer = tpukit.training.LARS(model.parameters(), lr=8.0, weight_decay=1e-4)
        schedule = tpukit.training.schedules.cosine(optimizer, epochs * len(batches), warmup=len(batches))

    Nothing is read by the host: the norms stay on the device, and the rate may change every step without a new graph.

    Args:
        params: parameters, or groups of them, as for any of torch's optimisers.
        lr: the learning rate of the whole model, above 0; large, 1 to 30, since `trust` makes it small.
        momentum: 0 to below 1; 0 for none.
        weight_decay: 0 for none.
        trust: the paper's coefficient: the part of a layer's norm that a step may be, for lr=1.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self, params: Iterable, lr: float, *, momentum: float = 0.9, weight_decay: float = 0.0, trust: float = 0.001
    ):
        if lr <= 0 or not 0 <= momentum < 1 or weight_decay < 0 or trust <= 0:
            raise InvalidValueError(
                "LARS takes lr and trust above 0, momentum of 0 to below 1, weight_decay of 0 or more",
                found=f"{lr=}, {momentum=}, {weight_decay=}, {trust=}",
                fix="LARS(model.parameters(), lr=1.0) leaves the others at their defaults",
            )
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Change the weights by one step; returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    self._step(weights, group)
        return loss

    def _step(self, weights: torch.Tensor, group: dict) -> None:
        gradient, rate = weights.grad, group["lr"]
        if weights.ndim > 1:
            size, slope = torch.linalg.vector_norm(weights), torch.linalg.vector_norm(gradient)
            # On the device, where an `if` would be a copy to the host: layers of zeros take the plain step.
            ratio = group["trust"] * size / (slope + group["weight_decay"] * size)
            rate = group["lr"] * torch.where((size > 0) & (slope > 0), ratio, 1.0)
            gradient = gradient + group["weight_decay"] * weights if group["weight_decay"] else gradient
        change = gradient * rate
        if group["momentum"]:
            state = self.state[weights]
            before = state.get("momentum_buffer")
            change = change if before is None else group["momentum"] * before + change
            state["momentum_buffer"] = change
        weights.sub_(change)
