"""Return a finished pack whose source no longer exists, if it was made by the same call.

In the next session of Colab, the images of /content are deleted, but a pack on Google Drive still
exists. Without the source, its labels and groups cannot be read again. So a pack stores the
arguments of its call in the manifest, and `find_outlived` compares these.
"""

import os
from collections.abc import Hashable, Sequence
from pathlib import Path

from tpukit.datasets.item_parts import Columns
from tpukit.datasets.pack_tables import is_table_file
from tpukit.datasets.packed_images import PackedImages, PackFolder
from tpukit.datasets.resumable import fact
from tpukit.datasets.source_files import Names, look_at
from tpukit.essentials.display import (
    PathExistsError,
    PathNotFoundError,
    TpukitError,
    names_in_order,
)

_FEW = 12  # the most names that a message lists in full


def arguments_of(source, labels: list, groups, classes, columns: Columns) -> dict:
    """Return the arguments of a call of `pack`, in the form in which a manifest stores them.

    Args:
        source: the path of a folder or of a CSV file. Other sources are not supported.
        labels: the argument `labels`, as a list.
        groups, classes: as for `pack`.
        columns: the other arguments of `pack` about columns.
    """
    place = os.fsencode(os.path.realpath(source))
    if classes is not None:
        classes = names_in_order(classes, "classes", words=False)
    return {
        "source": fact(os.fspath(source), place),
        "labels": [str(label) for label in labels],
        "groups": _name_of(groups),
        "classes": classes,
        "path": "path" if columns.path is None else str(columns.path),
        "masks": None if columns.masks is None else str(columns.masks),
    }


def _name_of(column) -> str | None:
    """Return the name of a column; for values instead of a name their type, such as "a list"."""
    if column is None:
        return None
    is_name = isinstance(column, Hashable) and not isinstance(column, tuple)
    return str(column) if is_name else f"a {type(column).__name__}"


def find_outlived(
    source, places: Sequence[Path], *, root, plan: dict, arguments: dict
) -> PackedImages | None:
    """Return the finished pack of a source that no longer exists.

    Args:
        source: the path of the folder or CSV file that does not exist.
        places: the folders in which the pack may be.
        root: as for `pack`.
        plan: the settings of the pack that do not depend on the source.
        arguments: the result of `arguments_of`.

    Returns:
        The pack; None if no folder has a finished pack.

    Raises:
        FileNotFoundError: the finished pack is of another source, or of images in another folder.
        FileExistsError: the finished pack was made with other arguments.
    """
    refused = None
    for place in places:
        target = PackFolder(place, plan)
        if not target.is_finished:  # the missing images cannot be read any more
            continue
        manifest = target.read_manifest()
        packed = PackedImages(place)
        error = _refusal(source, packed, manifest, target=target, root=root, arguments=arguments)
        if error is None:
            print(
                f"pack: {os.fspath(source)} does not exist any more, but the pack in {place} is "
                "finished, and the call returns it"
            )
            _report_unknown(manifest, arguments)
            return packed
        refused = refused or error  # another folder may have the pack
    if refused:
        raise refused
    return None


def _refusal(
    source, packed: PackedImages, manifest: dict, *, target: PackFolder, root, arguments: dict
) -> TpukitError | None:
    """Return the error if a pack has another source or other arguments than the call, else None."""
    place = os.fspath(target.folder)
    other = _other_source(packed, manifest, arguments, root=_root_of(source, root))
    if other:
        return PathNotFoundError(
            f"there is no {os.fspath(source)}",
            found=f"a finished pack in {place}, {other}",
            fix=f"tpukit.PackedImages({place!r}) opens it; or check the path",
        )
    differences = []
    another = target.differences({name: manifest["plan"].get(name) for name in target.plan})
    if another:
        differences.append(another.found)
    differences += _other_arguments(manifest, arguments, is_table=is_table_file(source))
    if not differences:
        return None
    return PathExistsError(
        f"{place} holds another pack, and {os.fspath(source)} is gone",
        found="; ".join(differences),
        fix="pass the arguments with which the pack was made; "
        f"or tpukit.PackedImages({place!r}) opens it as it is",
    )


def _other_arguments(manifest: dict, asked: dict, *, is_table: bool) -> list[str]:
    """Return in words the arguments that differ from those of the pack."""
    packed = _stored_arguments(manifest)
    if packed is None:
        packed = _derived_arguments(manifest, asked, is_table=is_table)
    differences = []
    for name, value in asked.items():
        if name == "source" or name not in packed or packed[name] == value:
            continue
        # The names of the classes that the pack has found itself may be passed, too.
        found = packed[name]
        if name == "classes" and found is None:
            found = manifest["classes"]
        if found != value:
            differences.append(f"{name} {_in_words(found)}, asked for {_in_words(value)}")
    return differences


def _stored_arguments(manifest: dict) -> dict | None:
    """Return the arguments in a manifest; None for a pack of a version that stored none."""
    return manifest.get("arguments")


def _derived_arguments(manifest: dict, asked: dict, *, is_table: bool) -> dict:
    """Return the arguments that the other entries of an old pack's manifest contain."""
    derived = {}
    if is_table:  # a folder has no labels=, but its only label has a name
        derived["labels"] = manifest["names"]
    if asked["classes"] is not None:
        derived["classes"] = manifest["classes"]
    # Old packs have the names of the groups, but not that of their column.
    has_groups = bool(manifest["group_names"])
    if has_groups != (asked["groups"] is not None):
        derived["groups"] = "of unknown name" if has_groups else None
    has_masks = manifest.get("masks", False)
    if has_masks != (asked["masks"] is not None):
        derived["masks"] = "of unknown name" if has_masks else None
    return derived


def _in_words(value) -> str:
    if not value:
        return "none"
    if isinstance(value, str):
        return value
    if len(value) > _FEW:
        return f"{', '.join(value[:_FEW])} and {len(value) - _FEW:,} more"
    return ", ".join(value)


def _other_source(packed: PackedImages, manifest: dict, asked: dict, *, root: str) -> str:
    """Describe the source of a pack if it is another one; "" if it is the same."""
    import numpy

    masks = []
    if packed.has_masks:
        if not manifest.get("first_mask"):
            return "of a version of tpukit that does not store where its masks were"
        masks = [manifest["first_mask"]]
    if "looks.npy" not in packed.files:
        return "that was not made from files"
    first = numpy.load(packed.folder / "looks.npy")[:1]
    names = [Names(packed.folder / "names")[0]]
    if (look_at(names, root, masks)["place"] != first["place"]).any():
        return "of images that were in another place"
    arguments = _stored_arguments(manifest)
    if arguments and arguments["source"]["digest"] != asked["source"]["digest"]:
        # Two tables may have the same images, but other labels.
        words = arguments["source"]["words"]
        is_elsewhere = words == asked["source"]["words"]
        return f"that was made from {words}{' of another folder' if is_elsewhere else ''}"
    return ""


def _root_of(source, root) -> str:
    """Return the folder to which the paths of the source's images are relative."""
    if root is not None:
        return os.fspath(root)
    return os.path.dirname(source) if is_table_file(source) else os.fspath(source)


def _report_unknown(manifest: dict, asked: dict) -> None:
    """Print the arguments that could not be compared, because an old pack does not store them."""
    if _stored_arguments(manifest) is not None:
        return
    unknown = ["source"]
    if asked["groups"] is not None:
        unknown.append("groups")
    if asked["classes"] is None:
        unknown.append("classes")
    unknown.append("path")
    print(
        "pack: this pack was made by an older tpukit, which did not store the arguments; "
        f"not compared: {', '.join(unknown)}"
    )
