"""One cell, or one script: its text, its Python as a tree, and the cells that stand in its strings."""

import ast
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import (
    ExpressionContextProvider,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    ScopeProvider,
)

from tpukit.migrate.magics import MARK, is_python, magic_of, mask

OF_SPAWN = ("fn", "args", "nprocs", "join", "daemon", "start_method")
OF_SAMPLER = ("dataset", "num_replicas", "rank")  # of a DistributedSampler


@dataclass(frozen=True)
class Broken:
    """Why a cell is no Python, in Python's own words, and where."""

    line: int
    text: str
    message: str


class Cell:
    """A cell of a notebook, or a whole script.

    Attributes:
        number: the cell's, from 1, Markdown counted; None in a script.
        source: its text, with plain line ends.
        magic: the magic of the whole cell and what follows it, such as ("writefile", "train.py").
        kept: what its placeholders stand for, by mark.
        tree: its Python; None where it is none, and `broken` says why where it should be some.
        inner: by the call of nbconvert's `run_cell_magic` the cell that stands in its string.
    """

    def __init__(self, text: str, number: int | None = None, *, above: int = 0, at: int | None = None):
        self._marked, self._windows = text.startswith("\ufeff"), text.count("\r\n") == text.count("\n") > 0
        self.source = text.removeprefix("\ufeff")
        self.source = self.source.replace("\r\n", "\n") if self._windows else self.source
        self.number, self._above, self._at = number, above, at
        self.magic = magic_of(self.source)
        self.tree: cst.Module | None = None
        self.broken: Broken | None = None
        self.inner: dict[cst.Call, Cell] = {}
        python, self.kept = mask(self.source)
        if is_python(self.magic[0]):
            self._parse(python)

    def _parse(self, python: str) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as "\\d" in what is no raw string: it is the author's
                ast.parse(python)
            wrapper = MetadataWrapper(cst.parse_module(python), unsafe_skip_copy=True)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            lines = [*self.source.split("\n"), ""]
            self.broken = Broken(line, lines[min(line, len(lines)) - 1].strip(), str(error.args[0]))
            return
        except cst.ParserSyntaxError as error:  # it reads a little less than Python does
            self.broken = Broken(error.raw_line, "", f"LibCST cannot read it: {error.message}")
            return
        self.tree = wrapper.module
        found = wrapper.resolve_many([PositionProvider, ParentNodeProvider, ScopeProvider, ExpressionContextProvider])
        self.positions, self.parents = found[PositionProvider], found[ParentNodeProvider]
        self.scopes, self.contexts = found[ScopeProvider], found[ExpressionContextProvider]
        for node in self.parents:
            if isinstance(node, cst.Call) and code(node.func).endswith(".run_cell_magic"):
                texts = [one.value.evaluated_value for one in node.args if isinstance(one.value, cst.SimpleString)]
                if len(texts) == 3:
                    text = f"%%{texts[0]} {texts[1]}\n{texts[2]}"
                    self.inner[node] = Cell(text, self.number, at=self.line(node))

    def line(self, node: cst.CSTNode) -> int:
        """Return the line of a node as it is told; of text in a string it is that of the string's call."""
        return self.told(self.positions[node].start.line)

    def told(self, line: int) -> int:
        """Return the line that is told for one of this text."""
        return self._at or line + self._above

    def file_inside(self) -> "Cell":
        """Return what a `%%writefile` cell writes, which is a script of its own."""
        body = self.source.split("%%", 1)[1].split("\n", 1)
        above = self.source.count("\n") - (body[1].count("\n") if len(body) > 1 else 0)
        return Cell(body[1] if len(body) > 1 else "", self.number, above=self._above + above, at=self._at)

    def as_it_was(self, text: str) -> str:
        """Return new text with the line ends and the byte order mark of the old one."""
        text = text.replace("\n", "\r\n") if self._windows else text
        return "\ufeff" + text if self._marked else text

    def above_of(self, node: cst.CSTNode):
        """Give the nodes around one, the nearest first."""
        while (node := self.parents.get(node)) is not None:
            yield node

    def inside_function(self, node: cst.CSTNode) -> bool:
        """Return whether a node is in a function, so not run where it stands."""
        return any(isinstance(one, cst.FunctionDef | cst.Lambda) for one in self.above_of(node))

    def mark_of(self, line: cst.SimpleStatementLine) -> str:
        """Return the mark of a placeholder; "" for a line that is none."""
        comment = line.trailing_whitespace.comment
        return comment.value.removeprefix("# ") if comment and comment.value.startswith(f"# {MARK}") else ""


def code(node: cst.CSTNode) -> str:
    """Return a node as it is written."""
    return cst.Module([]).code_for_node(node)


def by_name(call: cst.Call, places: Sequence[str]) -> dict[str, cst.Arg]:
    """Return the arguments of a call by name; `places` names those that are given by their place."""
    names = itertools.chain(places, itertools.repeat(""))
    return {one.keyword.value if one.keyword else name: one for one, name in zip(call.args, names, strict=False)}


def dotted(node: cst.CSTNode) -> str:
    """Return a name such as torch_xla.core.xla_model; "" for anything else."""
    if isinstance(node, cst.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr.value}" if before else ""
    return node.value if isinstance(node, cst.Name) else ""
