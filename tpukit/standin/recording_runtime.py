"""A worker function run as one core of a TPU that is not there, whose programs are written down instead of run."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tpukit.essentials.backends import Backend, Topology, Tpu, start_pjrt, variable_set, with_own_flags
from tpukit.runtimes import ShardedTpu
from tpukit.standin.build import find_plugin, library
from tpukit.standin.runtime import StandInRuntime, play
from tpukit.standin.shapes import environment, rehearsal


@dataclass(frozen=True)
class Imagined(Topology):
    """One core that runs, and beside it others that are only imagined to do what it does.

    Attributes:
        world_size: cores of the imagined machine, 1 to 8.
        accelerator: what Google Cloud calls that machine, such as v5litepod-8.
        folder: where the programs are written, see `record.c`.
    """

    world_size: int = 1
    accelerator: str = ""
    folder: Path = Path()


class _Recording:
    """A core whose large programs are not run: what comes back from the device is no result."""

    is_recording = True

    def __init__(self, *chips: int) -> None:
        super().__init__(*chips)
        self.sent: dict[tuple, None] = {}

    def wait_for_launches(self) -> None:
        """Return when all that was handed over has run, and add nothing to it, as `wait` does."""
        import torch_xla.core.xla_model as xm

        xm.wait_device_ops()

    def to_device(self, tensors: list) -> list:
        """Note shapes and dtypes of what is sent to a chip together, as the images and labels of a batch are."""
        shapes = [(one, tuple(self.part_of(one.shape))) for one in tensors if one.ndim]
        sent = tuple((shape, str(one.dtype).removeprefix("torch.")) for one, shape in shapes)
        if sent:
            self.sent[sent] = None
        return super().to_device(tensors)

    def text_of(self, program: Path) -> str:
        """Return a recorded program as HLO text, with the lines of Python that torch_xla has noted."""
        import torch_xla.core.xla_builder as xb

        return xb.get_computation_hlo(xb.computation_from_module_proto("step", program.read_bytes()))


class RecordingTpu(_Recording, Tpu):
    """One TPU core."""

    @staticmethod
    def part_of(shape: tuple) -> tuple:
        """Return the shape of what a chip gets of a batch."""
        return shape


class RecordingShardedTpu(_Recording, ShardedTpu):
    """All chips as one core."""


class RecordingRuntime(StandInRuntime):
    """One process that torch_xla believes to be core 0 of a TPU. `preflight` lays it out, no launch does."""

    name = "xla:recording"
    backend = RecordingTpu
    is_for_launch = False

    def is_present(self, machine) -> bool:
        return False

    @contextlib.contextmanager
    def meeting_point(self, topology: Imagined) -> Iterator[dict[str, str]]:
        machine = environment(
            rehearsal(topology.world_size * topology.chips), library=library(), plugin=find_plugin().library, memory=""
        )
        yield machine | {"STANDIN_RECORD": str(topology.folder)}

    def start(self, body: Callable[[Backend], None], topology: Imagined, *, process: int, meeting_point) -> None:
        play(meeting_point)
        # What torch_xla would tell the compiler depends on the kind of chip; the trace does not.
        flags = libtpu_flags(topology.accelerator, topology.generation, sharded=topology.chips > 1)
        (topology.folder / "flags").write_text(flags)
        chips = topology.chips
        kind = functools.partial(RecordingShardedTpu, chips) if chips > 1 else RecordingTpu
        start_pjrt("TPU", lambda: body(kind()), replace(topology, processes=topology.world_size), process=0)


def libtpu_flags(accelerator: str, generation: str, *, sharded: bool = False) -> str:
    """Return what libtpu gets as LIBTPU_INIT_ARGS in a launch on such a machine: "v5litepod-8" and "v5e", for one.

    With "" for the generation, what torch_xla alone gives to it. `sharded` where one process has all chips.
    """
    import torch_xla

    with (
        variable_set("TPU_SKIP_MDS_QUERY", "1"),
        variable_set("TPU_ACCELERATOR_TYPE", accelerator),
        variable_set("LIBTPU_INIT_ARGS", os.environ.get("LIBTPU_INIT_ARGS", "")),
    ):
        torch_xla._setup_libtpu_flags()
        return with_own_flags(os.environ["LIBTPU_INIT_ARGS"], generation, sharded=sharded)
