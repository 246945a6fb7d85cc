"""What travels from the kernel to the workers of a session: whole, by value, or not at all."""

import functools
import inspect
import io
import linecache
import os
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

from tpukit.essentials.display import InvalidValueError
from tpukit.essentials.launcher import serialization
from tpukit.essentials.launcher.channel import SerializationError
from tpukit.essentials.launcher.serialization import (
    MOST_BYTES,
    CallFile,
    Circumstances,
    Surroundings,
    of_earlier_classes,
    serialize_call,
)

CELL = "<a cell of a notebook>"
SOURCE = """
import functools
def helper(value):
    return value * rate
def train(core, count):
    return helper(count)
def uses_lock(core):
    return deep(core)
def deep(core):
    return lock
def recursive(core, n=3):
    return 1 if n == 0 else n * recursive(core, n - 1)
class Net:
    def forward(self):
        return 1
"""


def notebook(**names):
    """Return the names of a notebook that has executed SOURCE."""
    linecache.cache[CELL] = (len(SOURCE), None, SOURCE.splitlines(keepends=True), CELL)
    space = {"__name__": "__main__", "rate": 2, **names}
    exec(compile(SOURCE, CELL, "exec"), space)
    return space


def sent(fn, *args, file=None):
    """Return (fn, args) as a worker gets them."""
    file = file or CallFile()
    call = serialize_call(fn, args)
    file.write(call, was_left=False, seeds_again=True)
    circumstances, sent_call = file.read()
    here = Circumstances(os.getcwd(), sys.path, call.sources, was_left=False, seeds_again=True)
    assert circumstances == here
    return sent_call


def test_a_function_arrives_as_it_is_at_the_call():
    space = notebook()
    fn, args = sent(space["train"], 5)
    assert fn(None, *args) == 10
    space["rate"] = 3
    fn, args = sent(functools.partial(space["train"], count=5))
    assert fn(None, *args) == 15
    assert sent(space["recursive"])[0](None) == 6


def test_code_keeps_its_file_so_that_a_traceback_names_the_cell():
    space = notebook()
    fn, _ = sent(space["train"], 1)
    assert fn.__code__.co_filename == CELL
    call = serialize_call(space["Net"], ())
    assert call.sources == {CELL: linecache.cache[CELL]}
    assert "return 1" in inspect.getsource(space["Net"].forward)


def test_tensors_arrive_in_memory_of_their_own():
    tensor = torch.arange(5.0)
    file = CallFile()
    _, (first,) = sent(print, tensor, file=file)
    sent(print, torch.zeros(5), file=file)
    assert first.tolist() == tensor.tolist()
    first += 1  # it can be written to
    assert tensor[0] == 0
    file.close()


def test_a_slice_of_a_large_tensor_costs_its_own_size():
    large = torch.zeros(MOST_BYTES // 4 + 1)
    assert len(serialize_call(print, (large[:10],)).data) < 10_000
    with pytest.raises(InvalidValueError, match="larger than 64 MB") as caught:
        serialize_call(print, (1, large))
    assert "argument 2: 61 MiB" in caught.value.found
    space = notebook(rate=large)
    with pytest.raises(InvalidValueError, match="`rate`, which helper uses"):
        serialize_call(space["train"], (1,))


@pytest.mark.parametrize("signature", ["core, data=large", "core, *, data=large"])
def test_a_large_default_of_a_function_is_named(signature):
    space = notebook(large=b"0" * (MOST_BYTES + 1))
    exec(f"def train({signature}): return data", space)
    del space["large"]
    with pytest.raises(InvalidValueError, match="larger than 64 MB") as caught:
        serialize_call(space["train"], ())
    assert caught.value.found == "`data`, which train uses: 61 MiB"


def test_a_default_that_cannot_travel_is_named():
    space = notebook(lock=threading.Lock())
    exec("def inner(first, guard=lock): return guard\ndef train(core): return inner(1)", space)
    with pytest.raises(SerializationError, match=r"`guard`, which inner uses \(lock\)"):
        serialize_call(space["train"], ())


BINARY_FILE = open(os.devnull, "rb")  # noqa: SIM115
TEXT_FILE = open(os.devnull)  # noqa: SIM115
DEEP_LIST = functools.reduce(lambda deep, _: [deep], range(100_000), [])


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), (one for one in [1]), threading.Event(), BINARY_FILE, TEXT_FILE, DEEP_LIST],
    ids=["lock", "generator", "event", "binary file", "text file", "deep list"],
)
def test_what_cannot_travel_is_named(value):
    space = notebook(lock=value)
    with pytest.raises(SerializationError, match="`lock`, which deep uses") as caught:
        serialize_call(space["uses_lock"], ())
    assert "core.state" in caught.value.fix
    with pytest.raises(SerializationError, match="argument 1"):
        serialize_call(print, (value,))
    with pytest.raises(SerializationError, match=r"functools\.partial"):
        serialize_call(functools.partial(print, value), ())


class Trainer:
    def __init__(self, part):
        self.part = part

    def train(self, core):
        return self.part


def test_an_object_that_cannot_travel_with_its_method_is_named():
    with pytest.raises(SerializationError, match=r"the function \(method\) cannot be sent"):
        serialize_call(Trainer(threading.Lock()).train, ())
    with pytest.raises(InvalidValueError, match="larger than 64 MB") as caught:
        serialize_call(Trainer(b"0" * (MOST_BYTES + 1)).train, ())
    assert caught.value.found == "the function: 61 MiB"


def test_streams_in_memory_travel_and_the_standard_output_is_the_workers_own():
    assert sent(print, io.StringIO("text"))[1][0].getvalue() == "text"
    assert sent(print, sys.stdout)[1][0] is sys.stdout


def test_objects_of_a_class_that_was_defined_again_are_named():
    state = types.SimpleNamespace(net=notebook()["Net"](), number=1)
    newer = notebook()
    space = {"Net": newer["Net"], "__name__": "__main__"}
    exec("def look(core): return Net", space)
    (line,) = of_earlier_classes(state, space["look"])
    assert line.startswith("core.state.net is an object of an earlier class Net")
    state.net.__class__ = newer["Net"]
    assert of_earlier_classes(state, functools.partial(space["look"])) == []


def test_changes_that_workers_do_not_follow_are_named_once(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "changing.py").write_text("value = 1\n")
    import changing

    surroundings = Surroundings()
    assert surroundings.changes() == []
    os.utime(changing.__file__, (1, 1))
    monkeypatch.setenv("TPUKIT_NEW", "1")
    modules, variables = surroundings.changes()
    assert modules.startswith("changing: the file has changed")
    assert variables.startswith("TPUKIT_NEW: changed in os.environ")
    assert surroundings.changes() == []
    del sys.modules["changing"]


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_changes_of_installed_packages_are_not_named(folder, tmp_path, monkeypatch):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "installed.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path / folder)
    import installed

    surroundings = Surroundings()
    os.utime(installed.__file__, (1, 1))
    assert surroundings.changes() == []
    del sys.modules["installed"]


def test_a_module_beside_the_clone_whose_name_begins_like_tpukits_is_not_tpukits(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tpukit_notes.py").write_text("value = 1\n")
    import tpukit_notes

    # As if the clone were in this folder.
    clone = str(Path(serialization.__file__).parents[3])
    libraries = [name.replace(clone, str(tmp_path)) for name in serialization._LIBRARIES]
    monkeypatch.setattr(serialization, "_LIBRARIES", tuple(libraries))
    surroundings = Surroundings()
    os.utime(tpukit_notes.__file__, (1, 1))
    (modules,) = surroundings.changes()
    assert modules.startswith("tpukit_notes: the file has changed")
    del sys.modules["tpukit_notes"]
