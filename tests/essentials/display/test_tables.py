import re

import pytest

from tpukit.essentials.display import tables


class Planets(tables.Table):
    title = "two planets"

    def rows(self):
        return [("Mars", "2 moons"), ("Venus", "<none>")]


def test_a_table_is_text_when_printed_and_html_in_a_notebook():
    assert str(Planets()) == repr(Planets()) == "two planets\n\nMars   2 moons\nVenus  <none>"
    html = Planets()._repr_html_()
    assert html.count("<tr") == 2
    assert "two planets" in html
    assert "&lt;none&gt;" in html


def test_a_table_without_a_title_or_without_rows_leaves_no_empty_lines():
    class Bare(Planets):
        title = ""

    class Empty(Planets):
        def rows(self):
            return []

    assert str(Bare()).startswith("Mars")
    assert str(Empty()) == "two planets"


def test_a_column_of_empty_cells_is_drawn():
    assert (
        tables.as_text([("ok", "", "fork"), ("failure", "", "memory")])
        == "ok         fork\nfailure    memory"
    )


def test_columns_are_aligned_and_lines_carry_no_trailing_space():
    assert tables.as_text([("ok", "fork", "possible"), ("warning", "/dev/shm", "")]) == (
        "ok       fork      possible\nwarning  /dev/shm"
    )


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("word " * 200, "many words"),
        ("x" * 500, "one word longer than the terminal"),
        ("first\n" + "y " * 300 + "\nlast", "line breaks of its own"),
        ("a\tb\x1b[31mred\x07", "tabs and terminal escapes"),
        ("", "nothing"),
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_no_cell_breaks_the_table(cell, reason, position):
    row = ["ok", "name", "a fact"]
    row[position] = cell
    lines = tables.as_text([row, ("warning", "second", "row")], width=100).splitlines()
    assert max(map(len, lines)) <= 100, reason
    assert "".join(lines).isprintable(), reason
    letters = re.sub(r"\W", "", cell.replace("\x1b", "").replace("\x07", ""))
    if position == 2:
        assert re.sub(r"\W", "", "".join(lines)).startswith("okname" + letters), (
            f"{reason}: something was lost"
        )


@pytest.mark.parametrize("width", range(24, 60, 3))
def test_options_and_chip_names_are_not_broken_at_their_hyphens(width):
    text = tables.as_text(
        [("fix", "pip install --no-deps torch_xla==2.9.0 on a v5e-1 of your own")], width=width
    )
    assert {"--no-deps", "v5e-1"} <= set(text.split())


def test_no_rows_are_no_text():
    assert tables.as_text([]) == ""


def test_html_escapes_what_processes_and_variables_bring():
    html = tables.as_html([("ok", "<script>alert(1)</script> & `rm <b>`")], title="<i>")
    assert "<script>" not in html
    assert "<i>" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; <code" in html
    assert ">rm &lt;b&gt;</code>" in html


def test_html_sets_no_background_and_no_text_colour():
    html = tables.as_html([("ok", "x"), ("warning", "y"), ("failure", "z")])
    assert set(re.findall(r"background:([^;\"]+)", html)) == {"none"}
    words = re.sub(
        r'<span style="color:#\w+">&#9679;</span>', "", html
    )  # the dots are coloured, nothing else
    assert set(re.findall(r"[;\"]color:([^;\"]+)", words)) == {"inherit"}


@pytest.mark.parametrize("state", ["ok", "warning", "failure"])
@pytest.mark.parametrize("page", ["#ffffff", "#111111"])
def test_a_dot_stands_out_from_the_page(state, page):
    (dot,) = re.findall(r'color:(#\w{6})">', tables.as_html([(state,)]))
    light, dark = sorted((luminance(dot), luminance(page)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 3  # what WCAG 2.1 (1.4.11) asks of graphics


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("file", "files"),
        ("class", "classes"),
        ("study", "studies"),
        ("X-ray", "X-rays"),
        ("patch", "patches"),
        ("box", "boxes"),
    ],
)
def test_a_noun_of_a_user_has_its_plural(word, words):
    assert tables.plural(word) == words
