"""Run one of pytorch/xla's own test files for TPUs on four chips of the simulator.

    python tests/simulator/upstream.py CHECKOUT/test/pjrt/test_collective_ops_tpu.py

CHECKOUT is pytorch/xla at the tag of the installed torch_xla; nothing of it is kept here. Needs root, to show four
chips on a PCI bus of its own. Its processes are forked, not spawned: each would import torch_xla again, ten seconds per
test. Nothing else of the file is changed.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tpukit.simulator import build, shapes  # noqa: E402

CHIPS = 4
BUS = f"""
bus=/sys/bus/pci/devices
mount -t tmpfs none $bus
for i in $(seq {CHIPS}); do
    mkdir $bus/$i; echo 0x1ae0 > $bus/$i/vendor; echo 0x0063 > $bus/$i/device; echo 0x0000 > $bus/$i/subsystem_device
done
exec "$@"
"""
FORKED = """
import runpy, sys
import torch_xla._internal.pjrt as pjrt
spawned = pjrt.run_multiprocess

def forked(*args, **options):
    return spawned(*args, **options | {"start_method": "fork"})

pjrt.run_multiprocess = forked
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# For a file that torchrun starts: its processes would not inherit the memory of the simulated chips.
CALLED = """
import runpy, sys, torch_xla
functions = runpy.run_path(sys.argv[1])

def call(index):
    functions["_mp_fn"]()

torch_xla.launch(call, start_method="fork")
"""


def run(file: str | Path, *others: str, torchrun: bool = False, **options):
    """Run a file on the simulated chips, and return its `subprocess.CompletedProcess`.

    Args:
        file: the test file.
        others: arguments of the file.
        torchrun: call `_mp_fn` of the file on each chip, as torchrun does.
        options: of `subprocess.run`.
    """
    test = Path(file).resolve()
    program = CALLED if torchrun else FORKED
    return run_python("-c", program, str(test), *others, cwd=test.parent, **options)


def run_python(*arguments: str, environ: dict[str, str] | None = None, **options):
    """Run Python on the simulated chips, and return its `subprocess.CompletedProcess`.

    Args:
        arguments: of the interpreter.
        environ: further environment variables.
        options: of `subprocess.run`.
    """
    plugin = build.find_plugin().library
    with shapes.meeting_place() as path:
        variables = shapes.environment(
            shapes.dry_run(CHIPS), library=build.library(), plugin=plugin, memory=path
        )
        on_a_bus = ["unshare", "--mount", "sh", "-ec", BUS, "sh", sys.executable]
        return subprocess.run(
            [*on_a_bus, *arguments],
            env={**os.environ, **variables, **(environ or {})},
            pass_fds=[int(Path(path).name)],
            **options,
        )


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]).returncode if len(sys.argv) > 1 else __doc__)
