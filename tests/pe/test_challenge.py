"""The challenge's score and its rules of consistency, against the slowest possible way to work them out."""

import itertools
import math

import pytest

numpy = pytest.importorskip("numpy")
pandas = pytest.importorskip("pandas")

from tpukit import pe  # noqa: E402
from tpukit.metrics import auroc_table, choose_predictions, sensitivity_at, show_roc  # noqa: E402
from tpukit.pe.challenge import EXAM_WEIGHTS, IMAGE_WEIGHT  # noqa: E402
from tpukit.pe.labels import EXAM_LABELS  # noqa: E402
from tpukit.pe.rules import RULES  # noqa: E402

PRESENT = "pe_present_on_image"


def table_of(exams):
    """Make a table of `[(answers by label, probabilities of the images), ...]`."""
    rows = [
        {"StudyInstanceUID": f"study{number}", "SOPInstanceUID": f"{number}.{k}", PRESENT: image}
        | {name: answers.get(name, 0.0) for name in EXAM_LABELS}
        for number, (answers, images) in enumerate(exams)
        for k, image in enumerate(images)
    ]
    return pandas.DataFrame(rows)


def random_table(seed, exams=40, confident=1.0):
    """Make answers at random, near 0 and 1 or near 0.5."""
    random = numpy.random.default_rng(seed)

    def some(count):
        return 1 / (1 + numpy.exp(-confident * random.normal(size=count)))

    answers = [dict(zip(EXAM_LABELS, some(9), strict=True)) for _ in range(exams)]
    return table_of([(one, some(random.integers(1, 12))) for one in answers])


def labels_like(table, seed):
    """Make consistent labels for the images of a table."""
    random = numpy.random.default_rng(seed)
    exams = []
    for _, rows in table.groupby("StudyInstanceUID", sort=False):
        positive = random.random() < 0.6
        if positive:
            images = (random.random(len(rows)) < 0.5).astype(float)
            images[random.integers(len(rows))] = 1.0
            answers = {
                random.choice(["rv_lv_ratio_gte_1", "rv_lv_ratio_lt_1"]): 1.0,
                "central_pe": 1.0,
            }
        else:
            images, answers = (
                numpy.zeros(len(rows)),
                {random.choice(["indeterminate", "negative_exam_for_pe"]): 1.0},
            )
        exams.append((answers, images))
    return table_of(exams)


def slow_loss(predictions, labels):
    """Work the score out answer by answer."""
    cost = weight = 0.0
    for study, truth in labels.groupby("StudyInstanceUID"):
        said = predictions[predictions.StudyInstanceUID == study].set_index("SOPInstanceUID")
        share = truth[PRESENT].mean()
        terms = [
            (EXAM_WEIGHTS[name], said[name].iloc[0], truth[name].iloc[0]) for name in EXAM_LABELS
        ]
        terms += [
            (IMAGE_WEIGHT * share, said.loc[row.SOPInstanceUID, PRESENT], row[PRESENT])
            for _, row in truth.iterrows()
        ]
        for of, p, y in terms:
            cost -= of * (y * math.log(p) + (1 - y) * math.log(1 - p))
            weight += of
    return cost / weight


@pytest.mark.parametrize("seed", range(5))
def test_the_score_is_that_of_a_slow_double_loop_whatever_the_order_of_the_rows(seed):
    predictions = random_table(seed)
    labels = labels_like(predictions, seed)
    shuffled = predictions.sample(frac=1, random_state=seed)
    assert pe.challenge_loss(labels, shuffled) == pytest.approx(
        slow_loss(predictions, labels), abs=1e-9
    )


def test_one_half_everywhere_scores_the_logarithm_of_two():
    predictions = random_table(0)
    labels = labels_like(predictions, 0)
    predictions[list(pe.LABELS)] = 0.5
    assert pe.challenge_loss(labels, predictions) == pytest.approx(math.log(2), abs=1e-12)


def test_an_image_that_two_joined_tables_have_is_named():
    once = table_of([(dict.fromkeys(EXAM_LABELS, 0.3), [0.1, 0.2])])
    twice = pandas.concat([once, once])
    with pytest.raises(
        ValueError, match=r"2 images occur twice in the table\n  found: 0.0\n  fix:"
    ):
        pe.make_consistent(twice)


def test_images_of_a_negative_exam_cost_nothing():
    labels = table_of(
        [
            ({"negative_exam_for_pe": 1.0}, [0.0, 0.0]),
            ({"rv_lv_ratio_lt_1": 1.0, "central_pe": 1.0}, [1.0]),
        ]
    )
    one, other = labels.copy(), labels.copy()
    other.loc[0, PRESENT] = 0.9
    assert pe.challenge_loss(labels, one) == pe.challenge_loss(labels, other)


def test_a_certain_and_wrong_answer_costs_much_and_not_infinitely_much():
    labels = table_of([({"negative_exam_for_pe": 1.0}, [0.0])])
    wrong = labels.assign(negative_exam_for_pe=0.0)
    assert 1 < pe.challenge_loss(labels, wrong) < math.inf


BAD = {
    "no column": (lambda t: t.drop(columns="central_pe"), "no column central_pe"),
    "a row is missing": (lambda t: t.iloc[1:], "1 images without a prediction, 0 without a label"),
    "an image that nobody asked for": (
        lambda t: pandas.concat([t, t.iloc[:1].assign(SOPInstanceUID="new")]),
        "0 images without a prediction, 1 without a label",
    ),
    "an image twice": (lambda t: pandas.concat([t, t.iloc[:1]]), "1 twice"),
    "no number": (lambda t: t.assign(central_pe=math.nan), "not probabilities"),
    "a logit": (lambda t: t.assign(central_pe=-0.3), "logits.sigmoid"),
    "two answers for one exam": (
        lambda t: t.assign(central_pe=[0.2] + [0.4] * (len(t) - 1)),
        "the rows of an exam have different answers for central_pe",
    ),
    "another study": (
        lambda t: t.assign(StudyInstanceUID=["other", *t.StudyInstanceUID[1:]]),
        "an image has another study in the predictions than in the labels\n  found: image 0.0",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_predictions_are_refused_with_what_was_found(what):
    spoil, says = BAD[what]
    exams = [
        (dict.fromkeys(EXAM_LABELS, 0.3), [0.1, 0.2, 0.7]),
        (dict.fromkeys(EXAM_LABELS, 0.6), [0.4]),
    ]
    predictions = table_of(exams)
    labels = labels_like(predictions, 0)
    assert pe.challenge_loss(labels, predictions) > 0
    with pytest.raises(ValueError, match=says):
        pe.challenge_loss(labels, spoil(predictions))


SWAPPED = {
    "challenge_loss": pe.challenge_loss,
    "fit_temperatures": pe.fit_temperatures,
    "calibration_table": pe.calibration_table,
    "show_calibration": pe.show_calibration,
    "position_prior": pe.position_prior,
    "show_exams": lambda labels, predictions: pe.show_exams(labels, predictions[PRESENT]),
    "show_study": lambda labels, predictions: pe.show_study(
        numpy.zeros((len(labels), 3, 8, 8), numpy.uint8), labels, "study0", predictions=predictions
    ),
    "ExamSequences": lambda labels, _: pe.ExamSequences(
        labels.assign(SeriesInstanceUID="s"), numpy.zeros((len(labels), 2)), irregular="keep"
    ),
    "auroc_table": lambda labels, predictions: auroc_table(
        labels[list(pe.LABELS)], predictions[list(pe.LABELS)]
    ),
    "show_roc": lambda labels, predictions: show_roc(labels[PRESENT], predictions[PRESENT]),
    "sensitivity_at": lambda labels, predictions: sensitivity_at(
        0.9, labels[PRESENT], predictions[PRESENT]
    ),
    "choose_predictions": lambda labels, predictions: choose_predictions(
        labels[PRESENT], predictions[PRESENT]
    ),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_predictions_in_the_place_of_labels_are_refused(name):
    predictions = random_table(0).assign(position=range(1000, 1000 + len(random_table(0))))
    labels = labels_like(predictions, 0).assign(position=predictions.position)
    SWAPPED[name](labels, predictions)
    with pytest.raises(ValueError, match="0 n?or 1"):
        SWAPPED[name](predictions, labels)


def test_tables_are_scored_and_tensors_trained_with_and_neither_is_taken_for_the_other():
    tensors = {"answers": None, "images": None}
    with pytest.raises(
        ValueError, match="scores tables, got tensors\n  fix:   for training, pe.exam_loss"
    ):
        pe.challenge_loss(tensors, tensors)
    with pytest.raises(ValueError, match="have no image_weight\n  found: answers, images"):
        pe.exam_loss(tensors | {"image_weight": None}, tensors)


FINE = {
    "negative": ({"negative_exam_for_pe": 0.9}, [0.1, 0.5]),
    "indeterminate": ({"indeterminate": 0.6}, [0.1]),
    "positive": (
        {"rv_lv_ratio_lt_1": 0.7, "central_pe": 0.8, "leftsided_pe": 0.9, "chronic_pe": 0.6},
        [0.2, 0.6],
    ),
}
BROKEN = {
    "1a": [
        ({"central_pe": 0.9}, [0.9]),
        ({"central_pe": 0.9, "rv_lv_ratio_lt_1": 0.6, "rv_lv_ratio_gte_1": 0.6}, [0.9]),
    ],
    "1b": [({"rv_lv_ratio_lt_1": 0.9}, [0.9])],
    "1c": [
        (
            {
                "rv_lv_ratio_lt_1": 0.9,
                "central_pe": 0.9,
                "chronic_pe": 0.6,
                "acute_and_chronic_pe": 0.7,
            },
            [0.1, 0.9],
        )
    ],
    "1d": [({"rv_lv_ratio_lt_1": 0.9, "central_pe": 0.9, "negative_exam_for_pe": 0.6}, [0.9])],
    "2a": [({}, [0.1]), ({"negative_exam_for_pe": 0.6, "indeterminate": 0.7}, [0.1])],
    "2b": [
        ({"negative_exam_for_pe": 0.9, "central_pe": 0.6}, [0.1]),
        ({"indeterminate": 0.9, "chronic_pe": 0.6}, [0.1]),
    ],
}


def test_consistent_exams_break_no_rule_and_stay_as_they_are():
    table = table_of(FINE.values())
    assert pe.check_consistency(table).empty
    pandas.testing.assert_frame_equal(pe.make_consistent(table), table)


@pytest.mark.parametrize(
    ("rule", "exam"), [(rule, exam) for rule, exams in BROKEN.items() for exam in exams]
)
def test_each_broken_rule_is_named_with_its_exam_and_mended(rule, exam):
    table = table_of([*FINE.values(), exam])
    found = pe.check_consistency(table)
    assert found.to_dict("records") == [
        {"StudyInstanceUID": "study3", "rule": rule, "says": RULES[rule]}
    ]
    mended = pe.make_consistent(table)
    assert pe.check_consistency(mended).empty
    pandas.testing.assert_frame_equal(mended.iloc[: -len(exam[1])], table.iloc[: -len(exam[1])])


@pytest.mark.parametrize("confident", [0.2, 1.0, 4.0])
def test_after_mending_ten_thousand_random_exams_none_breaks_a_rule(confident):
    table = random_table(7, exams=10_000 // 3 + 1, confident=confident)
    assert len(pe.check_consistency(table)) > 1000
    assert pe.check_consistency(pe.make_consistent(table)).empty


def clipped(table):
    """Mend as other solutions did: by negative_exam_for_pe alone, every answer clipped to its side."""
    table = table.copy()
    for _, rows in table.groupby("StudyInstanceUID"):
        at, one = rows.index, rows.iloc[0]
        negative = one.negative_exam_for_pe > 0.5
        for name in EXAM_LABELS:
            if name == "negative_exam_for_pe":
                table.loc[at, name] = (
                    max(one[name], 0.50001) if negative else min(one[name], 0.49999)
                )
            elif negative or name == "indeterminate":
                table.loc[at, name] = min(one[name], 0.49999)
        if negative:
            table.loc[at, PRESENT] = rows[PRESENT].clip(upper=0.49999)
            continue
        table.loc[rows[PRESENT].idxmax(), PRESENT] = max(rows[PRESENT].max(), 0.50001)
        ratios = ["rv_lv_ratio_gte_1", "rv_lv_ratio_lt_1"]
        more, less = ratios if one[ratios[0]] > one[ratios[1]] else ratios[::-1]
        table.loc[at, more], table.loc[at, less] = max(one[more], 0.50001), min(one[less], 0.49999)
        places = ["central_pe", "rightsided_pe", "leftsided_pe"]
        top = max(places, key=lambda name: one[name])
        table.loc[at, top] = max(one[top], 0.50001)
        ages = ["chronic_pe", "acute_and_chronic_pe"]
        if all(one[name] > 0.5 for name in ages):
            table.loc[at, min(ages, key=lambda name: one[name])] = 0.49999
    return table


def expected_cost(table, version):
    """Return the score's expected cost of a version if the table's own probabilities were the truth, exam by exam."""
    p, said = (one[[*EXAM_LABELS, PRESENT]] for one in (table, version.loc[table.index]))
    costs = (-p * numpy.log(said) - (1 - p) * numpy.log(1 - said)).groupby(table.StudyInstanceUID)
    of_exams = sum(EXAM_WEIGHTS[name] * costs[name].first() for name in EXAM_LABELS)
    share = p[PRESENT].groupby(table.StudyInstanceUID).mean()
    return (of_exams + IMAGE_WEIGHT * share * costs[PRESENT].sum()).to_dict()


def test_mending_never_costs_more_than_clipping():
    table = random_table(3, exams=120)
    assert pe.check_consistency(clipped(table)).empty
    broken = set(pe.check_consistency(table).StudyInstanceUID)
    ours, theirs = (
        expected_cost(table, pe.make_consistent(table)),
        expected_cost(table, clipped(table)),
    )
    assert broken
    assert all(ours[study] <= theirs[study] + 1e-9 for study in broken)


def test_no_other_choice_of_sides_costs_less():
    """Each of the 2^10 ways to say yes and no, for exams of one image, all in one table."""
    table = random_table(11, exams=6).drop_duplicates("StudyInstanceUID").reset_index(drop=True)
    ours = expected_cost(table, pe.make_consistent(table))
    sides = numpy.array(list(itertools.product((False, True), repeat=len(pe.LABELS))))
    number = numpy.repeat(numpy.arange(len(sides)), len(table))
    before = pandas.concat([table] * len(sides), ignore_index=True)
    for name in ("StudyInstanceUID", "SOPInstanceUID"):
        before[name] += pandas.Series(number).map("/{}".format)
    every = before.copy()
    for yes, name in zip(sides[number].T, pe.LABELS, strict=True):
        every[name] = numpy.where(
            yes, before[name].clip(lower=0.5 + 1e-6), before[name].clip(upper=0.5)
        )
    inconsistent = set(pe.check_consistency(every).StudyInstanceUID)
    best = dict.fromkeys(ours, math.inf)
    for version, cost in expected_cost(before, every).items():
        if version not in inconsistent:
            study = version.partition("/")[0]
            best[study] = min(best[study], cost)
    assert ours == pytest.approx(best, abs=1e-9)
