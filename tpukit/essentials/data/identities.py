"""Recognise the dataset of a checkpoint, which may be loaded days later on another machine.

The identity is a dict of short values by name. A `fingerprint` has the parts of a dataset with an
entry per sample, and lists of class names. An identity also has:

    dataset.fold         "0"            settings: numbers, truth values and short texts
    dataset.files        3370154512     files, by their path in their common folder
    dataset.features     1292718311     arrays, also without an entry per sample

A dataset can describe itself instead: its method `checkpoint_identity` returns values by name.
"""

import os
import zlib
from collections.abc import Callable, Mapping

from tpukit.essentials.data.fingerprint import (
    MOST_DEPTH,
    MOST_PER_SAMPLE,
    PLAIN_BYTES,
    array_checksum,
    as_array,
    as_plain,
    column_checksums,
    is_arrow,
    is_dataset,
    is_plain,
    length_of,
    parts_of,
    row_step,
)

_LONGEST_SETTING = 100  # characters
_MOST_PARTS = 16  # of a list or dict that are described, such as `tensors` of a TensorDataset
_OF_PATHS = frozenset("/\\")  # a text with one of these characters may be the path of a folder
# Attributes that may change although the data do not: on another machine, on other cores, or in the
# next epoch.
_NO_DATA = {
    *("rank", "local_rank", "world_size", "num_replicas", "epoch", "seed", "device"),
    *("workers", "num_workers", "threads", "num_threads", "verbose"),
    "_fingerprint",  # Hugging Face's, random if a function cannot be pickled
}


def identity(dataset: object) -> dict[str, object]:
    """Return named facts, by which a checkpoint recognises its dataset.

    Each value is a whole number or a text. No sample is read. The facts do not contain pixels in
    files, the code of transforms, or attributes with names such as `seed`, `epoch` and `rank`.
    """
    found: dict[str, object] = {}
    _describe(dataset, "dataset", found=found, depth=MOST_DEPTH)
    return found


def different_parts(saved: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    """Return the names of the entries that differ.

    If both values of an entry are strings, the result has the values after the name.

    Args:
        saved: the identity in the checkpoint.
        here: the identity of the present dataset.
    """
    different = []
    for name in dict.fromkeys([*saved, *here]):
        before = saved.get(name, "missing")
        now = here.get(name, "missing")
        if before == now:
            continue
        has_words = isinstance(before, str) and isinstance(now, str)
        if has_words:  # a checksum would tell a reader nothing
            name = f"{name} {before}, here {now}"
        different.append(name)
    return different


def _describe(dataset: object, name: str, *, found: dict, depth: int) -> None:
    describe_itself = getattr(type(dataset), "checkpoint_identity", None)
    if describe_itself is not None:
        parts = list(describe_itself(dataset).items())
    else:
        found[f"kind of {name}"] = type(dataset).__qualname__
        parts = parts_of(dataset)
        own = _checksum(dataset, any_size=True)
        if own is not None:
            found[f"content of {name}"] = own
    count = length_of(dataset)
    found[f"length of {name}"] = repr(count)
    # Whether no part changes later. A TensorDataset gets all its tensors when it is made.
    is_complete = describe_itself is not None or type(dataset).__name__ == "TensorDataset"
    for part, value in parts:
        if part in _NO_DATA:
            continue
        key = f"{name}.{part}"
        # A large part with an entry per sample may be a cache, which is filled while samples are
        # read. Such a part is left out.
        is_per_sample = is_complete or length_of(value) == count
        any_size = is_complete or not is_per_sample
        content = _content(value, has_row_per_sample=is_per_sample, any_size=any_size)
        if content is not None:
            found[key] = content
        elif depth:
            _describe_inside(value, key, found=found, depth=depth - 1)


def _describe_inside(value: object, name: str, *, found: dict, depth: int) -> None:
    """Describe a dataset inside another one, or a list of datasets as of a ConcatDataset."""
    if is_dataset(value) and not hasattr(value, "dtype"):  # tensors also have items and a length
        _describe(value, name, found=found, depth=depth)
    elif isinstance(value, list | tuple) and all(map(is_dataset, value)):
        for number, part in enumerate(value[:_MOST_PARTS]):
            _describe_inside(part, f"{name}[{number}]", found=found, depth=depth)


def _content(value: object, *, has_row_per_sample: bool, any_size: bool) -> object:
    """Return a setting as text, or the checksum of an array, table or list; None for others."""
    import numpy

    if isinstance(value, numpy.generic):  # such as a fold from numpy.arange
        value = value.item()
    if _is_setting(value):
        return repr(value)
    # Other lists and dicts of numbers may be filled while samples are read.
    is_data = has_row_per_sample or not isinstance(value, list | dict) or _has_text(value)
    if not is_data:
        return None
    whole = _checksum(value, any_size=any_size)
    if whole is not None or not isinstance(value, tuple | list | dict):
        return whole
    # The parts are no plain values, but may be arrays, as the `tensors` of a TensorDataset are.
    parts = value
    if isinstance(value, dict):
        parts = list(value.values())
    sums = [_checksum(part, any_size=any_size) for part in parts[:_MOST_PARTS]]
    if any(sums):
        return zlib.crc32(repr(sums).encode())
    return None


def _is_setting(value: object) -> bool:
    """Return whether a value is a short plain setting without paths, because paths may change."""
    is_fixed = isinstance(value, bool | int | float | str | tuple)
    if not is_fixed and not _has_text(value):
        return False
    written = repr(value)
    # The length of a text counts without the quotes and escapes of its repr.
    length = len(value) if isinstance(value, str) else len(written)
    if length > _LONGEST_SETTING:
        return False
    return is_plain(value) and _OF_PATHS.isdisjoint(written)


def _has_text(value: object) -> bool:
    """Return whether the first key of a dict, or a part of the first row of a list, is a text."""
    if not isinstance(value, list | dict) or not value:
        return False
    row = next(iter(value))
    if not isinstance(row, tuple | list):
        row = [row]
    return any(map(_is_text, row))


def _is_text(value: object) -> bool:
    """Return whether a value is a text or a path."""
    return isinstance(value, str) or hasattr(value, "__fspath__")


def _checksum(value: object, *, any_size: bool) -> int | None:
    """Return a checksum of an array, a tensor on the CPU, a table or a list of plain values.

    It reads rows in even steps, about 4 MiB in all. For other values it returns None.

    Args:
        value: the value.
        any_size: False to return None for an array with more than 1 KiB per row.
    """
    import numpy
    import torch

    if isinstance(value, torch.Tensor):
        value = as_array(value)
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return _checksum_of_numbers(value, any_size=any_size)
    if hasattr(value, "iloc"):  # pandas
        return _checksum_of_table(value)
    if is_arrow(value):
        last = max(0, len(value) - 1)
        ends = [value.slice(0, 1).to_pylist(), value.slice(last, 1).to_pylist()]
        return _text_checksum([column_checksums(value), ends])
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple | range | numpy.ndarray) and len(value):
        some = list(map(as_plain, value[:: row_step(PLAIN_BYTES * len(value), len(value))]))
        if all(map(is_plain, some)):
            return _text_checksum(some)
    return None


def _checksum_of_numbers(array, *, any_size: bool) -> int | None:
    """Return the checksum of an array; None if it is empty, a single number or too large."""
    if not array.size or not array.ndim:
        return None
    is_small = array.nbytes <= MOST_PER_SAMPLE * len(array)
    if any_size or is_small:
        return array_checksum(array)
    return None


def _checksum_of_table(table) -> int:
    """Return the checksum of a DataFrame or a Series."""
    some = table.iloc[:: row_step(MOST_PER_SAMPLE * len(table), len(table))]
    columns = [("", some)]
    if hasattr(some, "columns"):
        columns = some.items()
    return _text_checksum([(str(name), column.tolist()) for name, column in columns])


def _text_checksum(values: list) -> int:
    """Return a checksum of values, in which paths count relative to their common folder."""
    paths: list[str] = []
    _each_path(values, lambda path: paths.append(path) or path)
    # On Windows, files on several drives have no common folder, so their whole paths count.
    if len({os.path.splitdrive(path)[0] for path in paths}) == 1:
        folder = os.path.commonpath([os.path.dirname(path) for path in paths])
        values = _each_path(values, lambda path: os.path.relpath(path, folder))
    return zlib.crc32(repr(values).encode())


def _each_path(value: object, change: Callable[[str], str]) -> object:
    """Return nested values in which `change` was applied to every absolute path."""
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list | tuple):
        return [_each_path(part, change) for part in value]
    if _is_text(value) and os.path.isabs(value):
        return change(os.fspath(value))
    return value
