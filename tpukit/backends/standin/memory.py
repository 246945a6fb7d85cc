"""Where the processes of a run meet: a file in memory that has no name."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def meeting_place() -> Iterator[str]:
    """Yield the path of a file in memory that this process and those it starts can share, for STANDIN_MEMORY.

    Nothing is ever left of it: it stands in no folder, and the kernel frees it with the last process that has it open,
    also when all are killed. A file in /dev/shm would have to be removed by somebody who may have been killed. It is no
    part of /dev/shm's size either, which containers keep at 64 MB. Workers open it by this process's number, so
    it reaches those that were forked and those that were started anew; this process must live until they have come.
    """
    file = os.memfd_create("tpukit-standin")
    try:
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)
