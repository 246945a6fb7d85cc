"""What this machine is, made ready and checked: what other rooms may use of it."""

from tpukit.essentials.machine import orphans
from tpukit.essentials.machine.busy_time import BusyTime
from tpukit.essentials.machine.chip_holders import ChipsBusy, wait_for_chips
from tpukit.essentials.machine.device_files import device_nodes
from tpukit.essentials.machine.environment import RELEASES, Changes, install_line, prepare
from tpukit.essentials.machine.files import (
    find_fault,
    lock_folder,
    npy,
    part_of,
    remove_parts,
    seal,
    size_and_checksum,
    unseal,
    whole_number,
    write_file,
    write_whole,
)
from tpukit.essentials.machine.host import Host, host
from tpukit.essentials.machine.instructions import how_to_restart
from tpukit.essentials.machine.orphans import Released, release
from tpukit.essentials.machine.resources import OwnMemory, available_memory, cpus, own_memory, peak_memory
from tpukit.essentials.machine.runtime_check import Check, RuntimeCheckFailed, check
from tpukit.essentials.machine.tpu_picture import show_tpu

__all__ = [
    "BusyTime",
    "Changes",
    "Check",
    "ChipsBusy",
    "Host",
    "OwnMemory",
    "RELEASES",
    "Released",
    "RuntimeCheckFailed",
    "available_memory",
    "check",
    "cpus",
    "device_nodes",
    "find_fault",
    "host",
    "how_to_restart",
    "install_line",
    "lock_folder",
    "npy",
    "orphans",
    "own_memory",
    "part_of",
    "peak_memory",
    "prepare",
    "release",
    "remove_parts",
    "seal",
    "show_tpu",
    "size_and_checksum",
    "unseal",
    "wait_for_chips",
    "whole_number",
    "write_file",
    "write_whole",
]
