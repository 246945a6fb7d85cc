"""What Vertex AI and Google's images call the TPUs of one host, by the names of the kit's table."""

from tpukit.measure import TPUS, Tpu

_RUNTIMES = {"v5e": "v2-alpha-tpuv5-lite", "v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}  # the others share one
_TYPES = {"v5e": "ct5lp-hightpu-{}t", "v6e": "ct6e-standard-{}t"}

# Vertex AI's `machineSpec`; on a v4 or v5p it trains nothing. One host each: no public page shows what several hosts of
# a Vertex AI job see of each other. The SDK takes any words and leaves the refusal to the service, minutes later.
MACHINE_SPECS = {
    f"{kind}-8": {"machineType": "cloud-tpu", "acceleratorType": f"TPU_{kind.upper()}", "acceleratorCount": 8}
    for kind in ("v2", "v3")
} | {
    name: {"machineType": _TYPES[tpu.generation].format(tpu.chips), "tpuTopology": tpu.topology.partition(":")[2]}
    for name, tpu in TPUS.items()
    if tpu.generation in _TYPES
}


def runtime_version(tpu: Tpu) -> str:
    """Return the image that its machine starts with; SkyPilot's default for a v5e is that of a v5p."""
    return _RUNTIMES.get(tpu.generation, "tpu-ubuntu2204-base")
