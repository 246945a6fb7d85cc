"""Compiled graphs kept on disk between runs, so that the second one need not compile them again."""

import contextlib
import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

LIMIT = 4 * 2**30  # bytes of all ranks and versions; torch_xla itself never removes anything
_UNREADABLE = "unreadable"


def cache_folder(rank: int, environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the graphs of one rank are kept, in the user's cache folder or, without one, among temporary files.

    Each rank has its own folder, since the same program compiles to slightly different graphs on each, and each
    version of torch_xla and libtpu too, since one cannot read what another has written.
    """
    home = environ.get("XDG_CACHE_HOME") or (environ.get("HOME") and Path(environ["HOME"], ".cache"))
    versions = "-".join(f"{name}-{version}" for name in ("torch_xla", "libtpu") if (version := _version(name)))
    return Path(home or tempfile.gettempdir(), "tpukit", "graphs", versions, f"core-{rank}")


@contextlib.contextmanager
def kept_graphs(
    backend,
    *,
    environ: Mapping[str, str] = os.environ,
    limit: int = LIMIT,
    say: Callable[[str], None] = print,
) -> Iterator[None]:
    """Keep the graphs that are compiled in this block, and load those kept before; on a TPU only.

    Enter it before the first computation. What was written longest ago goes first, beyond `limit` bytes. A folder
    that cannot be written, and `XLA_PERSISTENT_CACHE_PATH` set by the user, leave everything to torch_xla.

    torch_xla 2.8 and 2.9 write graphs for a TPU but may be unable to read them (upstream issue 9094, open: the TPU's
    client has no `DeserializeExecutable`). Where the first attempt shows it, nothing is kept with that version again.
    """
    if not backend.keeps_graphs:
        yield
        return
    folder = cache_folder(backend.rank, environ)
    opened = False
    with contextlib.suppress(OSError):  # a full or read-only disk: then without
        folder.mkdir(parents=True, exist_ok=True)
        if backend.rank == 0:
            _prune(folder.parents[1], limit)
        opened = not (folder / _UNREADABLE).exists() and backend.open_cache(folder)
    try:
        yield
    finally:
        if opened:
            with contextlib.suppress(OSError):
                _judge(backend, folder, say)


def _judge(backend, folder: Path, say: Callable[[str], None]) -> None:
    """Give the folder up if what earlier runs had left in it could not be read, and none of it could."""
    metrics = backend.metrics()
    if "PersistentCacheDeserializeFailure" not in metrics or "PersistentCacheHit" in metrics:
        return
    for file in folder.iterdir():
        file.unlink(missing_ok=True)
    (folder / _UNREADABLE).touch()
    if backend.rank == 0:
        say(
            f"torch_xla {_version('torch_xla')} cannot read the graphs it kept on disk (its issue 9094), so every run "
            "compiles anew; they are no longer kept"
        )


def _prune(root: Path, limit: int) -> None:
    files = [
        (stat.st_mtime, stat.st_size, file) for file in root.rglob("*") if file.is_file() and (stat := file.stat())
    ]
    excess = sum(size for _, size, _ in files) - limit
    for _, size, file in sorted(files):
        if excess <= 0:
            return
        if size:  # the marks of the unreadable stay
            file.unlink(missing_ok=True)
            excess -= size


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
