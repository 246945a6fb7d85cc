"""Train PyTorch models on every TPU core, from a notebook.

This module has the names that most notebooks need; the subpackages have all other names. `import
tpukit` loads no subpackage and no torch: the first use of a name loads the module that defines it.
"""

import importlib
import importlib.util

__version__ = "0.1.0"

# Editors and type checkers assume that a name TYPE_CHECKING is true. To import it from typing would
# take most of the time of this import.
TYPE_CHECKING = False
if TYPE_CHECKING:  # the same names as in `_NAMES`; a test compares them
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
    from tpukit.essentials.environment import (
        check,
        cleanup,
        finish_install,
        machine_info,
        setup,
    )
    from tpukit.essentials.launcher import (
        Core,
        LaunchInterrupted,
        Limits,
        RuntimeInUseError,
        Session,
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

_SUBPACKAGES = (
    "accelerators", "cloud", "datasets", "essentials", "metrics", "migrate", "pe", "preflight",
    "profiling", "simulator", "training",
)  # fmt: skip
_NAMES = {
    "essentials.environment": ("check", "cleanup", "finish_install", "machine_info", "setup"),
    "essentials.launcher": (
        "Core",
        "LaunchInterrupted",
        "Limits",
        "RuntimeInUseError",
        "Session",
        "WorkerError",
        "current_core",
        "launch",
    ),
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
_SUBPACKAGE_OF = {}
for _subpackage, _names in _NAMES.items():
    _SUBPACKAGE_OF |= dict.fromkeys(_names, _subpackage)

__all__ = sorted([*_SUBPACKAGE_OF, *_SUBPACKAGES])


def __getattr__(name: str):
    """Load a subpackage or a name at its first use (PEP 562), and return it.

    Raises:
        AttributeError: tpukit has no such name, or its subpackage is absent. If a subpackage
            exports the name, the message says which.
    """
    if name in _SUBPACKAGES:
        return _load(name, f"tpukit.{name}")
    if name in _SUBPACKAGE_OF:
        return getattr(_load(_SUBPACKAGE_OF[name], f"tpukit.{name}"), name)
    text = f"module 'tpukit' has no attribute {name!r}"
    # Tools that inspect modules ask for names with an underscore. No subpackage is loaded for them.
    if not name.startswith("_"):
        for subpackage in _SUBPACKAGES:
            if importlib.util.find_spec(f"tpukit.{subpackage}") is None:
                continue
            module = importlib.import_module(f"tpukit.{subpackage}")
            if name in getattr(module, "__all__", ()):
                text += f"; it is tpukit.{subpackage}.{name}"
    raise AttributeError(text)


def _load(subpackage: str, wanted: str):
    try:
        return importlib.import_module(f"tpukit.{subpackage}")
    except ModuleNotFoundError as error:
        # Another missing module, such as torch, is not an absent subpackage.
        if error.name != f"tpukit.{subpackage}":
            raise
    raise AttributeError(
        f"{wanted} needs the subpackage tpukit.{subpackage}, which this copy of tpukit does not "
        "have"
    )


def __dir__() -> list[str]:
    """Return the names that Tab completes."""
    return [*__all__, "__version__"]
