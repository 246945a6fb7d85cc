"""A real Jupyter server in a real browser: what a person sees while a run is on, and after they press interrupt."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the browser tests need playwright: pip install '.[browser]'"
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")

ROOT = Path(__file__).parents[2]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
SETUP = "import time, torch, tpukit"
WORK = """
def train(core, steps):
    for step in core.progress(range(steps), "train"):
        time.sleep(0.05)
        core.log(step, loss=1 / (step + 1))
    return core.rank

run = tpukit.launch(train, 80, cores=2)
print("returned", run.results)
"""
ENDLESS = "tpukit.launch(train, 100_000, cores=2)"
AGAIN = 'print("again", tpukit.launch(train, 5, cores=2).results)'


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Yield a browser page with a notebook open in JupyterLab."""
    folder = tmp_path_factory.mktemp("lab")
    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, WORK, ENDLESS, AGAIN)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), folder / "work.ipynb")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = [
        f"--ServerApp.port={port}",
        "--ServerApp.ip=127.0.0.1",
        "--IdentityProvider.token=",
        "--allow-root",
        "--no-browser",
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JUPYTER_CONFIG_DIR": str(folder / "config")}
    environ["JUPYTERLAB_SETTINGS_DIR"] = environ["JUPYTERLAB_WORKSPACES_DIR"] = str(folder / "settings")
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options],
        cwd=folder,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/api")
        with playwright.sync_playwright() as started:
            browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            opened = browser.new_page(viewport={"width": 1200, "height": 1500})
            opened.goto(f"http://127.0.0.1:{port}/lab/tree/work.ipynb")
            opened.locator(".jp-NotebookPanel .jp-Cell").nth(3).wait_for(timeout=60_000)
            opened.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for(timeout=60_000)
            yield opened
            browser.close()
    finally:
        server.terminate()
        server.wait(timeout=20)


def wait_for(address):
    deadline = time.monotonic() + 60
    while True:
        try:
            return urllib.request.urlopen(address, timeout=1)
        except OSError:
            assert time.monotonic() < deadline, "the Jupyter server did not start"
            time.sleep(0.2)


def run_cell(page, number):
    """Run a cell and return its output; a page that is busy may lose a key, so look whether the cell took it."""
    cell = page.locator(".jp-Cell").nth(number)
    for _ in range(6):
        cell.click()
        page.keyboard.press("Control+Enter")
        with contextlib.suppress(playwright.TimeoutError):
            cell.locator(".jp-InputPrompt").filter(has_not_text="[ ]").wait_for(timeout=10_000)
            return cell.locator(".jp-Cell-outputWrapper")
    raise AssertionError(f"cell {number} did not run")


def picture(page, name):
    """Leave a picture to look at where TPUKIT_PICTURES names a folder."""
    if folder := os.environ.get("TPUKIT_PICTURES"):
        page.screenshot(path=f"{folder}/{name}.png")


def test_a_bar_and_a_curve_move_while_the_cores_work_and_the_result_comes_back(page):
    run_cell(page, 0)
    output = run_cell(page, 1)
    output.get_by_text("a rehearsal: 2 CPU processes stand in for TPU cores").wait_for(timeout=60_000)
    line = output.get_by_text("train  ")
    line.wait_for(timeout=30_000)
    seen = set()
    while "80/80" not in (text := line.inner_text()):
        seen.add(text)
        if len(seen) == 3:
            picture(page, "running")
        page.wait_for_timeout(200)
    assert len(seen) >= 4, seen  # it moved
    assert output.locator("svg polyline").count() == 1
    output.get_by_text("returned [0, 1]").wait_for(timeout=30_000)
    picture(page, "done")


def test_interrupt_gives_the_notebook_back_and_the_next_run_works(page):
    output = run_cell(page, 2)
    output.get_by_text("train  ").wait_for(timeout=30_000)
    page.locator(
        ".jp-NotebookPanel-toolbar [data-command='notebook:interrupt-kernel'], [data-jp-item-name=interrupt] button"
    ).first.click()
    output.get_by_text("Interrupted", exact=False).first.wait_for(timeout=15_000)
    picture(page, "interrupted")
    run_cell(page, 3).get_by_text("again [0, 1]").wait_for(timeout=30_000)
    picture(page, "again")
