"""Packs and caches made in the test's own process: of few images, most of the time is the start of a Python."""

import contextlib
import io
import itertools
import json
import warnings
from types import SimpleNamespace
from unittest import mock


def _run(task, jobs: list, feeds=(), **_) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # a process that ends closes its files
        for job, feed in itertools.zip_longest(jobs, feeds, fillvalue=()):
            read = SimpleNamespace(buffer=io.BytesIO(b"".join(feed)))
            with mock.patch("sys.stdin", read):
                task(json.loads(json.dumps(job)))


@contextlib.contextmanager
def in_this_process():
    """Have `pack` and `cached_images` do here, one after the other, what they start processes for."""
    with contextlib.ExitStack() as patched:
        for module in ("pack_shards", "image_cache"):
            patched.enter_context(mock.patch(f"tpukit.datasets.{module}.run_in_processes", _run))
        yield
