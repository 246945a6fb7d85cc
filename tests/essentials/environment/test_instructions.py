from dataclasses import replace

import pytest
from helpers.machines import COLAB

from tpukit.essentials.environment.instructions import (
    how_to_get_a_tpu,
    how_to_restart,
    how_to_start_afresh,
)


@pytest.mark.parametrize(
    ("platform", "tpu", "restart", "afresh"),
    [
        (
            "Colab",
            "Runtime > Change runtime type > v5e-1 TPU",
            "Runtime > Restart session",
            "Disconnect and delete",
        ),
        (
            "Kaggle",
            "Settings > Accelerator > TPU v5e-8",
            "Run > Restart & clear",
            "Run > Factory reset",
        ),
        ("Vertex AI", "ct5lp-hightpu-8t", "restart the kernel", "a fresh environment"),
        ("TPU VM", "on Colab", "Kernel > Restart", "a fresh environment"),
        ("laptop", "on Colab", "Kernel > Restart", "a fresh environment"),
    ],
)
def test_every_platform_has_its_own_clicks(platform, tpu, restart, afresh):
    machine = replace(COLAB, platform=platform)
    assert tpu in how_to_get_a_tpu(machine)
    assert restart in how_to_restart(machine)
    assert afresh in how_to_start_afresh(machine)
