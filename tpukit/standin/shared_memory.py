"""Where the processes of a run meet: a file in memory that has no name."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def meeting_place() -> Iterator[str]:
    """Yield the path of a file in memory that this process and its forks share, for STANDIN_MEMORY.

    Nothing is ever left of it: it stands in no folder, and the system frees it with the last process that has it open,
    also when all are killed. A file in /dev/shm would have to be removed by somebody who may have been killed, and is
    limited to /dev/shm's size, 64 MB in a container. A fork inherits it open, so this process may close it then.
    """
    file = os.memfd_create("tpukit-standin")
    try:
        yield f"/proc/self/fd/{file}"
    finally:
        os.close(file)
