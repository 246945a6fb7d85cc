"""Draw docs/data_forms.png, the decision tree of the page "Which form do my data have?".

python docs/data_forms.py
"""

from pathlib import Path
from typing import NamedTuple

from tpukit.essentials.display import figure_style as look

ROOT = Path(__file__).parents[1]
WIDTH = 10.0  # inches
ROW = 0.46  # inches per form of data
LEFT = 0.015  # all other lengths are parts of the width
QUESTION = 0.185
GAP = 0.06
SECOND = LEFT + QUESTION + GAP
ANSWER = SECOND + QUESTION + GAP
CALL = 0.985  # the right edge of the calls
FIRST = "What do\nyou have?"
TABLE = "Image files and a table:\nwhat do its columns say?"
FOLDERS = "Image files in folders:\nwhat are the sub-folders?"
OBJECTS = "Something else:\nwhat holds the images?"


class Form(NamedTuple):
    """A form of data: the question and the answer that lead to it, and the call."""

    question: str
    answer: str
    call: str


FORMS = (
    Form(TABLE, "the class, in one column", 'pack(table, labels="species")'),
    Form(TABLE, "a label in each column", 'pack(table, labels=["age", "ill"])'),
    Form(TABLE, "several tags in one column", 'table.tags.str.get_dummies(" ")'),
    Form(TABLE, "the file of each mask", 'pack(table, masks="mask")'),
    Form(FOLDERS, "the classes", 'pack("photos")'),
    Form(FOLDERS, "splits, such as train", 'pack("photos/train")'),
    Form(FOLDERS, "patients", 'a table with groups="patient"'),
    Form(FOLDERS, "images and masks", 'a table with masks="mask"'),
    Form(OBJECTS, "a dataset or a list", "pack(dataset)"),
    Form(OBJECTS, "TFRecord files", "pack(read_tfrecords(files))"),
    Form(OBJECTS, "CT exams in DICOM files", "pe.pack_dicom(...)"),
)


def draw():
    """Return the figure: the first question, the second ones, and a line per form of data."""
    with look.style():
        figure = look.new_figure(WIDTH, ROW * len(FORMS))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, 1), ylim=(len(FORMS) - 0.5, -0.5))
        axes.set_axis_off()
        middle = (len(FORMS) - 1) / 2
        _box(axes, LEFT, middle, FIRST)
        for question in dict.fromkeys(form.question for form in FORMS):
            rows = [row for row, form in enumerate(FORMS) if form.question == question]
            place = sum(rows) / len(rows)
            _edge(axes, middle, place, right=SECOND)
            _box(axes, SECOND, place, question)
            for row in rows:
                _edge(axes, place, row, right=ANSWER)
        for row, form in enumerate(FORMS):
            axes.text(ANSWER + 0.008, row, form.answer, va="center", fontsize=9)
            code = {"family": "monospace", "fontsize": 8, "color": look.COLORS[0]}
            axes.text(CALL, row, form.call, va="center", ha="right", **code)
        look.describe(figure, "A decision tree from the form of the data to the call of pack.")
        return figure


def _box(axes, left: float, row: float, text: str) -> None:
    """Draw a question."""
    from matplotlib.patches import Rectangle

    height = 0.9
    frame = {"facecolor": look.GRID, "edgecolor": look.RULE, "zorder": 2}
    axes.add_patch(Rectangle((left, row - height / 2), QUESTION, height, **frame))
    middle = left + QUESTION / 2
    axes.text(middle, row, text, ha="center", va="center", fontsize=9, zorder=3)


def _edge(axes, begin: float, end: float, *, right: float) -> None:
    """Draw a line from the row of a question to that of an answer."""
    left = right - GAP
    middle = (left + right) / 2
    path = [left, middle, middle, right]
    axes.plot(path, [begin, begin, end, end], color=look.MUTED, linewidth=0.8, zorder=1)


def main() -> None:
    """Draw and save the figure."""
    file = ROOT / "docs" / "data_forms.png"
    draw().savefig(file, facecolor=look.PAPER, dpi=look.DPI)
    print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
