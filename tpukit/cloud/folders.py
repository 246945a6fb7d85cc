"""Where a job keeps what must outlive its machine: the folders that Vertex AI names, as they are mounted."""

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

_MOUNT = Path("/gcs")  # where Vertex AI mounts every bucket that the job's account may read


def mounted(address: str | os.PathLike, *, mount: Path = _MOUNT) -> Path:
    """Return gs://bucket/folder as a Vertex AI job sees it, /gcs/bucket/folder, and any other path as it is."""
    if not str(address).startswith("gs://"):
        return Path(address)
    return mount / PurePosixPath(str(address).removeprefix("gs://"))


def checkpoint_folder(
    otherwise: str | os.PathLike, *, environ: Mapping[str, str] = os.environ, mount: Path = _MOUNT
) -> Path:
    """Return the folder for the checkpoints of this job (AIP_CHECKPOINT_DIR), and elsewhere than on Vertex AI another.

    `fit(..., folder=checkpoint_folder("runs/mine"))` continues there when the job is started again.
    """
    return mounted(environ.get("AIP_CHECKPOINT_DIR") or otherwise, mount=mount)


def model_folder(
    otherwise: str | os.PathLike, *, environ: Mapping[str, str] = os.environ, mount: Path = _MOUNT
) -> Path:
    """Return the folder for the trained model of this job (AIP_MODEL_DIR), and elsewhere than on Vertex AI another."""
    return mounted(environ.get("AIP_MODEL_DIR") or otherwise, mount=mount)
