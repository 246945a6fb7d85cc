"""What a function is made of, as rows of text: its code, its defaults, and all that it uses of the trainer's own.

Two functions with the same rows compute the same. As a program, `python contents.py FOLDER MODULE FUNCTION ROWS`, it
imports a trainer from a folder in an interpreter that knows nothing else, and writes the rows or the error. It imports
the standard library alone, so that starting it costs a twentieth of a second.
"""

import builtins
import copyreg
import dis
import functools
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

NOTEBOOK = "from_the_notebook"  # the module of a notebook's function
NOT_DEFINED = "not defined"
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
_KINDS_OF_FUNCTIONS = 0x3FF  # of co_flags; those above say what was imported from __future__, where the function stands
_NO_STEPS = ("PUSH_NULL", "EXTENDED_ARG", "NOP")
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
# What differs from one import to the next, or from one Python to the next, and changes nothing.
_OF_CLASSES = {"__module__", "__dict__", "__weakref__", "__doc__", "__firstlineno__", "__static_attributes__"} | {
    *("_abc_impl", "__abstractmethods__", "_autograd_function_id")
}


def load_trainer(module: str, function: str) -> Callable:
    """Return a trainer's function; a notebook's module is `__main__` where it runs, as it is in the notebook."""
    if module != NOTEBOOK:
        return getattr(importlib.import_module(module), function)
    spec = importlib.util.spec_from_file_location("__main__", importlib.util.find_spec(module).origin)
    sys.modules["__main__"] = made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return getattr(made, function)


def contents(function: Callable, ours: Collection[str]) -> dict[str, str]:
    """Return the rows of a function, by what they tell of.

    Args:
        function: of the notebook, or of a bundle.
        ours: names of the modules whose code is compared; what is from any other stands in the rows by its name.
    """
    found = _Contents(ours)
    found.add(function.__name__, function)
    return {name: row for name, row in found.rows.items() if row != NOT_DEFINED or name not in found.assigned}


def code_key(code: types.CodeType) -> str:
    """Return what code does, as text: without its file and its lines."""
    return repr(
        (
            *(code.co_qualname, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
            *(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & _KINDS_OF_FUNCTIONS),
            *(_steps(code), [_constant(one) for one in code.co_consts]),
        )
    )


def _steps(code: types.CodeType) -> list[tuple]:
    """Return the instructions, in the same words for a.b() whether or not the text around has an `import a`.

    Where it has, Python takes b from a as an attribute, and elsewhere as a method, with the same outcome.
    """
    instructions, numbers, number = dis.Bytecode(code), {}, 0
    for one in instructions:
        numbers[one.offset] = number
        number += one.opname not in _NO_STEPS
    steps = [
        (
            "LOAD_ATTR" if one.opname == "LOAD_METHOD" else one.opname,
            numbers.get(one.argval) if one.opcode in _JUMPS else one.argval if one.opcode in dis.hasname else one.arg,
        )
        for one in instructions
        if one.opname not in _NO_STEPS
    ]
    caught = instructions.exception_entries
    return steps + [
        (*(numbers.get(at, number) for at in (one.start, one.end, one.target)), one.depth) for one in caught
    ]


def _constant(value: object) -> str:
    if isinstance(value, types.CodeType):
        return code_key(value)
    if isinstance(value, tuple | frozenset):
        parts = [_constant(one) for one in value]
        return f"{type(value).__name__} {parts if isinstance(value, tuple) else sorted(parts)}"
    return f"{type(value).__name__} {value!r}"


def taken_apart(value: object) -> tuple | str | None:
    """Return what pickle would keep of an object; None for one that it refuses."""
    try:
        return copyreg.dispatch_table.get(type(value), lambda one: one.__reduce_ex__(2))(value)
    except Exception:  # of any class's own making
        return None


def module_names(paths: Iterable[str]) -> set[str]:
    """Return the names of the modules that files are, and that of the notebook."""
    names = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths if path[-3:] == ".py"
    }
    return names | {"__main__"}


def names_used(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the global names that code and its functions and classes look up, each with the attributes that follow.

    `a.b.c` is ("a", "b", "c"). What a class has assigned before is its own.
    """
    yield from names_here(code)
    for inner in inner_codes(code):
        yield from names_here(inner)


def names_here(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the names as `names_used` does, without those of the functions and classes inside."""
    chain, own = [], set()
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(one.argval)
        elif one.opname != "EXTENDED_ARG":
            if chain:
                yield tuple(chain)
            looked_up = one.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
            chain = [one.argval] if looked_up and one.argval not in own else []
            own |= {one.argval} if one.opname == "STORE_NAME" else set()


def inner_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of the functions and classes inside, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from inner_codes(constant)


class _Contents:
    def __init__(self, ours: Collection[str]):
        self.rows: dict[str, str] = {}
        self.assigned: set[str] = set()  # names that a function assigns by `global`
        self._ours, self._seen, self._kept, self._scopes = set(ours), {}, [], {}

    def add(self, path: str, value: object) -> None:
        if path in self.rows:
            return
        kind = type(value)
        if kind in _PLAIN:
            self.rows[path] = f"{kind.__name__} {value!r}"
        elif id(value) in self._seen:
            self.rows[path] = f"the same as {self._seen[id(value)]}"
        elif reference := self._reference(value):
            self.rows[path] = reference
        else:
            self._kept.append(value)  # an id is another object's, once this one is gone
            if kind is not tuple:
                self._seen[id(value)] = path
            self.rows[path] = kind.__qualname__
            self._parts(path, value)

    def _reference(self, value: object) -> str | None:
        """Return the name by which any interpreter has an object; None for what is the trainer's own."""
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if name is None and (home := sys.modules.get(type(value).__module__)) and home.__name__ not in self._ours:
            names = [name for name, one in vars(home).items() if one is value]  # os.environ, numpy.exp
            return f"{home.__name__}.{names[0]}" if names else None
        if not isinstance(module, str) or not isinstance(name, str) or module in self._ours:
            return None
        there = sys.modules.get(module)
        for part in name.split("."):
            there = getattr(there, part, None)
        return f"{module}.{name}" if there is value else None

    def _parts(self, path: str, value: object) -> None:
        if isinstance(value, types.FunctionType):
            self._function(path, value)
        elif isinstance(value, type):
            self._class(path, value)
        elif type(value) in (list, tuple, dict, set, frozenset, types.MappingProxyType):
            self._container(path, value)
        elif isinstance(value, types.MethodType | classmethod | staticmethod):
            self.add(f"{path}, its function", value.__func__)
            self.add(f"{path}, its object", getattr(value, "__self__", None))
        elif isinstance(value, property):
            for name in ("fget", "fset", "fdel"):
                self.add(f"{path}.{name}", getattr(value, name))
        elif isinstance(value, functools.cached_property):
            self.add(f"{path}, its function", value.func)
        elif hasattr(value, "cache_parameters"):
            self.add(f"{path}, its settings", value.cache_parameters())
            self.add(f"{path}, its function", value.__wrapped__)
        elif inspect.isgetsetdescriptor(value) or inspect.ismemberdescriptor(value):
            self.rows[path] += f" {value.__name__}"
        else:
            self._object(path, value)

    def _function(self, path: str, value: types.FunctionType) -> None:
        code = value.__code__
        self.rows[path] = f"a function, {code_key(code)}"
        named = code.co_varnames[: code.co_argcount]
        given = value.__defaults__ or ()
        defaults = dict(zip(named[len(named) - len(given) :], given, strict=True)) | (value.__kwdefaults__ or {})
        for name, one in defaults.items():
            self.add(f"{path}, its default {name}", one)
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            self.add(f"{path}, its {name}", _content(cell))
        self.add(f"{path}, its annotations", value.__annotations__)
        self.add(f"{path}, its attributes", value.__dict__)
        if (home := value.__globals__.get("__name__")) in self._ours:
            self._globals(code, value.__globals__, "" if home == "__main__" else f"{home}.")

    def _globals(self, code: types.CodeType, scope: dict, prefix: str) -> None:
        if self._scopes.setdefault(prefix, scope) is not scope:
            self.rows[f"{prefix}{code.co_qualname}"] = f"a function of another namespace ({os.getpid()})"
            return
        for one in [code, *inner_codes(code)]:
            stored = [step.argval for step in dis.get_instructions(one) if step.opname == "STORE_GLOBAL"]
            self.assigned |= {f"{prefix}{name}" for name in stored}
        for name, *attributes in names_used(code):
            path = f"{prefix}{name}"
            if name in scope:
                value = scope[name]
                while isinstance(value, types.ModuleType) and value.__name__ in self._ours and attributes:
                    path, value = f"{path}.{attributes[0]}", getattr(value, attributes.pop(0), NOT_DEFINED)
                self.add(path, value)
            elif hasattr(builtins, name):
                self.add(path, getattr(builtins, name))
            else:
                self.rows[path] = NOT_DEFINED

    def _class(self, path: str, value: type) -> None:
        self.add(f"{path}, its bases", value.__bases__)
        self.add(f"{path}, its kind", type(value))
        for name, one in vars(value).items():
            if name not in _OF_CLASSES:
                self.add(f"{path}.{name}", one)

    def _container(self, path: str, value: object) -> None:
        self.rows[path] += f" of {len(value)}"
        if isinstance(value, dict | types.MappingProxyType):
            for number, (key, one) in enumerate(value.items()):
                shown = f"[{key!r}]" if type(key) in _PLAIN else f", key {number}"
                self.add(f"{path}{shown}, its key", key)
                self.add(f"{path}{shown}", one)
            return
        ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        for number, one in enumerate(ordered):
            self.add(f"{path}[{number}]", one)

    def _object(self, path: str, value: object) -> None:
        """Take an object apart as pickle does; what cannot be taken apart is like nothing else."""
        made = taken_apart(value)
        if isinstance(made, str):
            self.rows[path] = f"{type(value).__module__}.{made}"
        elif made is None:
            self.rows[path] = f"a {type(value).__qualname__}, which cannot be compared ({os.getpid()})"
        else:
            call, arguments, state, items, pairs = (*made, None, None, None)[:5]
            self.add(f"{path}, its maker", call)
            self.add(f"{path}, made from", arguments)
            self.add(f"{path}, its state", state)
            self.add(f"{path}, its items", list(items or ()))
            self.add(f"{path}, its entries", list(pairs or ()))


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return "a variable without a value yet"


def _main(folder: str, module: str, function: str, to: str) -> None:
    here = sys.modules["__main__"]  # another takes its place
    sys.path.insert(0, folder)
    paths = [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*.py")]
    try:
        told = {"rows": contents(load_trainer(module, function), module_names(paths))}
    except BaseException as error:  # SystemExit of a script without a guard included
        trace = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(folder)]
        where = f"{Path(trace[-1].filename).relative_to(folder)}, line {trace[-1].lineno}" if trace else ""
        name = error.name if isinstance(error, ModuleNotFoundError) else None
        told = {"error": f"{type(error).__name__}: {error}", "where": where, "module": name}
    Path(to).write_text(json.dumps(told))
    del here


if __name__ == "__main__":
    _main(*sys.argv[1:])
