"""check_exams: all that is odd about exams, in one table, before anything is trained."""

import shutil

import pytest

numpy = pytest.importorskip("numpy")
pydicom = pytest.importorskip("pydicom")
pytest.importorskip("scipy")

from pe.test_exam_sequences import BAD, made_up  # noqa: E402

from tpukit import pe  # noqa: E402


def test_nothing_odd_is_an_empty_table():
    assert pe.check_exams(made_up()[0]).empty
    assert pe.check_exams(made_up([(1, 1)])[0]).empty


@pytest.mark.parametrize("bad", ["a slice is missing", "two series", "equal positions"])
def test_it_says_of_a_table_what_exam_sequences_would_say_of_it_later(bad):
    table = BAD[bad][0](made_up()[0])
    found = pe.check_exams(table)
    with pytest.raises(ValueError, match="exams ") as refused:
        pe.ExamSequences(table, numpy.zeros((len(table), 2)))
    assert len(found) == 1
    assert found["found"][0] in str(refused.value)
    assert found["for instance"][0] in str(refused.value)
    assert "keep them as they are" in found["what to do"][0]


def test_a_gap_is_seen_in_an_exam_of_three_slices():
    table, _ = made_up([(4, 2)])
    table = table[table.SOPInstanceUID != "s0.1.2"]
    assert pe.check_exams(table)["found"].tolist() == ["1 exams lack a slice"]
    table.loc[table.position == table.position.min(), "position"] = -37.5  # where the second one is
    assert pe.check_exams(table)["found"].tolist() == ["1 exams have slices at equal positions"]


def test_a_spacing_that_changes_is_no_gap_when_the_slices_are_numbered_through():
    table, _ = made_up([(4, 2)])
    table = table[table.SOPInstanceUID != "s0.1.2"].sort_values("position")
    numbered = table.assign(number=range(7, 7 + len(table)))
    assert pe.check_exams(numbered)["found"].tolist() == ["1 exams change their spacing"]
    with_a_gap = numbered.assign(number=numbered.number + (numbered.position > -37.5))
    assert len(with_a_gap) > 2
    assert pe.check_exams(with_a_gap)["found"].tolist() == ["1 exams lack a slice"]


def test_all_that_the_headers_say_is_in_one_table_and_survives_what_is_done_to_the_labels(
    tmp_path, capsys
):
    made = pe.phantom(tmp_path / "made", 4, 5, size=32, form="dicom", workers=1, progress="off")
    labels = pe.read_labels(made)
    lying, lost, pet, unnamed = labels.StudyInstanceUID.unique()
    files = {
        study: sorted((made / "train" / study).rglob("*.dcm"))
        for study in (lying, lost, pet, unnamed)
    }

    def change(path, to=None, **values):
        file = pydicom.dcmread(path)
        with pydicom.config.disable_value_validation():
            for name, value in values.items():
                setattr(file, name, value)
            file.save_as(to or path)

    for path in files[lying]:
        stored = numpy.rot90(pydicom.dcmread(path).pixel_array)
        change(path, PixelData=stored.tobytes(), ImageOrientationPatient=[0, 1, 0, -1, 0, 0])
    for path in files[pet]:  # beside its CT
        change(
            path,
            path.with_name(f"p{path.name}"),
            Modality="PT",
            SeriesInstanceUID="p",
            SOPInstanceUID=f"p{path.stem}",
        )
    for path in files[unnamed]:
        change(path, Modality=None)
    (made / "train" / "cut.dcm").write_bytes(files[lying][0].read_bytes()[:100])
    order = pe.index_dicom(labels, made / "train", progress="off")
    middle = order[order.StudyInstanceUID == lost].SOPInstanceUID.iloc[2]
    kept = labels[labels.SOPInstanceUID != middle]
    shutil.move(next((made / "train").rglob(f"{middle}.dcm")), tmp_path / "lost.dcm")

    capsys.readouterr()
    table = pe.index_dicom(kept, made / "train", progress="off")
    assert "left out 5 files of modality PT" in capsys.readouterr().out
    found = pe.check_exams(pe.assign_folds(table, 2))
    assert found["found"].tolist() == [
        "1 exams lack a slice",
        "5 files of modality PT",
        "1 files cannot be read as CT slices",
        "1 series stored mirrored, upside down or lying: their images are turned",
        "5 slices without a Modality: they are treated as CT",
    ]
    assert all(found["for instance"])
    assert all(found["what to do"])
    assert capsys.readouterr().out == ""


def test_a_table_without_positions_is_refused():
    with pytest.raises(
        ValueError,
        match="the table has no column position\n  found: .*\n  fix:   the table of pe.ind",
    ):
        pe.check_exams(made_up()[0].drop(columns="position"))
