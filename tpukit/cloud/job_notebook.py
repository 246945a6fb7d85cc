"""Read a notebook or a script as a job will run it, and raise an error if it cannot run.

    # %% tags=["parameters"]     begins a cell of a script; in a notebook, a cell with that tag
    preset = "cpu"
    epochs = 1

With these defaults, `-p preset v5e-8 -p epochs 3` gives `{"preset": "v5e-8", "epochs": 3}`.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpukit.cloud.job_files import read_utf8, refuse_secret
from tpukit.essentials.display import InvalidTypeError, InvalidValueError, PathNotFoundError
from tpukit.essentials.environment import load_notebook

_MADE_BY_PAPERMILL = {"injected-parameters", "papermill-error-cell-tag"}  # tags of inserted cells
_OF_A_RUN = ("widgets", "papermill")  # metadata of an earlier run
# The metadata key of a sent cell's number in the user's file, from 1; Markdown cells count.
NUMBER = "tpukit_cell"
_PERCENT = re.compile(
    r"^#[ ]?%%(.*)$", re.MULTILINE
)  # begins a cell in Jupytext, VS Code and Spyder
# The kernel of the job's machine, which replaces the kernel that wrote the notebook.
_KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
# `runpy` and not %run, because %run prints the error of a script, and the cell succeeds.
_RUN_SCRIPT = (
    "import runpy, sys\nsys.argv = [{0!r}]\n_ = runpy.run_path({0!r}, run_name='__main__')"
)


@dataclass(frozen=True)
class JobNotebook:
    """A checked notebook, ready to be sent.

    Attributes:
        content: the bytes of the notebook without outputs.
        numbers: for each sent cell, its number among all cells of the file, from 1.
        parameters_cell: the index of the cell with the tag "parameters" among the sent cells; -1 if
            there is none.
        defaults: for each name that the parameters cell assigns, the assigned expression. It is
            None for a name in a tuple, as in `a, b = 1, 2`.
        script: for a .py file without cells, its path. The file must be sent, too, because
            `content` only runs it. None for a file with cells.
    """

    content: bytes
    numbers: tuple[int, ...]
    parameters_cell: int
    defaults: Mapping[str, ast.expr | None]
    script: Path | None = None


def read_notebook(path: Path, *, not_secret: Sequence[str] = ()) -> JobNotebook:
    """Read and check an .ipynb or .py file.

    Args:
        path: the path of the file.
        not_secret: texts that look like a secret but are not.

    Raises:
        PathNotFoundError: the file does not exist.
        InvalidValueError: the file is not a notebook or script in Python, a script is not UTF-8,
            a cell is not valid Python, or a cell contains text that looks like a secret.
    """
    if path.suffix not in (".ipynb", ".py"):
        raise InvalidValueError(
            f"a job runs a notebook or a script, got {path.name}",
            fix="pass a file that ends in .ipynb or .py",
        )
    if not path.is_file():
        raise PathNotFoundError(
            f"no such file: {path}", fix=f"pass a path relative to {Path.cwd()}"
        )
    script = None
    if path.suffix == ".py":
        # A script without cells becomes a single cell that runs the file, so the check of the cells
        # below would not find a secret in its text.
        text = read_utf8(path)
        refuse_secret(text, path.name, allowed=not_secret)
        book = _of_script(text, path.name)
        script = None if _PERCENT.search(text) else path
        _check_python(text, path.name)
    else:
        book = _load(path)
    numbers = _clean(book)
    texts = []
    for number, cell in zip(numbers, book["cells"], strict=True):
        text = cell["source"]
        texts.append(text)
        refuse_secret(text, f"cell {number} of {path.name}", allowed=not_secret)
        # Jupyter's tag for a cell that raises an error on purpose.
        may_fail = "raises-exception" in _tags(cell)
        if cell["cell_type"] == "code" and not may_fail:
            _check_python(text, f"cell {number} of {path.name}")
    tagged = ["parameters" in _tags(cell) for cell in book["cells"]]
    index = -1
    defaults = {}
    if any(tagged):
        index = tagged.index(True)
        defaults = _defaults(texts[index])
    content = json.dumps(book, indent=1, ensure_ascii=False).encode()
    return JobNotebook(content, numbers, parameters_cell=index, defaults=defaults, script=script)


def check_parameters(notebook: JobNotebook, parameters: Mapping[str, object]) -> dict[str, object]:
    """Check parameters, and return them as a dict.

    Raises:
        InvalidValueError: the notebook has no parameter with one of the names.
        InvalidTypeError: JSON does not support a value.
    """
    if parameters and notebook.parameters_cell < 0:
        raise InvalidValueError(
            f"the parameters {', '.join(parameters)} need a cell of parameters, "
            "and the notebook has none",
            found='no cell has the tag "parameters"',
            fix="add this tag to the cell that assigns the default values; in a script, write "
            'this line above the cell: # %% tags=["parameters"]',
        )
    unknown = [name for name in parameters if name not in notebook.defaults]
    known = ", ".join(notebook.defaults)
    if unknown:
        raise InvalidValueError(
            f"no such parameter: {', '.join(map(str, unknown))}",
            found=f"the notebook has {known or 'none in its cell of parameters'}",
            fix="use one of these names, or assign the new name in the notebook's cell of "
            "parameters",
        )
    for name, value in parameters.items():
        _check_value(name, value)
    return dict(parameters)


def parse_parameters(notebook: JobNotebook, pairs: Sequence[Sequence[str]]) -> dict[str, object]:
    """Return the values of `-p name value`: text if the default is text, else a Python literal.

    Args:
        notebook: the notebook.
        pairs: (name, text) of each `-p`.

    Raises:
        InvalidValueError: the notebook has no parameter with one of the names, or a text is not a
            literal.
    """
    values = {}
    for name, text in pairs:
        check_parameters(notebook, {name: text})
        default = notebook.defaults[name]
        # The default decides, so that `-p name 1e5` stays text for a parameter that is text.
        if isinstance(default, ast.Constant) and isinstance(default.value, str):
            values[name] = text
            continue
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            shown = "missing" if default is None else ast.unparse(default)
            raise InvalidValueError(
                f"-p {name} {text}: this is not a Python literal",
                found=f"the default of {name} is {shown}, so {text!r} is not taken as text",
                fix="write a number, True, None or a list; for text, use two pairs of quotes: "
                f"""-p {name} '"{text}"'""",
            ) from None
    return values


def _load(path: Path) -> dict:
    book = load_notebook(path)
    kernel = book.get("metadata", {}).get("kernelspec", {})
    language = kernel.get("language", "python")
    if language.lower() != "python":
        raise InvalidValueError(
            f"{path.name} is a notebook in {language}", fix="a job runs notebooks in Python"
        )
    return book


def _of_script(text: str, name: str) -> dict:
    """Return a script as a notebook: with its cells, or else with one cell that runs the file."""
    found = list(_PERCENT.finditer(text))
    if not found:
        return _book([_cell("code", _RUN_SCRIPT.format(name), tags=[])])
    cells = []
    if before := text[: found[0].start()].strip():
        cells.append(_cell("code", before, tags=[]))
    ends = [match.start() for match in found[1:]] + [len(text)]
    for match, end in zip(found, ends, strict=True):
        source = text[match.end() : end]
        kind = "code"
        if "[markdown]" in match[1]:
            kind = "markdown"
            # The text of such a cell is a comment in the script.
            source = re.sub("^# ?", "", source.strip(), flags=re.MULTILINE)
        cells.append(_cell(kind, source, tags=_tags_of_line(match[0], name)))
    return _book(cells)


def _tags_of_line(line: str, name: str) -> list[str]:
    """Return the tags in the line `# %% tags=["parameters"]` of a script."""
    found = re.search(r"tags=(\[[^\]]*\])", line)
    try:
        return ast.literal_eval(found[1]) if found else []
    except (ValueError, SyntaxError):
        raise InvalidValueError(
            f"the tags of a cell of {name} are not a list of texts",
            found=line,
            fix='# %% tags=["parameters"]',
        ) from None


def _book(cells: list[dict]) -> dict:
    return {"cells": cells, "metadata": {"kernelspec": _KERNEL}, "nbformat": 4, "nbformat_minor": 4}


def _cell(kind: str, source: str, *, tags: list[str]) -> dict:
    return {"cell_type": kind, "metadata": {"tags": tags}, "source": source.strip("\n")}


def _clean(book: dict) -> tuple[int, ...]:
    """Remove outputs and the cells that papermill inserted; return the numbers of other cells."""
    numbers = []
    cells = []
    for number, cell in enumerate(book["cells"], start=1):
        source = cell.get("source", "")
        cell["source"] = "".join(source)  # nbformat allows a text or a list of lines
        cell.setdefault("metadata", {})[NUMBER] = number
        if not _MADE_BY_PAPERMILL.isdisjoint(_tags(cell)):
            continue
        if cell["cell_type"] == "code":
            cell["outputs"] = []
            cell["execution_count"] = None
        numbers.append(number)
        cells.append(cell)
    book["cells"] = cells
    old = book.get("metadata", {})
    metadata = {name: value for name, value in old.items() if name not in _OF_A_RUN}
    # The name of the user's kernel may not exist on the machine of the job.
    book["metadata"] = metadata | {"kernelspec": _KERNEL}
    return tuple(numbers)


def _tags(cell: Mapping) -> list[str]:
    return cell["metadata"].get("tags", [])


def _check_python(text: str, place: str) -> None:
    """Raise InvalidValueError for a syntax error in a cell.

    A cell is not checked if a magic remains in it after IPython's conversion, or if it has a magic
    and IPython is not installed.
    """
    converted = _converted(text)
    # IPython 7 on Python 3.12 or later, as on Colab, leaves `files = !ls` as it is.
    remaining = r"=\s*[%!]"
    if converted is None:
        remaining = r"^\s*[%!?]|^[^#]*[!?]\s*$|=\s*[%!]"
    text = converted or text
    if re.search(remaining, text, re.MULTILINE):
        return
    try:
        compile(text, place, "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise InvalidValueError(
            f"{place} is not valid Python: {error.msg}",
            found=f"line {error.lineno}: {line}",
            fix="correct it, and save the file",
        ) from None


def _converted(text: str) -> str | None:
    """Return a cell with its magics as calls of Python; None if IPython is not installed."""
    try:
        from IPython.core.inputtransformer2 import TransformerManager

        return TransformerManager().transform_cell(text)
    except ImportError:
        return None
    except SyntaxError:  # `compile` raises it with a better message
        return text


def _defaults(text: str) -> dict[str, ast.expr | None]:
    """Return the expression that the cell of parameters assigns to each name.

    It is None for a name in a tuple, whose value is not an expression of its own.
    """
    # IPython would convert the whole cell below %%time to a string.
    text = re.sub(r"\A\s*%%.*", "pass", text)
    # Python's parser refuses magics and shell lines.
    text = _converted(text) or re.sub(r"(?m)^(\s*)[%!].*", r"\1pass", text)
    defaults = {}
    for statement in ast.parse(text).body:
        value = getattr(statement, "value", None)
        targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
        for target in filter(None, targets):
            is_single = isinstance(target, ast.Name)
            for node in ast.walk(target):
                if isinstance(node, ast.Name):
                    defaults[node.id] = value if is_single else None
    return defaults


def _check_value(name: str, value: object) -> None:
    """Raise InvalidTypeError unless a value, and all values in it, are supported by JSON."""
    if isinstance(value, list | tuple):
        for one in value:
            _check_value(name, one)
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        for one in value.values():
            _check_value(name, one)
    elif type(value) not in (str, bool, int, float, type(None)):
        raise InvalidTypeError(
            f"the parameter {name} cannot be sent: its type is {type(value).__name__}",
            found="only text, numbers, True, False, None, lists and dicts with text keys are sent",
            fix=f"{name}=str(...) or float(...)",
        )
