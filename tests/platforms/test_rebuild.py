import pytest
from platforms.rebuild import changes

IMAGE = {"torch": "2.9.0", "numpy": "2.1.3"}


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (IMAGE, {}),
        (IMAGE | {"pytest": "9.0.0"}, {}),
        (IMAGE | {"numpy": "2.4.6"}, {"numpy": "2.1.3 -> 2.4.6"}),
        ({"numpy": "2.1.3"}, {"torch": "2.9.0 -> gone"}),
    ],
    ids=["the same", "something added", "another version", "something gone"],
)
def test_what_an_image_had_and_has_no_more_is_a_change(after, expected):
    assert changes(IMAGE, after) == expected
