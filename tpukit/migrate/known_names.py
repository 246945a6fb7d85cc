"""Every name of torch_xla: whether it is there today, and what to write where it is not."""

import difflib
import functools
import importlib.metadata
import json
import re
from pathlib import Path

XM, XR = "torch_xla.core.xla_model", "torch_xla.runtime"
XMP, PL = "torch_xla.distributed.xla_multiprocessing", "torch_xla.distributed.parallel_loader"
SPAWN, PARALLEL_LOADER = f"{XMP}.spawn", f"{PL}.ParallelLoader"
LAUNCHES = {SPAWN, "torch_xla.launch", "tpukit.launch", "tpukit.launch_each", "accelerate.notebook_launcher"}
USUAL = {"xm": XM, "xmp": XMP, "xser": "torch_xla.utils.serialization", "torch_xla": "torch_xla"}
# The module and the name of today, and whether the old arguments go.
RENAMED = {
    f"{XM}.xrt_world_size": ("rank and world size", XR, "world_size", True),
    f"{XM}.get_ordinal": ("rank and world size", XR, "global_ordinal", True),
    f"{XM}.xla_device": ("device", "torch_xla", "device", True),
    f"{XR}.xla_device": ("device", "torch_xla", "device", True),
    f"{XM}.mark_step": ("device", "torch_xla", "sync", False),
}
# Called in the kernel these start the runtime, and a fork cannot share it (seen on 2.9.0, each in a process).
STARTS_THE_RUNTIME = {
    *(f"torch_xla.{name}" for name in ("device", "devices", "device_count", "real_devices", "sync", "manual_seed")),
    *(f"{XR}.{name}" for name in ("world_size", "global_ordinal", "local_ordinal", "process_count", "xla_device")),
    *(f"{XR}.{name}" for name in ("global_device_count", "local_device_count", "process_index")),
    *(f"{XM}.{name}" for name in ("xla_device", "xrt_world_size", "get_ordinal", "get_local_ordinal", "mark_step")),
    *(f"{XM}.{name}" for name in ("master_print", "is_master_ordinal", "get_xla_supported_devices", "save")),
    *(f"{XM}.{name}" for name in ("xla_real_devices", "get_memory_info", "set_rng_state", "get_rng_state")),
    *(f"{XM}.{name}" for name in ("optimizer_step", "rendezvous", "mesh_reduce", "all_reduce", "all_gather")),
    *(f"torch_xla.debug.metrics.{name}" for name in ("metrics_report", "short_metrics_report")),
    *(f"torch_xla._XLAC.{name}" for name in ("_xla_metrics_report", "_xla_set_default_device")),
}


@functools.cache
def _table(name: str) -> dict:
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text())


@functools.cache
def _moved() -> dict[str, str]:
    """Return the modules that are somewhere else today, as names.json says, by their old names."""
    entries, modules = _table("names")["names"], _table("api")
    return {old: one["today"] for old, one in entries.items() if one["today"] in modules}


@functools.cache
def _release() -> str:
    """Return the column of api.json for the release that is installed here, "" where there is none."""
    try:
        major, minor, *_ = importlib.metadata.version("torch_xla").split(".")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return f"only_{major}_{minor}"


def moved_module(dotted: str) -> str:
    """Return where a module is today; "" where it has not moved, or is nowhere."""
    if dotted.startswith("torch_xla_py.") and dotted not in _moved():  # the package's first name, of 2019
        name = dotted.rpartition(".")[2]
        return next((one for one in _table("api") if one.endswith(f".{name}") and "_internal" not in one), "")
    return _moved().get(dotted, "")


def of_today(dotted: str) -> str:
    """Return a name with the module that it is in today, where that has moved."""
    parts = dotted.split(".")
    for end in range(len(parts), 1, -1):
        if new := moved_module(".".join(parts[:end])):
            return ".".join([new, *parts[end:]])
    return dotted


def dead_part(dotted: str) -> str:
    """Return how far a name has to be read to meet what neither 2.8 nor 2.9 has; "" where they have all of it.

    Attributes of classes and functions are not looked into.
    """
    api, place, parts = _table("api"), "torch_xla", dotted.split(".")
    for one in (dotted, dotted.rpartition(".")[0]):
        if one.startswith(("torch.xla", "torch.tpu")) and any(
            name.startswith(one) for name in _table("invented")["names"]
        ):
            return one
    if parts[0] != place:
        return dotted if parts[0] == "torch_xla_py" else ""
    for end, part in enumerate(parts[1:], start=2):
        below = api["_modules"].get(f"{place}.{part}", f"{place}.{part}")
        if below in api and not api[below].get("gone_in_2_9"):
            place = below
        elif part in _names_of(place):
            return ""
        else:
            return ".".join(parts[:end])
    return ""


def _names_of(module: str) -> list[str]:
    entry = _table("api")[module]
    others = [name for one in entry.get("all_of", ()) for name in _table("api")[one]["names"]]
    return [*entry["names"], *entry.get(_release(), ()), *others]


def advice(dotted: str, dead: str) -> tuple[str, str]:
    """Return why a name is not there, and what to write instead."""
    invented, names = _table("invented")["names"], _table("names")["names"]
    below = [name for name in invented if name.startswith(f"{dead}.")]
    for name in (dotted, dead, *below[:1]):
        if name in invented:
            one = invented[name]
            return f"no release has had it{': ' * ('note' in one)}{one.get('note', '')}", one["right"]
    for name in (dotted, dead):
        if one := names.get(name):
            return f"gone since {one['since']}", one["today"] or one["note"] or "write out what it did"
    module, _, name = dead.rpartition(".")
    why = "neither torch_xla 2.8 nor 2.9 has it"
    for other, one in invented.items():
        if other.rpartition(".")[2] == name:
            return why, one["right"]
    public = [other for other in _table("api") if not re.search(r"(^|\.)_", other)]
    if there := [other for other in public if name in _table("api")[other].get("names", ())]:
        return why, f"{min(there, key=len)}.{name}?"
    names = [one for one in _table("api").get(module, {}).get("names", ()) if one[0] != "_"]
    near = difflib.get_close_matches(name, names, 1)
    return why, f"{module}.{near[0]}?" if near else f"what is in {module} today, or write out what it did"
