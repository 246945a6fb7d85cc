"""The challenge's rules of consistency between the answers to an exam.

Source: the hosts' own check of submissions (Kaggle, competition discussion 183473).
"""

# Groups of labels in the competition's rules.
RATIOS = ("rv_lv_ratio_gte_1", "rv_lv_ratio_lt_1")
LOCATIONS = ("central_pe", "rightsided_pe", "leftsided_pe")
AGES = ("chronic_pe", "acute_and_chronic_pe")
NO_EMBOLUS = ("indeterminate", "negative_exam_for_pe")
RULES = {
    "1a": "with a positive image: exactly one of rv_lv_ratio_gte_1 and rv_lv_ratio_lt_1",
    "1b": "with a positive image: at least one of central_pe, rightsided_pe and leftsided_pe",
    "1c": "with a positive image: not both of chronic_pe and acute_and_chronic_pe",
    "1d": "with a positive image: neither indeterminate nor negative_exam_for_pe",
    "2a": "without a positive image: exactly one of indeterminate and negative_exam_for_pe",
    "2b": "without a positive image: no ratio, no location, no chronic_pe, no acute_and_chronic_pe",
}


def broken_rules(yes, positive) -> dict:
    """Return, for each rule of `RULES`, whether each exam breaks it, (E,) bool.

    Args:
        yes: a mapping or DataFrame from each label of `labels.EXAM_LABELS` to (E,) bool, True if
            the answer is yes.
        positive: (E,) bool, True if the exam has a positive image.
    """

    def how_many(names):
        return sum(yes[name].astype(int) for name in names)

    return {
        "1a": positive & (how_many(RATIOS) != 1),
        "1b": positive & (how_many(LOCATIONS) == 0),
        "1c": positive & (how_many(AGES) == 2),
        "1d": positive & (how_many(NO_EMBOLUS) > 0),
        "2a": ~positive & (how_many(NO_EMBOLUS) != 1),
        "2b": ~positive & (how_many(RATIOS + LOCATIONS + AGES) > 0),
    }
