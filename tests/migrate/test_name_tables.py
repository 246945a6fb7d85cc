"""The tables of names, against the packages that are installed."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import json
from pathlib import Path

import pytest

from tools.torch_xla_api import KEPT, TABLE, names_of
from tpukit.migrate.name_tables import dead_part, is_in_both_releases, of_today, table, verdict_on

NAMES = table("names", "names")
RENAMES = {old: entry["rename"] for old, entry in NAMES.items() if "rename" in entry}


@pytest.mark.xla
def test_the_table_has_what_the_installed_torch_xla_has():
    major, minor, *_ = importlib.metadata.version("torch_xla").split(".")
    api, here = json.loads(TABLE.read_text()), f"only_{major}_{minor}"
    if here not in ("only_2_8", "only_2_9"):
        pytest.skip(f"torch_xla {major}.{minor} is not in the table")
    there = names_of(Path(importlib.util.find_spec("torch_xla").origin).parent)
    for module in there.keys() - set(KEPT):
        said = {*api[module]["names"], *api[module].get(here, ())}
        assert {name for name in said ^ there[module] if not name.startswith("__")} == set(), module
    gone = {name for name, entry in api.items() if name[0] != "_" and entry.get("gone_in_2_9")}
    assert here == "only_2_8" or not gone & there.keys()


@pytest.mark.parametrize(
    ("name", "dead"),
    [
        ("torch_xla.core.xla_model.optimizer_step", ""),
        ("torch_xla.core.xla_model.RateTracker.anything", ""),  # classes are not looked into
        ("torch_xla.core.xla_model.get_ordinal", "torch_xla.core.xla_model.get_ordinal"),
        ("torch_xla.utils.gcsfs.open", "torch_xla.utils.gcsfs"),
        ("torch_xla.tpu.num_available_chips", ""),  # a module that is the attribute of another
        ("torch_xla.tpu.device_count", "torch_xla.tpu.device_count"),
        (
            "torch_xla.core.dynamo_bridge.extract_compiled_graph",
            "",
        ),  # by a star import inside torch_xla
        ("torch_xla_py.keyd_queue", "torch_xla_py.keyd_queue"),
        ("torch.xla.device", "torch.xla.device"),
        ("numpy.int", ""),
    ],
)
def test_a_name_is_followed_to_where_it_ends(name, dead):
    assert dead_part(name) == dead


def test_a_module_that_has_moved_keeps_its_names():
    assert of_today("torch_xla.experimental.pjrt") == "torch_xla.runtime"
    assert of_today("torch_xla_py.xla_model.xla_device") == "torch_xla.core.xla_model.xla_device"
    assert of_today("torch_xla.core.xla_model") == "torch_xla.core.xla_model"


@pytest.mark.parametrize(
    ("name", "happened", "write"),
    [
        (
            "torch_xla.core.xla_model.optimizer_stepp",
            "in no release",
            "torch_xla.core.xla_model.optimizer_step",
        ),
        (
            "torch_xla.core.xla_model.get_ordinal",
            "removed in torch_xla 2.7",
            "torch_xla.runtime.global_ordinal()",
        ),
        (
            "torch_xla.experimental.xla_sharding.Mesh",
            "removed in torch_xla 2.5",
            "torch_xla.distributed.spmd.Mesh",
        ),
        ("torch_xla.test.test_utils.skipIfCUDA", "removed in torch_xla 2.9", ""),
        (
            "torch_xla.experimental.pjrt.rendezvous",
            "removed in torch_xla 2.5",
            "torch_xla.core.xla_model.rendezvous",
        ),
    ],
)
def test_a_verdict_has_the_release_and_the_name_to_write(name, happened, write):
    if name.endswith("skipIfCUDA") and importlib.metadata.version("torch_xla").startswith("2.8"):
        pytest.skip("2.8 has it")
    found = verdict_on(name)
    assert happened in found.happened
    assert write in found.write


def test_every_invented_name_has_a_verdict_and_a_name_to_write():
    for name, entry in table("invented", "names").items():
        if "(" not in name:
            assert verdict_on(name).kind == "invented", name
            assert verdict_on(name).write == entry["right"], name


def test_all_that_a_rename_writes_is_in_both_releases():
    for old, new in RENAMES.items():
        assert is_in_both_releases(new), old
    for old, entry in NAMES.items():
        assert (
            "module" not in entry or is_in_both_releases(entry["module"]) or not entry.get("safe")
        ), old


@pytest.mark.xla
@pytest.mark.parametrize("old", [old for old, entry in NAMES.items() if entry.get("call") == "any"])
def test_a_rename_for_all_calls_has_the_same_signature(old):
    def signature(name):
        module, _, leaf = name.rpartition(".")
        parameters = inspect.signature(
            getattr(importlib.import_module(module), leaf)
        ).parameters.values()
        return [(one.name, one.kind, one.default) for one in parameters]

    assert signature(old) == signature(RENAMES[old])


@pytest.mark.xla
def test_a_deprecated_name_calls_the_new_one():
    for old, entry in NAMES.items():
        if "rename" in entry and entry["kind"] == "deprecated":
            module, _, leaf = old.rpartition(".")
            source = inspect.getsource(getattr(importlib.import_module(module), leaf))
            assert f"{RENAMES[old]}(" in source, old


def test_what_the_table_says_of_lightning_is_so_in_the_installed_one():
    if not importlib.metadata.version("lightning").startswith("2."):
        pytest.skip("the table is of Lightning 2")
    lightning = pytest.importorskip("lightning.pytorch")
    libraries = table("libraries")
    known = inspect.signature(lightning.Trainer).parameters
    for rule in libraries["arguments"]["pytorch_lightning.Trainer"]:
        assert ("bad" in rule) == (rule["name"] in known) or rule["name"] == "strategy", rule
    for methods in libraries["methods"].values():
        assert not [name for name in methods if name in vars(lightning.LightningModule)]
    replaced = ("replaced", "SingleTPU")
    for name in libraries["names"]:
        module, _, leaf = name.removeprefix("pytorch_lightning").removeprefix(".").rpartition(".")
        if (
            name.startswith("pytorch_lightning.plugins.")
            and replaced[0] not in libraries["names"][name]["happened"]
        ):
            plugins = importlib.import_module("lightning.pytorch.plugins")
            assert "." in module or not hasattr(plugins, leaf), name
