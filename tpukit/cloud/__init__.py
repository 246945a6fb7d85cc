"""Run notebooks as jobs on a TPU, run over several hosts, and check the health of a TPU."""

from tpukit.cloud import ray_train
from tpukit.cloud.answers import CloudError
from tpukit.cloud.job import CellFailedError, Job, JobFailedError, Result, find, jobs, submit
from tpukit.cloud.target import JobOptions
from tpukit.cloud.tpu_health import Health, health, local_health

__all__ = [
    "CellFailedError", "CloudError", "Health", "Job", "JobFailedError", "JobOptions", "Result",
    "find", "health", "jobs", "local_health", "ray_train", "submit",
]  # fmt: skip
