"""Run torch_xla's own TPU client on CPU processes, with a simulated libtpu.

torch_xla loads the library that TPU_LIBRARY_PATH names. `environment` in `shapes` names the
simulated library there, and describes a machine with chips, so torch_xla takes the same code path
as on a TPU: a process per chip, with its collectives inside the graph.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator

from tpukit.accelerators import ShardedTpu
from tpukit.essentials.backends import (
    Backend,
    Runtime,
    Topology,
    Tpu,
    dry_run_cores,
    import_torch_xla,
    start_pjrt,
)
from tpukit.simulator.build import find_plugin, library, why_not
from tpukit.simulator.shapes import dry_run, environment, meeting_place

# torch_xla sets these for each worker with setdefault, so a value found here would go to all.
_OF_EACH_WORKER = (
    "CLOUD_TPU_TASK_ID",
    "TPU_CHIPS_PER_PROCESS_BOUNDS",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_BOUNDS",
    "TPU_PROCESS_PORT",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
)


class SimulatorRuntime(Runtime):
    """A CPU process per simulated v5e chip; torch_xla's own collectives run, in the graph."""

    name = "xla:simulator"
    dry_run_of = "xla"
    backend = Tpu
    hardware = "CPU"
    package = "torch_xla"
    keeps_compiles = True
    sharded = name
    note = "; torch_xla sees TPU chips of a simulated libtpu"

    def is_present(self, machine) -> bool:
        return not machine.chips and why_not() is None

    def topology(self, machine, cores: int | None) -> Topology:
        cores = cores or dry_run_cores(machine)
        dry_run(cores)  # raises for a number that the simulator does not have
        return Topology(self.name, "XLA:CPU", cores, processes=cores, is_dry_run=True)

    def load(self, topology: Topology) -> None:
        super().load(topology)
        library()  # compiled here, before the run's time is counted
        import_torch_xla("CPU")

    @contextlib.contextmanager
    def meeting_point(self, topology: Topology) -> Iterator[dict[str, str]]:
        """Yield the variables with which torch_xla sees the machine."""
        shape = dry_run(topology.cores * topology.chips)
        plugin = find_plugin().library
        with meeting_place() as memory:  # inherited by the workers, which are forks
            yield environment(shape, library=library(), plugin=plugin, memory=memory)

    def start(
        self,
        body: Callable[[Backend], None],
        topology: Topology,
        *,
        process: int,
        meeting_point,
    ) -> None:
        play(meeting_point)
        kind = Tpu
        if topology.chips > 1:
            kind = functools.partial(ShardedTpu, topology.chips)
        start_pjrt("TPU", lambda: body(kind()), topology, process=process)


def play(machine: dict[str, str]) -> None:
    """Let torch_xla see this machine in this process, in place of earlier settings."""
    for variable in _OF_EACH_WORKER:
        os.environ.pop(variable, None)
    os.environ |= machine
