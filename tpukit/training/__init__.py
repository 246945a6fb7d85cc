"""Train, evaluate and predict on all cores; schedule the learning rate; save and resume runs."""

from tpukit.profiling import parse_duration
from tpukit.training import schedules
from tpukit.training.augment import Augment
from tpukit.training.batchnorm import sync_batchnorm
from tpukit.training.buckets import Buckets
from tpukit.training.epoch_time import show_time
from tpukit.training.evaluation import Evaluation, evaluate
from tpukit.training.fit_options import Checkpoints, EarlyStopping, FitOptions
from tpukit.training.history import History
from tpukit.training.history_figure import show_history
from tpukit.training.jobs import Jobs, launch_each
from tpukit.training.log_files import CsvWriter, LogWriters, Row, TensorBoardWriter
from tpukit.training.losses import NonFiniteLossError
from tpukit.training.prediction import predict
from tpukit.training.run_folders import RunFolder, run_folder
from tpukit.training.run_settings import keep_settings
from tpukit.training.stored_predictions import predict_to, read_predictions
from tpukit.training.streams import StreamBatches
from tpukit.training.trainer import fit


def __getattr__(name: str):
    """Import LARS when it is first used, because its class needs torch."""
    if name == "LARS":
        from tpukit.training.lars import LARS

        return LARS
    raise AttributeError(f"module 'tpukit.training' has no attribute {name!r}")


__all__ = [
    "Augment", "Buckets", "Checkpoints", "CsvWriter", "EarlyStopping", "Evaluation", "FitOptions",
    "History", "Jobs", "LARS", "LogWriters", "NonFiniteLossError", "Row", "RunFolder",
    "StreamBatches", "TensorBoardWriter", "evaluate", "fit", "keep_settings", "launch_each",
    "parse_duration", "predict", "predict_to", "read_predictions", "run_folder", "schedules",
    "show_history", "show_time", "sync_batchnorm",
]  # fmt: skip
