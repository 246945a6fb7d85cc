"""Join samples to a batch by torch's rules; an error names the samples that differ."""

from collections.abc import Mapping, Sequence

from tpukit.essentials.display import InvalidValueError


def collate(items: list, samples: Sequence[int] = ()) -> object:
    """Join items to a batch with torch's `default_collate`, and return the batch.

    Args:
        items: the items of the dataset.
        samples: the sample numbers of the items, for the error message; empty to count from 0.

    Raises:
        InvalidValueError: the items cannot be stacked; the message describes the first item, and
            the first that differs from it, if any.
        RuntimeError: torch could not join the items, although their types and shapes are equal.
    """
    from torch.utils.data import default_collate

    try:
        return default_collate(items)
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError) as error:
        forms = [_form(item) for item in items]
        are_alike = len(set(forms)) == 1
        if are_alike and isinstance(error, RuntimeError):
            raise  # for example because of a lack of memory or a full /dev/shm
        odd = next((place for place, form in enumerate(forms) if form != forms[0]), 0)
        found = []
        for place in sorted({0, odd}):
            sample = samples[place] if samples else place
            found.append(f"sample {sample}: {forms[place]}")
        found.append(str(error).partition("\n")[0])
        raise InvalidValueError(
            "the samples of a batch cannot be stacked",
            found="; ".join(found),
            fix="return tensors of one shape from __getitem__, and never None; for images, apply "
            "torchvision.transforms.v2.Resize((224, 224)) and PILToTensor(); for flipped arrays, "
            "call .copy(); for series of several lengths: core.batches(..., buckets=(64, 128))",
        ) from error


def _form(item: object) -> str:
    """Return the types, shapes and dtypes of an item's parts: `(Tensor (3, 8) float32, int)`."""
    if isinstance(item, Mapping):
        parts = [f"{key!r}: {_form(part)}" for key, part in item.items()]
        return f"{{{', '.join(parts)}}}"
    if isinstance(item, list | tuple):
        return f"({', '.join(map(_form, item))})"
    parts = [type(item).__name__]
    shape = getattr(item, "shape", None)
    if shape is not None:
        parts += [str(tuple(shape)), str(getattr(item, "dtype", ""))]
    return " ".join(filter(None, parts))
