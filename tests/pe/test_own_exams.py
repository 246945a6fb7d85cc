"""read_exams: one's own DICOM files and a table with a label per exam or per image."""

import shutil

import pytest

np = pytest.importorskip("numpy")
pd = pytest.importorskip("pandas")
torch = pytest.importorskip("torch")
pydicom = pytest.importorskip("pydicom")
pytest.importorskip("array_record")
pytest.importorskip("scipy")

from helpers.hospital_exports import LOCALIZER, Truth, write_series  # noqa: E402

from tpukit import pe  # noqa: E402

QUIET = {"progress": "off", "workers": 1}


def export(folder, names=("scan-01", "scan-02", "scan-03", "scan-04"), *, patients=None):
    """Write exams as a hospital exports them: two series, a localizer, odd endings, a report."""
    for number, name in enumerate(names):
        patient = patients[number] if patients else f"patient-{number}"
        common = {"study": name, "AccessionNumber": f"A{number:03}", "PatientID": patient}
        soft = {"SeriesDescription": "CTPA 1.0 soft", "series": "soft"}
        sharp = {"SeriesDescription": "CTPA 1.0 lung", "series": "sharp"}
        scout = {"SeriesDescription": "Topogram", "series": "scout", "ImageType": LOCALIZER}
        at = folder / name
        write_series(at, Truth(), name="a", count=6, ending=".IMA", **common, **soft)
        write_series(at, Truth(), name="b", count=6, ending="", first=9, **common, **sharp)
        write_series(at, Truth(), name="s", count=1, **common, **scout)
        (at / "report.txt").write_text("no embolus")
    return folder


@pytest.fixture
def folder(tmp_path):
    return export(tmp_path / "export")


def labels(folder, key="folder"):
    names = sorted(path.name for path in folder.iterdir())
    if key == "AccessionNumber":
        names = [f"A{number:03}" for number in range(len(names))]
    return pd.DataFrame({"exam": names, "embolus": [0, 1] * (len(names) // 2)})


@pytest.mark.parametrize("key", ["folder", "AccessionNumber", "StudyInstanceUID"])
def test_exams_are_found_by_any_of_three_names(folder, key, capsys):
    table = labels(folder, key)
    if key == "StudyInstanceUID":
        whole = pe.read_exams(folder, series="soft", **QUIET)
        table["exam"] = whole["StudyInstanceUID"].unique()
    found = pe.read_exams(folder, table, series="soft", **QUIET)
    assert len(found) == 24
    by_exam = found.groupby("exam")
    assert by_exam["embolus"].first().to_dict() == dict(
        zip(table["exam"], table["embolus"], strict=True)
    )
    assert by_exam["position"].is_monotonic_increasing.all()
    assert (found["description"] == "CTPA 1.0 soft").all()
    printed = capsys.readouterr().out
    assert "4 files of localizers" in printed
    assert "left out 4 files" in printed


def test_numbers_of_exams_keep_their_zeros(folder, tmp_path):
    table = labels(folder, "AccessionNumber")
    table["exam"] = table["exam"].str.removeprefix("A")
    for path in folder.iterdir():
        path.rename(folder / f"{int(path.name[-2:]) - 1:03}")
    table.to_csv(tmp_path / "labels.csv", index=False)
    found = pe.read_exams(folder, tmp_path / "labels.csv", series="lung", **QUIET)
    assert sorted(found["exam"].unique()) == ["000", "001", "002", "003"]


def test_several_series_are_refused_and_the_fix_selects_one(folder):
    with pytest.raises(ValueError, match=r"4 of 4 exams have several series") as caught:
        pe.read_exams(folder, labels(folder), **QUIET)
    assert "'CTPA 1.0 lung' (6 slices)" in str(caught.value)
    series = caught.value.fix.partition("series='")[2].rstrip("')")
    found = pe.read_exams(folder, labels(folder), series=series, **QUIET)
    assert found.groupby("exam")["SeriesInstanceUID"].nunique().eq(1).all()
    with pytest.raises(ValueError, match="4 exams have no series whose description contains 'x'"):
        pe.read_exams(folder, labels(folder), series="x", **QUIET)


@pytest.mark.parametrize("descriptions", [("CT", "CT thin"), ("CT thin", "CT")])
def test_the_fix_selects_a_series_whose_description_is_in_no_other(tmp_path, descriptions):
    for number, description in enumerate(descriptions):
        common = {"study": "a", "series": str(number), "SeriesDescription": description}
        write_series(tmp_path, Truth(), name=str(number), count=4, first=9 * number, **common)
    with pytest.raises(ValueError, match="1 of 1 exams have several series") as caught:
        pe.read_exams(tmp_path, **QUIET)
    assert caught.value.fix == "read_exams(folder, labels, series='CT thin')"
    assert len(pe.read_exams(tmp_path, series="CT thin", **QUIET)) == 4


def test_the_fix_for_two_series_with_one_description_is_to_move_files(tmp_path):
    for number in range(2):
        common = {"study": "a", "series": str(number), "SeriesDescription": "CT"}
        write_series(tmp_path, Truth(), name=str(number), count=4, first=9 * number, **common)
    with pytest.raises(ValueError, match="1 of 1 exams have several series") as caught:
        pe.read_exams(tmp_path, series="CT", **QUIET)
    assert caught.value.fix == "move the files of all series but one to another folder"


def test_a_column_that_is_no_label_is_left_out_as_the_fix_says(folder):
    table = labels(folder).assign(age=[50, 60, 70, 80])
    with pytest.raises(ValueError, match="age has 4 labels that are neither 0 nor 1") as caught:
        pe.read_exams(folder, table, series="soft", **QUIET)
    assert caught.value.fix.endswith('labels.drop(columns="age")')
    assert len(pe.read_exams(folder, table.drop(columns="age"), series="soft", **QUIET)) == 24


def test_a_file_whose_description_is_damaged_is_named(tmp_path):
    write_series(tmp_path, Truth(), name="x", count=1, SeriesDescription="CT thin")
    (file,) = tmp_path.rglob("*.*")
    file.write_bytes(file.read_bytes().replace(b"LO\x08\0CT thin", b"L\xb1\x08\0CT thin"))
    with pytest.raises(OSError, match=r"cannot be decoded(.|\n)*fix:   copy this file again"):
        pe.read_exams(tmp_path, **QUIET)


@pytest.mark.parametrize("key", ["uid", "file"])
def test_labels_of_images_become_labels_of_their_exams(folder, key):
    whole = pe.read_exams(folder, series="soft", **QUIET)
    images = whole["SOPInstanceUID"]
    if key == "file":
        for number, path in enumerate(whole["path"]):
            shutil.move(path, path.rpartition("/")[0] + f"/{number:03}.IMA")
        images = [f"{number:03}.IMA" for number in range(len(whole))]
    table = pd.DataFrame({"image": images, "nodule": 0, "calcified": 0})
    table.loc[3, "nodule"] = 1
    found = pe.read_exams(folder, table, series="soft", **QUIET)
    assert found["nodule_on_image"].sum() == 1
    assert found.groupby("exam", sort=False)["nodule"].first().tolist() == [1, 0, 0, 0]
    assert found["calcified_on_image"].sum() == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t.rename(columns={"exam": "id"}),
            "needs either a column 'exam' or a column 'image'",
        ),
        (lambda t: t[["exam"]], "and a column per label"),
        (lambda t: t.assign(embolus=["yes", "no"] * 2), "neither 0 nor 1"),
        (lambda t: t.assign(embolus=["0", "1"] * 2), "neither 0 nor 1\\n  found: '0'"),
        (lambda t: t.assign(embolus=[0, 1, None, 1]), "embolus is missing in 1 rows"),
        (
            lambda t: pd.concat([t, t[:1]]),
            "1 rows of the table have the same exam as an earlier row",
        ),
    ],
)
def test_a_table_that_is_no_table_of_labels_is_refused(folder, change, words):
    with pytest.raises(ValueError, match=words):
        pe.read_exams(folder, change(labels(folder)), series="soft", **QUIET)


def test_a_row_without_a_patient_is_refused_because_exams_would_share_one(folder):
    table = labels(folder).assign(patient=["a", None, "b", None])
    with pytest.raises(ValueError, match="patient is missing in 2 rows of the table"):
        pe.read_exams(folder, table, series="soft", **QUIET)


@pytest.mark.parametrize("name", ["position", "path", "SeriesInstanceUID"])
def test_a_label_may_not_have_the_name_of_a_column_of_slices(folder, name):
    table = labels(folder).rename(columns={"embolus": name})
    with pytest.raises(ValueError, match=f"a label cannot have the name {name}") as error:
        pe.read_exams(folder, table, series="soft", **QUIET)
    renamed = eval(error.value.fix, {"labels": table})
    assert f"{name}_label" in pe.read_exams(folder, renamed, series="soft", **QUIET)


def test_a_row_without_an_exam_is_refused_or_left_out(folder, capsys):
    table = pd.concat([labels(folder), pd.DataFrame({"exam": ["scan-99"], "embolus": [1]})])
    with pytest.raises(FileNotFoundError, match="1 of 5 exams are not in"):
        pe.read_exams(folder, table, series="soft", **QUIET)
    found = pe.read_exams(folder, table, series="soft", missing="drop", **QUIET)
    assert len(found) == 24
    assert "for instance scan-99" in capsys.readouterr().out


def test_folds_divide_patients_although_a_patient_has_two_exams(tmp_path):
    names = [f"scan-{number:02}" for number in range(8)]
    patients = [f"p{number // 2}" for number in range(8)]
    export(tmp_path / "x", names, patients=patients)
    found = pe.read_exams(tmp_path / "x", labels(tmp_path / "x"), series="soft", **QUIET)
    folds = pe.assign_folds(found, 4, groups="patient")
    assert folds.groupby("patient")["fold"].nunique().eq(1).all()
    one = labels(tmp_path / "x").assign(patient="same")
    found = pe.read_exams(tmp_path / "x", one, series="soft", **QUIET)
    with pytest.raises(ValueError, match="1 values of patient cannot be split into 4 folds"):
        pe.assign_folds(found, 4, groups="patient")


def test_exams_without_a_patient_are_patients_of_their_own(tmp_path, capsys):
    export(tmp_path / "x", patients=[""] * 4)
    found = pe.read_exams(tmp_path / "x", labels(tmp_path / "x"), series="soft", **QUIET)
    assert "4 exams have no PatientID" in capsys.readouterr().out
    assert (found["patient"] == found["StudyInstanceUID"]).all()


def test_a_pack_has_the_labels_of_any_name(folder, tmp_path, capsys):
    table = pe.read_exams(folder, labels(folder), series="soft", **QUIET)
    records = pe.pack_dicom(
        folder, tmp_path / "pack", table, size=32, columns=["embolus"], progress="off"
    )
    assert records.names == ["embolus"]
    assert "classes=" not in capsys.readouterr().out, "pack_dicom has no such argument"
    assert records.labels[:, 0].tolist() == table["embolus"].iloc[records.rows].tolist()
    with pytest.raises(ValueError, match=r"columns=\[\"embolus\"\]"):
        pe.pack_dicom(folder, tmp_path / "other", table, size=32, progress="off")


@pytest.mark.parametrize("image_label", [None, "embolus_on_image"])
def test_exams_of_any_label_are_read_along_the_body(folder, image_label):
    table = pe.read_exams(folder, labels(folder), series="soft", **QUIET)
    if image_label:
        table[image_label] = table["embolus"]
    exams = pe.ExamSequences(
        table, np.zeros((24, 3)), 4, answers=["embolus"], image_label=image_label
    )
    network = pe.ExamNetwork(3, answers=1)
    features, targets = torch.utils.data.default_collate([exams[number] for number in range(4)])
    outputs = network(features)
    assert targets["answers"].shape == outputs["answers"].shape == (4, 1)
    assert (targets["image_weight"].sum() > 0) == (image_label is not None)
    loss = pe.exam_loss({"answers": torch.zeros(4, 1), "images": torch.zeros(4, 4)}, targets)
    assert float(loss) == pytest.approx(np.log(2))
    answers = exams.by_exam({"answers": torch.zeros(4, 1), "images": torch.zeros(4, 4)})
    assert answers.index.name == "exam"
    assert sorted(answers.index) == ["scan-01", "scan-02", "scan-03", "scan-04"]
    assert answers["embolus"].tolist() == [0.5] * 4
    with pytest.raises(ValueError, match="no column pe_present_on_image") as caught:
        pe.ExamSequences(table, np.zeros((24, 3)), 4, answers=["embolus"])
    assert 'image_label="x_on_image" or None' in caught.value.fix
