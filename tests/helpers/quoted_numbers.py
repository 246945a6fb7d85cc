"""The numbers in the text of a notebook that are about its result, and the outputs that they quote.

A decimal number in a text cell is either in a quote here, and must agree with the stored output, or
it is in OTHER_NUMBERS, which says where it comes from.
"""

import re
from typing import NamedTuple

NUMBER = r"\d[\d,]*(?:\.\d+)?"


class Quote(NamedTuple):
    """A sentence of a text cell, and the outputs that have its numbers."""

    text: str  # with {} for each number
    outputs: list[str]  # a regular expression with one group for each number, in their order


QUOTES = {
    "02_every_core": [
        Quote(
            "a validation loss of {} after the first epoch and {} after the twelfth",
            [r"epoch 1: .*valid_loss ([\d.]+)", r"epoch 12: .*valid_loss ([\d.]+)"],
        ),
    ],
    "06_exams_and_submission": [
        Quote(
            "With {} exams to train on, both networks ({} and {}) are worse than the frequencies ({})",
            [
                r"\ntrain +(\d+)",
                r"'single images, their mean for the exam': ([\d.]+)",
                r"exams, read along the body ([\d.]+)",
                r"'prior_loss': ([\d.]+)",
            ],
        ),
    ],
    "07_your_own_ct_exams": [
        Quote(
            "For the {} exams held out here, the AUROC is between {} and {}",
            [
                r"ROC .*of (\d+) exams positive",
                r"95 % interval ([\d.]+) to",
                r"95 % interval [\d.]+ to ([\d.]+)",
            ],
        ),
    ],
    "10_profile_a_step": [
        Quote("a step that is {} times as fast", [r"([\d.]+) times as many images per second"]),
        Quote("the overlap fell from {} to", [r"fold=1: overlap ([\d.]+)"]),
    ],
    "11_why_is_it_slow": [
        Quote(
            "here {} became {} and {}, and the small batch had {}",
            [
                r"at the end: .*, same rate ([\d.]+),",
                r"at the end: .*, rate x 8, warmup ([\d.]+),",
                r"at the end: .*, LARS, warmup (\d\.\d+)",
                r"at the end: batch 16 ([\d.]+),",
            ],
        ),
    ],
    "12_lightning": [
        Quote("On two cores 32 steps in place of {}", [r"launch\(train\) +2 +(\d+)"]),
        Quote("in place of {}: a larger batch", [r"launch\(train\) +2 +\d+ +[\d.]+ +([\d.]+)"]),
    ],
}

ARITHMETIC = "follows from the other numbers of the sentence, or of the parameters"
OTHER_RUN = "of a run with other parameters, which the text names"
SETTING = "a setting, or a number in the code"
PUBLISHED = "published, with a link"
EVIDENCE = "in docs/evidence.md"
OTHER_NUMBERS = {
    "00_quickstart": {"0.33": ARITHMETIC},
    "01_setup": dict.fromkeys(["3.7", "2.2"], OTHER_RUN),
    "02_every_core": dict.fromkeys(["0.776", "0.420"], OTHER_RUN),
    "03_before_you_have_a_tpu": {
        **dict.fromkeys(["2.1", "1.7", "62.8"], EVIDENCE),
        **dict.fromkeys(["13.9", "9.2", "41.9", "0.3", "0.5", "0.11", "0.02"], ARITHMETIC),
        **dict.fromkeys(["1.5", "9.60"], SETTING),
    },
    "04_look_at_ct": {"2.3": ARITHMETIC},
    "06_exams_and_submission": {
        **dict.fromkeys(["0.0736", "0.5", "0.6", "0.9"], SETTING),
        **dict.fromkeys(["0.2", "3.7", "0.3"], ARITHMETIC),
        **dict.fromkeys(["0.3130", "0.2429", "0.4264"], EVIDENCE),
    },
    "07_your_own_ct_exams": {"0.5": ARITHMETIC},
    "08_your_own_images": {
        "0.25": ARITHMETIC,
        **dict.fromkeys(["0.45", "0.85", "0.65", "0.10"], SETTING),
    },
    "09_feed_the_chip": {
        **dict.fromkeys(["13.85", "14.4", "5.5"], EVIDENCE),
        **dict.fromkeys(["1.5", "9.2"], ARITHMETIC),
        **dict.fromkeys(["5.4", "1.3", "1.2"], OTHER_RUN),
        "125.82": PUBLISHED,
    },
    "10_profile_a_step": {"0.08": OTHER_RUN},
    "11_why_is_it_slow": {
        **dict.fromkeys(["2.8", "2.9", "0.9", "0.05"], SETTING),
        **dict.fromkeys(["0.17", "0.10", "0.77"], OTHER_RUN),
    },
    "12_lightning": {"0.10": PUBLISHED, "0.79": OTHER_RUN},
    "14_larger_than_a_chip": {
        "1.6": "test_notebooks.py counts the weights of the large model",
        "15.75": EVIDENCE,
    },
}


def text_cells(notebook: dict) -> list[str]:
    """Return the text cells without code and addresses."""
    texts = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            text = re.sub(r"```.*?```|`[^`\n]*`", "``", "".join(cell["source"]), flags=re.DOTALL)
            texts.append(re.sub(r"\]\([^)]*\)", "]", text))
    return texts


def output_text(notebook: dict) -> str:
    """Return all outputs as plain text; that of a figure describes it."""
    parts = []
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            parts.append("".join(output.get("text", "")))
            parts.append("".join(output.get("data", {}).get("text/plain", "")))
    return "\n".join(parts)


def wrong_quotes(notebook: dict, quotes: list[Quote]) -> list[str]:
    """Return a line for each quote that is not in the text, or whose output has another number."""
    texts = "\n".join(text_cells(notebook))
    outputs = output_text(notebook)
    wrong = []
    for quote in quotes:
        found = re.search(re.escape(quote.text).replace(r"\{\}", f"({NUMBER})"), texts)
        if not found:
            wrong.append(f"no text cell has: {quote.text}")
            continue
        for number, pattern in zip(found.groups(), quote.outputs, strict=True):
            output = re.search(pattern, outputs)
            if not output:
                wrong.append(f"no output has {pattern}, which the text quotes as {number}")
            elif number != as_quoted(output[1], number):
                wrong.append(f"the text has {number}, and the output {output[1]}: {found[0]}")
    return wrong


def as_quoted(output: str, number: str) -> str:
    """Return a number of an output with the digits of the number that quotes it."""
    digits = len(number.partition(".")[2])
    return f"{float(output.replace(',', '').rstrip('.')):,.{digits}f}"


def unexplained_numbers(notebook: dict, quotes: list[Quote], others: dict[str, str]) -> list[str]:
    """Return the decimal numbers of the text that are in no quote and not among the others."""
    text = "\n".join(text_cells(notebook))
    for quote in quotes:
        text = re.sub(re.escape(quote.text).replace(r"\{\}", NUMBER), "", text)
    numbers = re.findall(r"(?<![\w.])\d[\d,]*\.\d+(?![\w.]*\w)", text)
    return [number for number in numbers if number not in others]
