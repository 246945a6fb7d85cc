"""Answer exams with the two networks of notebook 04b, without internet: DICOM files in, submission.csv out.

    python submission.py --table test.csv --images test --networks folder --max-time 8h

Every exam of test.csv is answered: an image that is odd from its neighbours, an exam that cannot be read by how often
each label was true in training. Which, and why, is printed and written beside it, in submission-report.csv. A file with
the means is written first, so only where there is no test.csv there is no submission. `make kaggle-bundle` puts this
file beside the wheels of tpukit and the networks; Kaggle scores its notebook offline.
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

STUDY, IMAGE = "StudyInstanceUID", "SOPInstanceUID"
SETTINGS = (
    "images",
    "features",
    "exam_slices",
    "frequencies",
    "trained_on",
)  # of settings.json, no others
IN_TIME = 0.9  # of --max-time; what is under way then has the rest to end in


def main() -> int:
    """Read the arguments, answer, write and check; 1 where no exam was answered by the networks."""
    options = arguments().parse_args()

    import pandas

    import tpukit
    from tpukit import pe

    began = time.monotonic()
    table, frequencies = read_table(options.table), mean_answers(options.networks)
    index = table.assign(path="", position=math.nan, odd="the networks did not get as far")
    # First the mean, for memory that is used up and a machine that is taken; a folder that is read-only is found now.
    report, parts = Report(), []
    report.tell("all exams", "the mean", "the networks did not get as far", quiet=True)
    write(fill(index, index.iloc[:0], frequencies, report), report, options.to)
    report = Report()
    try:
        until = (
            began + IN_TIME * tpukit.training.parse_duration(options.max_time)
            if options.max_time
            else math.inf
        )
        tpukit.setup()
        networks = Networks.load(options.networks)
        index = pe.index_dicom(table, options.images, missing="keep")
        for part in answer(index, options, networks, report, lambda: time.monotonic() > until):
            parts.append(part)
            # On the disk at once: Kaggle may end the process at any time.
            draft = Report(list(report.rows), quiet=True)
            draft.tell("all other exams", "the mean", "the networks did not get as far")
            write(fill(index, pandas.concat(parts), frequencies, draft), draft, options.to)
    except Exception as error:  # whatever it is, there is a submission
        report.tell("all other exams" if parts else "all exams", "the mean", error)
    said = pandas.concat(parts) if parts else index.iloc[:0]

    checked = pe.read_submission(
        write(fill(index, said, frequencies, report), report, options.to), table
    )
    counts = {"studies": checked[STUDY].nunique(), "images": len(checked)}
    counts |= {"inconsistent": len(pe.check_consistency(checked)), **report.counts()}
    print(json.dumps({**counts, "minutes": round((time.monotonic() - began) / 60, 1)}))
    return int(not parts)


def arguments() -> argparse.ArgumentParser:
    """Return what reads the arguments."""
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
    parser.add_argument("--batch-size", type=int, default=64, help="slices a core and step")
    parser.add_argument("--exams", type=int, default=128, help="that are on the disk at once")
    parser.add_argument(
        "--max-time", help="what is left at nine tenths of it is answered by the mean: 8h"
    )
    parser.add_argument("--cores", type=int, help="None for all there are, or 1")
    return parser


def read_table(path: Path):
    """Return test.csv: a row for each image; rows that lack an identifier, or repeat one, are left out, and told."""
    import pandas

    given = pandas.read_csv(
        path, dtype=str, keep_default_na=False, na_values=[""], skipinitialspace=True
    )
    table = given.dropna(subset=[STUDY, IMAGE]).drop_duplicates(IMAGE, ignore_index=True)
    if left := len(given) - len(table):
        print(
            f"left out {left:,} rows of {path}: {STUDY} or {IMAGE} is missing, or the image has a row already"
        )
    return table.filter(
        [STUDY, "SeriesInstanceUID", IMAGE]
    )  # what else is there is nothing that was asked


@dataclass
class Report:
    """What was not answered by both networks, and why."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    quiet: bool = False

    def tell(self, what: str, by: str, why: Exception | str, *, quiet: bool = False) -> None:
        """Note that an image, an exam, or several were answered by something else, and say so in one line."""
        if isinstance(why, Exception):
            why = f"{type(why).__name__}: {' '.join(str(why).split())}"
        self.rows.append((what, by, why))
        if not (quiet or self.quiet):
            print(f"{what}: answered by {by}, as {why}")

    def write(self, path: Path) -> None:
        """Write all of it."""
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([("what", "answered_by", "why"), *self.rows])

    def counts(self) -> dict[str, int]:
        """Return how many images and exams were answered by something else; what stands for many has no identifier."""
        by = [by for what, by, _ in self.rows if " " not in what]
        names = {
            "its neighbours": "answered_by_neighbours",
            "the first network": "answered_by_first_network",
        }
        return {
            name: by.count(words)
            for words, name in {**names, "the mean": "answered_by_mean"}.items()
        }


@dataclass
class Networks:
    """The two networks, and how their images were prepared."""

    settings: dict
    prepared: object
    resnet: object
    exams: object

    @classmethod
    def load(cls, folder: Path) -> "Networks":
        """Read them; ValueError for settings that are not those of 04b, since answers would be wrong in silence."""
        import torch

        from tpukit import pe

        settings = json.loads((folder / "settings.json").read_text())
        if settings.keys() != set(SETTINGS):
            unknown, missing = (
                sorted(settings.keys() - set(SETTINGS)),
                sorted(set(SETTINGS) - settings.keys()),
            )
            raise ValueError(f"{folder}/settings.json: unknown {unknown}, missing {missing}")
        slices, exams = pe.resnet34(folder / "slices.pt"), pe.ExamNetwork(settings["features"])
        # `resnet34` draws a last layer of its own where the file's has other outputs: here all has to fit.
        for network, file in ((slices, "slices.pt"), (exams, "exams.pt")):
            network.load_state_dict(
                torch.load(folder / file, map_location="cpu", weights_only=True)
            )
        return cls(settings, pe.Preparation.read(settings["images"]), slices, exams)


def answer(
    index, options, networks: Networks, report: Report, late: Callable[[], bool]
) -> Iterator:
    """Yield tables of answers to the images that are not odd, some exams at a time."""
    from tpukit import pe

    # A pack joins labels; nobody knows these yet, and nothing reads them.
    rows = index[index.odd == ""].assign(**dict.fromkeys(pe.LABELS, 0))
    studies = list(dict.fromkeys(rows[STUDY]))
    waiting = [
        studies[first : first + options.exams] for first in range(0, len(studies), options.exams)
    ][::-1]
    while waiting:
        some = waiting.pop()
        if late():
            left = len(some) + sum(map(len, waiting))
            report.tell(
                f"{left:,} exams", "the mean", f"nine tenths of the {options.max_time} are over"
            )
            return
        mine = rows[rows[STUDY].isin(some)]
        with contextlib.ExitStack() as stack:
            try:
                work = stack.enter_context(tempfile.TemporaryDirectory())
                slices, table = pack(mine, Path(work), options, networks)
            except Exception as error:  # nobody has seen these files; what one of them does may not take others along
                if len(some) == 1:
                    report.tell(some[0], "the mean", error, quiet=True)
                    continue
                half = len(some) // 2
                print(
                    f"{len(some)} exams could not be packed together, and are tried in two parts: {error}"
                )
                waiting += [some[half:], some[:half]]
                continue
            try:
                yield ask(slices, table, options, networks, report, late)
            except Exception as error:
                report.tell(f"{len(some):,} exams", "the mean", error)


def pack(rows, work: Path, options, networks: Networks) -> tuple:
    """Return the slices that can be read, prepared as the networks know them, and their rows."""
    import tpukit

    records = networks.prepared.pack(options.images, work / "records", rows, damaged=1.0)
    slices = tpukit.PackedImages(records.folder, networks.prepared.image_size, exact=True)
    networks.prepared.check(slices)
    return slices, rows.iloc[slices.rows].reset_index(drop=True)


def ask(slices, table, options, networks: Networks, report: Report, late: Callable[[], bool]):
    """Return the answers of both networks; of the first alone where the time is over, or the second one fails."""
    import torch

    import tpukit
    from tpukit import pe

    seen = tpukit.launch(
        see, networks.resnet, slices, options.batch_size, cores=options.cores
    ).results[0]
    seen = {
        name: value.half().float() for name, value in seen.items()
    }  # as 04b keeps them: the same answers
    number = torch.cat([seen["features"], seen["logits"]], dim=1).isfinite().all(dim=1)
    if not number.any():
        raise ArithmeticError("what the first network says is no number")
    seen, table = (
        {name: value[number] for name, value in seen.items()},
        table[number.numpy()].reset_index(drop=True),
    )
    try:
        if late():
            raise TimeoutError(f"nine tenths of the {options.max_time} are over")
        features = torch.cat([seen["features"], seen["logits"]], dim=1)
        # Every exam has to be answered, also one that a scanner left irregular: that is printed, and goes on.
        unlabelled = table.drop(columns=list(pe.LABELS))
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
        return pe.pool_slices(table, seen["logits"].sigmoid().numpy())


def see(core, resnet, slices, batch_size: int):
    """Return what the first network says of every slice, and its features."""
    import tpukit
    from tpukit import pe

    batches = core.batches(slices, batch_size=batch_size)
    return tpukit.predict(
        core, pe.SliceFeatures(core.model(resnet)), batches, preprocess=pe.normalize
    )


def read(core, network, exams):
    """Return what the second network says of every exam."""
    import tpukit

    return tpukit.predict(
        core, core.model(network), core.batches(exams, batch_size=min(32, len(exams)))
    )


def write(answers, report: Report, to: Path) -> Path:
    """Write the submission, and the report beside it."""
    from tpukit import pe

    to.parent.mkdir(parents=True, exist_ok=True)
    path = pe.write_submission(pe.make_consistent(answers), to)
    report.write(path.with_name(f"{path.stem}-report.csv"))
    return path


def mean_answers(folder: Path) -> dict[str, float]:
    """Return how often each label was true in training, as far as the settings say it, else 0.5."""
    from tpukit.pe import LABELS

    try:
        kept = json.loads((folder / "settings.json").read_text())["frequencies"]
        found = {name: float(kept[name]) for name in LABELS}
        if wrong := {name: value for name, value in found.items() if not 0 <= value <= 1}:
            raise ValueError(wrong)
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(
            f"how often each label was true in training is not known: 0.5 stands for it ({error!r})"
        )
        return dict.fromkeys(LABELS, 0.5)


def fill(index, said, frequencies: dict, report: Report):
    """Return answers to all images: those that were given, of odd images by their neighbours, else by the mean.

    Args:
        index: of `index_dicom`, all rows.
        said: the answers, a row for each image that was seen.
        frequencies: of each label, in training.
        report: of what is filled in.
    """
    from tpukit.pe import LABELS

    told = {what for what, *_ in report.rows}
    given = index[[STUDY, IMAGE, "position", "odd"]].merge(
        said.reindex(columns=[IMAGE, *LABELS]).drop_duplicates(IMAGE), on=IMAGE, how="left"
    )
    for study, exam in given.groupby(STUDY, sort=False):
        seen, odd = exam[exam[LABELS[0]].notna()], exam[exam[LABELS[0]].isna()]
        if seen.empty:
            why = (
                "none of its images can be read"
                if (exam.odd != "").all()
                else "its pixels cannot be read, or the networks did not get as far"
            )
            if study not in told:
                report.tell(study, "the mean", why, quiet="all exams" in told)
            given.loc[exam.index, list(LABELS)] = [frequencies[name] for name in LABELS]
        elif len(odd):
            for image, why in zip(odd[IMAGE], odd.odd, strict=True):
                report.tell(
                    image, "its neighbours", why or "its pixels cannot be read, or say no number"
                )
            given.loc[odd.index, list(LABELS[1:])] = seen[list(LABELS[1:])].iloc[0].tolist()
            given.loc[odd.index, LABELS[0]] = between(odd.position, seen.position, seen[LABELS[0]])
    return given[[STUDY, IMAGE, *LABELS]]


def between(places, positions, answers):
    """Return the answers at some places, from those on both sides; where a place is not known, from those at the gaps.

    A slice without a file leaves a gap between two others, and these are its neighbours. Without a gap it is the mean.
    """
    import numpy

    order = numpy.argsort(positions.to_numpy(), kind="stable")
    at, given = positions.to_numpy()[order], answers.to_numpy()[order]
    steps = numpy.diff(at)
    # A place that an odd image is known to have is not the gap of another one.
    usual = (
        numpy.quantile(steps, 0.5, method="lower") if len(steps) else 0.0
    )  # of two steps one is beside a lost slice
    wide = [
        k
        for k in numpy.flatnonzero(steps > 1.5 * usual)
        if not places.between(*at[k : k + 2]).any()
    ]
    lost = (given[wide] + given[numpy.add(wide, 1)]).mean() / 2 if wide else given.mean()
    return numpy.where(places.isna(), lost, numpy.interp(places.fillna(0), at, given))


if __name__ == "__main__":
    sys.exit(main())
