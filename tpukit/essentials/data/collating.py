"""Join samples to a batch by torch's rules; if torch cannot, name the samples and the fix."""

from collections.abc import Mapping, Sequence

from tpukit.essentials.display import InvalidValueError


def collate(items: list, samples: Sequence[int] = ()) -> object:
    """Return the batch that `torch.utils.data.default_collate` makes of items.

    Args:
        items: the items of the dataset.
        samples: their numbers, for the error message.

    Raises:
        ValueError: the items cannot be stacked; the message names the first that differs.
    """
    from torch.utils.data import default_collate

    try:
        return default_collate(items)
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError) as error:
        forms = [_form(item) for item in items]
        are_alike = len(set(forms)) == 1
        if are_alike and isinstance(error, RuntimeError):
            raise  # the samples are not the cause: no memory, a full /dev/shm
        odd = next((place for place, form in enumerate(forms) if form != forms[0]), 0)
        found = []
        for place in sorted({0, odd}):
            sample = samples[place] if samples else place
            found.append(f"sample {sample}: {forms[place]}")
        found.append(str(error).partition("\n")[0])
        raise InvalidValueError(
            "the samples of a batch cannot be stacked",
            found="; ".join(found),
            fix="tensors of one shape from __getitem__, and no None: images through "
            "torchvision.transforms.v2.Resize((224, 224)) and PILToTensor(), "
            "flipped arrays with .copy(); series by core.batches(..., buckets=(64, 128))",
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
