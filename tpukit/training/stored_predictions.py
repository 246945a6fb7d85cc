"""Store a model's outputs for every sample in files, so that an interrupted run continues.

For 150,000 samples and `piece=65_536` the folder contains

    predictions.json    the plan: checksum of the weights, number of samples, samples per file,
                        and facts about samples, `preprocess` and `bf16`
    000000000.npz       outputs of samples 0 to 65,535, written when all of them are computed
    000065536.npz       outputs of samples 65,536 to 131,071
    000131072.npz       outputs of samples 131,072 to 149,999

A run with the same plan computes only the files that are missing.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import types
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

from tpukit.essentials.data import different_parts, identity, seeded_in_turn
from tpukit.essentials.display import (
    InvalidTypeError,
    InvalidValueError,
    PathNotFoundError,
    check_count,
    first_few,
)
from tpukit.essentials.environment import write_whole
from tpukit.essentials.launcher import Core, called_text
from tpukit.training.backup import refuse_unmounted
from tpukit.training.prediction import predict

PLAN = "predictions.json"
_PIECES = "[0-9]*.npz"


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
    """Write a model's outputs for every sample into a folder. Collective.

        predict_to("features", core, model, images, batch_size=64)
        outputs = read_predictions("features")

    If a run was interrupted, call `predict_to` again: it computes only the missing files. If the
    folder or its backup has outputs of other weights, of another number of samples or with another
    `piece`, they are deleted. If only the contents of the samples, `preprocess` or `bf16` differ,
    `predict_to` raises an error instead, because the outputs may have taken hours. It compares the
    code of `preprocess`, and the tensors and floats in its closure or `functools.partial`. It does
    not notice other integers or texts there, or other attributes of an object. Floating-point
    outputs are stored as float16, which needs half the bytes of float32. `read_predictions` returns
    them as float16.

    Args:
        folder: folder on this machine, for these files only.
        core: this core.
        model: as in `predict`, but its outputs are a tensor or a dict of tensors.
        dataset: map-style dataset, as for `core.batches`.
        batch_size: samples per core and step.
        preprocess: as in `predict`.
        bf16: as in `predict`.
        piece: samples per file. After an interruption, at most this many are computed again.
        backup_dir: backup folder, whose parent exists; see `run_folder`. Each file is copied to it
            when it is complete, and files that only the backup has are copied back. If the parent
            is missing or a copy fails, the reason is printed, and the run continues without the
            backup. None: no backup.

    Raises:
        ValueError: an output is larger than 65504, the largest float16; the folder has outputs of
            these weights for other samples, or with another `preprocess` or `bf16`; the dataset is
            empty; `piece` is below 1; or a folder is a URL.
        TypeError: the outputs are neither a tensor nor a dict of tensors.
    """
    import torch
    from torch.utils.data import Subset

    _refuse_url("folder", folder)
    _refuse_url("backup_dir", backup_dir or "")
    check_count("piece", piece)
    piece = int(piece)  # JSON does not support a number of numpy
    folder = Path(folder).expanduser()
    count = len(dataset)
    if not count:
        raise InvalidValueError(
            "the dataset has no samples, so there is nothing to predict",
            fix="check how the dataset was made",
        )
    starts = range(0, count, piece)
    plan = {
        "weights": _digest(core.to_host(model.state_dict())),
        "count": count,
        "piece": piece,
    }
    # 1 for each file that core 0 has found; the other cores contribute zeros to the maximum.
    is_found = torch.zeros(len(starts), dtype=torch.float32)
    if core.is_main:
        plan["facts"] = _facts(dataset, preprocess, bf16=bf16)
        _begin(folder, plan)
        backup_dir = backup_dir and _restore(
            Path(backup_dir).expanduser(), folder, plan=plan, say=core.print
        )
        is_found += torch.tensor([(folder / _name(start)).is_file() for start in starts])
    # Only core 0 looks for files, and all cores get its result. If each core looked, some could see
    # a file that core 0 has just written, and would not compute the same pieces as the others.
    (is_found,) = core.to_device([is_found])
    is_found = core.to_host(core.all_reduce(is_found, "max")).tolist()
    if any(is_found):
        found = int(sum(is_found))
        core.print(f"{found} of {len(starts)} pieces of the predictions are found in {folder}")
    for start, found in zip(starts, is_found, strict=True):
        if found:
            continue
        samples = Subset(dataset, range(start, min(start + piece, count)))
        batches = core.batches(samples, batch_size=batch_size)
        outputs = predict(core, model, batches, preprocess=preprocess, bf16=bf16)
        # Every core has all outputs of the piece, so core 0 can write them alone.
        if core.is_main:
            _write(folder / _name(start), outputs)
            backup_dir = backup_dir and _copy_missing(folder, backup_dir, say=core.print)
    core.barrier()  # no core returns before all files are complete


def read_predictions(folder) -> object:
    """Return the outputs of all samples that `predict_to` has written.

    Args:
        folder: the folder of `predict_to`.

    Returns:
        a tensor (N, ...) on the CPU, in dataset order, or a dict of such tensors if the model
        returns a dict. Floating-point outputs are float16.

    Raises:
        FileNotFoundError: the folder does not have the outputs of all samples.
    """
    import numpy
    import torch

    folder = Path(folder).expanduser()
    plan = {"count": 0, "piece": 1}
    if (folder / PLAN).is_file():
        plan = json.loads((folder / PLAN).read_text())
    files = [folder / _name(start) for start in range(0, plan["count"], plan["piece"])]
    missing = [file for file in files if not file.is_file()]
    if missing or not files:
        raise PathNotFoundError(
            f"{folder} does not hold the predictions for all samples",
            found=f"{len(files) - len(missing)} of {len(files)} pieces",
            fix="call predict_to again: it continues where it was interrupted",
        )
    pieces = []
    for file in files:
        with numpy.load(file) as piece:
            pieces.append(dict(piece))
    whole = {}
    for name in pieces[0]:
        whole[name] = torch.from_numpy(numpy.concatenate([piece[name] for piece in pieces]))
    # `_write` stores a single tensor under the name "".
    is_single = whole.keys() == {""}
    return whole[""] if is_single else whole


def _refuse_url(name: str, folder) -> None:
    """Raise ValueError for a URL; used as a path, it would create a folder "gs:" here."""
    if "://" in os.fspath(folder):
        raise InvalidValueError(
            f"{name} must be a folder on this machine, got {os.fspath(folder)!r}",
            fix="a folder of this machine, or of a mounted drive or bucket",
        )


def _begin(folder: Path, plan: dict) -> None:
    """Write a plan into the folder; remove the outputs of another plan.

    Raises:
        ValueError: the folder has outputs of a plan that differs only in its facts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / PLAN
    before = {}
    with contextlib.suppress(FileNotFoundError, ValueError):  # no plan, or an incomplete one
        before = json.loads(kept.read_text())
    if before == plan:
        return
    # Do the plans differ only in their facts? Then the weights are the same.
    is_same_model = {**before, "facts": plan["facts"]} == plan and "facts" in before
    if is_same_model and any(folder.glob(_PIECES)):
        _check_facts(folder, before["facts"], plan["facts"])
        return
    # Remove the plan first: if this is interrupted, old outputs without a plan are removed later.
    kept.unlink(missing_ok=True)
    for piece in folder.glob(_PIECES):
        piece.unlink()
    with write_whole(kept) as file:
        file.write(json.dumps(plan).encode())


def _check_facts(folder: Path, saved: Mapping[str, object], here: Mapping[str, object]) -> None:
    """Raise ValueError if a fact that both plans contain differs."""
    known = saved.keys() & here.keys()
    different = different_parts(
        {name: value for name, value in saved.items() if name in known},
        {name: value for name, value in here.items() if name in known},
    )
    if different:
        raise InvalidValueError(
            f"{folder} holds outputs of this model for other samples or with other options",
            found="different: " + first_few(different, 4),
            fix="store the new outputs in another folder; or delete the old ones: "
            f"shutil.rmtree({str(folder)!r})",
        )


def _facts(dataset, preprocess: Callable | None, *, bf16: bool) -> dict[str, object]:
    """Return, by name, the facts besides the weights on which the outputs depend."""
    facts = {**identity(dataset), "bf16": repr(bool(bf16)), "preprocess": "None"}
    if preprocess is not None:
        facts["preprocess"] = called_text(preprocess)
        # The name contains the version of Python, because bytecode differs between versions.
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        facts[f"code of preprocess in Python {version}"] = _code_checksum(preprocess)
    # A dataset with `checkpoint_identity` describes its samples itself, so none needs to be read.
    if not hasattr(type(dataset), "checkpoint_identity"):
        facts |= _sample_facts(dataset)
    return facts


def _code_checksum(function: Callable) -> int | None:
    """Return a checksum of a Python function's bytecode; None for other callables.

    Functions that are defined in the function are included.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    parts = []
    pending = [code]
    while pending:
        code = pending.pop()
        pending += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        constants = [one for one in code.co_consts if not isinstance(one, types.CodeType)]
        parts.append((code.co_code, code.co_names, repr(constants)))
    return zlib.crc32(repr(parts).encode())


def _sample_facts(dataset) -> dict[str, object]:
    """Return {"samples": checksum of the first, the middle and the last sample}.

    Each sample is read twice. If the two readings differ, because the dataset draws random numbers
    without a seed, the result is empty: such samples cannot be compared.
    """
    places = sorted({0, len(dataset) // 2, len(dataset) - 1})
    sums = []
    for _ in range(2):
        with seeded_in_turn((0,)):
            sums.append([_sample_checksum(dataset[place]) for place in places])
    if sums[0] != sums[1]:
        return {}
    return {"samples": zlib.crc32(repr(sums[0]).encode())}


def _sample_checksum(sample: object) -> list:
    """Return a checksum for each tensor, array, number and text in a sample."""
    import numpy
    import torch
    from torch.utils import _pytree as tree

    sums = []
    for leaf in tree.tree_leaves(sample):
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu()
            leaf = leaf.float() if leaf.dtype == torch.bfloat16 else leaf  # numpy has no bfloat16
            sums.append((tuple(leaf.shape), zlib.crc32(leaf.contiguous().numpy().tobytes())))
        elif isinstance(leaf, numpy.ndarray | numpy.generic):
            sums.append((leaf.shape, zlib.crc32(leaf.tobytes())))
        elif isinstance(leaf, bool | int | float | str):
            sums.append(repr(leaf))
    return sums


def _restore(
    backup: Path, folder: Path, *, plan: dict, say: Callable[[str], object]
) -> Path | None:
    """Copy missing files between folder and backup; return the backup, or None after an error."""
    try:
        refuse_unmounted(backup)
        _begin(backup, plan)
    except OSError as error:
        say(f"the backup {backup} cannot be used, and the run continues without it: {error}")
        return None
    return _copy_missing(backup, folder, say=say) and _copy_missing(folder, backup, say=say)


def _copy_missing(source: Path, to: Path, *, say: Callable[[str], object]) -> Path | None:
    """Copy files that are missing or damaged in `to`; return `to`, or None after an error."""
    try:
        for piece in sorted(source.glob(_PIECES)):
            copy = to / piece.name
            # An .npz file is a zip. A truncated one has no directory at its end.
            is_there = copy.is_file() and zipfile.is_zipfile(copy)
            if is_there or not zipfile.is_zipfile(piece):
                continue
            with open(piece, "rb") as read, write_whole(copy) as written:
                shutil.copyfileobj(read, written)
    except OSError as error:
        say(f"the predictions were not copied to {to}, and the run continues: {error}")
        return None
    return to


def _write(file: Path, outputs) -> None:
    import numpy

    named = outputs if isinstance(outputs, dict) else {"": outputs}
    arrays = {name: _halved(name, value).numpy() for name, value in named.items()}
    with write_whole(file) as written:
        numpy.savez(written, **arrays)


def _halved(name: str, value):
    """Return a floating-point tensor as float16, and any other tensor unchanged.

    Raises:
        TypeError: the value is no tensor.
        ValueError: a finite number would become infinite.
    """
    if not hasattr(value, "is_floating_point"):
        raise InvalidTypeError(
            f"predict_to stores a tensor or a dict of tensors, got a {type(value).__name__}",
            fix='let the model return a dict of tensors (B, ...), such as {"logits": logits}; or '
            "use predict(...)",
        )
    if not value.is_floating_point():
        return value
    half = value.half()
    # Numbers above 65504 become infinite. Numbers that were infinite before are accepted.
    lost = value[half.isinf() & value.isfinite()]
    if lost.numel():
        output = f"the model's output {name!r}" if name else "the model's output"
        raise InvalidValueError(
            f"outputs are stored as float16, at most 65504, but {output} goes up to "
            f"{lost.abs().max().item():.6g}",
            fix=(
                "let the model return numbers near 1, such as logits; or use predict(...), which "
                "keeps float32"
            ),
        )
    return half


def _name(start: int) -> str:
    return f"{start:09d}.npz"


def _digest(state: dict) -> str:
    """Return the SHA-256 of all weights and their names."""
    import torch

    digest = hashlib.sha256()
    # The order of a state dict is that of the modules, so equal models have equal checksums.
    for name, value in state.items():
        digest.update(name.encode())
        # As bytes, because numpy has no bfloat16.
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
