"""What runs and may not mean what it meant: told once a file, with all its places."""

import re
from collections.abc import Iterator
from dataclasses import replace

import libcst as cst

from tpukit.migrate.book import Book
from tpukit.migrate.known_names import SPAWN, XM
from tpukit.migrate.name_rules import ADAMW
from tpukit.migrate.old_cells import OF_SAMPLER, OF_SPAWN, Cell, by_name, code, dotted
from tpukit.migrate.rows import Row

_WORLD = r"\b(xrt_world_size|world_size)\("
_ADDRESS = re.compile(r"""['"]COLAB_TPU_ADDR['"]\s+(not\s+)?in\b|\b(environ\.get|getenv)\(\s*['"]COLAB_TPU_ADDR""")
_TEXTS = {
    "address": "nothing sets it today: the code goes its way without a TPU; tpukit.host().chips tells of one",
    "mesh_reduce": "the mean of the cores' scores is not the score of all samples",
    "save": "rank 0 writes, so its shard alone decides; the old save met the other cores inside",
    "replicas": "written as a number: with fewer cores an epoch sees a part of the data; xr.world_size() counts",
    "rate": "it holds the world size: on another number of cores this is another recipe",
    "validation": "DistributedSampler pads, so some samples count twice",
    "tqdm": "tqdm.notebook draws nothing from a worker: from tqdm import tqdm prints",
    "pooled": "transformers 4 unpacks names here, not tensors: return_dict=False",
    "padding": 'transformers 3 and later: padding="max_length", truncation=True',
    "pretrained": 'runs with a warning: weights="IMAGENET1K_V1"',
    "scheduler": "torch's schedulers have no verbose any more: TypeError where this is given to one: delete it",
    "AdamW": "the optimizer of transformers had eps=1e-6 and weight_decay=0.0 where nobody gave them",
    "one core": "it ran in the kernel, which kept what it changed: a process keeps it to itself: use run.results",
    "Trainer": "Lightning 2 has no gpus, progress_bar_refresh_rate and others of Lightning 1: TypeError",
    "comment": "a launch that is only a comment: comments are never rewritten",
    "modules": "the notebook does not hold this module: migrate its file too, or install what has taken its place",
    "XLA_USE_BF16": "it still acts: bfloat16 on the device, while .dtype says float32",
    "export": "a shell of its own: it never did anything, and is left as it is",
    "torch": "pip would put another torch in place of the image's own, and torch_xla would not import with it",
}
_OF_LIGHTNING_1 = {
    *("gpus", "num_processes", "distributed_backend", "progress_bar_refresh_rate", "weights_summary", "amp_level"),
    *("checkpoint_callback", "early_stop_callback", "resume_from_checkpoint", "auto_lr_find", "auto_scale_batch_size"),
    *("terminate_on_nan", "track_grad_norm", "reload_dataloaders_every_epoch", "replace_sampler_ddp", "log_gpu_memory"),
}
_IN_PLACE = {"engine", "wtfml", "fastai_xla_extensions", "utils", "dataset", "model", "config", "train"}


def notes(cells: list[Cell], book: Book) -> Iterator[Row]:
    """Give a note for each place."""
    for cell in cells:
        for rule, line, text in [*_of_lines(cell), *(_of_nodes(cell, book) if cell.tree else ())]:
            yield Row("note", cell.number, cell.told(line), rule, text, _TEXTS[rule])


def once_a_file(rows: list[Row]) -> list[Row]:
    """Return rows with one note for each thing: its first place, and the lines of the others."""
    first: dict[tuple, list[Row]] = {}
    for row in rows:
        first.setdefault(("note", row.rule, row.new) if row.kind == "note" else (row,), []).append(row)
    return [_with_places(*same) for same in first.values()]


def _with_places(row: Row, *others: Row) -> Row:
    places = dict.fromkeys(one.place for one in others if one.place != row.place)
    return replace(row, new=f"{row.new}; also {', '.join(places)}") if row.kind == "note" and places else row


def _of_lines(cell: Cell) -> Iterator[tuple[str, int, str]]:
    shell = cell.tree is None
    for number, line in enumerate(cell.source.split("\n"), start=1):
        text = line.strip()
        if re.match(r"#.*\b(xmp\.spawn|xla_multiprocessing\.spawn)\(", text):
            yield "comment", number, text
        if re.match(r"(!\s*export\s+\w+=|get_ipython\(\)\.system\(['\"]export )", text) or (
            shell and re.match(r"export XLA_\w+=", text)
        ):
            yield "export", number, text
        elif _ADDRESS.search(text) and not re.match("#|assert", text):
            yield "address", number, text
        elif re.search(r"environ.*XLA_USE_BF16|^%(set_)?env XLA_USE_BF16", text) and not text.startswith("#"):
            yield "XLA_USE_BF16", number, text
        if re.match(r"[!%]\s*(python3? -m )?pip3? install.*\btorch==", text) and "torch_xla" not in text:
            yield "torch", number, text


def _of_nodes(cell: Cell, book: Book) -> Iterator[tuple[str, int, str]]:
    for node in cell.parents:
        rule = ""
        if isinstance(node, cst.Call):
            rule = _of_call(cell, node, book)
        elif isinstance(node, cst.Assign):
            text = code(node)
            target = code(node.targets[0].target)
            if re.search(_WORLD, text) and re.search(r"\b(lr|learning_rate|steps?)\b|_(lr|steps?)\b", target, re.I):
                rule = "rate"
            elif re.search("sched", target, re.I) and re.search(r"=\s*(dict\(|\{)[^()]*\bverbose['\"]?\s*[=:]", text):
                rule = "scheduler"
            elif isinstance(node.value, cst.Call) and re.match(
                r"_\s*,\s*\w+\s*=\s*self\.\w*(bert|roberta|model)\w*\(", text
            ):
                rule = "" if "return_dict" in text else "pooled"
        elif isinstance(node, cst.Import | cst.ImportFrom):
            rule = _of_import(node)
        elif isinstance(node, cst.Name) and node.value == "AdamW" and not isinstance(cell.parents[node], cst.Call):
            above = cell.parents[node]
            rule = "AdamW" if isinstance(above, cst.Arg) and book.meanings.full(cell, node) in ADAMW else ""
        if rule:
            yield rule, cell.positions[node].start.line, code(node).strip()


def _of_import(node: cst.Import | cst.ImportFrom) -> str:
    names = [node.module] if isinstance(node, cst.ImportFrom) else [one.name for one in node.names]
    modules = [dotted(one) for one in names if one]
    if any(one == "tqdm.notebook" or one == "tqdm.autonotebook" for one in modules):
        return "tqdm"
    return "modules" if any(one.split(".")[0] in _IN_PLACE for one in modules) else ""


def _of_call(cell: Cell, node: cst.Call, book: Book) -> str:
    full = book.meanings.full(cell, node.func)
    places = OF_SPAWN if full == SPAWN else OF_SAMPLER if code(node.func).endswith("DistributedSampler") else ()
    given = {name: code(one.value) for name, one in by_name(node, places).items()}
    if full == f"{XM}.mesh_reduce":
        return "mesh_reduce"
    if full == SPAWN:
        return "one core" if given.get("nprocs") == "1" else ""
    if full.endswith(".Trainer") and full.split(".")[0] in ("pytorch_lightning", "lightning"):
        return "Trainer" if given.keys() & _OF_LIGHTNING_1 else ""
    if full == f"{XM}.save":
        tests = [code(one.test) for one in cell.above_of(node) if isinstance(one, cst.If)]
        return "save" if any(re.search(r"[<>]", one) for one in tests) else ""
    if places == OF_SAMPLER:
        numbers = [given.get(name, "") for name in ("num_replicas", "rank")]
        if not book.path.counts_cores(cell, node) and any(one.isdigit() for one in numbers):
            return "replicas"
        return "validation" if re.search(r"val|test", given.get("dataset", ""), re.I) else ""
    if "pad_to_max_length" in given:
        return "padding"
    if given.get("pretrained") == "True" and full.startswith("torchvision."):
        return "pretrained"
    return ""
