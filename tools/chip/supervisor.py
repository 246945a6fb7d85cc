"""Run the parts of a proof in another process; if it dies, a new process runs the other parts."""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# seconds after which a line is printed: some platforms end a process that is silent for 30 s
_SILENCE = 20.0
_END = 60.0  # seconds that a part may take beyond the limit of its launches


def run_parts(
    parts: Sequence[str],
    *,
    folder: Path,
    backend: str | None = None,
    cores: int | None = None,
    seconds: float = 600.0,
    say: Callable[[bytes], object] | None = None,
    module: str = "tools.chip.run_parts",
) -> dict[str, dict]:
    """Run the parts of a proof in order, and return the outcome of each.

    If a process dies or hangs in a part, that part has failed, and a new process runs the others.

    Args:
        parts: their names.
        folder: an empty folder for their files.
        backend, cores: as in `launch`.
        seconds: after which a launch is ended; a part, a minute later.
        say: takes the output; None for standard output.
        module: which runs them, `python -m`.
    """
    say = say or _print
    outcomes = folder / "outcomes.jsonl"
    results = {}
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[2]), environ.get("PYTHONPATH")])
    )
    while waiting := [name for name in parts if name not in results]:
        given = {
            "parts": waiting,
            "folder": str(folder),
            "outcomes": str(outcomes),
            "backend": backend,
        }
        given |= {"cores": cores, "seconds": seconds}
        outcomes.write_text("")
        process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(given)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environ,
            # an interrupt of the terminal ends it from here, not in the middle of a part
            start_new_session=True,
        )
        try:
            ended = _watch(process, outcomes, seconds + _END, say)
        finally:
            _end(process)
        begun, done = _read(outcomes)
        results |= done
        if begun not in done:  # the process is gone, and with it this part
            name = begun or waiting[0]
            results[name] = {"passed": False, "seconds": None, "error": ended}
    return results


def _watch(
    process: subprocess.Popen, outcomes: Path, limit: float, say: Callable[[bytes], object]
) -> str:
    """Hand on what the process prints until it ends, or a part lasts too long; say how that was."""
    part = None
    began = time.monotonic()
    spoke = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            ready = selector.select(1.0)
            now = time.monotonic()
            if ready:
                data = os.read(process.stdout.fileno(), 1 << 16)
                if not data:
                    break
                say(data)
                spoke = now
            begun, done = _read(outcomes)
            if begun != part:
                part = begun
                began = now
            if begun and begun not in done and now - began > limit:
                return f"the part did not end within {limit:.0f} s, and was ended"
            if now - spoke >= _SILENCE:
                say(f"{part or 'the first part'}: {now - began:.0f} s\n".encode())
                spoke = now
    status = process.wait()
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
    return f"the process that ran the part ended {how}; what it printed says more"


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.kill()  # its workers end with it
    process.wait()
    process.stdout.close()


def _read(outcomes: Path) -> tuple[str | None, dict[str, dict]]:
    """Return the part that has begun last, and the outcomes of those that have ended."""
    begun = None
    done = {}
    for line in outcomes.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # not half of one
            told = json.loads(line)
            begun = told.get("begins", begun)
            if "ends" in told:
                done[told["ends"]] = told["outcome"]
    return begun, done


def _print(data: bytes) -> None:
    sys.stdout.write(data.decode(errors="replace"))
    sys.stdout.flush()
