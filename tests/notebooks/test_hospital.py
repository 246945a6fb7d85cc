import pandas
import pytest

from tpukit import pe

pytest.importorskip("pydicom", reason="the notebook needs pydicom: pip install pydicom")


def test_an_export_has_what_a_hospital_adds_and_read_exams_finds_its_slices(tmp_path, capsys):
    from hospital import export_phantoms

    for _ in range(2):  # a second export replaces the first
        folder, labels = export_phantoms(tmp_path, 8, 4, size=32, label="embolus")
    exam = folder / "CT_0000"
    assert len([*exam.glob("soft*.IMA")]) == len([*exam.glob("sharp*")]) == 4
    assert {"report.txt", "overview"} <= {path.name for path in exam.iterdir()}
    assert list(pandas.read_csv(labels).columns) == ["exam", "embolus"]
    with pytest.raises(ValueError, match="sharp"):
        pe.read_exams(folder, labels)
    exams = pe.read_exams(folder, labels, series="soft")
    assert len(exams) == 8 * 4
    assert exams.patient.nunique() == 7, "the last exam is a second one of its patient"
