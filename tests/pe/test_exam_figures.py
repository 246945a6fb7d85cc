import numpy as np
import pandas
import pytest
import torch

from tpukit import pe


def a_table(positives):
    """Return a table of exams of ten slices in no order, each with so many positive slices, and probabilities."""
    rows = [
        (f"{number:012x}", place, int(place < count))
        for number, count in enumerate(positives)
        for place in range(10)
    ]
    table = pandas.DataFrame(rows, columns=["StudyInstanceUID", "position", "pe_present_on_image"])
    table = table.sample(frac=1, random_state=0)
    return table, (0.1 + 0.8 * table.pe_present_on_image + 0.001 * table.position).to_numpy()


def test_half_of_the_panels_are_exams_with_an_embolus_from_many_slices_to_few(tmp_path):
    table, chances = a_table([0, 1, 2, 3, 4, 5, 6, 0, 0, 0, 0, 0])
    figure = pe.show_exams(table, torch.tensor(chances))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title.split(": ")[1] for title in titles] == [
        *(f"{count} of 10 slices" for count in (6, 4, 3, 1)),
        *["no embolus"] * 4,
    ]
    line = figure.axes[0].get_lines()[0]
    assert list(line.get_xdata()) == list(range(10))
    assert np.allclose(line.get_ydata()[:6], 0.9, atol=0.01)
    assert len(figure.axes[0].patches) == 6
    assert figure.alt.startswith(
        "The probability of an embolus along the body in 8 exams, 4 of them with an embolus."
    )
    figure.savefig(tmp_path / "exams.png")


@pytest.mark.parametrize(
    ("positives", "panels"), [([0, 0, 0], 3), ([1, 2], 2), ([3, 0], 2), ([5] * 9, 8)]
)
def test_what_there_is_is_drawn(positives, panels):
    figure = pe.show_exams(*a_table(positives))
    assert sum(axes.get_visible() for axes in figure.axes) == panels


def test_exams_of_a_hospital_have_different_titles():
    table, chances = a_table([2, 0, 0])
    table["StudyInstanceUID"] = "1.2.840.113619.2." + table.StudyInstanceUID.str[-1:]
    figure = pe.show_exams(table, chances)
    titles = [axes.get_title(loc="left").partition(":")[0] for axes in figure.axes]
    assert sorted(titles) == ["19.2.0", "19.2.1", "19.2.2"]


@pytest.mark.parametrize("exams", [1, 2, 4])
def test_what_is_below_few_panels_is_not_cut_off(exams):
    table, chances = a_table([3] * exams)
    figure = pe.show_exams(table, chances, consistent=chances, attention=chances)
    figure.draw_without_rendering()
    (below,) = (text for text in figure.texts if "orange" in text.get_text())
    box = below.get_window_extent()
    assert box.x0 > 0
    assert box.x1 < figure.bbox.width


def test_a_table_without_positions_or_with_other_probabilities_is_refused():
    table, chances = a_table([1, 0])
    with pytest.raises(ValueError, match="no column position\n  found: .*\n  fix:"):
        pe.show_exams(table.drop(columns="position"), chances)
    with pytest.raises(ValueError, match=r"each of the 20 rows, got \(5,\)"):
        pe.show_exams(table, chances[:5])
    with pytest.raises(ValueError, match="show_exams has no rows"):
        pe.show_exams(table[:0], chances[:0])


def test_a_figure_has_at_least_one_exam():
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        pe.show_exams(*a_table([1, 0]), limit=0)


def test_attention_is_drawn_and_how_much_of_it_lies_on_an_embolus_is_said(tmp_path):
    table, chances = a_table([4, 0])
    weights = np.where(table.pe_present_on_image == 1, 3.0, 1.0)  # 12 of 18 lie on the embolus
    figure = pe.show_exams(table, chances, attention=weights)
    assert figure.axes[0].get_title(loc="right") == "67 %"
    assert figure.axes[1].get_title(loc="right") == ""
    assert figure.alt.endswith("Attention on slices with an embolus: 000000 67 %.")
    (filled,) = figure.axes[0].collections
    heights = [
        max(y for x, y in filled.get_paths()[0].vertices if abs(x - place) <= 0.5)
        for place in (2, 8)
    ]
    assert heights == pytest.approx([1, 1 / 3])
    figure.savefig(tmp_path / "exams.png")
    with pytest.raises(ValueError, match=r"each of the 20 rows, got -1\n"):
        pe.show_exams(table, chances, attention=-weights / 3)
    with pytest.raises(ValueError, match=r"attention must .* got shape \(0,\)"):
        pe.show_exams(table, chances, attention=[])


def test_what_the_rules_leave_is_a_second_line_beside_what_the_network_says():
    table, chances = a_table([4, 0])
    figure = pe.show_exams(table, chances, consistent=chances.clip(max=0.5))
    given, left = figure.axes[0].get_lines()[:2]
    assert given.get_ydata()[:4] == pytest.approx([0.9, 0.901, 0.902, 0.903])
    assert left.get_ydata()[:4] == pytest.approx([0.5] * 4)
    assert "dashed: without contradictions" in " ".join(figure.get_supxlabel().split())
    assert "dashed" not in pe.show_exams(table, chances).get_supxlabel()
    with pytest.raises(ValueError, match=r"each of the 20 rows, got \(3,\)"):
        pe.show_exams(table, chances, consistent=chances[:3])


def test_positions_in_millimetres_are_counted():
    table, chances = a_table([4, 0])
    figure = pe.show_exams(table.assign(position=table.position * 1.25 - 300.0), chances)
    line = figure.axes[0].get_lines()[0]
    assert list(line.get_xdata()) == list(range(10))
    assert np.allclose(line.get_ydata()[:4], 0.9, atol=0.01)


@pytest.mark.parametrize("values", [[0.3, 2.0], [float("nan"), 0.5]])
def test_logits_and_numbers_that_are_none_are_no_probabilities(values):
    import pandas

    table = pandas.DataFrame(
        {"StudyInstanceUID": ["a", "a"], "position": [0, 1], "pe_present_on_image": [0, 1]}
    )
    with pytest.raises(ValueError, match="probabilities|nan"):
        pe.show_exams(table, values)
    with pytest.raises(ValueError, match="probabilities|nan"):
        pe.show_exams(table, [0.3, 0.5], consistent=values)
