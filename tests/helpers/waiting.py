"""What a test waits for: something that happens. A limit is there for what hangs, and is minutes: machines are busy."""

import os
import signal
import threading
import time
from collections.abc import Callable

HANGS = 600.0  # seconds


def wait_until(happened: Callable[[], object]) -> None:
    """Return as soon as something has happened."""
    late = time.monotonic() + HANGS
    while not happened():
        assert time.monotonic() < late, f"waited for {HANGS:.0f} s"
        time.sleep(0.02)


def interrupt_when(happened: Callable[[], object], later: float = 0.0) -> threading.Thread:
    """Interrupt this process as its user would, so many seconds after something has happened."""

    def interrupt():
        wait_until(happened)
        time.sleep(later)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    return thread
