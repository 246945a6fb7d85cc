"""PyTorch on every TPU core, from a notebook. This is what a notebook needs; the rest is in the rooms beside it.

Importing it loads nothing else of the kit, and no torch: a name is loaded when it is first asked for.
"""

import importlib
import importlib.util

__version__ = "0.1.0"

TYPE_CHECKING = False  # editors take it for true; the module typing would be most of the time of this import
if TYPE_CHECKING:  # `_NAMES` says the same to Python, and a test compares them
    from tpukit import (
        accelerators,
        cloud,
        datasets,
        essentials,
        metrics,
        migrate,
        pe,
        preflight,
        profiling,
        simulator,
        training,
    )
    from tpukit.datasets import PackedImages, PackOptions, cached_images, pack
    from tpukit.essentials.display import TpukitError, show_batch, style_figure
    from tpukit.essentials.environment import check, cleanup, machine_info, setup
    from tpukit.essentials.launcher import (
        Core,
        LaunchInterrupted,
        Limits,
        RuntimeInUseError,
        WorkerError,
        current_core,
        launch,
    )
    from tpukit.metrics import show_predictions
    from tpukit.preflight import draw_tpu
    from tpukit.training import (
        Augment,
        Buckets,
        Checkpoints,
        EarlyStopping,
        FitOptions,
        evaluate,
        fit,
        launch_each,
        predict,
        show_history,
    )

_ROOMS = (
    "accelerators", "cloud", "datasets", "essentials", "metrics", "migrate", "pe", "preflight",
    "profiling", "simulator", "training",
)  # fmt: skip
_NAMES = {
    "essentials.environment": ("check", "cleanup", "machine_info", "setup"),
    "essentials.launcher": (
        "Core",
        "LaunchInterrupted",
        "Limits",
        "RuntimeInUseError",
        "WorkerError",
        "current_core",
        "launch",
    ),  # fmt: skip
    "essentials.display": ("TpukitError", "show_batch", "style_figure"),
    "datasets": ("PackOptions", "PackedImages", "cached_images", "pack"),
    "preflight": ("draw_tpu",),
    "metrics": ("show_predictions",),
    "training": (
        "Augment",
        "Buckets",
        "Checkpoints",
        "EarlyStopping",
        "FitOptions",
        "evaluate",
        "fit",
        "launch_each",
        "predict",
        "show_history",
    ),
}
_ROOM_OF = {name: room for room, names in _NAMES.items() for name in names}

__all__ = sorted([*_ROOM_OF, *_ROOMS])


def __getattr__(name: str):
    """Load a room, or the room that a name is in. Where a room is not here, or knows the name, say so in one line."""
    if name in _ROOMS:
        return _room(name, f"tpukit.{name}")
    if name in _ROOM_OF:
        return getattr(_room(_ROOM_OF[name], f"tpukit.{name}"), name)
    text = f"module 'tpukit' has no attribute {name!r}"
    if not name.startswith("_"):  # those are asked for by tools that look at modules
        rooms = [room for room in _ROOMS if importlib.util.find_spec(f"tpukit.{room}")]
        there = [room for room in rooms if name in getattr(importlib.import_module(f"tpukit.{room}"), "__all__", ())]
        text += "".join(f"; it is tpukit.{room}.{name}" for room in there)
    raise AttributeError(text)


def _room(room: str, wanted: str):
    try:
        return importlib.import_module(f"tpukit.{room}")
    except ModuleNotFoundError as error:
        if error.name != f"tpukit.{room}":
            raise
    raise AttributeError(f"{wanted} needs the part tpukit.{room}, which this copy of the kit does not have")


def __dir__() -> list[str]:
    """Name what *Tab* shows."""
    return [*__all__, "__version__"]
