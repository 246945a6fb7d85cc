"""Compute a fingerprint of a dataset, to compare it between cores without reading a sample.

The fingerprint is a dict of short values by name. An attribute of the dataset with an entry per
sample gets a checksum. A dataset inside another, as in a `Subset`, is described, too:

    kind of dataset               "Subset"
    length of dataset             800
    dataset.indices               3370154512     checksum of 800 numbers
    kind of dataset.dataset       "ImageFolder"
    dataset.dataset.targets       1292718311
    dataset.dataset.classes       2471826934     names of classes; their order defines the labels
"""

import math
import zlib
from collections.abc import Iterable, Mapping

# Bytes of an attribute that are read, in even steps (4 MiB). All bytes of MNIST's 60,000 images
# would take 30 ms.
_MOST_BYTES = 1 << 22
# Bytes per sample of an attribute. Labels, indices and names have fewer. A larger attribute may be
# a cache, which is filled while samples are read.
MOST_PER_SAMPLE = 1 << 10
_MOST_NAMES = 1 << 12  # names of classes in an attribute
MOST_DEPTH = 4  # levels; a Subset of a Subset of a dataset with a transform has three
_MOST_TENSORS = 16  # items of a list or dict, such as `tensors` of a TensorDataset
PLAIN_BYTES = 100  # assumed size of a row of plain values, in bytes


def fingerprint(dataset: object) -> dict[str, object]:
    """Return the class, the length and checksums of a dataset, as a dict of short values.

    Attributes with an entry per sample get a checksum, whatever their names are: the indices of a
    Subset, labels, targets, tensors, files, the rows of a table. Lists of class names get a
    checksum, too. Entries that are objects, or larger than 1 KiB, such as pixels, get none.
    """
    found: dict[str, object] = {}
    _describe(dataset, "dataset", found=found, depth=MOST_DEPTH)
    return found


def _describe(dataset: object, name: str, *, found: dict, depth: int) -> None:
    found[f"kind of {name}"] = type(dataset).__qualname__
    count = length_of(dataset)
    found[f"length of {name}"] = count
    own = _checksum(dataset)  # if the dataset itself is a list, an array or a table
    if own is not None:
        found[f"content of {name}"] = own
    for part, value in parts_of(dataset):
        key = f"{name}.{part}"
        sums = _sums_per_sample(value, count)
        if sums:
            found[key] = sums[0] if len(sums) == 1 else tuple(sums)
        elif _are_names(value):
            # `class_to_idx` means the same in any order of its entries; a list does not.
            names = sorted(value.items()) if isinstance(value, dict) else value
            found[key] = zlib.crc32(repr(names).encode())
        elif depth and is_dataset(value):
            _describe(value, key, found=found, depth=depth - 1)


def _sums_per_sample(value: object, count: int | None) -> list[int]:
    """Return the checksums of an attribute's data that have an entry per sample.

    These are the value itself, or else the items of a short list or dict.
    """
    if not count:
        return []
    # `tensors` of a TensorDataset is a short list, and each of its items has an entry per sample.
    parts = [value] if length_of(value) == count else _few_parts(value)
    sums = [_checksum(part) for part in parts if length_of(part) == count]
    return [each for each in sums if each is not None]


def _few_parts(value: object) -> list:
    """Return the items of a short list or dict."""
    if isinstance(value, Mapping):
        value = list(value.values())
    is_short = isinstance(value, tuple | list) and len(value) <= _MOST_TENSORS
    if is_short:
        return list(value)
    return []


def is_dataset(value: object) -> bool:
    """Return whether a value may be a dataset: it has items, a length and attributes."""
    has_items = hasattr(value, "__getitem__")
    has_length = hasattr(type(value), "__len__")
    has_attributes = hasattr(value, "__dict__")
    return all([has_items, has_length, has_attributes])


def _are_names(value: object) -> bool:
    """Return whether a value is a list of texts, or a dict from texts to whole numbers."""
    if not isinstance(value, list | tuple | dict):
        return False
    is_short = 0 < len(value) <= _MOST_NAMES
    numbers = value.values() if isinstance(value, dict) else ()
    return is_short and _are_all(str, value) and _are_all(int, numbers)


def _are_all(kind: type, values: Iterable) -> bool:
    return all(isinstance(value, kind) for value in values)


def parts_of(dataset: object) -> list[tuple[str, object]]:
    """Return the attributes of a dataset by name, without those that can be called."""
    parts = dict(getattr(dataset, "__dict__", {}))
    for name in ("labels", "targets", "indices"):  # these may be properties
        try:
            parts.setdefault(name, getattr(dataset, name, None))
        except Exception:  # the property raises an error, so the dataset has no such part now
            continue
    return [(name, value) for name, value in parts.items() if not callable(value)]


def length_of(value: object) -> int | None:
    """Return the length of a value; None if it has none."""
    try:
        return len(value)
    except Exception:  # a scalar tensor, a stream, or an error in a user's __len__
        return None


def _checksum(value: object) -> int | None:
    """Return a checksum of an array, a tensor on the CPU, a table or a list of plain values.

    It reads rows in even steps, about 4 MiB in all. For other values, and for arrays with more than
    1 KiB per row, it returns None.
    """
    import numpy
    import torch

    if isinstance(value, torch.Tensor):
        value = as_array(value)
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        is_large = value.nbytes > MOST_PER_SAMPLE * len(value) if value.ndim else True
        return None if is_large else array_checksum(value)
    if hasattr(value, "iloc"):  # pandas
        step = row_step(MOST_PER_SAMPLE * len(value), len(value))
        return zlib.crc32(value.iloc[::step].to_csv().encode())
    if is_arrow(value):
        value = column_checksums(value)
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple | range | numpy.ndarray) and len(value):
        step = row_step(PLAIN_BYTES * len(value), len(value))
        some = list(map(as_plain, value[::step]))
        if all(map(is_plain, some)):
            return zlib.crc32(repr(some).encode())
    return None


def as_array(tensor):
    """Return a dense tensor in host memory as an array; other tensors unchanged.

    Floats that numpy does not have, such as bfloat16, become uint8: the bytes of each number. A
    tensor of another dtype that numpy does not have, such as qint8, is returned unchanged.
    """
    import torch

    is_on_cpu = tensor.device.type == "cpu"
    is_strided = tensor.layout == torch.strided
    if not all([is_on_cpu, is_strided, tensor.ndim]):
        return tensor
    tensor = tensor.detach()
    floats_of_numpy = (torch.float16, torch.float32, torch.float64)
    if tensor.is_floating_point() and tensor.dtype not in floats_of_numpy:
        tensor = tensor.contiguous().view(torch.uint8)
    try:
        return tensor.resolve_conj().resolve_neg().numpy()
    except TypeError:  # numpy has no such dtype, as torch.qint8
        return tensor


def array_checksum(array) -> int:
    """Return a CRC-32 of an array. Of a large array it covers evenly spaced rows, about 4 MiB."""
    import numpy

    # Whole rows, so that a difference in any column of such a row changes the checksum.
    rows = array[:: row_step(array.nbytes, len(array))]
    return zlib.crc32(numpy.ascontiguousarray(rows).reshape(-1).view(numpy.uint8))


def is_arrow(value: object) -> bool:
    """Return whether a value is an Arrow table, or Hugging Face's wrapper of an Arrow table."""
    return all(hasattr(value, name) for name in ("columns", "slice", "to_pylist"))


def column_checksums(table) -> list[int | None]:
    """Return the checksum of each numeric column of an Arrow table; skip other columns."""
    sums = []
    for column in table.columns:
        if str(column.type).startswith(("int", "uint", "float")):
            sums.append(_checksum(column.to_numpy()))
    return sums


def as_plain(value: object) -> object:
    """Return a value with Python numbers in place of numpy scalars and scalar CPU tensors.

    Numbers in tuples, lists and dicts are converted, too.
    """
    import numpy
    import torch

    if type(value) in (tuple, list):
        return type(value)(map(as_plain, value))
    if type(value) is dict:
        return {key: as_plain(part) for key, part in value.items()}
    is_number = isinstance(value, numpy.generic)
    if isinstance(value, torch.Tensor):
        is_number = value.ndim == 0 and value.device.type == "cpu"
    return value.item() if is_number else value


def is_plain(value: object) -> bool:
    """Return whether `repr` describes a value completely, as for numbers, texts and paths."""
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, tuple | list):
        return len(value) <= _MOST_TENSORS and all(map(is_plain, value))
    return isinstance(value, str | bytes | int | float | bool) or hasattr(value, "__fspath__")


def row_step(size: int, rows: int) -> int:
    """Return the smallest k for which a selection of every k-th row has at most about 4 MiB.

    Args:
        size: the size of all rows in bytes.
        rows: the number of rows.
    """
    return max(1, min(rows, math.ceil(size / _MOST_BYTES)))
