"""Execute the notebooks on CPU processes, and store their outputs in the files.

    python notebooks/outputs.py [--only 05]

A reader on GitHub or on the site sees the outputs without running anything. They are stored in a
form that GitHub displays: text, tables as HTML, and pictures as PNG with few colours. Each code
cell has the hash of its source in its metadata, so that a test finds a cell that changed after its
output was stored. The install cell has no output: it prints the folder of tpukit on this machine.

The processor time of the run goes into the notebook's metadata, and half of it into the line *Takes*
of the header, because two processes share it: the time on two cores without other work. Other programs
do not change it much.

Chromium makes pictures of HTML that GitHub does not display: live curves, and the viewer of slices.
"""

import argparse
import base64
import copy
import hashlib
import io
import os
import re
import resource
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
# Notebooks that take more than five minutes with their own parameters on two processors.
PARAMETERS = {
    "06_exams_and_submission": {
        "studies": 16,
        "slices": 12,
        "phantom_size": 128,
        "num_folds": 3,
        "image_size": 64,
        "slice_epochs": 2,
        "exam_slices": 8,
        "exam_batch_size": 2,
        "exam_epochs": 4,
    },
}
# Notebooks whose long launches have a single process, so the second core has nothing to do.
ONE_PROCESS = ("03_before_you_have_a_tpu", "11_why_is_it_slow", "14_larger_than_a_chip")
LARGEST = 400 * 1024  # bytes of a notebook with its outputs
LARGEST_SUM = 4 * 1024 * 1024  # bytes of all notebooks
COLORS = 128  # of a picture
WIDTHS = (1500, 1200, 1000, 800, 640, 520, 420)  # pixels: the first that keeps the notebook small enough
WIDTH = 1000  # CSS pixels of the page on which Chromium draws HTML
SCALE = 1.2  # pixels of its picture per CSS pixel
SECONDS_PER_CELL = 1800
SEEDS = "import random, numpy, torch\nrandom.seed(0)\nnumpy.random.seed(0)\ntorch.manual_seed(0)"
# The dot of a live panel: a panel without curves has only bars and times, and is not stored.
PANEL = "&#9679;</span>&nbsp; "
NOTE = "The outputs in this file are those of a dry run on CPU processes"


def main() -> None:
    """Execute all notebooks, or one, and write each when it has run."""
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="the number of a notebook: 05")
    only = parser.parse_args().only
    paths = sorted(HERE.glob(f"{only}*.ipynb"))
    if not paths:
        sys.exit(f"no notebook begins with {only!r}\n  fix: a number, such as 05")
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        store(notebook, path.stem)
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KB", flush=True)


def store(notebook: dict, name: str) -> None:
    """Execute a notebook, and put the outputs and the hashes into it."""
    parameters = PARAMETERS.get(name, {})
    with tempfile.TemporaryDirectory() as folder:
        began = processor_seconds()
        outputs = executed(notebook, parameters, Path(folder).resolve())
        seconds = round(processor_seconds() - began)
    cells = code_cells(notebook)
    notebook["metadata"]["tpukit"] = {"processor_seconds": seconds}
    if not parameters:  # otherwise this is not the time of the notebook's own parameters
        header = notebook["cells"][0]
        header["source"] = re.sub(r"(\*\*Takes\*\*) [^;\n]+", rf"\1 {takes(name, seconds)}", header["source"])
    for number, (cell, found) in enumerate(zip(cells, outputs, strict=True), start=1):
        cell["outputs"] = found
        cell["execution_count"] = number
        for output in found:
            if output["output_type"] == "execute_result":
                output["execution_count"] = number
        cell["metadata"]["tpukit"] = {"source": source_hash(cell)}
    cells[0]["outputs"] = []
    del cells[0]["metadata"]["tpukit"]
    (holding_parameters,) = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    holding_parameters["outputs"] = [note(parameters)]
    make_smaller(notebook)


def processor_seconds() -> float:
    """Return the processor time of the processes that this one has started, and that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def takes(name: str, processor_seconds: float) -> str:
    """Return the time in the header of a notebook with this processor time."""
    seconds = processor_seconds if name in ONE_PROCESS else processor_seconds / 2
    minutes = round(seconds / 60)
    if seconds < 50:
        return "less than a minute on two CPU cores"
    if minutes == 1:
        return "about a minute on two CPU cores"
    return f"about {minutes} minutes on two CPU cores"


def code_cells(notebook: dict) -> list[dict]:
    """Return the code cells of a notebook; the first one is the install cell."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source_hash(cell: dict) -> str:
    """Return the hash of a cell's source."""
    return hashlib.sha256("".join(cell["source"]).encode()).hexdigest()


def stale_cells(notebook: dict) -> list[str]:
    """Return the sources of the code cells whose output is not that of their source."""
    found = []
    for cell in code_cells(notebook)[1:]:
        if cell["metadata"].get("tpukit") != {"source": source_hash(cell)}:
            found.append("".join(cell["source"]))
    return found


def note(parameters: dict) -> dict:
    """Return the output of the parameters cell: the source of the outputs below."""
    import nbformat

    text = f"{NOTE}.\n"
    if parameters:
        values = ", ".join(f"{name} = {value!r}" for name, value in parameters.items())
        text = f"{NOTE}, with smaller parameters:\n{values}\n"
    return nbformat.v4.new_output("stream", name="stdout", text=text)


def executed(notebook: dict, parameters: dict, folder: Path) -> list[list[dict]]:
    """Execute a copy of a notebook in a folder; return the outputs of each code cell."""
    import nbformat
    from nbclient import NotebookClient

    sys.path.append(str(ROOT / "tests"))
    from helpers.notebook_parameters import small

    copied = copy.deepcopy(notebook)
    small(copied, parameters)
    number_of_import = next(
        number for number, cell in enumerate(copied.cells) if "import torch" in cell.source and cell.cell_type == "code"
    )
    seeds = nbformat.v4.new_code_cell(SEEDS)
    copied.cells.insert(number_of_import + 1, seeds)
    (folder / "tpukit").symlink_to(ROOT)  # the install cell finds a clone beside the notebook

    class Client(NotebookClient):
        async def async_execute_cell(self, cell, *arguments, **options):
            # The seeds do not count, so that the number of a cell in an error is that of the file.
            options["store_history"] = cell is not seeds
            return await super().async_execute_cell(cell, *arguments, **options)

    client = Client(
        copied,
        timeout=SECONDS_PER_CELL,
        kernel_name="python3",
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env={**os.environ, "PYTHONHASHSEED": "0", "PYDEVD_DISABLE_FILE_VALIDATION": "1"})
    cells = [cell for cell in copied.cells if cell.cell_type == "code" and cell is not seeds]
    return [[kept for output in cell.outputs if (kept := stored(output, folder))] for cell in cells]


def stored(output: dict, folder: Path) -> dict | None:
    """Return an output as it is stored; None if it has nothing to show in a file."""
    if "text" in output:
        output["text"] = without_paths(output["text"], folder)
    if "data" not in output:
        return output
    data = output["data"]
    html = data.get("text/html", "")
    kept = {"text/plain": without_paths(data.get("text/plain", ""), folder)}
    if "image/png" in data:
        kept["image/png"] = data["image/png"].strip()
    elif "<script" in html or "data:image/" in html:
        kept["image/png"], width = picture_of(html)
        output["metadata"] = {"image/png": {"width": width}}
    elif PANEL in html:
        return None
    elif html:
        kept["text/html"] = without_paths(html, folder)
    output["data"] = kept
    return output


def without_paths(text: str, folder: Path) -> str:
    """Return a text without the folders of this machine."""
    replaced = {
        f"{sysconfig.get_path('purelib')}/": "",
        f"{folder}/": "",
        str(folder): ".",
        str(ROOT): "tpukit",
        str(Path.home()): "~",
    }
    for path, instead in replaced.items():
        text = text.replace(path, instead)
    # In a traceback, a cell is a file with the number of the process.
    return re.sub(r"/tmp/ipykernel_\d+/\d+\.py", "a cell", text)


def picture_of(html: str) -> tuple[str, int]:
    """Return HTML as a PNG in base64, as Chromium draws it, and its width in CSS pixels."""
    from helpers.jupyter import CHROMIUM, FLAGS
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        sys.exit("Chromium is not installed\n  fix: install Chromium; on Debian and Ubuntu, apt install chromium")
    style = f"margin:0;padding:6px;display:inline-block;max-width:{WIDTH}px;font-family:sans-serif;background:white"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": WIDTH, "height": 700}, device_scale_factor=SCALE)
        page.set_content(f'<body style="{style}">{html}</body>')
        body = page.locator("body")
        png = body.screenshot()
        width = round(body.bounding_box()["width"])
        browser.close()
    return base64.b64encode(png).decode(), width


def make_smaller(notebook: dict) -> None:
    """Reduce the colours of the pictures and, if the file is too large, their widths."""
    import nbformat

    pictures = []
    for cell in code_cells(notebook):
        for output in cell["outputs"]:
            if "image/png" in output.get("data", {}):
                pictures.append((output["data"], output["data"]["image/png"]))
    for width in WIDTHS:
        for data, png in pictures:
            data["image/png"] = few_colors(png, width)
        if len(nbformat.writes(notebook).encode()) <= LARGEST:
            return
    sys.exit(f"the outputs have more than {LARGEST // 1024} KB\n  fix: fewer or smaller pictures")


def few_colors(png: str, width: int) -> str:
    """Return a PNG in base64 with a palette and at most this width."""
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    if image.width > width:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    # The median cut would turn small marks in orange on a grey CT into grey.
    few = image.quantize(COLORS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(buffer, format="png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


if __name__ == "__main__":
    main()
