"""Errors with fact, evidence and fix: their text, what they are besides, and that they travel between processes."""

import ast
import importlib
import pickle
from pathlib import Path

import pytest

import tpukit
from tpukit.essentials.display import errors
from tpukit.essentials.display.errors import (
    InvalidTypeError,
    InvalidValueError,
    PathNotFoundError,
    SystemFailureError,
    TpukitError,
    TpukitRuntimeError,
    explain,
    kind_of,
    parts_of,
)

ROOT = Path(__file__).parents[3]
KIT = sorted((ROOT / "tpukit").rglob("*.py"))


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "a is wrong"),
        ({"found": 7}, "a is wrong\n  found: 7"),
        ({"fix": "a=1"}, "a is wrong\n  fix:   a=1"),
        (
            {"found": "b\nc", "fix": "d\ne"},
            "a is wrong\n  found: b\n         c\n  fix:   d\n         e",
        ),
        ({"found": None}, "a is wrong\n  found: None"),  # None may be what was found
    ],
)
def test_the_three_parts_stand_below_each_other(parts, text):
    assert explain("a is wrong", **parts) == text
    assert str(InvalidValueError("a is wrong", **parts)) == text


def test_an_error_is_also_the_built_in_one_and_keeps_its_parts():
    error = PathNotFoundError("there is no a", found="b", fix="c")
    assert isinstance(error, FileNotFoundError)
    assert (error.fact, error.found, error.fix) == ("there is no a", "b", "c")


KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TpukitError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_the_way_from_a_worker_to_the_kernel(kind):
    error = pickle.loads(pickle.dumps(kind("there is no a", found="b", fix="c")))
    assert type(error) is kind
    assert (str(error), error.fix) == ("there is no a\n  found: b\n  fix:   c", "c")


def test_no_message_is_put_together_by_hand():
    for path in KIT:
        if path.name != "errors.py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    assert "\n  fix:" not in node.value, f"{path.relative_to(ROOT)}:{node.lineno}"
                    assert "\n  found:" not in node.value, f"{path.relative_to(ROOT)}:{node.lineno}"


def test_every_class_of_an_error_that_is_raised_with_a_fix_is_an_explained_one():
    for path in KIT:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                call = node.exc
                if {"found", "fix"} & {one.arg for one in call.keywords} and isinstance(
                    call.func, ast.Name
                ):
                    kind = getattr(importlib.import_module(module), call.func.id, None)
                    if isinstance(kind, type):
                        assert issubclass(kind, TpukitError), f"{module}:{call.lineno}"


def test_the_general_errors_are_told_by_the_names_that_people_catch():
    kinds = (InvalidValueError, InvalidTypeError, SystemFailureError, TpukitRuntimeError)
    assert [kind_of(kind("x")) for kind in kinds] == [
        "ValueError",
        "TypeError",
        "OSError",
        "RuntimeError",
    ]
    assert kind_of(KeyError()) == "KeyError"
    assert kind_of(type("Own", (InvalidValueError,), {"__module__": "notebook"})("x")) == "Own"


def test_an_error_keeps_its_words_where_somebody_notes_the_file_as_shutil_does():
    error = PathNotFoundError("there is no file x", fix="make it")
    error.filename, error.errno = "x", 2
    assert str(error) == "there is no file x\n  fix:   make it"


def exceptions_of_tpukit():
    """Return every exception class that a module of tpukit defines under a public name."""
    found = set()
    for path in KIT:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        names = [
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name[0] != "_"
        ]
        if not names or path.name == "__main__.py":
            continue
        try:
            defined = importlib.import_module(module)
        except (
            ModuleNotFoundError
        ) as error:  # an optional package, of a module that defines no exception
            is_our_own = error.name.partition(".")[0] == "tpukit"
            assert not is_our_own
            assert not any(name.endswith("Error") for name in names), module
            continue
        kinds = [getattr(defined, name) for name in names]
        found |= {kind for kind in kinds if issubclass(kind, BaseException)}
    return found


def test_every_public_exception_has_the_one_base_and_its_fields():
    found = exceptions_of_tpukit()
    assert len(found) > 25
    for kind in found:
        if not issubclass(kind, Exception):
            continue
        assert issubclass(kind, TpukitError), kind
        assert kind.__name__.endswith("Error"), kind
        error = pickle.loads(pickle.dumps(kind("it is wrong", found="7", fix="8")))
        assert (error.fact, error.found, error.fix) == ("it is wrong", "7", "8"), kind
        assert str(error) == "it is wrong\n  found: 7\n  fix:   8", kind
    assert tpukit.TpukitError is TpukitError


def test_only_interrupts_are_no_exception_that_except_exception_catches():
    others = {kind for kind in exceptions_of_tpukit() if not issubclass(kind, Exception)}
    assert {kind.__name__ for kind in others} == {"LaunchInterrupted", "RunStopped", "Terminated"}
    error = tpukit.LaunchInterrupted("stopped", found="7", fix="8", run="its outcome")
    again = pickle.loads(pickle.dumps(error))
    assert (again.fact, again.found, again.fix, again.run) == ("stopped", "7", "8", "its outcome")


def test_long_text_follows_the_three_parts_and_is_no_part_of_the_summary():
    error = InvalidValueError("a is wrong", fix="b", details="its traceback:\nline")
    assert str(error) == "a is wrong\n  fix:   b\n\nits traceback:\nline"
    assert error.summary == "a is wrong\n  fix:   b"
    assert pickle.loads(pickle.dumps(error)).details == "its traceback:\nline"


def test_the_parts_of_any_exception_are_its_fields_or_its_text():
    assert parts_of(InvalidValueError("a", found="b", fix="c")) == ("a", "b", "c")
    assert parts_of(ValueError("a\n  fix:   c")) == ("a\n  fix:   c", "", "")
