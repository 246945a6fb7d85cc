"""The source of a notebook's function as a module: with the functions, classes, imports and constants that it uses."""

import ast
import builtins
import dis
import inspect
import linecache
import types
from collections.abc import Callable, Iterator

from tpukit.essentials.show import WrongType


def notebook_source(function: Callable) -> str:
    """Return a module's text that defines a function of a notebook, and nothing that it does not use.

    Its source is sent and no pickle: a pickle of today's Python and torch is not read by another machine's.

    Raises:
        TypeError: it uses an object that no source makes, such as a dataset.
    """
    scope = function.__globals__
    imports: set[str] = set()
    definitions: dict[str, str] = {}  # in the order in which they must stand

    def define(name: str, value: object) -> None:
        text = _definition(value)
        definitions[name] = ""  # begun: functions may use each other
        for used in _globals_used(compile(text, name, "exec")):
            if used not in definitions and used in scope and not hasattr(builtins, used):
                add(used, scope[used], name)
        del definitions[name]  # what it uses stands before it
        definitions[name] = text

    def add(name: str, value: object, user: str) -> None:
        module = getattr(value, "__module__", None)
        if isinstance(value, types.ModuleType):
            imports.add(f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else ""))
        elif isinstance(value, types.FunctionType | type) and module == function.__module__:
            define(name, value)
        elif getattr(value, "__qualname__", None) and module and _is_there(module, value):
            same = f" as {name}" if name != value.__qualname__ else ""
            imports.add(f"from {module} import {value.__qualname__}{same}")
        elif _is_literal(value):
            definitions[name] = f"{name} = {value!r}\n"
        else:
            raise WrongType(
                f"{user} uses {name}, which cannot be sent with it",
                found=f"{name} is a {type(value).__name__} that another cell has made",
                fix=f"make it inside {user}, from a path that comes through args=; or put the trainer into a file",
            )

    define(function.__name__, function)
    return "\n".join(sorted(imports)) + "\n\n\n" + "\n\n".join(definitions.values())


def _globals_used(code: types.CodeType) -> Iterator[str]:
    """Yield the global names that code loads, that of its functions and classes included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_used(constant)


def _definition(value: Callable) -> str:
    """Return the text that defines a function or a class; inspect finds no class of a notebook's cell."""
    value = inspect.unwrap(value)
    functions = [value] if isinstance(value, types.FunctionType) else list(vars(value).values())
    named = [one.__code__.co_filename for one in functions if isinstance(one, types.FunctionType)]
    cells = [name for name in reversed(linecache.cache) if name.startswith("<") or "ipykernel" in name]
    for file in dict.fromkeys([*named, *cells]):
        text = "".join(linecache.getlines(file))
        for node in ast.parse(text).body if text else ():
            if getattr(node, "name", None) == value.__name__ and _is_its(node, value):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                return "\n".join(text.splitlines()[first - 1 : node.end_lineno]) + "\n"
    raise WrongType(
        f"the source of {value.__name__} cannot be found",
        found="it was not written in a cell or a file",
        fix="put the trainer into a file: train.py",
    )


def _is_its(node: ast.AST, value: Callable) -> bool:
    if isinstance(value, type):
        return isinstance(node, ast.ClassDef)
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return isinstance(node, ast.FunctionDef) and first == value.__code__.co_firstlineno


def _is_there(module: str, value: object) -> bool:
    import importlib

    try:
        found = importlib.import_module(module)
        for part in value.__qualname__.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return found is value and "." not in value.__qualname__


def _is_literal(value: object) -> bool:
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
