"""Read the parts of Hugging Face's streams, `datasets.IterableDataset`, that have no public API.

`stream.shard(8, index)` and `split_dataset_by_node(stream, ...)` return a part of a stream. In
datasets 3 to 5, only the private attributes that this module reads tell a part from the whole.
"""

import os
import zlib


def nodes_of(stream: object) -> int:
    """Return the number of parts into which `split_dataset_by_node` divided a stream, or 1."""
    return getattr(getattr(stream, "_distributed", None), "world_size", 1)


def shards_of(stream: object) -> list[str]:
    """Return a text for each shard of a stream, sorted; [] for a stream of another library.

    A shard is a file, a part of a Dataset, or an argument of a generator. The order of the shards
    does not count, because each core may shuffle them.
    """
    texts = set()
    waiting = [getattr(stream, "_ex_iterable", None)]
    while waiting:
        source = waiting.pop()
        # `map`, `shuffle` and others wrap one source; `interleave_datasets` joins several.
        inner = getattr(source, "ex_iterable", None)
        waiting += [] if inner is None else [inner]
        waiting += getattr(source, "ex_iterables", ())
        for value in getattr(source, "kwargs", {}).values():
            if isinstance(value, list):  # one entry per shard
                texts.update(map(_text, value))
    return sorted(texts - {""})


def _text(shard: object) -> str:
    """Return a text that differs between the shards of a stream; "" for an unknown object."""
    if hasattr(shard, "with_format"):  # a Dataset, whose first row is read without decoding it
        first = shard.with_format("arrow")[:1].to_pylist()
        return f"{len(shard)} rows with checksum {zlib.crc32(repr(first).encode())}"
    parts = shard if isinstance(shard, list | tuple) else [shard]
    are_plain = all(isinstance(part, str | int | float | os.PathLike) for part in parts)
    return str(shard) if are_plain else ""
