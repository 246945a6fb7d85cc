"""The notice that each figure needs: not for clinical use, and the data's licence or origin."""

import html
from pathlib import Path

from tpukit.pe.phantoms.drawing import PhantomFolder

NOT_FOR_CLINICAL_USE = "Not for clinical use: no output of tpukit may guide the care of a patient."
# Terms of use, and the paper to cite: https://github.com/RSNA/AI-Challenge-Data/wiki
LICENCE = (
    "Data: the RSNA Pulmonary Embolism CT Dataset. Non-commercial use only. Do not try to identify "
    "the patients. Cite: Colak E. et al., The RSNA Pulmonary Embolism CT Dataset, Radiology: "
    "Artificial Intelligence 2021; 3(2), doi 10.1148/ryai.2021200254."
)
PHANTOM = (
    "These are phantoms: chest CTs that tpukit draws from a few hundred curves and a seed. They "
    "show no patient, the emboli are where they were drawn, and a network trained on them has "
    "learned nothing about medicine."
)


class Notice(str):
    """A text that a notebook shows as a paragraph."""

    def _repr_html_(self) -> str:
        style = "font-size:13px;opacity:.85;max-width:60em"
        return f'<p style="{style}">{html.escape(self)}</p>'


def notice(folder) -> Notice:
    """Return the text to show with figures: "not for clinical use", and the data's licence.

    For phantoms, the notice has no licence. It says how the phantoms were made.

    Args:
        folder: the folder of the data: a folder that `phantom` wrote, or the competition's files.

    Returns:
        The text, which a notebook shows as a paragraph.
    """
    is_phantom = (Path(folder) / PhantomFolder.manifest_name).is_file()
    origin = PHANTOM if is_phantom else LICENCE
    return Notice(f"{NOT_FOR_CLINICAL_USE} {origin}")
