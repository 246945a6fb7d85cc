"""The rehearsal behind torch_xla's own TPU client: XLA:CPU processes with a stand-in for libtpu."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator

from tpukit.essentials.backends import (
    Backend,
    Runtime,
    Topology,
    Tpu,
    import_torch_xla,
    rehearsal_cores,
    start_pjrt,
)
from tpukit.runtimes import ShardedTpu
from tpukit.standin.build import find_plugin, library, why_not
from tpukit.standin.shapes import environment, rehearsal
from tpukit.standin.shared_memory import meeting_place

# torch_xla gives each worker its own with setdefault, so a value found here would go to all.
_OF_EACH_WORKER = (
    *("CLOUD_TPU_TASK_ID", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_ADDRESSES", "TPU_PROCESS_BOUNDS"),
    *("TPU_PROCESS_PORT", "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"),
)


class StandInRuntime(Runtime):
    """One process per stand-in for a v5e chip. torch_xla believes in a TPU: its own collectives run, in the graph."""

    name = "xla:standin"
    backend = Tpu
    hardware = "CPU"
    package = "torch_xla"
    keeps_compiles = True
    sharded = name
    note = "; torch_xla sees TPU chips, played by a stand-in for libtpu"

    def is_present(self, machine) -> bool:
        return not machine.chips and why_not() is None

    def topology(self, machine, cores: int | None) -> Topology:
        cores = cores or rehearsal_cores(machine)
        rehearsal(cores)  # raises for a number that it does not play
        return Topology(self.name, "XLA:CPU", cores, processes=cores, rehearsal=True)

    def load(self, topology: Topology) -> None:
        super().load(topology)
        library()  # compiled here, before the run's time is counted
        import_torch_xla("CPU")

    @contextlib.contextmanager
    def meeting_point(self, topology: Topology) -> Iterator[dict[str, str]]:
        """Yield the variables that make torch_xla see the machine, the file where its processes meet among them."""
        with meeting_place() as memory:
            plugin = find_plugin().library
            yield environment(
                rehearsal(topology.cores * topology.chips), library=library(), plugin=plugin, memory=memory
            )

    def start(self, body: Callable[[Backend], None], topology: Topology, *, process: int, meeting_point) -> None:
        play(meeting_point)
        kind = functools.partial(ShardedTpu, topology.chips) if topology.chips > 1 else Tpu
        start_pjrt("TPU", lambda: body(kind()), topology, process=process)


def play(machine: dict[str, str]) -> None:
    """Make torch_xla see this machine in this process, whatever was set before."""
    for variable in _OF_EACH_WORKER:
        os.environ.pop(variable, None)
    os.environ |= machine
