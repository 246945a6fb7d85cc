"""Samples as one batch, by torch's rules; where those have no batch for them, which samples, and what helps."""

from collections.abc import Mapping, Sequence

from tpukit.essentials.display import InvalidValueError


def collate(items: list, samples: Sequence[int] = ()) -> object:
    """Return what `torch.utils.data.default_collate` makes of items; `samples` are their numbers, for the message."""
    from torch.utils.data import default_collate

    try:
        return default_collate(items)
    except (TypeError, RuntimeError, ValueError, AttributeError, KeyError) as error:
        forms = [_form(item) for item in items]
        if isinstance(error, RuntimeError) and len(set(forms)) == 1:
            raise  # alike, so not the samples' fault: no memory, a full /dev/shm
        odd = next((place for place, form in enumerate(forms) if form != forms[0]), 0)
        shown = [f"sample {samples[place] if samples else place}: {forms[place]}" for place in sorted({0, odd})]
        raise InvalidValueError(
            "the samples of a batch cannot be stacked",
            found="; ".join([*shown, str(error).partition("\n")[0]]),
            fix="tensors of one shape from __getitem__, and no None: images through torchvision.transforms.v2."
            "Resize((224, 224)) and PILToTensor(), flipped arrays with .copy(); "
            "series by core.batches(..., buckets=(64, 128))",
        ) from error


def _form(item: object) -> str:
    """Say what an item is: the kinds, shapes and dtypes of its parts."""
    if isinstance(item, Mapping):
        return f"{{{', '.join(f'{key!r}: {_form(part)}' for key, part in item.items())}}}"
    if isinstance(item, list | tuple):
        return f"({', '.join(map(_form, item))})"
    parts = [type(item).__name__]
    if (shape := getattr(item, "shape", None)) is not None:
        parts += [str(tuple(shape)), str(getattr(item, "dtype", ""))]
    return " ".join(filter(None, parts))
