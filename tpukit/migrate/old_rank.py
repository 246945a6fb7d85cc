"""A worker function of `launch` out of one that `xmp.spawn` started."""

import functools
import pickle
from collections.abc import Callable

from tpukit.essentials.data import host_numbers, put_back
from tpukit.essentials.show import Failed


def on_old_rank(fn: Callable) -> Callable:
    """Return what `launch` runs in place of `fn(rank, *args)`, which begins as a fork of `xmp.spawn` did.

    Every core draws from where the kernel's random numbers stand at this call, so a model or a split that nobody seeds
    is the same on all cores.

    Raises:
        Failed: on the core, where torch_xla has not started: on plain CPU processes and on GPUs.
    """
    numbers = host_numbers()

    @functools.wraps(fn)  # and its signature: launch refuses a call that does not fit before it forks
    def run(core, *args: object) -> object:
        if core.device.type != "xla":
            raise Failed(
                "a function of xmp.spawn calls torch_xla itself, which has not started here",
                found=f"core {core.rank} of {core.world_size} on {core.device}",
                fix='launch(..., backend="xla"): the TPU, and where there is none what rehearses for it',
            )
        put_back(numbers)
        _let_numpy_through()
        result = fn(core.rank, *args)
        try:
            pickle.dumps(result, protocol=5, buffer_callback=lambda _: None)
        except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RecursionError) as error:
            # After all of the training, and nobody reads it: xmp.spawn gave nothing back.
            print(f"what the worker returned stays on core {core.rank}, as under xmp.spawn: {error}")
            return None
        return result

    return run


def _let_numpy_through() -> None:
    """Have `xm.mesh_reduce` take numpy's values as it did: it loads what cores sent with torch's `weights_only`."""
    import numpy
    import torch

    kinds = {type(numpy.dtype(code)) for code in numpy.typecodes["All"]}
    scalar, array = numpy.float64(0).__reduce__()[0], numpy.zeros(0).__reduce__()[0]
    torch.serialization.add_safe_globals([scalar, array, numpy.ndarray, numpy.dtype, *kinds])
