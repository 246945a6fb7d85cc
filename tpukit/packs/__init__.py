"""Images on disk: packed records, the decoded cache, TFRecord files."""

from tpukit.packs import locks
from tpukit.packs.array_records import row_type
from tpukit.packs.build_pixel_cache import build_cache, cache_or_decode
from tpukit.packs.checked_files import npy, whole_number, write_file
from tpukit.packs.decoding import decode
from tpukit.packs.pack_shards import NOT_DAMAGE
from tpukit.packs.pack_sources import PackSource
from tpukit.packs.packing import check_arguments, pack, pack_described, share_of
from tpukit.packs.pixel_cache import Cache
from tpukit.packs.processes import how_many, run_in_processes
from tpukit.packs.records import Records
from tpukit.packs.resumable import ResumableFolder, fact
from tpukit.packs.room import NoRoom, spread
from tpukit.packs.source_files import Names, look_at
from tpukit.packs.tfrecords import read_tfrecords

__all__ = [
    "Cache", "NOT_DAMAGE", "Names", "NoRoom", "PackSource", "Records", "ResumableFolder", "build_cache",
    "cache_or_decode", "check_arguments", "decode", "fact", "how_many", "locks", "look_at", "npy", "pack",
    "pack_described", "read_tfrecords", "row_type", "run_in_processes", "share_of", "spread", "whole_number",
    "write_file",
]  # fmt: skip
