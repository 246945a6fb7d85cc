"""Define LARS, an optimizer for large batches.

The class needs torch. So `tpukit.training` imports this module only when LARS is first used.
"""

from collections.abc import Callable, Iterable

import torch

from tpukit.essentials.display import InvalidValueError


class LARS(torch.optim.Optimizer):
    """SGD with momentum and a learning rate per layer, for batches of thousands.

    A layer's step is proportional to the norm of its weights. So a large learning rate does not
    destroy layers whose gradients are large relative to their weights (You, Gitman and Ginsburg
    2017, https://arxiv.org/abs/1708.03888):

        rate = lr * trust * |weights| / (|gradient| + weight_decay * |weights|)
        change = momentum * change_before + rate * (gradient + weight_decay * weights)
        weights = weights - change

    For parameters with at most one dimension, such as biases and those of BatchNorm, the rate is
    `lr`, without weight decay, as in later papers, because their norms mean little. Use a warmup,
    as the paper does:

        optimizer = tpukit.training.LARS(model.parameters(), lr=8.0, weight_decay=1e-4)
        steps = epochs * len(batches)
        scheduler = tpukit.training.schedules.cosine(optimizer, steps, warmup=len(batches))

    No value is copied to the host: the norms stay on the device. The learning rate may change in
    every step without a new graph.

    Args:
        params: parameters, or groups of parameters, as for any optimizer of torch.
        lr: the learning rate of the whole model, above 0. Usual values are 1 to 30, because each
            layer's rate is multiplied by `trust`.
        momentum: 0 (none) to below 1.
        weight_decay: 0 (none) or more.
        trust: the paper's trust coefficient, above 0: with lr=1, the norm of a layer's step divided
            by the norm of its weights.

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
        # `not ... > 0` and not `<= 0`, so that NaN raises the error, too.
        if not lr > 0 or not 0 <= momentum < 1 or not weight_decay >= 0 or not trust > 0:
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
        """Update the weights by one step; return the closure's loss, or None without a closure."""
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
            # The paper's local rate: trust * |w| / (|g| + decay * |w|).
            size = torch.linalg.vector_norm(weights)
            slope = torch.linalg.vector_norm(gradient)
            ratio = group["trust"] * size / (slope + decay * size)
            # If weights or gradients are all 0, use the plain rate. `torch.where` decides on the
            # device, because an `if` would copy the norms to the host.
            rate = group["lr"] * torch.where((size > 0) & (slope > 0), ratio, 1.0)
            if decay:
                gradient = gradient + decay * weights
        change = gradient * rate
        # The first step has no momentum yet, as in torch's SGD.
        if group["momentum"]:
            state = self.state[weights]
            before = state.get("momentum_buffer")
            if before is not None:
                change = group["momentum"] * before + change
            state["momentum_buffer"] = change
        weights.sub_(change)
