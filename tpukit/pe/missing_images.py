"""Handle rows of labels whose image has no file: raise an error, or leave them out and print."""

from collections.abc import Sequence

from tpukit.essentials.display import PathNotFoundError


def check_missing(missing: str, *others: str) -> None:
    """Raise ValueError unless `missing` is "raise", "drop" or one of `others`."""
    allowed = ("raise", "drop", *others)
    if missing not in allowed:
        raise ValueError(f"missing must be {' or '.join(map(repr, allowed))}, got {missing!r}")


def leave_out(
    gone: Sequence[str],
    wanted: int,
    missing: str,
    *,
    folder,
    found: str,
    call: str,
    kind: str = "image",
) -> None:
    """Raise an error for images without a file, or print the number of rows that are left out.

    Args:
        gone: the identifiers of the images without a file; if it is empty, nothing happens.
        wanted: the number of rows.
        missing: "raise" for an error, "drop" to print, or "keep" to do nothing.
        folder: the folder that was searched.
        found: the contents of the folder, in words.
        call: the user's call up to its argument `missing`, such as "read_exams(folder, labels".
        kind: a noun in the singular for the subject of a row, such as "image".

    Raises:
        FileNotFoundError: `missing` is "raise", or no row has a file.
    """
    if not gone or missing == "keep":
        return
    few = ", ".join(gone[:3])
    counts = f"{len(gone):,} of {wanted:,}"
    if missing == "raise" or len(gone) == wanted:
        fix = "copy them there"
        if len(gone) < wanted:
            fix += f', or leave their rows out with {call}, missing="drop")'
        raise PathNotFoundError(
            f"{counts} {kind}s are not in {folder}",
            found=f"{found}; missing, for instance: {few}",
            fix=fix,
        )
    print(f"left out {counts} rows whose {kind} is not in {folder}, for instance {few}")


def as_in_headers(uids):
    """Return identifiers as an (N,) array of bytes, the dtype in which headers store them."""
    import numpy

    return numpy.array([str(uid).encode() for uid in uids], "S")


def match_headers(headers, labels, missing: str, *, folder, call: str) -> tuple:
    """Find the header of each image of the labels; see `leave_out` for images without a header.

    Args:
        headers: (N,) of `header_type`.
        labels: a table with one row per image.
        missing, folder, call: as for `leave_out`.

    Returns:
        The headers of labelled images in the order of the labels, and the row number of each.
    """
    import numpy

    wanted = as_in_headers(labels["SOPInstanceUID"])
    headers = headers[headers["image"].argsort(kind="stable")]
    places = numpy.searchsorted(headers["image"], wanted)
    is_there = numpy.zeros(len(wanted), bool)
    # searchsorted gives the place where an identifier would be, which may be after the last header.
    if len(headers):
        places = places.clip(max=len(headers) - 1)
        is_there = headers["image"][places] == wanted
    gone = [uid.decode() for uid in wanted[~is_there]]
    found = f"{len(headers):,} slices"
    leave_out(gone, len(wanted), missing, folder=folder, found=found, call=call)
    rows = numpy.flatnonzero(is_there)
    unused = len(headers) - len(rows)
    if unused > 0:
        print(f"{unused:,} slices in {folder} have no row in the labels and are not used")
    return headers[places[rows]], rows
