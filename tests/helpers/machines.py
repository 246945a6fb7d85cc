"""Machines for tests, in place of the one they run on."""

import contextlib
from dataclasses import replace
from unittest import mock

from tpukit.essentials.environment.hardware import MachineInfo

KAGGLE = MachineInfo(
    platform="Kaggle",
    system="Linux x86_64",
    chips=8,
    generation="v5e",
    versions={"python": "3.12.11", "torch": "2.8.0+cpu", "torch_xla": "2.8.0", "libtpu": "0.0.17"},
    memory=300 * 2**30,
    cpus=96,
    shm=16 * 2**30,
    evidence=dict.fromkeys(
        ("platform", "system", "chips", "versions", "memory", "cpus", "shm"), "given by the test"
    ),
)
COLAB = replace(
    KAGGLE,
    platform="Colab",
    chips=1,
    versions={"python": "3.13.5", "torch": "2.9.0+cpu", "torch_xla": "2.9.0", "libtpu": "0.0.21.1"},
)


@contextlib.contextmanager
def on_machine(host: MachineInfo):
    """Have a launch plan for this machine within."""
    with mock.patch.object(MachineInfo, "read", return_value=host):
        yield host
