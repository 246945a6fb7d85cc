"""Share memory between the processes of a run, in a file without a name."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def meeting_place() -> Iterator[str]:
    """Yield the path of a file in memory that this process and its forks share.

    The path is for SIMULATOR_MEMORY. Forks inherit the open file, so this process may then close it.

    The system frees the file when the last process that has it open ends, even if all of them are
    killed. A file in /dev/shm would be left behind in that case, and is limited to the size of
    /dev/shm, 64 MB in a container.
    """
    file = os.memfd_create("tpukit-simulator")
    try:
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)
