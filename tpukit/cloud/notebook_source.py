"""The source of a notebook's function as a module: with the functions, classes, imports and constants that it uses.

It is source and no pickle. cloudpickle, which pickles functions with their bytecode, can be used "between the exact
same version of Python" alone: Colab has 3.13, Kaggle 3.12, a container its own. And nobody can read what it sends.
What source may get wrong, such as a default that was another when the cell ran, is found before it is sent: the bundle
is imported in an interpreter of its own, and its objects are compared with the notebook's (`contents`).
"""

import ast
import builtins
import functools
import importlib
import inspect
import itertools
import linecache
import math
import re
import sys
import types
from collections.abc import Callable, Iterator

from tpukit.cloud.contents import code_key, inner_codes, names_here, names_used, taken_apart
from tpukit.essentials.show import WrongType, running_shell

_FUTURE = 0x1000000  # of `from __future__ import annotations`: compile() takes it, and code objects keep it
_LATE = {"globals", "eval", "exec"}  # with which code looks up what nobody sees in it
_MADE_BY_A_CALL = (types.FunctionType, functools.partial, type(functools.lru_cache(print)), type)
_WRAPPERS = (types.FunctionType, functools.partial, type(functools.lru_cache(print)), functools.cached_property)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
_OF_PYTHON = ("builtins", "io", "_io", "_sitebuiltins", None)  # the others among the builtins, IPython has put there
_EMPTY = types.CellType()
_COMPOUND = (ast.If, ast.Try, ast.With, ast.For, ast.While)


def notebook_source(function: Callable) -> str:
    """Return a module's text that defines a function of a notebook, and nothing that it does not use.

    Raises:
        TypeError: it uses an object that no source makes, such as a dataset; or the source is not to be found.
    """
    if function.__globals__.get(function.__name__) is not function:
        raise WrongType(
            f"{function.__name__} is another function in the notebook by now, or none",
            found="a cell has defined the name again, or deleted it, since this one was made",
            fix=f"give the function that the notebook calls {function.__name__}",
        )
    return _Source(function).text()


class _Source:
    def __init__(self, function: types.FunctionType):
        self._function, self._scope = function, function.__globals__
        self._flags = function.__code__.co_flags & _FUTURE
        self._imports: set[str] = set()
        self._texts: dict[str, str] = {}  # by name; all of them before they are put in order
        self._now: dict[str, set[str]] = {}  # what must be there when a name is made
        self._later: dict[str, set[str]] = {}  # what must be there when it is called
        self._named: dict[int, str] = {}  # the first name of each object
        self._cells = list(_cells(self._scope))

    def text(self) -> str:
        self._add(self._function.__name__, "the job")
        order: dict[str, None] = {}
        for name in self._texts:
            self._put(name, order, set())
        first = ["from __future__ import annotations", ""] if self._flags else []
        return "\n".join([*first, *sorted(self._imports)]) + "\n\n\n" + "\n\n".join(map(self._texts.get, order))

    def _put(self, name: str, order: dict[str, None], begun: set[str], ready: bool = False) -> None:
        """Put what a name needs before it; with `ready`, what it needs when it is called as well."""
        if name in begun or name not in self._texts:
            return
        begun |= {name}
        for one in sorted(self._now[name]):
            self._put(one, order, begun, ready=True)
        order.setdefault(name)
        for one in sorted(self._later[name]) if ready else ():
            self._put(one, order, begun, ready=True)

    def _add(self, name: str, user: str) -> None:
        """Find what makes the object that the notebook has by a name."""
        if name in self._texts or name == "__name__":  # the job's module is __main__ as well
            return
        if name not in self._scope and getattr(vars(builtins).get(name), "__module__", "builtins") in _OF_PYTHON:
            if name in _LATE:
                raise WrongType(
                    f"{user} uses {name}(), so it cannot be seen what it uses",
                    fix=f"name what {user} needs, or put the trainer into a file",
                )
            return
        value = self._scope.get(name, vars(builtins).get(name))  # IPython puts `display` among the builtins
        if (imported := self._imported(name, value)) is not None:
            self._imports |= imported
        elif id(value) in self._named and not isinstance(value, _PLAIN):
            self._write(name, f"{name} = {self._named[id(value)]}\n")
        elif text := _literal(value):
            self._named[id(value)] = name
            self._write(name, f"{name} = {text}\n")
        elif text := self._defined(name, value):
            self._named[id(value)] = name
            self._write(name, text)
        elif call := _as_a_call(value):
            self._imports.add(call[0])
            self._write(name, f"{name} = {call[1]}\n")
        else:
            self._refuse(name, value, user)

    def _write(self, name: str, text: str) -> None:
        """Keep a text, and add all that it uses: a name that the notebook lacks stays open, and is told later."""
        self._texts[name] = text
        code = compile(text, name, "exec", self._flags, dont_inherit=True)
        now = {chain[0] for chain in _used_at_once(code)}
        chains = set(names_used(code))
        self._now[name], self._later[name] = now - {name}, {chain[0] for chain in chains} - now
        if not text.startswith(("def", "class")):
            self._now[name] |= self._later[name] - {name}  # a decorator may call what it is given
        for chain in sorted(chains):
            if chain[0] in self._scope or chain[0] in vars(builtins):
                self._add(chain[0], name)
                self._imports |= _submodules(chain, self._scope.get(chain[0]))

    def _imported(self, name: str, value: object) -> set[str] | None:
        """Return the import statements of a name: the notebook's own, where they give what it has."""
        found = set()
        for _, node in self._statements():
            for alias in node.names if isinstance(node, ast.Import) else ():
                top = alias.asname or alias.name.partition(".")[0]
                if top == name and _module(alias.name, bool(alias.asname)) is value is not None:
                    found.add(f"import {alias.name}" + (f" as {name}" if alias.asname else ""))
            for alias in node.names if isinstance(node, ast.ImportFrom) and not node.level else ():
                there = _module(node.module, True)
                if (alias.asname or alias.name) == name and there and getattr(there, alias.name, None) is value:
                    return {f"from {node.module} import {alias.name}" + (f" as {name}" if alias.asname else "")}
        if found or isinstance(value, types.ModuleType):
            return found or {f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")}
        if reference := _reference(value):
            module, qualname = reference
            return {f"from {module} import {qualname}" + (f" as {name}" if name != qualname else "")}
        return None

    def _statements(self) -> Iterator[tuple[str, ast.stmt]]:
        """Yield (the cell's text, statement) of all cells, the last that ran first."""
        for text, tree in self._cells:
            for node in reversed(list(_below(tree.body))):
                yield text, node

    def _defined(self, name: str, value: object) -> str | None:
        """Return the text of the statement that has given a name its value."""
        own = getattr(value, "__name__", None)
        if own != name and isinstance(value, _MADE_BY_A_CALL) and self._scope.get(own) is value:
            self._add(own, name)
            return f"{name} = {own}\n"
        codes = {code_key(one) for one in _codes(value)}
        of_functions = [one.co_filename for one in _codes(value)]
        cells = self._cells + [cell for file in of_functions for cell in _parsed("".join(linecache.getlines(file)))]
        for text, tree in cells:
            for node in reversed(list(_below(tree.body))):
                found = _text_of(node, text, name, value)
                if found and self._makes(found, codes, value):
                    return found
        return None

    def _makes(self, text: str, codes: set[str], value: object) -> bool:
        """Say whether a text compiles to the code of an object; what else it is made of is compared later."""
        try:
            code = compile(text, "cell", "exec", self._flags, dont_inherit=True)
        except (SyntaxError, ValueError):
            return False
        made = {code_key(one) for one in inner_codes(code)}
        return not made or (codes <= made if isinstance(value, type) else not codes or bool(codes & made))

    def _refuse(self, name: str, value: object, user: str) -> None:
        if isinstance(value, _MADE_BY_A_CALL):
            raise WrongType(
                f"the source of {name} cannot be found",
                found=f"no cell that has run, as it is remembered, compiles to the {name} that {user} uses",
                fix="run the cell that defines it again; or put the trainer into a file: train.py",
            )
        raise WrongType(
            f"{user} uses {name}, which cannot be sent with it",
            found=f"{name} is a {type(value).__name__} that another cell has made",
            fix=f"make it inside {user}, from a path that comes through args=; or put the trainer into a file",
        )


def _cells(scope: dict) -> Iterator[tuple[str, ast.Module]]:
    """Yield (text, tree) of the cells that ran, the last first: as IPython's history has them, then as linecache has.

    linecache keeps the place of a cell that is run again, and has no cell that begins with %%time.
    """
    shell = running_shell()
    history = shell.history_manager.input_hist_raw if shell and shell.user_ns is scope else []
    names = [name for name in linecache.cache if name.startswith("<ipython") or "ipykernel" in name]
    texts = itertools.chain(
        (_as_python(text) for text in reversed(history)),
        ("".join(linecache.getlines(name)) for name in [*reversed(names), *filter(None, [scope.get("__file__")])]),
    )
    for text in dict.fromkeys(texts):
        yield from _parsed(text)


def _as_python(cell: str) -> str:
    """Return what a cell runs: without its %% lines, with its magics as IPython writes them."""
    from IPython.core.inputtransformer2 import TransformerManager

    while re.match(r"\s*%%", cell):
        cell = cell.lstrip().partition("\n")[2]
    return TransformerManager().transform_cell(cell)


def _parsed(text: str) -> Iterator[tuple[str, ast.Module]]:
    try:
        yield text, ast.parse(text)
    except (SyntaxError, ValueError):  # a cell of another language, or one that failed
        return


def _below(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those under an if or a with included, not those of its functions."""
    for node in body:
        yield node
        if isinstance(node, _COMPOUND):
            parts = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
            for part in [*parts, *(handler.body for handler in getattr(node, "handlers", []))]:
                yield from _below(part)


def _text_of(node: ast.stmt, text: str, name: str, value: object) -> str | None:
    """Return the text with which a statement gives a name its value; None where it does not, or might do more."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        lines = "\n".join(text.split("\n")[first - 1 : node.end_lineno]) + "\n"  # a form feed ends no line
        return f"if True:  # it stands within another statement\n{lines}" if node.col_offset else lines
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return None
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    calls = any(isinstance(one, ast.Call | ast.Await) for one in ast.walk(node.value))
    if not any(isinstance(one, ast.Name) and one.id == name for one in targets):
        return None
    if calls and not isinstance(value, _MADE_BY_A_CALL):  # it may take an hour, or read what is not there
        return None
    return f"{name} = {ast.get_source_segment(text, node.value)}\n"


def _codes(value: object) -> list[types.CodeType]:
    """Return the code of the notebook's functions that an object is made of."""
    parts = [value]
    if isinstance(value, type):
        parts = [getattr(one, "__func__", getattr(one, "fget", one)) for one in vars(value).values()]
    functions = [one for one in map(_unwrapped, parts) if isinstance(one, types.FunctionType)]
    if not isinstance(value, type):  # what a decorator has made may hold the function without saying so
        inside = [cell.cell_contents for one in functions for cell in one.__closure__ or () if cell != _EMPTY]
        functions += [one for one in map(_unwrapped, inside) if isinstance(one, types.FunctionType)]
    own = [one for one in functions if one.__globals__.get("__name__") == "__main__"]
    return [one.__code__ for one in own if one.__code__.co_filename != "<string>"]  # a dataclass writes some


def _unwrapped(value: object) -> object:
    while isinstance(value, _WRAPPERS) and (
        inner := getattr(value, "__wrapped__", None) or getattr(value, "func", None)
    ):
        value = inner
    return value


def _used_at_once(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the names that are looked up while a statement runs: in its classes, and not in its functions."""
    yield from names_here(code)
    for one in code.co_consts:
        if isinstance(one, types.CodeType) and (
            one.co_name.endswith("comp>") or not one.co_flags & inspect.CO_OPTIMIZED
        ):
            yield from _used_at_once(one)


def _module(name: str, whole: bool) -> types.ModuleType | None:
    """Return a loaded module, or with `whole=False` the package that `import a.b` binds."""
    return sys.modules.get(name if whole else name.partition(".")[0]) if name in sys.modules else None


def _submodules(chain: tuple[str, ...], value: object) -> set[str]:
    """Return the imports of the modules that code reaches by attributes: `xml.dom` is none before it is imported."""
    if not isinstance(value, types.ModuleType):
        return set()
    names = [".".join([value.__name__, *chain[1:end]]) for end in range(2, len(chain) + 1)]
    own = chain[0] == value.__name__.partition(".")[0]  # `import a.b` binds a, which may be another's name here
    there = itertools.takewhile(lambda one: _module(one, True), names)
    return {f"import {name}" if own else f"import {name} as _{name.replace('.', '_')}" for name in there}


def _reference(value: object) -> tuple[str, str] | None:
    """Return (module, name) from which any interpreter imports an object: the shortest module that has it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "." in name or module == "__main__":
        return None
    for end in range(1, module.count(".") + 2):
        shorter = ".".join(module.split(".")[:end])
        try:
            if getattr(importlib.import_module(shorter), name, None) is value:
                return shorter, name
        except ImportError:
            continue
    return None


def _as_a_call(value: object) -> tuple[str, str] | None:
    """Return (import, expression) of an object that a library makes from literals, such as a path or a pattern."""
    made = taken_apart(value)
    if made is None or isinstance(made, str) or len(made) != 2 or not (reference := _reference(made[0])):
        return None
    module, name = reference
    arguments = [_literal(one) for one in made[1]]
    return (f"from {module} import {name} as _{name}", f"_{name}({', '.join(arguments)})") if all(arguments) else None


def _literal(value: object, around: tuple[int, ...] = ()) -> str | None:
    """Return an expression for what is made of numbers, texts, lists and the like, and exactly of these; else None."""
    if id(value) in around:  # a list that holds itself
        return None
    around = (*around, id(value))
    if type(value) in (list, tuple, set, frozenset):
        parts = [_literal(one, around) for one in value]
        if not all(parts):
            return None
        inside = ", ".join(parts)
        if isinstance(value, list | tuple):
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(parts) == 1)})"
        return f"{{{inside}}}" if parts and isinstance(value, set) else f"{type(value).__name__}([{inside}])"
    if type(value) is dict:
        parts = [(_literal(key, around), _literal(one, around)) for key, one in value.items()]
        return f"{{{', '.join(f'{key}: {one}' for key, one in parts)}}}" if all(map(all, parts)) else None
    if type(value) is float and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value) if type(value) in _PLAIN else None
