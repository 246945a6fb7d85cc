import pytest
import torch
from simulator.checks import CHECKS, run_all
from simulator.machine import machines, results, run

from tpukit.simulator.shapes import SHAPES, dry_run

MACHINES = {
    "one core": dry_run(1),
    "two cores": dry_run(2),
    "three cores": dry_run(3),
    "colab v5e-1": SHAPES["colab v5e-1"],
    "v4-8": SHAPES["v4-8"],
    "kaggle v5e-8": SHAPES["kaggle v5e-8"],
    "v3-8": SHAPES["v3-8"],
}


@pytest.fixture(scope="session")
def came(library):
    """What every check returned on each rank of a machine; all checks of a machine run in the same processes."""
    runs = {}

    def on(machine):
        if machine not in runs:
            runs[machine] = run(MACHINES[machine], run_all, library=library)
        return results(runs[machine])

    return on


@pytest.mark.xla
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("machine", machines(MACHINES))
def test_a_collective_returns_what_plain_torch_says(machine, name, came):
    shape, expected = MACHINES[machine], CHECKS[name][1]
    world = shape.chips * shape.cores
    ranks = came(machine)
    assert sorted(ranks) == list(range(world))
    for rank, returned in ranks.items():
        torch.testing.assert_close(returned[name], expected(rank, world), rtol=0, atol=0)
