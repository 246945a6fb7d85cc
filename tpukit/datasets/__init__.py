"""Store images on disk: packs, the cache of decoded images, TFRecord files."""

from tpukit.datasets import locks
from tpukit.datasets.array_records import row_type
from tpukit.datasets.checked_files import npy, whole_number, write_file
from tpukit.datasets.decoding import decode
from tpukit.datasets.disk_space import DiskFullError, spread
from tpukit.datasets.image_cache import cached_images
from tpukit.datasets.pack_plan import PackPlan, plan_pack
from tpukit.datasets.pack_shards import NOT_DAMAGE
from tpukit.datasets.pack_sources import PackSource
from tpukit.datasets.packed_images import PackedImages
from tpukit.datasets.packing import PackOptions, check_arguments, pack, pack_described, share_of
from tpukit.datasets.pixel_cache import CachedImages
from tpukit.datasets.pixel_form import PixelForm, uint16_values
from tpukit.datasets.processes import how_many, run_in_processes
from tpukit.datasets.resumable import ResumableFolder, fact
from tpukit.datasets.row_labels import rows_of
from tpukit.datasets.source_files import Names, look_at
from tpukit.datasets.tfrecords import read_tfrecords

__all__ = [
    "CachedImages", "DiskFullError", "NOT_DAMAGE", "Names", "PackOptions", "PackPlan", "PackSource",
    "PackedImages", "PixelForm", "ResumableFolder", "cached_images", "check_arguments", "decode",
    "fact", "how_many", "locks", "look_at", "npy", "pack", "pack_described", "plan_pack",
    "read_tfrecords", "row_type", "rows_of", "run_in_processes", "share_of", "spread",
    "uint16_values", "whole_number", "write_file",
]  # fmt: skip
