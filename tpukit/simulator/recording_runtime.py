"""Run a worker function as a single core of a simulated TPU, and record its programs.

The simulated libtpu (`record.c`) writes each program to a folder, and a line per run to a log.
`preflight` reads both. Large programs are only recorded, and do not run.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tpukit.accelerators import ShardedTpu
from tpukit.essentials.backends import (
    Backend,
    Topology,
    Tpu,
    start_pjrt,
    variable_set,
    with_own_flags,
)
from tpukit.simulator.build import find_plugin, library
from tpukit.simulator.runtime import SimulatorRuntime, set_machine
from tpukit.simulator.shapes import dry_run, environment


@dataclass(frozen=True)
class Imagined(Topology):
    """A machine of which one core runs; the other cores are assumed to do the same.

    Attributes:
        world_size: the number of cores of the machine, 1 to 8. For a sharded model it is 1, because
            all chips together count as one core.
        accelerator: Google Cloud's name of the machine, such as "v5litepod-8".
        folder: the folder that receives the programs and the log.
    """

    world_size: int = 1
    accelerator: str = ""
    folder: Path = Path()


class _Recording:
    """A core whose large programs do not run, so the values from it have no meaning.

    A mixin: in a class's bases it comes before `Tpu` or `ShardedTpu`, whose methods it replaces.
    """

    is_recording = True

    def __init__(self, *chips: int) -> None:
        super().__init__(*chips)
        # An entry is a tuple with (shape, dtype) of each tensor of a batch or of a transfer.
        self._batches: list[tuple] = []
        self._sent: list[tuple] = []

    def wait_for_launches(self) -> None:
        """Wait until all launched programs have run; unlike `wait`, launch nothing."""
        import torch_xla.core.xla_model as xm

        xm.wait_device_ops()

    def to_device(self, tensors: list) -> list:
        """Send tensors to the device, and note their shapes and dtypes."""
        self._sent.append(self._shapes_of(tensors))
        return super().to_device(tensors)

    def note_batch(self, batch: object) -> None:
        """Note the shapes and dtypes of a batch that a loop over `core.batches` receives."""
        from torch.utils import _pytree as tree

        self._batches.append(self._shapes_of(tree.tree_leaves(batch)))

    def take_notes(self) -> tuple[tuple, tuple]:
        """Return what was noted since the last call: the batches of `core.batches`, all transfers.

        Each batch and each transfer is a tuple with (shape, dtype) of each of its tensors.
        """
        # A background thread may append during these lines. Its entry is in the old list or in the
        # new one, but is not lost, because no list is copied or emptied.
        batches = self._batches
        sent = self._sent
        self._batches = []
        self._sent = []
        return tuple(batches), tuple(sent)

    def _shapes_of(self, leaves: list) -> tuple:
        """Return (shape, dtype) of each chip's part of the tensors; scalars are left out."""
        import torch

        shapes = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.ndim:
                dtype = str(leaf.dtype).removeprefix("torch.")
                shapes.append((tuple(self.part_of(leaf.shape)), dtype))
        return tuple(shapes)

    def text_of(self, program: Path) -> str:
        """Return the HLO text of a recorded program.

        If torch_xla has noted the Python line of an operation, the text names it.

        Args:
            program: the path of the recorded file.
        """
        import torch_xla.core.xla_builder as xb

        computation = xb.computation_from_module_proto("step", program.read_bytes())
        return xb.get_computation_hlo(computation)


class RecordingTpu(_Recording, Tpu):
    """One TPU core."""

    @staticmethod
    def part_of(shape: tuple) -> tuple:
        """Return `shape`, because a single core gets the whole batch."""
        return shape


class RecordingShardedTpu(_Recording, ShardedTpu):
    """All chips of the machine, which torch_xla's SPMD mode shows as a single core."""


class RecordingRuntime(SimulatorRuntime):
    """One process, which torch_xla treats as core 0 of a TPU. Only `preflight` uses it."""

    name = "xla:recording"
    backend = RecordingTpu
    is_for_launch = False

    def is_present(self, machine) -> bool:
        return False

    @contextlib.contextmanager
    def meeting_point(self, topology: Imagined) -> Iterator[dict[str, str]]:
        shape = dry_run(topology.world_size * topology.chips)
        plugin = find_plugin().library
        # There is only one process, so it needs no memory to communicate with others.
        machine = environment(shape, library=library(), plugin=plugin, memory="")
        yield machine | {"SIMULATOR_RECORD": str(topology.folder)}

    def start(
        self,
        body: Callable[[Backend], None],
        topology: Imagined,
        *,
        process: int,
        meeting_point,
    ) -> None:
        set_machine(meeting_point)
        # The recorded programs do not depend on the kind of chip, but the flags for libtpu's
        # compiler do. preflight compiles the programs with the flags in this file.
        is_sharded = topology.chips > 1
        flags = libtpu_flags(topology.accelerator, topology.generation, sharded=is_sharded)
        (topology.folder / "flags").write_text(flags)
        kind = RecordingTpu
        if is_sharded:
            kind = functools.partial(RecordingShardedTpu, topology.chips)
        machine = replace(topology, processes=topology.world_size)
        start_pjrt("TPU", lambda: body(kind()), machine, process=0)


def libtpu_flags(accelerator: str, generation: str, *, sharded: bool = False) -> str:
    """Return the flags of libtpu that a launch on this kind of machine puts in LIBTPU_INIT_ARGS.

    Args:
        accelerator: Google Cloud's name of the machine, such as "v5litepod-8".
        generation: the kind of chip, such as "v5e"; "" for the flags of torch_xla alone.
        sharded: whether one process has all chips.
    """
    import torch_xla

    # torch_xla appends its flags to the variable in the environment, so the three variables get
    # their old values back afterwards. The first one keeps torch_xla from asking a metadata server.
    with (
        variable_set("TPU_SKIP_MDS_QUERY", "1"),
        variable_set("TPU_ACCELERATOR_TYPE", accelerator),
        variable_set("LIBTPU_INIT_ARGS", os.environ.get("LIBTPU_INIT_ARGS", "")),
    ):
        torch_xla._setup_libtpu_flags()
        return with_own_flags(os.environ["LIBTPU_INIT_ARGS"], generation, sharded=sharded)
