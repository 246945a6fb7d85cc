"""Estimate the time of collectives on the links between TPU chips, from published bandwidths.

In an all-reduce in a ring of n chips, each chip sends every byte 2 (n - 1) / n times: once around
the ring to compute the sum, and once to distribute it. So for 100 MB on 8 chips, each chip sends
175 MB, which takes 1.75 ms at 100 GB/s. This is a lower limit, without latencies and with all links
fully used.
"""

# GB/s of one link in one direction. Google's page of each generation has the bidirectional sum of
# a chip's links: 400 GB/s for the 4 links of a v5e, 800 for the 4 of a v6e, 1,200 for the 6 of a
# v5p. A v4 has 6 links of 50 GB/s. v2 and v3 have 4 links of 496 and 656 Gbit/s: "A Domain Specific
# Supercomputer for Training Deep Neural Networks" (2020).
_LINK_GIGABYTES = {"v2": 62, "v3": 82, "v4": 50, "v5e": 50, "v5p": 100, "v6e": 100}
# A ring uses two links of each chip, and data goes around in both directions at once.
_LINKS_OF_A_RING = 2
# On v5e and v6e, only a pod of 16 x 16 chips is a torus. On a torus, two rings use all four links.
_CHIPS_OF_A_TORUS = 256


def ring_bandwidth(generation: str, chips: int) -> float:
    """Return the bytes per second that a chip sends to its neighbours in a collective.

    Args:
        generation: the generation of the TPU, such as "v5e".
        chips: the number of chips of the run.
    """
    links = _LINKS_OF_A_RING
    if chips >= _CHIPS_OF_A_TORUS:
        links *= 2
    return links * _LINK_GIGABYTES[generation] * 1e9


def all_reduce_seconds(size: float, generation: str, chips: int) -> float:
    """Return the least seconds of an all-reduce of `size` bytes over chips; 0 on one chip."""
    return 2 * gather_seconds(size, generation, chips)


def gather_seconds(size: float, generation: str, chips: int) -> float:
    """Return the least seconds of an all-gather whose result on each chip has `size` bytes.

    A reduce-scatter whose input on each chip has `size` bytes takes the same time.
    """
    sent = size * (chips - 1) / chips
    return sent / ring_bandwidth(generation, chips)
