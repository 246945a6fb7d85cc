"""What has to be said beside every picture: not for clinical use, whose data it is, and what a phantom is."""

import html
from pathlib import Path

from tpukit.pe.phantoms.drawing import PhantomFolder

NOT_FOR_CLINICAL_USE = "Not for clinical use: no output of this kit may guide the care of a patient."
# https://github.com/RSNA/AI-Challenge-Data/wiki: the terms of use, and the paper to cite.
LICENCE = (
    "Data: the RSNA Pulmonary Embolism CT Dataset. Non-commercial use only, and nobody may try to find out who the "
    "patients are. Cite: Colak E. et al., The RSNA Pulmonary Embolism CT Dataset, Radiology: Artificial Intelligence "
    "2021; 3(2), doi 10.1148/ryai.2021200254."
)
PHANTOM = (
    "These are phantoms: chest CTs that this kit draws from a few hundred curves and a seed. They show no patient, the "
    "emboli are where they were drawn, and a network trained on them has learned nothing about medicine."
)


class Notice(str):
    """A text that a notebook shows as a paragraph."""

    def _repr_html_(self) -> str:
        return f'<p style="font-size:13px;opacity:.85;max-width:60em">{html.escape(self)}</p>'


def notice(folder) -> Notice:
    """Return what has to be said beside pictures of this data: the use, and its licence, or what a phantom is.

    Args:
        folder: of the data: where `phantom` drew, or where the competition's files are.
    """
    is_phantom = (Path(folder) / PhantomFolder.manifest_name).is_file()
    return Notice(f"{NOT_FOR_CLINICAL_USE} {PHANTOM if is_phantom else LICENCE}")
