"""Copy `sys.path` and Pillow's plugins from the notebook's kernel to new processes.

A new process needs both. After `sys.path.append("/kaggle/input/wheels")` in the kernel, it must
find the packages there; after `pillow_heif.register_heif_opener()`, it must open HEIC files. The
kernel sends the names of a plugin's class and function:

    kernel     Image.OPEN["HEIF"] = (HeifImageFile, _is_supported_heif)
    sends      "pillow_heif.as_plugin:HeifImageFile", "pillow_heif.as_plugin:_is_supported_heif"
    process    imports the module, and registers both again

A process cannot import a class that is defined in the notebook. So `pack` raises ValueError for
files of such a plugin, before it packs the first image. A decoder that is defined in the notebook
and registered with `Image.register_decoder` is not sent, without an error.
"""

import contextlib
import importlib
import io
import sys
from collections.abc import Iterable

from tpukit.essentials.display import InvalidValueError


def state() -> dict:
    """Return `sys.path` and Pillow's plugins of this process, as values that JSON supports."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    formats = []
    decoders = {}
    # If this process has not imported Pillow, it has no plugins.
    image = sys.modules.get("PIL.Image")
    for name, (factory, accept) in getattr(image, "OPEN", {}).items():
        if _reference(factory) and not _is_of_pillow(factory):
            endings = [ending for ending, format in image.EXTENSION.items() if format == name]
            formats.append([name, _reference(factory), _reference(accept), endings])
    for name, decoder in getattr(image, "DECODERS", {}).items():
        if _reference(decoder) and not _is_of_pillow(decoder):
            decoders[name] = _reference(decoder)
    return {"path": path, "formats": formats, "decoders": decoders}


def restore(state: dict) -> None:
    """Register the Pillow plugins in the result of `state`. Set `sys.path` before this call."""
    if not state["formats"] and not state["decoders"]:
        return
    from PIL import Image

    Image.init()  # first, because it would register Pillow's own plugin of a format again
    for name, factory, accept, endings in state["formats"]:
        factory = _imported(factory)
        if name not in Image.OPEN or Image.OPEN[name][0] is not factory:
            Image.register_open(name, factory, _imported(accept))
        Image.register_extensions(name, endings)
    for name, decoder in state["decoders"].items():
        Image.register_decoder(name, _imported(decoder))


def refuse_own_plugins(files: Iterable[str]) -> None:
    """Raise ValueError if a file has the ending of a plugin that only the notebook defines."""
    from PIL import Image

    own = _own_plugins()
    endings = tuple(ending for ending, name in Image.EXTENSION.items() if name in own)
    if not endings:
        return
    for file in files:
        if file.lower().endswith(endings):
            raise _not_importable(file, own)


def refuse_own_bytes(data: bytes) -> None:
    """Raise ValueError if only a plugin of the notebook can open the bytes of the first item."""
    from PIL import Image

    own = _own_plugins()
    if not own:
        return
    format = None
    with contextlib.suppress(Exception), Image.open(io.BytesIO(data)) as image:
        format = image.format
    if format in own:
        raise _not_importable("the first item", own)


def _own_plugins() -> list[str]:
    """Return the formats whose plugin other processes cannot import."""
    from PIL import Image

    return [name for name, (factory, _) in Image.OPEN.items() if not _reference(factory)]


def _not_importable(file: str, own: list[str]) -> InvalidValueError:
    return InvalidValueError(
        f"{file} needs a plugin that this notebook defines, and other processes cannot import it",
        found=f"{', '.join(own)}, by Image.register_open",
        fix="write the class of the plugin into a file: begin the cell that defines it with "
        "%%writefile plugin.py; then import the file, and register its class: import plugin",
    )


def _is_of_pillow(value) -> bool:
    return value.__module__.startswith("PIL.")


def _reference(value) -> str | None:
    """Return "module:name" of a class or function; None if a new process cannot import it."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if module in (None, "__main__") or name is None:
        return None
    # A class inside a function has a name as well, but no import leads to it.
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is value else None


def _imported(reference: str | None):
    if reference is None:
        return None
    module, name = reference.split(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
