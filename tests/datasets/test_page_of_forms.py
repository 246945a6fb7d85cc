"""The code of the page "Which form do my data have?" runs in one session, on folders as it names them."""

import re
from pathlib import Path

import pandas
import pytest

np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from helpers.one_process import in_this_process  # noqa: E402
from helpers.pictures import folder_of  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "data_forms.md"
FILES = {
    "photos": ["cat/1.jpg", "cat/2.jpg", "dog/1.png"],
    "chest": [f"{part}/{kind}/1.png" for part in ("train", "test") for kind in ("a", "b")],
    "breast": [f"{patient}/{kind}/1.png" for patient in (8863, 8864) for kind in "01"],
    "cars": ["train/1.jpg", "train/2.jpg"],
}


def test_the_code_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for folder, files in FILES.items():
        folder_of(tmp_path / folder, *files)
    Path("cars/train_masks").mkdir()
    for number in (1, 2):
        mask = Image.fromarray(np.full((16, 16), number, np.uint8))
        mask.save(f"cars/train_masks/{number}_mask.png")
    files = pandas.Series(FILES["photos"])
    table = {"file": files, "species": files.str[:3], "patient": ["p", "q", "q"]}
    pandas.DataFrame(table).to_csv("table.csv", index=False)
    session = {}
    with in_this_process():
        for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
            exec(code, session)
    assert session["plan"].classes == {"cat": 2, "dog": 1}
    assert session["test"].classes == session["train"].classes == ["a", "b"]
    assert session["packed"].has_masks
    assert capsys.readouterr().out.startswith("folder: 3 images\n")
