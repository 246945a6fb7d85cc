"""index_dicom: every image finds its file by its header, and its place along the body."""

import shutil

import pytest

numpy = pytest.importorskip("numpy")
pytest.importorskip("pandas")
pydicom = pytest.importorskip("pydicom")
pytest.importorskip("scipy")

from tpukit import pe  # noqa: E402


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
        assert [path.rpartition("/")[2] for path in exam.path] == [f"{image}.dcm" for image in exam.SOPInstanceUID]
    assert capsys.readouterr().out == ""
    assert len(pe.ExamSequences(table, numpy.zeros((12, 3)))) == 3


def test_the_names_of_files_do_not_matter(copy):
    for number, path in enumerate(sorted((copy / "train").rglob("*.dcm"))):
        path.rename(path.with_name(f"{number}.dcm"))
    before = index(copy)
    assert before.position.groupby(before.StudyInstanceUID).is_monotonic_increasing.all()
    with pydicom.config.disable_value_validation():
        images = [pydicom.dcmread(path, stop_before_pixels=True).SOPInstanceUID for path in before.path]
    assert images == before.SOPInstanceUID.tolist()


def test_a_row_without_a_file_is_refused_or_left_out(copy, capsys):
    gone = next((copy / "train").rglob("*.dcm"))
    gone.unlink()
    with pytest.raises(FileNotFoundError, match=rf"1 of 12 images are not in .*\n  found: 11 slices; .* {gone.stem}"):
        index(copy)
    table = index(copy, missing="drop")
    assert len(table) == 11
    assert gone.stem in capsys.readouterr().out


def test_two_files_of_one_image_are_refused(copy):
    path = next((copy / "train").rglob("*.dcm"))
    shutil.copy(path, path.with_name("again.dcm"))
    with pytest.raises(ValueError, match=r"two files are of one image: .*again.dcm"):
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
        ({"StudyInstanceUID": "1.2.3"}, r"1 images have another StudyInstanceUID in their file .*\n  found: 1.2.3 in"),
        ({"SeriesInstanceUID": "1.2.3"}, "1 images have another SeriesInstanceUID in their file"),
        ({"ImagePositionPatient": None}, "1 images have no place in the body"),
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
