"""The number of GPUs that a process may use, from the driver's folder and CUDA_VISIBLE_DEVICES."""

import pytest

from tpukit.accelerators import cuda
from tpukit.accelerators.cuda import count

# CUDA uses the devices before the first invalid index, and no other.
VISIBLE = {
    None: 4,
    "": 0,
    "0,1": 2,
    " 2 , 3 ": 2,
    "0,-1,1": 1,
    "-1": 0,
    "-1,0": 0,
    "1,,2": 1,
    "3,4,0": 1,
    "0,NoDevFiles,1": 1,
    "0,1,2,3,4": 4,
    "GPU-8932f937,GPU-1b2c3d4e": 2,
}


@pytest.mark.parametrize("value", VISIBLE)
def test_gpus_behind_an_invalid_index_are_not_visible(tmp_path, value):
    for number in range(4):
        (tmp_path / str(number)).mkdir()
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert count(environ, tmp_path) == VISIBLE[value]


def test_a_machine_without_the_driver_has_no_gpu(tmp_path):
    assert count({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path / "none") == 0


def test_without_a_gpu_the_fix_is_another_backend(monkeypatch):
    monkeypatch.setattr(cuda, "count", lambda: 0)
    with pytest.raises(ValueError, match="this machine has 0 GPUs") as refused:
        cuda.CudaRuntime().topology(None, None)
    assert refused.value.fact.startswith("backend='cuda' is not supported")
    assert refused.value.fix.startswith("backend='cpu'")
