"""What this machine is, made ready and checked: what other rooms may use of it."""

from tpukit.essentials.machine import orphans
from tpukit.essentials.machine.busy_time import BusyTime
from tpukit.essentials.machine.chip_holders import ChipsBusy, chip_nodes, wait_for_chips
from tpukit.essentials.machine.chips import GENERATIONS, PRICES_OF, TPUS, Tpu, find_tpu
from tpukit.essentials.machine.environment import IMAGES, RELEASES, Changes, install_line, prepare
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
from tpukit.essentials.machine.host import Host, find_chips, host
from tpukit.essentials.machine.instructions import how_to_restart, how_to_start_afresh
from tpukit.essentials.machine.orphans import Released, release
from tpukit.essentials.machine.resources import available_memory, cpus, own_memory, peak_memory
from tpukit.essentials.machine.runtime_check import Check, RuntimeCheckFailed, check
from tpukit.essentials.machine.sources import THIS_MACHINE, Machine
from tpukit.essentials.machine.tpu_picture import show_tpu

__all__ = [
    "BusyTime",
    "Changes",
    "Check",
    "ChipsBusy",
    "GENERATIONS",
    "Host",
    "IMAGES",
    "Machine",
    "PRICES_OF",
    "RELEASES",
    "Released",
    "RuntimeCheckFailed",
    "THIS_MACHINE",
    "TPUS",
    "Tpu",
    "available_memory",
    "check",
    "chip_nodes",
    "cpus",
    "find_chips",
    "find_fault",
    "find_tpu",
    "host",
    "how_to_restart",
    "how_to_start_afresh",
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
