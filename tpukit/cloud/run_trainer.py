"""What a trainer's bundle does when it is run, `python trainer.zip`: its function on every core of the machine."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpukit.cloud.contents import load_trainer
from tpukit.cloud.folders import checkpoint_folder
from tpukit.essentials.machine import prepare
from tpukit.essentials.run import Run, launch


def run_trainer(
    module: str,
    function: str,
    arguments: Sequence[str],
    *,
    environ: Mapping[str, str] = os.environ,
    mount: Path = Path("/gcs"),
) -> Run:
    """Launch the function with its arguments, one JSON list, and print what core 0 returned.

    On Vertex AI in the folder of the job's checkpoints: the relative folder that `fit` is given in a notebook is then
    written in the bucket, and found there when the job is started again.
    """
    values = json.loads(arguments[0]) if arguments else []
    if environ.get("AIP_CHECKPOINT_DIR"):
        folder = checkpoint_folder("", environ=environ, mount=mount)
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
    prepare()
    run = launch(load_trainer(module, function), *values, progress="text")
    print(run, f"core 0: {run.results[0]!r}", sep="\n", flush=True)
    return run
