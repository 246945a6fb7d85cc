"""read_labels and assign_folds: what is wrong with a table is said in words, with the rows and a fix."""

import gzip

import pytest

pd = pytest.importorskip("pandas")

from tpukit.pe import COLUMNS, LABELS, assign_folds, read_labels  # noqa: E402

POSITIVE = {"rv_lv_ratio_lt_1": 1, "leftsided_pe": 1}


def study(name, *, images=3, positive_images=0, **labels):
    """Rows of one study; negative unless told otherwise."""
    exam = dict.fromkeys(COLUMNS[3:], 0) | {"negative_exam_for_pe": int(not labels)} | labels
    ids = [
        {"StudyInstanceUID": name, "SeriesInstanceUID": f"{name}s", "SOPInstanceUID": f"{name}{i}"}
        for i in range(images)
    ]
    return [
        row | exam | {"pe_present_on_image": int(i < positive_images)} for i, row in enumerate(ids)
    ]


def table(*studies):
    rows = [
        row
        for rows in (studies or (study("a"), study("b", positive_images=1, **POSITIVE)))
        for row in rows
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


@pytest.fixture
def save(tmp_path):
    def save(frame):
        frame.to_csv(tmp_path / "train.csv", index=False)
        return tmp_path

    return save


def test_the_ten_labels_are_the_walkthroughs():
    assert len(LABELS) == 10
    assert LABELS[0] == "pe_present_on_image"
    assert not [
        name for name in LABELS if name.startswith("qa_") or "artifact" in name or "defect" in name
    ]
    assert len(COLUMNS) == 17


def test_a_good_table_is_read_from_the_file_or_its_folder(save):
    folder = save(table())
    labels = read_labels(folder)
    assert labels.equals(read_labels(folder / "train.csv"))
    assert list(labels.columns) == list(COLUMNS)
    assert set(labels[list(LABELS)].dtypes.astype(str)) == {"uint8"}
    assert labels.SOPInstanceUID.tolist() == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_an_identifier_of_digits_alone_stays_text(save):
    labels = read_labels(save(table(study("000000000012"))))
    assert labels.StudyInstanceUID[0] == "000000000012"


def utf16(path):
    path.write_bytes(path.read_text().encode("utf-16"))


def zipped(path):
    path.write_bytes(gzip.compress(path.read_bytes()))


def a_field_more(path):
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, *(f"{row},0" for row in rows)]))


def a_field_more_in_one_row(path):
    path.write_text(path.read_text().rstrip("\n") + ",0\n")


UNREADABLE = {
    "UTF-16": utf16,
    "gzip": zipped,
    "it begins with": a_field_more,
    "Expected 17 fields": a_field_more_in_one_row,
}


@pytest.mark.parametrize("found", UNREADABLE)
def test_a_file_that_is_no_such_table_says_what_it_is(save, found):
    folder = save(table())
    UNREADABLE[found](folder / "train.csv")
    message = rf"not a comma-separated table in UTF-8\n  found: .*{found}(.|\n)*fix:   copy"
    with pytest.raises(ValueError, match=message):
        read_labels(folder)


def test_folds_are_stratified_on_request():
    frame = table(
        *[
            study(f"s{n}", positive_images=3 * (n < 5), **(POSITIVE if n < 5 else {}))
            for n in range(20)
        ]
    )
    shares = (
        assign_folds(frame, 5, stratify="pe_present_on_image")
        .groupby("fold")
        .pe_present_on_image.mean()
    )
    assert shares.tolist() == [0.25] * 5
    with pytest.raises(
        ValueError, match=r"no column 'pe' to stratify by\n  found: Study(.|\n)*fix:   one of these"
    ):
        assign_folds(frame, 5, stratify="pe")


def with_(frame, row, column, value):
    return (
        frame.astype({column: object})
        .pipe(lambda f: f.set_axis(f.index))
        .assign(**{column: [value if i == row else v for i, v in enumerate(frame[column])]})
    )


BAD_TABLES = {  # what is wrong: (the table, what the message has to say)
    "a column is missing": (
        lambda: table().drop(columns="central_pe"),
        ["no column central_pe", "found: StudyInstanceUID"],
    ),
    "a label is 2": (
        lambda: with_(table(), 4, "leftsided_pe", 2),
        ["leftsided_pe", "neither 0 nor 1", "2 in row 4"],
    ),
    "a label is a half": (
        lambda: with_(table(), 1, "chronic_pe", 0.5),
        ["chronic_pe", "0.5 in row 1"],
    ),
    "a label is a word": (
        lambda: with_(table(), 1, "chronic_pe", "yes"),
        ["chronic_pe has 1 labels", "yes in row 1"],
    ),
    "a label is missing": (
        lambda: with_(table(), 5, "indeterminate", None),
        ["indeterminate", "1 missing", "rows 5"],
    ),
    "an identifier is missing": (
        lambda: with_(table(), 0, "SOPInstanceUID", None),
        ["SOPInstanceUID", "1 missing"],
    ),
    "an image is there twice": (
        lambda: table(study("a"), study("b"), study("a")),
        ["3 rows", "a0 in row 6"],
    ),
    "there are no rows": (lambda: table().head(0), ["no rows"]),
    "an exam's label varies": (
        lambda: with_(table(), 2, "negative_exam_for_pe", 0),
        ["negative_exam_for_pe varies", ": a", "1 of 2 studies"],
    ),
    "an exam is negative and indeterminate": (
        lambda: table(study("a", negative_exam_for_pe=1, indeterminate=1)),
        ["against rule 2a", 'negative_exam_for_pe": a'],
    ),
    "an exam is neither": (
        lambda: table(study("a", negative_exam_for_pe=0)),
        ["against rule 2a", 'negative_exam_for_pe": a'],
    ),
    "a negative exam has a positive image": (
        lambda: table(study("a", positive_images=1, negative_exam_for_pe=1, **POSITIVE)),
        ["against rule 1d", 'nor negative_exam_for_pe": a'],
    ),
    "a negative exam has a location": (
        lambda: table(study("a", negative_exam_for_pe=1, central_pe=1)),
        ["against rule 2b", "no ratio, no location"],
    ),
    "a positive exam has two ratios": (
        lambda: table(study("a", positive_images=1, **POSITIVE, rv_lv_ratio_gte_1=1)),
        ["against rule 1a", 'exactly one of rv_lv_ratio_gte_1 and rv_lv_ratio_lt_1": a'],
    ),
    "a positive exam has no ratio": (
        lambda: table(study("a", positive_images=1, leftsided_pe=1)),
        ["against rule 1a", 'exactly one of rv_lv_ratio_gte_1 and rv_lv_ratio_lt_1": a'],
    ),
    "a positive exam has no location": (
        lambda: table(study("a", positive_images=1, rv_lv_ratio_gte_1=1)),
        ["against rule 1b", "at least one of central_pe"],
    ),
    "a positive exam is chronic twice": (
        lambda: table(
            study("a", positive_images=1, **POSITIVE, chronic_pe=1, acute_and_chronic_pe=1)
        ),
        ["against rule 1c", "not both of chronic_pe"],
    ),
}


@pytest.mark.parametrize("wrong", BAD_TABLES)
def test_a_bad_table_is_refused_with_its_rows_and_a_fix(save, wrong):
    make, said = BAD_TABLES[wrong]
    with pytest.raises(ValueError, match="fix:") as error:
        read_labels(save(make()))
    for words in said:
        assert words in str(error.value)
    assert str(error.value).count("\n") <= 4


def test_contradicting_studies_can_be_left_out_and_that_is_said(save, capsys):
    labels = read_labels(save(table(study("a"), study("b", central_pe=1))), inconsistent="drop")
    assert labels.StudyInstanceUID.unique().tolist() == ["a"]
    assert "left out 1 of 2 studies" in capsys.readouterr().out


def test_only_the_first_few_studies_are_named(save):
    with pytest.raises(ValueError, match="and 5 more"):
        read_labels(save(table(*(study(f"x{i}", central_pe=1) for i in range(8)))))


@pytest.mark.parametrize("where", [".", "nowhere", "nowhere/train.csv"])
def test_no_table_at_all_says_where_it_looked(tmp_path, where):
    with pytest.raises(FileNotFoundError, match="fix:"):
        read_labels(tmp_path / where)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "train.csv").write_text("")
    with pytest.raises(ValueError, match="is empty"):
        read_labels(tmp_path)


def test_folds_keep_a_study_together_and_are_the_same_every_time():
    labels = table(*(study(f"s{i}", images=2 + i % 3) for i in range(11)))
    folded = assign_folds(labels, folds=5)
    assert folded.groupby("StudyInstanceUID").fold.nunique().max() == 1
    assert sorted(folded.fold.unique()) == [0, 1, 2, 3, 4]
    assert folded.equals(assign_folds(labels, folds=5))
    assert "fold" not in labels


@pytest.mark.parametrize(("studies", "folds"), [(4, 5), (1, 2), (4, 1), (4, 0)])
def test_folds_that_cannot_be_made_are_refused(studies, folds):
    with pytest.raises(ValueError, match=f"{studies} studies cannot be split into {folds} folds"):
        assign_folds(table(*(study(f"s{i}") for i in range(studies))), folds=folds)


def test_more_folds_than_a_byte_counts_are_made():
    folded = assign_folds(table(*(study(f"s{i}", images=1) for i in range(130))), folds=130)
    assert sorted(folded.fold) == list(range(130))
