"""Notebooks and scripts as a job runs them: what is kept, what is refused, and the parameters."""

import ast
import json
from pathlib import Path

import nbformat
import pytest

from tpukit.cloud.job_files import find_secret, refuse_secret
from tpukit.cloud.job_notebook import check_parameters, parse_parameters, read_notebook
from tpukit.essentials.display import TpukitError

DEFAULTS = "preset = 'cpu'\nlr: float = 1e-3\nepochs = 1\nnames = []\na, b = 1, 2\nfold = None\n%matplotlib inline"


def test_outputs_and_cells_of_an_earlier_run_are_not_sent(make_notebook):
    path = make_notebook(
        "1", "injected = 1", "2", tags=[(1, "injected-parameters")], parameters="n = 1"
    )
    book = json.loads(path.read_text())
    secret = "hf_" + "a" * 34
    book["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": secret}]
    book["metadata"] |= {"widgets": {"state": secret}, "papermill": {"parameters": secret}}
    path.write_text(json.dumps(book))
    found = read_notebook(path)
    assert secret.encode() not in found.content
    assert found.numbers == (1, 2, 4)
    assert found.parameters_cell == 0
    sent = nbformat.reads(found.content.decode(), as_version=4)
    nbformat.validate(sent)
    assert [cell.source for cell in sent.cells] == ["n = 1", "1", "2"]
    assert (
        sent.metadata.kernelspec.name == "python3"
    )  # the kernel "mine" exists on the caller's machine only


def test_a_byte_order_mark_of_an_editor_is_no_error(tmp_path):
    path = tmp_path / "train.py"
    path.write_bytes(b"\xef\xbb\xbf# %%\nx = 1\n")
    assert b'"x = 1"' in read_notebook(path).content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("# Zählung\n".encode("latin-1"), "train.py is not UTF-8"),
        (b"# %% tags=[parameters]\nn = 1\n", "tags of a cell(.|\n)*tags=.parameters.(.|\n)*fix:"),
    ],
)
def test_a_script_that_cannot_be_read_is_refused_by_its_name(tmp_path, content, message):
    (tmp_path / "train.py").write_bytes(content)
    with pytest.raises(TpukitError, match=message):
        read_notebook(tmp_path / "train.py")


def test_an_empty_cell_of_a_script_counts_in_the_numbers_of_cells(tmp_path):
    path = tmp_path / "cells.py"
    path.write_text("# %% first\n\n# %% second\nx = 1\n# %% third\nx = 2\n")
    found = read_notebook(path)
    sources = [cell["source"] for cell in json.loads(found.content)["cells"]]
    assert dict(zip(found.numbers, sources, strict=True)) == {1: "", 2: "x = 1", 3: "x = 2"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a notebook"),
        ("[]", "is not a notebook"),
        ('{"cells": 1, "nbformat": 4}', "is not a notebook"),
        ('{"worksheets": [], "nbformat": 3}', "has notebook format 3"),
        (
            '{"cells": [], "nbformat": 4, "metadata": {"kernelspec": {"language": "R"}}}',
            "a notebook in R",
        ),
        (
            '{"cells": [{"cell_type": "code", "source": ["x = (1,\\n", "y = 2"]}], "nbformat": 4}',
            "cell 1.* is not valid Python",
        ),
    ],
)
def test_what_is_no_notebook_in_python_is_refused(tmp_path, content, message):
    (tmp_path / "book.ipynb").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_notebook(tmp_path / "book.ipynb")


def test_magics_and_top_level_await_are_no_syntax_errors(make_notebook):
    cells = [
        "%matplotlib inline\n!ls\nfiles = !ls\nprint?",
        "%%bash\nfor i in 1 2; do echo $i; done",
        "await work()",
    ]
    assert len(read_notebook(make_notebook(*cells)).numbers) == 3
    read_notebook(make_notebook("1 +", tags=[(0, "raises-exception")]))


def test_a_missing_file_and_another_kind_of_file_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file.*there.ipynb"):
        read_notebook(tmp_path / "there.ipynb")
    with pytest.raises(ValueError, match="a notebook or a script"):
        read_notebook(tmp_path / "data.csv")


def test_a_script_with_cells_is_a_notebook(tmp_path):
    text = '"""About."""\nimport os\n# %% [markdown]\n# # A title\n#%% tags=["parameters"]\nn = 1\n\n# %%\nprint(n)\n'
    (tmp_path / "train.py").write_text(text)
    found = read_notebook(tmp_path / "train.py")
    cells = nbformat.reads(found.content.decode(), as_version=4).cells
    kinds = [(cell.cell_type, cell.source) for cell in cells]
    assert kinds == [
        ("code", '"""About."""\nimport os'),
        ("markdown", "# A title"),
        ("code", "n = 1"),
        ("code", "print(n)"),
    ]
    assert found.script is None
    assert check_parameters(found, {"n": 2}) == {"n": 2}


def test_a_script_without_cells_runs_as_it_is_and_has_no_parameters(tmp_path):
    (tmp_path / "train.py").write_text("n = 1\n")
    found = read_notebook(tmp_path / "train.py")
    assert found.script == tmp_path / "train.py"
    with pytest.raises(ValueError, match="need a cell of parameters"):
        check_parameters(found, {"n": 2})
    (tmp_path / "train.py").write_text("n = (\n")
    with pytest.raises(ValueError, match=r"train.py is not valid Python"):
        read_notebook(tmp_path / "train.py")


@pytest.mark.parametrize(
    "line", ["cpus = !nproc", "?print", "!ls \\\n  -l", "if n:\n    !ls", "%matplotlib inline"]
)
def test_a_cell_of_parameters_may_have_magics(make_notebook, line):
    found = read_notebook(make_notebook(parameters=f"n = 1\n{line}\nm = 2"))
    assert found.defaults.keys() - {"cpus"} == {"n", "m"}
    found = read_notebook(make_notebook(parameters="%%time\nn = 1", name="timed.ipynb"))
    assert found.defaults.keys() == {"n"}


def test_parameters_are_names_that_the_cell_assigns(make_notebook):
    book = read_notebook(
        make_notebook("other = 1", parameters=DEFAULTS + "\ndef f():\n    inner = 1")
    )
    assert list(book.defaults) == ["preset", "lr", "epochs", "names", "a", "b", "fold"]
    given = {"preset": "v5e-8", "lr": float("nan"), "names": ["x", {"deep": [None]}], "b": True}
    assert check_parameters(book, given) == given
    for wrong in ("other", "inner", "f", "epoch"):
        with pytest.raises(ValueError, match=f"no such parameter: {wrong}"):
            check_parameters(book, {wrong: 1})
    with pytest.raises(ValueError, match='tag "parameters"'):
        check_parameters(read_notebook(make_notebook("n = 1")), {"n": 1})


@pytest.mark.parametrize(
    "value",
    [Path("x"), {1: 2}, {"a": object()}, [b"x"], 1j, {1, 2}],
    ids=["path", "number as a key", "object", "bytes", "complex", "set"],
)
def test_values_that_json_does_not_keep_are_refused(make_notebook, value):
    book = read_notebook(make_notebook(parameters="n = 1"))
    with pytest.raises(TypeError, match="parameter n cannot be sent"):
        check_parameters(book, {"n": value})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("preset", "v5e-8", "v5e-8"),
        ("preset", "001", "001"),
        ("preset", "True", "True"),
        ("lr", "1e-3", 1e-3),
        ("epochs", "3", 3),
        ("names", "['a', 2]", ["a", 2]),
        ("fold", "None", None),
        ("fold", "'text'", "text"),
    ],
)
def test_values_of_the_command_line_have_the_type_of_the_default(make_notebook, name, text, value):
    book = read_notebook(make_notebook(parameters=DEFAULTS))
    assert parse_parameters(book, [(name, text)]) == {name: value}


@pytest.mark.parametrize(
    ("name", "text"),
    [("epochs", "three"), ("fold", "v5e-8"), ("lr", "1e-3 # x y"), ("names", "a,b")],
)
def test_text_for_what_is_no_text_is_refused_with_a_fix_that_works(make_notebook, name, text):
    book = read_notebook(make_notebook(parameters=DEFAULTS))
    with pytest.raises(ValueError, match="not a Python literal") as caught:
        parse_parameters(book, [(name, text)]) if "#" not in text else parse_parameters(
            book, [(name, "x y")]
        )
    assert ast.unparse(book.defaults[name]) in str(caught.value)
    assert parse_parameters(book, [(name, f'"{text}"')]) == {name: text}


SECRETS = [
    "login('hf_" + "a" * 34 + "')",
    "os.environ['WANDB_API_KEY'] = '" + "0" * 40 + "'",
    "key = '''-----BEGIN RSA PRIVATE KEY-----'''",
    "!pip install --index-url https://me:" + "s" * 9 + "@example.com/simple x",
    "wandb.login(key='" + "0123456789abcdef" * 2 + "01234567')",
    "wandb.login('" + "0123456789abcdef" * 2 + "01234567')",
    "!wandb login " + "0123456789abcdef" * 2,
    "%env HF_TOKEN=abcdefghijklmnop",
    "!export KAGGLE_API_KEY=abcdefghijklmnop",
    "config = {'api_key': 'abcdefgh1234'}",
    "password: str = 'correct-horse'",
    "headers = {'Authorization': 'Bearer abcdefghijklmnopqrstuvwx'}",
    "client = OpenAI(api_key='sk-proj-" + "a1" * 20 + "')",
    "aws = 'AKIAABCDEFGHIJKLMNOP'",
    "github = 'ghp_" + "aB3" * 12 + "'",
    'json.loads(\'{"private_key": "-----"}\')',
    "os.environ['KAGGLE_KEY'] = '" + "0123456789abcdef" * 2 + "'",
]
NO_SECRETS = [
    "os.environ['HF_TOKEN']",
    "token = os.environ['HF_TOKEN']",
    "login(token=userdata.get('HF_TOKEN'))",
    "tokenizer = AutoTokenizer.from_pretrained('bert-base-uncased')",
    "tokenizer = 'bert-base-uncased'",
    "pad_token='[PAD]', eos_token='</s>'",
    "!pip install tokenizers sentencepiece==0.1.99 tokenizers==0.15.0",
    "!pip install git+https://example.com/xla.git@" + "0123456789abcdef" * 2 + "01234567",
    "!huggingface-cli login --token $HF_TOKEN",
    "monitor_key = 'valid_auroc_of_all_labels'",
    "from huggingface_hub import login\nlogin()",
    "digest = '" + "0123456789abcdef" * 4 + "'",
]


@pytest.mark.parametrize("text", SECRETS, ids=lambda text: text[:24])
def test_what_looks_like_a_secret_is_refused_with_the_number_of_its_cell(make_notebook, text):
    with pytest.raises(
        ValueError, match=r"cell 2 of book.ipynb contains text that looks like a secret"
    ) as caught:
        read_notebook(make_notebook("1", text, tags=[(1, "raises-exception")]))
    assert text not in str(caught.value)


@pytest.mark.parametrize("text", NO_SECRETS, ids=lambda text: text[:24])
def test_what_is_no_secret_passes(text):
    assert find_secret(text) is None


def test_a_false_alarm_can_be_allowed(make_notebook):
    book = make_notebook("token = '<|endoftext|>'")
    with pytest.raises(ValueError, match="not_secret"):
        read_notebook(book)
    assert read_notebook(book, not_secret=("<|endoftext|>",))
    with pytest.raises(ValueError, match="secret"):  # another one in the same text
        refuse_secret(
            "token = '<|endoftext|>'; password = 'correct-horse'", "x", allowed=("<|endoftext|>",)
        )
