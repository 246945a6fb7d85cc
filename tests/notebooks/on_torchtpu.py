"""Run seven notebooks, as they are but for small parameters, on the chips that the simulator provides for TorchTPU.

Each runs from top to bottom in a kernel of its own, whose first cell, which is not the notebook's, has a launch that
asks for no backend take "torch_tpu". Names as arguments choose some of them. The last line is their number.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from helpers.notebook_parameters import small
from nbclient import NotebookClient
from test_notebooks import ROOT, SECONDS_A_CELL, SMALL, with_the_kit

from tpukit.simulator import build

WANTED = ("01", "02", "04", "05", "06", "08", "09")
AS_ON_CHIPS = """
from tpukit.essentials.launcher import topology
_choose = topology._choose_runtime
topology._choose_runtime = lambda host, backend: _choose(host, backend or "torch_tpu")
"""


def run(path: Path) -> float:
    """Run one notebook; return the seconds that it took.

    Raises:
        CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    small(notebook, SMALL[path.stem])
    notebook.cells.insert(0, nbformat.v4.new_code_cell(AS_ON_CHIPS))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=SECONDS_A_CELL,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
        )
        client.execute(env=with_the_kit())
    said = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    assert "of a simulated libtpu" in said, "no launch of it ran on TorchTPU"
    return time.monotonic() - began


def main(names: list[str]) -> int:
    """Run the notebooks whose names begin so, and return how many ran."""
    paths = [
        path
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
        if path.name.startswith(tuple(names))
    ]
    for path in paths:
        print(f"{path.stem}: {run(path):.0f} s", flush=True)
    return len(paths)


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    # As on a platform, where `import torch` in a cell loads torch_tpu, and that the library of the machine's chips.
    os.environ |= {
        "TPU_LIBRARY_PATH": str(build.library()),
        "SIMULATOR_PLUGIN": str(build.find_plugin().library),
    }
    os.environ |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
    print(main(sys.argv[1:] or [*WANTED]))
