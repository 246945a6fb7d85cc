"""tools/real_exams.py: its exams are as odd as they should be, and what tpukit makes of them is right."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("scipy")
pytest.importorskip("pydicom")
pytest.importorskip("pandas")

from tpukit import pe  # noqa: E402
from tpukit.pe.phantoms.anatomy import Findings  # noqa: E402

REAL = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "real_exams.py"))
POSITIVE = Findings(left=True, rv_lv_ratio=0.8, acute=True, extent=5.0)


def test_the_exams_are_odd_as_a_hospitals_are_and_every_slice_of_them_is_read(tmp_path, capsys):
    from tpukit.pe.labels import COLUMNS

    kinds = [POSITIVE, Findings(), Findings(), POSITIVE]
    rows = [REAL["draw_exam"](tmp_path, number, kinds[number], 130, 48, 0) for number in range(4)]
    (tmp_path / "train.csv").write_text(",".join(COLUMNS) + "\n" + "".join(rows))
    labels = pe.read_labels(tmp_path)
    assert labels.groupby("StudyInstanceUID").size().tolist() == [130, 130, 129, 130]
    shown = labels.groupby("StudyInstanceUID").pe_present_on_image.sum().tolist()
    assert (shown[1], shown[2]) == (0, 0)
    assert 1 <= shown[0] <= 7, "5 mm of slices 1.8 mm apart, in two arteries at most"
    assert 1 <= shown[3] <= 7
    table = pe.index_dicom(labels, tmp_path / "train", progress="off")
    found = pe.check_exams(table)["found"].tolist()
    assert found == [
        "1 exams lack a slice",
        "33 files of modality PT",
        "1 series stored mirrored, upside down or lying: their images are turned",
    ]
    assert REAL["unread"](table) == 0
    images = [
        path.read_bytes()[-48 * 48 * 2 :]
        for path in sorted((tmp_path / "train" / "000001").rglob("*.dcm"))
    ]
    assert len(set(images)) == -(-130 // REAL["EVERY"]), "copies between those that are drawn"
    capsys.readouterr()
