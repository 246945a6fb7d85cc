"""The one table of TPUs: what a chip of each generation has."""

from dataclasses import dataclass

# Compute Engine's list price of a chip for an hour on demand in the US, as SkyPilot's catalogue v8 had it in November
# 2026. Other regions cost up to a fifth more, spot less; Vertex AI bills by its own list.
PRICES_OF = "Compute Engine's list prices in the US, November 2026"


@dataclass(frozen=True)
class Generation:
    """A kind of chip: PCI ids as torch_xla, tpu_info and torch_tpu have them, figures from Google Cloud's page of each.

    A v2's speed is not on its page, but in "A Domain Specific Supercomputer for Training ..." (2020). The clock is on
    none: it is what the peak follows from. A v5e has four units of 128 x 128 multiply-adds:
    4 x 128 x 128 x 2 x 1.5e9 = 197e12; a v6e four of 256 x 256 at 1.75e9 = 918e12.
    """

    pci: str  # device; v2 and v3 share one and differ in their subsystem
    subsystem: str
    tensor_cores: int  # of a chip
    cores: int  # of a chip, as PyTorch sees it: the two TensorCores of a v4 or v5p work as one
    gib: int = 0  # of HBM, a core, as the next three
    teraflops: float = 0  # a second, in bfloat16, at most
    gigabytes: float = 0  # of HBM a second, at most
    gigahertz: float = 0
    dollars: float = 0  # of a chip, an hour; see PRICES_OF


GENERATIONS = {
    "v2": Generation("0x0027", "0x004e", 2, 2, 8, 22.9, 350, 0.70, 1.125),
    "v3": Generation("0x0027", "0x004f", 2, 2, 16, 61.5, 450, 0.94, 2.00),
    "v4": Generation("0x005e", "", 2, 1, 32, 275, 1228, 1.05, 3.22),
    "v5e": Generation("0x0063", "", 1, 1, 16, 197, 819, 1.50, 1.20),
    "v5p": Generation("0x0062", "", 2, 1, 95, 459, 2765, 1.75, 4.20),
    "v6e": Generation("0x006f", "", 1, 1, 32, 918, 1640, 1.75, 2.70),
    "7x": Generation("0x0076", "", 2, 2),  # recognised, but no TPU below: torch_xla up to 2.9 does not know it
}
