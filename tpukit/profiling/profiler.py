"""Record a few steps of a core as a trace for Perfetto or TensorBoard."""

import contextlib
import os
import shlex
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from tpukit.essentials.display import SystemFailureError, TpukitRuntimeError, counted
from tpukit.profiling.instruments import Trace, XlaTrace


class Profile:
    """The recording of a core.

    Args:
        folder: the folder of this core's files; None on a core that is not recorded.
        trace: the recording that has started; None on a core that is not recorded.

    Attributes:
        folder: as the argument.
        files: the files of the recording; empty until the recording has ended.
    """

    def __init__(self, folder: Path | None, trace: Trace | None = None):
        self.folder = folder
        self.files: list[Path] = []
        self._trace = trace
        self._begun = 0  # steps
        self._span = contextlib.ExitStack()

    def mark(self) -> None:
        """End a step of the recording and begin the next; called after each `core.step` block."""
        self._span.close()
        self._span.enter_context(self._trace.step(self._begun))
        self._begun += 1


@contextlib.contextmanager
def profile(core, folder: str | os.PathLike, *, ranks: Collection[int] = (0,)) -> Iterator[Profile]:
    """Record the work and the waits of host and device during the steps in a block.

    Record ten to fifty steps, and begin after the first few steps, which compile. A recording stays
    in memory until the block ends; a thousand steps need hundreds of MB. The files are written even
    if the block raises an error, and `core.print` prints their names.

        with tpukit.profiling.profile(core, "runs/trace"):
            for images, labels in itertools.islice(batches, 20):
                with core.step():
                    ...

    torch_xla writes a Chrome trace and files for TensorBoard. Without torch_xla, torch.profiler
    writes a Chrome trace, with the device only if it is a GPU.

    Args:
        core: this core; call `profile` in the worker function.
        folder: the files are written into the subfolder `core-<rank>/` of this folder. Without
            torch_xla, a later recording replaces the file of an earlier one.
        ranks: the cores to record; other cores run the block without recording. In a preflight, no
            core is recorded.

    Yields:
        a `Profile` with the folder, and after the block with the files.

    Raises:
        OSError: the folder cannot be written to, which is checked before the block runs; or the
            disk is full.
        RuntimeError: this core is already being recorded.
    """
    if core.rank not in ranks or core.backend.is_recording:
        yield Profile(None)
        return
    backend = core.backend
    own_folder = Path(folder) / f"core-{core.rank}"
    if backend.after_sync:
        raise TpukitRuntimeError(
            "this core is already being recorded: a profile cannot be inside another",
            fix="use one `with tpukit.profiling.profile(...)` around all the steps",
        )
    # Check now: the profilers write only at the end, and an error would lose the recording.
    _check_writable(own_folder)
    # To list only the files of this recording at the end.
    earlier = _times_written(own_folder)
    kind = XlaTrace if backend.traced else Trace
    trace = kind(backend, own_folder)
    recording = Profile(own_folder, trace)
    backend.after_sync = recording.mark  # core.step calls it at its end
    recording.mark()
    unwritten = None
    try:
        yield recording
    finally:
        backend.after_sync = None
        recording._span.close()
        try:
            trace.stop()
        except (OSError, RuntimeError) as error:  # torch_xla raises RuntimeError
            unwritten = error
        else:
            written = _times_written(own_folder).items() - earlier.items()
            recording.files = sorted(path for path, _ in written)
            core.print(_how_to_open(recording, folder), everywhere=True)
    # If the block has raised an error, that error goes on, and this line is not reached.
    if unwritten:
        raise _not_written(own_folder, unwritten) from unwritten


def _times_written(folder: Path) -> dict[Path, int]:
    """Return each file's modification time in nanoseconds.

    A recording may replace a file of an earlier recording. So new files are recognised by their
    times and not by their names.
    """
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: path.stat().st_mtime_ns for path in files}


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_written(folder, error) from error


def _not_written(folder: Path, error: Exception) -> OSError:
    return SystemFailureError(
        f"the profile cannot be written into {folder}",
        found=error,
        fix="choose a folder of your own, on a disk with free space",
    )


def _how_to_open(recording: Profile, folder: str | os.PathLike) -> str:
    traces = [str(file) for file in recording.files if file.name.endswith(".json.gz")]
    steps = recording._begun - 1  # `mark` has begun a last step, which did not run
    text = f"recorded {counted(steps, 'step')}: open {', '.join(traces)} at https://ui.perfetto.dev"
    if any(file.name.endswith(".xplane.pb") for file in recording.files):
        command = f"`tensorboard --logdir {shlex.quote(str(folder))}`"
        text += f"\n  or `pip install tensorboard xprof`, then {command}, tab Profile"
    return text
