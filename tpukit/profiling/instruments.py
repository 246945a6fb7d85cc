"""Read torch_xla's graphs, and record a profile of host and device.

The calls of torch_xla in this module are needed only for measurements and for preflight. The calls
that every run needs are in `tpukit.essentials.backends`.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path


def graph_key(tensors: list) -> bytes:
    """Return the hash of the graph that torch_xla has recorded to compute these tensors."""
    import torch_xla

    return torch_xla._XLAC._get_graph_hash(tensors)  # 2 ms for a ResNet-34's step


def graph_text(tensors: list) -> str:
    """Return the graph that torch_xla has recorded to compute these tensors, as HLO text."""
    import torch_xla

    return torch_xla._XLAC._get_xla_tensors_hlo(tensors)  # 60 ms for a ResNet-34's step


def record_lines(wanted: bool) -> None:
    """Start or stop recording the Python line of each operation, for `graph_text`.

    No lines are recorded if the name of a source file is not valid UTF-8, such as "Ä" in Latin-1.
    torch_xla 2.9 would raise "error unpacking string as utf-8" in every operation.

    Args:
        wanted: True to record lines, False to stop.
    """
    import torch_xla

    torch_xla._XLAC._set_ir_debug(wanted and all(map(_is_unicode, _files_of_code())))


def _files_of_code() -> Iterator[str]:
    """Yield the source files of all functions on this thread's stack, and of all modules."""
    frame = sys._getframe()
    while frame:
        yield frame.f_code.co_filename
        frame = frame.f_back
    for module in tuple(sys.modules.values()):
        # Not `getattr(module, "__file__")`: reading an attribute makes a lazy module load itself.
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str):
            yield file


def _is_unicode(name: str) -> bool:
    """Return whether a file's name is valid UTF-8; Python decodes other bytes as surrogates."""
    return not re.search("[\ud800-\udfff]", name)


def named(name: str):
    """Name all operations that are recorded while the returned object exists.

    Names may be nested.
    """
    import torch_xla

    return torch_xla._XLAC.profiler.scope_pusher(name)


class Trace:
    """A recording of the host, and of a GPU, by torch.profiler; it starts at once.

    Args:
        backend: the backend of the core.
        folder: the folder for the file `trace.json.gz`.
    """

    def __init__(self, backend, folder: Path):
        from torch.profiler import ProfilerActivity, profile

        # Without a driver, a torch built for CUDA logs an error line, though nothing is wrong.
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        activities = [ProfilerActivity.CPU]
        if backend.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._folder = folder
        # acc_events: torch 2.11 otherwise warns that each cycle clears the one before. Here there
        # is only one cycle.
        self._trace = profile(activities=activities, acc_events=True)
        self._trace.start()

    def step(self, number: int) -> contextlib.AbstractContextManager:
        """Return a context manager, whose block appears as a step in the recording."""
        from torch.profiler import record_function

        return record_function(f"step {number}")

    def stop(self) -> None:
        """End the recording and write it."""
        self._trace.stop()
        self._trace.export_chrome_trace(str(self._folder / "trace.json.gz"))


class XlaTrace(Trace):
    """A recording of host and device by torch_xla; it starts at once.

    Args:
        backend: not used.
        folder: the folder for the files.
    """

    def __init__(self, backend, folder: Path):
        from torch_xla.debug import profiler

        profiler.start_trace(folder)

    def step(self, number: int) -> contextlib.AbstractContextManager:
        """Return a context manager, whose block appears as a step in the recording."""
        import torch_xla

        # TensorBoard groups events into steps by these two arguments.
        return torch_xla._XLAC.profiler.TraceMe("step", step_num=number, _r=1)

    def stop(self) -> None:
        """Wait for the device, end the recording, and write its files.

        These are files for TensorBoard, and a Chrome trace.
        """
        import torch_xla.core.xla_model as xm
        from torch_xla.debug import profiler

        xm.wait_device_ops()  # otherwise the last steps would be missing
        try:
            profiler.stop_trace()
        finally:
            # If writing has failed, torch_xla would otherwise refuse the next recording.
            profiler._profile_state.reset()
