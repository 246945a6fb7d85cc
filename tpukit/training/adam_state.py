"""Create Adam's state before the first step of `fit`, so that all steps have the same graph.

    PyTorch     step 1 creates the averages as zeros, later steps read them    2 graphs
    tpukit      the averages are on the device before step 1                   1 graph

Each graph takes XLA about as long to compile. So with one graph in place of two, a run starts in
about half the time.
The created tensors are those that PyTorch creates in its first step. So all results have the same
bits: `tests/training/test_adam_state.py` compares them on XLA:CPU. On a TPU, they have not been
compared.

Other optimizers create their state in their first step. For SGD with momentum, zeros would not have
the same bits: its first momentum is a copy of the gradient, also with `dampening`, and keeps -0.0.
"""

import contextlib
from collections.abc import Iterator

# With these settings Adam has other tensors in its state, or stores them elsewhere.
_UNUSUAL = ("amsgrad", "capturable", "differentiable", "fused")


@contextlib.contextmanager
def adam_state_created(core, optimizer) -> Iterator[None]:
    """Create Adam's state at the start of a block that runs an optimizer step.

    The step then need not create it. At the end of the block, the state of parameters that had no
    gradient is deleted, because PyTorch creates no state for them.

    Args:
        core: this core.
        optimizer: any optimizer. A state is created only for torch's Adam and AdamW, if they have
            none yet. No state is created for a sharded model, in a preflight, or without XLA.
    """
    created = []
    if _needs_state(core, optimizer):
        for group in optimizer.param_groups:
            if not any(group[name] for name in _UNUSUAL):
                created += _create(core.backend, optimizer, group["params"])
    yield
    for param in created:
        if optimizer.state[param]["step"] == 0:
            del optimizer.state[param]


def _needs_state(core, optimizer) -> bool:
    import torch

    # Subclasses may have another state.
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    # Preflight finds the batches of a step among the tensors that it sends to the device. The state
    # of a sharded model is sharded after its first step.
    is_usual = core.backend.traced and not core.backend.is_recording and core.chips == 1
    return is_adam and is_usual and not optimizer.state


def _create(backend, optimizer, params: list) -> list:
    """Create the state of parameters; return those that have one now."""
    import torch

    # The dtype in which Adam counts steps. It is float32 also if the default is bfloat16.
    is_double = torch.get_default_dtype() == torch.float64
    dtype = torch.float64 if is_double else torch.float32
    created = []
    for param in params:
        if not param.requires_grad or param.device.type != "xla":
            continue
        # Sent from the host: zeros made on the device would be one more graph to compile.
        zeros = [torch.zeros(param.shape, dtype=param.dtype) for _ in range(2)]
        average, square = backend.to_device(zeros)
        optimizer.state[param] = {
            "step": torch.zeros((), dtype=dtype),
            "exp_avg": average,
            "exp_avg_sq": square,
        }
        created.append(param)
    return created
