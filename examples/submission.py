"""Predict exams with the two networks of notebook 06, without internet.

    python submission.py --table test.csv --images test --networks folder --max-time 8h

The script reads the DICOM files of test.csv and writes submission.csv. Every image and exam gets an
answer, because the competition accepts no submission with a missing row:

    image            answered by
    readable         both networks; the first alone, if the second fails or the time is over
    odd, unreadable  the answers of its neighbours in the same exam
    exam unreadable  how often each label is true in training

submission-report.csv lists the answers that do not come from both networks, with the reasons. A
submission of the means is written first, so there is one whenever test.csv can be read.

`make kaggle-bundle` puts this file next to the wheels of tpukit and the networks. Kaggle runs its
notebook offline.
"""

import argparse
import contextlib
import csv
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

STUDY = "StudyInstanceUID"
IMAGE = "SOPInstanceUID"
# The keys of settings.json: exactly these.
SETTINGS = ("images", "features", "exam_slices", "frequencies", "trained_on")
IN_TIME = 0.9  # of --max-time; the rest is for the exams that are being computed then
NOT_REACHED = "the networks did not get as far"


def main() -> int:
    """Answer, write and check; return 1 if the networks answered no exam."""
    options = arguments().parse_args()

    import pandas

    import tpukit
    from tpukit import pe

    began = time.monotonic()
    table = read_table(options.table)
    frequencies = mean_answers(options.networks)
    index = table.assign(path="", position=math.nan, odd=NOT_REACHED)
    # The means first: memory may run out, and Kaggle may take the machine. A read-only folder is
    # found now, and not after hours.
    report = Report()
    report.tell("all exams", "the mean", NOT_REACHED, quiet=True)
    write(fill(index, index.iloc[:0], frequencies, report), report, options.to)
    report = Report()
    parts = []
    try:
        until = math.inf
        if options.max_time:
            until = began + IN_TIME * tpukit.training.parse_duration(options.max_time)
        tpukit.setup()
        networks = Networks.load(options.networks)
        index = pe.index_dicom(table, options.images, missing="keep")
        for part in answer(index, options, networks, report, lambda: time.monotonic() > until):
            parts.append(part)
            # To the disk at once, because Kaggle may end the process at any time.
            draft = Report(list(report.rows), quiet=True)
            draft.tell("all other exams", "the mean", NOT_REACHED)
            write(fill(index, pandas.concat(parts), frequencies, draft), draft, options.to)
    except Exception as error:  # any error: there must be a submission
        report.tell("all other exams" if parts else "all exams", "the mean", error)
    answered = pandas.concat(parts) if parts else index.iloc[:0]

    path = write(fill(index, answered, frequencies, report), report, options.to)
    checked = pe.read_submission(path, table)
    counts = {
        "studies": checked[STUDY].nunique(),
        "images": len(checked),
        "inconsistent": len(pe.check_consistency(checked)),
        **report.counts(),
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    print(json.dumps(counts))
    return int(not parts)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--table", type=Path, required=True, help="test.csv: the identifiers of every image"
    )
    parser.add_argument(
        "--images", type=Path, required=True, help="the folder of their DICOM files"
    )
    parser.add_argument(
        "--networks", type=Path, required=True, help="slices.pt, exams.pt and settings.json"
    )
    parser.add_argument("--to", type=Path, default=Path("submission.csv"))
    parser.add_argument("--batch-size", type=int, default=64, help="slices per core and step")
    parser.add_argument("--exams", type=int, default=128, help="that are on the disk at once")
    parser.add_argument(
        "--max-time", help="8h: after nine tenths of it, the mean answers the other exams"
    )
    parser.add_argument("--cores", type=int, help="1; without it, all")
    return parser


def read_table(path: Path):
    """Return test.csv, a row per image.

    Rows without an identifier and repeated images are left out, and their number is printed.
    """
    import pandas

    # Only an empty cell is missing: an identifier may look like a number, or be the text "NA".
    given = pandas.read_csv(
        path, dtype=str, keep_default_na=False, na_values=[""], skipinitialspace=True
    )
    table = given.dropna(subset=[STUDY, IMAGE]).drop_duplicates(IMAGE, ignore_index=True)
    left_out = len(given) - len(table)
    if left_out:
        print(
            f"left out {left_out:,} rows of {path}: {STUDY} or {IMAGE} is missing, "
            "or the image has a row already"
        )
    # Without other columns, such as labels: they would count as answers.
    return table.filter([STUDY, "SeriesInstanceUID", IMAGE])


@dataclass
class Report:
    """The images and exams that both networks did not answer, with the reasons.

    Attributes:
        rows: (image or exam, answered by, reason).
        quiet: print nothing.
    """

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    quiet: bool = False

    def tell(self, what: str, by: str, why: Exception | str, *, quiet: bool = False) -> None:
        """Add a row and print it, unless this call or the report is quiet."""
        if isinstance(why, Exception):
            why = f"{type(why).__name__}: {' '.join(str(why).split())}"
        self.rows.append((what, by, why))
        if not (quiet or self.quiet):
            print(f"{what}: answered by {by}, as {why}")

    def write(self, path: Path) -> None:
        """Write the rows as CSV."""
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([("what", "answered_by", "why"), *self.rows])

    def counts(self) -> dict[str, int]:
        """Return the numbers of images and exams that were answered by something else."""
        # Rows for many exams ("3 exams") have a space in their name; identifiers have none.
        by = [by for what, by, _ in self.rows if " " not in what]
        return {
            "answered_by_neighbours": by.count("its neighbours"),
            "answered_by_first_network": by.count("the first network"),
            "answered_by_mean": by.count("the mean"),
        }


@dataclass
class Networks:
    """The two networks, and the preparation of their images.

    Attributes:
        settings: of settings.json.
        prepared: the `Preparation` of the images.
        resnet: the first network, of slices.
        exams: the second network, of exams.
    """

    settings: dict
    prepared: object
    resnet: object
    exams: object

    @classmethod
    def load(cls, folder: Path) -> "Networks":
        """Read the networks and their settings.

        Raises:
            ValueError: the settings are not those of notebook 06, so answers could be wrong
                without an error.
        """
        import torch

        from tpukit import pe

        settings = json.loads((folder / "settings.json").read_text())
        unknown = sorted(settings.keys() - set(SETTINGS))
        missing = sorted(set(SETTINGS) - settings.keys())
        if unknown or missing:
            raise ValueError(f"{folder}/settings.json: unknown {unknown}, missing {missing}")
        slices = pe.resnet34(folder / "slices.pt")
        exams = pe.ExamNetwork(settings["features"])
        # `resnet34` draws a new last layer if the file's has other outputs. Here all must fit.
        for network, name in ((slices, "slices.pt"), (exams, "exams.pt")):
            state = torch.load(folder / name, map_location="cpu", weights_only=True)
            network.load_state_dict(state)
        return cls(settings, pe.Preparation.read(settings["images"]), slices, exams)


def answer(
    index, options, networks: Networks, report: Report, late: Callable[[], bool]
) -> Iterator:
    """Yield tables with the answers to all images that are not odd, some exams at a time."""
    from tpukit import pe

    # A pack needs labels. They are unknown here, and nothing reads these.
    rows = index[index.odd == ""].assign(**dict.fromkeys(pe.LABELS, 0))
    studies = list(dict.fromkeys(rows[STUDY]))
    starts = range(0, len(studies), options.exams)
    waiting = [studies[first : first + options.exams] for first in starts]
    waiting.reverse()  # the next group is taken from the end
    while waiting:
        some = waiting.pop()
        if late():
            left = len(some) + sum(map(len, waiting))
            why = f"nine tenths of the {options.max_time} are over"
            report.tell(f"{left:,} exams", "the mean", why)
            return
        mine = rows[rows[STUDY].isin(some)]
        with contextlib.ExitStack() as stack:
            try:
                work = stack.enter_context(tempfile.TemporaryDirectory())
                slices, table = pack(mine, Path(work), options, networks)
            except Exception as error:  # a file of one exam must not cost the answers of others
                if len(some) == 1:
                    report.tell(some[0], "the mean", error, quiet=True)
                    continue
                half = len(some) // 2
                print(
                    f"{len(some)} exams could not be packed together, "
                    f"and are tried in two parts: {error}"
                )
                waiting += [some[half:], some[:half]]
                continue
            try:
                yield ask(slices, table, options, networks, report, late)
            except Exception as error:
                report.tell(f"{len(some):,} exams", "the mean", error)


def pack(rows, work: Path, options, networks: Networks) -> tuple:
    """Return the slices that can be read, prepared as for the training, and their rows."""
    import tpukit

    records = networks.prepared.pack(options.images, work / "records", rows, damaged=1.0)
    slices = tpukit.PackedImages(records.folder, networks.prepared.image_size, exact=True)
    networks.prepared.check(slices)
    return slices, rows.iloc[slices.rows].reset_index(drop=True)


def ask(slices, table, options, networks: Networks, report: Report, late: Callable[[], bool]):
    """Return the answers of both networks.

    They are those of the first network alone if the time is over, or if the second network fails.
    """
    import torch

    import tpukit
    from tpukit import pe

    run = tpukit.launch(see, networks.resnet, slices, options.batch_size, cores=options.cores)
    # Through float16, in which notebook 06 keeps features: so the answers are the same.
    seen = {name: value.half().float() for name, value in run.results[0].items()}
    features = torch.cat([seen["features"], seen["logits"]], dim=1)
    is_number = features.isfinite().all(dim=1)
    if not is_number.any():
        raise ArithmeticError("what the first network says is no number")
    features = features[is_number]
    logits = seen["logits"][is_number]
    table = table[is_number.numpy()].reset_index(drop=True)
    try:
        if late():
            raise TimeoutError(f"nine tenths of the {options.max_time} are over")
        unlabelled = table.drop(columns=list(pe.LABELS))
        # Every exam must be answered, also one that the scanner left irregular, which is printed.
        exams = pe.ExamSequences(
            unlabelled, features, networks.settings["exam_slices"], irregular="keep"
        )
        outputs = tpukit.launch(read, networks.exams, exams, cores=options.cores).results[0]
        if not all(outputs[name].isfinite().all() for name in ("answers", "images")):
            raise ArithmeticError("what the second network says is no number")
        return exams.table(outputs)
    except Exception as error:
        for study in table[STUDY].unique():
            report.tell(study, "the first network", error)
        return pe.pool_slices(table, logits.sigmoid().numpy())


def see(core, resnet, slices, batch_size: int):
    """Return the first network's logits and features of every slice."""
    import tpukit
    from tpukit import pe

    network = pe.SliceFeatures(core.model(resnet))
    batches = core.batches(slices, batch_size=batch_size)
    return tpukit.predict(core, network, batches, preprocess=pe.normalize)


def read(core, network, exams):
    """Return the second network's outputs for every exam."""
    import tpukit

    batches = core.batches(exams, batch_size=min(32, len(exams)))
    return tpukit.predict(core, core.model(network), batches)


def write(answers, report: Report, to: Path) -> Path:
    """Write the submission and its report, and return the path of the submission."""
    from tpukit import pe

    to.parent.mkdir(parents=True, exist_ok=True)
    path = pe.write_submission(pe.make_consistent(answers), to)
    report.write(path.with_name(f"{path.stem}-report.csv"))
    return path


def mean_answers(folder: Path) -> dict[str, float]:
    """Return how often each label is true in training; 0.5 if the settings do not have that."""
    from tpukit.pe import LABELS

    try:
        kept = json.loads((folder / "settings.json").read_text())["frequencies"]
        found = {name: float(kept[name]) for name in LABELS}
        wrong = {name: value for name, value in found.items() if not 0 <= value <= 1}
        if wrong:
            raise ValueError(wrong)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(
            "how often each label was true in training is not known: 0.5 is used instead "
            f"({error!r})"
        )
        return dict.fromkeys(LABELS, 0.5)
    return found


def fill(index, answered, frequencies: dict, report: Report):
    """Return answers to all images.

    An odd image gets its answer from its neighbours, and an exam without any answer the mean.

    Args:
        index: of `index_dicom`, all rows.
        answered: the answers of the networks, a row per image.
        frequencies: of each label, in training.
        report: gets a row for each answer that is filled in.
    """
    from tpukit.pe import LABELS

    reported = {what for what, *_ in report.rows}
    answers = answered.reindex(columns=[IMAGE, *LABELS]).drop_duplicates(IMAGE)
    given = index[[STUDY, IMAGE, "position", "odd"]].merge(answers, on=IMAGE, how="left")
    first, *others = LABELS  # the first label is of an image, the others are of the exam
    for study, exam in given.groupby(STUDY, sort=False):
        has_answer = exam[first].notna()
        seen = exam[has_answer]
        odd = exam[~has_answer]
        if seen.empty:
            why = "its pixels cannot be read, or the networks did not get as far"
            if (exam.odd != "").all():
                why = "none of its images can be read"
            if study not in reported:
                report.tell(study, "the mean", why, quiet="all exams" in reported)
            given.loc[exam.index, list(LABELS)] = [frequencies[name] for name in LABELS]
        elif len(odd):
            for image, why in zip(odd[IMAGE], odd.odd, strict=True):
                why = why or "its pixels cannot be read, or say no number"
                report.tell(image, "its neighbours", why)
            given.loc[odd.index, others] = seen[others].iloc[0].tolist()
            given.loc[odd.index, first] = between(odd.position, seen.position, seen[first])
    return given[[STUDY, IMAGE, *LABELS]]


def between(places, positions, answers):
    """Return answers at some places, interpolated between the answers on both sides.

    A slice without a file has no place. It leaves a gap between two others, whose mean it gets. If
    there is no gap, it gets the mean of all.

        positions    0.0  1.0  2.0        4.0      spacing 1, so a slice is missing at 3.0
        answers      0.1  0.2  0.6        0.8      it gets 0.7

    Args:
        places: (n,) of the images without an answer, in mm; NaN if it is not known.
        positions: (m,) of the images with an answer, in mm.
        answers: (m,) theirs.
    """
    import numpy

    order = numpy.argsort(positions.to_numpy(), kind="stable")
    at = positions.to_numpy()[order]
    given = answers.to_numpy()[order]
    steps = numpy.diff(at)
    # The lower median: of two steps, one may be that of the gap.
    usual = numpy.quantile(steps, 0.5, method="lower") if len(steps) else 0.0
    gaps = []
    for number in numpy.flatnonzero(steps > 1.5 * usual):
        # An odd image with a known place fills its gap, which then is not that of another.
        is_taken = places.between(at[number], at[number + 1]).any()
        if not is_taken:
            gaps.append(number)
    lost = given.mean()
    if gaps:
        lost = (given[gaps] + given[numpy.add(gaps, 1)]).mean() / 2
    return numpy.where(places.isna(), lost, numpy.interp(places.fillna(0), at, given))


if __name__ == "__main__":
    sys.exit(main())
