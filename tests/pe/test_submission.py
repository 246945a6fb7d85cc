"""submission.csv: written and read back to the last digit, and refused where the platform would refuse it."""

import math

import pytest

numpy = pytest.importorskip("numpy")
pandas = pytest.importorskip("pandas")

from tpukit import pe  # noqa: E402
from tpukit.pe import submission  # noqa: E402
from tpukit.pe.labels import EXAM_LABELS  # noqa: E402


def answers(exams=7, seed=0):
    """Make shuffled answers at random, without contradictions."""
    random = numpy.random.default_rng(seed)
    exam = numpy.repeat(numpy.arange(exams), random.integers(1, 9, exams))
    table = pandas.DataFrame({"StudyInstanceUID": [f"s{number}" for number in exam]})
    table["SOPInstanceUID"] = [f"i{number}" for number in range(len(table))]
    table["pe_present_on_image"] = random.random(len(table))
    for name in EXAM_LABELS:
        table[name] = random.random(exams)[exam]
    return pe.make_consistent(table.sample(frac=1, random_state=seed).reset_index(drop=True))


@pytest.mark.parametrize("part", [1, 3, 500])
def test_what_is_written_in_parts_is_read_back_to_the_last_digit(tmp_path, monkeypatch, part):
    monkeypatch.setattr(submission, "_EXAMS_A_PART", part)
    table = answers()
    path = pe.write_submission(table, tmp_path / "submission.csv")
    lines = path.read_text().splitlines()
    assert lines[0] == "id,label"
    assert len(lines) == 1 + len(table) + 9 * 7
    pandas.testing.assert_frame_equal(pe.read_submission(path, table), table)
    assert [entry.name for entry in tmp_path.iterdir()] == ["submission.csv"]


def test_a_table_that_contradicts_itself_is_not_written_and_the_fix_helps(tmp_path):
    table = answers().assign(negative_exam_for_pe=0.9, indeterminate=0.9)
    with pytest.raises(
        ValueError,
        match=r"7 of 7 exams of the table contradict themselves\n  found: study s\d breaks",
    ):
        pe.write_submission(table, tmp_path / "submission.csv")
    assert not list(tmp_path.iterdir())
    pe.write_submission(pe.make_consistent(table), tmp_path / "submission.csv")


def cut(text):
    return "\n".join(text.splitlines()[:-1]) + "\n"


def set_last(value):
    return lambda text: cut(text) + text.splitlines()[-1].split(",")[0] + f",{value}\n"


BAD = {
    "short of a row": (cut, "69 ids: s[0-6]_indeterminate is missing"),
    "a row twice": (
        lambda text: text + text.splitlines()[-1] + "\n",
        "s[0-6]_indeterminate is twice",
    ),
    "another row": (
        lambda text: text + "s99_indeterminate,0.5\n",
        "s99_indeterminate was not asked for",
    ),
    "no number": (
        set_last(""),
        "1 labels of .* are not probabilities\n  found: nothing for s[0-6]_indeterminate",
    ),
    "nan": (set_last("nan"), "are not probabilities"),
    "a logit": (set_last("1.5"), r"found: 1.5 for s[0-6]_indeterminate"),
    "words": (set_last("yes"), "found: yes for"),
    "other columns": (
        lambda text: text.replace("id,label", "id,pe"),
        r"not id,label\n  found: id,pe",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_submission_that_the_platform_would_refuse_is_refused(tmp_path, bad):
    change, message = BAD[bad]
    table = answers(exams=4, seed=3)
    table = pandas.concat(
        [table, answers(exams=3).assign(StudyInstanceUID=lambda t: t.StudyInstanceUID + "b")]
    )
    table["SOPInstanceUID"] = [f"i{number}" for number in range(len(table))]
    path = pe.write_submission(table, tmp_path / "submission.csv")
    message = message.replace("69 ids", f"{len(table) + 63} ids").replace("s[0-6]_", "s[0-6]b?_")
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=message):
        pe.read_submission(path, table)


def test_contradictions_are_found_in_a_file_too(tmp_path):
    table = answers()
    path = pe.write_submission(table, tmp_path / "submission.csv")
    lines = [line.split(",") for line in path.read_text().splitlines()]
    both = [
        [name, "0.9" if name.endswith(("_indeterminate", "_negative_exam_for_pe")) else value]
        for name, value in lines
    ]
    path.write_text("".join(f"{name},{value}\n" for name, value in both))
    with pytest.raises(ValueError, match="contradict themselves"):
        pe.read_submission(path, table)


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        pe.read_submission(tmp_path / "submission.csv", answers())


def test_one_half_everywhere_scores_the_logarithm_of_two_through_the_file(tmp_path):
    labels = answers()
    labels[list(pe.LABELS)] = 0.0
    labels["negative_exam_for_pe"] = 1.0
    half = labels.assign(**dict.fromkeys(pe.LABELS, 0.5))
    half = pe.make_consistent(half)
    path = pe.write_submission(half, tmp_path / "submission.csv")
    assert pe.challenge_loss(labels, pe.read_submission(path, labels)) == pytest.approx(
        math.log(2), abs=1e-5
    )
