"""What a loop iterates: the sampler, batches, prefetch, augmentation, buckets."""

from tpukit.essentials.data.augment import Augment
from tpukit.essentials.data.batches import Batches
from tpukit.essentials.data.buckets import Buckets
from tpukit.essentials.data.prefetch import run_ahead
from tpukit.essentials.data.sampler import ShardedSampler, StreamSampler
from tpukit.essentials.data.seeding import (
    host_numbers,
    host_numbers_checksum,
    numbers_kept,
    put_back,
    seed_in_turn,
)
from tpukit.essentials.data.shared_state import remember
from tpukit.essentials.data.sources import BatchSource, MapDataset, inside, only_iterates, split_masks
from tpukit.essentials.data.streams import StreamBatches

__all__ = [
    "Augment", "BatchSource", "Batches", "Buckets", "MapDataset", "ShardedSampler", "StreamBatches",
    "StreamSampler", "host_numbers", "host_numbers_checksum", "inside", "numbers_kept", "only_iterates", "put_back",
    "remember", "run_ahead", "seed_in_turn", "split_masks",
]  # fmt: skip
