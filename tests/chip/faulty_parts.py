"""Parts of a proof that go wrong in every way; `python -m` runs them as `tools.chip.run_parts` runs the real ones."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from tools.chip import run_parts


def works(proof) -> dict:
    """Works."""
    return {"cores": proof.topology.cores}


def raises(proof) -> dict:
    """Raises."""
    raise ValueError("wrong\n  found: this\n\nits traceback: long")


def aborts(proof) -> dict:
    """Ends the process, as libtpu does."""
    os.kill(os.getpid(), signal.SIGABRT)


def hangs(proof) -> dict:
    """Does not end, and prints nothing."""
    time.sleep(600)


def is_interrupted(proof) -> dict:
    """Gets a SIGINT from elsewhere."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)


if __name__ == "__main__":
    run_parts.PARTS = {one.__name__: one for one in (works, raises, aborts, hangs, is_interrupted)}
    given = json.loads(sys.argv[1])
    run_parts.main(
        given.pop("parts"),
        **given | {"folder": Path(given["folder"]), "outcomes": Path(given["outcomes"])},
    )
