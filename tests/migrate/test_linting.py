"""`python -m tpukit lint`: names are found with their cell and line, and fixes change no meaning."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpukit.essentials.display import InvalidValueError, SystemFailureError
from tpukit.migrate import lint
from tpukit.migrate.code_pieces import Piece
from tpukit.migrate.name_scopes import Names
from tpukit.migrate.safe_fixes import SafeFixes
from tpukit.migrate.shell_checks import check_shell

ROOT = Path(__file__).parents[2]
XM = "import torch_xla.core.xla_model as xm\n"
XMP = "import torch_xla.distributed.xla_multiprocessing as xmp\n"
TX = "import torch_xla\n"

FIXED = {  # before, after
    "a call": (
        f"{XM}r = xm.get_ordinal()  # rank\n",
        f"{TX}{XM}r = torch_xla.runtime.global_ordinal()  # rank\n",
    ),
    "another alias": (
        "import torch_xla.core.xla_model as any\nany.xrt_world_size()\n",
        f"{TX}import torch_xla.core.xla_model as any\ntorch_xla.runtime.world_size()\n",
    ),
    "torch_xla is there": (f"{TX}{XM}xm.xla_device()\n", f"{TX}{XM}torch_xla.device()\n"),
    "torch_xla comes later": (f"{XM}xm.xla_device()\n{TX}", f"{TX}{XM}torch_xla.device()\n{TX}"),
    "arguments of the same signature": (
        f"{TX}{XM}xm.mark_step(wait=True)\n",
        f"{TX}{XM}torch_xla.sync(wait=True)\n",
    ),
    "the whole name": (
        "import torch_xla.core.xla_model\ntorch_xla.core.xla_model.get_ordinal()\n",
        "import torch_xla.core.xla_model\ntorch_xla.runtime.global_ordinal()\n",
    ),
    "torch_xla under another name": (
        "import torch_xla as tx\ntx.core.xla_model.mark_step()\n",
        "import torch_xla as tx\ntx.sync()\n",
    ),
    "names of a module that has moved": (
        "from torch_xla.experimental.xla_sharded_tensor import XLAShardedTensor\n",
        "from torch_xla.distributed.spmd import XLAShardedTensor\n",
    ),
    "line ends and letters": (
        f"{XM}x = 'éé', xm.get_ordinal()\n".replace("\n", "\r\n"),
        f"{TX}{XM}x = 'éé', torch_xla.runtime.global_ordinal()\n".replace("\n", "\r\n"),
    ),
}
ADVICE = {  # reported on the last line, and not changed
    "an argument": f"{XM}xm.get_ordinal(0)",
    "a device by its number": f"{XM}xm.xla_device(1)",
    "in a function": "def f():\n    import torch_xla.core.xla_model as xm\n    return xm.get_ordinal()",
    "behind a colon": "if 1: import torch_xla.core.xla_model as xm\nxm.get_ordinal()",
    "imported by name": "from torch_xla.core.xla_model import get_ordinal, optimizer_step as step\nget_ordinal()",
    "imported by name, in brackets": "from torch_xla.core.xla_model import (\n    get_ordinal\n)\nget_ordinal()",
    "a module by name": "from torch_xla.experimental import pjrt\npjrt.world_size()",
    "in an f-string": f"{XM}print(f'{{xm.get_ordinal()}}')",
    "behind a handler": f"{XM}try:\n    r = 0\nexcept AttributeError:\n    r = xm.get_ordinal()",
    "patched": f"{XM}setattr(xm, 'mark_step', 2)\nxm.get_ordinal()",
    "a function's own import": f"{XM}def f():\n    import helper as xm\nxm.get_ordinal()",
    "a module that has moved, handed on": "import torch_xla.experimental.xla_sharding as xs\nf(xs)",
    "a module that has moved": "import torch_xla.experimental.xla_sharding as xs\nxs.mark_sharding",
    "a function handed on": f"{XM}f = xm.get_ordinal",
    "torch_xla is a variable": f"{XM}torch_xla = 3\nxm.get_ordinal()",
    "torch_xla is a parameter": f"{XM}def f(torch_xla):\n    xm.get_ordinal()",
    "an import that may fail": f"try:\n    {XM}except ImportError:\n    xm = None\nxm.get_ordinal()",
    "bound elsewhere too": f"{XM}def f():\n    global xm\n    xm = 1\nxm.get_ordinal()",
    "a star import after it": f"{XM}from helpers import *\nxm.get_ordinal()",
    "of a star import": "from torch_xla.core.xla_model import *\nget_ordinal()",
    "nobody imports it": "xm.get_ordinal()",
    "by getattr": f"{XM}getattr(xm, 'get_ordinal')()",
    "in brackets": f"{XM}(xm.\nget_ordinal)()",
    "looked for first": f"{XM}xm.get_ordinal() if hasattr(xm, 'get_ordinal') else 0",
    "beside a line of Python 2": f"{XM}print 'x'\nxm.get_ordinal()",
    "cores by a variable": f"{XMP}xmp.spawn(f, (), CORES)",
    "through partial": f"{XMP}import functools\nfunctools.partial(xmp.spawn, nprocs=8)(f)",
    "an alias by assignment": f"{TX}model = torch_xla.core.xla_model\nmodel.get_ordinal()",
    "a name that never was": f"{XM}xm.is_master_proc()",
    "a module that is gone": "import torch_xla.utils.gcsfs",
    "torch_xla's device": "import torch\ntorch.device('tpu')",
    "transformers": "from transformers import is_torch_tpu_available",
    "transformers, an argument": "from transformers import TrainingArguments\nTrainingArguments('o', tpu_num_cores=8)",
    "Lightning": "from pytorch_lightning.plugins import TPUSpawnPlugin",
    "Lightning, a value": "import lightning as L\nL.Trainer(strategy='tpu_spawn')",
    "Lightning, a method": "import lightning as L\nclass M(L.LightningModule):\n    def test_epoch_end(self, o): ...",
    "accelerate": "from accelerate import DistributedType\nDistributedType.TPU",
    "ignite": "import ignite.distributed as idist\nidist.Parallel(backend='xla-tpu', nproc_per_node=8)",
    "a variable": "import os\nos.environ['XRT_TPU_CONFIG'] = 'x'",
    "a variable that is looked for": "import os\n'COLAB_TPU_ADDR' in os.environ",
    "an install": "import os\nos.system('pip install torch==2.4.0 torch_xla==2.4.0')",
}
CLEAN = {
    "a comment and a string": f"{XM}# xm.get_ordinal()\ns = 'xm.get_ordinal()'",
    "a parameter": f"{XM}def f(xm):\n    xm.get_ordinal()",
    "a variable": f"{XM}xm = object()\nxm.get_ordinal()",
    "a loop's variable": f"{XM}[xm.get_ordinal() for xm in y]",
    "patched by the code": f"{XM}xm.get_ordinal = lambda: 0\nxm.get_ordinal()",
    "what works": f"{XM}{XMP}xm.optimizer_step(o, barrier=True)\nxmp.spawn(f)\nxmp.spawn(f, nprocs=1)",
    "another package": "from . import xla_model as xm\nxm.get_ordinal()",
    "TorchTPU": "import torch, torch_tpu\ntorch.device('tpu')",
    "other installs": "import os\nos.system('pip install torchmetrics==1.0 pytorch-lightning==2.5 torch')",
}
INSTALLS = [  # those that replace the image's torch
    "!pip install torch==2.6.0 'torch_xla[tpu]==2.6.0'",
    "!pip install -q torch_xla==2.4.0",
    "!pip install -U torch torchvision",
    "!pip install 'torch<2.5' accelerate",
    "!pip install accelerate \\\n  torch~=2.5.0",
    "!uv pip install torch==2.4.0",
    "%pip install torch @ https://x/y.whl",
    "!pip uninstall -y torch",
    "%%bash\npip install torch_xla==2.4.0",
    "!curl https://x/env-setup.py -o pytorch-xla-env-setup.py",
    "!pip install cloud-tpu-client==0.10 https://storage.googleapis.com/tpu-pytorch/wheels/torch_xla-1.6-cp36-x.whl",
    "%env XLA_USE_BF16=1",
    "!export XLA_USE_BF16=1",
]


def script(folder, text, name="old.py"):
    path = folder / name
    path.write_bytes(text.encode())
    return path


def notebook(folder, *texts, **others):
    kind = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": "text"},
        *({**kind, "source": text} for text in texts),
    ]
    book = {"nbformat": 4, "nbformat_minor": 4, "metadata": {}, "cells": cells, **others}
    return script(folder, json.dumps(book, indent=1), "old.ipynb")


def command(*words, cwd=None):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "tpukit", "lint", *map(str, words)]
    return subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", FIXED)
def test_a_safe_rename_is_written_and_a_second_run_changes_nothing(tmp_path, name):
    before, after = FIXED[name]
    path = script(tmp_path, before)
    report = lint(path)
    assert report.findings
    assert all(one.is_fixable for one in report.findings)
    assert report.fix()
    assert path.read_bytes().decode() == after
    again = lint(path)
    assert again.findings == []
    assert not again.fix()


def test_a_file_that_has_changed_since_it_was_read_is_not_overwritten(tmp_path):
    path = script(tmp_path, f"{XM}xm.get_ordinal()\n")
    report = lint(path)
    path.write_text("mine = 1\n")
    with pytest.raises(InvalidValueError, match=r"has changed since(.|\n)*fix: *lint\("):
        report.fix()
    assert path.read_text() == "mine = 1\n"


@pytest.mark.parametrize("name", ADVICE)
def test_what_could_change_a_meaning_is_advice(tmp_path, name):
    text = ADVICE[name]
    report = lint(script(tmp_path, text))
    last = report.findings[-1]
    assert text.count("\n") + 1 - (name == "in brackets") == last.line
    assert last.happened
    assert last.write
    assert not any(one.is_fixable for one in report.findings)
    assert not report.fix()


@pytest.mark.parametrize("name", CLEAN)
def test_what_is_not_an_old_name_is_not_reported(tmp_path, name):
    assert lint(script(tmp_path, CLEAN[name])).findings == []


@pytest.mark.parametrize("text", INSTALLS)
def test_lines_of_the_shell_are_advice(tmp_path, text):
    report = lint(notebook(tmp_path, text))
    assert [one.kind for one in report.findings] == ["environment" if "BF16" in text else "install"]
    assert report.findings[0].line == (2 if text.startswith("%%") or "\\\n" in text else 1)
    assert not report.fix()


@pytest.mark.parametrize("magic", ["python", "python3", "pypy"])
def test_a_cell_that_runs_in_its_own_process_imports_what_its_fix_needs(tmp_path, magic):
    path = notebook(tmp_path, "import torch_xla\n", f"%%{magic}\n{XM}xm.get_ordinal()")
    lint(path).fix()
    *_, cell = json.loads(path.read_text())["cells"]
    renamed = f"{XM}torch_xla.runtime.global_ordinal()"
    assert "".join(cell["source"]) == f"%%{magic}\nimport torch_xla\n{renamed}"


def test_cells_share_their_names_and_scripts_that_cells_write_do_not(tmp_path):
    path = notebook(
        tmp_path,
        f"%%time\n{XM}",
        "%time xm.get_ordinal()\n!nvidia-smi\n",
        "%%writefile train.py\nxm = helper()\nxm.get_ordinal()",
        f"%%writefile other.py\n{XM}xm.get_ordinal()",
        "",
    )
    report = lint(path)
    assert [(one.cell, one.line) for one in report.findings] == [(3, 1), (5, 3)]
    report.fix()
    texts = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"][1:]]
    assert texts[0] == f"%%time\n{TX}{XM}"
    assert texts[1] == "%time torch_xla.runtime.global_ordinal()\n!nvidia-smi\n"
    assert texts[3] == f"%%writefile other.py\n{TX}{XM}torch_xla.runtime.global_ordinal()"


def test_a_root_is_plain_if_it_can_only_be_one_module():
    plain = {
        f"{XM}xm.mark_step": True,
        f"{XM}{XM}xm.mark_step": True,
        f"{XM}xm = None\nxm.mark_step": False,
        f"{XM}from y import *\nxm.mark_step": False,
        f"{XM}%run y.py\nxm.mark_step": False,
        f"{XM}print 'x'\nxm.mark_step": False,
        f"{XM}f(xm)\nxm.mark_step": False,
        f"{XM}xm.b.c = 1\nxm.mark_step": False,
        f"{XM}def f(xm): ...\nxm.mark_step": False,
        f"if 1:\n    {XM}xm.mark_step": False,
    }
    for text, is_plain in plain.items():
        piece = Piece(text)
        piece.parse()
        names = Names([piece])
        use = piece.tree.body[-1].value
        assert names.full_name(use) == "torch_xla.core.xla_model.mark_step", text
        assert names.is_plain("xm") == is_plain, text
        assert (SafeFixes(names).of_use(use) is not None) == is_plain, text


def test_a_line_of_a_shell_is_named_by_its_own_line():
    (below, text, verdict), *others = check_shell("pip install accelerate \\\n  torch==2.4")
    assert (below, text, verdict.kind, others) == (1, "torch==2.4", "install", [])
    assert not list(check_shell("# pip install torch==2.4"))


def test_a_magic_becomes_a_placeholder_of_its_line():
    text = "%%time\n%timeit -n 1 f()\n%time x = 1\ny = !ls \\\n  -l\n"
    text += "s = '''\n%no\n'''\nprint?\nz = (1\n % 2)\nif z:\n    !ls"
    piece = Piece(text)
    piece.parse()
    assert piece.shell == {
        1: "%%time",
        2: "%timeit -n 1 f()",
        4: "y = !ls \\\n  -l",
        9: "print?",
        13: "    !ls",
    }
    expected = (
        "pass\npass\nif 1:\n    x = 1\ny = None\ns = '\\n%no\\n'\npass\nz = 1 % 2\nif z:\n    pass"
    )
    assert ast.unparse(piece.tree) == expected
    assert [node.lineno for node in piece.tree.body] == [1, 2, 3, 4, 6, 9, 10, 12]
    assert not piece.broken


def test_a_cell_in_a_string_is_read_and_left(tmp_path):
    text = f"{XM}get_ipython().run_cell_magic('time', '', 'a = 1\\nxm.get_ordinal()')\n"
    report = lint(script(tmp_path, text))
    assert [one.line for one in report.findings] == [2]
    assert not report.fix()


@pytest.mark.parametrize("indent", [1, 4, None])
def test_all_of_a_notebook_but_the_renamed_lines_stays_as_it_is(tmp_path, indent):
    book = {
        "cells": [
            {
                "source": [XM, "x = 'é' # \u2028\n", "xm.mark_step()"],
                "cell_type": "code",
                "outputs": [1e5, 1.50],
            },
            {"cell_type": "code", "source": "xm.mark_step()"},
        ],
        "metadata": {"a": "\u00e9"},
        "nbformat": 4,
    }
    old = json.dumps(book, indent=indent) + " \n"
    path = script(tmp_path, old, "old.ipynb")
    lint(path).fix()
    for one in book["cells"]:
        if isinstance(one["source"], list):
            one["source"] = [TX, XM, one["source"][1], "torch_xla.sync()"]
        else:
            one["source"] = "torch_xla.sync()"
    assert path.read_text() == json.dumps(book, indent=indent) + " \n"


def test_a_notebook_of_format_3_is_read_and_fixed(tmp_path):
    cell = {
        "cell_type": "code",
        "language": "python",
        "input": [XM, "xm.mark_step()"],
        "outputs": [],
    }
    path = script(
        tmp_path, json.dumps({"nbformat": 3, "worksheets": [{"cells": [cell]}]}), "old.ipynb"
    )
    assert lint(path).fix()
    assert json.loads(path.read_text())["worksheets"][0]["cells"][0]["input"] == [
        TX,
        XM,
        "torch_xla.sync()",
    ]


def test_a_notebook_of_another_language_has_no_findings(tmp_path):
    cell = {"cell_type": "code", "source": ["x <- xm.xrt_world_size()"]}
    book = {"cells": [cell], "metadata": {"kernelspec": {"language": "R"}}, "nbformat": 4}
    path = script(tmp_path, json.dumps(book), "old.ipynb")
    assert lint(path).findings == []
    assert not lint(path).fix()


def test_a_fix_keeps_the_mode_the_link_and_the_encoding_of_a_file(tmp_path):
    path = tmp_path / "real.py"
    path.write_bytes(b"# -*- coding: latin-1 -*-\n" + XM.encode() + b"x = '\xe9'; xm.mark_step()\n")
    path.chmod(0o750)
    link = tmp_path / "link.py"
    link.symlink_to(path)
    lint(link).fix()
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o750
    assert b"x = '\xe9'; torch_xla.sync()\n" in path.read_bytes()


def test_a_fix_that_cannot_be_written_leaves_nothing_and_says_what_to_type(tmp_path, monkeypatch):
    folder = tmp_path / "my notebooks"
    folder.mkdir()
    path = script(folder, f"{XM}xm.mark_step()\n", "old.py")
    before = path.read_bytes()

    def refuse(*_):
        raise PermissionError("permission denied")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(SystemFailureError, match="permission denied") as caught:
        lint(path).fix()
    assert caught.value.fix == f"chmod u+w '{folder}'"
    assert [*folder.iterdir()] == [path]
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.py", b"x = '\xe9'\n"),
        ("a.txt", b"text"),
        ("a.ipynb", b"\xff\xfe{}"),
        ("b.ipynb", b"[1, 2]"),
        ("c.ipynb", b'{"a": 1}'),
        ("d.ipynb", b'{"cells": [3]}'),
        ("e.ipynb", b'{"cells": [{"cell_type": "code", "source": 3}]}'),
        ("f.ipynb", b'{"worksheets": [{"cells": 5}]}'),
        ("g.ipynb", b""),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_and_the_others_are_checked(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    path = script(tmp_path, f"{XM}xm.mark_step()\n", "good.py")
    ended = command(tmp_path / name, path)
    assert ended.returncode == 2
    assert "fix:" in ended.stderr
    assert "xm.mark_step" in ended.stdout


def test_exit_statuses_are_those_of_linters(tmp_path):
    clean = script(tmp_path, "x = 1\n", "clean.py")
    path = script(tmp_path, f"{XM}xm.mark_step()\n")
    old = path.read_bytes()
    assert command(clean).returncode == 0
    assert command(path).returncode == 1
    shown = command("--diff", path)
    assert shown.returncode == 1
    assert "+torch_xla.sync()" in shown.stdout
    assert path.read_bytes() == old
    assert command("--fix", path).returncode == 0
    assert command(path).returncode == 0
    assert command("--no-such-option", path).returncode == 2
    assert command().returncode == 2
    assert command(tmp_path / "nowhere.py").returncode == 2


def test_installed_packages_and_hidden_folders_are_skipped(tmp_path):
    for folder in ("env/lib/python3/site-packages/x", ".hidden", "site-packages", "code"):
        (tmp_path / folder).mkdir(parents=True)
        script(tmp_path / folder, f"{XM}xm.mark_step()\n")
    (tmp_path / "env/pyvenv.cfg").write_text("home = /usr/bin\n")
    ended = command(".", "code/old.py", cwd=tmp_path)
    assert ended.stdout.count("xm.mark_step") == 1
    assert "skipped: env, site-packages" in ended.stderr


def test_control_characters_are_escaped(tmp_path):
    name = "a\x1b]0;x\x07.py"
    path = script(tmp_path, f"{XM}xm.mark_step()  # \x1b[31m\nprint '\x1b[2J'\n", name)
    ended = command(path)
    assert "\x1b" not in ended.stdout + ended.stderr
    assert "\\x1b]0;x\\x07.py" in ended.stdout
    assert (
        "\x1b"
        not in command("--diff", script(tmp_path, f"{XM}xm.mark_step()  # \x1b[31m\n")).stdout
    )


def test_large_outputs_and_a_large_standard_input_do_no_harm(tmp_path):
    path = notebook(tmp_path, f"{XM}xm.mark_step()", metadata={"x": "y" * 20_000_000})
    words = [sys.executable, "-m", "tpukit", "lint", "--fix", str(path)]
    ended = subprocess.run(
        words, cwd=ROOT, input="z" * 20_000_000, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0
    assert len(json.loads(path.read_text())["metadata"]["x"]) == 20_000_000


def test_every_kind_of_finding_has_its_anchor_on_the_page():
    page = (ROOT / "docs/from_torch_xla_1x.md").read_text()
    sources = "".join(path.read_text() for path in (ROOT / "tpukit/migrate").glob("*.py"))
    kinds = {"removed", "moved", "invented", "changed", "deprecated", "library"}
    kinds |= {"install", "environment", "not-python"}
    for kind in kinds:
        assert f"\n({kind})=\n### {kind}\n" in page
        assert f'"{kind}"' in sources or kind in (ROOT / "tpukit/migrate/names.json").read_text()


@pytest.mark.xla
def test_a_fixed_script_computes_the_same(tmp_path):
    text = f"{XM}t = 2 * xm.xla_device().index\nxm.mark_step()\nprint(t, str(xm.xla_device()))\n"
    path = script(tmp_path, text)

    def run():
        environ = {**os.environ, "PJRT_DEVICE": "CPU", "PYTHONWARNINGS": "ignore"}
        return subprocess.run(
            [sys.executable, path], env=environ, capture_output=True, text=True, check=True
        ).stdout

    before = run()
    assert lint(path).fix()
    assert "xm." not in path.read_text()
    assert run() == before


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests/migrate/old").iterdir()), ids=lambda path: path.name
)
def test_our_own_old_notebooks_end_with_advice_alone(tmp_path, path):
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    lint(copy).fix()
    again = lint(copy)
    assert again.findings
    assert not any(one.is_fixable for one in again.findings)
    for text in again.texts if path.suffix == ".py" else ():
        ast.parse(text)
