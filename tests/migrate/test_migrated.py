"""Old code rewritten: a row a rule and detail, a row a stop, a row a thing that is left alone.

What is looked at is what `rewritten` makes of cells: `NameRules`, `OldCalls`, `ImportRules`, `StatementRules` and
`call_rules`, by what `Meanings`, `KernelPath`, `Loaders`, `Book`, `why_not_needed`, `without_setup` and `notes` say.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from migrate.table import runs
from migrate.tables import CHANGES, LEFT_ALONE, NOTES, STOPS

import tpukit.__main__
from tpukit.essentials.show import NoSuchFile, NotInstalled, WrongValue
from tpukit.migrate import Migrated, migrate
from tpukit.migrate.magics import is_python, magic_of, mask
from tpukit.migrate.old_files import first_cell

pytest.importorskip("libcst", reason="LibCST is not installed: pip install libcst")

ROOT = Path(__file__).parents[2]
NAMES = json.loads((ROOT / "tpukit/migrate/invented.json").read_text())["names"]


def rows_of(*cells):
    """Return the texts of cells as they are rewritten, and what is told of them."""
    from tpukit.migrate.notebook_text import rewritten
    from tpukit.migrate.old_cells import Cell

    found = []
    texts = rewritten([Cell(text, number) for number, text in enumerate(cells, start=1)], found)
    return texts, found


def notebook(path, *cells, minor=5, **more):
    made = [{"cell_type": "code", "metadata": {}, "source": cell.splitlines(keepends=True), "execution_count": 7,
             "outputs": [{"output_type": "stream", "name": "stdout", "text": "old"}], "id": f"c{at}"}
            for at, cell in enumerate(cells)]  # fmt: skip
    made.insert(0, {"cell_type": "markdown", "id": "words", "metadata": {"kept": True}, "source": "# Words"})
    path.write_text(
        json.dumps({"cells": made, "metadata": {"kept": 1}, "nbformat": 4, "nbformat_minor": minor, **more})
    )
    return path


def command(*arguments):
    return tpukit.__main__.main(["migrate", *map(str, arguments)])


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES.keys())
def test_a_rule_changes_this_and_nothing_else_and_a_second_run_nothing(before, after):
    texts, found = rows_of(*before)
    assert texts == list(after)
    assert [row for row in found if row.kind == "change"]
    assert not [row for row in found if row.kind == "stop"]
    again, found = rows_of(*texts)
    assert again == texts
    assert not [row for row in found if row.kind != "note"]


@pytest.mark.parametrize(("cells", "place", "words"), STOPS.values(), ids=STOPS.keys())
def test_a_stop_names_its_line_and_what_to_do_and_is_there_again(cells, place, words):
    texts, found = rows_of(*cells)
    stops = [row for row in found if row.kind == "stop"]
    assert (stops[0].cell, stops[0].line) == place
    assert words in f"{stops[0].new} {stops[0].fix}"
    assert all(row.fix for row in stops)
    _, found = rows_of(*texts)
    again = [row for row in found if row.kind == "stop"]
    assert [row.rule for row in again] == [row.rule for row in stops]


def test_a_launch_that_is_not_rewritten_brings_no_import():
    cell = "import torch_xla.distributed.xla_multiprocessing as xmp\nxmp.spawn(f, **given)\n"
    texts, found = rows_of(cell)
    assert (texts, [row.kind for row in found]) == ([cell], ["stop"])


@pytest.mark.parametrize("cells", LEFT_ALONE.values(), ids=LEFT_ALONE.keys())
def test_what_is_nobody_elses_business_is_left_alone(cells):
    texts, found = rows_of(*cells)
    assert texts == list(cells)
    assert not [row for row in found if row.kind != "note"]


@pytest.mark.parametrize(("cells", "rule"), NOTES.values(), ids=NOTES.keys())
def test_what_may_not_mean_what_it_meant_is_a_note(cells, rule):
    _, found = rows_of(*cells)
    assert rule in {row.rule for row in found if row.kind == "note"}
    assert not [row for row in found if row.kind == "stop"]


@pytest.mark.parametrize("name", NAMES)
def test_an_invented_name_is_a_stop_with_its_fix(name):
    module, _, leaf = name.rpartition(".")
    text = f"import torch, torch_xla\nx = {name}\n"
    if name.startswith("torch_xla.") and module != "torch_xla":
        text = f"import {module} as some\nx = some.{leaf}()\n"
    _, found = rows_of(text)
    fixes = [row.fix for row in found if row.kind == "stop"]
    assert NAMES[name]["right"] in fixes


# Files


OLD = "import torch_xla.core.xla_model as xm\ndef f(rank):\n    print(xm.get_ordinal())\n"
SPAWNS = "import torch_xla.distributed.xla_multiprocessing as xmp\nxmp.spawn(f, nprocs=8, start_method='fork')\n"


def test_a_notebook_becomes_another_beside_it_and_a_second_run_changes_nothing(tmp_path):
    old = notebook(tmp_path / "old.ipynb", OLD, "!curl x/pytorch-xla-env-setup.py -o a\n", SPAWNS)
    before, time = old.read_bytes(), old.stat().st_mtime_ns
    found = migrate(old)
    assert isinstance(found, Migrated)
    assert (found.green, found.written) == (True, tmp_path / "old.tpukit.ipynb")
    assert (old.read_bytes(), old.stat().st_mtime_ns) == (before, time)
    new = json.loads(found.written.read_text())
    sources = ["".join(cell["source"]) for cell in new["cells"]]
    assert sources[0] == "# Words"
    assert sources[2] == first_cell()  # where the old set-up stood
    assert sources[3].startswith("# tpukit: not needed: !curl")
    assert 'tpukit.launch(tpukit.on_old_rank(f), backend="xla")' in sources[4]
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in new["cells"])
    assert (new["metadata"], new["cells"][0]["metadata"]) == ({"kept": 1}, {"kept": True})
    assert len({cell["id"] for cell in new["cells"]}) == 5
    again = migrate(found.written)
    assert (again.written, again.found) == (None, ())
    assert [(row.cell, row.line) for row in found.changes if row.rule == "launch"] == [(4, 2)]


def test_the_first_cell_is_the_one_of_the_kits_notebooks():
    import headers

    assert headers.BOOTSTRAP.replace("ADDRESS", "") == first_cell()
    ast.parse(mask(first_cell())[0])


def test_nothing_is_written_over_a_file_that_is_something_else(tmp_path):
    old = tmp_path / "old.py"
    old.write_text(OLD)
    there = tmp_path / "old.tpukit.py"
    there.write_text("mine")
    with pytest.raises(WrongValue, match="is there already") as refused:
        migrate(old)
    assert "--force" in refused.value.fix
    assert (there.read_text(), command(old)) == ("mine", 2)
    assert migrate(old, output=tmp_path / "other.py").written.read_text() != OLD
    assert migrate(old, force=True).written == there
    assert migrate(old).written == there  # the same is no other
    with pytest.raises(WrongValue, match="is there already"):
        migrate(old, output=old, force=True)
    assert old.read_text() == OLD


def test_the_exit_status_says_what_is_left(tmp_path, capsys):
    good, stops = tmp_path / "good.py", tmp_path / "stops.py"
    good.write_text(OLD)
    stops.write_text("import torch_xla.core.xla_model as xm\nprint(xm.is_master_proc())\n")
    (tmp_path / "none.py").write_text("print(1)\n")
    old = tmp_path / "v3.ipynb"
    old.write_text(json.dumps({"worksheets": [{"cells": []}], "nbformat": 3}))
    assert command(good, "--check") == 1
    assert not (tmp_path / "good.tpukit.py").exists()
    assert command(good) == 0
    assert command(tmp_path / "good.tpukit.py", "--check") == 0
    assert command(stops) == command(stops, "--check") == 1
    assert command(tmp_path / "none.py") == 0
    capsys.readouterr()
    assert command(old) == command(tmp_path / "nowhere.py") == command(tmp_path / "nowhere.txt") == 2
    assert "jupyter nbconvert --to notebook" in capsys.readouterr().err
    assert command(old, good, "--check") == 2  # one that cannot be read does not keep the others from it
    assert "good.py" in capsys.readouterr().out
    with pytest.raises(SystemExit) as error:
        command(good, "--unknown")
    assert error.value.code == 2


def test_a_folder_is_its_notebooks_and_scripts(tmp_path, capsys):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/a.py").write_text(OLD)
    notebook(tmp_path / "b.ipynb", OLD, minor=4)
    (tmp_path / ".hidden.py").write_text(OLD)
    assert command(tmp_path, "--json") == 0
    reports = json.loads(capsys.readouterr().out)
    assert [Path(one["file"]).name for one in reports] == ["b.ipynb", "a.py"]
    assert "id" not in json.loads((tmp_path / "b.tpukit.ipynb").read_text())["cells"][1]["metadata"]
    assert command(tmp_path, "--output", tmp_path / "new.py") == 2


def test_the_report_is_told_in_json_in_text_and_in_a_notebook(tmp_path, capsys):
    old = notebook(tmp_path / "old.ipynb", OLD + "xm.is_master_proc()\n")
    assert command(old, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {"file", "written", "changes", "notes", "stops", "green"}
    assert report["green"] is False
    (change,) = report["changes"]
    assert change == {
        "cell": 2, "line": 3, "rule": "rank and world size", "old": "xm.get_ordinal()", "new": "xr.global_ordinal()"
    }  # fmt: skip
    assert command(old, "--diff") == 1
    diff = capsys.readouterr().out
    assert "cell 2" in diff
    assert "+    print(xr.global_ordinal())" in diff
    found = migrate(old, check=True)
    for words in ("1 change, 1 stop", "rank and world size", "cell 2, line 4", "fix:   xm.is_master_ordinal()"):
        assert words in str(found)
    assert "<details>" in found._repr_html_()
    assert "\033[32m+" in found.diff(colours=True)


def test_only_what_launches_is_told_how_to_rehearse(tmp_path):
    assert "xla_cpu_pjrt" in str(migrate(notebook(tmp_path / "launches.ipynb", SPAWNS), check=True))
    assert "xla_cpu_pjrt" not in str(migrate(notebook(tmp_path / "none.ipynb", OLD), check=True))


def test_a_file_without_torch_xla_is_left_alone_in_one_sentence(tmp_path, capsys):
    other = tmp_path / "other.py"
    other.write_text("from transformers import AdamW\nx = np.int\n")
    assert command(other) == 0
    assert capsys.readouterr().out == "other.py: no torch_xla in it, left alone\n"


def test_line_ends_and_the_form_of_a_source_survive(tmp_path):
    old = tmp_path / "old.py"
    old.write_bytes(b"\xef\xbb\xbf" + OLD.rstrip("\n").replace("\n", "\r\n").encode())
    new = migrate(old).written.read_bytes()
    assert new.startswith(b"\xef\xbb\xbfimport")
    assert new.count(b"\r\n") == new.count(b"\n") == 3
    assert not new.endswith(b"\n")
    book = notebook(tmp_path / "old.ipynb", OLD)
    text = json.loads(book.read_text())
    text["cells"][1]["source"] = OLD
    book.write_text(json.dumps(text))
    assert isinstance(json.loads(migrate(book).written.read_text())["cells"][1]["source"], str)


def test_without_libcst_the_message_names_the_pip_line(tmp_path):
    old = tmp_path / "old.py"
    old.write_text(OLD)
    program = (
        "import importlib.util, sys\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'libcst' else find(name, *more)\n"
        f"from tpukit.__main__ import main\nsys.exit(main(['migrate', {str(old)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install libcst" in done.stderr


def test_errors_are_of_their_kind(tmp_path):
    assert issubclass(NotInstalled, ModuleNotFoundError)
    with pytest.raises(NoSuchFile):
        migrate(tmp_path / "nowhere.py")
    old = tmp_path / "old.py"
    old.write_text(OLD)
    with pytest.raises(WrongValue, match="no folder"):
        migrate(old, output=tmp_path / "none" / "new.py")
    text = tmp_path / "text.ipynb"
    odd = ('{"cells": [1]}', '{"cells": {}}', '{"cells": [{"source": null}]}', '{"cells": [{"source": [1]}]}')
    for content in ("not JSON", "[]", "{}", *odd):
        text.write_text(content)
        with pytest.raises(WrongValue):
            migrate(text)


def test_a_notebook_that_hangs_is_told_and_the_table_goes_on(tmp_path, capsys):
    hangs = tmp_path / "hangs.py"
    hangs.write_text("import time\ntime.sleep(600)\n")
    assert runs(hangs, "digits", limit=0.5) is False
    assert "had not ended after 0.5 s" in capsys.readouterr().err


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=CHANGES.keys())
def test_the_table_is_python_before_and_after(before, after):
    for text in (*before, *after):
        if is_python(magic_of(text)[0]):
            ast.parse(mask(text)[0])
