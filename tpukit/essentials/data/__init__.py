"""The data of a training loop: samplers, batches, prefetching, the host's random numbers."""

from tpukit.essentials.data.batches import Batches
from tpukit.essentials.data.collating import collate
from tpukit.essentials.data.feeds import EpochPlan, Sent, numbered, send_nested
from tpukit.essentials.data.identities import different_parts, identity
from tpukit.essentials.data.prefetch import iterate_loader, run_ahead
from tpukit.essentials.data.sampler import ShardedSampler
from tpukit.essentials.data.seeding import (
    TURN,
    random_states,
    random_states_restored,
    restore_random_states,
    seed_host,
    seed_in_turn,
    seeded_in_turn,
)
from tpukit.essentials.data.shared_state import lines_about, refuse_shared, remember
from tpukit.essentials.data.sources import (
    BatchSource,
    MapDataset,
    inside,
    only_iterates,
    refuse_loader,
    split_masks,
)

__all__ = [
    "BatchSource", "Batches", "EpochPlan", "MapDataset", "Sent", "ShardedSampler", "TURN",
    "collate", "different_parts", "identity", "inside", "iterate_loader", "lines_about", "numbered",
    "only_iterates", "random_states", "random_states_restored", "refuse_loader", "refuse_shared",
    "remember", "restore_random_states", "run_ahead", "seed_host", "seed_in_turn", "seeded_in_turn",
    "send_nested", "split_masks",
]  # fmt: skip
