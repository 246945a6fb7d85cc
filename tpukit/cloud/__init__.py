"""The same worker function as a job; many hosts; the health of a TPU."""

from tpukit.cloud import ray_train, vertex
from tpukit.cloud.answers import CloudFailed
from tpukit.cloud.bundle import Bundle
from tpukit.cloud.tpu_health import Health, health, local_health

__all__ = ["Bundle", "CloudFailed", "Health", "health", "local_health", "ray_train", "vertex"]
