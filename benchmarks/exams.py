"""Measure the challenge's score at the competition's size, in one process.

The 7,279 exams and 1,790,594 images are synthetic.

Scored, repaired, written as submission.csv, read back with every check, and scored again. Seconds
are those of the clock, and of the processor, which other work on the machine does not lengthen as
much. The memory is the most that the process ever held, its imports and the tables themselves
included. The scores before and after the file must be equal to the last digit.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

# of the competition
ROWS = 1_790_594
STUDIES = 7_279


def main() -> None:
    """Measure, print a table, and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--studies", type=int, default=STUDIES)
    options = parser.parse_args()
    from tpukit import pe
    from tpukit.essentials.environment.resources import peak_memory

    labels, predictions = make_up(options.rows, options.studies)
    seconds = {}

    def timed(name, function, *arguments):
        began = time.perf_counter(), time.process_time()
        value = function(*arguments)
        seconds[name] = time.perf_counter() - began[0], time.process_time() - began[1]
        clock, processor = seconds[name]
        print(
            f"{name:28}{clock:8.1f} s{processor:10.1f} s{peak_memory() / 1e9:8.2f} GB", flush=True
        )
        return value

    print(
        f"{options.studies:,} exams, {options.rows:,} images\n"
        f"{'':28}{'clock':>10}{'processor':>12}{'peak':>11}"
    )
    timed("score", pe.challenge_loss, labels, predictions)
    scoring = peak_memory()
    timed("name the contradictions", pe.check_consistency, predictions)
    repaired = timed("repair them", pe.make_consistent, predictions)
    with tempfile.TemporaryDirectory() as folder:
        path = timed(
            "write submission.csv", pe.write_submission, repaired, Path(folder) / "submission.csv"
        )
        read = timed("read and check it", pe.read_submission, path, labels)
    before = pe.challenge_loss(labels, repaired)
    after = pe.challenge_loss(labels, read)
    if before != after or len(pe.check_consistency(read)):
        raise ValueError(f"the file changed the answers: {before} before, {after} after")
    clock, processor = (round(value, 2) for value in seconds["score"])
    measured = {
        "score_s": clock,
        "score_processor_s": processor,
        "score_gb": round(scoring / 1e9, 2),
    }
    print(json.dumps({"studies": options.studies, "rows": options.rows} | measured))


def make_up(rows: int, studies: int):
    """Return consistent labels and some inconsistent predictions, in the competition's layout."""
    import numpy as np
    import pandas as pd

    from tpukit import pe
    from tpukit.pe.labels import EXAM_LABELS

    random = np.random.default_rng(0)
    exam = np.sort(
        np.concatenate([np.arange(studies), random.integers(studies, size=rows - studies)])
    )
    uids = np.array([f"{number:012x}" for number in random.permutation(studies)], dtype=object)
    images = np.array([f"{number:012x}" for number in random.permutation(rows)], dtype=object)
    ids = pd.DataFrame({"StudyInstanceUID": uids[exam], "SOPInstanceUID": images})
    positive = random.random(studies) < 0.33
    answers = dict.fromkeys(EXAM_LABELS, np.zeros(studies))
    answers["negative_exam_for_pe"] = (~positive).astype(float)
    answers["rv_lv_ratio_lt_1"] = answers["central_pe"] = positive.astype(float)
    present = positive[exam] & (random.random(rows) < 0.2)
    # each of them shows on one image at least
    present[np.flatnonzero(np.diff(exam, prepend=-1))] |= positive
    labels = ids.assign(pe_present_on_image=present.astype(np.uint8))
    labels = labels.assign(**{name: answers[name][exam].astype(np.uint8) for name in EXAM_LABELS})
    predictions = ids.assign(**{pe.LABELS[0]: random.random(rows)})
    predictions = predictions.assign(**{name: random.random(studies)[exam] for name in EXAM_LABELS})
    return labels, predictions


if __name__ == "__main__":
    main()
