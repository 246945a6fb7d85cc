"""Run torch_xla's own TPU client on CPU processes, with a simulated libtpu.

torch_xla loads the library that the environment variable TPU_LIBRARY_PATH names. Here, this is the
simulated library, and other variables describe a machine; see `environment` in shapes.py. So
torch_xla runs the same code as on a TPU: a process per chip, with the collectives inside the graph.
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

# torch_xla sets these for each worker, but only those that have no value. A value in this process
# would go to every worker.
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
    """A CPU process per simulated v5e chip, with torch_xla's own collectives in the graph."""

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
        library()  # compiles on the first call, here because the run's time does not count yet
        import_torch_xla("CPU")

    @contextlib.contextmanager
    def meeting_point(self, topology: Topology) -> Iterator[dict[str, str]]:
        """Yield the environment variables by which torch_xla finds the simulated machine."""
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
        set_machine(meeting_point)
        kind = Tpu
        if topology.chips > 1:
            kind = functools.partial(ShardedTpu, topology.chips)
        start_pjrt("TPU", lambda: body(kind()), topology, process=process)


def set_machine(machine: dict[str, str]) -> None:
    """Set the environment variables of this process so that torch_xla finds a simulated machine.

    Args:
        machine: the variables, from `shapes.environment`. Earlier settings of a machine are
            deleted.
    """
    for variable in _OF_EACH_WORKER:
        os.environ.pop(variable, None)
    os.environ |= machine
