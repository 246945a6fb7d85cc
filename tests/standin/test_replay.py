"""A step that is run again on the machines that the stand-in plays, where the cores' gradients meet within it."""

import re

import pytest
from replay_rows import guarded, guarded_rows, right
from replay_workers import assert_same, both
from standin.machine import machines
from standin.test_kit import on

from tpukit.standin import shapes

pytestmark = [
    pytest.mark.usefixtures("library"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch_xla's, in its own calls of its own old names
]
MACHINES = pytest.mark.parametrize(
    "machine", machines(("colab v5e-1", "v4-8", "kaggle v5e-8"), only_soak=["kaggle v5e-8"])
)


@MACHINES
def test_every_row_equals_the_recorded_run_to_the_last_bit_on_every_core(machine, tmp_path):
    cores = on(shapes.SHAPES[machine], both, right(), 12, seed=5, keep_compiles=tmp_path).results
    for row in right():
        for replayed, recorded in (rows[row] for rows in cores):
            assert_same(replayed, recorded)
        assert any("the step is replayed from" in line for line in cores[0][row][0]["lines"]), row


@MACHINES
def test_what_cannot_be_replayed_is_recorded_on_every_core(machine, tmp_path):
    cores = on(shapes.SHAPES[machine], both, guarded_rows(), 12, seed=5, keep_compiles=tmp_path).results
    for row, (_, words) in guarded().items():
        for replayed, recorded in (rows[row] for rows in cores):
            assert_same(replayed, recorded)
        said = [line for line in cores[0][row][0]["lines"] if "every step is recorded" in line]
        assert len(said) == 1, said
        assert re.match(words, said[0]), said[0]
