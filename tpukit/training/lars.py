"""LARS, an optimizer for large batches.

Importing this module loads torch. So `tpukit.training.LARS` imports it when it is first used.
"""

from collections.abc import Callable, Iterable

import torch

from tpukit.essentials.display import InvalidValueError


class LARS(torch.optim.Optimizer):
    """SGD with momentum and a learning rate per layer, for batches of thousands.

    A layer's step is proportional to the size of its weights. So a large learning rate does not
    break layers whose gradients are large relative to their weights (You, Gitman and Ginsburg
    2017, https://arxiv.org/abs/1708.03888):

        rate = lr * trust * |weights| / (|gradient| + weight_decay * |weights|)
        momentum = momentum * momentum_before + rate * (gradient + weight_decay * weights)
        weights = weights - momentum

    Biases and the parameters of BatchNorm, which have one axis, take plain steps without weight
    decay, as in later papers, because their norms mean little. Use a warmup, as the paper does:

        optimizer = tpukit.training.LARS(model.parameters(), lr=8.0, weight_decay=1e-4)
        steps = epochs * len(batches)
        scheduler = tpukit.training.schedules.cosine(optimizer, steps, warmup=len(batches))

    The host reads nothing: the norms stay on the device, and the rate may change every step
    without a new graph.

    Args:
        params: parameters, or groups of them, as for any of torch's optimizers.
        lr: the learning rate of the whole model, above 0; large, 1 to 30, because `trust` makes
            it small.
        momentum: 0 to below 1; 0 for none.
        weight_decay: 0 for none.
        trust: the paper's coefficient, above 0: the size of a step relative to the layer's norm,
            with lr=1.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ):
        if lr <= 0 or not 0 <= momentum < 1 or weight_decay < 0 or trust <= 0:
            raise InvalidValueError(
                "LARS takes lr and trust above 0, momentum of 0 to below 1, "
                "weight_decay of 0 or more",
                found=f"{lr=}, {momentum=}, {weight_decay=}, {trust=}",
                fix="LARS(model.parameters(), lr=1.0) leaves the others at their defaults",
            )
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """Change the weights by one step; return the closure's loss, if there is one."""
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
        gradient = weights.grad
        rate = group["lr"]
        decay = group["weight_decay"]
        if weights.ndim > 1:
            size = torch.linalg.vector_norm(weights)
            slope = torch.linalg.vector_norm(gradient)
            ratio = group["trust"] * size / (slope + decay * size)
            # Layers of zeros take the plain step. On the device, because an `if` would be a copy
            # to the host.
            rate = group["lr"] * torch.where((size > 0) & (slope > 0), ratio, 1.0)
            if decay:
                gradient = gradient + decay * weights
        change = gradient * rate
        if group["momentum"]:
            state = self.state[weights]
            before = state.get("momentum_buffer")
            if before is not None:
                change = group["momentum"] * before + change
            state["momentum_buffer"] = change
        weights.sub_(change)
