"""The parts of the kit that stand beside the essentials, found by name when somebody asks for what they do."""

import importlib
from types import ModuleType

from tpukit.essentials.display.errors import NotInstalledError


def missing_part(module: str) -> str | None:
    """Return the part of the kit that a module is in, or needs, and that is not here; None where all is here."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("tpukit."):
            raise
        return error.name
    return None


def load_part(module: str, what: str) -> ModuleType:
    """Return a module of another part of the kit, which `what` is in.

    Raises:
        NotInstalledError: this copy of tpukit does not have the subpackage.
    """
    if missing := missing_part(module):
        folder = missing.replace(".", "/")
        raise NotInstalledError(
            f"{what} needs the subpackage {missing}, which this copy of tpukit does not have",
            fix=f"copy the folder {folder} of a whole clone or wheel to beside tpukit/essentials here",
        )
    return importlib.import_module(module)
