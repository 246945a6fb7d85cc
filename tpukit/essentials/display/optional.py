"""Imports of optional subpackages, with a clear error if a copy lacks the subpackage."""

import contextlib
from collections.abc import Iterator

from tpukit.essentials.display.errors import NotInstalledError


@contextlib.contextmanager
def optional_subpackage(feature: str) -> Iterator[None]:
    """In the block, raise a NotInstalledError if an imported subpackage of tpukit is missing.

        with optional_subpackage("core.batches(buckets=...)"):
            from tpukit.training import Buckets

    Args:
        feature: the feature that needs the subpackage, for the error, such as "launch(shard=...)".

    Raises:
        NotInstalledError: this copy of tpukit does not have the subpackage, or does not have
            another subpackage that it imports.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = error.name or ""
        is_our_own = missing.startswith("tpukit.")  # else another package is missing, such as torch
        if not is_our_own:
            raise
        folder = missing.replace(".", "/")
        raise NotInstalledError(
            f"{feature} needs the subpackage {missing}, which this copy of tpukit does not have",
            fix=f"copy the folder {folder} from a complete clone or wheel into this copy, next to "
            "tpukit/essentials",
        ) from None
