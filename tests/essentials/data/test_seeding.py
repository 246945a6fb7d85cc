import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tpukit.essentials.data.seeding import seed_host


def draws(numbers):
    seed_host(numbers)
    return random.random(), float(np.random.random()), torch.rand(()).item()  # noqa: NPY002


def test_the_same_numbers_give_the_same_draws_of_all_three_kinds():
    assert draws((7, 0, 3)) == draws((7, 0, 3))


@pytest.mark.parametrize(
    "other", [(8, 0, 3), (7, 1, 3), (7, 0, 4), (0, 7, 3), (7, 0), (7, 0, 3, 0), (70, 3)]
)
def test_other_numbers_give_other_draws(other):
    assert not set(draws((7, 0, 3))) & set(draws(other))


def test_whole_numbers_of_numpy_and_torch_count_as_their_value():
    assert seed_host((np.int64(7), torch.tensor(3))) == seed_host((7, 3))


def test_another_process_comes_to_the_same_seed():
    code = "from tpukit.essentials.data.seeding import seed_host; print(seed_host((7, 0, 3)))"
    said = subprocess.check_output(
        [sys.executable, "-c", code], text=True, cwd=Path(__file__).parents[3]
    )
    assert int(said) == seed_host((7, 0, 3))
