"""What the pages promise: an example for every public name, an entry for every message, scripts that run."""

import ast
import doctest
import importlib.util
import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import links
import pages
import pytest
from messages import explained, messages

ROOT = Path(__file__).parents[1]

PAGES = sorted((ROOT / "docs").glob("*.md"))
# Where an error of somebody else, or one that is told elsewhere, is passed on in its own words.
PASSED_ON = {
    "run_hangs": "the words are those of the watchdog's `Stall`, which has entries",
    "run_on_cores": "an OutOfSyncError, which has entries, becomes the WorkerError",
    "_read_by_number": "the error of the user's dataset",
    "_read_stream": "the same",
    "read_one": "the same",
    "__getitem__": "what was told when the file was packed",
    "watch": "what the cloud says of a job",
}


def words(text):
    return re.findall(r"[A-Za-z]{2,}", re.sub(r"{[^{}]*}", " ", text))


@pytest.mark.parametrize("room", pages.rooms())
def test_every_public_name_has_an_example(room):
    shown = {}
    for names, _, code in pages.examples(room):
        assert not shown.keys() & set(names)
        shown |= dict.fromkeys(names, code)
    assert shown.keys() == set(pages.public_names(room))
    assert not [name for name, code in shown.items() if not re.search(rf"\b{name}\b", code)]
    for code in shown.values():
        assert any(one.want for one in doctest.DocTestParser().get_examples(code)), code
        assert not re.search(r"^>>> _ =|callable\(|hasattr\(", code, re.MULTILINE), "shows only that a name is there"


def test_the_names_of_the_public_api_are_those_of_subpackages():
    import tpukit

    there = {name for room in pages.rooms() for name in pages.public_names(room)}
    rooms = {room.partition(".")[0] for room in pages.rooms()}
    assert set(tpukit.__all__) <= there | rooms


def has_stand_in():
    from tpukit.simulator import why_not

    return why_not() is None and importlib.util.find_spec("torch_xla") is not None


def has_compiler():
    from tpukit.preflight.libtpu import LibtpuNotFoundError, find_libtpu

    try:
        return has_stand_in() and find_libtpu().is_file()
    except LibtpuNotFoundError:
        return False


# Whether this machine has what the examples of a room need that are marked to be skipped.
RUNS_ALL = {
    "simulator": has_stand_in,
    "preflight": has_compiler,
}


# A fork for each room, so that all of them together import torch once.
EXAMPLES = """
import doctest, os, sys
import torch._dynamo
flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
for room in sys.argv[1:]:
    if os.fork():
        _, status = os.wait()
        print(room, os.waitstatus_to_exitcode(status))
        continue
    os.chdir(room)
    os.environ["TORCH_HOME"] = room  # weights that this machine has kept would change what pe.resnet34() says
    said = os.open(f"{room}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1), os.dup2(said, 2)
    sys.exit(doctest.testfile("examples.txt", module_relative=False, optionflags=flags, encoding="utf-8").failed > 0)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Run the examples of all rooms; return by room the exit status, and what was printed."""
    folders = {}
    for room in pages.rooms():
        folders[room] = tmp_path_factory.mktemp(room)
        code = "\n".join(one.code for one in pages.examples(room))
        if RUNS_ALL.get(room, bool)():
            code = code.replace("  # doctest: +SKIP", "")
        (folders[room] / "examples.txt").write_text(code)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    command = [sys.executable, "-W", "ignore", "-u", "-c", EXAMPLES, *folders.values()]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ended = dict(line.split() for line in done.stdout.splitlines())
    return {room: (ended[str(folder)], Path(f"{folder}.txt").read_text()) for room, folder in folders.items()}


@pytest.mark.parametrize("room", pages.rooms())
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks CPU processes")
def test_the_examples_of_a_room_run(room, ran):
    status, said = ran[room]
    assert status == "0", said[-6000:]


def test_every_message_that_can_be_raised_has_an_entry():
    entries = messages()
    without = [one for one in entries if not any(len(words(text)) > 1 for text in (*one.facts, *one.found))]
    assert {one.function for one in without} <= PASSED_ON.keys()
    places = {one.place for one in entries}
    trees = {path: ast.parse(path.read_text()) for path in (ROOT / "tpukit").rglob("*.py")}
    kinds = explained(trees.values())
    assert len(kinds) > 10
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                assert f"{path.relative_to(ROOT).as_posix()}:{node.lineno}" in places


def test_a_message_that_somebody_got_fits_its_entry():
    import torch

    from tpukit.essentials.data import Batches

    with pytest.raises(ValueError, match="dataset is empty") as error:
        Batches(torch.zeros(0), batch_size=2)
    fitting = [one for one in messages() if error.value.fact in one.facts]
    assert [(one.room, one.kind, one.fixes) for one in fitting] == [
        ("tpukit.essentials.data", "InvalidValueError", (error.value.fix,))
    ]


def test_the_two_scripts_of_the_page_from_pytorch_run():
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs/from_pytorch.md").read_text(), re.MULTILINE | re.DOTALL)
    for sign in "-+":
        lines = [line[1:] for line in diff.splitlines() if line[:1] in (" ", sign)]
        said = io.StringIO()
        with redirect_stdout(said):
            exec("\n".join(lines), {"__name__": "__main__"})
        loss = float(re.search(r"(\d\.\d+(e-\d+)?)\D*$", said.getvalue())[1])
        assert loss < 0.2, sign


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_of_the_kit_on_a_page_are_there(page):
    import tpukit
    from tpukit.essentials.launcher import Core

    text = page.read_text()
    for whole in set(re.findall(r"`tpukit((?:\.[a-zA-Z_]+)+)\(", text)):
        value = tpukit
        for name in whole[1:].split("."):
            value = getattr(value, name)
    for name in set(re.findall(r"`core\.([a-z_]+)\(", text)):
        assert callable(getattr(Core, name))


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "one.html").write_text(
        '<a href="two.html#there">a</a><a href="two.html#gone">b</a><a href="three.html">c</a>'
        '<a href="https://a b">d</a><a href="https://pypi.org/project/torch/">e</a><img src="gone.png">'
    )
    (tmp_path / "two.html").write_text('<h1 id="there">a</h1>')
    assert [line.split(": ")[1].split()[0] for line in links.broken_links(tmp_path)] == [
        "two.html#gone",
        "three.html",
        "https://a",
        "gone.png",
    ]


@pytest.mark.only_soak  # make docs does it
@pytest.mark.skipif(
    importlib.util.find_spec("myst_nb") is None, reason="needs Sphinx and myst-nb: pip install '.[docs]'"
)
def test_the_pages_are_built_without_a_warning():
    done = subprocess.run([sys.executable, ROOT / "docs/pages.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
