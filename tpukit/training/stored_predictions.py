"""What a model says of every sample, kept in files as it is computed, and found again by the next session."""

import contextlib
import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from tpukit.essentials.display import InvalidValueError, PathNotFoundError
from tpukit.essentials.environment import write_whole
from tpukit.essentials.launcher import Core
from tpukit.training.prediction import predict

PLAN = "predictions.json"


def predict_to(
    folder,
    core: Core,
    model,
    dataset,
    *,
    batch_size: int,
    preprocess: Callable | None = None,
    bf16: bool = False,
    piece: int = 65_536,
    backup_dir=None,
) -> None:
    """Write a model's outputs for every sample into a folder, piece by piece, together; what is there is not computed.

    A run that was cut off goes on with the first piece that is missing. With other weights, or another number of
    samples, all begins anew. Floating outputs are kept in half the bytes, as float16: `read_predictions` returns them.

    Args:
        folder: of nothing else, on this machine.
        core, model, preprocess, bf16: as for `predict`.
        dataset: map-style, as for `core.batches`, in order.
        batch_size: samples a core and step.
        piece: samples that are computed again at most.
        backup_dir: a second folder that outlives the machine, see `run_folder`: it gets each piece when it is computed,
            and what it has is not computed. Trouble with it is said and ends nothing.

    Raises:
        ValueError: an output is larger than float16 can say.
    """
    import torch
    from torch.utils.data import Subset

    folder, count = Path(folder), len(dataset)
    starts = range(0, count, piece)
    plan = {"weights": _digest(core.to_host(model.state_dict())), "count": count, "piece": piece}
    there = torch.zeros(len(starts), dtype=torch.float32)
    if core.is_main:
        _begin(folder, plan)
        backup_dir = backup_dir and _take(Path(backup_dir), folder, plan, say=core.print)
        there += torch.tensor([(folder / _name(start)).is_file() for start in starts])
    # Core 0 alone looks: where others saw what it writes meanwhile, they would not compute the same pieces.
    there = core.to_host(core.all_reduce(*core.to_device([there]), "max")).tolist()
    if any(there):
        core.print(f"{int(sum(there))} of {len(starts)} pieces of what the model says are found in {folder}")
    for start, found in zip(starts, there, strict=True):
        if not found:
            part = Subset(dataset, range(start, min(start + piece, count)))
            batches = core.batches(part, batch_size=batch_size)
            outputs = predict(core, model, batches, preprocess=preprocess, bf16=bf16)
            if core.is_main:
                _write(folder / _name(start), outputs)
                backup_dir = backup_dir and _bring(folder, backup_dir, say=core.print)
    core.barrier()  # all is there when any core goes on


def read_predictions(folder) -> object:
    """Return what `predict_to` kept of all samples: (N, ...), a tensor, or a dict of them as the model's.

    Raises:
        FileNotFoundError: not all of it is there.
    """
    import numpy
    import torch

    folder = Path(folder)
    plan = json.loads((folder / PLAN).read_text()) if (folder / PLAN).is_file() else {"count": 0, "piece": 1}
    files = [folder / _name(start) for start in range(0, plan["count"], plan["piece"])]
    gone = [file.name for file in files if not file.is_file()]
    if gone or not files:
        raise PathNotFoundError(
            f"{folder} does not hold what a model says of all samples",
            found=f"{len(files) - len(gone)} of {len(files)} pieces",
            fix="call predict_to again: it continues where it was interrupted",
        )
    pieces = []
    for file in files:
        with numpy.load(file) as piece:
            pieces.append(dict(piece))
    whole = {name: torch.from_numpy(numpy.concatenate([piece[name] for piece in pieces])) for name in pieces[0]}
    return whole[""] if whole.keys() == {""} else whole


def _begin(folder: Path, plan: dict) -> None:
    """Make the folder one of this plan; the pieces of another one are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / PLAN
    with contextlib.suppress(FileNotFoundError, ValueError):  # there is none, or it was cut off
        if json.loads(kept.read_text()) == plan:
            return
    kept.unlink(missing_ok=True)
    for piece in folder.glob("[0-9]*.npz"):
        piece.unlink()
    with write_whole(kept) as file:
        file.write(json.dumps(plan).encode())


def _take(backup_dir: Path, folder: Path, plan: dict, say: Callable[[str], object]) -> Path | None:
    """Bring pieces of this plan from the backup, and to it those it lacks; return it, or None where it fails."""
    try:
        _begin(backup_dir, plan)
    except OSError as error:
        say(f"the backup {backup_dir} cannot be used, and the run goes on without: {error}")
        return None
    return _bring(backup_dir, folder, say) and _bring(folder, backup_dir, say)


def _bring(source: Path, to: Path, say: Callable[[str], object]) -> Path | None:
    """Copy the pieces that are missing or cut off; return where to, or None where that failed, and was said."""
    try:
        for piece in sorted(source.glob("[0-9]*.npz")):
            there = to / piece.name
            if (there.is_file() and zipfile.is_zipfile(there)) or not zipfile.is_zipfile(piece):
                continue
            with open(piece, "rb") as read, write_whole(there) as written:
                shutil.copyfileobj(read, written)
    except OSError as error:
        say(f"what the model says was not copied to {to}, and the run goes on without: {error}")
        return None
    return to


def _write(file: Path, outputs) -> None:
    import numpy

    named = outputs if isinstance(outputs, dict) else {"": outputs}
    arrays = {name: _halved(name, value).numpy() for name, value in named.items()}
    with write_whole(file) as written:
        numpy.savez(written, **arrays)


def _halved(name: str, value):
    """Return floating numbers as float16, others as they are; ValueError where finite ones became infinite."""
    if not value.is_floating_point():
        return value
    half = value.half()
    if (lost := value[half.isinf() & value.isfinite()]).numel():
        raise InvalidValueError(
            f"float16, as which outputs are kept, ends at 65504: what the model says{f' as {name!r}' * bool(name)} "
            f"goes up to {lost.abs().max().item():.6g}",
            fix="let the model return numbers near 1, such as logits; or predict(...), which keeps float32",
        )
    return half


def _name(start: int) -> str:
    return f"{start:09d}.npz"


def _digest(state: dict) -> str:
    """Return what tells these weights from others."""
    digest = hashlib.sha256()
    for name, value in state.items():
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()
