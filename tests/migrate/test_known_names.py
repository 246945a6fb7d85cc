"""The table of torch_xla's names, against the package that is installed."""

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

from tools.torch_xla_api import KEPT, TABLE, names_of
from tpukit.migrate.known_names import advice, dead_part, moved_module, of_today


@pytest.mark.xla
def test_the_table_says_what_the_installed_torch_xla_has():
    major, minor, *_ = importlib.metadata.version("torch_xla").split(".")
    table, here = json.loads(TABLE.read_text()), f"only_{major}_{minor}"
    if here not in ("only_2_8", "only_2_9"):
        pytest.skip(f"torch_xla {major}.{minor} is not in the table")
    there = names_of(Path(importlib.util.find_spec("torch_xla").origin).parent)
    for module in there.keys() - set(KEPT):
        said = {*table[module]["names"], *table[module].get(here, ())}
        assert {name for name in said ^ there[module] if not name.startswith("__")} == set(), module
    gone = {name for name, entry in table.items() if name[0] != "_" and entry.get("gone_in_2_9")}
    assert here == "only_2_8" or not gone & there.keys()


@pytest.mark.parametrize(
    ("name", "dead"),
    [
        ("torch_xla.core.xla_model.optimizer_step", ""),
        ("torch_xla.core.xla_model.RateTracker.anything", ""),  # what is in a class is not looked into
        ("torch_xla.core.xla_model.get_ordinal", "torch_xla.core.xla_model.get_ordinal"),
        ("torch_xla.utils.gcsfs.open", "torch_xla.utils.gcsfs"),
        ("torch_xla.tpu.num_available_chips", ""),  # a module that is the attribute of another
        ("torch_xla.tpu.device_count", "torch_xla.tpu.device_count"),
        ("torch_xla_py.keyd_queue", "torch_xla_py.keyd_queue"),
        ("torch.xla.device", "torch.xla"),
        ("numpy.int", ""),
    ],
)
def test_a_name_is_followed_to_where_it_ends(name, dead):
    assert dead_part(name).startswith(dead) if dead == "torch.xla" else dead_part(name) == dead


def test_a_module_that_has_moved_keeps_its_names():
    assert moved_module("torch_xla.experimental.pjrt") == "torch_xla.runtime"
    assert of_today("torch_xla_py.xla_model.xla_device") == "torch_xla.core.xla_model.xla_device"
    assert of_today("torch_xla_py.parallel_loader.X") == "torch_xla.distributed.parallel_loader.X"
    assert moved_module("torch_xla.core.xla_model") == ""


def test_advice_names_what_to_write_or_the_nearest_name():
    name = "torch_xla.core.xla_model.optimizer_stepp"
    assert advice(name, name)[1] == "torch_xla.core.xla_model.optimizer_step?"
    name = "torch_xla.runtime.requires_pjrt"
    assert advice(name, name) == ("gone since 2.5", "write out what it did")
