"""What torch_xla and torch.profiler say of a step: its graph, and a recording of what host and device do.

What a run needs of torch_xla stands in `tpukit.essentials.backends`, what `measure` and `preflight` need stands here.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path


def graph_key(tensors: list) -> bytes:
    """Return what identifies the graph that torch_xla has recorded for these tensors."""
    import torch_xla

    return torch_xla._XLAC._get_graph_hash(tensors)  # 2 ms for a ResNet-34's step


def graph_text(tensors: list) -> str:
    """Return the graph that torch_xla has recorded for these tensors as HLO text, with its constants."""
    import torch_xla

    return torch_xla._XLAC._get_xla_tensors_hlo(tensors)  # 60 ms for a ResNet-34's step


def record_lines(wanted: bool) -> None:
    """Have every operation remember the line of Python it came from, for `graph_text`.

    Operations remember no lines if the name of a file of the program is not valid UTF-8, as "Ä" in
    Latin-1. torch_xla 2.9 would raise "error unpacking string as utf-8" in every operation.
    """
    import torch_xla

    torch_xla._XLAC._set_ir_debug(wanted and all(map(_is_unicode, _files_of_code())))


def _files_of_code() -> Iterator[str]:
    """Yield the files of all functions that are running in this thread, and of all modules."""
    frame = sys._getframe()
    while frame:
        yield frame.f_code.co_filename
        frame = frame.f_back
    for module in tuple(sys.modules.values()):
        # A lazy module would load itself if it were asked for an attribute.
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str):
            yield file


def _is_unicode(name: str) -> bool:
    """Return whether a name came from valid UTF-8; Python keeps other bytes as lone surrogates."""
    return not re.search("[\ud800-\udfff]", name)


def named(name: str):
    """Have operations bear this name in the graph as long as what is returned is held; one within another has both."""
    import torch_xla

    return torch_xla._XLAC.profiler.scope_pusher(name)


class Trace:
    """A recording of the host, and of a GPU, by torch.profiler, begun where it is made."""

    def __init__(self, backend, folder: Path):
        from torch.profiler import ProfilerActivity, profile

        # A torch built for CUDA logs an error line where no driver is, though nothing is wrong.
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (backend.device.type == "cuda")
        self._trace, self._folder = profile(activities=kinds), folder
        self._trace.start()

    def step(self, number: int) -> contextlib.AbstractContextManager:
        """Name a stretch of the recording as a step."""
        from torch.profiler import record_function

        return record_function(f"step {number}")

    def stop(self) -> None:
        """End the recording and write it."""
        self._trace.stop()
        self._trace.export_chrome_trace(str(self._folder / "trace.json.gz"))


class XlaTrace(Trace):
    """A recording of host and device, by torch_xla."""

    def __init__(self, backend, folder: Path):
        from torch_xla.debug import profiler

        profiler.start_trace(folder)

    def step(self, number: int) -> contextlib.AbstractContextManager:
        """Name a stretch of it as a step."""
        import torch_xla

        return torch_xla._XLAC.profiler.TraceMe("step", step_num=number, _r=1)  # TensorBoard groups by it

    def stop(self) -> None:
        """End it when the device is done, and write it."""
        import torch_xla.core.xla_model as xm
        from torch_xla.debug import profiler

        xm.wait_device_ops()  # otherwise the last steps would be missing
        try:
            profiler.stop_trace()  # writes it for TensorBoard and as a Chrome trace
        finally:  # a recording that could not be written would be in the way of the next
            profiler._profile_state.reset()
