import subprocess

import pytest

from tpukit.cloud.machines import MACHINE_SPECS, container_lines, runtime_version
from tpukit.cloud.target import JobOptions, JobPlan
from tpukit.profiling import TPUS, find_tpu


@pytest.mark.parametrize(
    ("chip", "machine", "dollars", "accelerator_type", "image"),
    [
        ("v5e-1", ("ct5lp-hightpu-1t", "1x1"), 1.20, "v5litepod-1", "v2-alpha-tpuv5-lite"),
        ("v5e-4", ("ct5lp-hightpu-4t", "2x2"), 4.80, "v5litepod-4", "v2-alpha-tpuv5-lite"),
        ("v5e-8", ("ct5lp-hightpu-8t", "2x4"), 9.60, "v5litepod-8", "v2-alpha-tpuv5-lite"),
        ("v6e-1", ("ct6e-standard-1t", "1x1"), 2.70, "v6e-1", "v2-alpha-tpuv6e"),
        ("v6e-4", ("ct6e-standard-4t", "2x2"), 10.80, "v6e-4", "v2-alpha-tpuv6e"),
        ("v6e-8", ("ct6e-standard-8t", "2x4"), 21.60, "v6e-8", "v2-alpha-tpuv6e"),
        ("v2-8", ("cloud-tpu", "TPU_V2", 8), 4.50, "v2-8", "tpu-ubuntu2204-base"),
        ("v3-8", ("cloud-tpu", "TPU_V3", 8), 8.00, "v3-8", "tpu-ubuntu2204-base"),
        ("v4-8", (), 12.88, "v4-8", "tpu-ubuntu2204-base"),
        ("v5p-8", (), 16.80, "v5p-8", "v2-alpha-tpuv5"),
    ],
)
def test_every_tpu_has_its_machine_price_and_image(chip, machine, dollars, accelerator_type, image):
    one = find_tpu(chip)
    assert tuple(MACHINE_SPECS.get(chip, {}).values()) == machine
    assert one.dollars == pytest.approx(dollars)
    assert (one.accelerator_type, runtime_version(one)) == (accelerator_type, image)


@pytest.mark.parametrize(("grace", "seconds"), [(25.0, 115), (600.0, 690)])
def test_a_container_that_is_told_to_end_has_the_grace_period_to_save(grace, seconds, tmp_path):
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\nexit 0\n")
    docker.chmod(0o755)
    options = JobOptions(grace=grace)
    plan = JobPlan("a", "gcloud", "gs://b/a", find_tpu("v5e-8"), 60, "3.12", "", options)
    lines = container_lines(plan, ["bash", "run.sh"], mounts=[], seconds="60", docker=str(docker))
    assert f" --kill-after={seconds} 60 " in lines
    assert subprocess.run(["bash", "-c", lines]).returncode == 0


def test_the_table_above_is_whole():
    assert len(TPUS) == 10
