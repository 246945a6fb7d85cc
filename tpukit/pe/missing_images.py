"""Rows of the labels whose image is not in the folder: refused, or left out and told."""

from collections.abc import Sequence

from tpukit.essentials.show import NoSuchFile


def check_missing(missing: str, *also: str) -> None:
    """Raise ValueError unless `missing` is one of its two words, or of `also`."""
    if missing not in ("raise", "drop", *also):
        raise ValueError(f"missing is {' or '.join(map(repr, ('raise', 'drop', *also)))}, got {missing!r}")


def leave_out(gone: Sequence[str], wanted: int, missing: str, *, folder, found: str, call: str) -> None:
    """Say that the rows of images without a file are left out, if any are.

    `found` is what is there, in words, and `call` begins the call that leaves them out, without its `missing`.

    Raises:
        FileNotFoundError: none may be missing, or all are.
    """
    if not gone:
        return
    few = ", ".join(gone[:3])
    if missing == "keep":
        return
    if missing == "raise" or len(gone) == wanted:
        raise NoSuchFile(
            f"{len(gone):,} of {wanted:,} images are not in {folder}",
            found=f"{found}; missing for instance {few}",
            fix=f'copy them there, or leave their rows out with {call}, missing="drop")',
        )
    print(f"left out {len(gone):,} of {wanted:,} rows whose image is not in {folder}, for instance {few}")


def as_in_headers(uids):
    """Return (N,) S64 of identifiers, as headers are kept; what no identifier of DICOM can be stays another."""
    import numpy

    return numpy.array([str(uid).encode() for uid in uids], "S64")


def match_headers(headers, labels, missing: str, *, folder, call: str) -> tuple:
    """Return the headers that have a row in the labels, and the number of the row of each; see `leave_out`."""
    import numpy

    wanted = as_in_headers(labels["SOPInstanceUID"])
    headers = headers[headers["image"].argsort(kind="stable")]
    place = numpy.searchsorted(headers["image"], wanted).clip(max=max(0, len(headers) - 1))
    is_there = headers["image"][place] == wanted if len(headers) else numpy.zeros(len(wanted), bool)
    gone = [uid.decode() for uid in wanted[~is_there]]
    leave_out(gone, len(wanted), missing, folder=folder, found=f"{len(headers):,} slices", call=call)
    rows = numpy.flatnonzero(is_there)
    if len(headers) > len(rows):
        print(f"{len(headers) - len(rows):,} slices in {folder} have no row in the labels and are not used")
    return headers[place[rows]], rows
