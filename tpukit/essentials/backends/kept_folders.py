"""Where compiled programs are kept: what `keep_compiles` may be, before anything is kept there."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpukit.essentials.show import WrongType

Folders = str | os.PathLike | Sequence[str | os.PathLike]
KEEP_VARIABLE = "TPUKIT_KEEP_COMPILES"  # what `prepare` sets for all launches


def folders_of(given: Folders | bool | None, environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return the folders that `keep_compiles` names: of None those that `prepare` has named, of False none.

    Raises:
        TypeError: it is none of these, nor a folder or a list of them.
    """
    if given is None:
        given = [one for one in environ.get(KEEP_VARIABLE, "").split(os.pathsep) if one]
    given = [] if given is False else [given] if isinstance(given, str | os.PathLike) else given
    if not isinstance(given, list | tuple) or not all(isinstance(one, str | os.PathLike) and str(one) for one in given):
        raise WrongType(
            "keep_compiles is a folder, a list of folders, or False",
            found=repr(given),
            fix='keep_compiles="runs/compiles"',
        )
    return tuple(Path(one).expanduser().absolute() for one in given)
