"""pe.show_study: the slices of one exam in the order of the body, and everything that is wrong with an exam said."""

import base64
import io
import re

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import tpukit
from tpukit import pe

COUNT = 15


def an_exam(slices=COUNT, study="a", series="s", order_seed=0):
    """Return labels in no order, and images whose three windows are known by their greys: 10 x slice + 1, 2, 3."""
    labels = pd.DataFrame(
        {
            "StudyInstanceUID": study,
            "SeriesInstanceUID": series,
            "SOPInstanceUID": [f"{study}{series}{place}" for place in range(slices)],
            "position": range(slices),
            "pe_present_on_image": [int(4 <= place < 8) for place in range(slices)],
            "qa_motion": 1,
            "qa_contrast": 0,
            "leftsided_pe": 1,
            "rightsided_pe": 0,
        }
    ).sample(frac=1, random_state=order_seed)
    greys = 10 * labels.position.to_numpy()[:, None] + [20, 40, 60]
    images = np.broadcast_to(greys[:, :, None, None], (slices, 3, 32, 32)).astype(np.uint8)
    return labels.reset_index(drop=True), images


def predicted(labels, **columns):
    return pd.DataFrame(
        {"SOPInstanceUID": labels.SOPInstanceUID, "pe_present_on_image": labels.position / 20}
        | columns
    )


def decoded(page):
    """Return (N, 3) the greys of the three windows of every slice."""
    found = re.findall(r"<img src=\"data:image/jpeg;base64,([^\"]+)\"", page)
    images = [np.array(Image.open(io.BytesIO(base64.b64decode(one))), float) for one in found]
    return np.array([[part.mean() for part in np.split(image, 3, axis=1)] for image in images])


def test_slices_are_in_the_order_of_the_body_with_their_three_windows():
    labels, images = an_exam()
    page = pe.show_study(images, labels, "a")._repr_html_()
    expected = 10 * np.arange(COUNT)[:, None] + [20, 40, 60]
    assert decoded(page) == pytest.approx(expected, abs=2)
    assert [page.count(f">{window}<") for window in ("lung", "embolism", "mediastinum")] == [
        1,
        1,
        1,
    ]
    assert page.count("display:block;cursor") == 12, "a montage of twelve where no script runs"
    assert 'alt="slice 5 of 15, embolus on this image"' in page
    assert ">motion<" in page
    assert "poor contrast" not in page
    assert "Not for clinical use" in page


def test_sides_the_scale_and_the_windows_are_shown():
    labels, images = an_exam()
    shown = pe.show_study(images, labels, "a", field_of_view=400)
    page = shown._repr_html_()
    assert (page.count(">R<"), page.count(">L<"), page.count(">50 mm<")) == (3, 3, 1)
    assert "width:4.17%" in page, "50 of 400 mm, of one of three views"
    assert "level 100, width 700 HU" in page
    figure = shown.montage()
    first = figure.axes[0]
    assert [text.get_text() for text in first.texts] == ["R", "L"]
    start, end = first.lines[0].get_xdata()
    assert end - start == pytest.approx(50 / 400)
    note = " ".join(text.get_text() for text in figure.texts)
    assert "embolism level 100, width 700 HU" in note
    assert "white bar: 50 mm" in note
    plain = pe.show_study(
        images, labels, "a", upright=False, views=("slice below", "slice", "above")
    )
    page = plain._repr_html_()
    assert not any(text in page for text in (">R<", ">L<", "mm<", "HU"))
    with pytest.raises(ValueError, match="width of an image in mm"):
        pe.show_study(images, labels, "a", field_of_view=0)


def test_a_pack_is_read_by_the_rows_of_the_table_that_was_packed(tmp_path):
    labels, images = an_exam()
    other, _ = an_exam(study="b")
    both = pd.concat([other, labels], ignore_index=True)
    for number, image in enumerate(np.concatenate([0 * images, images])):
        Image.fromarray(np.moveaxis(image, 0, -1)).save(tmp_path / f"{number}.png")
    both["path"] = [str(tmp_path / f"{number}.png") for number in range(len(both))]
    records = tpukit.pack(both, tmp_path / "records", progress="off")
    assert (np.diff(records.rows) < 0).any(), "a pack of a table is shuffled"
    page = pe.show_study(
        tpukit.PackedImages(tmp_path / "records", size=32), both, "a"
    )._repr_html_()
    assert decoded(page) == pytest.approx(10 * np.arange(COUNT)[:, None] + [20, 40, 60], abs=2)
    with pytest.raises(ValueError, match="a table of 30 rows or more, but the labels have 15"):
        pe.show_study(records, labels, "a")


def test_the_slider_starts_at_the_highest_probability_and_a_button_goes_there():
    labels, images = an_exam()
    said = predicted(labels, leftsided_pe=0.75, attention=labels.position.eq(3) * 2.0).sample(
        frac=1, random_state=1
    )
    page = pe.show_study(images, labels, "a", predictions=said)._repr_html_()
    assert 'data-slice="14"' in page
    assert 'value="14.5"' in page, "the middle of the last"
    assert "slice 8 of 15, probability of an embolus 0.35, embolus on this image" in page
    assert "&#9679; embolus on the left</span><span>0.75<" in page
    assert "&#9675; embolus on the right</span><span><" in page, (
        "true or not is shown without an answer, too"
    )
    (path,) = re.findall(r"<path d='(M0\.5[^']+)'", page)
    heights = [1 - float(height) for height in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]
    assert heights == pytest.approx(np.arange(COUNT) / 20, abs=1e-3)
    assert "M3 1V0.000H4V1Z" in page, "attention to its own maximum"


def test_the_montage_has_twelve_slices_and_the_highest_among_them(tmp_path):
    labels, images = an_exam(60)
    said = predicted(labels)
    said.loc[labels.position == 31, "pe_present_on_image"] = 1.0
    said.pe_present_on_image = said.pe_present_on_image.clip(0, 0.9).where(
        labels.position != 31, 1.0
    )
    figure = pe.show_study(images, labels, "a", predictions=said).montage()
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert len(titles) == 12
    assert "slice 32" in titles
    at = titles.index("slice 32")
    assert figure.axes[at].images[0].get_array().mean() == pytest.approx((10 * 31 + 40) % 256)
    assert "slice 32 of 60, probability of an embolus 1.00" in figure.alt
    figure.savefig(tmp_path / "montage.png")


@pytest.mark.parametrize("at", [0, 37, 100, 299])
def test_of_a_long_exam_the_surest_slice_and_every_embolus_are_shown_under_their_own_numbers(at):
    labels, images = an_exam(300)
    labels = labels.assign(pe_present_on_image=labels.position.isin([at, 211]).astype(int))
    said = predicted(labels).assign(pe_present_on_image=0.03)
    said.loc[labels.position == at, "pe_present_on_image"] = 0.97
    shown = pe.show_study(images[:, :, :8, :8], labels, "a", predictions=said, limit=20)
    page = shown._repr_html_()
    surest = shown.facts[shown.jump]
    assert (surest.number, surest.probability) == (at + 1, 0.97)
    assert [shown.facts[place].number for place in shown.marked] == sorted([at + 1, 212])
    assert 20 <= len(decoded(page)) <= 22
    assert (
        f"the slider takes {len(shown.facts)} of 300: the highest of 20 stretches, and all with an embolus"
        in page
    )
    assert f"slice {at + 1} of 300, probability of an embolus 0.97, embolus on this image" in page
    assert f'<div style="font-size:11px">{at + 1}</div>' in page
    assert decoded(page)[shown.jump] == pytest.approx(
        (10 * at + np.array([20, 40, 60])) % 256, abs=2
    )
    assert {f"slice {at + 1}", "slice 212"} <= {
        axes.get_title(loc="left") for axes in shown.montage().axes
    }
    still = re.findall(r'display:block;cursor.*?font-size:11px">(\d+)<', page)
    assert {str(at + 1), "212"} <= set(still), "where no script runs"


def test_a_long_exam_is_as_long_as_it_is_although_slices_are_left_out():
    labels, images = an_exam(300)
    labels = labels.assign(pe_present_on_image=labels.position.between(100, 129).astype(int))
    said = predicted(labels).assign(pe_present_on_image=0.03)
    shown = pe.show_study(images[:, :, :8, :8], labels, "a", predictions=said, limit=20)
    page = shown._repr_html_()
    marked = [float(wide) for wide in re.findall(r"flex:([\d.]+);background:#d1782b", page)]
    assert sum(marked) == pytest.approx(30, abs=16), (
        "a tenth of the exam, and not most of its slices here"
    )
    assert len(shown.marked) == 30 > 0.5 * len(shown.facts)
    edges = [float(edge) for edge in re.search('data-edges="([^"]+)"', page).group(1).split()]
    assert edges[-1] == shown.facts[-1].number - shown.facts[0].number + 1
    assert edges == sorted(edges)
    assert f'max="{edges[-1]:g}"' in page


def test_of_a_long_exam_of_equal_slices_the_one_that_the_rules_raise_is_shown():
    labels, images = an_exam(300)
    said = predicted(labels, consistent=0.11).assign(pe_present_on_image=0.11)
    said.loc[labels.position == 40, "consistent"] = 0.500001
    given, left = pe.show_study(
        images[:, :, :8, :8], labels, "a", predictions=said, limit=20
    ).curves
    assert max(given.values) == pytest.approx(0.11)
    assert max(left.values) == pytest.approx(0.500001)


def test_a_long_exam_of_which_nothing_is_said_is_thinned_evenly():
    labels, images = an_exam(40)
    kept = labels.drop(columns=["pe_present_on_image"])
    page = pe.show_study(images, kept, "a", limit=10)._repr_html_()
    assert [round(grey) for grey in decoded(page)[:, 0]] == pytest.approx(
        [30 + 40 * place for place in range(6)] + [14 + 40 * place for place in range(4)], abs=2
    )


def test_what_the_network_says_and_what_the_rules_leave_of_it_are_two_curves():
    labels, images = an_exam()
    said = predicted(labels, consistent=labels.position.clip(upper=10) / 20)
    shown = pe.show_study(images, labels, "a", predictions=said)
    given, left = shown.curves
    assert given.name == "predicted probability of an embolus"
    assert given.values == pytest.approx(np.arange(COUNT) / 20)
    assert left.name == "without contradictions"
    assert left.values == pytest.approx(np.arange(COUNT).clip(max=10) / 20)
    page = shown._repr_html_()
    dashed, network = (
        page.index("stroke-dasharray='4 3'"),
        page.index("stroke-width='2' stroke-linecap='round'"),
    )
    assert dashed < network, "the network's line lies above, whole where both are the same"
    assert "stroke='currentColor' stroke-width='1.5' stroke-dasharray='4 3'" in page, (
        "unlike the line of one half"
    )
    assert shown.facts[shown.jump].probability == pytest.approx(0.7)


def test_missing_slices_are_said():
    labels, images = an_exam()
    kept = ~labels.position.isin([5, 6, 10])
    page = pe.show_study(images[kept], labels[kept], "a")._repr_html_()
    assert "12 slices, from the feet to the head · 3 slices are missing between others" in page
    few = labels.position.isin([5, 6, 8])
    page = pe.show_study(images[few], labels[few], "a")._repr_html_()
    assert "3 slices, from the feet to the head · 1 slice is missing between others" in page
    page = pe.show_study(images[few], labels[few].assign(position=[5, 5, 8]), "a")._repr_html_()
    assert "3 slices, from the feet to the head · 1 slice is at the position of another one" in page
    page = pe.show_study(
        images, labels.assign(position=labels.position.clip(lower=1)), "a"
    )._repr_html_()
    assert (
        "15 slices, from the feet to the head · 1 slice is at the position of another one" in page
    )


def test_positions_that_differ_by_rounding_are_equal():
    labels, images = an_exam()
    pairs = labels.assign(position=labels.position // 2 + 0.001 * (labels.position % 2))
    page = pe.show_study(images, pairs, "a")._repr_html_()
    assert "7 slices are at the position of another one · Not for clinical use" in page


def wrong(change, images=None, **options):
    labels, pixels = an_exam()
    changed = change(labels)
    pixels = pixels if images is None else images
    return lambda: pe.show_study(
        pixels[: len(changed)], changed, options.pop("study", "a"), **options
    )


def two_series(labels):
    labels.loc[labels.position > 8, "SeriesInstanceUID"] = "t"
    return labels


def no_label(labels):
    return labels.assign(pe_present_on_image=labels.pe_present_on_image.where(labels.position != 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            wrong(lambda labels: labels, study="b"),
            "no study 'b' in the labels\n  found: 1 others, such as a",
        ),
        (
            wrong(two_series),
            "study a has 2 series, .*\n  found: [st], [st]\n  fix:   show_study.*series=",
        ),
        (wrong(two_series, series="u"), "has no series 'u'"),
        (
            wrong(no_label),
            "pe_present_on_image is missing for 1 slices of study a\n  found: image as3",
        ),
        (
            wrong(lambda labels: labels.drop(columns="position")),
            "no column position\n  found: .*\n  fix:   pe.index_images",
        ),
        (
            wrong(lambda labels: labels, predictions=predicted(an_exam()[0])[2:]),
            "2 of 15 slices .* no prediction",
        ),
        (
            wrong(
                lambda labels: labels, predictions=predicted(an_exam()[0], pe_present_on_image=3.0)
            ),
            "got 3 to 3",
        ),
        (
            wrong(lambda labels: labels, predictions=an_exam()[0][["position"]]),
            "no column SOPInstanceUID, pe_pres",
        ),
        (
            wrong(lambda labels: labels, images=np.zeros((15, 2, 8, 8), np.uint8)),
            r"got \(15, 2, 8, 8\) uint8",
        ),
        (
            wrong(lambda labels: labels, images=np.zeros((9, 3, 8, 8), np.uint8)),
            "9 images and 15 rows",
        ),
    ],
)
def test_what_is_wrong_with_an_exam_is_said(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_one_of_two_series_is_shown_when_it_is_named():
    labels, images = an_exam()
    page = pe.show_study(images, two_series(labels), "a", series="t")._repr_html_()
    assert len(decoded(page)) == 6


def test_the_notice_says_whose_the_data_is(tmp_path):
    patients = pe.notice(tmp_path)
    assert "10.1148/ryai.2021200254" in patients
    pe.phantom(tmp_path / "phantoms", studies=2, slices=2, size=32, workers=1, progress="off")
    phantoms = pe.notice(tmp_path / "phantoms")
    assert "phantoms" in phantoms
    assert "10.1148" not in phantoms
    for text in (patients, phantoms):
        assert text.startswith("Not for clinical use")
        assert text[:20] in text._repr_html_()
