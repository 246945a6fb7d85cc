"""Exams as sequences: the order of the body, as many parts for all, and back to an answer for every slice."""

import math

import pytest

numpy = pytest.importorskip("numpy")
pandas = pytest.importorskip("pandas")
torch = pytest.importorskip("torch")

from tpukit import pe  # noqa: E402
from tpukit.pe.challenge import IMAGE_WEIGHT  # noqa: E402
from tpukit.pe.labels import EXAM_LABELS  # noqa: E402

PRESENT = "pe_present_on_image"


def made_up(exams=((6, 2), (9, 0), (4, 4)), seed=0):
    """Make a shuffled table of exams of (slices, positive slices), and a feature that is the position."""
    random = numpy.random.default_rng(seed)
    rows = []
    for number, (slices, positive) in enumerate(exams):
        answers = dict.fromkeys(EXAM_LABELS, 0)
        for name in ("rv_lv_ratio_lt_1", "leftsided_pe") if positive else ("negative_exam_for_pe",):
            answers[name] = 1
        for k in range(slices):
            ids = {"StudyInstanceUID": f"s{number}", "SeriesInstanceUID": f"s{number}.1"}
            ids |= {"SOPInstanceUID": f"s{number}.1.{k}", "position": 2.5 * k - 40}
            rows.append(ids | {PRESENT: int(k < positive)} | answers)
    table = pandas.DataFrame(rows).sample(frac=1, random_state=seed).reset_index(drop=True)
    return table, numpy.stack([table.position, random.normal(size=len(table))], axis=1)


@pytest.mark.parametrize("slices", [4, 5, 12])
def test_slices_are_in_the_order_of_the_body_whatever_the_order_of_the_table(slices):
    table, features = made_up()
    exams = pe.ExamSequences(table, torch.from_numpy(features), slices=slices)
    assert len(exams) == len(list(exams)) == 3  # a loop ends after the last one
    for number, (count, positive) in enumerate(((6, 2), (9, 0), (4, 4))):
        sequence, targets = exams[number]
        assert sequence.shape == (slices, 4)
        rows = table[table.StudyInstanceUID == exams.studies[number]].sort_values("position")
        if count < slices:  # each slice in several parts
            of_part = [[one * count // slices] for one in range(slices)]
        else:
            of_part = [
                [k for k in range(count) if k * slices // count == one] for one in range(slices)
            ]
        along = rows.position.to_numpy()
        assert sequence[:, 0].tolist() == pytest.approx([along[one].mean() for one in of_part]), (
            "the mean of each part"
        )
        assert sequence[:, 2].tolist() == pytest.approx([along[one].max() for one in of_part]), (
            "and its maximum"
        )
        present = rows[PRESENT].to_numpy()
        assert targets["images"].tolist() == pytest.approx([present[one].mean() for one in of_part])
        assert targets["image_weight"].sum().item() == pytest.approx(IMAGE_WEIGHT * positive), (
            "all images of the exam"
        )
        assert targets["answers"].tolist() == rows[list(EXAM_LABELS)].iloc[0].tolist()


@pytest.mark.parametrize("count", [3, 96, 97, 250, 600])
def test_every_slice_has_its_say_and_its_answer(count):
    table, _ = made_up([(count, 2)])
    features = numpy.zeros((count, 1))
    exams = pe.ExamSequences(table, features)
    heard = []
    for row in range(count):
        features[row] = 1
        heard.append(bool(exams[0][0].any()))
        features[row] = 0
    assert all(heard), f"{count - sum(heard)} slices are never read"
    # An embolus of two slices stays: what one slice shows is the maximum of its part, not a share of it.
    features[table[PRESENT] == 1] = 1
    sequence, targets = exams[0]
    assert sequence[:, 1].max() == 1
    assert (targets["images"] > 0).any()
    answered = exams.to_slices(targets["images"][None])
    assert (answered[table[PRESENT] == 1] > 0).all(), "the answer of its own part"


@pytest.mark.parametrize("slices", [3, 8])
def test_the_loss_of_tensors_is_the_score_of_tables(slices):
    table, features = made_up([(8, 3), (11, 0), (8, 8), (30, 1)])
    exams = pe.ExamSequences(table, features, slices=slices)
    random = torch.Generator().manual_seed(0)
    logits = {
        name: torch.randn(4, count, generator=random)
        for name, count in (("answers", 9), ("images", slices))
    }
    _, targets = torch.utils.data.default_collate([exams[number] for number in range(4)])
    score = pe.challenge_loss(table, exams.table(logits))
    assert pe.exam_loss(logits, targets).item() == pytest.approx(score, abs=1e-6)
    half = {name: torch.zeros_like(value) for name, value in logits.items()}
    assert pe.exam_loss(half, targets).item() == pytest.approx(math.log(2), abs=1e-6)


def test_answers_come_back_for_every_row_of_the_table_in_its_order():
    table, features = made_up()
    exams = pe.ExamSequences(table, features, slices=90)
    # Logits that say where a slice lies: each slice must find its own place, the middle of its parts.
    along = (torch.arange(90.0) + 0.5).expand(3, 90) / 90
    answers = exams.table({"answers": torch.arange(27.0).reshape(3, 9) / 9, "images": along})
    assert answers.SOPInstanceUID.tolist() == table.SOPInstanceUID.tolist()
    steps = table.assign(number=(table.position + 40) / 2.5)
    height = steps.groupby("StudyInstanceUID").number.transform(lambda one: (one + 0.5) / len(one))
    assert numpy.allclose(numpy.log(answers[PRESENT] / (1 - answers[PRESENT])), height, atol=0.006)
    assert answers.groupby("StudyInstanceUID").negative_exam_for_pe.nunique().eq(1).all()
    assert pe.challenge_loss(table, answers) > 0


def drop_one(table):
    middle = table.index[(table.StudyInstanceUID == "s1") & (table.position == 2.5 * 4 - 40)]
    return table.drop(middle)


def change(column, value, rows=slice(0, 1)):
    def changed(table):
        other = table.astype({column: object})
        other.loc[other.index[rows], column] = value
        return other

    return changed


def equal(table):
    return change("position", -37.5)(table.sort_values(["StudyInstanceUID", "position"]))


BAD = {
    "a slice is missing": (
        drop_one,
        r"1 exams lack a slice\n  found: s1.1.3 at -32.5 and s1.1.5 at -27.5",
    ),
    "two series": (
        change("SeriesInstanceUID", "other"),
        "1 exams have several series\n  found: .*other",
    ),
    "equal positions": (
        equal,
        r"1 exams have slices at equal positions\n  found: s0.1.\d at -37.5 and s0.1.\d at",
    ),
    "a label is missing": (change("central_pe", math.nan), "central_pe is missing in 1 rows"),
    "no column": (lambda table: table.drop(columns="central_pe"), "no column central_pe"),
    "no position": (change("position", math.nan), "position is missing in 1 rows"),
    "two answers": (change("central_pe", 1), "different answers for an exam label"),
}


@pytest.mark.parametrize("bad", BAD)
def test_an_exam_that_is_none_is_refused_with_what_is_wrong(bad):
    change, message = BAD[bad]
    table, _ = made_up()
    table = change(table)
    with pytest.raises(ValueError, match=message) as refused:
        pe.ExamSequences(table, numpy.zeros((len(table), 2)))
    assert "\n  fix:   " in str(refused.value)


@pytest.mark.parametrize("bad", ["a slice is missing", "two series", "equal positions"])
def test_an_irregular_exam_may_be_kept_as_it_must_be_in_a_submission(bad, capsys):
    table = BAD[bad][0](made_up()[0])
    exams = pe.ExamSequences(table, numpy.zeros((len(table), 2)), irregular="keep")
    assert len(exams) == 3
    assert "used unchanged" in capsys.readouterr().out
    with pytest.raises(ValueError, match='irregular must be "raise" or "keep"'):
        pe.ExamSequences(table, numpy.zeros((len(table), 2)), irregular="drop")


def test_features_of_other_rows_are_refused():
    table, features = made_up()
    with pytest.raises(ValueError, match=r"19 rows of the table, got \(18, 2\)"):
        pe.ExamSequences(table, features[1:])


def test_features_that_still_have_gradients_are_read():
    table, features = made_up()
    exams = pe.ExamSequences(table, torch.tensor(features, requires_grad=True))
    assert torch.equal(exams[0][0], pe.ExamSequences(table, features)[0][0])


def test_exams_without_labels_are_sequences_alone():
    table, features = made_up()
    exams = pe.ExamSequences(table.drop(columns=list(pe.LABELS)), features)
    assert exams[1].shape == (96, 4)


def test_an_exam_of_one_slice_is_that_slice_everywhere():
    table, features = made_up([(1, 1), (3, 0)])
    exams = pe.ExamSequences(table, features, slices=5)
    assert exams[0][0][:, 0].tolist() == [-40] * 5
    answers = exams.table({"answers": torch.zeros(2, 9), "images": torch.full((2, 5), 2.0)})
    assert answers[PRESENT].tolist() == pytest.approx([1 / (1 + math.exp(-2))] * 4)


def test_slice_features_are_what_the_last_layer_of_the_resnet_gets(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    network = pe.resnet34().eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        seen = pe.SliceFeatures(network).eval()(images)
        assert seen["features"].shape == (2, 512)
        assert torch.allclose(seen["logits"], network(images), atol=1e-5)
        assert torch.allclose(network.fc(seen["features"]), seen["logits"])


def test_the_network_learns_what_no_slice_says_alone():
    """One exam in two has its two marks the other way round: every slice alone is the same in both kinds."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    first, second = torch.randint(3, 8, (2, 64), generator=random)
    second = second + 8
    turned = torch.arange(64) % 2 == 1
    features = torch.zeros(64, 16, 4)
    features[torch.arange(64), torch.where(turned, second, first), 0] = 4
    features[torch.arange(64), torch.where(turned, first, second), 1] = 4
    targets = {
        "answers": torch.zeros(64, 9),
        "images": features[..., 0] / 4,
        "image_weight": torch.full((64, 16), 0.005),
    }
    targets["answers"][:, 0] = turned.float()
    network = pe.ExamNetwork(2, hidden=16, dropout=0.0)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        outputs = network(features)
        pe.exam_loss(outputs, targets).backward()
        optimizer.step()
    assert ((outputs["answers"][:, 0] > 0) == turned).all()
    assert ((outputs["images"] > 0) == (targets["images"] > 0.5)).float().mean() > 0.97
    assert torch.allclose(outputs["attention"].sum(1), torch.ones(64))


def test_weights_of_a_network_that_read_fewer_numbers_are_refused_by_name():
    weights = pe.ExamNetwork(3).state_dict()
    fewer = ("enter.0.weight", "enter.0.bias", "enter.2.weight")
    old = {name: value[..., :3] if name in fewer else value for name, value in weights.items()}
    with pytest.raises(
        ValueError,
        match=r"with 3 inputs per part, but this network has 6\n.*\n  fix:   train the",
    ):
        pe.ExamNetwork(3).load_state_dict(old)
    network = pe.ExamNetwork(3)
    network.load_state_dict(pe.ExamNetwork(3).state_dict())


def test_the_prior_is_the_frequency_at_each_height_and_of_each_label():
    table, _ = made_up([(10, 3)] * 3 + [(10, 0)] * 1)
    unseen, _ = made_up([(20, 0)], seed=1)
    said = pe.position_prior(table, unseen, bins=10)
    order = unseen.position.argsort()
    assert said[PRESENT].iloc[order[:6]].between(0.6, 0.75).all()
    assert said[PRESENT].iloc[order[8:]].lt(0.06).all()
    assert said.leftsided_pe.tolist() == pytest.approx([3.5 / 5] * 20)
    assert said.central_pe.tolist() == pytest.approx([0.5 / 5] * 20)  # never seen is not impossible


def test_pooling_is_the_mean_of_an_exam_and_leaves_images_alone():
    table, _ = made_up()
    probabilities = numpy.random.default_rng(0).random((len(table), 10))
    said = pe.pool_slices(table, probabilities)
    assert (said[PRESENT] == probabilities[:, 0]).all()
    one = (table.StudyInstanceUID == "s1").to_numpy()
    assert said.central_pe[one].tolist() == pytest.approx(
        [probabilities[one, pe.LABELS.index("central_pe")].mean()] * 9
    )
