"""index_dicom: every image finds its file by its header, and its place along the body."""

import shutil
from dataclasses import replace

import pytest

numpy = pytest.importorskip("numpy")
pandas = pytest.importorskip("pandas")
pydicom = pytest.importorskip("pydicom")
pytest.importorskip("scipy")

from tpukit import pe  # noqa: E402
from tpukit.pe.phantoms.dicom_files import Place, write_dicom  # noqa: E402


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return pe.phantom(tmp_path_factory.mktemp("dicom"), 3, 4, size=32, form="dicom", progress="off")


@pytest.fixture
def copy(drawn, tmp_path):
    return shutil.copytree(drawn, tmp_path / "copy")


def index(folder, **options):
    return pe.index_dicom(pe.read_labels(folder), folder / "train", progress="off", **options)


def test_slices_come_from_the_feet_to_the_head_with_their_place_in_mm(drawn, capsys):
    table = index(drawn)
    assert len(table) == 12
    for _, exam in table.groupby("StudyInstanceUID"):
        assert numpy.diff(exam.position).tolist() == pytest.approx([250 * 0.94 / 3] * 3, abs=0.01)
        assert [path.rpartition("/")[2] for path in exam.path] == [
            f"{image}.dcm" for image in exam.SOPInstanceUID
        ]
    assert capsys.readouterr().out == ""
    assert len(pe.ExamSequences(table, numpy.zeros((12, 3)))) == 3


def test_the_names_of_files_do_not_matter(copy):
    for number, path in enumerate(sorted((copy / "train").rglob("*.dcm"))):
        path.rename(path.with_name(f"{number}.dcm"))
    before = index(copy)
    assert before.position.groupby(before.StudyInstanceUID).is_monotonic_increasing.all()
    with pydicom.config.disable_value_validation():
        images = [
            pydicom.dcmread(path, stop_before_pixels=True).SOPInstanceUID for path in before.path
        ]
    assert images == before.SOPInstanceUID.tolist()


def test_a_row_without_a_file_is_refused_or_left_out(copy, capsys):
    gone = next((copy / "train").rglob("*.dcm"))
    gone.unlink()
    with pytest.raises(
        FileNotFoundError,
        match=rf"1 of 12 images are not in .*\n  found: 11 slices; .* {gone.stem}",
    ):
        index(copy)
    table = index(copy, missing="drop")
    assert len(table) == 11
    assert gone.stem in capsys.readouterr().out


def test_a_row_whose_identifier_no_file_can_have_is_odd_alone(copy):
    labels = pe.read_labels(copy)
    labels.loc[5, ["StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID"]] = [
        "b\u00e4",
        "b\u00e4",
        "b\u00e4",
    ]
    table = pe.index_dicom(labels, copy / "train", progress="off", missing="keep")
    assert table.odd[table.SOPInstanceUID == "b\u00e4"].tolist() == ["it has no file"]
    assert (table.odd == "").sum() == 11


def test_a_slice_that_lacks_the_scale_of_its_series_is_odd(copy):
    before = index(copy)
    change(before.path[2], RescaleIntercept=None)
    table = index(copy, missing="keep")
    odd = table.set_index("SOPInstanceUID").odd[before.SOPInstanceUID[2]]
    assert odd == "it lacks RescaleSlope or RescaleIntercept, which others of its series have"
    assert (table.odd == "").sum() == 11
    for path in before.path[:4]:
        change(path, RescaleIntercept=None) if path != before.path[2] else None
    assert (index(copy, missing="keep").odd == "").all(), (
        "a whole series without is as DICOM's default has it"
    )


def test_two_files_of_one_image_are_refused(copy):
    path = next((copy / "train").rglob("*.dcm"))
    shutil.copy(path, path.with_name("again.dcm"))
    with pytest.raises(ValueError, match=r"two files hold the same image: .*again.dcm"):
        index(copy)


def change(path, **values):
    with pydicom.config.disable_value_validation():
        file = pydicom.dcmread(path)
        for name, value in values.items():
            if value is None:
                delattr(file, name)
            else:
                setattr(file, name, value)
        file.save_as(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"StudyInstanceUID": "1.2.3"},
            r"1 images have another StudyInstanceUID in their file .*\n  found: 1.2.3 in",
        ),
        ({"SeriesInstanceUID": "1.2.3"}, "1 images have another SeriesInstanceUID in their file"),
        ({"ImagePositionPatient": None}, "1 images have no position in the body"),
    ],
)
def test_a_file_that_contradicts_the_labels_or_lies_nowhere_is_named(copy, values, message):
    path = next((copy / "train").rglob("*.dcm"))
    change(path, **values)
    with pytest.raises(ValueError, match=message):
        index(copy)


def test_files_without_a_row_are_told(drawn, capsys):
    labels = pe.read_labels(drawn)
    kept = labels[labels.StudyInstanceUID == labels.StudyInstanceUID[0]]
    assert len(pe.index_dicom(kept, drawn / "train", progress="off")) == 4
    assert "8 slices" in capsys.readouterr().out


def test_with_keep_every_row_stays_and_what_is_odd_about_its_image_is_said(copy, capsys):
    labels, paths = pe.read_labels(copy), sorted((copy / "train").rglob("*.dcm"))
    with pydicom.config.disable_value_validation():
        for number, name in (
            (1, "ImagePositionPatient"),
            (2, "StudyInstanceUID"),
            (3, "SeriesInstanceUID"),
        ):
            file = pydicom.dcmread(paths[number])
            setattr(file, name, None if number == 1 else "other")
            file.save_as(paths[number])
        file = pydicom.dcmread(paths[4])
        file.file_meta.TransferSyntaxUID = (
            "1.2.840.10008.1.2.4.100"  # MPEG2, which nothing here decodes
        )
        file.PixelData = pydicom.encaps.encapsulate([file.PixelData])
        file.save_as(paths[4])
    paths[0].unlink()
    paths[5].write_bytes(paths[5].read_bytes()[:200])
    shutil.copy(paths[6], paths[6].with_name("again.dcm"))
    table = pe.index_dicom(labels, copy / "train", missing="keep", progress="off").set_index(
        "SOPInstanceUID"
    )
    odd = [table.odd[path.stem] for path in paths]
    for words, said in zip(
        ("no file", "no place", "another study", "another series", "compressed"), odd, strict=False
    ):
        assert words in said
    assert odd[5].startswith("its file cannot be read as a CT slice: ")
    assert odd[6:] == [""] * 6
    assert (table.path[table.odd != ""] == "").all()
    assert table.position[table.odd != ""].isna().all()
    assert table.position[table.odd == ""].notna().all()
    assert len(table) == 12
    for path in paths[1:]:
        path.unlink()
    again = pe.index_dicom(labels, copy / "train", missing="keep", progress="off")
    assert (again.odd == "").sum() == 1  # the copy under another name is left


def test_the_reason_is_told_of_a_file_that_is_named_by_its_identifier_alone(tmp_path):
    place = Place("1.2.1", "1.2.2", "1.2.840.4", 1, 0.0, 1.0)
    write_dicom(tmp_path / "1.2.840.4", numpy.zeros((8, 8)), place)
    write_dicom(tmp_path / "1.2.840.5", numpy.zeros((8, 8)), replace(place, image="1.2.840.5"))
    file = pydicom.dcmread(tmp_path / "1.2.840.4")
    file.ImagePositionPatient = [1, 2]
    file.save_as(tmp_path / "1.2.840.4")
    ids = {"StudyInstanceUID": "1.2.1", "SeriesInstanceUID": "1.2.2"}
    labels = pandas.DataFrame({**ids, "SOPInstanceUID": ["1.2.840.4", "1.2.840.5"]})
    table = pe.index_dicom(labels, tmp_path, missing="keep", workers=1, progress="off")
    odd = table.set_index("SOPInstanceUID").odd
    assert odd["1.2.840.4"].startswith(
        "its file cannot be read as a CT slice: its ImagePositionPatient"
    )
    assert odd["1.2.840.5"] == ""


def test_where_every_file_is_missing_the_fix_does_not_say_to_drop_all_rows(drawn):
    labels = pe.read_labels(drawn)
    others = labels.assign(SOPInstanceUID=[f"other-{row}" for row in range(len(labels))])
    for missing in ("raise", "drop"):
        with pytest.raises(FileNotFoundError, match="12 of 12 images are not in") as caught:
            pe.index_dicom(others, drawn / "train", missing=missing, workers=1, progress="off")
        assert caught.value.fix == "copy them there"


def test_a_number_of_processes_below_1_is_refused(drawn):
    with pytest.raises(ValueError, match="workers must be a whole number, 1 or more, got -1"):
        index(drawn, workers=-1)


def test_headers_that_were_read_are_kept_until_their_file_changes(copy, tmp_path, monkeypatch):
    whole = index(copy, cache=tmp_path / "headers")
    chunks = {path: path.stat().st_mtime_ns for path in (tmp_path / "headers").glob("*.npy")}
    again = index(copy, cache=tmp_path / "headers")
    assert again.equals(whole)
    same = {path: path.stat().st_mtime_ns for path in chunks if path.name.startswith("headers")}
    assert same == {path: chunks[path] for path in same}
    changed = whole["path"][0]
    file = pydicom.dcmread(changed)
    file.ImagePositionPatient = [0, 0, 5000]
    file.save_as(changed)
    moved = index(copy, cache=tmp_path / "headers")
    assert moved["position"].max() == 5000
    shutil.copy(changed, changed.replace(".dcm", "-copy.dcm"))
    with pytest.raises(ValueError, match="two files hold the same image"):
        index(copy, cache=tmp_path / "headers")
