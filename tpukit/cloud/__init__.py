"""Beyond the notebook: the cloud's word about a TPU, and the same worker function as a job."""
