"""Read torch_xla's graphs, and record a profile of host and device.

This is the part of torch_xla that only `measure` and `preflight` need. The part that every run
needs is in `tpukit.essentials.backends`.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path


def graph_key(tensors: list) -> bytes:
    """Return the hash of the graph that torch_xla has recorded for these tensors."""
    import torch_xla

    return torch_xla._XLAC._get_graph_hash(tensors)  # 2 ms for a ResNet-34's step


def graph_text(tensors: list) -> str:
    """Return the graph that torch_xla has recorded for these tensors as HLO text."""
    import torch_xla

    return torch_xla._XLAC._get_xla_tensors_hlo(tensors)  # 60 ms for a ResNet-34's step


def record_lines(wanted: bool) -> None:
    """Record the line of Python of every operation from here on, for `graph_text`; or stop it.

    No lines are recorded if the name of a file of the program is not valid UTF-8, as "Ä" in
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
    """Name the operations in the graph as long as the returned object lives; names nest."""
    import torch_xla

    return torch_xla._XLAC.profiler.scope_pusher(name)


class Trace:
    """A recording of the host, and of a GPU, by torch.profiler; it begins at once.

    Args:
        backend: the core's backend.
        folder: for the file `trace.json.gz`.
    """

    def __init__(self, backend, folder: Path):
        from torch.profiler import ProfilerActivity, profile

        # A torch for CUDA logs an error line if there is no driver, though nothing is wrong.
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        activities = [ProfilerActivity.CPU]
        if backend.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._folder = folder
        # There is one cycle only. Without this, torch 2.11 warns that it would clear earlier ones.
        self._trace = profile(activities=activities, acc_events=True)
        self._trace.start()

    def step(self, number: int) -> contextlib.AbstractContextManager:
        """Return a context whose time is a step in the recording."""
        from torch.profiler import record_function

        return record_function(f"step {number}")

    def stop(self) -> None:
        """End the recording and write it."""
        self._trace.stop()
        self._trace.export_chrome_trace(str(self._folder / "trace.json.gz"))


class XlaTrace(Trace):
    """A recording of host and device by torch_xla; it begins at once.

    Args:
        backend: not used.
        folder: for the files.
    """

    def __init__(self, backend, folder: Path):
        from torch_xla.debug import profiler

        profiler.start_trace(folder)

    def step(self, number: int) -> contextlib.AbstractContextManager:
        """Return a context whose time is a step in the recording."""
        import torch_xla

        # TensorBoard groups by these two arguments.
        return torch_xla._XLAC.profiler.TraceMe("step", step_num=number, _r=1)

    def stop(self) -> None:
        """End the recording when the device is done, and write it.

        It is written for TensorBoard and as a Chrome trace.
        """
        import torch_xla.core.xla_model as xm
        from torch_xla.debug import profiler

        xm.wait_device_ops()  # otherwise the last steps would be missing
        try:
            profiler.stop_trace()
        finally:
            # A recording that could not be written would prevent the next.
            profiler._profile_state.reset()
