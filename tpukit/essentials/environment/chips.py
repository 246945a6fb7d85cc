"""The table of TPU generations: cores, memory, speed and price of a chip."""

from dataclasses import dataclass

# Compute Engine's list prices per chip and hour in the US, on demand. Source: SkyPilot's catalogue
# v8, November 2026. Other regions cost up to a fifth more, and spot machines cost less. Vertex AI
# has other prices.
PRICES_OF = "Compute Engine's list prices in the US, November 2026"


@dataclass(frozen=True)
class Generation:
    """A generation of TPU chips. The value 0 means unknown.

    Attributes:
        pci: PCI device id, which is the same for v2 and v3.
        subsystem: PCI subsystem id, which distinguishes v2 from v3; "" for other generations.
        tensor_cores: number of TensorCores per chip.
        cores: number of cores per chip in PyTorch, where the two TensorCores of a v4 or v5p are one
            core.
        gib: HBM per core in GiB.
        teraflops: peak TFLOP/s per core in bfloat16.
        gigabytes: peak bandwidth of HBM per core in GB/s.
        gigahertz: clock rate in GHz.
        dollars: price per chip and hour in US dollars; see PRICES_OF.
    """

    pci: str
    subsystem: str
    tensor_cores: int
    cores: int
    gib: int = 0
    teraflops: float = 0
    gigabytes: float = 0
    gigahertz: float = 0
    dollars: float = 0


# The PCI ids are those of torch_xla, tpu_info and torch_tpu. The figures are from Google Cloud's
# page of each generation. A v2's speed is from "A Domain Specific Supercomputer for Training Deep
# Neural Networks" (2020). No page states a clock rate, so the rates are computed from the peaks. A
# v5e has four units of 128 x 128 multiply-adds: 4 x 128 x 128 x 2 x 1.5e9 = 197e12. Google's
# page names two units of 256 x 256 for a v6e, which would need 3.5e9. 1.75e9 is that of four units.
#
# The fields of Generation, in order.
# pci, subsystem, TensorCores, cores, GiB, TFLOP/s, GB/s, GHz, dollars
_TABLE = {
    "v2": ("0x0027", "0x004e", 2, 2, 8, 22.9, 350, 0.70, 1.125),
    "v3": ("0x0027", "0x004f", 2, 2, 16, 61.5, 450, 0.94, 2.00),
    "v4": ("0x005e", "", 2, 1, 32, 275, 1228, 1.05, 3.22),
    "v5e": ("0x0063", "", 1, 1, 16, 197, 819, 1.50, 1.20),
    "v5p": ("0x0062", "", 2, 1, 95, 459, 2765, 1.75, 4.20),
    "v6e": ("0x006f", "", 1, 1, 32, 918, 1640, 1.75, 2.70),
    # torch_xla up to 2.9 does not know a 7x, so a launch needs TorchTPU for it.
    "7x": ("0x0076", "", 2, 2),
}
GENERATIONS = {name: Generation(*row) for name, row in _TABLE.items()}
