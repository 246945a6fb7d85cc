"""The time of collectives on the links between TPU chips, from published bandwidths.

An all-reduce in a ring of n chips sends each byte 2 (n - 1) / n times: once around to add up, and
once around to hand out the sum. So 100 MB on 8 chips are 175 MB per chip, 1.75 ms at 100 GB/s.
It is a lower limit: it has no latencies, and all links are used fully.
"""

# GB/s of one link in one direction. Google's page of each generation has the bidirectional sum of
# a chip's links: 400 GB/s for the 4 links of a v5e, 800 for the 4 of a v6e, 1,200 for the 6 of a
# v5p. A v4 has 6 links of 50 GB/s. v2 and v3 have 4 links of 496 and 656 Gbit/s: "A Domain Specific
# Supercomputer for Training Deep Neural Networks" (2020).
_LINK_GIGABYTES = {"v2": 62, "v3": 82, "v4": 50, "v5e": 50, "v5p": 100, "v6e": 100}
# A ring goes in by one link of a chip and out by another, in both directions at once.
_LINKS_OF_A_RING = 2
# Only a pod of 16 x 16 chips is a torus on v5e and v6e, on which two rings use all four links.
_CHIPS_OF_A_TORUS = 256


def ring_bandwidth(generation: str, chips: int) -> float:
    """Return the bytes per second that a chip sends to its neighbours in a collective.

    Args:
        generation: such as "v5e".
        chips: of the run.
    """
    links = _LINKS_OF_A_RING
    if chips >= _CHIPS_OF_A_TORUS:
        links *= 2
    return links * _LINK_GIGABYTES[generation] * 1e9


def all_reduce_seconds(size: float, generation: str, chips: int) -> float:
    """Return the least seconds in which `size` bytes are summed over chips; 0 on one chip."""
    return 2 * gather_seconds(size, generation, chips)


def gather_seconds(size: float, generation: str, chips: int) -> float:
    """Return the least seconds of an all-gather, or of a reduce-scatter, of `size` bytes in all."""
    sent = size * (chips - 1) / chips
    return sent / ring_bandwidth(generation, chips)
