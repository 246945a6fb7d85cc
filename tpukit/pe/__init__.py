"""The parts of the pulmonary-embolism walkthrough. Importing this table of contents loads nothing heavy."""

from tpukit.pe.ct import read_dicom, three_windows
from tpukit.pe.images import PEImages, index_images
from tpukit.pe.labels import COLUMNS, LABELS, assign_folds, read_labels
from tpukit.pe.model import augment, normalize, resnet34
from tpukit.pe.phantoms.drawing import phantom

__all__ = [
    "COLUMNS",
    "LABELS",
    "PEImages",
    "assign_folds",
    "augment",
    "index_images",
    "normalize",
    "phantom",
    "read_dicom",
    "read_labels",
    "resnet34",
    "three_windows",
]
