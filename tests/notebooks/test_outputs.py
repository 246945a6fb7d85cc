"""`make outputs`: what of an output is stored, and how a cell that changed afterwards is found."""

import base64
import copy
import io
from pathlib import Path

import nbformat
import pytest
from helpers.notebook_parameters import small
from PIL import Image

from notebooks import outputs
from tpukit.essentials.display.bars import Bar
from tpukit.essentials.display.panel import panel_html

ROOT = Path(__file__).parents[2]
FOLDER = Path("/tmp/run")


def cell(source):
    return nbformat.v4.new_code_cell(source)


@pytest.fixture
def notebook():
    """A notebook with an install cell and two others, which have their hashes."""
    cells = [cell("install"), cell("a = 1"), cell("print(a)")]
    for one in cells[1:]:
        one.metadata["tpukit"] = {"source": outputs.source_hash(one)}
    return nbformat.v4.new_notebook(cells=cells)


def test_a_cell_that_changed_after_its_output_was_stored_is_stale(notebook):
    assert outputs.stale_cells(notebook) == []
    notebook.cells[1].source = "a = 2"
    assert outputs.stale_cells(notebook) == ["a = 2"]


def test_a_new_cell_is_stale_and_another_install_cell_is_not(notebook):
    notebook.cells[0].source = "install from another address"
    notebook.cells.append(cell("print('new')"))
    assert outputs.stale_cells(notebook) == ["print('new')"]


def test_the_hash_of_a_source_is_that_of_its_lines(notebook):
    as_lines = {"source": ["a = 1\n", "b = 2"]}
    assert outputs.source_hash(as_lines) == outputs.source_hash({"source": "a = 1\nb = 2"})


def png(width=30):
    image = Image.effect_noise((width, 20), 80).convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, format="png")
    return base64.b64encode(buffer.getvalue()).decode()


def displayed(**data):
    kinds = {kind.replace("_", "/"): value for kind, value in data.items()}
    return nbformat.v4.new_output("display_data", data=kinds)


def test_a_figure_is_stored_as_png_without_its_html():
    figure = displayed(
        text_plain="a figure", text_html="<img src='data:image/webp'>", image_png=png()
    )
    assert outputs.stored(figure, FOLDER).data.keys() == {"text/plain", "image/png"}


def test_a_table_is_stored_as_html():
    table = displayed(text_plain="1", text_html="<table><tr><td>1</td></tr></table>")
    assert outputs.stored(table, FOLDER).data.keys() == {"text/plain", "text/html"}


def test_a_panel_without_curves_is_not_stored():
    bar = Bar("epochs", done=5, total=5)
    panel = displayed(text_plain="5/5", text_html=panel_html([bar], {}, "done", "done in 1 s"))
    assert outputs.stored(panel, FOLDER) is None


@pytest.mark.parametrize("html", ["<script>1</script>", '<img src="data:image/svg+xml;base64,">'])
def test_html_that_github_does_not_display_is_stored_as_a_picture(html, monkeypatch):
    monkeypatch.setattr(outputs, "picture_of", lambda html: ("a picture", 500))
    viewer = displayed(text_plain="an exam", text_html=html)
    assert outputs.stored(viewer, FOLDER).data == {
        "text/plain": "an exam",
        "image/png": "a picture",
    }


def test_curves_of_a_panel_that_ended_become_a_picture(monkeypatch):
    monkeypatch.setattr(outputs, "picture_of", lambda html: ("a picture", 500))
    html = panel_html([], {"loss": [(0, 1.0), (1, 0.5)]}, "done", "done in 1 s")
    kept = outputs.stored(displayed(text_plain="loss 0.5", text_html=html), FOLDER)
    assert kept.data["image/png"] == "a picture"
    assert kept.metadata == {"image/png": {"width": 500}}


def test_an_output_has_no_folder_of_this_machine():
    text = f"in {FOLDER}/data and {FOLDER}, {ROOT}/tpukit/fit.py, {Path(nbformat.__file__).parent}"
    stream = nbformat.v4.new_output("stream", text=text)
    expected = "in data and ., tpukit/tpukit/fit.py, nbformat"
    assert outputs.stored(stream, FOLDER).text == expected


def test_pictures_have_few_colors_and_become_smaller_only_if_the_file_is_too_large(
    notebook, monkeypatch
):
    notebook.cells[1].outputs = [displayed(image_png=png(width=1400))]
    large = copy.deepcopy(notebook)
    outputs.make_smaller(large)
    picture = picture_in(large)
    assert (picture.mode, picture.width) == ("P", 1400)
    monkeypatch.setattr(outputs, "LARGEST", len(nbformat.writes(large)) - 1)
    outputs.make_smaller(notebook)
    assert picture_in(notebook).width == 1200
    monkeypatch.setattr(outputs, "LARGEST", 100)
    with pytest.raises(SystemExit, match="the outputs have more than"):
        outputs.make_smaller(notebook)


def picture_in(notebook):
    data = notebook.cells[1].outputs[0].data["image/png"]
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_a_small_mark_in_a_colour_keeps_its_colour_on_a_grey_picture():
    image = Image.effect_noise((600, 400), 80).convert("RGB")
    image.paste((230, 160, 110), (10, 10, 17, 17))
    buffer = io.BytesIO()
    image.save(buffer, format="png")
    few = outputs.few_colors(base64.b64encode(buffer.getvalue()).decode(), 1500)
    pixel = Image.open(io.BytesIO(base64.b64decode(few))).convert("RGB").getpixel((12, 12))
    assert pixel[0] - pixel[2] > 60


@pytest.mark.parametrize("name", outputs.PARAMETERS)
def test_smaller_parameters_are_parameters_of_the_notebook(name):
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    small(notebook, outputs.PARAMETERS[name])


def test_the_parameters_cell_shows_smaller_parameters():
    assert outputs.note({}).text == f"{outputs.NOTE}.\n"
    assert outputs.note({"studies": 16}).text.endswith("with smaller parameters:\nstudies = 16\n")


@pytest.mark.parametrize(
    ("processor_seconds", "words"),
    [
        (24, "less than a minute"),
        (110, "about a minute"),
        (200, "about 2 minutes"),
        (540, "about 4 minutes"),
    ],
)
def test_a_header_has_the_time_that_two_cores_need(processor_seconds, words):
    assert outputs.takes("a notebook", processor_seconds) == f"{words} on two CPU cores"
    one_process = outputs.takes(outputs.ONE_PROCESS[0], processor_seconds / 2)
    assert one_process == f"{words} on two CPU cores"


def test_outputs_come_with_the_time_of_their_run(monkeypatch):
    header = nbformat.v4.new_markdown_cell("# A title\n\n- **Takes** an hour; it resumes")
    cells = [header, cell("install"), cell("a = 1"), cell("import torch")]
    cells[2].metadata["tags"] = ["parameters"]
    notebook = nbformat.v4.new_notebook(cells=cells)
    monkeypatch.setattr(outputs, "executed", lambda notebook, *_: [[], [], []])
    monkeypatch.setattr(outputs, "processor_seconds", iter([10.0, 210.4]).__next__)
    outputs.store(notebook, "a notebook")
    assert notebook.metadata.tpukit == {"processor_seconds": 200}
    assert header.source.endswith("- **Takes** about 2 minutes on two CPU cores; it resumes")


def test_the_number_of_a_cell_in_the_kernel_is_that_of_the_file(tmp_path):
    count = "print(get_ipython().execution_count)"
    cells = [cell(count), cell("a = 1"), cell("import torch"), cell(count)]
    cells[1].metadata["tags"] = ["parameters"]
    first, *_, last = outputs.executed(nbformat.v4.new_notebook(cells=cells), {}, tmp_path)
    assert int(last[0].text) - int(first[0].text) == 3
