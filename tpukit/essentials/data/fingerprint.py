"""What a dataset is, as far as that can be had without reading a sample: for comparing it between cores."""

import zlib
from collections.abc import Mapping

_MOST_BYTES = 1 << 22  # of one part, looked at in even steps; all of 60,000 digits would take 30 ms
_MOST_A_SAMPLE = 1 << 10  # bytes: labels, indices and names have fewer; what has more may be filled while it is read
_MOST_NAMES = 1 << 12  # of classes
_MOST_DEPTH = 4  # a Subset of a Subset of a dataset with a transform is three


def fingerprint(dataset: object) -> dict[str, object]:
    """Return short values by name: kind, length, and a checksum of whatever the dataset holds one of for each sample.

    That is a Subset's indices, `labels`, `targets`, `tensors`, `files`, a table's rows, under whatever name; and those
    of the dataset within. So do names of classes, whose order or numbers decide about labels. Two datasets whose values
    are equal may still differ in the pixels.
    """
    found: dict[str, object] = {}
    _describe(dataset, "dataset", found, _MOST_DEPTH)
    return found


def _describe(dataset: object, name: str, found: dict, depth: int) -> None:
    found[f"kind of {name}"] = type(dataset).__qualname__
    count = found[f"length of {name}"] = _length(dataset)
    if (own := _checksum(dataset)) is not None:
        found[f"content of {name}"] = own
    for part, value in _parts(dataset):
        several = list(value.values()) if isinstance(value, Mapping) else value
        several = several if isinstance(several, tuple | list) and 0 < len(several) < 16 else ()
        rows = [value] if count and _length(value) == count else [one for one in several if _length(one) == count]
        sums = [one for one in map(_checksum, rows) if one is not None]
        if sums and count:
            found[f"{name}.{part}"] = sums[0] if len(sums) == 1 else tuple(sums)
        elif _are_names(value):
            found[f"{name}.{part}"] = zlib.crc32(
                repr(sorted(value.items()) if isinstance(value, dict) else value).encode()
            )
        elif depth and hasattr(value, "__getitem__") and hasattr(type(value), "__len__") and hasattr(value, "__dict__"):
            _describe(value, f"{name}.{part}", found, depth - 1)


def _are_names(value: object) -> bool:
    """Say whether this is a list of texts, or numbers by name."""
    if not isinstance(value, list | tuple | dict) or not 0 < len(value) <= _MOST_NAMES:
        return False
    numbers = value.values() if isinstance(value, dict) else ()
    return all(isinstance(one, str) for one in value) and all(isinstance(one, int) for one in numbers)


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
    """Return a checksum of an array, a tensor in host memory, a table, or a list of plain values; else None."""
    import numpy
    import torch

    if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout == torch.strided and value.ndim:
        value = value.detach().view(torch.uint8) if value.dtype == torch.bfloat16 else value.detach()
        value = value.resolve_conj().numpy()
    if isinstance(value, numpy.ndarray) and value.dtype != object and value.ndim and len(value):
        if value.nbytes > _MOST_A_SAMPLE * len(value):
            return None
        rows = value[:: _step(value.nbytes, len(value))]
        return zlib.crc32(numpy.ascontiguousarray(rows).reshape(-1).view(numpy.uint8))
    if hasattr(value, "iloc") and len(value):  # pandas
        return zlib.crc32(value.iloc[:: _step(_MOST_A_SAMPLE * len(value), len(value))].to_csv().encode())
    if hasattr(value, "columns") and hasattr(value, "slice"):  # Arrow, as Hugging Face's data and indices
        numbers = [one for one in value.columns if str(one.type).startswith(("int", "uint", "float"))]
        value = [_checksum(one.to_numpy()) for one in numbers]
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple | range | numpy.ndarray) and len(value):
        some = list(value[:: _step(100 * len(value), len(value))])
        if all(map(_is_plain, some)):
            return zlib.crc32(repr(some).encode())
    return None


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, tuple | list):
        return len(value) < 16 and all(map(_is_plain, value))
    return isinstance(value, str | bytes | int | float | bool) or hasattr(value, "__fspath__")


def _step(size: int, rows: int) -> int:
    return max(1, min(rows, -(-size // _MOST_BYTES)))
