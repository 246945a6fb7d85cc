"""Read an executed notebook, in the tests of jobs."""

import nbformat


def outputs(path):
    """Return (source, outputs) of each cell. A text that a kernel sent in pieces is one output."""
    cells = nbformat.read(path, as_version=4).cells
    return [(cell.source, _join_texts(cell.get("outputs", []))) for cell in cells]


def _join_texts(parts):
    found = []
    for part in parts:
        if found and "name" in part and part["name"] == found[-1].get("name"):
            found[-1]["text"] += part["text"]
        else:
            found.append(dict(part))
    return found
