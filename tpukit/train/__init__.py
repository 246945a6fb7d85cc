"""Training: fit, evaluate, predict, schedules, checkpoints, resume."""

from tpukit.measure import parse_duration
from tpukit.train import schedules
from tpukit.train.augment import Augment
from tpukit.train.batchnorm import sync_batchnorm
from tpukit.train.buckets import Buckets
from tpukit.train.evaluation import Evaluation, evaluate
from tpukit.train.history import History
from tpukit.train.history_figure import show_history
from tpukit.train.jobs import Jobs, launch_each
from tpukit.train.kept_folder import KeptFolder, keep_folder
from tpukit.train.kept_predictions import predict_to, read_predictions
from tpukit.train.log_files import CsvWriter, Row, TensorBoardWriter
from tpukit.train.losses import NotFinite
from tpukit.train.prediction import predict
from tpukit.train.run_settings import keep_settings
from tpukit.train.streams import StreamBatches
from tpukit.train.trainer import fit


def __getattr__(name: str):
    """Return what is defined with torch, imported when it is asked for: the class of an optimiser."""
    if name == "LARS":
        from tpukit.train.lars import LARS

        return LARS
    raise AttributeError(f"module 'tpukit.train' has no attribute {name!r}")


__all__ = [
    "Augment", "Buckets", "CsvWriter", "Evaluation", "History", "Jobs", "KeptFolder", "LARS", "NotFinite", "Row",
    "StreamBatches", "TensorBoardWriter", "evaluate", "fit", "keep_folder", "keep_settings", "launch_each",
    "parse_duration", "predict", "predict_to", "read_predictions", "schedules", "show_history", "sync_batchnorm",
]  # fmt: skip
