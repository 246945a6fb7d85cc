"""A Jupyter server, and a browser for its notebooks: the browser tests, `make screenshot`."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
TRIES = 30  # of a click or a key that a page may lose, ten seconds each


@contextlib.contextmanager
def jupyter_server(kind: str, folder: Path) -> Iterator["Server"]:
    """Run JupyterLab ("lab") or the classic notebook ("notebook") with a browser."""
    from playwright.sync_api import sync_playwright

    module = {"lab": "jupyterlab", "notebook": "notebook"}[kind]
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
    environ["JUPYTERLAB_SETTINGS_DIR"] = str(folder / "settings")
    environ["JUPYTERLAB_WORKSPACES_DIR"] = str(folder / "settings")
    process = subprocess.Popen(
        [sys.executable, "-m", module, *options],
        cwd=folder,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/api")
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            yield Server(kind, port, folder, browser)
            browser.close()
    finally:
        process.terminate()
        try:
            process.wait(timeout=120)
        except (
            subprocess.TimeoutExpired
        ):  # its kernels have ended; it may wait for a thread of anyio for ever
            process.kill()
            process.wait()


class Server:
    """A notebook server, and a browser that opens its notebooks."""

    def __init__(self, kind: str, port: int, folder: Path, browser):
        self.kind, self.port, self.folder, self.browser = kind, port, folder, browser
        self._settings = folder / "settings" / "@jupyterlab"
        self._set("apputils-extension/notification", {"fetchNews": "false"})  # asks, otherwise
        self._set(
            "notebook-extension/tracker", {"windowingMode": "none"}
        )  # cells out of sight are not in the page

    def open(self, name: str, *, width: int = 1200, height: int = 1500, scale: float = 1):
        """Open a notebook of the folder in a page of its own.

        Args:
            name: of the notebook, without ".ipynb".
            width: of the page, in CSS pixels.
            height: the same.
            scale: pixels of a picture per CSS pixel.
        """
        page = self.browser.new_page(
            viewport={"width": width, "height": height}, device_scale_factor=scale
        )
        page.set_default_timeout(300_000)  # for hangs: 30 seconds are too few on a busy machine
        lost = page.locator(
            ".jp-Dialog", has_text="will continue trying to reconnect"
        )  # an answer was late
        page.add_locator_handler(lost, lambda dialog: dialog.locator(".jp-mod-accept").click())
        place = "lab/tree" if self.kind == "lab" else "notebooks"
        page.goto(
            f"http://127.0.0.1:{self.port}/{place}/{name}.ipynb?reset"
        )  # without the notebooks opened before
        # All notebooks of these tests have four cells or more.
        page.locator(".jp-NotebookPanel .jp-Cell").nth(3).wait_for()
        # A page without a kernel would start a second one, and calls none "idle", too.
        page.locator(".jp-KernelName", has_text="Python 3").wait_for()
        page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()
        return page

    def in_the_dark(self) -> None:
        """Use the dark theme for pages that are opened from now on."""
        self._set("apputils-extension/themes", {"theme": "JupyterLab Dark"})

    def _set(self, name: str, values: dict) -> None:
        file = self._settings / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))


def wait_for(address: str):
    """Return the answer of a server that starts."""
    deadline = time.monotonic() + 300
    while True:
        try:
            return urllib.request.urlopen(address, timeout=1)
        except OSError:
            assert time.monotonic() < deadline, "the Jupyter server did not start"
            time.sleep(0.2)


def run_cell(page, number: int):
    """Run a cell and return its output. A busy page may lose a key, so try until the cell runs."""
    from playwright.sync_api import TimeoutError as PageTimeout

    cell = page.locator(".jp-Cell").nth(number)
    for _ in range(TRIES):
        cell.click()
        page.keyboard.press("Control+Enter")
        with contextlib.suppress(PageTimeout):
            cell.locator(".jp-InputPrompt").filter(has_not_text="[ ]").wait_for(timeout=10_000)
            return cell.locator(".jp-Cell-outputWrapper")
    raise AssertionError(f"cell {number} did not run")
