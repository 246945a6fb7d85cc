"""The pulmonary-embolism walkthrough: labels, DICOM, phantoms, exams, and the challenge's score.

The data set and the challenge are those of RSNA's STR Pulmonary Embolism Detection (2020). An exam
is one CT examination; the columns of the data set call it a study. Importing this package is fast:
functions import torch, numpy and others when they need them.
"""

from tpukit.pe.activation import attention_in_mask, class_activation, occlusion
from tpukit.pe.activation_figure import show_activation
from tpukit.pe.baselines import pool_slices, position_prior
from tpukit.pe.calibration import calibration_table, fit_temperatures
from tpukit.pe.calibration_figure import show_calibration
from tpukit.pe.challenge import EXAM_WEIGHTS, challenge_loss, exam_loss
from tpukit.pe.consistency import check_consistency, make_consistent
from tpukit.pe.ct import hounsfield, three_windows
from tpukit.pe.data_notice import notice
from tpukit.pe.dicom import read_dicom
from tpukit.pe.dicom_index import index_dicom
from tpukit.pe.dicom_packing import pack_dicom
from tpukit.pe.enhanced_ct import split_enhanced
from tpukit.pe.exam_check import check_exams
from tpukit.pe.exam_figures import show_exams
from tpukit.pe.exam_sequences import ExamSequences
from tpukit.pe.images import PEImages, index_images
from tpukit.pe.labels import COLUMNS, LABELS, WORDS, assign_folds, read_labels
from tpukit.pe.ladder import show_ladder
from tpukit.pe.lungs import lung_box
from tpukit.pe.model import augment, normalize, resnet34
from tpukit.pe.neighbours import NeighbouringSlices
from tpukit.pe.own_exams import read_exams
from tpukit.pe.phantoms.drawing import phantom
from tpukit.pe.phantoms.emboli import embolus_masks, embolus_places
from tpukit.pe.preparation import Preparation
from tpukit.pe.reader import show_study
from tpukit.pe.slice_viewer import Study, show_slices
from tpukit.pe.submission import read_submission, write_submission


def __getattr__(name: str):
    """Return a class that needs torch, and import torch only then."""
    if name in ("ExamNetwork", "SliceFeatures"):
        from tpukit.pe import exam_network

        return getattr(exam_network, name)
    raise AttributeError(f"module 'tpukit.pe' has no attribute {name!r}")


__all__ = [
    "COLUMNS", "EXAM_WEIGHTS", "LABELS", "WORDS", "ExamNetwork", "ExamSequences",
    "NeighbouringSlices", "PEImages", "Preparation", "SliceFeatures", "Study", "assign_folds",
    "attention_in_mask", "augment", "calibration_table", "challenge_loss", "check_consistency",
    "check_exams", "class_activation", "embolus_masks", "embolus_places", "exam_loss",
    "fit_temperatures", "hounsfield", "index_dicom", "index_images", "lung_box", "make_consistent",
    "normalize", "notice", "occlusion", "pack_dicom", "phantom", "pool_slices", "position_prior",
    "read_dicom", "read_exams", "read_labels", "read_submission", "resnet34", "show_activation",
    "show_calibration", "show_exams", "show_ladder", "show_slices", "show_study", "split_enhanced",
    "three_windows", "write_submission",
]  # fmt: skip
