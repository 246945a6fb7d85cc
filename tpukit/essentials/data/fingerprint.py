"""What a dataset is, as far as that can be had without reading a sample: for comparing it between cores."""

import zlib

_MOST_BYTES = 1 << 22  # of one part, looked at in even steps; all of 60,000 digits would take 30 ms
_MOST_DEPTH = 4  # a Subset of a Subset of a dataset with a transform is three


def fingerprint(dataset: object) -> dict[str, object]:
    """Return short values by name: kind, length, and a checksum of whatever the dataset holds one of for each sample.

    That is a Subset's indices, `labels`, `targets`, `tensors`, `files`, under whatever name; and those of the dataset
    within. Two datasets whose values are equal may still differ in the pixels.
    """
    found: dict[str, object] = {}
    _describe(dataset, "dataset", found, _MOST_DEPTH)
    return found


def _describe(dataset: object, name: str, found: dict, depth: int) -> None:
    found[f"kind of {name}"] = type(dataset).__qualname__
    count = found[f"length of {name}"] = _length(dataset)
    if hash_given := getattr(dataset, "_fingerprint", None):  # Hugging Face's, of all that made it
        found[f"_fingerprint of {name}"] = str(hash_given)
    if (own := _checksum(dataset)) is not None:
        found[f"content of {name}"] = own
    for part, value in _parts(dataset):
        several = value if isinstance(value, tuple | list) and 0 < len(value) < 16 else ()
        rows = [value] if count and _length(value) == count else [one for one in several if _length(one) == count]
        sums = [one for one in map(_checksum, rows) if one is not None]
        if sums and count:
            found[f"{name}.{part}"] = sums[0] if len(sums) == 1 else tuple(sums)
        elif depth and hasattr(value, "__getitem__") and hasattr(type(value), "__len__") and hasattr(value, "__dict__"):
            _describe(value, f"{name}.{part}", found, depth - 1)


def _parts(dataset: object) -> list[tuple[str, object]]:
    parts = dict(getattr(dataset, "__dict__", {}))
    for name in ("labels", "targets", "indices"):  # which may be properties
        try:
            parts.setdefault(name, getattr(dataset, name, None))
        except Exception:  # of one that is no attribute of this dataset at this moment: its own affair
            continue
    return [(name, value) for name, value in parts.items() if value is not None and not callable(value)]


def _length(value: object) -> int | None:
    try:
        return len(value)
    except Exception:  # a scalar tensor, a stream, or whatever a stranger's __len__ raises
        return None


def _checksum(value: object) -> int | None:
    """Return a checksum of an array, a tensor in host memory, a column, or a list of plain values; else None."""
    import numpy
    import torch

    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided:
            return None
        rows = value.detach()[:: _step(value.nbytes, len(value))] if value.ndim else value.detach()
        return zlib.crc32(rows.contiguous().reshape(-1).view(torch.uint8).numpy())
    if type(value).__module__.startswith("pandas"):
        value = getattr(value, "values", value)
    if isinstance(value, numpy.ndarray) and value.dtype != object:
        rows = value[:: _step(value.nbytes, len(value))] if value.ndim else value
        return zlib.crc32(numpy.ascontiguousarray(rows).reshape(-1).view(numpy.uint8))
    if isinstance(value, list | tuple | range | numpy.ndarray) and len(value):
        some = list(value[:: _step(100 * len(value), len(value))])
        if all(_is_plain(one) for one in some):
            return zlib.crc32(repr(some).encode())
    return None


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return len(value) < 16 and all(map(_is_plain, value))
    return isinstance(value, str | bytes | int | float | bool) or hasattr(value, "__fspath__")


def _step(size: int, rows: int) -> int:
    return max(1, min(rows, -(-size // _MOST_BYTES)))
