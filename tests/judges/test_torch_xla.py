"""Tests of torch_xla itself, at the tag of the installed version, on four simulated chips.

The package index has no source of torch_xla. So the tests come from git: from the address below, or
from a clone that TORCH_XLA_SOURCE names. If both are out of reach, nothing of this suite is offered.
"""

import importlib.metadata

import pytest
from judges.checkout import fetch
from simulator import upstream

pytestmark = [pytest.mark.judges, pytest.mark.xla]

TIME_LIMIT = 300  # seconds, for hangs; a file takes half a minute
BATCH_NORM = "test_mp_sync_batch_norm.py"
DDP = "pjrt/test_ddp.py"
# Files with their arguments. The tests of batch normalisation run one by one, because a second
# launch of the same process hangs on the simulator.
FILES = [
    ("pjrt/test_collective_ops_tpu.py",),
    (DDP, "TestPjRtDistributedDataParallel.test_ddp_init"),
    (DDP, "TestPjRtDistributedDataParallel.test_ddp_init_threaded"),
    (DDP, "TestPjRtDistributedDataParallel.test_ddp_correctness_small_net"),
    (DDP, "TestPjRtDistributedDataParallel.test_ddp_correctness_large_net"),
    (DDP, "TestPjRtDistributedDataParallel.test_ddp_correctness_env_init"),
    ("test_gradient_accumulation.py",),
    ("test_mp_all_gather.py",),
    ("test_mp_all_to_all.py",),
    ("test_mp_collective_permute.py",),
    ("test_mp_early_exit.py",),
    ("test_mp_reduce_scatter.py",),
    ("test_mp_rendezvous.py",),
    ("test_mp_save.py",),
    (BATCH_NORM, "TestMpSyncBatchNorm.test_sync_bn1d_no_channel"),
    (BATCH_NORM, "TestMpSyncBatchNorm.test_sync_bn1d_multi_channel"),
    (BATCH_NORM, "TestMpSyncBatchNorm.test_sync_bn2d"),
    (BATCH_NORM, "TestMpSyncBatchNorm.test_sync_bn3d"),
]
NOT_OFFERED = {  # by the last word of the arguments
    "test_mp_rendezvous.py": "torch_xla's own rendezvous refuses the groups of replicas in it",
    "TestPjRtDistributedDataParallel.test_ddp_init_threaded": (
        "it drives all chips from one process; each simulated chip has its own, and torch aborts"
    ),
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Clone the tag of the installed torch_xla, and return the folder of its tests."""
    folder = tmp_path_factory.mktemp("torch_xla")
    tag = f"v{importlib.metadata.version('torch_xla')}"
    fetch(folder, name="torch_xla", address="https://github.com/pytorch/xla", tag=tag)
    return folder / "test"


@pytest.mark.parametrize("file", FILES, ids=" ".join)
def test_a_file_of_torch_xlas_tests(file, checkout, monkeypatch):
    name, *others = file
    if file[-1] in NOT_OFFERED:
        pytest.skip(f"not offered: {NOT_OFFERED[file[-1]]}")
    # Forked processes hang in PyTorch's operations on the CPU if they have several threads.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    is_for_torchrun = "is_torchelastic_launched" in (checkout / name).read_text()
    how = {"torchrun": is_for_torchrun, "timeout": TIME_LIMIT}
    done = upstream.run(checkout / name, *others, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stdout + done.stderr
