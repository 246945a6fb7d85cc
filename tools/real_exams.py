"""Run the whole pipeline on exams as a hospital sends them.

The pipeline is DICOM files, notebook 06, submission.csv and its score.

    python tools/real_exams.py runs/real-exams

250 to 600 slices of 512 pixels each, emboli of 2 to 6 mm, artefacts, patients who lay on the side,
an exam that lacks a slice, PET series in the folder of the CT. The exams of the notebook's test
fold are answered once more by examples/submission.py, from their files alone, as Kaggle does.
Prints the slices per second of each stage and, last, a line of JSON.

Such emboli show on two or three slices of an exam, of 8 that train: too few to learn what an
embolus is. So the network of slices begins with weights, as with patients: those of `make exams`,
of other phantoms, if they are there.

Every slice near an embolus is drawn, of the others every eighth: copies with identifiers and
positions of their own lie between. Drawing takes 0.19 s a slice of 512 pixels, all of them would
take an hour of one core.
"""

import argparse
import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).parents[1]
EVERY = 8  # of the slices without an embolus nearby that are drawn
LYING = (0, 1, 0, -1, 0, 0)  # a row goes to the patient's back, a column to the right
NOTEBOOK = ROOT / "notebooks" / "06_exams_and_submission.ipynb"
WEIGHTS = ROOT / "runs/exams/runs/06/slices/best.pt"
STAGES = {  # of the notebook, by what the cell calls
    "index the headers": "pe.index_dicom(",
    "pack and cache": "pe.pack_dicom(",
    "train on slices": "launch(train_slices",
    "extract features of all slices": "launch(extract_features",
    "train on exams and read them": "launch(train_exams",
}


def main() -> None:
    """Draw, run the notebook, submit, score; print the stages and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "to", type=Path, help="a folder to make; drawn exams that are there are kept"
    )
    parser.add_argument(
        "--exams", type=int, default=12, help="of which a fifth are the test fold (default: 12)"
    )
    parser.add_argument(
        "--slices", type=int, nargs=2, default=(250, 600), help="of an exam, from and to"
    )
    parser.add_argument("--size", type=int, default=512, help="pixels of a slice")
    parser.add_argument(
        "--set",
        nargs=2,
        action="append",
        default=[],
        help="a parameter of notebook 06, and its value",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        default=WEIGHTS,
        help="that the network of slices begins with, if there",
    )
    options = parser.parse_args()
    began = time.monotonic()
    data = options.to / "data"
    run = options.to / "run"
    shutil.rmtree(run, ignore_errors=True)
    sys.path.insert(0, str(ROOT))

    drawn = not (data / "train.csv").is_file()
    seconds = (
        {"draw": timed(draw, data, options.exams, tuple(options.slices), options.size)}
        if drawn
        else {}
    )
    counts = {stage: count_rows(data / "train.csv") for stage in ["draw", *STAGES]}
    begin = {"slice_epochs": 1, "learning_rate": 1e-4} if options.weights.is_file() else {}
    begin |= {"weights_path": options.weights.resolve()} if begin else {}
    print(
        f"the network of slices begins {f'with {options.weights}' if begin else 'from scratch'}",
        flush=True,
    )
    seconds |= run_notebook(data, run, {**begin, **dict(options.set)})
    counts["submission.py"], truth = give_test_fold(
        data, run / "submission.csv", options.to / "test"
    )
    said = {}
    seconds["submission.py"] = timed(lambda: said.update(submit(options.to / "test", run)))
    for stage, of_stage in seconds.items():
        print(
            f"{stage:34}{of_stage:8.1f} s{counts[stage] / of_stage:10.1f} slices per second",
            flush=True,
        )

    from tpukit import pe

    metrics = json.loads((run / "metrics.json").read_text())
    answers = pe.read_submission(options.to / "test" / "submission.csv", truth)
    print(
        json.dumps(
            {
                "exams": options.exams,
                "slices": counts["draw"],
                "slices_unread": unread(truth),
                "challenge_loss": round(pe.challenge_loss(truth, answers), 4),
                "image_only_loss": metrics["image_only_loss"],
                "prior_loss": metrics["prior_loss"],
                "inconsistent": len(pe.check_consistency(answers)),
                "answered_by_mean": said.get("answered_by_mean", 0),
                "minutes": round((time.monotonic() - began) / 60, 1),
            }
        )
    )


def timed(function, *arguments) -> float:
    """Return how many seconds a call takes."""
    began = time.monotonic()
    function(*arguments)
    return time.monotonic() - began


def count_rows(table: Path) -> int:
    """Return the rows of a table."""
    with open(table, "rb") as lines:
        return sum(1 for _ in lines) - 1


def draw(folder: Path, exams: int, slices: tuple[int, int], size: int, seed: int = 0) -> None:
    """Draw the exams into `<folder>/train`, one process each; then write `train.csv`."""
    from tpukit.pe.labels import COLUMNS
    from tpukit.pe.phantoms.drawing import decide_findings

    shutil.rmtree(folder, ignore_errors=True)
    recipe = {"seed": seed, "studies": exams, "slices": slices[0], "positive": 0.5, "short": True}
    jobs = [
        (
            folder,
            number,
            findings,
            slices[0] + number * 137 % (slices[1] - slices[0] + 1),
            size,
            seed,
        )
        for number, findings in enumerate(decide_findings(recipe))
    ]
    with ProcessPoolExecutor(min(exams, os.cpu_count()), mp_context=get_context("spawn")) as pool:
        tables = list(pool.map(draw_exam, *zip(*jobs, strict=True)))
    # so that the notebook says that these are no patients
    (folder / "phantom.json").write_text('{"complete": false}')
    (folder / "train.csv").write_text(",".join(COLUMNS) + "\n" + "".join(tables))


def draw_exam(folder: Path, number: int, findings, slices: int, size: int, seed: int) -> str:
    """Draw one exam, and return its rows.

    Of every five exams one lacks a slice, one lies on the side, and one has a PET series.
    """
    import numpy as np

    from tpukit.pe.labels import COLUMNS
    from tpukit.pe.phantoms.anatomy import HEIGHT, make_patient
    from tpukit.pe.phantoms.dicom_files import Place, write_dicom
    from tpukit.pe.phantoms.drawing import height_of
    from tpukit.pe.phantoms.scanner import scan

    random = np.random.default_rng([seed, 2, number])
    if findings.positive:  # as many artefacts as in patients, whatever else there is
        findings = replace(findings, motion=random.random() < 0.1)
    patient = make_patient(random, findings)
    lying, lost, pet = (number % 5 == odd for odd in (1, 2, 3))
    study = f"{number:06x}"
    series = f"{number:06x}.1"
    into = folder / "train" / study / series
    into.mkdir(parents=True)
    apart = height_of(0, slices) - height_of(1, slices)
    rows = []
    clean = None
    drawn = 0
    for position in range(slices):
        z = height_of(position, slices)
        heights = (z - apart, z, z + apart)
        near = any(any(map(embolus.at, heights)) for embolus in patient.emboli)
        units = clean
        present = False
        if near or clean is None or position >= drawn + EVERY:
            units, embolus = scan(patient, z, size, random)
            present = bool(embolus.any())
            if not present:
                clean = units
                drawn = position
        if lost and position == slices // 3 and not present:
            continue
        image = f"{number:06x}{position:04x}"
        where = Place(
            study, series, image, slices - position, HEIGHT - z, patient.field_of_view / size, apart
        )
        if lying:
            units = np.rot90(units)
            where = replace(where, orientation=LYING)
        write_dicom(into / f"{image}.dcm", units, where)
        row = {"pe_present_on_image": int(present), **findings.labels}
        rows.append(
            ",".join([study, series, image, *(str(row[name]) for name in COLUMNS[3:])]) + "\n"
        )
        if pet and position % 4 == 0:
            other = replace(where, series=f"{series}.pt", image=f"{image}.pt", modality="PT")
            (folder / "train" / study / other.series).mkdir(exist_ok=True)
            write_dicom(
                folder / "train" / study / other.series / f"{other.image}.dcm", units, other
            )
    return "".join(rows)


def run_notebook(data: Path, run: Path, values: dict) -> dict[str, float]:
    """Run notebook 06 with these exams, and return how many seconds its stages took."""
    run.mkdir(parents=True)
    given = {"data_path": data.resolve(), "run_path": ".", "records_path": "records"}
    given |= {"exam_batch_size": 2, **values}  # for few exams, so that an epoch is several steps
    executed = run / NOTEBOOK.name
    command = [
        sys.executable,
        "-m",
        "papermill",
        NOTEBOOK,
        executed.name,
        "--kernel",
        "python3",
        "--no-progress-bar",
    ]
    for name, value in given.items():
        command += ["-p", name, str(value)]
    subprocess.run([*map(str, command)], cwd=run, env=with_the_kit(), check=True)
    cells = json.loads(executed.read_text())["cells"]
    return {
        stage: sum(
            cell["metadata"]["papermill"]["duration"]
            for cell in cells
            if call in "".join(cell["source"])
        )
        for stage, call in STAGES.items()
    }


def give_test_fold(data: Path, submission: Path, to: Path) -> tuple:
    """Copy the files of the submitted exams; return the number of slices, and a table."""
    import pandas

    from tpukit import pe

    shutil.rmtree(to, ignore_errors=True)
    asked = pandas.read_csv(submission, dtype={"id": str}).id
    labels = pe.read_labels(data)
    labels = labels[labels.SOPInstanceUID.isin(asked)].reset_index(drop=True)
    for study in labels.StudyInstanceUID.unique():
        shutil.copytree(data / "train" / study, to / "images" / study, copy_function=os.link)
    labels.iloc[:, :3].to_csv(to / "test.csv", index=False)
    return len(labels), pe.index_dicom(labels, to / "images", progress="off")


def submit(test: Path, run: Path) -> dict:
    """Predict the test fold with the notebook's networks, as the bundle for Kaggle does.

    Return its report.
    """
    networks = test / "networks"
    networks.mkdir()
    for name, source in runpy.run_path(str(ROOT / "examples" / "kaggle_bundle.py"))[
        "NETWORKS"
    ].items():
        shutil.copy(run / source, networks / name)
    command = [
        sys.executable,
        ROOT / "examples" / "submission.py",
        "--table",
        "test.csv",
        "--images",
        "images",
    ]
    command += ["--networks", "networks", "--batch-size", "16"]
    done = subprocess.run(
        [*map(str, command)],
        cwd=test,
        env=with_the_kit(),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout, end="")
    return json.loads(done.stdout.splitlines()[-1])


def with_the_kit() -> dict[str, str]:
    """Return an environment in which Python finds this clone of tpukit."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }


def unread(table) -> int:
    """Return the number of slices that cannot change the input of the network of exams."""
    import numpy as np

    from tpukit import pe

    features = np.zeros((len(table), 1), np.float32)
    exams = pe.ExamSequences(table.drop(columns=list(pe.LABELS)), features, irregular="keep")
    exam_of = {study: number for number, study in enumerate(exams.studies)}
    silent = 0
    for row, study in enumerate(table.StudyInstanceUID):
        features[row] = 1
        silent += not bool(exams[exam_of[study]].any())
        features[row] = 0
    return silent


if __name__ == "__main__":
    main()
