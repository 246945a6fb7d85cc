"""The facts about this machine, the set-up of its variables, and the check before a launch."""

from tpukit.essentials.environment import orphans
from tpukit.essentials.environment.busy_time import BusyTime
from tpukit.essentials.environment.chip_holders import (
    DeviceBusyError,
    SessionRecord,
    chip_nodes,
    open_sessions,
    wait_for_chips,
)
from tpukit.essentials.environment.chips import GENERATIONS, PRICES_OF, Generation
from tpukit.essentials.environment.files import (
    is_installed_file,
    is_writable_by_others,
    load_notebook,
    part_of,
    write_whole,
)
from tpukit.essentials.environment.hardware import MachineInfo, find_chips, machine_info
from tpukit.essentials.environment.installation import finish_install
from tpukit.essentials.environment.instructions import how_to_restart, how_to_start_afresh
from tpukit.essentials.environment.orphans import CleanupReport, cleanup
from tpukit.essentials.environment.platforms import (
    THIS_MACHINE,
    Machine,
    runtime_started,
    why_no_simulator,
)
from tpukit.essentials.environment.resources import (
    OwnMemory,
    available_memory,
    cpus,
    own_memory,
    peak_memory,
    reset_peak_memory,
)
from tpukit.essentials.environment.runtime_check import Check, EnvironmentCheckError, check
from tpukit.essentials.environment.session import (
    IMAGES,
    KEEP_VARIABLE,
    OLDEST_TORCH,
    ONE_PROCESS_VARIABLES,
    RELEASES,
    Changes,
    Folders,
    folders_of,
    how_to_install,
    install_line,
    setup,
    torch_problem,
)

__all__ = [
    "BusyTime", "Changes", "Check", "CleanupReport", "DeviceBusyError", "EnvironmentCheckError",
    "Folders", "GENERATIONS", "Generation", "IMAGES", "KEEP_VARIABLE", "Machine", "MachineInfo",
    "OLDEST_TORCH", "ONE_PROCESS_VARIABLES", "OwnMemory", "PRICES_OF", "RELEASES", "SessionRecord",
    "THIS_MACHINE", "available_memory", "check", "chip_nodes", "cleanup", "cpus", "find_chips",
    "finish_install", "folders_of", "how_to_install", "how_to_restart", "how_to_start_afresh",
    "install_line", "is_installed_file", "is_writable_by_others", "load_notebook", "machine_info",
    "open_sessions", "orphans", "own_memory", "part_of", "peak_memory", "reset_peak_memory",
    "runtime_started", "setup", "torch_problem", "wait_for_chips", "why_no_simulator",
    "write_whole",
]  # fmt: skip
