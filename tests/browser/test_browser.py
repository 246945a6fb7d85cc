"""A real Jupyter server in a real browser: what a person sees while a run is on, after an interrupt, in a saved file.

TPUKIT_PICTURES=folder keeps pictures of all of it, to be looked at.
"""

import contextlib
import importlib.util
import os
import re
import time
from pathlib import Path

import nbformat
import numpy
import pandas
import pytest
from helpers.jupyter import CHROMIUM, KERNEL, TRIES, jupyter_server, run_cell
from helpers.notebook_parameters import small

import tpukit
from tpukit.essentials.display.panel import panel_html

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the browser tests need playwright: pip install '.[browser]'"
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"
)

ROOT = Path(__file__).parents[2]
IMAGE = "img[src^='data:image/svg']"  # a chart of a run that is over
SETUP = "import time, torch, tpukit"
WORK = """
def train(core, steps):
    for step in core.progress(range(steps), "train"):
        time.sleep(0.05)
        core.log(step, loss=1 / (step + 1))
    return core.rank

run = tpukit.launch(train, 200, cores=2)
print("returned", run.results)
"""
ENDLESS = "tpukit.launch(train, 100_000, cores=2)"
AGAIN = 'print("again", tpukit.launch(train, 5, cores=2).results)'
# Small enough for seconds; what is interrupted has LONG epochs, as a busy page may be late with it.
LONG = 10_000
NOTEBOOKS = {
    "02_every_core": {"epochs": 10},
    "05_resnet_on_slices": {
        "studies": 12,
        "slices": 8,
        "num_folds": 2,
        "image_size": 32,
        "batch_size": 2,
        "num_epochs": 3,
    },
}


# Both are JupyterLab's cells, outputs and kernels; the second has a page for each notebook around them.
@pytest.fixture(
    scope="module", params=["lab", pytest.param("notebook", marks=pytest.mark.only_soak)]
)
def server(request, tmp_path_factory):
    """Run JupyterLab, or the classic notebook; yield it with a browser and the folder that its notebooks are in."""
    module = {"lab": "jupyterlab", "notebook": "notebook"}[request.param]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: pip install '.[browser]'")
    folder = tmp_path_factory.mktemp(request.param)
    with jupyter_server(request.param, folder) as running:
        yield running


@pytest.fixture(scope="module")
def page(server):
    """Yield a page with a notebook of a few cells."""
    cells = [nbformat.v4.new_code_cell(source) for source in (SETUP, WORK, ENDLESS, AGAIN)]
    write(
        nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL}),
        server.folder / "work.ipynb",
    )
    opened = server.open("work")
    yield opened
    opened.close()


def write(notebook, file):
    nbformat.write(notebook, file)


def run_all(page):
    """Run all cells, once the page listens."""
    for _ in range(TRIES):
        choose(page, "Run", "Run All Cells")
        with contextlib.suppress(playwright.TimeoutError):
            page.locator(".jp-InputPrompt", has_text=re.compile(r"\[(\*|\d+)\]")).first.wait_for(
                timeout=15_000
            )
            return
    raise AssertionError("the cells did not run")


def begin_again(page, cell, text="dry run"):
    """Run a cell after an interrupt: the page may lose a key, and a kernel that is not yet idle drops the request."""
    for _ in range(TRIES):
        cell.locator(".jp-InputArea-editor").click()
        page.keyboard.press("Control+Enter")
        with contextlib.suppress(playwright.TimeoutError):
            cell.get_by_text("interrupted after").wait_for(state="detached", timeout=10_000)
            cell.get_by_text(text).wait_for(timeout=20_000)
            return
    raise AssertionError("the cell did not run again")


def choose(page, menu, entry):
    """Choose an entry of the menu bar; a dialog that is in the way is named."""
    try:
        page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{menu}$")).click()
    except playwright.TimeoutError:
        raise AssertionError(
            f"{menu} cannot be clicked: {page.locator('.jp-Dialog').all_inner_texts()}"
        ) from None
    page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{entry}")).first.click()


def picture(page, name):
    """Leave a picture to look at where TPUKIT_PICTURES names a folder."""
    if folder := os.environ.get("TPUKIT_PICTURES"):
        page.screenshot(path=f"{folder}/{name}.png")


def test_a_bar_and_a_curve_move_while_the_cores_work_and_the_result_comes_back(server, page):
    run_cell(page, 0)
    output = run_cell(page, 1)
    output.get_by_text("dry run: 2 CPU processes take the place of TPU cores").wait_for(
        timeout=300_000
    )
    line = output.get_by_text(re.compile(r"^\d+ / 200$"))
    line.wait_for(timeout=300_000)
    seen = set()
    while (text := line.inner_text()) != "200 / 200":
        seen.add(text)
        page.wait_for_timeout(200)
    assert len(seen) >= 4, seen  # it moved
    assert output.locator(f"svg path[stroke-linejoin], {IMAGE}").count() == 1
    output.get_by_text("returned [0, 1]").wait_for(timeout=300_000)
    output.get_by_text("done in").wait_for(timeout=300_000)
    picture(page, f"{server.kind}-done")


STUDY = """
import numpy
pixels = numpy.zeros((9, 1, 32, 32), numpy.uint8) + 20 * numpy.arange(9, dtype=numpy.uint8)[:, None, None, None]
tpukit.pe.show_slices(pixels)
"""


@pytest.mark.alone  # a page that is slow to draw loses keys
def test_the_arrow_keys_move_through_a_study_and_leave_the_cells_alone(server):
    cells = [nbformat.v4.new_code_cell(source) for source in ("import tpukit", STUDY, "1", "2")]
    write(
        nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL}),
        server.folder / "study.ipynb",
    )
    page = server.open("study")
    run_cell(page, 0)
    output = run_cell(page, 1)
    words = output.locator('[data-part="words"]')
    words.wait_for(timeout=300_000)
    assert words.inner_text() == "slice 5 of 9"
    output.locator('[data-part="slider"]').click()  # in its middle
    for key, number in (
        ("ArrowRight", 6),
        ("ArrowUp", 7),
        ("ArrowDown", 6),
        ("Home", 1),
        ("End", 9),
        ("PageDown", 1),
    ):
        page.keyboard.press(key)
        assert words.inner_text() == f"slice {number} of 9"
    output.locator('[data-part="overview"] img').nth(3).click()
    page.keyboard.press("ArrowUp")
    assert words.inner_text() == "slice 5 of 9"
    output.locator('[data-part="slice"]').click()
    page.keyboard.press("ArrowLeft")
    assert words.inner_text() == "slice 4 of 9"
    active = page.locator(".jp-Cell.jp-mod-active")
    assert active.count() == 1
    assert active.locator('[data-part="words"]').count() == 1  # not the cell after it
    picture(page, f"{server.kind}-study")
    page.close()


def test_the_curves_are_there_in_a_notebook_that_was_written_elsewhere(server):
    """What was not run here is not trusted, and JupyterLab takes scripts and SVG elements out of its outputs."""
    curves = {
        "train_loss": [(step, 1 / step) for step in range(1, 30)],
        "valid_acc": [(10, 0.5), (29, 0.8)],
    }
    cells = [nbformat.v4.new_code_cell(str(number)) for number in range(4)]
    shown = (
        panel_html([], curves, "done", "done in 9 s")
        + "<svg width='9' height='9' class='own'></svg>"
    )
    cells[0].outputs = [nbformat.v4.new_output("display_data", data={"text/html": shown})]
    write(
        nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL}),
        server.folder / "elsewhere.ipynb",
    )
    page = server.open("elsewhere")
    page.get_by_text("done in 9 s").wait_for(timeout=300_000)
    images = page.locator(f".jp-OutputArea {IMAGE}")
    assert images.count() == 2
    assert all(
        width > 100 for width in images.evaluate_all("all => all.map((one) => one.naturalWidth)")
    ), "not drawn"
    assert page.locator(".jp-OutputArea svg.own").count() == 0, (
        "this notebook is trusted, which proves nothing"
    )
    picture(page, f"{server.kind}-elsewhere")
    page.close()


def test_a_study_that_was_written_elsewhere_shows_the_middle_window_of_twelve_slices(server):
    labels = pandas.DataFrame(
        {"position": range(40), "SOPInstanceUID": range(40), "StudyInstanceUID": "a"}
    )
    pixels = (
        numpy.zeros((40, 3, 64, 64), numpy.uint8)
        + numpy.array([0, 120, 250], numpy.uint8)[None, :, None, None]
    )
    cells = [nbformat.v4.new_code_cell(str(number)) for number in range(4)]
    shown = tpukit.pe.show_study(pixels, labels, "a")._repr_html_()
    cells[0].outputs = [nbformat.v4.new_output("display_data", data={"text/html": shown})]
    write(
        nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL}),
        server.folder / "reader.ipynb",
    )
    page = server.open("reader")
    images = page.locator(".jp-OutputArea img[alt^='slice']:visible")
    images.first.wait_for(timeout=300_000)
    assert images.count() == 12
    boxes = images.evaluate_all(
        """all => all.map((one) => {
            const [image, frame] = [one.getBoundingClientRect(), one.parentElement.getBoundingClientRect()];
            return [image.width / frame.width, (frame.left - image.left) / frame.width, frame.width / frame.height];
        })"""
    )
    assert all(box == pytest.approx([3, 1, 1], abs=0.05) for box in boxes), boxes
    picture(page, f"{server.kind}-reader")
    page.close()


def test_interrupt_gives_the_notebook_back_and_the_next_run_works(server, page):
    output = run_cell(page, 2)
    output.get_by_text("/ 100,000").wait_for(timeout=300_000)
    choose(page, "Kernel", "Interrupt Kernel")
    output.get_by_text("interrupted after").wait_for(timeout=300_000)
    output.get_by_text("LaunchInterrupted:", exact=False).first.wait_for(timeout=300_000)
    picture(page, f"{server.kind}-interrupted")
    cell = page.locator(".jp-Cell").nth(3)
    begin_again(page, cell)
    cell.get_by_text("again [0, 1]").wait_for(timeout=300_000)


SESSION = """
session = tpukit.Session(2)

def count(core, steps):
    core.state.steps = getattr(core.state, "steps", 0)
    for step in core.progress(range(steps), "count"):
        time.sleep(0.02)
        core.barrier()
        core.state.steps += 1
    return core.state.steps
"""
RUN = 'print("counted", session.run(count, 5).results)'
REDEFINED = """
def count(core, steps):
    core.state.steps += 100 * steps
    return core.state.steps
"""
ENDLESS_RUN = """
def endless(core):
    for step in core.progress(range(100_000), "endless"):
        time.sleep(0.02)
        core.barrier()

session.run(endless)
"""


def test_a_session_keeps_its_state_over_a_function_defined_again_and_an_interrupt(server):
    sources = (
        "import time, tpukit",
        SESSION,
        RUN,
        REDEFINED,
        RUN,
        ENDLESS_RUN,
        RUN,
        "session.close()",
    )
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
    write(notebook, server.folder / "session.ipynb")
    page = server.open("session")
    for number in (0, 1):
        run_cell(page, number)
    run_cell(page, 2).get_by_text("counted [5, 5]").wait_for(timeout=300_000)
    run_cell(page, 3)
    run_cell(page, 4).get_by_text("counted [505, 505]").wait_for(timeout=300_000)
    output = run_cell(page, 5)
    output.get_by_text("/ 100,000").wait_for(timeout=300_000)
    choose(page, "Kernel", "Interrupt Kernel")
    output.get_by_text("the session goes on", exact=False).first.wait_for(timeout=300_000)
    picture(page, f"{server.kind}-session-interrupted")
    begin_again(page, page.locator(".jp-Cell").nth(6), "counted [1005, 1005]")
    run_cell(page, 7)
    page.close()


@pytest.mark.parametrize(
    "name", ["02_every_core", pytest.param("05_resnet_on_slices", marks=pytest.mark.only_soak)]
)
def test_the_panel_moves_survives_an_interrupt_and_stays_in_the_saved_notebook(server, name):
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    length = next(parameter for parameter in NOTEBOOKS[name] if parameter.endswith("epochs"))
    small(notebook, NOTEBOOKS[name] | {length: LONG})
    number = next(
        n
        for n, one in enumerate(notebook.cells)
        if one.cell_type == "code" and re.search(r"launch\((work|train, network)", one.source)
    )
    shorter = f"{length} = {NOTEBOOKS[name][length]}; print('now', {length})"
    notebook.cells.insert(number + 1, nbformat.v4.new_code_cell(shorter))
    file = server.folder / f"{name}.ipynb"
    write(notebook, file)
    page = server.open(name)
    run_all(page)
    cell = page.locator(".jp-Cell").nth(number)
    panel = cell.locator(".jp-OutputArea-output", has=page.locator("svg")).first
    panel.wait_for(timeout=240_000)
    panel.scroll_into_view_if_needed()
    first = panel.screenshot()
    picture(page, f"{server.kind}-{name}-first")
    deadline = time.monotonic() + 300
    while panel.screenshot() == first:
        assert time.monotonic() < deadline, "the panel does not move"
        page.wait_for_timeout(300)
    picture(page, f"{server.kind}-{name}-second")
    choose(page, "Kernel", "Interrupt Kernel")
    cell.get_by_text("interrupted after").wait_for(timeout=300_000)
    picture(page, f"{server.kind}-{name}-interrupted")

    begin_again(page, page.locator(".jp-Cell").nth(number + 1), f"now {NOTEBOOKS[name][length]}")
    begin_again(page, cell)
    cell.get_by_text("done in").wait_for(timeout=600_000)
    assert cell.get_by_text("interrupted after").count() == 0  # a new panel, not one more
    assert cell.locator(IMAGE).count() >= 1
    picture(page, f"{server.kind}-{name}-again")
    page.keyboard.press("Control+s")
    deadline = time.monotonic() + 300
    while not (kept := panels(file, number)) or "done in" not in kept[-1]:
        assert time.monotonic() < deadline, "the notebook was not saved"
        page.wait_for_timeout(300)
    page.close()

    assert len(kept) == 1
    assert "data:image/svg+xml" in kept[0]
    assert "<script" not in kept[0]
    server.in_the_dark()
    page = server.open(name)
    again = page.locator(".jp-Cell").nth(number)
    again.scroll_into_view_if_needed()
    again.get_by_text("done in").wait_for(timeout=300_000)
    assert again.locator(IMAGE).count() >= 1
    picture(page, f"{server.kind}-{name}-reopened")
    page.close()


def panels(file, number):
    """Return the panels that a cell of a saved notebook holds; none while the server writes it."""
    try:
        notebook = nbformat.read(file, as_version=4)
    except nbformat.reader.NotJSONError:
        return []
    outputs = notebook.cells[number].get("outputs", [])
    pages = ["".join(output.get("data", {}).get("text/html", "")) for output in outputs]
    return [page for page in pages if "border-radius" in page]
