"""Take the README's two screenshots: a running launch in JupyterLab, and the error of a core.

    python docs/screenshot.py [--cores 4]

The script runs a notebook of four cells in JupyterLab and Chromium. It trains on scikit-learn's
digits, so that nothing is downloaded. The pictures are docs/launch.png and docs/failure.png.
"""

import argparse
import io
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.jupyter import KERNEL, jupyter_server, run_cell  # noqa: E402

WIDTH = 1000  # CSS pixels
SCALE = 1.5  # pixels of the picture per CSS pixel
LARGEST = 300 * 1024  # bytes of a picture, so that the README loads quickly

TITLE = "# Digits on every core"
# %xmode leaves out the frames of IPython and of tpukit: they have paths of this machine.
SETUP = """
%xmode Minimal
import torch, tpukit
from sklearn.datasets import load_digits

digits = load_digits()
pixels = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
dataset = torch.utils.data.TensorDataset(pixels, torch.tensor(digits.target))
train_set, valid_set = torch.utils.data.random_split(dataset, [0.8, 0.2])
loss = torch.nn.CrossEntropyLoss()

def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()

class ConvNet(torch.nn.Sequential):
    def __init__(self):
        super().__init__(
            torch.nn.Conv2d(1, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.Linear(1024, 10),
        )
"""
LAUNCH = """
def train(core, epochs):
    model = core.model(ConvNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = core.batches(train_set, batch_size=8, shuffle=True, drop_last=True)
    held_out = core.batches(valid_set, batch_size=32)
    return tpukit.fit(core, model, optimizer, loss, batches, held_out, epochs=epochs,
                      metrics={"accuracy": accuracy})

run = tpukit.launch(train, 30, cores=CORES)
"""
FAILURE = """
names = {0: "normal", 1: "embolism"}
labels = [0, 1, 0, 1, 1, 0, 2, 1]

def read_labels(core):
    found = []
    for label in labels[core.rank :: core.world_size]:
        found.append(names[label])
    return found

run = tpukit.launch(read_labels, cores=CORES)
"""
# The buttons of a cell, which would lie over the code.
STYLE = ".jp-cell-toolbar { display: none !important }"


def main() -> None:
    """Take both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cores", type=int, default=4)
    cores = str(parser.parse_args().cores)
    sources = [source.strip().replace("CORES", cores) for source in (SETUP, LAUNCH, FAILURE)]
    cells = [nbformat.v4.new_markdown_cell(TITLE)]
    cells += [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nbformat.write(notebook, folder / "digits.ipynb")
        with jupyter_server("lab", folder) as server:
            page = server.open("digits", width=WIDTH, height=1100, scale=SCALE)
            page.add_style_tag(content=STYLE)
            page.keyboard.press("Control+b")  # hides the list of files
            run_cell(page, 1)
            save(_running(page), ROOT / "docs" / "launch.png")
            save(_failed(page), ROOT / "docs" / "failure.png")


def _running(page) -> bytes:
    """Return a picture of the second code cell, half-way through its training."""
    output = run_cell(page, 2)
    output.get_by_text(re.compile(r"^1\d / 30$")).first.wait_for()  # epochs
    output.get_by_text(re.compile(r"^[123]\d / \d\d$")).nth(1).wait_for()  # steps, in the row below
    # Only down to the end of the panel: with the lines below it the picture would be too tall.
    cell = page.locator(".jp-Cell").nth(2)
    cell.scroll_into_view_if_needed()
    area = cell.bounding_box()
    panel = output.locator(".jp-OutputArea-child", has=page.locator("svg")).first.bounding_box()
    area["height"] = panel["y"] + panel["height"] - area["y"]
    picture = page.screenshot(clip=area)
    output.get_by_text("done in").wait_for()
    return picture


def _failed(page) -> bytes:
    """Return a picture of the third code cell, in which core 2 fails."""
    output = run_cell(page, 3)
    output.get_by_text("KeyError").first.wait_for()
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
    return page.locator(".jp-Cell").nth(3).screenshot()


def save(picture: bytes, file: Path) -> None:
    """Save a picture in 128 colours, which are enough for a page of text and lines."""
    image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    image.save(file, optimize=True)
    size = file.stat().st_size
    print(f"{file.relative_to(ROOT)}: {image.width} x {image.height}, {size / 1024:.0f} KB")
    assert size <= LARGEST, f"{file.name} has more than {LARGEST // 1024} KB"


if __name__ == "__main__":
    main()
