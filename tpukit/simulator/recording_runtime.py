"""Run a worker function as a single core of a simulated TPU, and record its programs.

No large program runs. The simulated libtpu writes each program to a folder and each run to a log,
see `record.c`. `preflight` reads both.
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
from tpukit.simulator.runtime import SimulatorRuntime, play
from tpukit.simulator.shapes import dry_run, environment


@dataclass(frozen=True)
class Imagined(Topology):
    """A machine on which one core runs; the other cores are assumed to do the same.

    Attributes:
        world_size: cores of the machine, 1 to 8.
        accelerator: Google Cloud's name of the machine, such as v5litepod-8.
        folder: for the programs and the log.
    """

    world_size: int = 1
    accelerator: str = ""
    folder: Path = Path()


class _Recording:
    """A core whose large programs do not run, so values from it are no results.

    A mixin that stands before `Tpu` or `ShardedTpu`.
    """

    is_recording = True

    def __init__(self, *chips: int) -> None:
        super().__init__(*chips)
        # Each is a tuple of (size, dtype) for tensors that belong together.
        self._batches: list[tuple] = []
        self._sent: list[tuple] = []

    def wait_for_launches(self) -> None:
        """Wait until all programs have run; unlike `wait`, add nothing to them."""
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
        """Return the batches of `core.batches`, and all transfers, since the last call."""
        batches = self._batches
        sent = self._sent  # a background thread may append meanwhile, to the old or the new list
        self._batches = []
        self._sent = []
        return tuple(batches), tuple(sent)

    def _shapes_of(self, leaves: list) -> tuple:
        """Return (size, dtype) of the tensors, as a chip gets its part of them."""
        import torch

        shapes = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.ndim:
                dtype = str(leaf.dtype).removeprefix("torch.")
                shapes.append((tuple(self.part_of(leaf.shape)), dtype))
        return tuple(shapes)

    def text_of(self, program: Path) -> str:
        """Return a recorded program as HLO text, with the lines of Python that torch_xla noted."""
        import torch_xla.core.xla_builder as xb

        computation = xb.computation_from_module_proto("step", program.read_bytes())
        return xb.get_computation_hlo(computation)


class RecordingTpu(_Recording, Tpu):
    """One TPU core."""

    @staticmethod
    def part_of(shape: tuple) -> tuple:
        """Return the shape of a chip's part of a batch."""
        return shape


class RecordingShardedTpu(_Recording, ShardedTpu):
    """All chips as a single core."""


class RecordingRuntime(SimulatorRuntime):
    """One process that torch_xla takes for core 0 of a TPU; `preflight` uses it, and no launch."""

    name = "xla:recording"
    backend = RecordingTpu
    is_for_launch = False

    def is_present(self, machine) -> bool:
        return False

    @contextlib.contextmanager
    def meeting_point(self, topology: Imagined) -> Iterator[dict[str, str]]:
        shape = dry_run(topology.world_size * topology.chips)
        plugin = find_plugin().library
        # One process needs no shared memory.
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
        play(meeting_point)
        # torch_xla's flags for the compiler depend on the kind of chip; the trace does not.
        is_sharded = topology.chips > 1
        flags = libtpu_flags(topology.accelerator, topology.generation, sharded=is_sharded)
        (topology.folder / "flags").write_text(flags)
        kind = RecordingTpu
        if is_sharded:
            kind = functools.partial(RecordingShardedTpu, topology.chips)
        machine = replace(topology, processes=topology.world_size)
        start_pjrt("TPU", lambda: body(kind()), machine, process=0)


def libtpu_flags(accelerator: str, generation: str, *, sharded: bool = False) -> str:
    """Return the LIBTPU_INIT_ARGS of a launch on a machine.

    Args:
        accelerator: Google Cloud's name of the machine, such as "v5litepod-8".
        generation: such as "v5e"; "" for the flags of torch_xla alone.
        sharded: whether one process has all chips.
    """
    import torch_xla

    with (
        variable_set("TPU_SKIP_MDS_QUERY", "1"),
        variable_set("TPU_ACCELERATOR_TYPE", accelerator),
        variable_set("LIBTPU_INIT_ARGS", os.environ.get("LIBTPU_INIT_ARGS", "")),
    ):
        torch_xla._setup_libtpu_flags()
        return with_own_flags(os.environ["LIBTPU_INIT_ARGS"], generation, sharded=sharded)
