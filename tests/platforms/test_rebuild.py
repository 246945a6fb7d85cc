import pytest
from platforms.rebuild import HERE, PYTHON, changes

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


def test_every_platform_has_a_list_of_its_packages_that_names_its_python():
    lists = {path.name.removesuffix("-tpu.txt"): path for path in HERE.glob("*-tpu.txt")}
    assert lists.keys() == PYTHON.keys()
    for name, path in lists.items():
        assert f"Python {PYTHON[name]}." in path.read_text().splitlines()[0]
